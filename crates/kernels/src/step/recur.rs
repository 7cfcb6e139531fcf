//! Computes the recurrent layers of a step, and the gates after attention.

use crate::element::Element;
use crate::math;
use crate::matmul::Rows;
use crate::recurrence::{Advance, Gating, Recurrence, Sigmoids};
use crate::step::{Step, Stream};
use crate::team::{Member, Queue};
use crate::tile::Kernel;
use crate::vector::Vector;

impl<E: Element> Step<'_, E> {
    /// Advances the states of all rows, see [`Advance`]. `stride` is the number of outputs of the
    /// layer's first projection.
    ///
    /// # Safety
    /// The conditions of [`Step::compute`] must hold, and the layer's first projection must be
    /// done.
    #[inline(always)]
    pub(super) unsafe fn recur<K: Kernel<E>>(
        &self,
        (recurrence, stride): (&Recurrence, usize),
        (queue, member): (&Queue, &Member<'_>),
    ) {
        let (projected, mixed, rows) = (self.qkv.cast_const(), self.mixed, self.state_rows);
        let sizes = &recurrence.sizes;
        // SAFETY: the caller upholds the contract; all reads are inside the outputs of the
        // projections.
        unsafe {
            let decays = match &recurrence.low {
                Some(_) => (self.low_result(recurrence, 1).cast_const(), sizes.decays()),
                None => (projected.add(sizes.gates() + sizes.values()), stride),
            };
            let work =
                Advance { recurrence, rows, projected, stride, decays, mixed, queue, member };
            K::Vector::compute(work);
        }
    }

    /// Returns the outputs of one of the low-rank projections, for all tokens. `number` is 0 for
    /// gates, 1 for decays.
    #[inline(always)]
    pub(super) fn low_result(&self, recurrence: &Recurrence, number: usize) -> *mut f32 {
        let of_gates = self.tokens.len() * recurrence.sizes.values();
        self.low.wrapping_add(number * of_gates)
    }

    /// Returns the inputs of one of the low-rank projections, see [`Self::low_result`].
    #[inline(always)]
    pub(super) fn low_rows(&self, recurrence: &Recurrence, number: usize) -> Rows<E> {
        let count = self.tokens.len();
        let first = self.low_ranks.wrapping_add(number * count * recurrence.sizes.low_rank);
        Rows { first: first.cast_const(), count }
    }

    /// Converts the low-rank values of all tokens to the element type of the projections that read
    /// them. Returns after a barrier.
    ///
    /// # Safety
    /// The conditions of [`Step::compute`] must hold, and the mixer's input projection must be
    /// done.
    #[inline(always)]
    pub(super) unsafe fn narrow_low<K: Kernel<E>>(
        &self,
        (recurrence, stride): (&Recurrence, usize),
        member: &Member<'_>,
    ) {
        let rank = recurrence.sizes.low_rank;
        for pair in member.share(2 * self.tokens.len()) {
            let (token, number) = (pair / 2, pair % 2);
            // SAFETY: the rows belong to this member.
            unsafe {
                let from = self.qkv.add(token * stride + recurrence.sizes.gates() + number * rank);
                let from = std::slice::from_raw_parts(from.cast_const(), rank);
                let to = self.low_rows(recurrence, number).first.cast_mut().add(token * rank);
                math::narrow::<E, K>(from, std::slice::from_raw_parts_mut(to, rank));
            }
        }
        member.meet();
    }

    /// Gates and normalises the recurrence's outputs of the stream's tokens, as inputs of the
    /// output projection. Returns after a barrier.
    ///
    /// # Safety
    /// The conditions of [`Self::recur`] must hold, and that function must have been called.
    #[inline(always)]
    pub(super) unsafe fn gate_states<K: Kernel<E>>(
        &self,
        (recurrence, stride): (&Recurrence, usize),
        member: &Member<'_>,
        stream: Stream,
    ) {
        let sizes = &recurrence.sizes;
        let (count, eps) = (sizes.values(), self.eps);
        for row in member.share(stream.count) {
            let token = self.token_of(stream, row);
            // SAFETY: the row of the attention output belongs to this member. No other member reads
            // the token's outputs and gates.
            unsafe {
                let values = self.mixed.add(token * sizes.channels() + 2 * sizes.keys());
                let gates = match &recurrence.low {
                    Some(_) => self.low_result(recurrence, 0).add(token * count),
                    None => self.qkv.add(token * stride + sizes.gates()),
                };
                let values = std::slice::from_raw_parts_mut(values, count);
                let gates = std::slice::from_raw_parts_mut(gates, count);
                K::Vector::compute(Gating { recurrence, values, gates, eps });
                let to = std::slice::from_raw_parts_mut(self.attended.add(row * count), count);
                math::narrow::<E, K>(values, to);
            }
        }
        member.meet();
    }

    /// Multiplies the attention output of the stream's tokens by the sigmoids of their gates, which
    /// follow queries, keys and values in the projection. Returns after a barrier.
    ///
    /// # Safety
    /// The conditions of [`Step::compute`] must hold, and the attention must be done.
    #[inline(always)]
    pub(super) unsafe fn gate_attended<K: Kernel<E>>(
        &self,
        (queries, stride): (usize, usize),
        member: &Member<'_>,
        stream: Stream,
    ) {
        for row in member.share(stream.count) {
            let token = self.token_of(stream, row);
            // SAFETY: the row of the attention output, and the token's gates, belong to this
            // member.
            unsafe {
                let gates = self.qkv.add(token * stride + stride - queries);
                let gates = std::slice::from_raw_parts_mut(gates, queries);
                K::Vector::compute(Sigmoids(gates));
                let to = std::slice::from_raw_parts_mut(self.attended.add(row * queries), queries);
                for (gate, attended) in gates.iter_mut().zip(&*to) {
                    *gate *= attended.to_f32();
                }
                math::narrow::<E, K>(gates, to);
            }
        }
        member.meet();
    }

    /// Returns the index of the token of a row of `stream`, which contains either all tokens or
    /// only the sampled ones.
    #[inline(always)]
    pub(super) fn token_of(&self, stream: Stream, row: usize) -> usize {
        if stream.count < self.tokens.len() { self.sampled[row] } else { row }
    }
}
