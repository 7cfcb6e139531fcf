//! Functions of vectors, written so that the compiler turns them into vector instructions of the caller's processor. Sums are taken
//! in a fixed order, so that results do not depend on what else a step computes.

use crate::element::Element;

const LANES: usize = 16;

/// `e^x` to about 2 units in the last place (Cephes' polynomial); below -87 it is 0, above 88 it is `e^88`.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    // Written so that a not-a-number stays one.
    let clamped = if x < -87.0 { -87.0 } else { x };
    let clamped = if clamped > 88.0 { 88.0 } else { clamped };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * 0.693_359_4 - n * -2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = p * r + coefficient;
    }
    let y = p * r * r + r + 1.0;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0f32.to_bits()));
    if x < -87.0 { 0.0 } else { y * power }
}

/// Root mean square normalisation (Zhang & Sennrich 2019) of `x`, scaled by `weight`.
#[inline(always)]
pub(crate) fn rms_norm<E: Element>(x: &[f32], weight: &[f32], eps: f32, out: &mut [E]) {
    let factor = rms_factor(x, eps);
    for ((out, &x), &weight) in out.iter_mut().zip(x).zip(weight) {
        *out = E::from_f32(x * factor * weight);
    }
}

/// What normalises `x`.
#[inline(always)]
pub(crate) fn rms_factor(x: &[f32], eps: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += x * x;
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane += x * x;
    }
    1.0 / (lanes.iter().sum::<f32>() / x.len() as f32 + eps).sqrt()
}

/// Rotates a head in place (Su et al. 2021); pairs are `(i, i + len / 2)`, `cos` and `sin` have one entry a pair.
#[inline(always)]
pub(crate) fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = head.split_at_mut(cos.len());
    for (((a, b), &cos), &sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

/// `x / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_and_keeps_specials() {
        for step in -8700..8800 {
            let x = step as f32 / 100.0;
            let exact = f64::from(x).exp();
            assert!((f64::from(exp(x)) / exact - 1.0).abs() < 3e-7, "{x}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!(exp(f32::NAN).is_nan());
        assert!(silu(-200.0).abs() < 1e-30);
        assert!((silu(1.0) - 0.731_058_6).abs() < 1e-6);
    }

    #[test]
    fn norms_and_rotations() {
        let x: Vec<f32> = (0..37).map(|i| i as f32 - 11.0).collect();
        let weight: Vec<f32> = (0..37).map(|i| 0.1 * i as f32).collect();
        let mut out = vec![0.0f32; 37];
        rms_norm(&x, &weight, 1e-5, &mut out);
        let mean = x.iter().map(|&x| f64::from(x * x)).sum::<f64>() / 37.0;
        for i in 0..37 {
            let exact = f64::from(x[i]) / (mean + 1e-5).sqrt() * f64::from(weight[i]);
            assert!((f64::from(out[i]) - exact).abs() < 1e-5);
        }
        let mut head = [1.0, 2.0, 3.0, 4.0];
        rotate(&mut head, &[0.0, 1.0], &[1.0, 0.0]);
        assert_eq!(head, [-3.0, 2.0, 1.0, 4.0]);
    }
}
