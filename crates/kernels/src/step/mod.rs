//! One step of a decoder, computed by all members of a team together.

mod adapted;
mod attend;
mod experts;
mod inputs;
mod latent;
mod mixers;
mod recur;
mod vectors;

use std::ops::Range;

use crate::adapters::{Adapted, Product};
use crate::attention::{self, Scratch};
use crate::codes::{CodesRoom, encode};
use crate::dispatch::Work;
use crate::dots::Dots;
use crate::element::Element;
use crate::experts::{Beside, Buffers};
use crate::layer::{FeedKind, FeedPart, Layer, MixerPart};
use crate::math;
use crate::matmul::{
    Best, GateKind, LogitScales, Matrix, Out, Rows, arrange, multiply, multiply_codes,
};
use crate::pages::Shape;
use crate::recurrence::StateRow;
use crate::rows_of_layers::RowsOfLayers;
use crate::step::adapted::Results;
use crate::step::mixers::First;
use crate::team::{FEW, Member, Queue};
use crate::tile::Kernel;

/// The number of queues per layer. First: four projections, the attention, two products of experts,
/// and two projections of the per-layer input. Then: two projections and the states of the
/// recurrence beside attention, two projections around experts with latent states, and two low-rank
/// projections. Latent attention has one for the projection of queries, and two for per-head
/// products.
pub(crate) const QUEUES_A_LAYER: usize = 19;
/// The index of the first queue for low-rank projections.
const LOW_QUEUES: usize = 14;
/// The index of the queue for latent attention's queries. The two queues of its per-head products
/// follow.
const LATENT_QUEUES: usize = 16;
/// The number of queues outside of layers: one for the head, and one for the projection to
/// per-layer inputs.
pub(crate) const OTHER_QUEUES: usize = 2;

#[derive(Clone, Copy)]
pub(crate) struct Token<E> {
    /// The token's id in the vocabulary; 0 if the input is not from the embedding.
    pub(crate) id: usize,
    /// The token's row of the embedding, or the input that the caller gave in place of that row.
    pub(crate) input: *const E,
    /// True if the input was given by the caller in place of an embedding row.
    pub(crate) is_given: bool,
    pub(crate) position: usize,
    /// The entries of the token's keys and values: in the main part of pages, and in the window
    /// part.
    pub(crate) entries: [usize; 2],
}

/// A kind of attention in a step.
pub(crate) struct Attends<'a> {
    pub(crate) shape: Shape,
    /// The part of pages: 0 is the main part, 1 the window part.
    pub(crate) part: usize,
    /// True if a norm of queries or keys spans all heads of a position.
    pub(crate) norm_rows: bool,
    /// True if the outputs of the first projection also include gates for the attention's output.
    /// The gates follow the values.
    pub(crate) gate: bool,
    /// True if keys and values have the same projection.
    pub(crate) keys_are_values: bool,
    /// True if each head of values is normalised, without weights.
    pub(crate) value_norm: bool,
    /// The factor on queries at each position; empty if queries have no factor.
    pub(crate) query_scales: &'a [f32],
    /// The number of pairs of a head's elements that are rotated.
    pub(crate) half: usize,
    /// The cosines and sines of the angles at each position; empty if nothing is rotated.
    pub(crate) cos: &'a [f32],
    pub(crate) sin: &'a [f32],
    pub(crate) units: attention::Shared<'a>,
    /// The units of the last layer, which computes only the sampled tokens.
    pub(crate) last_units: attention::Shared<'a>,
}

/// The factors of states.
#[derive(Clone, Copy)]
pub(crate) struct Scales {
    /// The factor of the embedding's rows.
    pub(crate) embeddings: f32,
    /// The factor of inputs that the caller provides in place of embeddings.
    pub(crate) inputs: f32,
    /// The factor of the output of attention or of a feed-forward network before it is added.
    pub(crate) residuals: f32,
}

/// A step, shared by all members of the team. Between two barriers, each member writes only its own
/// part of the buffers.
pub(crate) struct Step<'a, E> {
    pub(crate) x: *mut f32,
    pub(crate) sampled_x: *mut f32,
    pub(crate) normed: *mut E,
    pub(crate) qkv: *mut f32,
    pub(crate) attended: *mut E,
    /// The outputs of a convolution, and then those of a recurrence.
    pub(crate) mixed: *mut f32,
    /// The low-rank inputs of the projections to gates `[tokens, low_rank]`, followed by those of
    /// the projections to decays.
    pub(crate) low_ranks: *mut E,
    /// The outputs of these low-rank projections.
    pub(crate) low: *mut f32,
    pub(crate) gated: *mut E,
    /// The output of a component that is followed by a norm.
    pub(crate) part: *mut f32,
    /// The per-layer inputs `[tokens, layers, size]`.
    pub(crate) inputs: *mut f32,
    pub(crate) experts: Buffers<E>,
    pub(crate) latent: crate::latent::Buffers<E>,
    pub(crate) best: *mut Best,
    pub(crate) scratch: *mut Scratch<E>,
    /// Activations in the tiles' order, in the kernel's number type.
    pub(crate) arranged: *mut f32,
    pub(crate) codes: CodesRoom,
    pub(crate) logits: *mut f32,
    /// Where the states of the sampled tokens are written, if they are wanted in place of logits;
    /// otherwise null.
    pub(crate) states: *mut f32,
    /// Where these states are written after the final norm, if they are wanted; otherwise null.
    pub(crate) vectors: *mut f32,
    pub(crate) tokens: &'a [Token<E>],
    /// The rows whose states advance; empty without recurrent layers.
    pub(crate) state_rows: &'a [StateRow],
    pub(crate) attentions: Vec<Attends<'a>>,
    pub(crate) queues: &'a [Queue],
    /// The sampled tokens, in ascending order.
    pub(crate) sampled: &'a [usize],
    /// If not 0, the step only applies the head to this many rows of `x`, and computes no layers.
    pub(crate) given: usize,
    /// True if every row has one token, which is sampled.
    pub(crate) decodes: bool,
    pub(crate) hidden: usize,
    pub(crate) eps: f32,
    pub(crate) activation: GateKind,
    /// True if feed-forward networks have gates, which multiply the up projection.
    pub(crate) has_gates: bool,
    pub(crate) scales: Scales,
    pub(crate) logit_scales: LogitScales,
    pub(crate) mean_norms: bool,
    pub(crate) final_norm: &'a [f32],
    /// The norm of embeddings; empty if there is none.
    pub(crate) embedding_norm: &'a [f32],
    /// `None` if the step returns vectors or states.
    pub(crate) head: Option<Matrix<'a, E>>,
    pub(crate) layers: &'a [Layer<E>],
    /// Computes the per-layer inputs; `None` if the model has none.
    pub(crate) rows_of_layers: Option<&'a RowsOfLayers>,
    /// The adapters of the step; `None` if there are none.
    pub(crate) adapted: Option<Adapted<'a, E>>,
}

// SAFETY: one member at a time writes the memory that the pointers refer to, see `compute`.
unsafe impl<E> Sync for Step<'_, E> {}

/// The residual stream `[count, hidden]`.
#[derive(Clone, Copy)]
pub(crate) struct Stream {
    pub(crate) x: *mut f32,
    pub(crate) count: usize,
}

/// The operations after the last projection of a component.
#[derive(Clone, Copy)]
struct Behind<'a> {
    /// The norm of the output; empty if there is none.
    norm: &'a [f32],
    /// The experts whose sum is added to the output of the dense network beside them, before the
    /// norm.
    beside: Option<&'a Beside>,
    /// The factor of the residual stream after the output is added.
    factor: f32,
}

impl<'a> Behind<'a> {
    /// Creates operations with only this norm, or with none if `norm` is empty.
    fn norm(norm: &'a [f32]) -> Self {
        Self { norm, beside: None, factor: 1.0 }
    }
}

/// A step, and a member that computes its share of the step.
impl<E: Element> Work<E> for (&Step<'_, E>, &Member<'_>) {
    #[inline(always)]
    unsafe fn compute<K: Kernel<E>, D: Dots>(self) {
        // SAFETY: the caller upholds the contract.
        unsafe { self.0.compute::<K, D>(self.1) }
    }
}

impl<E: Element> Step<'_, E> {
    /// Computes one member's share of the step.
    ///
    /// # Safety
    /// Each member of the team must call it exactly once, and the processor must support `K` and
    /// `D`.
    #[inline(always)]
    unsafe fn compute<K: Kernel<E>, D: Dots>(&self, member: &Member<'_>) {
        // SAFETY: between barriers, members write only their share, or work that they took from a
        // queue.
        unsafe {
            let stream = match self.given {
                0 => self.layers::<K, D>(member),
                count => Stream { x: self.x, count },
            };
            if !self.states.is_null() {
                for row in member.share(stream.count) {
                    let to = self.states.add(row * self.hidden);
                    std::ptr::copy_nonoverlapping(self.row(stream, row).as_ptr(), to, self.hidden);
                }
                return;
            }
            if !self.vectors.is_null() {
                self.give_vectors::<K>(member, stream);
                return;
            }
            let Some(head) = &self.head else { return };
            let last = self.normalise::<K>(member, stream, self.final_norm);
            let queue = &self.queues[self.layers.len() * QUEUES_A_LAYER];
            let out = if self.logits.is_null() {
                Out::Best(self.best.add(member.index * self.sampled.len()))
            } else if self.logit_scales.is_none() {
                Out::Store(self.logits)
            } else {
                Out::Logits(self.logits, self.logit_scales)
            };
            self.multiply::<K, D>((queue, member), last, head, out);
            member.meet();
        }
    }

    /// Computes one member's share of the layers. Returns the residual stream of the sampled
    /// tokens.
    #[inline(always)]
    unsafe fn layers<K: Kernel<E>, D: Dots>(&self, member: &Member<'_>) -> Stream {
        let count = self.tokens.len();
        let mut stream = Stream { x: self.x, count };
        // SAFETY: as for `compute`.
        unsafe {
            self.embed::<K>(member, stream);
            for (index, layer) in self.layers.iter().enumerate() {
                let queues = &self.queues[index * QUEUES_A_LAYER..][..QUEUES_A_LAYER];
                let is_last = index + 1 == self.layers.len();
                let mut normed = Rows { first: self.normed.cast_const(), count };
                // Before the first layer, the per-layer inputs are computed. A loop is used so that
                // the products are compiled only once. A closure would be compiled without the
                // target features of this code.
                let of_layers = self.rows_of_layers.filter(|_| index == 0).map(First::OfLayers);
                let [own, beside] = layer.mixers().map(First::of_part);
                let all = [[of_layers, None, None], own, beside];
                for first in all.into_iter().flatten().flatten() {
                    let (before, matrix, to, queue) = match first {
                        First::OfLayers(of) => {
                            let queue = &self.queues[self.queues.len() - 1];
                            (Some(&[][..]), of.projection.matrix(), self.inputs, queue)
                        }
                        First::Mixer(part) => {
                            (part.before, part.input.matrix(), self.qkv, &queues[part.queues[0]])
                        }
                        First::Low { recurrence, matrix, number, .. } => {
                            let to = self.low_result(recurrence, number);
                            (None, matrix.matrix(), to, &queues[LOW_QUEUES + number])
                        }
                        First::Queries { matrix, .. } => {
                            (None, matrix.matrix(), self.latent.queries, &queues[LATENT_QUEUES])
                        }
                    };
                    if let Some(norm) = before {
                        normed = self.normalise::<K>(member, stream, norm);
                    }
                    let rows = match first {
                        First::Low { recurrence, number, .. } => self.low_rows(recurrence, number),
                        First::Queries { part, norm, .. } => {
                            self.normalise_low::<K>((norm, part.input.outputs), member)
                        }
                        _ => normed,
                    };
                    self.multiply::<K, D>((queue, member), rows, &matrix, Out::Store(to));
                    let part = match first {
                        First::OfLayers(of) => {
                            member.meet();
                            self.finish_inputs::<K::Vector>(of, stream, member);
                            continue;
                        }
                        First::Mixer(MixerPart { recurrence: Some(recurrence), input, .. })
                            if recurrence.low.is_some() =>
                        {
                            member.meet();
                            self.narrow_low::<K>((recurrence, input.outputs), member);
                            continue;
                        }
                        First::Mixer(MixerPart { latent: Some(latent), .. })
                            if latent.query.is_some() =>
                        {
                            member.meet();
                            continue;
                        }
                        First::Low { number: 0, .. } => {
                            member.meet();
                            continue;
                        }
                        First::Mixer(part)
                        | First::Low { part, .. }
                        | First::Queries { part, .. } => part,
                    };
                    let to = Results { first: self.qkv, stride: part.input.outputs, scale: 1.0 };
                    self.adapt::<K>((index, Product::Qkv), normed, to, member);
                    member.meet();
                    self.keep_positions::<K>((layer, part), (queues, member));
                    if is_last && self.sampled.len() < stream.count {
                        stream = self.sampled_rows(member, stream);
                    }
                    self.mix_positions::<K>((layer, part), stream, (queues, member));
                    if layer.parallel {
                        // Normalises again, since the stream may now have only the sampled tokens.
                        normed = self.normalise::<K>(member, stream, &layer.input_norm);
                        member.meet();
                    }
                    let attended = Rows { first: self.attended.cast_const(), count: stream.count };
                    let output = (&part.output.matrix(), Behind::norm(part.norm));
                    let at = Some((index, Product::Output));
                    let queue = &queues[part.queues[1]];
                    self.add_part::<K, D>((queue, member), (at, attended), output, stream);
                }
                if is_last && self.sampled.len() < stream.count {
                    // The layer has no mixer of positions.
                    stream = self.sampled_rows(member, stream);
                    member.meet();
                }
                for part in layer.feeds().into_iter().flatten() {
                    if let Some(norm) = part.before {
                        normed = self.normalise::<K>(member, stream, norm);
                    }
                    let at = (index, layer, part);
                    self.feed_part::<K, D>(at, (stream, normed), (queues, member));
                }
            }
        }
        stream
    }

    /// Copies the rows of the sampled tokens, since the results of the other tokens are not needed.
    /// Returns the stream of these rows, which members may read only after a barrier.
    #[inline(always)]
    unsafe fn sampled_rows(&self, member: &Member<'_>, stream: Stream) -> Stream {
        let sampled = Stream { x: self.sampled_x, count: self.sampled.len() };
        for row in member.share(sampled.count) {
            // SAFETY: as for `compute`; the written rows belong to this member.
            unsafe {
                let from = self.row(stream, self.sampled[row]);
                self.row(sampled, row).copy_from_slice(from);
            }
        }
        sampled
    }

    /// Computes a component's output for the input `normed`, and adds it to the residual stream.
    /// Returns after a barrier.
    #[inline(always)]
    unsafe fn feed_part<K: Kernel<E>, D: Dots>(
        &self,
        (index, layer, part): (usize, &Layer<E>, FeedPart<'_>),
        (stream, normed): (Stream, Rows<E>),
        (queues, member): (&[Queue], &Member<'_>),
    ) {
        let FeedPart { kind, products, norm, factor, .. } = part;
        let is_dense = matches!(kind, FeedKind::Dense);
        let before = if is_dense { self.adapted_gates(index, normed) } else { None };
        let (mut gated, mut beside) = (self.gated, None);
        // SAFETY: as for `compute`. No member reads queries, keys and values any more.
        unsafe {
            if let Some([first, _]) = products {
                let out = match kind {
                    FeedKind::Experts(_) => Out::Activate(self.experts.latents, None),
                    FeedKind::Dense => self.gates_to(before),
                    FeedKind::Input => Out::Store(self.qkv),
                };
                let queue = &queues[part.queues[0]];
                self.multiply::<K, D>((queue, member), normed, &first.matrix(), out);
                if let Some(to) = before {
                    let to = Results { first: to, stride: first.outputs, scale: 1.0 };
                    self.adapt::<K>((index, Product::GateUp), normed, to, member);
                }
                member.meet();
            }
            match kind {
                FeedKind::Experts(mixture) => {
                    let queues = (&queues[5..7], member);
                    self.experts::<K, D>(mixture, (stream, normed), queues);
                    gated = self.experts.latents;
                }
                FeedKind::Dense => {
                    let inner = products.map_or(0, |[_, second]| second.inputs);
                    if let Some(first) = before {
                        self.finish_gates::<K>(first, (stream.count, inner), member);
                        member.meet();
                    }
                    if let Some(mixture) = &layer.mixture {
                        self.gate_shared::<K::Vector>(mixture, (normed, inner), member);
                        beside = mixture.beside.as_ref();
                    }
                }
                FeedKind::Input => {
                    let size = products.map_or(0, |[first, _]| first.outputs);
                    self.gate_input::<K>((index, size), stream, member);
                }
            }
            let Some([_, second]) = products else { return };
            let gated = Rows { first: gated.cast_const(), count: stream.count };
            let output = (&second.matrix(), Behind { norm, beside, factor });
            let at = is_dense.then_some((index, Product::Down));
            let queue = &queues[part.queues[1]];
            self.add_part::<K, D>((queue, member), (at, gated), output, stream);
        }
    }

    /// Adds the result of a component's last projection to the residual stream, normalised and
    /// scaled as [`Behind`] states. `at`: the product, if adapters may change it; otherwise `None`.
    /// Returns after a barrier.
    #[inline(always)]
    unsafe fn add_part<K: Kernel<E>, D: Dots>(
        &self,
        (queue, member): (&Queue, &Member<'_>),
        (at, rows): (Option<(usize, Product)>, Rows<E>),
        (matrix, Behind { norm, beside, factor }): (&Matrix<'_, E>, Behind<'_>),
        stream: Stream,
    ) {
        let behind = !norm.is_empty();
        // SAFETY: as for `compute`.
        unsafe {
            let scale = self.scales.residuals;
            let (out, first, scale) = match behind {
                true => (Out::Store(self.part), self.part, 1.0),
                false => (Out::Add(stream.x, scale), stream.x, scale),
            };
            self.multiply::<K, D>((queue, member), rows, matrix, out);
            let to = Results { first, stride: matrix.outputs, scale };
            if let Some(at) = at {
                self.adapt::<K>(at, rows, to, member);
            }
            member.meet();
            if behind || factor != 1.0 {
                for row in member.share(stream.count) {
                    let to = self.row(stream, row);
                    if behind {
                        let from = self.part.add(row * self.hidden);
                        let from = std::slice::from_raw_parts_mut(from, self.hidden);
                        if let Some(beside) = beside {
                            self.join::<K::Vector>(beside, row, from);
                        }
                        let scales = (self.eps, self.scales.residuals);
                        math::add_rms_norm::<K::Vector>(to, from, norm, scales);
                    }
                    if factor != 1.0 {
                        to.iter_mut().for_each(|x| *x *= factor);
                    }
                }
                member.meet();
            }
        }
    }

    /// Fills the residual stream with the tokens' inputs.
    #[inline(always)]
    unsafe fn embed<K: Kernel<E>>(&self, member: &Member<'_>, stream: Stream) {
        for token in member.share(stream.count) {
            // SAFETY: `input` is a whole row, and the row of `x` belongs to this member.
            unsafe {
                let Token { input, is_given, .. } = self.tokens[token];
                let from = std::slice::from_raw_parts(input, self.hidden);
                let scale = if is_given { self.scales.inputs } else { self.scales.embeddings };
                let row = self.row(stream, token);
                for (to, from) in row.iter_mut().zip(from) {
                    *to = from.to_f32() * scale;
                }
                if !self.embedding_norm.is_empty() && !is_given {
                    let (norm, eps) = (self.embedding_norm, self.eps);
                    math::normalise::<K::Vector>(row, norm, eps, self.mean_norms);
                }
            }
        }
        member.meet();
    }

    /// # Safety
    /// No other member may write this row at the same time, or read it while this member writes it.
    #[inline(always)]
    #[expect(
        clippy::mut_from_ref,
        reason = "members share the buffer and each writes its own rows"
    )]
    unsafe fn row(&self, stream: Stream, row: usize) -> &mut [f32] {
        // SAFETY: the row is inside the stream; the caller upholds the contract.
        unsafe { std::slice::from_raw_parts_mut(stream.x.add(row * self.hidden), self.hidden) }
    }

    /// Normalises the residual stream. For few rows, each member computes its own copy. For more,
    /// each member computes the rows that [`Self::multiply`] assigns to it.
    #[inline(always)]
    unsafe fn normalise<K: Kernel<E>>(
        &self,
        member: &Member<'_>,
        stream: Stream,
        weight: &[f32],
    ) -> Rows<E> {
        let own = if stream.count <= FEW { member.index * FEW * self.hidden } else { 0 };
        // SAFETY: the normalised rows are this member's copy or share; no member writes the stream
        // at the same time.
        unsafe {
            let rows = Rows { first: self.normed.add(own).cast_const(), count: stream.count };
            for row in rows.of_tiles::<K>(self.tiles::<K>(member, rows)) {
                let from = std::slice::from_raw_parts(stream.x.add(row * self.hidden), self.hidden);
                let to = self.normed.add(own + row * self.hidden);
                let to = std::slice::from_raw_parts_mut(to, self.hidden);
                if weight.is_empty() {
                    math::narrow::<E, K>(from, to);
                } else if self.mean_norms {
                    math::mean_norm::<E, K>(from, weight, self.eps, to);
                } else {
                    math::rms_norm::<E, K>(from, weight, self.eps, to);
                }
            }
            rows
        }
    }

    /// The range of tiles that a member prepares. For few rows it prepares all of them for itself;
    /// otherwise it prepares its share for all members.
    #[inline(always)]
    fn tiles<K: Kernel<E>>(&self, member: &Member<'_>, rows: Rows<E>) -> Range<usize> {
        let tiles = rows.tiles::<K>();
        if rows.count <= FEW { 0..tiles } else { member.share(tiles) }
    }

    /// Computes a product with a matrix in any format. First the rows are prepared: as codes if the
    /// matrix is quantised, otherwise in the tiles' order. If there are few rows, every member
    /// prepares all of them for itself. Otherwise members share the work and then pass a barrier.
    #[inline(always)]
    unsafe fn multiply<K: Kernel<E>, D: Dots>(
        &self,
        (queue, member): (&Queue, &Member<'_>),
        rows: Rows<E>,
        matrix: &Matrix<'_, E>,
        out: Out<E>,
    ) {
        let queue = (queue, member.members);
        let inputs = matrix.inputs;
        let few = rows.count <= FEW;
        let own = if few { member.index * FEW } else { 0 };
        let tiles = self.tiles::<K>(member, rows);
        // SAFETY: no member writes the rows at the same time. The prepared rows are this member's
        // copy, or its share. All readers of an earlier product's rows have passed a barrier.
        unsafe {
            let Some(format) = matrix.format else {
                let numbers = self.arranged.cast::<K::Number>().add(own * inputs);
                let rows = arrange::<E, K>(rows, inputs, tiles, numbers);
                if !few {
                    member.meet();
                }
                multiply::<E, K>(queue, rows, matrix, out);
                return;
            };
            let shared = format.shared(inputs);
            let room = self.codes.from(own, inputs, shared);
            for row in rows.of_tiles::<K>(tiles) {
                let from = rows.first.add(row * inputs);
                encode::<E, K::Vector>(from, inputs, shared, room.from(row, inputs, shared));
            }
            if !few {
                member.meet();
            }
            let codes = room.filled(rows.count);
            multiply_codes::<E, K, D>(queue, codes, (matrix, format), out);
        }
    }
}
