//! Rows of latent attention (DeepSeek-V2, 2024). A position has one row, which is the key of all
//! heads. The first elements of the row are the value of all heads.
//!
//! Rows are stored like the keys of a single head, with codes or without. Values need another
//! order. Each unit of work converts keys to values for the blocks of positions that it reads.
//! Pages with both orders would take nearly twice the memory.

use crate::element::Element;
use crate::math;
use crate::pages::{Held, Ordered, Pool, Shape, codes};
use crate::tile::{GROUP, Kernel};

/// Bytes of two elements at each of two positions, for elements of two bytes.
const WORDS: usize = size_of::<u64>();
/// The number of pairs of positions in a group.
const PAIRS: usize = GROUP / 2;

impl<E: Element> Pool<E> {
    /// Writes an entry's row. `narrow` has room for its elements.
    ///
    /// # Safety
    /// See [`Self::keep`].
    #[inline(always)]
    pub(crate) unsafe fn keep_row<K: Kernel<E>>(
        &self,
        shape: &Shape,
        entry: usize,
        row: &[f32],
        narrow: &mut [E],
    ) {
        // SAFETY: the caller upholds the contract.
        unsafe {
            if shape.coded {
                let group = self.keys.cast::<u8>().add(shape.group_of(entry, 0));
                codes::keep_key::<E, K::Vector>(row, entry % GROUP, group);
            } else {
                math::narrow::<E, K>(row, narrow);
                self.keep_key(shape, (entry, 0), narrow);
            }
        }
    }

    /// [`Self::group`] for latent rows.
    ///
    /// # Safety
    /// See [`Self::group`].
    #[inline(always)]
    pub(super) unsafe fn latent_group<K: Kernel<E>>(
        &self,
        shape: &Shape,
        held: &Held,
        (first, seen): (usize, usize),
        next: usize,
        (ordered, slot): (&mut Ordered<E>, usize),
    ) -> (*const E, *const E) {
        let dim = shape.head_dim;
        let (keys_size, values_size) =
            (GROUP * dim.next_multiple_of(GROUP), GROUP * shape.padded());
        let zeros = ordered.zeros.as_ptr();
        let to = ordered.keys[slot * keys_size..][..keys_size].as_mut_ptr();
        let values = ordered.values[slot * values_size..][..values_size].as_mut_ptr();
        // SAFETY: the entries' pages exist, and there is room for a group of keys and of values.
        unsafe {
            let keys = if shape.coded {
                let group = shape.group_of(held.entry(shape, first), 0);
                let pages = self.keys.cast::<u8>();
                codes::keys::<E, K>(pages.add(group), pages.wrapping_add(next), dim, to);
                to.cast_const()
            } else if shape.in_order() {
                self.keys.add(shape.group_of(held.entry(shape, first), 0)).cast_const()
            } else {
                let rows: [*const E; GROUP] = std::array::from_fn(|position| {
                    if position < seen {
                        let entry = held.entry(shape, first + position);
                        self.keys.add(shape.place_of(entry, 0) * dim).cast_const()
                    } else {
                        zeros
                    }
                });
                K::pack_rows(&rows, dim, to, GROUP);
                to.cast_const()
            };
            values_of::<E, K>(keys, shape, seen.min(GROUP), values);
            (keys, values)
        }
    }
}

/// Copies the values of a group from its keys. Positions from `seen` on become zeros, since the
/// page's earlier owner may have left NaN there.
///
/// # Safety
/// `keys` is a group of rows, and `to` has room for its values.
#[inline(always)]
unsafe fn values_of<E: Element, K: Kernel<E>>(
    keys: *const E,
    shape: &Shape,
    seen: usize,
    to: *mut E,
) {
    let (width, padded) = (shape.latent, shape.padded());
    if E::PAIR == 1 {
        for first in (0..width).step_by(GROUP) {
            // The padding is never read, so its content does not matter.
            let row = |at: usize| keys.wrapping_add((first + at).min(shape.head_dim - 1) * GROUP);
            let rows: [*const E; GROUP] = std::array::from_fn(row);
            // SAFETY: each row has `GROUP` positions, and there is room for the values of each
            // position.
            unsafe { K::pack_rows(&rows, GROUP, to.add(first), padded) };
        }
        for position in seen..GROUP {
            // SAFETY: the slice is the position's row of values.
            unsafe { std::slice::from_raw_parts_mut(to.add(position * padded), width) }
                .fill(E::default());
        }
        return;
    }
    // Swaps two elements of two positions: keys store neighbouring elements side by side, and
    // values store neighbouring positions side by side.
    let masks: [u64; PAIRS] = std::array::from_fn(|pair| match seen.saturating_sub(2 * pair) {
        0 => 0,
        1 => 0x0000_ffff_0000_ffff,
        _ => u64::MAX,
    });
    let (keys, to) = (keys.cast::<u8>(), to.cast::<u8>());
    for element in 0..width / 2 {
        for (pair, mask) in masks.iter().enumerate() {
            // SAFETY: accesses stay inside the group and its values.
            unsafe {
                let from = keys.add((element * PAIRS + pair) * WORDS);
                let x = from.cast::<u64>().read_unaligned();
                let outer = x & 0xffff_0000_0000_ffff;
                let inner = (x >> 16 & 0xffff_0000) | (x << 16 & 0x0000_ffff_0000_0000);
                let to = to.add((pair * padded / 2 + element) * WORDS);
                to.cast::<u64>().write_unaligned((outer | inner) & mask);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Bf16;
    use crate::isa::plain::Plain;

    fn check<E: Element + PartialEq + std::fmt::Debug>(
        (dim, latent): (usize, usize),
        page_size: usize,
        seen: usize,
    ) {
        let shape = Shape { head_dim: dim, latent, page_size, ..Shape::CAUSAL };
        let pages = [1_i32, 0];
        let held = Held { pages: pages.as_ptr(), kv_head: 0 };
        let mut keys = vec![E::from_f32(f32::NAN); 2 * page_size * dim];
        let pool = Pool { keys: keys.as_mut_ptr(), values: std::ptr::null_mut() };
        let number = |position: usize, at: usize| (position * dim + at) as f32;
        let mut narrow = vec![E::default(); dim];
        for position in 0..seen {
            let row: Vec<f32> = (0..dim).map(|at| number(position, at)).collect();
            let entry = pages[position / page_size] as usize * page_size + position % page_size;
            // SAFETY: the entry is in the pages; `Plain` runs on every processor.
            unsafe { pool.keep_row::<Plain>(&shape, entry, &row, &mut narrow) };
        }
        let mut ordered = Ordered::new(dim);
        let slot = (&mut ordered, 1);
        let padded = shape.padded();
        // SAFETY: the group's pages exist; `Plain` runs on every processor.
        let values = unsafe {
            let (_, values) = pool.group::<Plain>(&shape, &held, (0, seen), 0, slot);
            std::slice::from_raw_parts(values, GROUP * padded)
        };
        for position in 0..GROUP {
            for at in 0..latent {
                let found =
                    values[(position / E::PAIR * padded + at) * E::PAIR + position % E::PAIR];
                let wanted = if position < seen { number(position, at) } else { 0.0 };
                assert_eq!(found, E::from_f32(wanted), "{dim} {page_size} {seen} {position} {at}");
            }
        }
    }

    #[test]
    fn values_are_the_first_elements_of_what_is_seen() {
        for (sizes, page_size) in
            [((48, 32), 16), ((40, 24), 16), ((26, 24), 32), ((48, 32), 10), ((18, 16), 8)]
        {
            for seen in [1, 2, 7, 15, 16] {
                check::<f32>(sizes, page_size, seen);
                check::<Bf16>(sizes, page_size, seen);
            }
        }
    }
}
