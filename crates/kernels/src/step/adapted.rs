//! Adds the low-rank terms of adapters to products.

use crate::adapters::{Adapted, LowRank, Product};
use crate::element::Element;
use crate::matmul::{Out, Rows, activated, add, gate, halves, put};
use crate::pack::panel_len;
use crate::step::Step;
use crate::team::Member;
use crate::tile::{Ahead, HALF, Kernel, MAX_ROWS, NR, Tile, tile_height};
use crate::vector::Vector;

/// The number of panels of `B` per unit of work.
const PANELS: usize = 8;

/// Results to which adapters add their terms: the address of the first row, the number of elements
/// from one row to the next, and the factor of the terms.
#[derive(Clone, Copy)]
pub(super) struct Results {
    pub(super) first: *mut f32,
    pub(super) stride: usize,
    pub(super) scale: f32,
}

/// The rows of one tile. They belong to one group.
#[derive(Clone, Copy)]
struct Tokens<'a> {
    tokens: &'a [usize],
    /// The index of the first row in the buffer of `A x`.
    first: usize,
}

impl Tokens<'_> {
    /// True if the rows are contiguous.
    #[inline(always)]
    fn are_neighbours(&self) -> bool {
        match self.tokens {
            [first, .., last] => last - first + 1 == self.tokens.len(),
            _ => true,
        }
    }
}

impl LowRank {
    /// The number of units of work in a tile's product with `B`.
    #[inline(always)]
    fn pieces(&self) -> usize {
        let mut pieces = 0;
        for part in &self.parts {
            pieces += part.outputs.div_ceil(NR * PANELS);
        }
        pieces
    }
}

impl<E: Element> Step<'_, E> {
    /// Adds the adapters' terms to the results of a product. The caller must pass a barrier before
    /// it reads the results.
    ///
    /// # Safety
    /// The conditions of [`Self::multiply`] must hold, and that function must have been called for
    /// these results. No barrier is needed between the two calls.
    #[inline(always)]
    pub(super) unsafe fn adapt<K: Kernel<E>>(
        &self,
        at: (usize, Product),
        rows: Rows<E>,
        results: Results,
        member: &Member<'_>,
    ) {
        let Some(adapted) = &self.adapted else { return };
        if adapted.groups(at, rows.count == self.tokens.len()).is_none() {
            return;
        }
        // SAFETY: the caller upholds the contract. One member takes each unit of work, and a
        // barrier separates the two products.
        unsafe {
            self.reduce::<K>(adapted, at, rows, member);
            member.meet();
            self.expand::<K>(adapted, at, (rows.count, results), member);
        }
    }

    /// The buffer of gates and values before the activation; `None`: no adapter changes any of
    /// these rows.
    #[inline(always)]
    pub(super) fn adapted_gates(&self, layer: usize, rows: Rows<E>) -> Option<*mut f32> {
        let adapted = self.adapted.as_ref()?;
        let whole = rows.count == self.tokens.len();
        adapted.groups((layer, Product::GateUp), whole).map(|_| adapted.gates())
    }

    /// Computes the product `A x`, and rounds it to the element type.
    #[inline(always)]
    unsafe fn reduce<K: Kernel<E>>(
        &self,
        adapted: &Adapted<'_, E>,
        at: (usize, Product),
        rows: Rows<E>,
        member: &Member<'_>,
    ) {
        let whole = rows.count == self.tokens.len();
        let groups = adapted.groups(at, whole).unwrap_or(&[]);
        let mut total = 0;
        for group in groups {
            let panels = group.beside(at).map_or(0, LowRank::panels);
            total += tiles::<E, K>(group.tokens.len()) * panels;
        }
        let mut sums: Tile = [[0.0; NR]; MAX_ROWS];
        loop {
            let mine = adapted.queues(at)[0].take(total, member.members);
            if mine.is_empty() {
                return;
            }
            for piece in mine {
                let mut left = piece;
                for group in groups {
                    let Some(matrices) = group.beside(at) else { continue };
                    let panels = matrices.panels();
                    let own = tiles::<E, K>(group.tokens.len()) * panels;
                    if left >= own {
                        left -= own;
                        continue;
                    }
                    let tokens = tile_of::<E, K>(&group.tokens, group.first, left / panels);
                    let panel = left % panels;
                    let LowRank { rank, inputs, .. } = *matrices;
                    // SAFETY: reads stay inside the product's rows and a panel of `A`. The buffers
                    // of gathered rows belong to this member, and no other unit of work writes
                    // these results.
                    unsafe {
                        let from = rows.first;
                        let numbers = gather::<E, K>(adapted, (from, inputs), tokens, member);
                        let weights = matrices.a.as_ptr().cast::<E>();
                        let weights = weights.add(panel * panel_len(inputs));
                        let count = tokens.tokens.len();
                        let to = sums.as_mut_ptr();
                        K::tile(numbers, count, weights, inputs, Ahead::Nothing, false, to);
                        let width = (rank - panel * NR).min(NR);
                        for (row, sums) in sums[..count].iter().enumerate() {
                            let to = adapted.reduced.add((tokens.first + row) * adapted.stride);
                            let to = to.add(panel * NR);
                            for (output, &sum) in sums[..width].iter().enumerate() {
                                *to.add(output) = E::from_f32(sum);
                            }
                        }
                    }
                    break;
                }
            }
        }
    }

    /// Computes the product of `B` with `A x`, and adds it to the results.
    #[inline(always)]
    unsafe fn expand<K: Kernel<E>>(
        &self,
        adapted: &Adapted<'_, E>,
        at: (usize, Product),
        (count, results): (usize, Results),
        member: &Member<'_>,
    ) {
        let groups = adapted.groups(at, count == self.tokens.len()).unwrap_or(&[]);
        let mut total = 0;
        for group in groups {
            let pieces = group.beside(at).map_or(0, LowRank::pieces);
            total += tiles::<E, K>(group.tokens.len()) * pieces;
        }
        let mut sums: Tile = [[0.0; NR]; MAX_ROWS];
        loop {
            let mine = adapted.queues(at)[1].take(total, member.members);
            if mine.is_empty() {
                return;
            }
            for piece in mine {
                let mut left = piece;
                for group in groups {
                    let Some(matrices) = group.beside(at) else { continue };
                    let pieces = matrices.pieces();
                    let own = tiles::<E, K>(group.tokens.len()) * pieces;
                    if left >= own {
                        left -= own;
                        continue;
                    }
                    let tokens = tile_of::<E, K>(&group.tokens, group.first, left / pieces);
                    // SAFETY: no other unit of work writes these results, and the unit exists.
                    unsafe {
                        let piece = left % pieces;
                        self.expand_piece::<K>(
                            (adapted, matrices),
                            (tokens, piece),
                            results,
                            member,
                            &mut sums,
                        );
                    }
                    break;
                }
            }
        }
    }

    /// Computes some panels of one module's product with `B`, for the rows of a tile.
    #[inline(always)]
    unsafe fn expand_piece<K: Kernel<E>>(
        &self,
        (adapted, matrices): (&Adapted<'_, E>, &LowRank),
        (tokens, piece): (Tokens<'_>, usize),
        Results { first, stride, scale }: Results,
        member: &Member<'_>,
        sums: &mut Tile,
    ) {
        let mut left = piece;
        let count = tokens.tokens.len();
        for part in &matrices.parts {
            let own = part.outputs.div_ceil(NR * PANELS);
            if left >= own {
                left -= own;
                continue;
            }
            // SAFETY: the caller upholds the contract.
            unsafe {
                let (rows, numbers) = adapted.room(member.index);
                for row in 0..count {
                    let from = adapted.reduced.add((tokens.first + row) * adapted.stride);
                    let from = from.add(part.column).cast_const();
                    std::ptr::copy_nonoverlapping(from, rows.add(row * part.rank), part.rank);
                }
                let numbers = numbers.cast::<K::Number>();
                K::arrange(rows, count, part.rank, numbers);
                let weights = part.b.as_ptr().cast::<E>();
                let panels = part.outputs.div_ceil(NR);
                for panel in left * PANELS..((left + 1) * PANELS).min(panels) {
                    let weights = weights.add(panel * panel_len(part.rank));
                    let to = sums.as_mut_ptr();
                    K::tile(numbers, count, weights, part.rank, Ahead::Nothing, false, to);
                    let width = (part.outputs - panel * NR).min(NR);
                    let scale = K::Vector::splat(scale);
                    for (sums, &token) in sums[..count].iter().zip(tokens.tokens) {
                        let [one, other] = halves::<K::Vector>(sums.as_ptr());
                        let to = first.add(token * stride + part.first + panel * NR);
                        add(one.mul(scale), other.mul(scale), to, width);
                    }
                }
            }
            return;
        }
    }

    /// Applies the activation to this member's share of the rows: `[count, 2 * inner]` with gates,
    /// or `[count, inner]` without.
    ///
    /// # Safety
    /// A barrier must have passed since the rows were written.
    #[inline(always)]
    pub(super) unsafe fn finish_gates<K: Kernel<E>>(
        &self,
        rows: *const f32,
        (count, inner): (usize, usize),
        member: &Member<'_>,
    ) {
        let blocks = inner.div_ceil(HALF);
        let stride = if self.has_gates { 2 * inner } else { inner };
        for block in member.share(count * blocks) {
            let (row, first) = (block / blocks, block % blocks * HALF);
            // SAFETY: reads stay inside the rows, or inside the unused padding after them.
            unsafe {
                let from = rows.add(row * stride + first);
                let (x, to) = (K::Vector::load(from), self.gated.add(row * inner + first));
                if self.has_gates {
                    let both = (x, K::Vector::load(from.add(inner)));
                    gate::<E, K>(both, self.activation, to, inner - first);
                } else {
                    put::<E, K>(activated(x, Some(self.activation)), to, inner - first);
                }
            }
        }
    }

    /// Returns where the first projection of a feed-forward network writes. If there is a buffer
    /// `before`, that is the target, and the activation is not applied yet. Otherwise activated
    /// values are written to their own buffer.
    #[inline(always)]
    pub(super) fn gates_to(&self, before: Option<*mut f32>) -> Out<E> {
        match (before, self.has_gates) {
            (Some(to), true) => Out::Halves(to),
            (Some(to), false) => Out::Store(to),
            (None, true) => Out::Gate(self.gated, self.activation),
            (None, false) => Out::Activate(self.gated, Some(self.activation)),
        }
    }
}

/// The number of tiles for `rows` rows.
#[inline(always)]
fn tiles<E: Element, K: Kernel<E>>(rows: usize) -> usize {
    rows.div_ceil(tile_height(rows, K::ROWS).max(1))
}

/// The rows of a tile.
#[inline(always)]
fn tile_of<E: Element, K: Kernel<E>>(tokens: &[usize], first: usize, tile: usize) -> Tokens<'_> {
    let height = tile_height(tokens.len(), K::ROWS);
    let begin = tile * height;
    let end = (begin + height).min(tokens.len());
    Tokens { tokens: &tokens[begin..end], first: first + begin }
}

/// Arranges a tile's rows for the kernel.
///
/// # Safety
/// The rows must exist and have `inputs` elements, and the member's buffers must have room for a
/// tile.
#[inline(always)]
unsafe fn gather<E: Element, K: Kernel<E>>(
    adapted: &Adapted<'_, E>,
    (from, inputs): (*const E, usize),
    tokens: Tokens<'_>,
    member: &Member<'_>,
) -> *const K::Number {
    // SAFETY: the caller upholds the contract.
    unsafe {
        let (rows, numbers) = adapted.room(member.index);
        let numbers = numbers.cast::<K::Number>();
        let first = match tokens.are_neighbours() {
            true => from.add(tokens.tokens[0] * inputs),
            false => {
                for (row, &token) in tokens.tokens.iter().enumerate() {
                    let from = from.add(token * inputs);
                    std::ptr::copy_nonoverlapping(from, rows.add(row * inputs), inputs);
                }
                rows.cast_const()
            }
        };
        K::arrange(first, tokens.tokens.len(), inputs, numbers);
        numbers.cast_const()
    }
}
