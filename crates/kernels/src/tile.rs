//! The innermost loops: a few rows times packed panels, for each kind of processor.

use crate::element::Element;
use crate::pack::NR;
use crate::vector::{Array, Vector};

#[cfg(target_arch = "x86_64")]
pub(crate) use crate::x86::{AmxBf16, Avx2, Avx512, Avx512Bf16, Avx512Wide};

/// Results of a tile's row.
pub(crate) type Outputs = [f32; NR];
/// Results of a tile.
pub(crate) type Tile = [Outputs; MAX_ROWS];
/// Rows of the largest tile.
pub(crate) const MAX_ROWS: usize = 32;
/// Rows of the largest piece of work.
pub(crate) const MAX_BLOCK_ROWS: usize = 256;

/// Lanes of a vector: what all loops over vectors are written for, whatever the processor has.
pub(crate) const LANES: usize = 16;
/// Positions of keys or values that lie together, see [`crate::pages`].
pub(crate) const GROUP: usize = LANES;
/// Groups of a block of attention.
pub(crate) const GROUPS: usize = 4;
/// Positions of a block of attention.
pub(crate) const BLOCK: usize = GROUP * GROUPS;
/// Scores of some queries for a block.
pub(crate) type Scores = [[f32; BLOCK]; MAX_ROWS];

/// Rows of each tile but the last, of tiles of at most `most` rows. All have about as many, since a
/// last one of a single row would cost as much as a full one.
#[inline(always)]
pub(crate) fn tile_height(rows: usize, most: usize) -> usize {
    rows.div_ceil(rows.div_ceil(most).max(1))
}

/// The address that a tile begins to load from beside its work; it need not be valid.
#[derive(Clone, Copy)]
#[cfg_attr(
    not(target_arch = "x86_64"),
    expect(dead_code, reason = "other processors' kernels load nothing ahead")
)]
pub(crate) enum Ahead<E> {
    Nothing,
    /// Half as much as a panel has.
    Half(*const E),
    /// The tile loads as much as a panel has.
    Whole(*const E),
}

/// A processor's way of computing with elements `E`.
///
/// # Safety
/// Implementations may use instructions that not every processor has: their methods may be called
/// only where those were detected.
pub(crate) unsafe trait Kernel<E: Element>: 'static {
    /// Rows that a tile may have, at most [`MAX_ROWS`].
    const ROWS: usize;
    /// Queries that a tile of attention may have, at most [`MAX_ROWS`].
    const QUERIES: usize = Self::ROWS;
    /// Inner positions that are added up together: pieces of a product begin at multiples of it.
    const INNER: usize = E::PAIR;
    /// Inner positions, about, that tiles compute one after the other: their part of the panel
    /// stays in the first cache.
    const CHUNK: usize = 192;
    /// Rows that one piece of work computes with a panel, at most [`MAX_BLOCK_ROWS`]: their
    /// activations stay in the second cache from panel to panel.
    const BLOCK_ROWS: usize = 96;
    /// The kernel's vector of floats.
    type Vector: Vector;
    /// The numbers that rows are computed in: elements, or numbers made of them once for all
    /// panels. No larger than `f32`.
    type Number: Copy;

    /// Puts rows in the order in which [`Self::tile`] reads them: those of some inner positions,
    /// then those of the next ones. Numbers from any multiple of [`Self::INNER`] on begin `rows`
    /// times as far in.
    ///
    /// # Safety
    /// `a` has `rows` rows of `k` elements, one after the other; `numbers` has room for as many;
    /// `k` is a multiple of `E::PAIR`; `1 <= rows <= Self::ROWS`.
    unsafe fn arrange(a: *const E, rows: usize, k: usize, numbers: *mut Self::Number);

    /// `out[r] = a[r] · panel` for `r < rows`, or adds the product `more` to what is there.
    ///
    /// # Safety
    /// `numbers` are `k` positions of `rows` rows, arranged. `panel` is `k` inner positions of a
    /// packed panel, and `k` is a multiple of `E::PAIR`. Pieces of a product begin at multiples of
    /// [`Self::INNER`]. `out` has `rows` rows, and `1 <= rows <= Self::ROWS`.
    unsafe fn tile(
        numbers: *const Self::Number,
        rows: usize,
        panel: *const E,
        k: usize,
        ahead: Ahead<E>,
        more: bool,
        out: *mut Outputs,
    );

    /// `out[r] = queries[r] · keys` for `r < rows`. What is `ahead` begins to be loaded: as much as
    /// the keys, from addresses that need not be valid.
    ///
    /// # Safety
    /// `queries` are `dim` positions of `rows` rows, arranged; `keys` are groups of keys; `dim` is
    /// a multiple of `E::PAIR`; `1 <= rows <= Self::ROWS`.
    unsafe fn scores(
        queries: *const Self::Number,
        rows: usize,
        keys: &[*const E; GROUPS],
        ahead: &[*const E; GROUPS],
        dim: usize,
        out: &mut Scores,
    );

    /// `out[r * dim ..][.. dim] = out[r * dim ..][.. dim] * decay[r] + weights[r] · values`, for
    /// `r < rows`. What is `ahead` begins to be loaded: as much as the values, from addresses that
    /// need not be valid.
    ///
    /// # Safety
    /// `weights` has `rows` rows of [`BLOCK`] numbers, and `out` has `rows` rows of `dim`. `values`
    /// are groups of values, `dim` wide, and `dim` is a multiple of [`LANES`].
    /// `1 <= rows <= Self::ROWS`.
    unsafe fn mix(
        weights: *const Self::Number,
        rows: usize,
        values: &[*const E],
        ahead: &[*const E; GROUPS],
        dim: usize,
        decay: &[f32; MAX_ROWS],
        out: *mut f32,
    );

    /// Makes numbers of floats.
    ///
    /// # Safety
    /// `to` can be written for [`LANES`] numbers.
    unsafe fn number(values: Self::Vector, to: *mut Self::Number);

    /// `panel[d * pitch + r] = rows[r][d]` for groups of `E::PAIR` elements.
    ///
    /// # Safety
    /// Each of `rows` can be read for `k` elements, a multiple of `E::PAIR`; `panel` can be written
    /// wherever the formula says.
    unsafe fn pack_rows(rows: &[*const E; LANES], k: usize, panel: *mut E, pitch: usize);

    /// Rounds to elements.
    ///
    /// # Safety
    /// `to` can be written for [`LANES`] elements.
    unsafe fn narrow(values: Self::Vector, to: *mut E);

    /// Begins to load the cache line at `address`, which need not be valid, into the second cache.
    fn prefetch(address: *const E);
}

/// Plain loops, which the compiler turns into the vectors of whatever processor the caller is
/// compiled for.
pub(crate) struct Plain;

// SAFETY: no special instructions.
unsafe impl<E: Element> Kernel<E> for Plain {
    const ROWS: usize = 4;
    type Vector = Array;
    type Number = E;

    #[inline(always)]
    unsafe fn arrange(a: *const E, rows: usize, k: usize, numbers: *mut E) {
        for r in 0..rows {
            for inner in 0..k {
                let at = (inner / E::PAIR * rows + r) * E::PAIR + inner % E::PAIR;
                // SAFETY: inside the row and the numbers, by the contract.
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
            // SAFETY: row r and the panel, by the contract.
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
                // SAFETY: a query and a group of keys, by the contract.
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
            // SAFETY: a row of out, by the contract.
            let out = unsafe { std::slice::from_raw_parts_mut(out.add(r * dim), dim) };
            out.iter_mut().for_each(|out| *out *= decay);
            for (group, &values) in values.iter().enumerate() {
                for position in 0..GROUP {
                    let (pair, within) = (position / E::PAIR, position % E::PAIR);
                    // SAFETY: inside the weights and the group, by the contract.
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
        // SAFETY: the contract.
        unsafe { to.cast::<[E; LANES]>().write(values.to_array().map(E::from_f32)) };
    }

    #[inline(always)]
    unsafe fn pack_rows(rows: &[*const E; LANES], k: usize, panel: *mut E, pitch: usize) {
        for (column, &row) in rows.iter().enumerate() {
            for inner in 0..k {
                let at = (inner / E::PAIR * pitch + column) * E::PAIR + inner % E::PAIR;
                // SAFETY: inside the row and the panel, by the contract.
                unsafe { *panel.add(at) = *row.add(inner) };
            }
        }
    }

    #[inline(always)]
    unsafe fn narrow(values: Array, to: *mut E) {
        // SAFETY: the contract, which is the same.
        unsafe { <Self as Kernel<E>>::number(values, to) };
    }

    #[inline(always)]
    fn prefetch(_: *const E) {}
}

/// `sums + row[.. k] · panel`, `N` outputs wide. Groups of the row's elements are `apart` groups
/// apart.
///
/// # Safety
/// The row has `k` elements, the panel `k * N`.
#[inline(always)]
unsafe fn product<E: Element, const N: usize>(
    (row, apart): (*const E, usize),
    panel: *const E,
    k: usize,
    mut sums: [f32; N],
) -> [f32; N] {
    for group in 0..k / E::PAIR {
        for within in 0..E::PAIR {
            // SAFETY: inside the row, by the contract.
            let x = unsafe { (*row.add(group * apart * E::PAIR + within)).to_f32() };
            for (column, sum) in sums.iter_mut().enumerate() {
                let at = (group * N + column) * E::PAIR + within;
                // SAFETY: inside the panel, by the contract.
                *sum += x * unsafe { (*panel.add(at)).to_f32() };
            }
        }
    }
    sums
}

#[cfg(test)]
pub(crate) mod tests;
