//! Plain loops for any processor. The compiler vectorises them for the features that the caller is
//! compiled for.

use crate::codes::{Codes, Format};
use crate::dots::{Dots, QUAD, quad_bytes};
use crate::element::Element;
use crate::quantise::panel_bytes;
use crate::tile::{Ahead, BLOCK, GROUP, GROUPS, Kernel, MAX_ROWS, NR, Outputs, Scores, Tile};
use crate::vector::{LANES, Vector, VectorWork};

/// A vector of [`LANES`] floats for any processor.
#[derive(Clone, Copy)]
pub(crate) struct Array([f32; LANES]);

impl Array {
    #[inline(always)]
    fn zip(self, other: Self, work: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| work(self.0[i], other.0[i])))
    }

    #[inline(always)]
    fn fold(mut self, work: impl Fn(f32, f32) -> f32) -> f32 {
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                self.0[i] = work(self.0[i], self.0[i + half]);
            }
        }
        self.0[0]
    }
}

impl Vector for Array {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([value; LANES])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller upholds the contract.
        Self(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller upholds the contract.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) };
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }
    #[inline(always)]
    fn fused(self, factor: Self, term: Self) -> Self {
        self.mul(factor).add(term)
    }
    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        self.zip(other, |a, b| if b > a { b } else { a })
    }
    #[inline(always)]
    fn at_least(self, bound: f32) -> Self {
        Self(self.0.map(|x| if x < bound { bound } else { x }))
    }
    #[inline(always)]
    fn at_most(self, bound: f32) -> Self {
        Self(self.0.map(|x| if x > bound { bound } else { x }))
    }
    #[inline(always)]
    fn round(self) -> Self {
        // Adding `ROUND` leaves the nearest integer in the low bits.
        const ROUND: f32 = 12_582_912.0;
        Self(self.0.map(|x| (x + ROUND) - ROUND))
    }
    #[inline(always)]
    fn times_power(self, n: Self) -> Self {
        self.zip(n, |x, n| {
            let power = f32::from_bits((((n as i32) + 127) << 23).cast_unsigned());
            if n < -126.0 { 0.0 } else { x * power }
        })
    }
    #[inline(always)]
    fn only(self, count: usize) -> Self {
        Self(std::array::from_fn(|i| if i < count { self.0[i] } else { f32::NEG_INFINITY }))
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        self.fold(|a, b| a + b)
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        self.fold(|a, b| if b > a { b } else { a })
    }
    #[inline(always)]
    fn is_finite(self) -> bool {
        self.0.iter().all(|x| x.is_finite())
    }
    #[inline(always)]
    unsafe fn store_codes(self, to: *mut i8) {
        // SAFETY: the caller upholds the contract.
        unsafe { to.cast::<[i8; LANES]>().write_unaligned(self.0.map(|x| x as i32 as i8)) };
    }
    #[inline(always)]
    unsafe fn load_codes(from: *const i8) -> Self {
        // SAFETY: the caller upholds the contract.
        Self(unsafe { from.cast::<[i8; LANES]>().read_unaligned() }.map(f32::from))
    }
    #[inline(never)]
    unsafe fn compute<W: VectorWork>(work: W) {
        // SAFETY: the caller upholds the contract.
        unsafe { work.compute::<Self>() }
    }
}

/// The kernel that computes element by element.
pub(crate) struct Plain;

// SAFETY: the implementation uses no special instructions.
unsafe impl<E: Element> Kernel<E> for Plain {
    const ROWS: usize = 4;
    type Vector = Array;
    type Number = E;

    #[inline(always)]
    unsafe fn arrange(a: *const E, rows: usize, k: usize, numbers: *mut E) {
        for r in 0..rows {
            for inner in 0..k {
                let at = (inner / E::PAIR * rows + r) * E::PAIR + inner % E::PAIR;
                // SAFETY: accesses stay inside the rows `a` and the output `numbers`, by the
                // function's contract.
                unsafe { *numbers.add(at) = *a.add(r * k + inner) };
            }
        }
    }

    #[inline(always)]
    unsafe fn tile(
        numbers: *const E,
        rows: usize,
        panel: *const E,
        k: usize,
        _: Ahead<E>,
        more: bool,
        out: *mut Outputs,
    ) {
        for r in 0..rows {
            // SAFETY: row r and the panel can be accessed, by the function's contract.
            unsafe {
                let before = if more { *out.add(r) } else { [0.0; NR] };
                *out.add(r) = product((numbers.add(r * E::PAIR), rows), panel, k, before);
            }
        }
    }

    #[inline(always)]
    unsafe fn scores(
        queries: *const E,
        rows: usize,
        keys: &[*const E; GROUPS],
        _: &[*const E; GROUPS],
        dim: usize,
        out: &mut Scores,
    ) {
        for (r, sums) in out.iter_mut().enumerate().take(rows) {
            for (sums, &keys) in sums.chunks_exact_mut(GROUP).zip(keys) {
                // SAFETY: the address is that of a query, by the function's contract.
                let query = unsafe { queries.add(r * E::PAIR) };
                // SAFETY: as above.
                let group = unsafe { product((query, rows), keys, dim, [0.0; GROUP]) };
                sums.copy_from_slice(&group);
            }
        }
    }

    #[inline(always)]
    unsafe fn mix(
        weights: *const E,
        rows: usize,
        values: &[*const E],
        _: &[*const E; GROUPS],
        dim: usize,
        decay: &[f32; MAX_ROWS],
        out: *mut f32,
    ) {
        for (r, &decay) in decay.iter().enumerate().take(rows) {
            // SAFETY: the slice is a row of `out`, by the function's contract.
            let out = unsafe { std::slice::from_raw_parts_mut(out.add(r * dim), dim) };
            out.iter_mut().for_each(|out| *out *= decay);
            for (group, &values) in values.iter().enumerate() {
                for position in 0..GROUP {
                    let (pair, within) = (position / E::PAIR, position % E::PAIR);
                    // SAFETY: reads stay inside the weights and the group, by the function's
                    // contract.
                    unsafe {
                        let weight = (*weights.add(r * BLOCK + group * GROUP + position)).to_f32();
                        let values = values.add(pair * dim * E::PAIR + within);
                        for (d, out) in out.iter_mut().enumerate() {
                            *out += weight * (*values.add(d * E::PAIR)).to_f32();
                        }
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn number(values: Array, to: *mut E) {
        // SAFETY: the caller upholds the contract.
        unsafe { to.cast::<[E; LANES]>().write(values.to_array().map(E::from_f32)) };
    }

    #[inline(always)]
    unsafe fn pack_rows(rows: &[*const E; LANES], k: usize, panel: *mut E, pitch: usize) {
        for (column, &row) in rows.iter().enumerate() {
            for inner in 0..k {
                let at = (inner / E::PAIR * pitch + column) * E::PAIR + inner % E::PAIR;
                // SAFETY: accesses stay inside the row and the panel, by the function's contract.
                unsafe { *panel.add(at) = *row.add(inner) };
            }
        }
    }

    #[inline(always)]
    unsafe fn narrow(values: Array, to: *mut E) {
        // SAFETY: the contracts are the same.
        unsafe { <Self as Kernel<E>>::number(values, to) };
    }

    #[inline(always)]
    fn prefetch(_: *const E) {}
}

/// Returns `sums + row[.. k] · panel`, for `N` outputs. Consecutive groups of the row's elements
/// are `apart` groups apart.
///
/// # Safety
/// The row must have `k` elements, and the panel `k * N`.
#[inline(always)]
unsafe fn product<E: Element, const N: usize>(
    (row, apart): (*const E, usize),
    panel: *const E,
    k: usize,
    mut sums: [f32; N],
) -> [f32; N] {
    for group in 0..k / E::PAIR {
        for within in 0..E::PAIR {
            // SAFETY: the element is inside the row, by the function's contract.
            let x = unsafe { (*row.add(group * apart * E::PAIR + within)).to_f32() };
            for (column, sum) in sums.iter_mut().enumerate() {
                let at = (group * N + column) * E::PAIR + within;
                // SAFETY: the element is inside the panel, by the function's contract.
                *sum += x * unsafe { (*panel.add(at)).to_f32() };
            }
        }
    }
    sums
}

/// The dot products that compute code by code.
pub(crate) struct Portable;

// SAFETY: the implementation uses no special instructions.
unsafe impl Dots for Portable {
    fn rows(_: Format) -> usize {
        4
    }

    #[inline(always)]
    unsafe fn tile(
        format: Format,
        rows: &Codes,
        (row, count): (usize, usize),
        panel: *const u8,
        k: usize,
        _: usize,
        out: &mut Tile,
    ) {
        let shared = format.shared(k);
        // SAFETY: the panel has this many bytes, by the function's contract.
        let panel = unsafe { std::slice::from_raw_parts(panel, panel_bytes(format, k)) };
        let blocks = k / shared;
        for (sums, row) in out.iter_mut().zip(row..row + count) {
            *sums = [0.0; NR];
            for (index, block) in panel.chunks_exact(panel.len() / blocks).enumerate() {
                // SAFETY: as above.
                let (codes, scale, sum) = unsafe {
                    let at = row * blocks + index;
                    let codes = std::slice::from_raw_parts(rows.codes.add(at * shared), shared);
                    (codes, *rows.scales.add(at), *rows.sums.add(at))
                };
                let (weights, rest) = block.split_at(shared / QUAD * quad_bytes(format));
                let dots = dots_of_block(format, codes, weights, sum);
                for (output, total) in sums.iter_mut().enumerate() {
                    let half = |index: usize| {
                        format.scale_of(u16::from_le_bytes([rest[2 * index], rest[2 * index + 1]]))
                    };
                    let dot = dots[output] as f32;
                    if format == Format::Int8 {
                        let at = output * size_of::<f32>();
                        let own = f32::from_le_bytes([
                            rest[at],
                            rest[at + 1],
                            rest[at + 2],
                            rest[at + 3],
                        ]);
                        *total = dot * (own * scale);
                        continue;
                    }
                    *total += dot * (half(output) * scale);
                    if format == Format::Q4_1 {
                        *total += half(NR + output) * (sum as f32 * scale);
                    }
                }
            }
        }
    }
}

/// Returns the dot products of a row's codes with those of a panel's block. `sum` is the sum of the
/// row's codes.
#[inline(always)]
fn dots_of_block(format: Format, codes: &[i8], weights: &[u8], sum: i32) -> [i32; NR] {
    let narrow = format.is_narrow();
    let mask = if narrow { 15 } else { 255 };
    let table = format.table();
    let mut dots = [sum.wrapping_mul(-format.offset()); NR];
    for (x, weights) in codes.chunks_exact(QUAD).zip(weights.chunks_exact(quad_bytes(format))) {
        for (output, dot) in dots.iter_mut().enumerate() {
            let (from, shift) = match narrow {
                true => (output % (NR / 2), output / (NR / 2) * 4),
                false => (output, 0),
            };
            for (i, &x) in x.iter().enumerate() {
                let code = weights[from * QUAD + i] >> shift & mask;
                let weight = table.map_or(code, |table| table[usize::from(code)]);
                *dot = dot.wrapping_add(i32::from(x) * i32::from(weight));
            }
        }
    }
    dots
}
