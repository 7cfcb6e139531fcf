//! Functions of vectors. Sums are taken in a fixed order, so that results do not depend on the
//! other rows of the step.

use crate::element::Element;
use crate::isa::plain::Array;
use crate::tile::Kernel;
use crate::vector::{LANES, Vector};

/// `e^x` for x from -87 to 88, with an error of about 2 units in the last place (Cephes'
/// polynomial). Other values are clamped to this range.
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

/// `2^x` for x that is not positive, with an error of about 2 units in the last place (Cephes'
/// polynomial). The result is 0 for very negative x.
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

/// [`exp2`] for a single number.
#[inline(always)]
pub(crate) fn exp2_of<V: Vector>(x: f32) -> f32 {
    exp2(V::splat(x)).to_array()[0]
}

/// `x / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn silu<V: Vector>(x: V) -> V {
    x.div(exp(V::splat(0.0).sub(x)).add(V::splat(1.0)))
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
fn sigmoid<V: Vector>(x: V) -> V {
    V::splat(1.0).div(exp(V::splat(0.0).sub(x)).add(V::splat(1.0)))
}

/// The slope in the gates of clamped `SwiGLU`.
const SLOPE: f32 = 1.702;
/// The bound of gates and up projections of clamped `SwiGLU`.
const BOUND: f32 = 7.0;

/// `gate * sigmoid(1.702 gate) * (up + 1)`, with the gate clamped to at most 7 and `up` to -7 to 7,
/// as in gpt-oss. NaN stays NaN.
#[inline(always)]
pub(crate) fn clamped_swiglu<V: Vector>(gate: V, up: V) -> V {
    let (gate, up) = (gate.at_most(BOUND), up.at_least(-BOUND).at_most(BOUND));
    let falling = exp(gate.mul(V::splat(-SLOPE))).add(V::splat(1.0));
    gate.div(falling).mul(up.add(V::splat(1.0)))
}

/// Returns the larger of `x` and zero, and the absolute value of `x`. NaN gives NaN for both.
#[inline(always)]
fn sides<V: Vector>(x: V) -> (V, V) {
    let positive = x.at_least(0.0);
    (positive, positive.sub(x.at_most(0.0)))
}

/// `x` if it is positive, otherwise 0.
#[inline(always)]
fn relu<V: Vector>(x: V) -> V {
    sides(x).0
}

/// The square of `x` if `x` is positive, otherwise 0 (So et al. 2021). NaN stays NaN.
#[inline(always)]
pub(crate) fn squared_relu<V: Vector>(x: V) -> V {
    let positive = relu(x);
    positive.mul(positive)
}

/// GELU (Hendrycks & Gimpel 2016): `x` times the normal distribution function of `x`, with an error
/// of about 3e-7 of `x`. The error function is approximated by Abramowitz & Stegun 7.1.26.
#[inline(always)]
pub(crate) fn gelu<V: Vector>(x: V) -> V {
    let (positive, size) = sides(x);
    let t = V::splat(1.0)
        .div(size.fused(V::splat(0.327_591_1 * std::f32::consts::FRAC_1_SQRT_2), V::splat(1.0)));
    let mut p = V::splat(1.061_405_4);
    for coefficient in [-1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6, 0.0] {
        p = p.fused(t, V::splat(coefficient));
    }
    // Both tails are computed in the same way, so no precision is lost where the distribution
    // function is close to 0.
    let tail = p.mul(exp(x.mul(x).mul(V::splat(-0.5)))).mul(V::splat(0.5));
    positive.sub(size.mul(tail))
}

/// GELU of a single number, with the error function.
#[must_use]
pub fn gelu_of(x: f32) -> f32 {
    gelu(Array::splat(x)).to_array()[0]
}

/// [`gelu`] with a hyperbolic tangent in place of the error function.
#[inline(always)]
pub(crate) fn gelu_tanh<V: Vector>(x: V) -> V {
    let cubic = x.mul(x).mul(x).fused(V::splat(0.044_715), x);
    // Twice the square root of 2 / pi.
    x.div(exp(cubic.mul(V::splat(-1.595_769))).add(V::splat(1.0)))
}

/// The hyperbolic tangent, with an error of about 1e-7.
#[inline(always)]
pub(crate) fn tanh<V: Vector>(x: V) -> V {
    V::splat(1.0).sub(V::splat(2.0).div(exp(x.add(x)).add(V::splat(1.0))))
}

/// A function of vectors. It is a trait because closures and function arguments would not be
/// compiled with the processor's features.
pub(crate) trait Function {
    fn of<V: Vector>(x: V) -> V;
}

macro_rules! functions {
    ($($name:ident: $function:ident,)*) => {
        $(
            pub(crate) struct $name;

            impl Function for $name {
                #[inline(always)]
                fn of<V: Vector>(x: V) -> V {
                    $function(x)
                }
            }
        )*
    };
}

functions! {
    Silu: silu,
    Sigmoid: sigmoid,
    Relu: relu,
    Gelu: gelu,
    GeluTanh: gelu_tanh,
    Tanh: tanh,
    Itself: itself,
    Square: square,
}

/// Applies a function to every number of `from`, and rounds the results to elements in `to`.
#[inline(always)]
pub(crate) fn each<E: Element, K: Kernel<E>, F: Function>(from: &[f32], to: &mut [E]) {
    let (from, from_rest) = from.as_chunks::<LANES>();
    let (to, to_rest) = to.as_chunks_mut::<LANES>();
    for (from, to) in from.iter().zip(to) {
        // SAFETY: there are whole vectors at all pointers.
        unsafe { K::narrow(F::of(K::Vector::load(from.as_ptr())), to.as_mut_ptr()) };
    }
    let mut last = [0.0; LANES];
    last[..from_rest.len()].copy_from_slice(from_rest);
    // SAFETY: there is a whole vector at the pointer.
    let last = F::of(unsafe { K::Vector::load(last.as_ptr()) }).to_array();
    for (to, from) in to_rest.iter_mut().zip(last) {
        *to = E::from_f32(from);
    }
}

/// Applies a function to every number, in place.
#[inline(always)]
pub(crate) fn apply<V: Vector, F: Function>(values: &mut [f32]) {
    let (values, rest) = values.as_chunks_mut::<LANES>();
    for part in values {
        // SAFETY: there is a whole vector at the pointer.
        unsafe { F::of(V::load(part.as_ptr())).store(part.as_mut_ptr()) };
    }
    let mut last = [0.0; LANES];
    last[..rest.len()].copy_from_slice(rest);
    // SAFETY: there is a whole vector at the pointer.
    let last = F::of(unsafe { V::load(last.as_ptr()) }).to_array();
    rest.copy_from_slice(&last[..rest.len()]);
}

/// Layer normalisation (Ba et al. 2016) of `x` in place, with `weight` and `bias`; `out` gets the
/// same values as elements.
#[inline(always)]
pub(crate) fn layer_norm<E: Element, K: Kernel<E>>(
    x: &mut [f32],
    (weight, bias): (&[f32], &[f32]),
    eps: f32,
    out: &mut [E],
) {
    let size = x.len() as f32;
    let (whole, length) = (x.len() / LANES * LANES, x.len());
    let fits = weight.len() == length && bias.len() == length && out.len() == length;
    assert!(fits, "as many weights and results");
    let mean = sum_of::<K::Vector, Itself>(x) / size;
    for x in &mut *x {
        *x -= mean;
    }
    let factor = 1.0 / (sum_of::<K::Vector, Square>(x) / size + eps).sqrt();
    for at in (0..whole).step_by(LANES) {
        // SAFETY: there are whole vectors at all pointers.
        unsafe {
            let to = x.as_mut_ptr().add(at);
            let scaled = K::Vector::load(to).mul(K::Vector::splat(factor));
            let bias = K::Vector::load(bias.as_ptr().add(at));
            let normed = scaled.fused(K::Vector::load(weight.as_ptr().add(at)), bias);
            normed.store(to);
            K::narrow(normed, out.as_mut_ptr().add(at));
        }
    }
    for at in whole..length {
        x[at] = x[at] * factor * weight[at] + bias[at];
        out[at] = E::from_f32(x[at]);
    }
}

#[inline(always)]
fn itself<V: Vector>(x: V) -> V {
    x
}

#[inline(always)]
fn square<V: Vector>(x: V) -> V {
    x.mul(x)
}

/// Sums a function over all numbers; the function must be zero at zero.
#[inline(always)]
fn sum_of<V: Vector, F: Function>(x: &[f32]) -> f32 {
    // Two alternating sums, since each addition to a single sum would wait for the previous one.
    let mut sums = [V::splat(0.0); 2];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for (at, chunk) in chunks.iter().enumerate() {
        // SAFETY: there is a whole vector at the pointer.
        sums[at % 2] = sums[at % 2].add(F::of(unsafe { V::load(chunk.as_ptr()) }));
    }
    let mut last = [0.0; LANES];
    last[..rest.len()].copy_from_slice(rest);
    // SAFETY: there is a whole vector at the pointer.
    let last = F::of(unsafe { V::load(last.as_ptr()) });
    sums[0].add(sums[1]).add(last).sum()
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
        // SAFETY: there are whole vectors at all pointers.
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

/// Layer normalisation without a bias: subtracts the mean of `x`, normalises, and scales by
/// `weight`.
#[inline(always)]
pub(crate) fn mean_norm<E: Element, K: Kernel<E>>(
    x: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [E],
) {
    let whole = x.len() / LANES * LANES;
    assert!(weight.len() >= x.len() && out.len() >= x.len(), "as many weights and results");
    let (mean, factor) = mean_and_factor::<K::Vector>(x, eps);
    for at in (0..whole).step_by(LANES) {
        // SAFETY: there are whole vectors at all pointers.
        unsafe {
            let apart = K::Vector::load(x.as_ptr().add(at)).sub(K::Vector::splat(mean));
            let scale = K::Vector::load(weight.as_ptr().add(at)).mul(K::Vector::splat(factor));
            K::narrow(apart.mul(scale), out.as_mut_ptr().add(at));
        }
    }
    for at in whole..x.len() {
        out[at] = E::from_f32((x[at] - mean) * factor * weight[at]);
    }
}

/// Returns the mean of `x`, and the factor that normalises `x` minus its mean.
#[inline(always)]
pub(crate) fn mean_and_factor<V: Vector>(x: &[f32], eps: f32) -> (f32, f32) {
    let size = x.len() as f32;
    let mean = sum_of::<V, Itself>(x) / size;
    let mut squares = V::splat(0.0);
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        // SAFETY: there is a whole vector at the pointer.
        let apart = unsafe { V::load(chunk.as_ptr()) }.sub(V::splat(mean));
        squares = apart.fused(apart, squares);
    }
    let rest: f32 = rest.iter().map(|x| (x - mean) * (x - mean)).sum();
    (mean, 1.0 / ((squares.sum() + rest) / size + eps).sqrt())
}

/// Normalises `x` in place, scaled by `weight`. If `means`, the mean is subtracted first.
#[inline(always)]
pub(crate) fn normalise<V: Vector>(x: &mut [f32], weight: &[f32], eps: f32, means: bool) {
    let (mean, factor) = match means {
        true => mean_and_factor::<V>(x, eps),
        false => (0.0, rms_factor::<V>(x, eps)),
    };
    for (x, weight) in x.iter_mut().zip(weight) {
        *x = (*x - mean) * factor * weight;
    }
}

/// Adds the root mean square norm of `from`, times `scale`, to `x`.
#[inline(always)]
pub(crate) fn add_rms_norm<V: Vector>(
    x: &mut [f32],
    from: &[f32],
    weight: &[f32],
    (eps, scale): (f32, f32),
) {
    let factor = rms_factor::<V>(from, eps) * scale;
    for ((x, from), weight) in x.iter_mut().zip(from).zip(weight) {
        *x += from * factor * weight;
    }
}

/// Returns the factor of root mean square normalisation of `x`.
#[inline(always)]
pub(crate) fn rms_factor<V: Vector>(x: &[f32], eps: f32) -> f32 {
    // Two alternating sums, since each addition to a single sum would wait for the previous one.
    let mut sums = [V::splat(0.0); 2];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for (at, chunk) in chunks.iter().enumerate() {
        // SAFETY: there is a whole vector at the pointer.
        let x = unsafe { V::load(chunk.as_ptr()) };
        sums[at % 2] = x.fused(x, sums[at % 2]);
    }
    let rest: f32 = rest.iter().map(|x| x * x).sum();
    let sum = sums[0].add(sums[1]).sum() + rest;
    1.0 / (sum / x.len() as f32 + eps).sqrt()
}

/// Rotates a head in place by RoPE (Su et al. 2021). Pairs are `(i, i + len / 2)`; `cos` and `sin`
/// have one entry per pair.
#[inline(always)]
pub(crate) fn rotate<V: Vector>(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = head.split_at_mut(cos.len());
    let whole = cos.len() / LANES * LANES;
    assert!(second.len() == cos.len() && sin.len() == cos.len(), "half a head of each");
    for at in (0..whole).step_by(LANES) {
        // SAFETY: there are whole vectors at all pointers.
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

/// Rounds the numbers of `from` to elements in `to`.
#[inline(always)]
pub(crate) fn narrow<E: Element, K: Kernel<E>>(from: &[f32], to: &mut [E]) {
    let (from, from_rest) = from.as_chunks::<LANES>();
    let (to, to_rest) = to.as_chunks_mut::<LANES>();
    for (from, to) in from.iter().zip(to) {
        // SAFETY: there are whole vectors at all pointers.
        unsafe { K::narrow(K::Vector::load(from.as_ptr()), to.as_mut_ptr()) };
    }
    for (&from, to) in from_rest.iter().zip(to_rest) {
        *to = E::from_f32(from);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::isa::plain::{Array, Plain};

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
    fn gates_and_ups_are_clamped() {
        let of = |gate: f32, up: f32| one(|gate| clamped_swiglu(gate, Array::splat(up)), gate);
        let wanted = |gate: f32, up: f32| {
            let (gate, up) = (f64::from(gate.min(7.0)), f64::from(up.clamp(-7.0, 7.0)));
            gate / (1.0 + (-1.702 * gate).exp()) * (up + 1.0)
        };
        for gate in [-200.0, -9.0, -1.5, 0.0, 0.5, 6.9, 7.1, 300.0] {
            for up in [-50.0, -7.0, -1.0, -0.25, 0.0, 3.0, 7.0, 8.0] {
                let (found, wanted) = (of(gate, up), wanted(gate, up));
                assert!((found - wanted).abs() <= 1e-6 * wanted.abs() + 1e-30, "{gate} {up}");
            }
        }
        assert!(of(f32::NAN, 1.0).is_nan() && of(1.0, f32::NAN).is_nan());
    }

    #[test]
    fn squares_are_of_what_is_positive() {
        for x in [-3.5_f32, -0.0, 0.0, 1e-3, 2.5, 1e9] {
            let wanted = f64::from(x.max(0.0)).powi(2);
            let found = one(squared_relu, x);
            assert!((found - wanted).abs() <= 1e-6 * wanted, "{x}");
        }
        assert!(one(squared_relu, f32::NAN).is_nan());
    }

    /// The normal distribution function at `x`, by Simpson's rule.
    pub(crate) fn below(x: f64) -> f64 {
        let (steps, width) = (2000, x / 2000.0);
        let density = |x: f64| (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt();
        let weight =
            |at: i32| if at == 0 || at == steps { 1.0 } else { 2.0 + 2.0 * f64::from(at % 2) };
        let sum: f64 = (0..=steps).map(|at| weight(at) * density(width * f64::from(at))).sum();
        0.5 + sum * width / 3.0
    }

    #[test]
    fn activations_are_close_and_keep_what_is_not_a_number() {
        for step in -1200..=1200 {
            let x = step as f32 / 100.0;
            let exact = f64::from(x);
            let bound = 5e-7 * exact.abs();
            assert!((one(gelu, x) - exact * below(exact)).abs() <= bound, "{x}");
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (exact + 0.044_715 * exact.powi(3));
            let expected = 0.5 * exact * (1.0 + inner.tanh());
            assert!((one(gelu_tanh, x) - expected).abs() <= bound, "{x}");
            assert!((one(tanh, x) - exact.tanh()).abs() < 2e-7, "{x}");
            assert_eq!(one(relu, x), exact.max(0.0));
        }
        assert_eq!((one(tanh, 1e9), one(tanh, -1e9)), (1.0, -1.0));
        for work in [gelu, gelu_tanh, relu, tanh] {
            assert!(one(work, f32::NAN).is_nan());
        }
    }

    #[test]
    fn layers_are_normalised_around_nothing() {
        for size in [37, 16, 5, 64] {
            let x: Vec<f32> = (0..size).map(|i| 3.0 + ((i * 7) % 11) as f32).collect();
            let weight: Vec<f32> = (0..size).map(|i| 0.1 * i as f32).collect();
            let bias: Vec<f32> = (0..size).map(|i| 1.0 - 0.2 * i as f32).collect();
            let (mut found, mut out) = (x.clone(), vec![0.0f32; size]);
            layer_norm::<f32, Plain>(&mut found, (&weight, &bias), 1e-5, &mut out);
            assert_eq!(found, out);
            let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / size as f64;
            let apart = |&x: &f32| (f64::from(x) - mean).powi(2);
            let variance = x.iter().map(apart).sum::<f64>() / size as f64;
            for i in 0..size {
                let normed = (f64::from(x[i]) - mean) / (variance + 1e-5).sqrt();
                let exact = normed * f64::from(weight[i]) + f64::from(bias[i]);
                assert!((f64::from(out[i]) - exact).abs() < 1e-5);
            }
        }
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
