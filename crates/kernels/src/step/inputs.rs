//! Computes per-layer inputs, which layers get beside the residual stream (Gemma 3n, 2025; Gemma 4,
//! 2026).

use super::{Step, Stream};
use crate::element::Element;
use crate::matmul::gate;
use crate::rows_of_layers::RowsOfLayers;
use crate::team::Member;
use crate::tile::{HALF, Kernel};
use crate::vector::Vector;

impl<E: Element> Step<'_, E> {
    /// Computes the per-layer inputs of all tokens, in place of the projections in the same buffer.
    /// Returns after a barrier.
    ///
    /// # Safety
    /// The conditions of [`Step::compute`] must hold, and the projections must be done.
    #[inline(always)]
    pub(super) unsafe fn finish_inputs<V: Vector>(
        &self,
        of: &RowsOfLayers,
        stream: Stream,
        member: &Member<'_>,
    ) {
        let width = self.layers.len() * of.size;
        for token in member.share(stream.count) {
            // SAFETY: the per-layer inputs of this token belong to this member.
            let inputs =
                unsafe { std::slice::from_raw_parts_mut(self.inputs.add(token * width), width) };
            of.finish::<E, V>(self.tokens[token].id, self.eps, inputs);
        }
        member.meet();
    }

    /// Multiplies the per-layer inputs `[rows, size]` of a layer by the activated gates, which are
    /// in the buffer of the queries. Returns after a barrier.
    ///
    /// # Safety
    /// The conditions of [`Step::compute`] must hold, and the gates must be done.
    #[inline(always)]
    pub(super) unsafe fn gate_input<K: Kernel<E>>(
        &self,
        (layer, size): (usize, usize),
        stream: Stream,
        member: &Member<'_>,
    ) {
        for row in member.share(stream.count) {
            let token = self.token_of(stream, row);
            // SAFETY: the rows belong to this member. Vector loads may read padding after the rows,
            // but those lanes are not used.
            unsafe {
                let gates = self.qkv.add(row * size);
                let inputs = self.inputs.add((token * self.layers.len() + layer) * size);
                for at in (0..size).step_by(HALF) {
                    let both = (K::Vector::load(gates.add(at)), K::Vector::load(inputs.add(at)));
                    gate::<E, K>(both, self.activation, self.gated.add(row * size + at), size - at);
                }
            }
        }
        member.meet();
    }
}
