//! Attention over paged keys and values, for prompt chunks and decode rows alike.
//!
//! Keys are processed in blocks of [`BLOCK`] positions with a running maximum and sum (Dao et al.
//! 2022). Blocks form spans of [`SPAN`] positions, whose results are merged at the end (Dao et al.
//! 2023). So several members can share a long row. Blocks and spans are counted from the request's
//! first position. So a query's result depends only on its own row: not on the chunks of its
//! prompt, and not on other rows of the step.

mod blocks;

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::element::Element;
use crate::math;
use crate::pages::{Held, Ordered, Pool, Shape};
use crate::tile::{BLOCK, Kernel, MAX_ROWS, tile_height};
use crate::vector::{LANES, Vector};

/// The largest number of query rows (tokens times heads of a group) in a unit with several tokens.
/// The rows share a block while it is in the L1 cache.
const QUERY_ROWS: usize = 48;
/// Positions of a span.
const SPAN: usize = 512;

/// Some queries of a row, for all query heads that share a key head.
#[derive(Clone, Copy)]
pub(crate) struct Queries {
    /// The index of the first query's token in the step.
    pub(crate) token: usize,
    /// The row of the output that receives the first query's result.
    pub(crate) to: usize,
    pub(crate) tokens: usize,
    /// Position of the first query.
    pub(crate) position: usize,
    pub(crate) held: Held,
}

/// One unit of work: queries, and the positions that they attend to.
#[derive(Clone, Copy)]
pub(crate) struct Unit {
    pub(crate) queries: Queries,
    /// The number of key heads, from `queries.held.kv_head` on. It is more than one only for a
    /// single query.
    pub(crate) heads: usize,
    from: usize,
    until: usize,
    /// The index of the split that the unit belongs to; `None` if the unit belongs to no split.
    split: Option<usize>,
}

impl Unit {
    /// The start of the first block, from position `span` on, that any of the unit's queries sees.
    #[inline(always)]
    fn first_block(&self, shape: &Shape, span: usize) -> usize {
        span.max(shape.first_seen(self.queries.position) / BLOCK * BLOCK)
    }

    /// True if the unit's positions include that of its last query.
    pub(crate) fn sees_itself(&self) -> bool {
        self.until == self.queries.position + self.queries.tokens
    }

    fn pairs(&self) -> usize {
        self.heads * self.queries.tokens * (self.until - self.from)
    }

    /// The number of leading rows that see no position from `span` on, because their queries
    /// precede that position.
    #[inline(always)]
    fn blind_rows(&self, shape: &Shape, span: usize) -> usize {
        match shape.both_ways {
            true => 0,
            false => span.saturating_sub(self.queries.position) * shape.group(),
        }
    }

    /// The number of rows: query heads times queries.
    fn rows(&self, shape: &Shape) -> usize {
        self.heads * self.queries.tokens * shape.group()
    }
}

/// A single query whose spans are separate units. The member that finishes last merges their
/// results.
struct Split {
    parts: usize,
    /// The number of unfinished parts.
    left: AtomicUsize,
    /// The index of the first part's floats in the sums.
    at: usize,
    /// The number of query heads.
    rows: usize,
    /// The index of the first span that the query sees.
    first: usize,
}

/// The attention of a step: its units of work, and the single queries that several units share.
#[derive(Default)]
pub(crate) struct Work {
    pub(crate) units: Vec<Unit>,
    splits: Vec<Split>,
    sums: Vec<f32>,
}

impl Work {
    pub(crate) fn clear(&mut self) {
        self.units.clear();
        self.splits.clear();
    }

    /// Adds `queries` for all key heads; `held.kv_head` is ignored. `end`: the number of positions
    /// of the row with these queries. `together`: the key heads of a single query form one unit,
    /// since they lie side by side in memory.
    pub(crate) fn add(&mut self, shape: &Shape, queries: Queries, end: usize, together: bool) {
        let most = (QUERY_ROWS / shape.group()).max(1);
        // For latent rows, a joint unit saves nothing: the values are computed again for each key
        // head.
        let together = together && queries.tokens == 1 && shape.latent == 0;
        let heads = if together { shape.kv_heads } else { 1 };
        for kv_head in (0..shape.kv_heads).step_by(heads) {
            let held = Held { kv_head, ..queries.held };
            for first in (0..queries.tokens).step_by(most) {
                let (token, to) = (queries.token + first, queries.to + first);
                let tokens = most.min(queries.tokens - first);
                let position = queries.position + first;
                let queries = Queries { token, to, tokens, position, held };
                let until = shape.end_seen(position + tokens - 1).min(end);
                let first = shape.first_seen(position) / SPAN;
                let from = first * SPAN;
                let unit = Unit { queries, heads, from, until, split: None };
                if tokens > 1 || until - from <= SPAN {
                    self.units.push(unit);
                    continue;
                }
                let split = Some(self.splits.len());
                let parts = (until - from).div_ceil(SPAN);
                let (rows, left) = (unit.rows(shape), AtomicUsize::new(parts));
                self.splits.push(Split { parts, left, at: 0, rows, first });
                self.units.extend((first..first + parts).map(|part| {
                    let from = part * SPAN;
                    Unit { from, until: until.min(from + SPAN), split, ..unit }
                }));
            }
        }
    }

    /// Sorts the units and reserves memory for the sums. Call it after the last [`Self::add`].
    pub(crate) fn arrange(&mut self, shape: &Shape) {
        // The longest units come first, so that no member is left with a long unit at the end.
        self.units.sort_by_key(|unit| std::cmp::Reverse(unit.pairs()));
        let mut at = 0;
        for split in &mut self.splits {
            split.at = at;
            at += split.parts * part_len(shape, split.rows);
        }
        if self.sums.len() < at {
            self.sums.resize(at, 0.0);
        }
    }

    /// The work in the form that members share.
    pub(crate) fn shared(&mut self) -> Shared<'_> {
        Shared { units: &self.units, splits: &self.splits, sums: self.sums.as_mut_ptr() }
    }
}

/// Floats per part of a split: the sums of each query head, then their maxima and totals.
fn part_len(shape: &Shape, rows: usize) -> usize {
    rows * (shape.padded() + 2)
}

/// A view of [`Work`] that the members share.
#[derive(Clone, Copy)]
pub(crate) struct Shared<'a> {
    pub(crate) units: &'a [Unit],
    splits: &'a [Split],
    sums: *mut f32,
}

/// Weighted sums of values per row, with the row's largest score and the sum of its weights.
struct Sums {
    output: Vec<f32>,
    largest: Vec<f32>,
    total: Vec<f32>,
}

impl Sums {
    fn new(rows: usize, padded: usize) -> Self {
        Self { output: vec![0.0; rows * padded], largest: vec![0.0; rows], total: vec![0.0; rows] }
    }

    #[inline(always)]
    fn clear(&mut self, rows: std::ops::Range<usize>, padded: usize) {
        self.output[rows.start * padded..rows.end * padded].fill(0.0);
        self.largest[rows.clone()].fill(f32::NEG_INFINITY);
        self.total[rows].fill(0.0);
    }

    /// Merges sums over later positions into a row.
    #[inline(always)]
    fn merge<V: Vector>(&mut self, row: usize, output: &[f32], largest: f32, total: f32) {
        if largest == f32::NEG_INFINITY {
            // This query sees no position of the span, but other queries of its unit do.
            return;
        }
        let before = self.largest[row];
        let now = if largest > before { largest } else { before };
        let (mine, theirs) = (math::exp2_of::<V>(before - now), math::exp2_of::<V>(largest - now));
        let sums = &mut self.output[row * output.len()..][..output.len()];
        for (sum, other) in sums.chunks_exact_mut(LANES).zip(output.chunks_exact(LANES)) {
            // SAFETY: both slices are whole vectors.
            unsafe {
                let other = V::load(other.as_ptr()).mul(V::splat(theirs));
                V::load(sum.as_ptr()).fused(V::splat(mine), other).store(sum.as_mut_ptr());
            }
        }
        self.largest[row] = now;
        self.total[row] = self.total[row] * mine + total * theirs;
    }
}

impl Sums {
    /// The factor that normalises a row's sums in the presence of a sink, a score without a value.
    #[inline(always)]
    fn factor_beside<V: Vector>(&self, row: usize, sink: f32) -> f32 {
        let (largest, sink) = (self.largest[row], sink * std::f32::consts::LOG2_E);
        let most = if sink > largest { sink } else { largest };
        let shrunk = math::exp2_of::<V>(largest - most);
        shrunk / (self.total[row] * shrunk + math::exp2_of::<V>(sink - most))
    }
}

/// One member's buffers.
pub(crate) struct Scratch<E> {
    /// A unit's queries `[rows, head_dim]`, rotated and converted to the type of the keys.
    pub(crate) queries: Vec<E>,
    /// A head while it is rotated, and a value while it is normalised.
    pub(crate) head: Vec<f32>,
    ordered: Ordered<E>,
    /// The queries in the tiles' order, and the weights of one tile. Both hold numbers of the type
    /// that the kernel uses, which is no larger than `f32`.
    arranged: Vec<f32>,
    weights: Vec<f32>,
    span: Sums,
    sums: Sums,
}

impl<E: Element> Scratch<E> {
    /// Creates buffers for heads of all these shapes.
    pub(crate) fn new(shapes: &[Shape]) -> Self {
        let most = |of: fn(&Shape) -> usize| shapes.iter().map(of).max().unwrap_or(0);
        let rows = QUERY_ROWS.max(most(|shape| shape.heads));
        let (dim, padded) = (most(|shape| shape.head_dim), most(Shape::padded));
        let zero = E::default();
        Self {
            queries: vec![zero; rows * dim],
            head: vec![0.0; 2 * dim],
            ordered: Ordered::new(dim),
            arranged: vec![0.0; rows * dim],
            weights: vec![0.0; MAX_ROWS * BLOCK],
            span: Sums::new(rows, padded),
            sums: Sums::new(rows, padded),
        }
    }
}

/// Computes the attention of a unit's queries, which are in the scratch. Writes their part of `out`
/// `[rows, heads, value_dim]`, unless other units of the same split are unfinished. `then`: the
/// next unit. `sinks`: one score per query head, which takes weight but has no value; empty if
/// there are no sinks.
///
/// # Safety
/// The unit must lie within `out`. Every position that either unit attends to must have a page in
/// the pool. No other thread may write this part of `out`, or the scratch.
#[inline(always)]
pub(crate) unsafe fn attend<E: Element, K: Kernel<E>>(
    shape: &Shape,
    shared: Shared<'_>,
    (unit, then): (&Unit, Option<&Unit>),
    (pool, sinks): (Pool<E>, &[f32]),
    out: *mut E,
    scratch: &mut Scratch<E>,
) {
    let rows = unit.rows(shape);
    // SAFETY: the caller upholds the contract.
    unsafe { arrange::<E, K>(shape, unit, scratch) };
    for span in (unit.from..unit.until).step_by(SPAN) {
        let seeing = unit.blind_rows(shape, span);
        // SAFETY: the caller upholds the contract.
        unsafe { blocks::attend::<E, K>(shape, (unit, then), span, pool, scratch) };
        if span == unit.from {
            std::mem::swap(&mut scratch.span, &mut scratch.sums);
            continue;
        }
        let padded = shape.padded();
        for row in seeing..rows {
            let part = &scratch.span;
            let output = &part.output[row * padded..][..padded];
            scratch.sums.merge::<K::Vector>(row, output, part.largest[row], part.total[row]);
        }
    }
    // SAFETY: the caller upholds the contract.
    unsafe {
        if let Some(split) = unit.split
            && !hand_in::<K::Vector>(shape, shared, split, unit.from / SPAN, &mut scratch.sums)
        {
            return;
        }
        write::<E, K>(shape, unit, (&scratch.sums, sinks), out);
    }
}

/// Arranges a unit's queries, tile by tile of each head.
#[inline(always)]
unsafe fn arrange<E: Element, K: Kernel<E>>(shape: &Shape, unit: &Unit, scratch: &mut Scratch<E>) {
    let (dim, rows) = (shape.head_dim, unit.queries.tokens * shape.group());
    let height = tile_height(rows, K::QUERIES);
    for head in 0..unit.heads {
        for row in (0..rows).step_by(height) {
            let at = (head * rows + row) * dim;
            // SAFETY: the scratch contains the unit's queries, and `arranged` has room for as many
            // floats. The kernel's numbers are no larger than floats.
            unsafe {
                let to = scratch.arranged.as_mut_ptr().cast::<K::Number>().add(at);
                K::arrange(scratch.queries.as_ptr().add(at), height.min(rows - row), dim, to);
            }
        }
    }
}

/// Stores the sums of a part of a split. If all parts are stored, merges them into `sums` and
/// returns true.
///
/// # Safety
/// Each part must be handed in once per layer, and `shared` must be of this shape.
#[inline(always)]
unsafe fn hand_in<V: Vector>(
    shape: &Shape,
    shared: Shared<'_>,
    split: usize,
    part: usize,
    sums: &mut Sums,
) -> bool {
    let split = &shared.splits[split];
    let (rows, padded, length) = (split.rows, shape.padded(), part_len(shape, split.rows));
    let part = part - split.first;
    // SAFETY: the memory is the split's. One member writes each part before it decrements the
    // count, and parts are read after all members have decremented it.
    let part_of = |part: usize| unsafe {
        std::slice::from_raw_parts_mut(shared.sums.add(split.at + part * length), length)
    };
    let mine = part_of(part);
    mine[..rows * padded].copy_from_slice(&sums.output[..rows * padded]);
    mine[rows * padded..][..rows].copy_from_slice(&sums.largest[..rows]);
    mine[rows * padded + rows..].copy_from_slice(&sums.total[..rows]);
    if split.left.fetch_sub(1, Ordering::AcqRel) > 1 {
        return false;
    }
    split.left.store(split.parts, Ordering::Relaxed);
    sums.clear(0..rows, padded);
    for part in 0..split.parts {
        let part = part_of(part);
        for row in 0..rows {
            let (largest, total) = (part[rows * padded + row], part[rows * padded + rows + row]);
            sums.merge::<V>(row, &part[row * padded..][..padded], largest, total);
        }
    }
    true
}

#[inline(always)]
unsafe fn write<E: Element, K: Kernel<E>>(
    shape: &Shape,
    unit: &Unit,
    (sums, sinks): (&Sums, &[f32]),
    out: *mut E,
) {
    let (dim, padded, group) = (shape.value_dim(), shape.padded(), shape.group());
    let Queries { to, held, .. } = unit.queries;
    let together = unit.heads * group;
    for row in 0..unit.rows(shape) {
        let of_token = held.kv_head * group + row % together;
        let factor = match sinks.get(of_token) {
            None => 1.0 / sums.total[row],
            Some(&sink) => sums.factor_beside::<K::Vector>(row, sink),
        };
        let head = (to + row / together) * shape.heads + of_token;
        // SAFETY: the head lies inside `out`, by the contract of `attend`.
        let to = unsafe { std::slice::from_raw_parts_mut(out.add(head * dim), dim) };
        for (at, to) in to.chunks_mut(LANES).enumerate() {
            let from = &sums.output[row * padded + at * LANES..][..LANES];
            // SAFETY: `from` is a whole vector, and each destination has room for one.
            unsafe {
                let result = K::Vector::load(from.as_ptr()).mul(K::Vector::splat(factor));
                if to.len() == LANES {
                    K::narrow(result, to.as_mut_ptr());
                } else {
                    let mut narrow = [E::default(); LANES];
                    K::narrow(result, narrow.as_mut_ptr());
                    to.copy_from_slice(&narrow[..to.len()]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
