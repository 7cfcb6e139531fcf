//! Compares attention with its formula, for arbitrary page tables and arbitrary divisions of the
//! work.

use std::fmt::Debug;

use proptest::prelude::*;

use super::*;
use crate::isa::tests::{Check, kernels};
use crate::pages::codes::tests::rounded;
use crate::tile::tests::numbers;

struct Sizes {
    shape: Shape,
    /// The number of positions; those from `start` on have queries.
    length: usize,
    start: usize,
    together: bool,
    /// True if each head has a sink: a score that takes weight but has no value.
    sinks: bool,
    seed: u32,
}

fn check<E: Element, K: Kernel<E>>(sizes: &Sizes, bound: f64) {
    let Sizes { shape, length, start, together, sinks, seed } = *sizes;
    let Shape { heads, kv_heads, head_dim: dim, page_size, scale, coded, latent, .. } = shape;
    // Latent rows are the keys of all heads.
    let kv_heads = if latent > 0 { 1 } else { kv_heads };
    let width = shape.value_dim();
    // The sinks include one that takes nearly all of the weight, and one that takes nearly none.
    let sinks: Vec<f32> = (0..if sinks { heads } else { 0 })
        .map(|head| [0.5, 30.0, -30.0, 2.0, -1.0][head % 5])
        .collect();
    let tokens = length - start;
    let (q, mut k, mut v): (Vec<E>, Vec<E>, Vec<E>) = (
        numbers(tokens * heads * dim, seed),
        numbers(length * kv_heads * dim, !seed),
        numbers(length * kv_heads * dim, seed ^ 99),
    );
    // The pages are in permuted order, and contain stale data.
    let count = length.div_ceil(page_size);
    let pages: Vec<i32> = (0..count).map(|page| ((page * 7 + 3) % count) as i32).collect();
    all_differ(&pages);
    let left = vec![E::from_f32(f32::NAN); count * page_size * kv_heads * dim];
    let (mut keys, mut values) = (left.clone(), left);
    let pool = Pool { keys: keys.as_mut_ptr(), values: values.as_mut_ptr() };
    for position in 0..length {
        let entry = pages[position / page_size] as usize * page_size + position % page_size;
        for head in 0..kv_heads {
            let head_of =
                (position * kv_heads + head) * dim..(position * kv_heads + head + 1) * dim;
            // SAFETY: `entry` is an entry of the pool.
            unsafe {
                if latent > 0 {
                    let row: Vec<f32> = k[head_of.clone()].iter().map(|x| x.to_f32()).collect();
                    pool.keep_row::<K>(&shape, entry, &row, &mut v[head_of.clone()]);
                    let kept = if coded { rounded(&row) } else { row };
                    k[head_of.clone()].copy_from_slice(&elements(&kept));
                    v[head_of].copy_from_slice(&elements(&kept));
                } else if coded {
                    let wide = |of: &[E]| of.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
                    let (key, value) = (wide(&k[head_of.clone()]), wide(&v[head_of.clone()]));
                    pool.keep_codes::<K::Vector>(&shape, (entry, head), &key, &value);
                    k[head_of.clone()].copy_from_slice(&elements(&rounded(&key)));
                    v[head_of].copy_from_slice(&elements(&rounded(&value)));
                } else {
                    pool.keep(&shape, (entry, head), &k[head_of.clone()], &v[head_of]);
                }
            }
        }
    }

    let mut work = Work::default();
    let held = Held { pages: pages.as_ptr(), kv_head: 0 };
    let queries = Queries { token: 0, to: 0, tokens, position: start, held };
    work.add(&shape, queries, length, together);
    work.arrange(&shape);
    let shared = work.shared();
    let mut scratch = Scratch::<E>::new(&[shape]);
    let mut out = vec![E::default(); tokens * heads * width];
    // Compute twice, as for two layers.
    for _ in 0..2 {
        out.fill(E::default());
        for (index, unit) in shared.units.iter().enumerate() {
            let units = (unit, shared.units.get(index + 1));
            let together = unit.heads * shape.group();
            for index in 0..unit.queries.tokens {
                let first = unit.queries.held.kv_head * shape.group();
                let from = ((unit.queries.token + index) * heads + first) * dim;
                scratch.queries[index * together * dim..][..together * dim]
                    .copy_from_slice(&q[from..][..together * dim]);
            }
            // SAFETY: the unit has these queries, and every position has a page.
            unsafe {
                let read = (pool, sinks.as_slice());
                attend::<E, K>(&shape, shared, units, read, out.as_mut_ptr(), &mut scratch);
            }
        }
    }
    let dot = |a: &[E], b: &[E]| -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(a.to_f32()) * f64::from(b.to_f32())).sum()
    };
    for token in 0..tokens {
        for head in 0..heads {
            let at = (token * heads + head) * dim;
            let own = if latent > 0 { 0 } else { head / shape.group() };
            let row = |position: usize| (position * kv_heads + own) * dim;
            let seen = if shape.both_ways { length } else { start + token + 1 };
            let capped = |score: f64| match f64::from(shape.cap) {
                0.0 => score,
                cap => cap * (score / cap).tanh(),
            };
            let visible = |position: usize| {
                let query = start + token;
                let in_window = shape.window == 0 || position.abs_diff(query) < shape.window;
                let in_chunk = shape.chunk == 0 || position / shape.chunk == query / shape.chunk;
                in_window && in_chunk
            };
            let weights: Vec<f64> = (0..seen)
                .map(|position| {
                    let score = dot(&q[at..at + dim], &k[row(position)..][..dim]);
                    let weight = capped(score * f64::from(scale)).exp();
                    if visible(position) { weight } else { 0.0 }
                })
                .collect();
            let sink = sinks.get(head).map_or(0.0, |&sink| f64::from(sink).exp());
            let total: f64 = weights.iter().sum::<f64>() + sink;
            for d in 0..width {
                let exact: f64 = weights
                    .iter()
                    .enumerate()
                    .map(|(position, weight)| weight * f64::from(v[row(position) + d].to_f32()))
                    .sum();
                let found = f64::from(out[(token * heads + head) * width + d].to_f32());
                assert!((found - exact / total).abs() < bound, "{found} {}", exact / total);
            }
        }
    }
}

fn elements<E: Element>(numbers: &[f32]) -> Vec<E> {
    numbers.iter().map(|&number| E::from_f32(number)).collect()
}

/// Asserts that all pages differ.
fn all_differ(pages: &[i32]) {
    let mut sorted = pages.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    assert_eq!(sorted.len(), pages.len());
}

impl Check for Sizes {
    fn kernel<E: Element + Debug + PartialEq, K: Kernel<E>>(&self) {
        check::<E, K>(self, if E::PAIR == 1 { 1e-5 } else { 5e-3 });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn attention_is_the_formula(
        (group, kv_heads) in (1usize..5, 1usize..4),
        dim in prop::sample::select(vec![2usize, 16, 24, 64, 80]),
        page_size in prop::sample::select(vec![1usize, 5, 16, 32]),
        (length, asked) in (1usize..150, 1usize..40),
        (together, both_ways, sinks) in any::<(bool, bool, bool)>(),
        (window, chunk, cap) in (
            prop::sample::select(vec![0usize, 1, 5, 63, 64, 65, 100, 400]),
            prop::sample::select(vec![0usize, 0, 7, 64]),
            prop::sample::select(vec![0.0f32, 0.7, 50.0]),
        ),
        seed: u32,
    ) {
        // Chunked attention is causal: a query sees the positions from its chunk's start to its
        // own.
        let chunk = if both_ways { 0 } else { chunk };
        // The permutation of pages requires a count that is not a multiple of 7.
        let length = if length.div_ceil(page_size).is_multiple_of(7) { length + page_size } else { length };
        let shape = Shape {
            heads: group * kv_heads, kv_heads, head_dim: dim, page_size, scale: 0.7, window, chunk,
            both_ways, cap, ..Shape::CAUSAL
        };
        let start = length.saturating_sub(asked);
        kernels(&Sizes { shape, length, start, together, sinks, seed });
    }

    #[test]
    fn attention_to_codes_is_the_formula(
        (group, kv_heads) in (1usize..5, 1usize..4),
        dim in prop::sample::select(vec![32usize, 64, 96, 128]),
        page_size in prop::sample::select(vec![16usize, 32]),
        (length, asked) in (1usize..150, 1usize..40),
        (together, both_ways) in any::<(bool, bool)>(),
        seed: u32,
    ) {
        let length = if length.div_ceil(page_size).is_multiple_of(7) { length + page_size } else { length };
        let shape = Shape {
            heads: group * kv_heads, kv_heads, head_dim: dim, page_size, scale: 0.2, coded: true,
            window: seed as usize % 90, both_ways, ..Shape::CAUSAL
        };
        let start = length.saturating_sub(asked);
        kernels(&Sizes { shape, length, start, together, sinks: false, seed });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn attention_to_latent_rows_is_the_formula(
        (group, groups) in (1usize..20, 1usize..4),
        (latent, shared) in (
            prop::sample::select(vec![16usize, 24, 32, 80]),
            prop::sample::select(vec![2usize, 8, 16]),
        ),
        page_size in prop::sample::select(vec![1usize, 5, 16, 32]),
        (length, asked) in (1usize..150, 1usize..10),
        (together, coded) in any::<(bool, bool)>(),
        seed: u32,
    ) {
        // With codes, a row must consist of whole blocks of 32, and a page of whole groups of
        // positions.
        let (shared, page_size) = match coded {
            true => ((latent + 1).next_multiple_of(32) - latent, page_size.next_multiple_of(16)),
            false => (shared, page_size),
        };
        let length = if length.div_ceil(page_size).is_multiple_of(7) { length + page_size } else { length };
        let shape = Shape {
            heads: group * groups, kv_heads: groups, head_dim: latent + shared, page_size, scale: 0.2, coded,
            latent, ..Shape::CAUSAL
        };
        let start = length.saturating_sub(asked);
        kernels(&Sizes { shape, length, start, together, sinks: false, seed });
    }
}

#[test]
fn spans_of_latent_rows_are_put_together() {
    for (length, asked) in [(SPAN * 2 + 70, 1), (SPAN + 9, 30)] {
        for coded in [false, true] {
            let shape = Shape {
                heads: 6,
                kv_heads: 2,
                head_dim: 64,
                page_size: 16,
                scale: 0.3,
                coded,
                latent: 48,
                ..Shape::CAUSAL
            };
            let start = length - asked;
            kernels(&Sizes { shape, length, start, together: true, sinks: false, seed: 5 });
        }
    }
}

#[test]
fn spans_are_put_together() {
    for (length, asked) in [(SPAN * 2 + 70, 1), (SPAN + 1, 1), (SPAN + 9, 30), (SPAN, 1)] {
        for (together, both_ways, coded) in [
            (false, false, false),
            (true, false, false),
            (false, true, false),
            (false, false, true),
            (true, false, true),
        ] {
            for (window, chunk, sinks) in
                [(0, 0, false), (0, 0, true), (600, 0, true), (40, 0, false), (0, 600, false)]
            {
                let shape = Shape {
                    heads: 6,
                    kv_heads: 2,
                    head_dim: 32,
                    page_size: 16,
                    scale: 0.5,
                    coded,
                    window,
                    chunk: if both_ways { 0 } else { chunk },
                    both_ways,
                    ..Shape::CAUSAL
                };
                let start = length - asked;
                kernels(&Sizes { shape, length, start, together, sinks, seed: 5 });
            }
        }
    }
}
