//! Computes `e^x` for numbers that are not positive.

/// 1.5 times 2^23: adding and then subtracting this number rounds to the nearest integer.
const ROUNDS: f32 = 12_582_912.0;
/// The natural logarithm of 2 as a sum; the first term has few bits, so products with integers are
/// exact.
const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
/// Cephes' polynomial (Moshier 1992), with an error of about one unit in the last place.
const POLYNOMIAL: [f32; 6] =
    [1.987_569_1e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
/// The smallest x with a nonzero result; below it the result would be denormal.
const LEAST: f32 = -87.0;

/// `e^x` for `x <= 0`.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let shifted = x.max(LEAST) * std::f32::consts::LOG2_E + ROUNDS;
    let whole = shifted - ROUNDS;
    let rest = (x.max(LEAST) - whole * LN_2[0]) - whole * LN_2[1];
    let mut sum = POLYNOMIAL[0];
    for coefficient in &POLYNOMIAL[1..] {
        sum = sum * rest + coefficient;
    }
    let value = sum * (rest * rest) + rest + 1.0;
    // The low bits of `shifted` hold the integer; a float's exponent starts at bit 23.
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if x < LEAST { 0.0 } else { value * power }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_exact_to_a_unit_in_the_last_place() {
        let mut x = 0.0_f32;
        while x > LEAST {
            let exact = f64::from(x).exp();
            let off = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(off < 1.3e-7, "{x}: off by {off}");
            x -= 0.001_37;
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!((exp(-88.0), exp(f32::NEG_INFINITY)), (0.0, 0.0));
    }
}
