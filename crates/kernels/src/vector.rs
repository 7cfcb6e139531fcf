//! Sixteen floats at a time, for all work but products. Loops over arrays would do too, but
//! compilers do not vectorise them reliably.

/// Lanes of a vector. All loops over vectors have this width, on any processor.
pub(crate) const LANES: usize = 16;

/// The values that are added to lanes: the first half hides a lane, the second half does not.
const SHADE: [f32; 2 * LANES] = {
    let mut shade = [0.0; 2 * LANES];
    let mut lane = 0;
    while lane < LANES {
        shade[lane] = f32::NEG_INFINITY;
        lane += 1;
    }
    shade
};

/// [`LANES`] floats. A processor's own implementation may be used only where its instructions were
/// detected, as with kernels.
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
    /// `self * factor + term`, rounded once if the processor has one instruction for it.
    fn fused(self, factor: Self, term: Self) -> Self;
    /// The larger of two numbers; of others, anything.
    fn larger(self, other: Self) -> Self;
    /// The larger of each lane and `bound`. NaN stays NaN.
    fn at_least(self, bound: f32) -> Self;
    /// The smaller of each lane and `bound`. NaN stays NaN.
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
    /// Stores the lanes, integers from -128 to 127, as bytes.
    ///
    /// # Safety
    /// `to` can be written for [`LANES`] bytes.
    unsafe fn store_codes(self, to: *mut i8);
    /// The numbers that signed bytes stand for.
    ///
    /// # Safety
    /// `from` can be read for [`LANES`] bytes.
    unsafe fn load_codes(from: *const i8) -> Self;
    /// Does the work in a separate function.
    ///
    /// # Safety
    /// As of [`VectorWork::compute`].
    unsafe fn compute<W: VectorWork>(work: W);

    /// Replaces the first `count` lanes by minus infinity; all lanes are finite or minus infinity.
    #[inline(always)]
    fn without(self, count: usize) -> Self {
        // SAFETY: `LANES` numbers, starting at one of the first `LANES + 1`.
        self.add(unsafe { Self::load(SHADE.as_ptr().add(LANES - count.min(LANES))) })
    }

    /// The lanes.
    #[inline(always)]
    fn to_array(self) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        // SAFETY: as many as there are.
        unsafe { self.store(lanes.as_mut_ptr()) };
        lanes
    }
}

/// Work that is compiled once for each kind of vectors, and called from the kernels of all levels.
/// Otherwise every copy of a step would contain code that few models need.
pub(crate) trait VectorWork {
    /// # Safety
    /// The processor has the instructions of `V`, and the work's own conditions hold.
    unsafe fn compute<V: Vector>(self);
}
