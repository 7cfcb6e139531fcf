//! Attention over paged keys and values, for prompt chunks and decode rows alike.
//!
//! Keys are taken in blocks of [`NR`] positions, counted from the request's beginning, with a running maximum and sum (Dao et al. 2022).
//! A query's result depends on nothing but its own row: not on how its prompt was cut into chunks, nor on what is computed beside it.

use crate::element::Element;
use crate::math;
use crate::pack::NR;
use crate::tile::{Kernel, MAX_ROWS, Tile};

/// Query rows (tokens times heads of a group) that share a packed block of keys.
const QUERY_ROWS: usize = 48;
/// Bytes.
const CACHE_LINE: usize = 64;

/// Heads and their pages.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) page_size: usize,
    pub(crate) scale: f32,
}

impl Shape {
    /// Query heads that share a key head.
    pub(crate) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Tokens a unit of work, for one key head.
    pub(crate) fn unit_tokens(&self) -> usize {
        (QUERY_ROWS / self.group()).max(1)
    }

    fn padded(&self) -> usize {
        self.head_dim.next_multiple_of(NR)
    }
}

/// One unit of work: some queries of a row, for every head of a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unit {
    /// First query, as a token of the step.
    pub(crate) token: usize,
    /// Queries.
    pub(crate) tokens: usize,
    /// Position of the first query.
    pub(crate) position: usize,
    /// The row's part of the page table.
    pub(crate) pages: *const i32,
    /// Which key head.
    pub(crate) kv_head: usize,
}

/// One member's buffers.
pub(crate) struct Scratch<E> {
    queries: Vec<E>,
    keys: Vec<E>,
    values: Vec<E>,
    weights: Vec<E>,
    output: Vec<f32>,
    largest: Vec<f32>,
    total: Vec<f32>,
    zeros: Vec<E>,
}

impl<E: Element> Scratch<E> {
    pub(crate) fn new(shape: &Shape) -> Self {
        let rows = shape.unit_tokens() * shape.group();
        let zero = E::default();
        Self {
            queries: vec![zero; rows * shape.head_dim],
            keys: vec![zero; NR * shape.head_dim],
            values: vec![zero; NR * shape.padded()],
            weights: vec![zero; MAX_ROWS * NR],
            output: vec![0.0; rows * shape.padded()],
            largest: vec![0.0; rows],
            total: vec![0.0; rows],
            zeros: vec![zero; shape.padded()],
        }
    }
}

/// Attends a unit's queries `q` `[tokens of the step, heads, head_dim]` and writes `out`, the same shape.
///
/// # Safety
/// The unit lies within `q` and `out`; its pages are pages of `keys` and `values` `[entries, kv_heads, head_dim]` for every position up to
/// that of its last query; nobody else writes its part of `out`.
#[inline(always)]
pub(crate) unsafe fn attend<E: Element, K: Kernel<E>>(
    shape: &Shape,
    unit: &Unit,
    q: *const E,
    (keys, values): (*const E, *const E),
    out: *mut E,
    scratch: &mut Scratch<E>,
) {
    let (dim, padded, group) = (shape.head_dim, shape.padded(), shape.group());
    let rows = unit.tokens * group;
    // SAFETY (of every access through q and out): the contract.
    let head_at = |row: usize| {
        ((unit.token + row / group) * shape.heads + unit.kv_head * group + row % group) * dim
    };
    for row in 0..rows {
        let from = unsafe { std::slice::from_raw_parts(q.add(head_at(row)), dim) };
        scratch.queries[row * dim..][..dim].copy_from_slice(from);
    }
    scratch.output[..rows * padded].fill(0.0);
    scratch.largest[..rows].fill(f32::NEG_INFINITY);
    scratch.total[..rows].fill(0.0);

    let end = unit.position + unit.tokens;
    let mut tile: Tile = [[0.0; NR]; MAX_ROWS];
    // Where the entries of NR positions begin; 0 for those that are not seen.
    let entries_of = |first: usize| {
        let mut entries = [0usize; NR];
        let (mut page, mut within) = (first / shape.page_size, first % shape.page_size);
        for entry in entries.iter_mut().take(end.saturating_sub(first)) {
            // SAFETY: the contract: a page for every position.
            let index = unsafe { *unit.pages.add(page) } as usize * shape.page_size + within;
            *entry = (index * shape.kv_heads + unit.kv_head) * dim;
            within += 1;
            if within == shape.page_size {
                (page, within) = (page + 1, 0);
            }
        }
        entries
    };
    let mut next = entries_of(0);
    for first in (0..end).step_by(NR) {
        let seen = (end - first).min(NR);
        let entries = next;
        // The rows lie scattered over the pool: those of the next block are fetched while this one is computed.
        next = entries_of(first + NR);
        if first + NR < end {
            for entry in next.iter().take(end - first - NR) {
                for at in (0..dim).step_by(CACHE_LINE / size_of::<E>()) {
                    K::prefetch(keys.wrapping_add(entry + at));
                    K::prefetch(values.wrapping_add(entry + at));
                }
            }
        }
        let zeros = scratch.zeros.as_ptr();
        let row_of = |j: usize, from: *const E| {
            // SAFETY: an entry of the pool.
            if j < seen { unsafe { from.add(entries[j]) } } else { zeros }
        };
        let key_rows: [*const E; NR] = std::array::from_fn(|j| row_of(j, keys));
        // SAFETY: rows of `dim` elements, and a buffer for them.
        unsafe { K::pack_rows(&key_rows, dim, scratch.keys.as_mut_ptr()) };
        let value_rows: [*const E; NR] = std::array::from_fn(|j| row_of(j, values));
        for (panel, packed) in scratch.values.chunks_exact_mut(NR * NR).enumerate() {
            let from = panel * NR;
            // SAFETY: rows of `dim` elements, and a panel; columns from `dim` on have been zero from the beginning.
            unsafe {
                let rows = value_rows.map(|row| row.add(from));
                K::pack_columns(&rows, (dim - from).min(NR), packed.as_mut_ptr());
            }
        }

        // Queries before the block see nothing of it.
        let from_row = (first.saturating_sub(unit.position)) * group;
        let mut row = from_row;
        while row < rows {
            let count = (rows - row).min(K::ROWS);
            // SAFETY: `count` rows of queries, a panel of `dim`.
            unsafe {
                K::tile(
                    scratch.queries.as_ptr().add(row * dim),
                    dim,
                    count,
                    scratch.keys.as_ptr(),
                    dim,
                    &mut tile,
                );
            }
            let mut decay = [0.0f32; MAX_ROWS];
            for r in 0..count {
                let position = unit.position + (row + r) / group;
                let visible = (position + 1 - first).min(NR);
                decay[r] = soften(
                    &mut tile[r],
                    visible,
                    shape.scale,
                    &mut scratch.largest[row + r],
                    &mut scratch.total[row + r],
                    &mut scratch.weights[r * NR..][..NR],
                );
            }
            for panel in 0..padded / NR {
                // SAFETY: `count` rows of NR weights, a panel of NR positions.
                unsafe {
                    let part = scratch.values.as_ptr().add(panel * NR * NR);
                    K::tile(scratch.weights.as_ptr(), NR, count, part, NR, &mut tile);
                }
                for r in 0..count {
                    let output = &mut scratch.output[(row + r) * padded + panel * NR..][..NR];
                    for (output, &new) in output.iter_mut().zip(&tile[r]) {
                        *output = *output * decay[r] + new;
                    }
                }
            }
            row += count;
        }
    }
    for row in 0..rows {
        let factor = 1.0 / scratch.total[row];
        let to = unsafe { std::slice::from_raw_parts_mut(out.add(head_at(row)), dim) };
        for (to, &sum) in to.iter_mut().zip(&scratch.output[row * padded..][..dim]) {
            *to = E::from_f32(sum * factor);
        }
    }
}

/// One row's part of a softmax that is taken block by block: turns scores into weights relative to the largest so far, and gives the
/// factor by which what was summed before has to shrink.
#[inline(always)]
fn soften<E: Element>(
    scores: &mut [f32; NR],
    visible: usize,
    scale: f32,
    largest: &mut f32,
    total: &mut f32,
    weights: &mut [E],
) -> f32 {
    for (j, score) in scores.iter_mut().enumerate() {
        *score = if j < visible { *score * scale } else { f32::NEG_INFINITY };
    }
    let mut lanes = [f32::NEG_INFINITY; 16];
    for half in scores.chunks_exact(16) {
        for (lane, &score) in lanes.iter_mut().zip(half) {
            *lane = if score > *lane { score } else { *lane };
        }
    }
    let before = *largest;
    let now = lanes.iter().fold(before, |a, &b| if b > a { b } else { a });
    for score in scores.iter_mut() {
        *score = math::exp(*score - now);
    }
    for (weight, &score) in weights.iter_mut().zip(scores.iter()) {
        *weight = E::from_f32(score);
    }
    let decay = math::exp(before - now);
    let mut lanes = [0.0; 16];
    for half in scores.chunks_exact(16) {
        for (lane, &score) in lanes.iter_mut().zip(half) {
            *lane += score;
        }
    }
    *largest = now;
    *total = *total * decay + lanes.iter().sum::<f32>();
    decay
}
