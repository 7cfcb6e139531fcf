//! Compares the products, attention and vectors of every kind of processor with the formulas.

use std::fmt::Debug;

use proptest::prelude::*;

use super::*;
use crate::isa::plain::{Array, Plain};
use crate::isa::tests::{Check, kernels_and_emulated};
use crate::pack::{pack, packed_len};

/// Random numbers between -0.5 and 0.5.
pub(crate) fn numbers<E: Element>(count: usize, seed: u32) -> Vec<E> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        E::from_f32(state as f32 / u32::MAX as f32 - 0.5)
    };
    (0..count).map(|_| next()).collect()
}

fn exact<E: Element>(a: &[E], b: &[E]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(a.to_f32()) * f64::from(b.to_f32())).sum()
}

fn close(found: f32, exact: f64, terms: usize) {
    let bound = 1e-5 * (terms as f64).sqrt();
    assert!((f64::from(found) - exact).abs() < bound, "{found} {exact}");
}

fn check_tile<E: Element + Debug + PartialEq, K: Kernel<E>>(k: usize, rows: usize, seed: u32) {
    let weights: Vec<E> = numbers(NR * k, seed);
    let (mut plain, mut panel) =
        (vec![E::default(); packed_len(NR, k)], vec![E::default(); packed_len(NR, k)]);
    // SAFETY: the caller detected the features.
    unsafe {
        pack::<E, Plain>(&weights, NR, k, false, &mut plain);
        pack::<E, K>(&weights, NR, k, false, &mut panel);
    }
    assert_eq!(plain, panel);
    let rows = rows.min(K::ROWS);
    let a: Vec<E> = numbers(rows * k, !seed);
    let all = arranged::<E, K>(&a, rows, k);
    let first = (seed as usize % (k / K::INNER + 1)) * K::INNER;
    for ahead in [Ahead::Nothing, Ahead::Half(panel.as_ptr()), Ahead::Whole(std::ptr::null())] {
        let mut out = [[f32::NAN; NR]; MAX_ROWS];
        let (to, all) = (out.as_mut_ptr(), all.as_ptr());
        // SAFETY: the rows and the panel have k positions, which are computed at once or in two
        // parts.
        unsafe {
            if first == 0 {
                K::tile(all, rows, panel.as_ptr(), k, ahead, false, to);
            } else {
                let (rest, later) = (panel.as_ptr().add(first * NR), all.add(first * rows));
                K::tile(all, rows, panel.as_ptr(), first, ahead, false, to);
                K::tile(later, rows, rest, k - first, ahead, true, to);
            }
        }
        for (r, row) in out.iter().enumerate().take(rows) {
            let a = &a[r * k..][..k];
            for (column, &found) in row.iter().enumerate() {
                close(found, exact(a, &weights[column * k..][..k]), k);
            }
            let mut alone = [[f32::NAN; NR]; MAX_ROWS];
            let numbers = arranged::<E, K>(a, 1, k);
            // SAFETY: as above.
            unsafe {
                let (numbers, alone) = (numbers.as_ptr(), alone.as_mut_ptr());
                K::tile(numbers, 1, panel.as_ptr(), k, Ahead::Nothing, false, alone);
            }
            assert_eq!(
                row, &alone[0],
                "whatever is computed beside it, and in however many pieces"
            );
        }
    }
}

/// Arranges rows in the tiles' order, and checks that nothing is written past them.
pub(crate) fn arranged<E: Element, K: Kernel<E>>(a: &[E], rows: usize, k: usize) -> Vec<K::Number> {
    let mut room = vec![u32::MAX; rows * k + MAX_ROWS];
    // SAFETY: the rows have k elements, and there is room for as many numbers, which are at most 32
    // bits each.
    unsafe {
        let to = room.as_mut_ptr().cast::<K::Number>();
        K::arrange(a.as_ptr(), rows, k, to);
        assert!(
            std::slice::from_raw_parts(to.add(rows * k).cast::<u8>(), 4)
                .iter()
                .all(|&byte| byte == 0xff)
        );
        std::slice::from_raw_parts(to, rows * k).to_vec()
    }
}

fn check_attention<E: Element, K: Kernel<E>>(
    (dim, padded): (usize, usize),
    (rows, groups): (usize, usize),
    seed: u32,
) {
    let queries: Vec<E> = numbers(rows * dim, seed);
    let keys: Vec<E> = numbers(GROUPS * GROUP * dim, !seed);
    let group = |index: usize| keys[index * GROUP * dim..].as_ptr();
    let scores_of = |queries: &[E], rows: usize| -> Scores {
        let mut scores = [[f32::NAN; BLOCK]; MAX_ROWS];
        let queries = arranged::<E, K>(queries, rows, dim);
        // SAFETY: queries and groups have the given sizes.
        unsafe {
            let groups = std::array::from_fn(group);
            K::scores(queries.as_ptr(), rows, &groups, &groups, dim, &mut scores);
        }
        scores
    };
    let scores = scores_of(&queries, rows);
    for r in 0..rows {
        let alone = scores_of(&queries[r * dim..][..dim], 1);
        assert_eq!(scores[r], alone[0], "whatever is computed beside it");
        for (position, &found) in scores[r].iter().enumerate() {
            let (group, lane) = (position / GROUP * GROUP * dim, position % GROUP);
            let key: Vec<E> = (0..dim)
                .map(|d| keys[group + (d / E::PAIR * GROUP + lane) * E::PAIR + d % E::PAIR])
                .collect();
            close(found, exact(&queries[r * dim..][..dim], &key), dim);
        }
    }

    // Floats that elements represent exactly, so that their conversion to numbers changes nothing.
    let weights: Vec<E> = numbers(MAX_ROWS * BLOCK, seed ^ 77);
    let mut room = vec![0f32; weights.len()];
    let weights_at = room.as_mut_ptr().cast::<K::Number>();
    for (at, weights) in weights.chunks_exact(LANES).enumerate() {
        let floats: Vec<f32> = weights.iter().map(|weight| weight.to_f32()).collect();
        // SAFETY: `floats` is a whole vector. `room` has an `f32` for each weight, and a number is
        // no larger than an `f32`.
        unsafe { K::number(K::Vector::load(floats.as_ptr()), weights_at.add(at * LANES)) };
    }
    let values: Vec<E> = numbers(groups * GROUP * padded, seed ^ 99);
    let decay: [f32; MAX_ROWS] = std::array::from_fn(|r| r as f32 / 4.0);
    let before: Vec<f32> = numbers(rows * padded, seed ^ 55);
    let (mut out, mut alone) = (before.clone(), before.clone());
    // SAFETY: as above.
    unsafe {
        let values: Vec<*const E> =
            (0..groups).map(|group| values[group * GROUP * padded..].as_ptr()).collect();
        let ahead = [std::ptr::null(); GROUPS];
        K::mix(weights_at, rows, &values, &ahead, padded, &decay, out.as_mut_ptr());
        for r in 0..rows {
            let (weights, out) = (weights_at.add(r * BLOCK), &mut alone[r * padded..]);
            let decay = [decay[r]; MAX_ROWS];
            K::mix(weights, 1, &values, &ahead, padded, &decay, out.as_mut_ptr());
        }
    }
    assert_eq!(out, alone, "whatever is computed beside it");
    for (at, &found) in out.iter().enumerate() {
        let (r, d) = (at / padded, at % padded);
        let value: Vec<E> = (0..groups * GROUP)
            .map(|position| {
                let (group, within) = (position / GROUP, position % GROUP);
                let row = group * GROUP + within / E::PAIR * E::PAIR;
                values[row * padded + d * E::PAIR + within % E::PAIR]
            })
            .collect();
        let added = exact(&weights[r * BLOCK..][..groups * GROUP], &value);
        close(found, f64::from(before[at]) * f64::from(decay[r]) + added, groups * GROUP);
    }
    check_vector::<E, K>(seed);
}

/// Compares the processor's vector with the plain one.
fn check_vector<E: Element, K: Kernel<E>>(seed: u32) {
    let numbers: Vec<f32> = numbers(3 * LANES, seed);
    // SAFETY: there are whole vectors at all pointers.
    let both = |at: usize| unsafe {
        let from = numbers.as_ptr().add(at * LANES);
        (K::Vector::load(from), Array::load(from))
    };
    let ((a, x), (b, y), (c, z)) = (both(0), both(1), both(2));
    let count = seed as usize % (LANES + 1);
    let same = |found: K::Vector, wanted: Array| {
        for (found, wanted) in found.to_array().into_iter().zip(wanted.to_array()) {
            let close = (found - wanted).abs() <= 1e-5 * wanted.abs().max(1.0);
            assert!(found == wanted || close, "{found} {wanted}");
        }
    };
    same(a.add(b), x.add(y));
    same(a.sub(b), x.sub(y));
    same(a.mul(b), x.mul(y));
    same(a.div(b.add(K::Vector::splat(1.0))), x.div(y.add(Array::splat(1.0))));
    same(a.fused(b, c), x.fused(y, z));
    same(a.larger(b), x.larger(y));
    same(a.at_least(0.1).at_most(0.3), x.at_least(0.1).at_most(0.3));
    let (hundreds, others) = (K::Vector::splat(-700.0), Array::splat(-700.0));
    same(a.mul(hundreds).round(), x.mul(others).round());
    let (n, m) = (a.mul(hundreds).at_least(-200.0).at_most(127.0).round(), {
        x.mul(others).at_least(-200.0).at_most(127.0).round()
    });
    same(b.times_power(n), y.times_power(m));
    same(a.only(count), x.only(count));
    close(a.sum(), numbers[..LANES].iter().copied().map(f64::from).sum(), LANES);
    assert_eq!(a.largest(), x.largest());
    for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut lanes = x.to_array();
        lanes[count % LANES] = special;
        // SAFETY: there are whole vectors at all pointers.
        let (odd, plain) =
            unsafe { (K::Vector::load(lanes.as_ptr()), Array::load(lanes.as_ptr())) };
        assert!(a.is_finite() && x.is_finite() && !odd.is_finite() && !plain.is_finite());
        assert_eq!(
            odd.at_least(-1.0).at_most(1.0).to_array()[count % LANES].is_nan(),
            special.is_nan()
        );
    }
    let mut narrow = [E::default(); LANES];
    // SAFETY: `narrow` has room for a vector.
    unsafe { K::narrow(a, narrow.as_mut_ptr()) };
    for (found, &wanted) in narrow.iter().zip(&numbers) {
        assert_eq!(found.to_f32(), E::from_f32(wanted).to_f32());
    }
}

struct Sizes {
    groups: usize,
    rows: usize,
    seed: u32,
}

impl Check for Sizes {
    fn kernel<E: Element + Debug + PartialEq, K: Kernel<E>>(&self) {
        let &Self { groups, rows, seed } = self;
        let k = groups * E::PAIR;
        check_tile::<E, K>(k, rows, seed);
        let sizes = (k, (k % 96 + 1).next_multiple_of(LANES));
        check_attention::<E, K>(sizes, (rows.min(K::QUERIES), seed as usize % GROUPS + 1), seed);
    }
}

proptest! {
    #[test]
    fn kernels_compute_products(groups in 1usize..160, rows in 1usize..=MAX_ROWS, seed: u32) {
        kernels_and_emulated(&Sizes { groups, rows, seed });
    }
}
