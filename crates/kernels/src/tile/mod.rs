//! The innermost loops: a few rows times packed panels, for each kind of processor.

use crate::element::Element;
use crate::vector::{LANES, Vector};

/// The number of outputs of a panel, see [`crate::pack`].
pub(crate) const NR: usize = 2 * LANES;
/// Outputs of each of the two halves of an interleaved panel.
pub(crate) const HALF: usize = LANES;
/// Results of a tile's row.
pub(crate) type Outputs = [f32; NR];
/// Results of a tile.
pub(crate) type Tile = [Outputs; MAX_ROWS];
/// Rows of the largest tile.
pub(crate) const MAX_ROWS: usize = 32;
/// Rows of the largest piece of work.
pub(crate) const MAX_BLOCK_ROWS: usize = 256;

/// The number of neighbouring positions of keys or values in a group, see [`crate::pages`].
pub(crate) const GROUP: usize = LANES;
/// Groups of a block of attention.
pub(crate) const GROUPS: usize = 4;
/// Positions of a block of attention.
pub(crate) const BLOCK: usize = GROUP * GROUPS;
/// Scores of some queries for a block.
pub(crate) type Scores = [[f32; BLOCK]; MAX_ROWS];

/// Rows of each tile but the last, if tiles have at most `most` rows. All have about the same
/// number, since a last tile of one row would cost as much as a full one.
#[inline(always)]
pub(crate) fn tile_height(rows: usize, most: usize) -> usize {
    rows.div_ceil(rows.div_ceil(most).max(1))
}

/// The address that a tile prefetches while it computes; it need not be valid.
#[derive(Clone, Copy)]
#[cfg_attr(
    not(target_arch = "x86_64"),
    expect(dead_code, reason = "other processors' kernels load nothing ahead")
)]
pub(crate) enum Ahead<E> {
    Nothing,
    /// Half as much as a panel has.
    Half(*const E),
    /// The tile prefetches as much as a panel has.
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
    /// Inner positions that are added up together. Pieces of a product begin at multiples of it.
    const INNER: usize = E::PAIR;
    /// The approximate number of inner positions that tiles compute one after the other. Their part
    /// of the panel stays in the first cache.
    const CHUNK: usize = 192;
    /// Rows that one piece of work computes with a panel, at most [`MAX_BLOCK_ROWS`]. Their
    /// activations stay in the second cache from panel to panel.
    const BLOCK_ROWS: usize = 96;
    /// The kernel's vector of floats.
    type Vector: Vector;
    /// The numbers with which rows are computed: elements, or numbers converted from them once for
    /// all panels. They are no larger than `f32`.
    type Number: Copy;

    /// Puts rows in the order in which [`Self::tile`] reads them: those of some inner positions,
    /// then those of the next ones. The numbers of inner position `i`, a multiple of
    /// [`Self::INNER`], begin at `i * rows`.
    ///
    /// # Safety
    /// `a` has `rows` rows of `k` elements, one after the other; `numbers` has room for as many;
    /// `k` is a multiple of `E::PAIR`; `1 <= rows <= Self::ROWS`.
    unsafe fn arrange(a: *const E, rows: usize, k: usize, numbers: *mut Self::Number);

    /// `out[r] = a[r] · panel` for `r < rows`, or with `more` adds the product to `out`.
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

    /// `out[r] = queries[r] · keys` for `r < rows`. Prefetches the data at `ahead`: as much as the
    /// keys, from addresses that need not be valid.
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

    /// `out[r * dim ..][.. dim] = out[r * dim ..][.. dim] * decay[r] + weights[r] · values`, for `r
    /// < rows`. Prefetches the data at `ahead`: as much as the values, from addresses that need not
    /// be valid.
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

    /// Converts floats to numbers.
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

    /// Prefetches the cache line at `address`, which need not be valid, into the second cache.
    fn prefetch(address: *const E);
}

#[cfg(test)]
pub(crate) mod tests;
