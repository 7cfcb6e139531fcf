//! Sixteen floats at a time, for all work but products. Loops over arrays would do, but compilers
//! turn them into vectors only now and then.

use crate::tile::LANES;

/// [`LANES`] floats. Like its kernels, a processor's own may be used only where its instructions
/// were detected.
pub(crate) trait Vector: Copy {
    fn splat(value: f32) -> Self;
    /// # Safety
    /// `from` can be read for [`LANES`] floats.
    unsafe fn load(from: *const f32) -> Self;
    /// # Safety
    /// `to` can be written for [`LANES`] floats.
    unsafe fn store(self, to: *mut f32);
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    /// `self * factor + term`, rounded once where that is one instruction.
    fn fused(self, factor: Self, term: Self) -> Self;
    /// The larger of two numbers; of others, anything.
    fn larger(self, other: Self) -> Self;
    /// Not below `bound`; what is not a number stays so.
    fn at_least(self, bound: f32) -> Self;
    /// Not above `bound`; what is not a number stays so.
    fn at_most(self, bound: f32) -> Self;
    /// Rounds to the nearest integer, for numbers below 2^22.
    fn round(self) -> Self;
    /// `self * 2^n` for integers `n` from -200 to 127; 0 below -126.
    fn times_power(self, n: Self) -> Self;
    /// Minus infinity in the lanes from `count` on.
    fn only(self, count: usize) -> Self;
    /// Added up in a fixed order.
    fn sum(self) -> f32;
    /// The largest lane, if all are numbers.
    fn largest(self) -> f32;
    fn is_finite(self) -> bool;
    /// The lanes as bytes, of integers from -128 to 127.
    ///
    /// # Safety
    /// `to` can be written for [`LANES`] bytes.
    unsafe fn store_codes(self, to: *mut i8);

    /// The lanes.
    #[inline(always)]
    fn to_array(self) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        // SAFETY: as many as there are.
        unsafe { self.store(lanes.as_mut_ptr()) };
        lanes
    }
}

/// A vector for any processor.
#[derive(Clone, Copy)]
pub(crate) struct Array([f32; LANES]);

impl Array {
    #[inline(always)]
    fn zip(self, other: Self, work: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| work(self.0[i], other.0[i])))
    }

    #[inline(always)]
    fn fold(mut self, work: impl Fn(f32, f32) -> f32) -> f32 {
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                self.0[i] = work(self.0[i], self.0[i + half]);
            }
        }
        self.0[0]
    }
}

impl Vector for Array {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([value; LANES])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the contract.
        Self(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the contract.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) };
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }
    #[inline(always)]
    fn fused(self, factor: Self, term: Self) -> Self {
        self.mul(factor).add(term)
    }
    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        self.zip(other, |a, b| if b > a { b } else { a })
    }
    #[inline(always)]
    fn at_least(self, bound: f32) -> Self {
        Self(self.0.map(|x| if x < bound { bound } else { x }))
    }
    #[inline(always)]
    fn at_most(self, bound: f32) -> Self {
        Self(self.0.map(|x| if x > bound { bound } else { x }))
    }
    #[inline(always)]
    fn round(self) -> Self {
        // Adding it leaves the nearest integer in the low bits.
        const ROUND: f32 = 12_582_912.0;
        Self(self.0.map(|x| (x + ROUND) - ROUND))
    }
    #[inline(always)]
    fn times_power(self, n: Self) -> Self {
        self.zip(n, |x, n| {
            let power = f32::from_bits((((n as i32) + 127) << 23).cast_unsigned());
            if n < -126.0 { 0.0 } else { x * power }
        })
    }
    #[inline(always)]
    fn only(self, count: usize) -> Self {
        Self(std::array::from_fn(|i| if i < count { self.0[i] } else { f32::NEG_INFINITY }))
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        self.fold(|a, b| a + b)
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        self.fold(|a, b| if b > a { b } else { a })
    }
    #[inline(always)]
    fn is_finite(self) -> bool {
        self.0.iter().all(|x| x.is_finite())
    }
    #[inline(always)]
    unsafe fn store_codes(self, to: *mut i8) {
        // SAFETY: the contract.
        unsafe { to.cast::<[i8; LANES]>().write_unaligned(self.0.map(|x| x as i32 as i8)) };
    }
}
