//! Functions of vectors. Sums are taken in a fixed order, so that results do not depend on what
//! else a step computes.

use crate::element::Element;
use crate::tile::{Kernel, LANES};
use crate::vector::Vector;

/// `e^x` to about 2 units in the last place (Cephes' polynomial), of what lies from -87 to 88:
/// others are taken for the nearest of these.
#[inline(always)]
fn exp<V: Vector>(x: V) -> V {
    let x = x.at_least(-87.0).at_most(88.0);
    let n = x.mul(V::splat(std::f32::consts::LOG2_E)).round();
    let r = n.fused(V::splat(-0.693_359_4), x);
    let r = n.fused(V::splat(2.121_944_4e-4), r);
    let mut p = V::splat(1.987_569_1e-4);
    for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5, 1.0, 1.0] {
        p = p.fused(r, V::splat(coefficient));
    }
    p.times_power(n)
}

/// `2^x` of what is not positive, to about 2 units in the last place (Cephes' polynomial); 0 far
/// below.
#[inline(always)]
pub(crate) fn exp2<V: Vector>(x: V) -> V {
    let x = x.at_least(-200.0);
    let n = x.round();
    let r = x.sub(n);
    let mut p = V::splat(1.535_336_2e-4);
    for coefficient in
        [1.339_887_4e-3, 9.618_437e-3, 5.550_332_5e-2, 0.240_226_48, std::f32::consts::LN_2, 1.0]
    {
        p = p.fused(r, V::splat(coefficient));
    }
    p.times_power(n)
}

/// [`exp2`] of one number.
#[inline(always)]
pub(crate) fn exp2_of<V: Vector>(x: f32) -> f32 {
    exp2(V::splat(x)).to_array()[0]
}

/// `x / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn silu<V: Vector>(x: V) -> V {
    x.div(exp(V::splat(0.0).sub(x)).add(V::splat(1.0)))
}

/// Root mean square normalisation (Zhang & Sennrich 2019) of `x`, scaled by `weight`.
#[inline(always)]
pub(crate) fn rms_norm<E: Element, K: Kernel<E>>(
    x: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [E],
) {
    let factor = rms_factor::<K::Vector>(x, eps);
    let whole = x.len() / LANES * LANES;
    assert!(weight.len() >= x.len() && out.len() >= x.len(), "as many weights and results");
    for at in (0..whole).step_by(LANES) {
        // SAFETY: whole vectors of all three.
        unsafe {
            let x = K::Vector::load(x.as_ptr().add(at)).mul(K::Vector::splat(factor));
            let normed = x.mul(K::Vector::load(weight.as_ptr().add(at)));
            K::narrow(normed, out.as_mut_ptr().add(at));
        }
    }
    for at in whole..x.len() {
        out[at] = E::from_f32(x[at] * factor * weight[at]);
    }
}

/// What normalises `x`.
#[inline(always)]
pub(crate) fn rms_factor<V: Vector>(x: &[f32], eps: f32) -> f32 {
    // Two sums in turn: one would wait for its own last addition.
    let mut sums = [V::splat(0.0); 2];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for (at, chunk) in chunks.iter().enumerate() {
        // SAFETY: a whole vector.
        let x = unsafe { V::load(chunk.as_ptr()) };
        sums[at % 2] = x.fused(x, sums[at % 2]);
    }
    let rest: f32 = rest.iter().map(|x| x * x).sum();
    let sum = sums[0].add(sums[1]).sum() + rest;
    1.0 / (sum / x.len() as f32 + eps).sqrt()
}

/// Rotates a head in place (Su et al. 2021); pairs are `(i, i + len / 2)`, `cos` and `sin` have one
/// entry a pair.
#[inline(always)]
pub(crate) fn rotate<V: Vector>(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = head.split_at_mut(cos.len());
    let whole = cos.len() / LANES * LANES;
    assert!(second.len() == cos.len() && sin.len() == cos.len(), "half a head of each");
    for at in (0..whole).step_by(LANES) {
        // SAFETY: whole vectors of all four.
        unsafe {
            let (a, b) = (first.as_mut_ptr().add(at), second.as_mut_ptr().add(at));
            let (cos, sin) = (V::load(cos.as_ptr().add(at)), V::load(sin.as_ptr().add(at)));
            let (x, y) = (V::load(a), V::load(b));
            x.mul(cos).sub(y.mul(sin)).store(a);
            y.mul(cos).add(x.mul(sin)).store(b);
        }
    }
    for at in whole..cos.len() {
        let (x, y) = (first[at], second[at]);
        first[at] = x * cos[at] - y * sin[at];
        second[at] = y * cos[at] + x * sin[at];
    }
}

/// Rounds to elements.
#[inline(always)]
pub(crate) fn narrow<E: Element, K: Kernel<E>>(from: &[f32], to: &mut [E]) {
    let (from, from_rest) = from.as_chunks::<LANES>();
    let (to, to_rest) = to.as_chunks_mut::<LANES>();
    for (from, to) in from.iter().zip(to) {
        // SAFETY: whole vectors.
        unsafe { K::narrow(K::Vector::load(from.as_ptr()), to.as_mut_ptr()) };
    }
    for (&from, to) in from_rest.iter().zip(to_rest) {
        *to = E::from_f32(from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tile::Plain;
    use crate::vector::Array;

    fn one(work: impl Fn(Array) -> Array, x: f32) -> f64 {
        f64::from(work(Array::splat(x)).to_array()[3])
    }

    #[test]
    fn exponentials_are_close_and_keep_specials() {
        for step in -8700..8800 {
            let x = step as f32 / 100.0;
            assert!((one(exp, x) / f64::from(x).exp() - 1.0).abs() < 3e-7, "{x}");
        }
        for step in -12600..=0 {
            let x = step as f32 / 100.0;
            assert!((one(exp2, x) / f64::from(x).exp2() - 1.0).abs() < 3e-7, "{x}");
        }
        assert_eq!(one(exp2, f32::NEG_INFINITY), 0.0);
        assert_eq!((one(exp, 0.0), one(exp2, 0.0)), (1.0, 1.0));
        assert!(one(exp, f32::NAN).is_nan() && one(exp2, f32::NAN).is_nan());
        assert!(one(silu, -200.0).abs() < 1e-30);
        assert!((one(silu, 1.0) - 0.731_058_6).abs() < 1e-6);
        assert!(one(silu, f32::NAN).is_nan());
        assert_eq!(one(silu, f32::INFINITY), f64::INFINITY);
    }

    #[test]
    fn norms_and_rotations() {
        let x: Vec<f32> = (0..37).map(|i| i as f32 - 11.0).collect();
        let weight: Vec<f32> = (0..37).map(|i| 0.1 * i as f32).collect();
        let mut out = vec![0.0f32; 37];
        rms_norm::<f32, Plain>(&x, &weight, 1e-5, &mut out);
        let mean = x.iter().map(|&x| f64::from(x * x)).sum::<f64>() / 37.0;
        for i in 0..37 {
            let exact = f64::from(x[i]) / (mean + 1e-5).sqrt() * f64::from(weight[i]);
            assert!((f64::from(out[i]) - exact).abs() < 1e-5);
        }
        let before: Vec<f32> = (0..36).map(|i| i as f32 / 7.0).collect();
        let (cos, sin): (Vec<f32>, Vec<f32>) =
            (0..18).map(|i| ((i as f32).cos(), (i as f32).sin())).unzip();
        let mut head = before.clone();
        rotate::<Array>(&mut head, &cos, &sin);
        for i in 0..18 {
            assert!((head[i] - (before[i] * cos[i] - before[i + 18] * sin[i])).abs() < 1e-6);
            assert!((head[i + 18] - (before[i + 18] * cos[i] + before[i] * sin[i])).abs() < 1e-6);
        }
    }
}
