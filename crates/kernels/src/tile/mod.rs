//! The innermost loops, which multiply a few rows by packed panels, for each kind of processor.

use crate::element::Element;
use crate::vector::{LANES, Vector};

/// The number of outputs of a panel, see [`crate::pack`].
pub(crate) const NR: usize = 2 * LANES;
/// The number of outputs of each half of an interleaved panel.
pub(crate) const HALF: usize = LANES;
/// The results of one row of a tile.
pub(crate) type Outputs = [f32; NR];
/// The results of a tile.
pub(crate) type Tile = [Outputs; MAX_ROWS];
/// The number of rows of the largest tile.
pub(crate) const MAX_ROWS: usize = 32;
/// The number of rows of the largest unit of work.
pub(crate) const MAX_BLOCK_ROWS: usize = 256;

/// The number of consecutive positions of keys or values in a group, see [`crate::pages`].
pub(crate) const GROUP: usize = LANES;
/// The number of groups in a block of attention.
pub(crate) const GROUPS: usize = 4;
/// The number of positions in a block of attention.
pub(crate) const BLOCK: usize = GROUP * GROUPS;
/// The scores of some queries for a block.
pub(crate) type Scores = [[f32; BLOCK]; MAX_ROWS];

/// The number of rows of each tile but the last, if tiles have at most `most` rows. All tiles get
/// about the same number, since a last tile of one row would cost as much as a full one.
#[inline(always)]
pub(crate) fn tile_height(rows: usize, most: usize) -> usize {
    rows.div_ceil(rows.div_ceil(most).max(1))
}

/// The address that a tile prefetches while it computes; it may be invalid.
#[derive(Clone, Copy)]
#[cfg_attr(
    not(target_arch = "x86_64"),
    expect(dead_code, reason = "other processors' kernels load nothing ahead")
)]
pub(crate) enum Ahead<E> {
    Nothing,
    /// Prefetch half as much data as the tile reads from the panel.
    Half(*const E),
    /// Prefetch as much data as the tile reads from the panel.
    Whole(*const E),
}

/// The innermost loops of one kind of processor for elements `E`.
///
/// # Safety
/// Implementations may use instructions that not every processor has. Their methods may be called
/// only where those instructions were detected.
pub(crate) unsafe trait Kernel<E: Element>: 'static {
    /// The largest number of rows of a tile, at most [`MAX_ROWS`].
    const ROWS: usize;
    /// The largest number of queries of an attention tile, at most [`MAX_ROWS`].
    const QUERIES: usize = Self::ROWS;
    /// The number of inner positions that are added up together. Parts of a product begin at
    /// multiples of this number.
    const INNER: usize = E::PAIR;
    /// The approximate number of inner positions of a chunk, which all tiles of a block compute
    /// before the next chunk. The chunk's part of the panel stays in the L1 cache.
    const CHUNK: usize = 192;
    /// The number of rows that one unit of work computes with a panel, at most [`MAX_BLOCK_ROWS`].
    /// The rows' activations stay in the L2 cache from panel to panel.
    const BLOCK_ROWS: usize = 96;
    /// The kernel's vector of floats.
    type Vector: Vector;
    /// The type of the rows' numbers: elements, or a type to which they are converted once for all
    /// panels. It is no larger than `f32`.
    type Number: Copy;

    /// Arranges rows in the order in which [`Self::tile`] reads them: some inner positions of all
    /// rows, then the next inner positions. The numbers of inner position `i`, a multiple of
    /// [`Self::INNER`], begin at `i * rows`.
    ///
    /// # Safety
    /// `a` must have `rows` contiguous rows of `k` elements, and `numbers` room for as many
    /// numbers. `k` must be a multiple of `E::PAIR`, and `1 <= rows <= Self::ROWS`.
    unsafe fn arrange(a: *const E, rows: usize, k: usize, numbers: *mut Self::Number);

    /// Sets `out[r] = a[r] · panel` for `r < rows`, or with `more` adds the product to `out`.
    ///
    /// # Safety
    /// `numbers` must be `k` inner positions of `rows` rows, as [`Self::arrange`] stores them.
    /// `panel` must be `k` inner positions of a packed panel, and `k` a multiple of `E::PAIR`. A
    /// part of a product must begin at a multiple of [`Self::INNER`]. `out` must have `rows` rows,
    /// and `1 <= rows <= Self::ROWS`.
    unsafe fn tile(
        numbers: *const Self::Number,
        rows: usize,
        panel: *const E,
        k: usize,
        ahead: Ahead<E>,
        more: bool,
        out: *mut Outputs,
    );

    /// Sets `out[r] = queries[r] · keys` for `r < rows`. Prefetches as much data as the keys have,
    /// at the addresses `ahead`, which may be invalid.
    ///
    /// # Safety
    /// `queries` must be `rows` rows of `dim` elements, as [`Self::arrange`] stores them. `keys`
    /// must be groups of keys, `dim` a multiple of `E::PAIR`, and `1 <= rows <= Self::ROWS`.
    unsafe fn scores(
        queries: *const Self::Number,
        rows: usize,
        keys: &[*const E; GROUPS],
        ahead: &[*const E; GROUPS],
        dim: usize,
        out: &mut Scores,
    );

    /// Sets `out[r * dim ..][.. dim] = out[r * dim ..][.. dim] * decay[r] + weights[r] · values`
    /// for `r < rows`. Prefetches as much data as the values have, at the addresses `ahead`, which
    /// may be invalid.
    ///
    /// # Safety
    /// `weights` must have `rows` rows of [`BLOCK`] numbers, and `out` `rows` rows of `dim` floats.
    /// `values` must be groups of values, `dim` wide, with `dim` a multiple of [`LANES`], and
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

    /// Converts floats to the kernel's numbers.
    ///
    /// # Safety
    /// `to` must be valid for writes of [`LANES`] numbers.
    unsafe fn number(values: Self::Vector, to: *mut Self::Number);

    /// Sets `panel[d * pitch + r] = rows[r][d]` for groups of `E::PAIR` elements.
    ///
    /// # Safety
    /// Each of `rows` must be valid for reads of `k` elements, a multiple of `E::PAIR`. `panel`
    /// must be valid for writes at all indices of the formula.
    unsafe fn pack_rows(rows: &[*const E; LANES], k: usize, panel: *mut E, pitch: usize);

    /// Rounds floats to elements and stores them.
    ///
    /// # Safety
    /// `to` must be valid for writes of [`LANES`] elements.
    unsafe fn narrow(values: Self::Vector, to: *mut E);

    /// Prefetches the cache line at `address`, which may be invalid, into the L2 cache.
    fn prefetch(address: *const E);
}

#[cfg(test)]
pub(crate) mod tests;
