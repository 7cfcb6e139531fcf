//! The memory order of keys and values in their pages.
//!
//! If sizes allow, [`GROUP`] positions of a head are stored in the order in which the kernels read
//! them, so that attention need not reorder them. Keys are `[dim / PAIR, GROUP, PAIR]`, values
//! `[GROUP / PAIR, dim, PAIR]`. The groups of keys, and those of values, are stored as
//! `[entries / GROUP, kv_heads]`. For other sizes, entries are `[entries, kv_heads, dim]`, and
//! groups are reordered at every read. Pages with codes store groups in the kernels' order. A page
//! has the same size and offset in any order, so code that copies whole pages does not depend on
//! the order. Latent attention stores only keys ([`latent`]).

pub(crate) mod codes;
mod latent;

use crate::element::Element;
use crate::math;
use crate::tile::{GROUP, GROUPS, Kernel};
use crate::vector::Vector;

pub(crate) use codes::{group_bytes, takes_codes};

/// Bytes of a cache line.
const LINE: usize = 64;

/// The sizes and limits of a kind of attention, and of its pages.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) page_size: usize,
    /// The factor of attention scores.
    pub(crate) scale: f32,
    /// True if pages store codes in place of elements. Groups are then in the kernels' order.
    pub(crate) coded: bool,
    /// The number of positions that a query sees, including its own; 0 if it sees all earlier ones.
    pub(crate) window: usize,
    /// True if a query sees as many later positions as earlier ones.
    pub(crate) both_ways: bool,
    /// The chunk length if a query sees only positions of its own chunk; 0 if there are no chunks.
    pub(crate) chunk: usize,
    /// The bound that scores approach; 0 if there is none.
    pub(crate) cap: f32,
    /// The number of leading elements of a key that are also its value, if all heads share one key
    /// (latent attention); 0 if heads have their own keys and values.
    pub(crate) latent: usize,
}

impl Shape {
    /// Causal attention without further limits, for heads of 0 elements.
    pub(crate) const CAUSAL: Self = Self {
        heads: 1,
        kv_heads: 1,
        head_dim: 0,
        page_size: 1,
        scale: 1.0,
        coded: false,
        window: 0,
        both_ways: false,
        chunk: 0,
        cap: 0.0,
        latent: 0,
    };

    /// The first position that a query sees.
    #[inline(always)]
    pub(crate) fn first_seen(&self, position: usize) -> usize {
        let in_window = match self.window {
            0 => 0,
            window => (position + 1).saturating_sub(window),
        };
        match self.chunk {
            0 => in_window,
            chunk => in_window.max(position - position % chunk),
        }
    }

    /// The end of the positions that a query sees, for a row of unlimited length.
    #[inline(always)]
    pub(crate) fn end_seen(&self, position: usize) -> usize {
        match (self.both_ways, self.window) {
            (false, _) => position + 1,
            (true, 0) => usize::MAX,
            (true, window) => position + window,
        }
    }

    /// The number of query heads that share a key head.
    pub(crate) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Elements of a head's value, and of the head's output.
    pub(crate) fn value_dim(&self) -> usize {
        if self.latent > 0 { self.latent } else { self.head_dim }
    }

    /// Elements of a head's value, padded to whole vectors.
    pub(crate) fn padded(&self) -> usize {
        self.value_dim().next_multiple_of(GROUP)
    }

    fn in_order(&self) -> bool {
        self.page_size.is_multiple_of(GROUP) && self.head_dim.is_multiple_of(GROUP)
    }

    /// The offset of the group that contains an entry of a head: in elements, or in bytes if pages
    /// store codes.
    fn group_of(&self, entry: usize, kv_head: usize) -> usize {
        let group = self.place_of(entry / GROUP, kv_head);
        group * if self.coded { group_bytes(self.head_dim) } else { GROUP * self.head_dim }
    }

    /// The index of a head of entry or group `at`, among the heads of all entries or groups.
    fn place_of(&self, at: usize, kv_head: usize) -> usize {
        if self.latent > 0 { at } else { at * self.kv_heads + kv_head }
    }
}

/// The key and value pools of a layer.
#[derive(Clone, Copy)]
pub(crate) struct Pool<E> {
    pub(crate) keys: *mut E,
    pub(crate) values: *mut E,
}

/// The pages of a request's positions, for one key head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    /// The row's page numbers, a line of the page table.
    pub(crate) pages: *const i32,
    pub(crate) kv_head: usize,
}

/// The norm of the heads of queries or keys.
#[derive(Clone, Copy)]
pub(crate) struct HeadNorm<'a> {
    /// The weight of each element of the head.
    pub(crate) weight: &'a [f32],
    /// The normalising factor for all heads of a position; `None` if each head has its own.
    pub(crate) factor: Option<f32>,
}

/// Buffers for groups that had to be reordered.
pub(crate) struct Ordered<E> {
    keys: Vec<E>,
    values: Vec<E>,
    zeros: Vec<E>,
}

impl<E: Element> Ordered<E> {
    /// Creates buffers for heads of up to `dim` elements.
    pub(crate) fn new(dim: usize) -> Self {
        let size = GROUP * dim.next_multiple_of(GROUP);
        let zero = E::default();
        Self {
            keys: vec![zero; GROUPS * size],
            values: vec![zero; GROUPS * size],
            zeros: vec![zero; dim],
        }
    }
}

impl<E: Element> Pool<E> {
    /// Writes an entry of a head as codes.
    ///
    /// # Safety
    /// The conditions of [`Self::keep`] hold, and pages have codes.
    #[inline(always)]
    pub(crate) unsafe fn keep_codes<V: Vector>(
        &self,
        shape: &Shape,
        (entry, kv_head): (usize, usize),
        key: &[f32],
        value: &[f32],
    ) {
        let (at, lane) = (shape.group_of(entry, kv_head), entry % GROUP);
        // SAFETY: the addresses are those of the entry's group, by the function's contract.
        unsafe {
            codes::keep_key::<E, V>(key, lane, self.keys.cast::<u8>().add(at));
            codes::keep_value::<E, V>(value, lane, self.values.cast::<u8>().add(at));
        }
    }

    /// Writes the key and the value of an entry of a head.
    ///
    /// # Safety
    /// The entry and the head exist; no other thread may read or write them at the same time.
    #[inline(always)]
    pub(crate) unsafe fn keep(
        &self,
        shape: &Shape,
        (entry, kv_head): (usize, usize),
        key: &[E],
        value: &[E],
    ) {
        let dim = shape.head_dim;
        // SAFETY: writes stay inside the entry's page, by the function's contract.
        unsafe {
            self.keep_key(shape, (entry, kv_head), key);
            if shape.in_order() {
                let lane = entry % GROUP;
                let group = shape.group_of(entry, kv_head);
                let values =
                    self.values.add(group + lane / E::PAIR * dim * E::PAIR + lane % E::PAIR);
                for (d, &value) in value.iter().enumerate() {
                    *values.add(d * E::PAIR) = value;
                }
            } else {
                let at = shape.place_of(entry, kv_head) * dim;
                std::ptr::copy_nonoverlapping(value.as_ptr(), self.values.add(at), dim);
            }
        }
    }

    /// Writes the key of an entry of a head.
    ///
    /// # Safety
    /// See [`Self::keep`].
    #[inline(always)]
    unsafe fn keep_key(&self, shape: &Shape, (entry, kv_head): (usize, usize), key: &[E]) {
        let dim = shape.head_dim;
        // SAFETY: writes stay inside the entry's page, by the function's contract.
        unsafe {
            if shape.in_order() {
                let group = shape.group_of(entry, kv_head);
                let keys = self.keys.add(group + entry % GROUP * E::PAIR);
                for (pair, key) in key.chunks_exact(E::PAIR).enumerate() {
                    let to = keys.add(pair * GROUP * E::PAIR);
                    std::ptr::copy_nonoverlapping(key.as_ptr(), to, E::PAIR);
                }
            } else {
                let at = shape.place_of(entry, kv_head) * dim;
                std::ptr::copy_nonoverlapping(key.as_ptr(), self.keys.add(at), dim);
            }
        }
    }

    /// Prefetches cache lines that [`Self::keep`] will write for an entry: share `part` of `parts`
    /// of the key lines. The value lines are divided in the same way if pages store codes;
    /// otherwise share 0 includes all of them.
    #[inline(always)]
    pub(crate) fn expect<K: Kernel<E>>(
        &self,
        shape: &Shape,
        (entry, kv_head): (usize, usize),
        (part, parts): (usize, usize),
    ) {
        let group = shape.group_of(entry, kv_head);
        if shape.coded {
            let (keys, values) = (self.keys.cast::<u8>(), self.values.cast::<u8>());
            for line in (part * LINE..group_bytes(shape.head_dim)).step_by(parts * LINE) {
                K::prefetch(keys.wrapping_add(group + line).cast());
                K::prefetch(values.wrapping_add(group + line).cast());
            }
        } else if shape.in_order() {
            let (lane, dim) = (entry % GROUP, shape.head_dim);
            let line = GROUP * E::PAIR;
            for pair in (part..dim / E::PAIR).step_by(parts) {
                K::prefetch(self.keys.wrapping_add(group + pair * line));
            }
            if part == 0 {
                let values = group + lane / E::PAIR * dim * E::PAIR;
                for at in (0..dim * E::PAIR).step_by(line) {
                    K::prefetch(self.values.wrapping_add(values + at));
                }
            }
        }
    }

    /// Returns the keys and values of the group of positions that begins at `first`. Only the first
    /// `seen` positions are used. The keys of the other positions are arbitrary, and their values
    /// are zero. Data that must be reordered, or converted from codes, is written to `ordered`, to
    /// the buffer with index `slot`. With codes, the group at `next` is prefetched.
    ///
    /// # Safety
    /// The positions that are seen have pages, and no other thread may write these positions at the
    /// same time.
    #[inline(always)]
    pub(crate) unsafe fn group<K: Kernel<E>>(
        &self,
        shape: &Shape,
        held: &Held,
        (first, seen): (usize, usize),
        next: usize,
        (ordered, slot): (&mut Ordered<E>, usize),
    ) -> (*const E, *const E) {
        if shape.latent > 0 {
            // SAFETY: the caller upholds the contract.
            return unsafe {
                self.latent_group::<K>(shape, held, (first, seen), next, (ordered, slot))
            };
        }
        let (dim, padded) = (shape.head_dim, shape.padded());
        let size = GROUP * padded;
        let ordered_keys = &mut ordered.keys[slot * size..][..size];
        let ordered_values = &mut ordered.values[slot * size..][..size];
        // SAFETY: the entries' pages exist, and all accesses stay inside their rows and groups.
        unsafe {
            if shape.coded {
                let group = shape.group_of(held.entry(shape, first), held.kv_head);
                let (keys, values) = (self.keys.cast::<u8>(), self.values.cast::<u8>());
                let to = (ordered_keys.as_mut_ptr(), ordered_values.as_mut_ptr());
                let (from, then) = (keys.add(group), keys.wrapping_add(next));
                codes::keys::<E, K>(from, then, dim, to.0);
                let (from, then) = (values.add(group), values.wrapping_add(next));
                codes::values::<E, K>(from, then, dim, seen, to.1);
                return (to.0, to.1);
            }
            if shape.in_order() {
                let group = shape.group_of(held.entry(shape, first), held.kv_head);
                let (keys, values) = (self.keys.add(group), self.values.add(group));
                if seen == GROUP {
                    return (keys, values);
                }
                // The page's earlier owner may have left NaN, which remains NaN with weight 0.
                let values = std::slice::from_raw_parts(values, size);
                let pairs = ordered_values.chunks_exact_mut(dim * E::PAIR);
                for (pair, (to, from)) in pairs.zip(values.chunks_exact(dim * E::PAIR)).enumerate()
                {
                    match seen.saturating_sub(pair * E::PAIR) {
                        0 => to.fill(E::default()),
                        seen if seen >= E::PAIR => to.copy_from_slice(from),
                        seen => {
                            for (at, (to, &from)) in to.iter_mut().zip(from).enumerate() {
                                *to = if at % E::PAIR < seen { from } else { E::default() };
                            }
                        }
                    }
                }
                return (keys, ordered_values.as_ptr());
            }
            let zeros = ordered.zeros.as_ptr();
            let row = |from: *mut E, position: usize| match position < seen {
                true => {
                    let entry = held.entry(shape, first + position);
                    from.add(shape.place_of(entry, held.kv_head) * dim).cast_const()
                }
                false => zeros,
            };
            let keys: [*const E; GROUP] = std::array::from_fn(|at| row(self.keys, at));
            K::pack_rows(&keys, dim, ordered_keys.as_mut_ptr(), GROUP);
            for position in 0..GROUP {
                let from = std::slice::from_raw_parts(row(self.values, position), dim);
                let to = &mut ordered_values[position / E::PAIR * padded * E::PAIR..];
                for (d, &value) in from.iter().enumerate() {
                    to[d * E::PAIR + position % E::PAIR] = value;
                }
            }
            (ordered_keys.as_ptr(), ordered_values.as_ptr())
        }
    }
}

impl Held {
    /// The offset of the group of positions that begins at `first`, see [`Shape::group_of`]. `None`
    /// if groups must be reordered first.
    ///
    /// # Safety
    /// The position `first` has a page.
    #[inline(always)]
    pub(crate) unsafe fn group(&self, shape: &Shape, first: usize) -> Option<usize> {
        // SAFETY: the caller upholds the contract.
        shape.in_order().then(|| shape.group_of(unsafe { self.entry(shape, first) }, self.kv_head))
    }

    /// # Safety
    /// The position has a page.
    #[inline(always)]
    unsafe fn entry(&self, shape: &Shape, position: usize) -> usize {
        // SAFETY: the caller upholds the contract.
        let page = unsafe { *self.pages.add(position / shape.page_size) };
        page as usize * shape.page_size + position % shape.page_size
    }
}

/// Rotates a head; if there is a norm, normalises it first.
#[inline(always)]
pub(crate) fn turn<V: Vector>(
    head: &mut [f32],
    norm: Option<HeadNorm<'_>>,
    eps: f32,
    (cos, sin): (&[f32], &[f32]),
) {
    if let Some(HeadNorm { weight, factor }) = norm {
        let factor = match factor {
            Some(factor) => factor,
            None => math::rms_factor::<V>(head, eps),
        };
        for (x, &weight) in head.iter_mut().zip(weight) {
            *x = *x * factor * weight;
        }
    }
    math::rotate::<V>(&mut head[..2 * cos.len()], cos, sin);
}
