//! Computes attention over the blocks of a span, one after the other: scores, weights, and sums of
//! values.

use crate::attention::{Queries, SPAN, Scratch, Unit};
use crate::element::Element;
use crate::math;
use crate::pages::{Held, Ordered, Pool, Shape};
use crate::tile::{BLOCK, GROUP, GROUPS, Kernel, MAX_ROWS, Scores, tile_height};
use crate::vector::Vector;

/// Cache lines of a group that are prefetched while a row's weights are computed.
const LINES: usize = 16;

/// Keys or values of a block, group by group.
type Groups<E> = [*const E; GROUPS];

/// Computes the sums over a span into `scratch.span`, for the queries that see part of the span.
/// `then`: the next unit, whose first keys are prefetched.
///
/// # Safety
/// The conditions of [`attend`](super::attend) must hold, and `span` must be the start of one of
/// the unit's spans. The pages of `then` must exist as well.
#[inline(always)]
pub(super) unsafe fn attend<E: Element, K: Kernel<E>>(
    shape: &Shape,
    (unit, then): (&Unit, Option<&Unit>),
    span: usize,
    pool: Pool<E>,
    scratch: &mut Scratch<E>,
) {
    let (dim, padded, group) = (shape.head_dim, shape.padded(), shape.group());
    let Queries { tokens, position, held, .. } = unit.queries;
    let rows = tokens * group;
    let end = unit.until.min(span + SPAN);
    scratch.span.clear(unit.blind_rows(shape, span)..unit.rows(shape), padded);
    let height = tile_height(rows, K::QUERIES);
    let mut scores: Scores = [[0.0; BLOCK]; MAX_ROWS];
    let scores_of = Scoring::new(shape);
    let blocks = (unit.first_block(shape, span)..end).step_by(BLOCK);
    for (first, head) in blocks.flat_map(|first| (0..unit.heads).map(move |head| (first, head))) {
        let base = head * rows;
        let held = &Held { kv_head: held.kv_head + head, ..held };
        let groups = (end - first).div_ceil(GROUP).min(GROUPS);
        // SAFETY: every visible position has a page, by the contract of `attend`.
        let ((keys, values), mut next) = unsafe {
            let next = next_groups(shape, (unit, then), (first, head));
            let codes = next.filter(|_| shape.coded).unwrap_or_default();
            let read =
                groups_of::<E, K>(shape, pool, held, first..end, codes, &mut scratch.ordered);
            let keys =
                |next: [usize; GROUPS]| next.map(|at| pool.keys.wrapping_add(at).cast_const());
            // If pages have codes, the codes of the next block are already being prefetched.
            (read, next.filter(|_| !shape.coded).map(keys))
        };
        for row in (0..rows).step_by(height) {
            let count = height.min(rows - row);
            let seen = |row: usize| {
                let end = shape.end_seen(position + row / group).min(unit.until);
                end.saturating_sub(first).min(BLOCK)
            };
            let hidden = |row: usize| {
                shape.first_seen(position + row / group).saturating_sub(first).min(BLOCK)
            };
            // Skips tiles whose queries all precede the block, or whose windows all begin after it.
            if seen(row + count - 1) == 0 || hidden(row) == BLOCK {
                continue;
            }
            // Pages are scattered over the pool. So while the first tile computes with the keys,
            // the values of the block are prefetched, and then the next keys. Later tiles find all
            // of these in the cache.
            let next = next.take();
            let ahead = if next.is_some() { values } else { keys };
            // SAFETY: the arranged queries have `count` rows from here on, and the pointers to keys
            // refer to whole groups.
            unsafe {
                let queries = scratch.arranged.as_ptr().cast::<K::Number>();
                K::scores(queries.add((base + row) * dim), count, &keys, &ahead, dim, &mut scores);
            }
            let weights = scratch.weights.as_mut_ptr().cast::<K::Number>();
            let mut decay = [1.0f32; MAX_ROWS];
            for r in 0..count {
                if let Some(next) = &next {
                    let (group, line) = (next[r % GROUPS], r / GROUPS * LINES);
                    for line in line..(line + LINES).min(dim / E::PAIR) {
                        K::prefetch(group.wrapping_add(line * GROUP * E::PAIR));
                    }
                }
                // SAFETY: `weights` has room for the weights of a whole tile.
                unsafe {
                    decay[r] = soften::<E, K>(
                        &scores[r],
                        hidden(row + r)..seen(row + r),
                        scores_of,
                        &mut scratch.span.largest[base + row + r],
                        &mut scratch.span.total[base + row + r],
                        weights.add(r * BLOCK),
                    );
                }
            }
            let ahead = next.unwrap_or(values);
            // SAFETY: there are `count` rows of weights and sums, and the pointers to values refer
            // to whole groups.
            unsafe {
                let output = scratch.span.output.as_mut_ptr().add((base + row) * padded);
                K::mix(weights, count, &values[..groups], &ahead, padded, &decay, output);
            }
        }
    }
}

/// Returns the keys and values of a block: at most the first [`BLOCK`] of these positions. A
/// missing group is replaced by another group, whose scores are computed but not used. `next`: the
/// groups whose codes are prefetched, if pages have codes.
///
/// # Safety
/// See [`Pool::group`].
#[inline(always)]
unsafe fn groups_of<E: Element, K: Kernel<E>>(
    shape: &Shape,
    pool: Pool<E>,
    held: &Held,
    positions: std::ops::Range<usize>,
    next: [usize; GROUPS],
    ordered: &mut Ordered<E>,
) -> (Groups<E>, Groups<E>) {
    let end = positions.end;
    let mut keys = [std::ptr::null(); GROUPS];
    let mut values = keys;
    let mut groups = 0;
    for first in positions.step_by(GROUP).take(GROUPS) {
        let seen = (end - first).min(GROUP);
        // SAFETY: the caller upholds the contract.
        unsafe {
            let slot = (&mut *ordered, groups);
            (keys[groups], values[groups]) =
                pool.group::<K>(shape, held, (first, seen), next[groups], slot);
        }
        groups += 1;
    }
    let (any, any_values) = (keys[0], values[0]);
    keys[groups..].fill(any);
    values[groups..].fill(any_values);
    (keys, values)
}

/// Returns the offsets in the pool of the groups that are read next. These groups belong to the
/// next head, the next block, or the first block of the next unit. For the last unit, they are
/// those of its own first block. `None` if groups have to be reordered before they are read.
#[inline(always)]
unsafe fn next_groups(
    shape: &Shape,
    (unit, then): (&Unit, Option<&Unit>),
    (first, head): (usize, usize),
) -> Option<[usize; GROUPS]> {
    let held = unit.queries.held;
    let (held, positions) = if head + 1 < unit.heads {
        (Held { kv_head: held.kv_head + head + 1, ..held }, first..unit.until)
    } else if first + BLOCK < unit.until {
        (held, first + BLOCK..unit.until)
    } else {
        let then = then.unwrap_or(unit);
        (then.queries.held, then.first_block(shape, then.from)..then.until)
    };
    // SAFETY: the caller upholds the contract.
    unsafe {
        let any = held.group(shape, positions.start)?;
        let mut next = [any; GROUPS];
        for (next, at) in next.iter_mut().zip(positions.step_by(GROUP)) {
            *next = held.group(shape, at)?;
        }
        Some(next)
    }
}

/// How the product of a query and a key is converted to an exponent of two.
#[derive(Clone, Copy)]
struct Scoring {
    /// The factor of a product. If there is a cap, the scaled product is in units of the cap;
    /// otherwise it is an exponent of two.
    scale: f32,
    /// The bound of exponents; 0 if there is none.
    cap: f32,
}

impl Scoring {
    #[inline(always)]
    fn new(shape: &Shape) -> Self {
        let log = std::f32::consts::LOG2_E;
        match shape.cap > 0.0 {
            true => Self { scale: shape.scale / shape.cap, cap: shape.cap * log },
            false => Self { scale: shape.scale * log, cap: 0.0 },
        }
    }
}

/// Performs one row's step of an online softmax over blocks, in base 2. Turns scores into weights
/// relative to the largest score so far, and returns the factor that rescales the earlier sums. If
/// no position of the block is `visible`, the weights are zero and the factor is 1.
#[inline(always)]
unsafe fn soften<E: Element, K: Kernel<E>>(
    scores: &[f32; BLOCK],
    visible: std::ops::Range<usize>,
    scoring: Scoring,
    largest: &mut f32,
    total: &mut f32,
    weights: *mut K::Number,
) -> f32 {
    let scale = K::Vector::splat(scoring.scale);
    let mut groups = [scale; GROUPS];
    for (group, scores) in groups.iter_mut().zip(scores.as_chunks::<GROUP>().0) {
        // SAFETY: `scores` is a whole vector.
        *group = unsafe { K::Vector::load(scores.as_ptr()) }.mul(scale);
    }
    if scoring.cap > 0.0 {
        for group in &mut groups {
            *group = math::tanh(*group).mul(K::Vector::splat(scoring.cap));
        }
    }
    let nothing = visible.is_empty();
    if visible.end < BLOCK {
        for (at, group) in groups.iter_mut().enumerate() {
            *group = group.only(visible.end.saturating_sub(at * GROUP).min(GROUP));
        }
    }
    if visible.start > 0 {
        for (at, group) in groups.iter_mut().enumerate() {
            *group = group.without(visible.start.saturating_sub(at * GROUP).min(GROUP));
        }
    }
    let before = *largest;
    let block = groups[0].larger(groups[1]).larger(groups[2].larger(groups[3])).largest();
    let now = if block > before { block } else { before };
    // If no position is visible in this block or earlier ones, `now` is minus infinity. The shift
    // must stay finite.
    let shift = K::Vector::splat(if nothing { 0.0 } else { now });
    let mut sum = K::Vector::splat(0.0);
    for (at, group) in groups.iter().enumerate() {
        let weight = math::exp2(group.sub(shift));
        sum = sum.add(weight);
        // SAFETY: `weights` has room for a vector per group.
        unsafe { K::number(weight, weights.add(at * GROUP)) };
    }
    let decay = if nothing { 1.0 } else { math::exp2_of::<K::Vector>(before - now) };
    *largest = now;
    *total = *total * decay + sum.sum();
    decay
}
