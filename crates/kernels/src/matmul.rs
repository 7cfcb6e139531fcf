//! Products with packed matrices, and what is done with each result while it is still in a register.

use crate::element::Element;
use crate::math;
use crate::pack::{HALF, NR, padded_outputs, panel_len};
use crate::team::Queue;
use crate::tile::{Kernel, MAX_ROWS, Tile};

/// Rows that one piece of work computes with a panel: their activations stay in the second-level cache from panel to panel.
const BLOCK_ROWS: usize = 192;

/// A packed weight matrix.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, E> {
    /// As [`crate::pack::pack`] leaves them.
    pub(crate) panels: *const E,
    /// Outputs, without padding.
    pub(crate) outputs: usize,
    /// Inner dimension.
    pub(crate) inputs: usize,
    /// One an output, in checkpoint order; empty for none.
    pub(crate) bias: &'a [f32],
}

/// Activations: `rows` rows of a matrix's inputs, one after the other.
#[derive(Clone, Copy)]
pub(crate) struct Rows<E> {
    pub(crate) first: *const E,
    pub(crate) count: usize,
}

/// The most likely output of a row.
#[derive(Clone, Copy)]
pub(crate) struct Best {
    pub(crate) value: f32,
    pub(crate) output: u32,
    /// Whether all outputs were finite.
    pub(crate) finite: bool,
}

impl Best {
    pub(crate) const NONE: Self = Self { value: f32::NEG_INFINITY, output: 0, finite: true };

    /// Takes the larger of two; of equal ones the lower output.
    pub(crate) fn merge(&mut self, other: Self) {
        let finite = self.finite && other.finite;
        if other.value > self.value || (other.value == self.value && other.output < self.output) {
            *self = other;
        }
        self.finite = finite;
    }
}

/// Where results go.
#[derive(Clone, Copy)]
pub(crate) enum Out<E> {
    /// `[rows, outputs]`.
    Store(*mut f32),
    /// Added to `[rows, outputs]`.
    Add(*mut f32),
    /// `silu(gate) * up` of an interleaved matrix, `[rows, outputs / 2]`.
    Gate(*mut E),
    /// One a row, of this member.
    Best(*mut Best),
}

/// This member's share of `rows · matrix`.
///
/// # Safety
/// The pointers are good for the sizes given; other members write the same `out` only through this function with the same `queue`, but a
/// [`Out::Best`], which is each member's own.
#[inline(always)]
pub(crate) unsafe fn multiply<E: Element, K: Kernel<E>>(
    queue: &Queue,
    rows: Rows<E>,
    matrix: &Matrix<'_, E>,
    out: Out<E>,
) {
    let length = panel_len(matrix.inputs);
    let panels = padded_outputs(matrix.outputs, matches!(out, Out::Gate(_))).div_ceil(NR);
    let pieces = panels * rows.count.div_ceil(BLOCK_ROWS);
    let mut tile: Tile = [[0.0; NR]; MAX_ROWS];
    loop {
        let piece = queue.next();
        if piece >= pieces {
            break;
        }
        let (block, panel) = (piece / panels, piece % panels);
        let mut row = block * BLOCK_ROWS;
        let end = (row + BLOCK_ROWS).min(rows.count);
        while row < end {
            // Equal tiles: a last one of a single row would cost as much as a full one.
            let left = end - row;
            let count = left.div_ceil(left.div_ceil(K::ROWS));
            // SAFETY: inside the rows and the panels.
            unsafe {
                let a = rows.first.add(row * matrix.inputs);
                let weights = matrix.panels.add(panel * length);
                K::tile(a, matrix.inputs, count, weights, matrix.inputs, &mut tile);
                finish(&tile[..count], row, panel, matrix, out);
            }
            row += count;
        }
    }
}

#[inline(always)]
unsafe fn finish<E: Element>(
    tile: &[[f32; NR]],
    row: usize,
    panel: usize,
    matrix: &Matrix<'_, E>,
    out: Out<E>,
) {
    let outputs = matrix.outputs;
    let from = panel * NR;
    let width = outputs.saturating_sub(from).min(NR);
    let mut bias = [0.0; NR];
    if !matrix.bias.is_empty() && !matches!(out, Out::Gate(_)) {
        bias[..width].copy_from_slice(&matrix.bias[from..from + width]);
    }
    for (r, sums) in tile.iter().enumerate() {
        let row = row + r;
        match out {
            Out::Store(to) => {
                // SAFETY: this piece's part of `to`.
                let to =
                    unsafe { std::slice::from_raw_parts_mut(to.add(row * outputs + from), width) };
                for ((to, &sum), &bias) in to.iter_mut().zip(sums).zip(&bias) {
                    *to = sum + bias;
                }
            }
            Out::Add(to) => {
                // SAFETY: as above.
                let to =
                    unsafe { std::slice::from_raw_parts_mut(to.add(row * outputs + from), width) };
                for ((to, &sum), &bias) in to.iter_mut().zip(sums).zip(&bias) {
                    *to += sum + bias;
                }
            }
            Out::Gate(to) => {
                let half = outputs / 2;
                let from = panel * HALF;
                let width = half.saturating_sub(from).min(HALF);
                // SAFETY: as above.
                let to =
                    unsafe { std::slice::from_raw_parts_mut(to.add(row * half + from), width) };
                let mut gates = [0.0; HALF];
                let mut ups = [0.0; HALF];
                if !matrix.bias.is_empty() {
                    gates[..width].copy_from_slice(&matrix.bias[from..from + width]);
                    ups[..width].copy_from_slice(&matrix.bias[half + from..half + from + width]);
                }
                for j in 0..HALF {
                    gates[j] = math::silu(gates[j] + sums[j]) * (ups[j] + sums[HALF + j]);
                }
                for (to, &gated) in to.iter_mut().zip(&gates) {
                    *to = E::from_f32(gated);
                }
            }
            Out::Best(to) => {
                // SAFETY: this member's own.
                let best = unsafe { &mut *to.add(row) };
                let mut largest = f32::NEG_INFINITY;
                let mut finite = true;
                for &sum in &sums[..width] {
                    largest = if sum > largest { sum } else { largest };
                    finite &= sum.is_finite();
                }
                best.finite &= finite;
                if largest >= best.value {
                    let at = sums[..width].iter().position(|&sum| sum == largest).unwrap_or(0);
                    let output = (from + at) as u32;
                    best.merge(Best { value: largest, output, finite });
                }
            }
        }
    }
}
