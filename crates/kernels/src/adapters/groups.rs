//! The adapters of a step with the tokens of each, and the buffers for their products.

use std::ops::Range;
use std::sync::Arc;

use super::{AdapterMatrices, LowRank, PRODUCTS, Product};
use crate::element::Element;
use crate::memory::grow;
use crate::team::Queue;
use crate::tile::{MAX_ROWS, NR};

/// Queues per product: one for `A x`, one for `B (A x)`.
const QUEUES: usize = 2;

/// The tokens of one adapter in a step.
pub(crate) struct Group<'a> {
    matrices: &'a AdapterMatrices,
    /// The rows of a product that use the adapter, in ascending order.
    pub(crate) tokens: Vec<usize>,
    /// The index of the group's first row in the buffer of `A x`.
    pub(crate) first: usize,
}

impl Group<'_> {
    /// The matrices of the adapter for a product; `None` if the adapter does not change the
    /// product.
    #[inline]
    pub(crate) fn beside(&self, (layer, product): (usize, Product)) -> Option<&LowRank> {
        self.matrices.beside(layer, product)
    }
}

/// The adapters of a step.
pub(crate) struct Groups<'a> {
    /// The groups whose rows are tokens of the step.
    all: Vec<Group<'a>>,
    /// The groups of the same adapters, whose rows are indices among the sampled tokens.
    sampled: Vec<Group<'a>>,
}

impl<'a> Groups<'a> {
    /// Finds the tokens of each adapter. `adapters` has one entry per row, `lengths` the number of
    /// tokens per row, and `sample` the sampled tokens. `None` if no row has an adapter.
    pub(crate) fn of(
        adapters: &'a [Option<Arc<AdapterMatrices>>],
        lengths: &[i64],
        sample: &[i64],
    ) -> Option<Self> {
        let (mut all, mut sampled) = (Vec::new(), Vec::new());
        let (mut token, mut result) = (0, 0);
        for (adapter, &length) in adapters.iter().zip(lengths) {
            let end = token + length as usize;
            let of_row = sample[result..].iter().take_while(|&&at| (at as usize) < end).count();
            if let Some(matrices) = adapter {
                put(&mut all, matrices, token..end);
                put(&mut sampled, matrices, result..result + of_row);
            }
            (token, result) = (end, result + of_row);
        }
        (!all.is_empty()).then_some(Self { all, sampled })
    }

    fn adapters(&self) -> impl Iterator<Item = &AdapterMatrices> {
        self.all.iter().map(|group| group.matrices)
    }
}

/// Adds rows to the group of their adapter.
fn put<'a>(groups: &mut Vec<Group<'a>>, matrices: &'a Arc<AdapterMatrices>, rows: Range<usize>) {
    let of = |group: &Group<'_>| std::ptr::eq(group.matrices, &raw const **matrices);
    let at = groups.iter().position(of).unwrap_or_else(|| {
        groups.push(Group { matrices, tokens: Vec::new(), first: 0 });
        groups.len() - 1
    });
    groups[at].tokens.extend(rows);
    let mut first = 0;
    for group in groups {
        group.first = first;
        first += group.tokens.len();
    }
}

/// Buffers for the adapters of a step, reused from step to step.
#[derive(Default)]
pub(crate) struct Buffers<E> {
    /// `A x` for the tokens of all groups.
    reduced: Vec<E>,
    /// The input rows of one tile, per member.
    rows: Vec<E>,
    /// The same rows in the form that tiles read.
    numbers: Vec<f32>,
    /// Gates and the values that they gate, before the activation.
    gates: Vec<f32>,
    queues: Vec<Queue>,
}

/// The adapters of a step and their buffers, for the members of a team.
pub(crate) struct Adapted<'a, E> {
    groups: &'a Groups<'a>,
    pub(crate) reduced: *mut E,
    /// Elements from one row of `reduced` to the next.
    pub(crate) stride: usize,
    rows: *mut E,
    numbers: *mut f32,
    /// Elements per member in `rows` and in `numbers`.
    of_member: usize,
    gates: *mut f32,
    queues: &'a [Queue],
}

impl<E: Element> Buffers<E> {
    /// Reserves memory for a step of this many tokens and members. Gate products have `2 * inner`
    /// outputs.
    pub(crate) fn prepare<'a>(
        &'a mut self,
        groups: &'a Groups<'a>,
        (tokens, members, inner): (usize, usize, usize),
    ) -> Adapted<'a, E> {
        let stride = groups.adapters().map(AdapterMatrices::widest_rank).max().unwrap_or(0);
        let widest = groups.adapters().map(|of| of.sizes.widest()).max().unwrap_or(0);
        let layers = groups.adapters().map(|of| of.layers.len()).max().unwrap_or(0);
        let of_member = MAX_ROWS * widest.max(stride);
        grow(&mut self.reduced, tokens * stride, E::default());
        grow(&mut self.rows, members * of_member, E::default());
        grow(&mut self.numbers, members * of_member, 0.0);
        if groups.adapters().any(AdapterMatrices::changes_gates) {
            // Vector loads read past the end of the last row.
            grow(&mut self.gates, tokens * 2 * inner + NR, 0.0);
        }
        self.queues.resize_with(layers * PRODUCTS * QUEUES, Queue::default);
        self.queues.iter_mut().for_each(Queue::reset);
        Adapted {
            groups,
            reduced: self.reduced.as_mut_ptr(),
            stride,
            rows: self.rows.as_mut_ptr(),
            numbers: self.numbers.as_mut_ptr(),
            of_member,
            gates: self.gates.as_mut_ptr(),
            queues: &self.queues,
        }
    }
}

impl<E> Adapted<'_, E> {
    /// Returns all groups, or `None` if no group changes the product. If `whole`, the rows are all
    /// tokens; otherwise they are the sampled tokens.
    #[inline]
    pub(crate) fn groups(&self, at: (usize, Product), whole: bool) -> Option<&[Group<'_>]> {
        let groups = if whole { &self.groups.all } else { &self.groups.sampled };
        groups.iter().any(|group| group.beside(at).is_some()).then_some(groups)
    }

    /// The queues of a product.
    #[inline]
    pub(crate) fn queues(&self, (layer, product): (usize, Product)) -> &[Queue] {
        &self.queues[(layer * PRODUCTS + product as usize) * QUEUES..][..QUEUES]
    }

    /// Returns a member's two buffers for the rows of a tile: as elements, and in the form that
    /// tiles read.
    ///
    /// # Safety
    /// No other thread may use the buffers of the same `member` at the same time.
    #[inline(always)]
    pub(crate) unsafe fn room(&self, member: usize) -> (*mut E, *mut f32) {
        let first = member * self.of_member;
        // SAFETY: the buffers have `of_member` elements per member.
        unsafe { (self.rows.add(first), self.numbers.add(first)) }
    }

    /// The buffer for gates and the values that they gate.
    #[inline(always)]
    pub(crate) fn gates(&self) -> *mut f32 {
        self.gates
    }
}
