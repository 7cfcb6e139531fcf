//! Products with packed matrices, and the operations on each result while it is still in registers.

use std::mem::MaybeUninit;
use std::ops::Range;

use crate::codes::{Codes, Format};
use crate::dots::Dots;
use crate::element::Element;
use crate::math;
use crate::pack::{padded_outputs, panel_len};
use crate::quantise::panel_bytes;
use crate::team::Queue;
use crate::tile::{Ahead, HALF, Kernel, MAX_BLOCK_ROWS, MAX_ROWS, NR, Outputs, Tile, tile_height};
use crate::vector::Vector;

/// The number of rows per unit of work with a panel of codes. The rows stay in the L2 cache from
/// panel to panel.
pub(crate) const BLOCK_ROWS: usize = 96;

/// Distance in bytes from a tile's operands to the data that the tile prefetches. It exceeds the
/// bytes that memory delivers during the latency of one access.
const AHEAD: usize = 4096;

/// A packed weight matrix.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, E> {
    /// Panels from [`crate::pack::pack`], or from [`crate::quantise`] if there is a format.
    pub(crate) panels: *const E,
    /// The format of quantised weights; `None` if they are not quantised.
    pub(crate) format: Option<Format>,
    /// The number of outputs, without padding.
    pub(crate) outputs: usize,
    /// The inner dimension.
    pub(crate) inputs: usize,
    /// The bias of each output, in checkpoint order; empty for none.
    pub(crate) bias: &'a [f32],
}

/// Activations: contiguous rows, each with the inputs of a matrix.
#[derive(Clone, Copy)]
pub(crate) struct Rows<E> {
    pub(crate) first: *const E,
    pub(crate) count: usize,
}

impl<E: Element> Rows<E> {
    #[inline(always)]
    fn height<K: Kernel<E>>(&self) -> usize {
        tile_height(self.count, K::ROWS)
    }

    /// The number of tiles of the rows.
    #[inline(always)]
    pub(crate) fn tiles<K: Kernel<E>>(&self) -> usize {
        self.count.div_ceil(self.height::<K>().max(1))
    }

    /// The rows of a range of tiles.
    #[inline(always)]
    pub(crate) fn of_tiles<K: Kernel<E>>(&self, tiles: Range<usize>) -> Range<usize> {
        let height = self.height::<K>();
        (tiles.start * height).min(self.count)..(tiles.end * height).min(self.count)
    }
}

/// Rows in the order that tiles read: see [`Kernel::arrange`].
#[derive(Clone, Copy)]
pub(crate) struct Arranged<N> {
    numbers: *const N,
    count: usize,
    height: usize,
}

impl<N: Copy> Arranged<N> {
    /// The rows of one product, arranged from `numbers` on in tiles of the height that
    /// [`tile_height`] returns.
    #[inline(always)]
    pub(crate) fn of<E: Element, K: Kernel<E, Number = N>>(
        numbers: *const N,
        count: usize,
    ) -> Self {
        Self { numbers, count, height: tile_height(count, K::ROWS) }
    }

    /// The number of rows of each block but the last.
    #[inline(always)]
    fn block<E: Element, K: Kernel<E, Number = N>>(&self) -> usize {
        block_of::<E, K>(self.height)
    }
}

/// The number of rows of a block, a multiple of the tile height.
#[inline(always)]
pub(crate) fn block_of<E: Element, K: Kernel<E>>(height: usize) -> usize {
    (K::BLOCK_ROWS / height.max(1) * height).max(1)
}

/// Arranges the rows of some tiles. Each row has `inputs` elements. The returned operand may be
/// used once all tiles are arranged.
///
/// # Safety
/// The rows must be readable, and `numbers` must have room for all of them. No other thread may
/// write to the room for these rows.
#[inline(always)]
pub(crate) unsafe fn arrange<E: Element, K: Kernel<E>>(
    rows: Rows<E>,
    inputs: usize,
    tiles: Range<usize>,
    numbers: *mut K::Number,
) -> Arranged<K::Number> {
    let height = rows.height::<K>();
    for row in rows.of_tiles::<K>(tiles).step_by(height.max(1)) {
        let at = row * inputs;
        // SAFETY: reads stay inside the rows, and `numbers` has the same size.
        unsafe {
            K::arrange(rows.first.add(at), height.min(rows.count - row), inputs, numbers.add(at));
        }
    }
    Arranged { numbers, count: rows.count, height }
}

/// The most likely output of a row.
#[derive(Clone, Copy)]
pub(crate) struct Best {
    pub(crate) value: f32,
    pub(crate) output: u32,
    /// True if all outputs were finite.
    pub(crate) finite: bool,
}

impl Best {
    pub(crate) const NONE: Self = Self { value: f32::NEG_INFINITY, output: 0, finite: true };

    /// Keeps the larger value; of equal values, the one of the lower output.
    pub(crate) fn merge(&mut self, other: Self) {
        let finite = self.finite && other.finite;
        if other.value > self.value || (other.value == self.value && other.output < self.output) {
            *self = other;
        }
        self.finite = finite;
    }

    /// Updates the best output with the first `width` results of a panel. `from` is the index of
    /// the panel's first output.
    #[inline(always)]
    fn look<V: Vector>(&mut self, results: &[f32; NR], from: usize, width: usize) {
        // SAFETY: `results` are two whole vectors. Padding is zero, which is finite.
        let (left, right) =
            unsafe { (V::load(results.as_ptr()), V::load(results.as_ptr().add(HALF))) };
        self.finite &= left.is_finite() && right.is_finite();
        let seen = left.only(width.min(HALF)).larger(right.only(width.saturating_sub(HALF)));
        let largest = seen.largest();
        if largest > self.value || (largest == self.value && from < self.output as usize) {
            let at = results[..width].iter().position(|&value| value == largest).unwrap_or(0);
            (self.value, self.output) = (largest, (from + at) as u32);
        }
    }
}

/// The activation between the projections of a feed-forward network. It applies to the gates, or
/// without gates to all outputs of the first projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateKind {
    /// `x * sigmoid(x)`
    Silu,
    /// GELU with the error function.
    Gelu,
    /// GELU with the hyperbolic tangent.
    GeluTanh,
    /// The square of the positive part.
    SquaredRelu,
    /// `gate * sigmoid(1.702 * gate) * (up + 1)` of values that are clamped at 7 (gpt-oss).
    ClampedSwiglu,
}

/// The factor of logits, and the bound that they approach after scaling; 0 if there is no bound.
#[derive(Clone, Copy)]
pub(crate) struct LogitScales {
    pub(crate) scale: f32,
    pub(crate) cap: f32,
}

impl LogitScales {
    /// True if logits stay unchanged.
    pub(crate) fn is_none(self) -> bool {
        self.scale == 1.0 && self.cap == 0.0
    }
}

/// Where the results of a product are stored, and how they are processed before that.
#[derive(Clone, Copy)]
pub(crate) enum Out<E> {
    /// Stored to `[rows, outputs]`.
    Store(*mut f32),
    /// Scaled as logits, and stored to `[rows, outputs]`.
    Logits(*mut f32, LogitScales),
    /// Added to `[rows, outputs]` after multiplication by a factor.
    Add(*mut f32, f32),
    /// `activation(gate) * up` of an interleaved matrix, `[rows, outputs / 2]`.
    Gate(*mut E, GateKind),
    /// `activation(output)`, or the output if there is no activation, `[rows, outputs]`.
    Activate(*mut E, Option<GateKind>),
    /// The outputs of an interleaved matrix, `[rows, outputs]`: all gates, then all values.
    Halves(*mut f32),
    /// The most likely output of each row, among those that this member computes.
    Best(*mut Best),
}

impl<E> Out<E> {
    /// True if the matrix is interleaved.
    #[inline(always)]
    pub(crate) fn is_interleaved(&self) -> bool {
        matches!(self, Self::Gate(..) | Self::Halves(_))
    }
}

/// Computes this member's share of `rows · matrix`; the matrix is not quantised.
///
/// # Safety
/// The pointers must be valid for the given sizes. Other members may write to the same `out` only
/// through this function with the same `queue`. Each member must have its own [`Out::Best`].
#[inline(always)]
pub(crate) unsafe fn multiply<E: Element, K: Kernel<E>>(
    (queue, members): (&Queue, usize),
    rows: Arranged<K::Number>,
    matrix: &Matrix<'_, E>,
    out: Out<E>,
) {
    let panels = padded_outputs(matrix.outputs, out.is_interleaved()).div_ceil(NR);
    let pieces = panels * rows.count.div_ceil(rows.block::<E, K>());
    let mut sums = [const { MaybeUninit::<Outputs>::uninit() }; MAX_BLOCK_ROWS];
    loop {
        let mine = queue.take(pieces, members);
        if mine.is_empty() {
            break;
        }
        for piece in mine {
            // SAFETY: the caller upholds the contract.
            unsafe {
                multiply_piece::<E, K>(
                    rows,
                    (piece / panels, piece % panels),
                    matrix,
                    out,
                    &mut sums,
                );
            }
        }
    }
}

/// Computes one unit of work of [`multiply`]: a block of the rows times a panel.
///
/// # Safety
/// The conditions of [`multiply`] must hold for the memory that this unit reads and writes.
#[inline(always)]
pub(crate) unsafe fn multiply_piece<E: Element, K: Kernel<E>>(
    rows: Arranged<K::Number>,
    (block, panel): (usize, usize),
    matrix: &Matrix<'_, E>,
    out: Out<E>,
    sums: &mut [MaybeUninit<Outputs>; MAX_BLOCK_ROWS],
) {
    let block_rows = rows.block::<E, K>();
    let Arranged { numbers, count, height } = rows;
    let (inputs, length) = (matrix.inputs, panel_len(matrix.inputs));
    let start = block * block_rows;
    let end = (start + block_rows).min(count);
    let tiles = (end - start).div_ceil(height);
    // A single tile reads the panel only once, however long the panel is.
    let chunk = if tiles == 1 { inputs } else { chunk_of(inputs, K::CHUNK, K::INNER) };
    for first in (0..inputs).step_by(chunk) {
        let positions = chunk.min(inputs - first);
        for tile in 0..tiles {
            let row = start + tile * height;
            let rows = height.min(end - row);
            // SAFETY: accesses stay inside the rows, the panels and the block's sums. The sums are
            // complete after the last chunk.
            unsafe {
                let weights = matrix.panels.add(panel * length + first * NR);
                let ahead = ahead_of(weights, positions, (tiles, tiles - tile));
                let numbers = numbers.add(row * inputs + first * rows);
                let sums = sums.as_mut_ptr().cast::<Outputs>().add(row - start);
                K::tile(numbers, rows, weights, positions, ahead, first > 0, sums);
                if first + positions == inputs {
                    let sums = std::slice::from_raw_parts(sums, rows);
                    finish::<E, K>(sums, row, panel, matrix, out);
                }
            }
        }
    }
}

/// The weights that a tile prefetches while it computes with its chunk. `left` is the number of
/// tiles of the block that remain, including this one.
///
/// Weights come from memory. A single tile prefetches the weights that it reads soon. Of several
/// tiles, the last two prefetch the next chunk, so that the other tiles find its weights in the
/// cache.
#[inline(always)]
fn ahead_of<E>(weights: *const E, positions: usize, (tiles, left): (usize, usize)) -> Ahead<E> {
    let next = weights.wrapping_add(positions * NR);
    match left {
        1 if tiles == 1 => Ahead::Whole(weights.wrapping_add(AHEAD / size_of::<E>())),
        1 => Ahead::Half(next.wrapping_add(positions * NR / 2)),
        2 => Ahead::Half(next),
        _ => Ahead::Nothing,
    }
}

/// The number of inner positions of each chunk but the last: about `wanted`, in whole groups.
#[inline(always)]
fn chunk_of(inputs: usize, wanted: usize, group: usize) -> usize {
    let chunks = (inputs + wanted / 2) / wanted;
    inputs.div_ceil(chunks.max(1)).next_multiple_of(group)
}

/// Computes this member's share of `rows · matrix`, for a matrix that is quantised in this format.
///
/// # Safety
/// The conditions of [`multiply`] must hold, and the rows must have one scale per
/// `format.shared(inputs)` positions.
#[inline(always)]
pub(crate) unsafe fn multiply_codes<E: Element, K: Kernel<E>, D: Dots>(
    (queue, members): (&Queue, usize),
    rows: Codes,
    (matrix, format): (&Matrix<'_, E>, Format),
    out: Out<E>,
) {
    let panels = padded_outputs(matrix.outputs, out.is_interleaved()).div_ceil(NR);
    let pieces = panels * rows.count.div_ceil(BLOCK_ROWS);
    let mut tile: Tile = [[0.0; NR]; MAX_ROWS];
    loop {
        let mine = queue.take(pieces, members);
        if mine.is_empty() {
            break;
        }
        for piece in mine {
            let (block, panel) = (piece / panels, piece % panels);
            // SAFETY: the caller upholds the contract.
            unsafe {
                multiply_codes_piece::<E, K, D>(
                    rows,
                    (block, panel),
                    (matrix, format),
                    out,
                    &mut tile,
                );
            }
        }
    }
}

/// Computes one unit of work of [`multiply_codes`]: a block of [`BLOCK_ROWS`] times a panel.
///
/// # Safety
/// The conditions of [`multiply_codes`] must hold for the memory that this unit reads and writes.
#[inline(always)]
pub(crate) unsafe fn multiply_codes_piece<E: Element, K: Kernel<E>, D: Dots>(
    rows: Codes,
    (block, panel): (usize, usize),
    (matrix, format): (&Matrix<'_, E>, Format),
    out: Out<E>,
    tile: &mut Tile,
) {
    let length = panel_bytes(format, matrix.inputs);
    let mut row = block * BLOCK_ROWS;
    let end = (row + BLOCK_ROWS).min(rows.count);
    let tiles = (end - row).div_ceil(D::rows(format));
    for left in (1..=tiles).rev() {
        let count = (end - row).div_ceil(left);
        // A single tile waits for memory throughout, so it prefetches its own panel. Of several
        // tiles, the last one prefetches the next panel.
        let ahead = match left {
            1 if tiles == 1 => AHEAD,
            1 => length,
            _ => 0,
        };
        // SAFETY: reads stay inside the rows and the panels.
        unsafe {
            let weights = matrix.panels.cast::<u8>().add(panel * length);
            D::tile(format, &rows, (row, count), weights, matrix.inputs, ahead, tile);
            finish::<E, K>(&tile[..count], row, panel, matrix, out);
        }
        row += count;
    }
}

/// Finishes a tile whose first row is `row`: writes, adds or compares its results.
///
/// # Safety
/// The conditions of [`multiply`] must hold, and the rows and the panel must exist.
#[inline(always)]
unsafe fn finish<E: Element, K: Kernel<E>>(
    tile: &[Outputs],
    row: usize,
    panel: usize,
    matrix: &Matrix<'_, E>,
    out: Out<E>,
) {
    let (outputs, from) = (matrix.outputs, panel * NR);
    let width = outputs.saturating_sub(from).min(NR);
    let bias = bias_of(matrix, panel, out.is_interleaved());
    // SAFETY: `bias` has two whole vectors of floats.
    let [bias, other_bias] = unsafe { halves::<K::Vector>(bias.as_ptr()) };
    for (sums, row) in tile.iter().zip(row..) {
        // SAFETY: a row's sums are two whole vectors; only this unit writes these results.
        unsafe {
            let [left, right] = halves::<K::Vector>(sums.as_ptr());
            let (left, right) = (left.add(bias), right.add(other_bias));
            match out {
                Out::Store(to) => write(left, right, to.add(row * outputs + from), width),
                Out::Logits(to, scales) => {
                    let (left, right) = (logits(left, scales), logits(right, scales));
                    write(left, right, to.add(row * outputs + from), width);
                }
                Out::Add(to, scale) => {
                    let scale = K::Vector::splat(scale);
                    let (left, right) = (left.mul(scale), right.mul(scale));
                    add(left, right, to.add(row * outputs + from), width);
                }
                Out::Gate(to, activation) => {
                    let (from, half) = (panel * HALF, outputs / 2);
                    let to = to.add(row * half + from);
                    gate::<E, K>((left, right), activation, to, half.saturating_sub(from));
                }
                Out::Activate(to, activation) => {
                    let to = to.add(row * outputs + from);
                    for (half, lanes) in [left, right].into_iter().enumerate() {
                        let (first, lanes) = (half * HALF, activated(lanes, activation));
                        let to = to.wrapping_add(first);
                        put::<E, K>(lanes, to, width.saturating_sub(first));
                    }
                }
                Out::Halves(to) => {
                    let (from, half) = (panel * HALF, outputs / 2);
                    let width = half.saturating_sub(from).min(HALF);
                    let to = to.add(row * outputs + from);
                    for (lanes, to) in [(left, to), (right, to.add(half))] {
                        let lanes = lanes.to_array();
                        std::ptr::copy_nonoverlapping(lanes.as_ptr(), to, width);
                    }
                }
                Out::Best(to) => (*to.add(row)).look::<K::Vector>(sums, from, width),
            }
        }
    }
}

/// The bias of a panel's outputs; zero where there is none.
#[inline(always)]
fn bias_of<E>(matrix: &Matrix<'_, E>, panel: usize, interleaved: bool) -> Outputs {
    let mut bias = [0.0; NR];
    if matrix.bias.is_empty() {
        return bias;
    }
    if interleaved {
        let (from, half) = (panel * HALF, matrix.outputs / 2);
        let width = half.saturating_sub(from).min(HALF);
        bias[..width].copy_from_slice(&matrix.bias[from..from + width]);
        bias[HALF..HALF + width].copy_from_slice(&matrix.bias[half + from..][..width]);
    } else {
        let from = panel * NR;
        let width = matrix.outputs.saturating_sub(from).min(NR);
        bias[..width].copy_from_slice(&matrix.bias[from..from + width]);
    }
    bias
}

/// # Safety
/// `from` must be readable for [`NR`] floats.
#[inline(always)]
pub(crate) unsafe fn halves<V: Vector>(from: *const f32) -> [V; 2] {
    // SAFETY: the caller upholds the contract.
    unsafe { [V::load(from), V::load(from.add(HALF))] }
}

/// Adds the first `width` lanes of both vectors to `to`.
///
/// # Safety
/// `to` must be readable and writable for `width` floats.
#[inline(always)]
pub(crate) unsafe fn add<V: Vector>(left: V, right: V, to: *mut f32, width: usize) {
    let mut before = [0.0; NR];
    // SAFETY: the caller upholds the contract.
    unsafe {
        let before = if width == NR {
            to.cast_const()
        } else {
            before[..width].copy_from_slice(std::slice::from_raw_parts(to, width));
            before.as_ptr()
        };
        let [old_left, old_right] = halves::<V>(before);
        write(old_left.add(left), old_right.add(right), to, width);
    }
}

#[inline(always)]
fn logits<V: Vector>(x: V, LogitScales { scale, cap }: LogitScales) -> V {
    if cap > 0.0 {
        math::tanh(x.mul(V::splat(scale / cap))).mul(V::splat(cap))
    } else {
        x.mul(V::splat(scale))
    }
}

/// Writes at most `width` elements of `activation(left) * right`.
///
/// # Safety
/// `to` must be writable for `width` elements, or for [`HALF`] if `width` is larger.
#[inline(always)]
pub(crate) unsafe fn gate<E: Element, K: Kernel<E>>(
    (left, right): (K::Vector, K::Vector),
    activation: GateKind,
    to: *mut E,
    width: usize,
) {
    let gated = match activation {
        GateKind::Silu => math::silu(left).mul(right),
        GateKind::Gelu => math::gelu(left).mul(right),
        GateKind::GeluTanh => math::gelu_tanh(left).mul(right),
        GateKind::SquaredRelu => math::squared_relu(left).mul(right),
        GateKind::ClampedSwiglu => math::clamped_swiglu(left, right),
    };
    // SAFETY: the caller upholds the contract.
    unsafe { put::<E, K>(gated, to, width) };
}

/// Applies the activation to values without a gate.
#[inline(always)]
pub(crate) fn activated<V: Vector>(x: V, activation: Option<GateKind>) -> V {
    match activation {
        Some(GateKind::Silu) => math::silu(x),
        Some(GateKind::Gelu) => math::gelu(x),
        Some(GateKind::GeluTanh) => math::gelu_tanh(x),
        Some(GateKind::SquaredRelu) => math::squared_relu(x),
        // `ClampedSwiglu` takes a gate and a value, so networks with it always have gates.
        Some(GateKind::ClampedSwiglu) | None => x,
    }
}

/// Writes at most `width` lanes as elements.
///
/// # Safety
/// `to` must be writable for `width` elements, or for [`HALF`] if `width` is larger.
#[inline(always)]
pub(crate) unsafe fn put<E: Element, K: Kernel<E>>(x: K::Vector, to: *mut E, width: usize) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        if width >= HALF {
            K::narrow(x, to);
        } else {
            let mut narrow = [E::default(); HALF];
            K::narrow(x, narrow.as_mut_ptr());
            std::ptr::copy_nonoverlapping(narrow.as_ptr(), to, width);
        }
    }
}

/// Writes the first `width` lanes of both vectors.
///
/// # Safety
/// `to` must be writable for `width` floats.
#[inline(always)]
unsafe fn write<V: Vector>(left: V, right: V, to: *mut f32, width: usize) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        if width == NR {
            left.store(to);
            right.store(to.add(HALF));
        } else {
            let both = [left.to_array(), right.to_array()];
            std::ptr::copy_nonoverlapping(both.as_flattened().as_ptr(), to, width);
        }
    }
}

#[cfg(test)]
mod tests;
