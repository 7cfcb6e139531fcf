//! The innermost loops: a few rows times packed panels, for each kind of processor.

use crate::element::Element;
use crate::pack::NR;
use crate::vector::{Array, Vector};

#[cfg(target_arch = "x86_64")]
pub(crate) use crate::x86::{Avx512, Avx512Bf16, Avx512Wide};

/// Results of a tile: one array of outputs a row.
pub(crate) type Tile = [[f32; NR]; MAX_ROWS];
/// Rows of the largest tile.
pub(crate) const MAX_ROWS: usize = 12;

/// Lanes of a vector: what all loops over vectors are written for, whatever the processor has.
pub(crate) const LANES: usize = 16;
/// Positions of keys or values that lie together, see [`crate::pages`].
pub(crate) const GROUP: usize = LANES;
/// Groups of a block of attention.
pub(crate) const GROUPS: usize = 4;
/// Positions of a block of attention.
pub(crate) const BLOCK: usize = GROUP * GROUPS;
/// Queries that share a block while it is in registers.
pub(crate) const QUERIES: usize = 6;
/// Scores, and then weights, of some queries for a block.
pub(crate) type Scores = [[f32; BLOCK]; QUERIES];

/// What a tile begins to load beside its work, from an address that need not be valid.
#[derive(Clone, Copy)]
#[cfg_attr(
    not(target_arch = "x86_64"),
    expect(dead_code, reason = "other processors' kernels load nothing ahead")
)]
pub(crate) enum Ahead<E> {
    Nothing,
    /// Half as much as a panel has.
    Half(*const E),
    /// As much as a panel has.
    Whole(*const E),
}

/// A processor's way of computing with elements `E`.
///
/// # Safety
/// Implementations may use instructions that not every processor has: their methods may be called only where those were detected.
pub(crate) unsafe trait Kernel<E: Element>: 'static {
    /// Rows that a tile may have, at most [`MAX_ROWS`].
    const ROWS: usize;
    /// Its floats.
    type Vector: Vector;

    /// `out[r] = a[r * stride ..][.. k] · panel` for `r < rows`.
    ///
    /// # Safety
    /// `a` has `rows` rows of `k` elements, `stride` apart; `panel` is a packed panel of `k` inner positions, `k` a multiple of `E::PAIR`;
    /// `1 <= rows <= Self::ROWS`.
    unsafe fn tile(
        a: *const E,
        stride: usize,
        rows: usize,
        panel: *const E,
        k: usize,
        ahead: Ahead<E>,
        out: &mut Tile,
    );

    /// `out[r] = queries[r * dim ..][.. dim] · keys` for `r < rows`.
    ///
    /// # Safety
    /// `queries` has `rows` rows of `dim` elements, `keys` are groups of keys; `dim` is a multiple of `E::PAIR`; `1 <= rows <= QUERIES`.
    unsafe fn scores(
        queries: *const E,
        rows: usize,
        keys: &[*const E; GROUPS],
        dim: usize,
        out: &mut Scores,
    );

    /// `out[r * dim ..][.. dim] = out[r * dim ..][.. dim] * decay[r] + weights[r] · values`, for `r < rows`.
    ///
    /// # Safety
    /// `weights` has `rows` rows of [`BLOCK`] elements, `out` `rows` rows of `dim`; `values` are groups of values, `dim` wide; `dim` is a multiple of
    /// [`LANES`]; `1 <= rows <= QUERIES`.
    unsafe fn mix(
        weights: *const E,
        rows: usize,
        values: &[*const E],
        dim: usize,
        decay: &[f32; QUERIES],
        out: *mut f32,
    );

    /// `panel[d * pitch + r] = rows[r][d]` for groups of `E::PAIR` elements.
    ///
    /// # Safety
    /// Each of `rows` can be read for `k` elements, a multiple of `E::PAIR`; `panel` can be written wherever the formula says.
    unsafe fn pack_rows(rows: &[*const E; LANES], k: usize, panel: *mut E, pitch: usize);

    /// Rounds to elements.
    ///
    /// # Safety
    /// `to` can be written for [`LANES`] elements.
    unsafe fn narrow(values: Self::Vector, to: *mut E);

    /// Begins to load the cache line at `address`, which need not be valid.
    fn prefetch(address: *const E);
}

/// Plain loops, which the compiler turns into the vectors of whatever processor the caller is compiled for.
pub(crate) struct Plain;

// SAFETY: no special instructions.
unsafe impl<E: Element> Kernel<E> for Plain {
    const ROWS: usize = 4;
    type Vector = Array;

    #[inline(always)]
    unsafe fn tile(
        a: *const E,
        stride: usize,
        rows: usize,
        panel: *const E,
        k: usize,
        _: Ahead<E>,
        out: &mut Tile,
    ) {
        for (r, sums) in out.iter_mut().enumerate().take(rows) {
            // SAFETY: row r and the panel, by the contract.
            unsafe { *sums = product(a.add(r * stride), panel, k) };
        }
    }

    #[inline(always)]
    unsafe fn scores(
        queries: *const E,
        rows: usize,
        keys: &[*const E; GROUPS],
        dim: usize,
        out: &mut Scores,
    ) {
        for (r, sums) in out.iter_mut().enumerate().take(rows) {
            for (sums, &keys) in sums.chunks_exact_mut(GROUP).zip(keys) {
                // SAFETY: a query and a group of keys, by the contract.
                let group: [f32; GROUP] = unsafe { product(queries.add(r * dim), keys, dim) };
                sums.copy_from_slice(&group);
            }
        }
    }

    #[inline(always)]
    unsafe fn mix(
        weights: *const E,
        rows: usize,
        values: &[*const E],
        dim: usize,
        decay: &[f32; QUERIES],
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
        // SAFETY: the contract.
        unsafe { to.cast::<[E; LANES]>().write(values.to_array().map(E::from_f32)) };
    }

    #[inline(always)]
    fn prefetch(_: *const E) {}
}

/// `row[.. k] · panel`, `N` outputs wide.
///
/// # Safety
/// The row has `k` elements, the panel `k * N`.
#[inline(always)]
unsafe fn product<E: Element, const N: usize>(
    row: *const E,
    panel: *const E,
    k: usize,
) -> [f32; N] {
    let mut sums = [0.0; N];
    for group in 0..k / E::PAIR {
        for within in 0..E::PAIR {
            // SAFETY: inside the row, by the contract.
            let x = unsafe { (*row.add(group * E::PAIR + within)).to_f32() };
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
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::element::Bf16;
    use crate::pack::{pack, packed_len};

    /// Numbers between -0.5 and 0.5.
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

    fn check_tile<E: Element + std::fmt::Debug + PartialEq, K: Kernel<E>>(
        k: usize,
        rows: usize,
        seed: u32,
    ) {
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
        let a: Vec<E> = numbers(rows * (k + 3), !seed);
        for ahead in [Ahead::Nothing, Ahead::Half(panel.as_ptr()), Ahead::Whole(std::ptr::null())] {
            let mut out = [[f32::NAN; NR]; MAX_ROWS];
            // SAFETY: rows of k + 3 elements, a panel of k.
            unsafe { K::tile(a.as_ptr(), k + 3, rows, panel.as_ptr(), k, ahead, &mut out) };
            for (r, row) in out.iter().enumerate().take(rows) {
                for (column, &found) in row.iter().enumerate() {
                    let exact = exact(&a[r * (k + 3)..][..k], &weights[column * k..][..k]);
                    close(found, exact, k);
                }
            }
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
        let mut scores = [[f32::NAN; BLOCK]; QUERIES];
        // SAFETY: queries and groups of the sizes given.
        unsafe {
            let keys = std::array::from_fn(group);
            K::scores(queries.as_ptr(), rows, &keys, dim, &mut scores);
        }
        for r in 0..rows {
            for (position, &found) in scores[r].iter().enumerate() {
                let (group, lane) = (position / GROUP * GROUP * dim, position % GROUP);
                let key: Vec<E> = (0..dim)
                    .map(|d| keys[group + (d / E::PAIR * GROUP + lane) * E::PAIR + d % E::PAIR])
                    .collect();
                close(found, exact(&queries[r * dim..][..dim], &key), dim);
            }
        }

        let weights: Vec<E> = numbers(QUERIES * BLOCK, seed ^ 77);
        let values: Vec<E> = numbers(groups * GROUP * padded, seed ^ 99);
        let decay: [f32; QUERIES] = std::array::from_fn(|r| r as f32 / 4.0);
        let before: Vec<f32> = numbers(rows * padded, seed ^ 55);
        let mut out = before.clone();
        // SAFETY: as above.
        unsafe {
            let values: Vec<*const E> =
                (0..groups).map(|group| values[group * GROUP * padded..].as_ptr()).collect();
            K::mix(weights.as_ptr(), rows, &values, padded, &decay, out.as_mut_ptr());
        }
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

    /// The processor's vector against the plain one.
    fn check_vector<E: Element, K: Kernel<E>>(seed: u32) {
        let numbers: Vec<f32> = numbers(3 * LANES, seed);
        // SAFETY: whole vectors.
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
            // SAFETY: whole vectors.
            let (odd, plain) =
                unsafe { (K::Vector::load(lanes.as_ptr()), Array::load(lanes.as_ptr())) };
            assert!(a.is_finite() && x.is_finite() && !odd.is_finite() && !plain.is_finite());
            assert_eq!(
                odd.at_least(-1.0).at_most(1.0).to_array()[count % LANES].is_nan(),
                special.is_nan()
            );
        }
        let mut narrow = [E::default(); LANES];
        // SAFETY: as many as there are.
        unsafe { K::narrow(a, narrow.as_mut_ptr()) };
        for (found, &wanted) in narrow.iter().zip(&numbers) {
            assert_eq!(found.to_f32(), E::from_f32(wanted).to_f32());
        }
    }

    fn check<E: Element + std::fmt::Debug + PartialEq, K: Kernel<E>>(
        k: usize,
        rows: usize,
        seed: u32,
    ) {
        check_tile::<E, K>(k, rows, seed);
        let sizes = (k, (k % 96 + 1).next_multiple_of(LANES));
        check_attention::<E, K>(sizes, (rows.min(QUERIES), seed as usize % GROUPS + 1), seed);
    }

    proptest! {
        #[test]
        fn kernels_compute_products(k in 1usize..160, rows in 1usize..=MAX_ROWS, seed: u32) {
            check::<f32, Plain>(k, rows, seed);
            check::<Bf16, Plain>(2 * k, rows, seed);
            #[cfg(target_arch = "x86_64")]
            {
                if is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512dq") {
                    check::<f32, Avx512>(k, rows, seed);
                    check::<Bf16, Avx512Wide>(2 * k, rows, seed);
                    if is_x86_feature_detected!("avx512bf16") {
                        check::<Bf16, Avx512Bf16>(2 * k, rows, seed);
                    }
                }
            }
        }
    }
}
