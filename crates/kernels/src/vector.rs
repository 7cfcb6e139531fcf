//! Vectors of sixteen floats, for all work except products. Loops over arrays would also be
//! correct, but compilers do not vectorise them reliably.

/// The number of lanes of a vector, on any processor.
pub(crate) const LANES: usize = 16;

/// Values to add to lanes: those of the first half turn a lane into minus infinity, those of the
/// second half do not change it.
const SHADE: [f32; 2 * LANES] = {
    let mut shade = [0.0; 2 * LANES];
    let mut lane = 0;
    while lane < LANES {
        shade[lane] = f32::NEG_INFINITY;
        lane += 1;
    }
    shade
};

/// A vector of [`LANES`] floats. As with kernels, an implementation for a processor may be used
/// only where its instructions were detected.
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
    /// Returns `self * factor + term`, rounded once if the processor has an instruction for it.
    fn fused(self, factor: Self, term: Self) -> Self;
    /// The larger of each pair of lanes; if one lane of a pair is NaN, the pair's result is
    /// unspecified.
    fn larger(self, other: Self) -> Self;
    /// The larger of each lane and `bound`. NaN stays NaN.
    fn at_least(self, bound: f32) -> Self;
    /// The smaller of each lane and `bound`. NaN stays NaN.
    fn at_most(self, bound: f32) -> Self;
    /// Rounds each lane to the nearest integer. The absolute values must be below 2^22.
    fn round(self) -> Self;
    /// `self * 2^n`; where `n` is below -126, the result is 0. The lanes of `n` must be integers
    /// from -200 to 127.
    fn times_power(self, n: Self) -> Self;
    /// Replaces the lanes from `count` on by minus infinity.
    fn only(self, count: usize) -> Self;
    /// The sum of all lanes, in a fixed order.
    fn sum(self) -> f32;
    /// The largest lane. If a lane is NaN, the result is unspecified.
    fn largest(self) -> f32;
    fn is_finite(self) -> bool;
    /// Stores the lanes as bytes. They must be integers from -128 to 127.
    ///
    /// # Safety
    /// `to` can be written for [`LANES`] bytes.
    unsafe fn store_codes(self, to: *mut i8);
    /// Converts signed bytes to floats.
    ///
    /// # Safety
    /// `from` can be read for [`LANES`] bytes.
    unsafe fn load_codes(from: *const i8) -> Self;
    /// Does the work in a separate function that is compiled for the processor's features.
    ///
    /// # Safety
    /// The conditions of [`VectorWork::compute`] hold.
    unsafe fn compute<W: VectorWork>(work: W);

    /// Replaces the first `count` lanes by minus infinity; all lanes are finite or minus infinity.
    #[inline(always)]
    fn without(self, count: usize) -> Self {
        // SAFETY: the load reads `LANES` floats of `SHADE`, from an index of at most `LANES`.
        self.add(unsafe { Self::load(SHADE.as_ptr().add(LANES - count.min(LANES))) })
    }

    /// Copies the lanes to an array.
    #[inline(always)]
    fn to_array(self) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        // SAFETY: the array has room for all lanes.
        unsafe { self.store(lanes.as_mut_ptr()) };
        lanes
    }
}

/// Work that is compiled once per kind of vector, and called from the kernels of all instruction
/// sets. Otherwise every compiled version of a step would contain code that few models use.
pub(crate) trait VectorWork {
    /// # Safety
    /// The processor has the instructions of `V`, and the work's own conditions hold.
    unsafe fn compute<V: Vector>(self);
}
