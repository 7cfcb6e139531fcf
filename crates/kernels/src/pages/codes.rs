//! Keys and values as 8-bit codes, which take little more than half the bytes of bfloat16.
//!
//! A group stores the codes of its elements first, in the element order of [`crate::pages`]. Its
//! scales follow, in bfloat16, `[dim / SHARED, GROUP]`. A scale is for [`SHARED`] elements of one
//! position. Keys of some models have a few large dimensions, which then reduce only the precision
//! of their own block. Attention converts the codes of one group at a time to elements, and
//! computes with the elements.

use super::LINE;
use crate::codes::{LARGEST, SHARED, largest_of};
use crate::element::{Bf16, Element};
use crate::tile::{GROUP, Kernel};
use crate::vector::{LANES, Vector};

/// The number of codes in a block: [`SHARED`] elements of all positions of a group.
const BLOCK: usize = SHARED * GROUP;
/// Bytes of a group's keys, or of its values.
pub(crate) const fn group_bytes(dim: usize) -> usize {
    GROUP * dim + dim / SHARED * GROUP * size_of::<Bf16>()
}

/// True if pages with this many positions can store heads of this size as codes.
pub(crate) const fn takes_codes(page_size: usize, head_dim: usize) -> bool {
    page_size.is_multiple_of(GROUP) && head_dim.is_multiple_of(SHARED)
}

/// The layout of one position's codes in a group.
struct Place {
    first: usize,
    /// The number of elements in a contiguous run, and the distance from the start of one run to
    /// the start of the next.
    run: usize,
    step: usize,
}

/// Writes one position's key to its group, `E::PAIR` elements side by side.
///
/// # Safety
/// `group` is a group's keys, and no other thread may read or write this position at the same time.
#[inline(always)]
pub(super) unsafe fn keep_key<E: Element, V: Vector>(key: &[f32], lane: usize, group: *mut u8) {
    let place = Place { first: lane * E::PAIR, run: E::PAIR, step: GROUP * E::PAIR };
    // SAFETY: the caller upholds the contract.
    unsafe { keep::<V>(key, lane, &place, group) }
}

/// Writes one position's value to its group.
///
/// # Safety
/// `group` is a group's values, and no other thread may read or write this position at the same
/// time.
#[inline(always)]
pub(super) unsafe fn keep_value<E: Element, V: Vector>(value: &[f32], lane: usize, group: *mut u8) {
    let first = lane / E::PAIR * value.len() * E::PAIR + lane % E::PAIR;
    let place = Place { first, run: 1, step: E::PAIR };
    // SAFETY: the caller upholds the contract.
    unsafe { keep::<V>(value, lane, &place, group) }
}

#[inline(always)]
unsafe fn keep<V: Vector>(head: &[f32], lane: usize, place: &Place, group: *mut u8) {
    // SAFETY: writes stay inside the group's codes and scales.
    unsafe {
        let scales = group.add(GROUP * head.len()).cast::<Bf16>().add(lane);
        for (index, block) in head.chunks_exact(SHARED).enumerate() {
            let mut codes = [0_i8; SHARED];
            scales.add(index * GROUP).write_unaligned(encode::<V>(block, &mut codes));
            let first = group.add(place.first + index * SHARED / place.run * place.step);
            for (run, codes) in codes.chunks_exact(place.run).enumerate() {
                let to = first.add(run * place.step).cast();
                std::ptr::copy_nonoverlapping(codes.as_ptr(), to, place.run);
            }
        }
    }
}

/// Encodes [`SHARED`] numbers and returns their scale. The scale is NaN if a number is not finite.
#[inline(always)]
fn encode<V: Vector>(numbers: &[f32], codes: &mut [i8; SHARED]) -> Bf16 {
    // SAFETY: `numbers` has `SHARED` elements, a multiple of the vector length.
    let largest = unsafe { largest_of::<f32, V>(numbers.as_ptr(), SHARED) };
    if largest.is_nan() {
        return Bf16::from_f32(largest);
    }
    // The scale is rounded up, so that the largest number has a code. If the inverse of the scale
    // would not be finite in bfloat16, the scale is zero.
    let bits = (largest / LARGEST).to_bits().wrapping_add(0xffff) >> 16;
    let scale = Bf16(bits as u16);
    if largest < 1e-34 {
        return Bf16::default();
    }
    let inverse = V::splat(1.0 / scale.to_f32());
    for (numbers, codes) in numbers.chunks_exact(LANES).zip(codes.chunks_exact_mut(LANES)) {
        // SAFETY: both chunks have `LANES` elements, a whole vector.
        unsafe {
            let x = V::load(numbers.as_ptr()).mul(inverse);
            x.at_least(-LARGEST).at_most(LARGEST).round().store_codes(codes.as_mut_ptr());
        }
    }
    scale
}

/// Converts a group's keys to elements. Prefetches the codes at `next`, which may be an invalid
/// address.
///
/// # Safety
/// `from` is a group's keys, `to` has room for them, and `dim` is a multiple of [`SHARED`].
#[inline(always)]
pub(super) unsafe fn keys<E: Element, K: Kernel<E>>(
    from: *const u8,
    next: *const u8,
    dim: usize,
    to: *mut E,
) {
    for index in 0..dim / SHARED {
        load_block::<E, K>(next, index, dim);
        // SAFETY: reads stay inside the block's codes and scales, and `to` has room.
        unsafe {
            let scales = scales_of(from, index, dim);
            let (first, second) = (repeated::<E>(&scales, 0), repeated::<E>(&scales, 1));
            let factors = [K::Vector::load(first.as_ptr()), K::Vector::load(second.as_ptr())];
            for vectors in (0..BLOCK).step_by(E::PAIR * LANES) {
                for (half, &factor) in factors.iter().enumerate().take(E::PAIR) {
                    let at = index * BLOCK + vectors + half * LANES;
                    K::narrow(K::Vector::load_codes(from.add(at).cast()).mul(factor), to.add(at));
                }
            }
        }
    }
}

/// Converts a group's values to elements. Positions from `seen` on become zeros. Prefetches the
/// codes at `next`.
///
/// # Safety
/// See [`keys`].
#[inline(always)]
pub(super) unsafe fn values<E: Element, K: Kernel<E>>(
    from: *const u8,
    next: *const u8,
    dim: usize,
    seen: usize,
    to: *mut E,
) {
    for index in 0..dim / SHARED {
        load_block::<E, K>(next, index, dim);
        // SAFETY: reads stay inside the block's codes and scales, and `to` has room.
        unsafe {
            let mut scales = scales_of(from, index, dim);
            // The page's earlier owner may have left a NaN scale.
            scales[seen.min(GROUP)..].fill(0.0);
            for pair in 0..GROUP / E::PAIR {
                let factors = alternating::<E>(&scales, pair);
                let factor = K::Vector::load(factors.as_ptr());
                for vector in 0..SHARED * E::PAIR / LANES {
                    let at = (pair * dim + index * SHARED) * E::PAIR + vector * LANES;
                    K::narrow(K::Vector::load_codes(from.add(at).cast()).mul(factor), to.add(at));
                }
            }
        }
    }
}

/// Returns the scales of the group's positions for a block of elements.
///
/// # Safety
/// `group` is the keys or the values of a group, and `index` is one of its blocks.
#[inline(always)]
unsafe fn scales_of(group: *const u8, index: usize, dim: usize) -> [f32; GROUP] {
    // SAFETY: the caller upholds the contract.
    let scales =
        unsafe { group.add(GROUP * dim).cast::<[Bf16; GROUP]>().add(index).read_unaligned() };
    scales.map(Bf16::to_f32)
}

/// The scales for a vector of keys, which has `E::PAIR` elements of each position. `E::PAIR` such
/// vectors cover the group's positions, and `half` is the index of this one.
#[inline(always)]
fn repeated<E: Element>(scales: &[f32; GROUP], half: usize) -> [f32; LANES] {
    if E::PAIR == 1 {
        return *scales;
    }
    // Whole 64-bit words, so that the compiler vectorises the loop.
    let mut pairs = [0_u64; LANES / 2];
    for (pair, scale) in pairs.iter_mut().zip(&scales[half * LANES / 2..]) {
        *pair = u64::from(scale.to_bits()) * 0x1_0000_0001;
    }
    // SAFETY: both types have the same size, and all bit patterns are floats.
    unsafe { std::mem::transmute::<[u64; LANES / 2], [f32; LANES]>(pairs) }
}

/// The scales for a vector of values, in which the `E::PAIR` positions of a pair alternate.
#[inline(always)]
fn alternating<E: Element>(scales: &[f32; GROUP], pair: usize) -> [f32; LANES] {
    if E::PAIR == 1 {
        return [scales[pair]; LANES];
    }
    let [low, high] = [scales[2 * pair], scales[2 * pair + 1]].map(|x| u64::from(x.to_bits()));
    // SAFETY: both types have the same size, and all bit patterns are floats.
    unsafe { std::mem::transmute::<[u64; LANES / 2], [f32; LANES]>([low | high << 32; LANES / 2]) }
}

/// Prefetches a block's codes; for the first block, also the scales of the group.
#[inline(always)]
fn load_block<E: Element, K: Kernel<E>>(group: *const u8, index: usize, dim: usize) {
    for line in (0..BLOCK).step_by(LINE) {
        K::prefetch(group.wrapping_add(index * BLOCK + line).cast());
    }
    if index == 0 {
        for line in (GROUP * dim..group_bytes(dim)).step_by(LINE) {
            K::prefetch(group.wrapping_add(line).cast());
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::isa::plain::Array;

    /// A head after it was encoded and decoded.
    pub(crate) fn rounded(head: &[f32]) -> Vec<f32> {
        let block = |block: &[f32]| {
            let largest = block.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
            let exact = largest / LARGEST;
            let mut scale = Bf16::from_f32(exact);
            if scale.to_f32() < exact {
                scale.0 += 1;
            }
            let scale = scale.to_f32();
            let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            let code = |x: &f32| (x * inverse).round_ties_even();
            block.iter().map(|x| code(x) * scale).collect::<Vec<_>>()
        };
        head.chunks(SHARED).flat_map(block).collect()
    }

    #[test]
    fn codes_are_near_and_keep_specials() {
        let numbers: [f32; SHARED] = std::array::from_fn(|at| (at as f32 - 11.0) * 0.37);
        let mut codes = [0; SHARED];
        let scale = encode::<Array>(&numbers, &mut codes).to_f32();
        assert_eq!(codes.iter().map(|code| code.unsigned_abs()).max(), Some(127));
        for (x, code) in numbers.iter().zip(codes) {
            assert!((x - f32::from(code) * scale).abs() <= scale * 0.5001, "{x} {code}");
        }
        for small in [0.0, 1e-38, -1e-45] {
            let scale = encode::<Array>(&[small; SHARED], &mut codes).to_f32();
            assert_eq!(scale, 0.0, "{small}");
        }
        for other in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut numbers = numbers;
            numbers[17] = other;
            assert!(encode::<Array>(&numbers, &mut codes).to_f32().is_nan(), "{other}");
        }
    }
}
