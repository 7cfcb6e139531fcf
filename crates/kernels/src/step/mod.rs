//! One step of a decoder, as the members of a team compute it together.

mod adapted;
mod experts;
mod recur;
mod vectors;

use std::ops::Range;
use std::time::Instant;

use crate::adapters::{Adapted, Product};
use crate::attention::{self, Scratch, Unit};
use crate::codes::{CodesRoom, encode};
use crate::dispatch::Work;
use crate::dots::Dots;
use crate::element::Element;
use crate::experts::{Buffers, RoutingSpec};
use crate::layer::Layer;
use crate::math;
use crate::matmul::{
    Activation, Best, LogitScales, Matrix, Out, Rows, arrange, multiply, multiply_codes,
};
use crate::pages::{HeadNorm, Shape, turn};
use crate::recurrence::StateRow;
use crate::step::adapted::Results;
use crate::team::{FEW, Member, Queue};
use crate::tile::Kernel;
use crate::vector::Vector;

/// Pieces of work a layer takes from queues: four products, the attention, and two products of
/// experts.
pub(crate) const QUEUES_A_LAYER: usize = 7;

/// The part of a step that time is spent on.
#[derive(Clone, Copy)]
pub(crate) enum Part {
    /// Inputs and normalisation.
    Norm,
    Qkv,
    /// Keys and values to their pages, where attention does not do that.
    Keep,
    Attend,
    Output,
    GateUp,
    Down,
    Head,
}

/// Adds up the times of parts, by the first member's clock.
pub(crate) struct Watch {
    times: *mut u64,
    since: Option<Instant>,
}

impl Watch {
    /// # Safety
    /// `times` is null or has one place for each [`Part`], and is this member's while it watches.
    unsafe fn new(times: *mut u64, member: &Member<'_>) -> Self {
        let since = (!times.is_null() && member.index == 0).then(Instant::now);
        Self { times, since }
    }

    #[inline(always)]
    pub(crate) fn lap(&mut self, part: Part) {
        if let Some(since) = self.since {
            let now = Instant::now();
            // SAFETY: see `new`.
            unsafe { *self.times.add(part as usize) += (now - since).as_nanos() as u64 };
            self.since = Some(now);
        }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Token<E> {
    /// The token's row of the embedding, or the input that was given in place of it.
    pub(crate) input: *const E,
    /// True if the input is not of the embedding.
    pub(crate) is_given: bool,
    pub(crate) position: usize,
    /// The place of its keys and values.
    pub(crate) entry: usize,
}

/// A kind of attention in a step.
pub(crate) struct Attends<'a> {
    pub(crate) shape: Shape,
    /// True if norms of queries and of keys are over all heads of a position.
    pub(crate) norm_rows: bool,
    /// True if gates of the output lie behind the values.
    pub(crate) gate: bool,
    /// The number of pairs of a head's elements that are rotated.
    pub(crate) half: usize,
    pub(crate) cos: *const f32,
    pub(crate) sin: *const f32,
    pub(crate) units: attention::Shared<'a>,
    /// The units of the last layer, where only some tokens count.
    pub(crate) last_units: attention::Shared<'a>,
}

/// Factors of states.
#[derive(Clone, Copy)]
pub(crate) struct Scales {
    /// The factor of the embedding's rows.
    pub(crate) embeddings: f32,
    /// The factor of inputs that the caller gives in place of them.
    pub(crate) inputs: f32,
    /// The factor of a part's output before it is added.
    pub(crate) residuals: f32,
}

/// A step for its members. They share its buffers, and each writes its own part between two
/// meetings.
pub(crate) struct Step<'a, E> {
    pub(crate) x: *mut f32,
    pub(crate) sampled_x: *mut f32,
    pub(crate) normed: *mut E,
    pub(crate) qkv: *mut f32,
    pub(crate) attended: *mut E,
    /// What a convolution gives, and then the outputs of a recurrence.
    pub(crate) mixed: *mut f32,
    pub(crate) gated: *mut E,
    /// The output of a part with a norm behind it.
    pub(crate) part: *mut f32,
    pub(crate) experts: Buffers<E>,
    pub(crate) routing: RoutingSpec,
    pub(crate) best: *mut Best,
    pub(crate) scratch: *mut Scratch<E>,
    /// Room for numbers of any kind.
    pub(crate) arranged: *mut f32,
    pub(crate) codes: CodesRoom,
    pub(crate) logits: *mut f32,
    /// The memory for the stream of the tokens that sample, in place of the head; null: there is
    /// none.
    pub(crate) states: *mut f32,
    /// The memory for the same stream after its norm; null: there is none.
    pub(crate) vectors: *mut f32,
    pub(crate) times: *mut u64,
    pub(crate) tokens: &'a [Token<E>],
    /// The rows whose states advance; none without recurrent layers.
    pub(crate) state_rows: &'a [StateRow],
    pub(crate) attentions: Vec<Attends<'a>>,
    pub(crate) queues: &'a [Queue],
    /// The tokens that sample, ascending.
    pub(crate) sampled: &'a [usize],
    /// Rows of `x` for the head; 0: the stream of a step comes first.
    pub(crate) given: usize,
    /// True if every token is a row of its own, and samples.
    pub(crate) decodes: bool,
    pub(crate) hidden: usize,
    pub(crate) eps: f32,
    pub(crate) activation: Activation,
    pub(crate) scales: Scales,
    pub(crate) logit_scales: LogitScales,
    pub(crate) mean_norms: bool,
    /// Factors of queries at each position; null: there are none.
    pub(crate) query_scales: *const f32,
    pub(crate) final_norm: &'a [f32],
    pub(crate) head: Matrix<'a, E>,
    pub(crate) layers: &'a [Layer<E>],
    /// The adapters of the step; `None`: the decoder's own matrices are all.
    pub(crate) adapted: Option<Adapted<'a, E>>,
}

impl Attends<'_> {
    /// The angles' cosines and sines at a position.
    #[inline(always)]
    unsafe fn angles(&self, position: usize) -> (&[f32], &[f32]) {
        if self.half == 0 {
            return (&[], &[]);
        }
        // SAFETY: positions are those of the tables.
        unsafe {
            (
                std::slice::from_raw_parts(self.cos.add(position * self.half), self.half),
                std::slice::from_raw_parts(self.sin.add(position * self.half), self.half),
            )
        }
    }
}

// SAFETY: what the pointers reach is written by one member at a time, see `compute`.
unsafe impl<E> Sync for Step<'_, E> {}

/// The residual stream `[count, hidden]`.
#[derive(Clone, Copy)]
pub(crate) struct Stream {
    pub(crate) x: *mut f32,
    pub(crate) count: usize,
}

/// A step and the members that take shares of it.
impl<E: Element> Work<E> for (&Step<'_, E>, &Member<'_>) {
    #[inline(always)]
    unsafe fn compute<K: Kernel<E>, D: Dots>(self) {
        // SAFETY: the contract.
        unsafe { self.0.compute::<K, D>(self.1) }
    }
}

impl<E: Element> Step<'_, E> {
    /// One member's share of the step.
    ///
    /// # Safety
    /// Called once by each member of the team; the processor can run `K` and `D`.
    #[inline(always)]
    unsafe fn compute<K: Kernel<E>, D: Dots>(&self, member: &Member<'_>) {
        // SAFETY: between meetings, members write only what is theirs by share or by queue.
        unsafe {
            let mut watch = Watch::new(self.times, member);
            let stream = match self.given {
                0 => self.layers::<K, D>(member, &mut watch),
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
            let last = self.normalise::<K>(member, stream, self.final_norm);
            watch.lap(Part::Norm);
            let queue = &self.queues[self.layers.len() * QUEUES_A_LAYER];
            let out = if self.logits.is_null() {
                Out::Best(self.best.add(member.index * self.sampled.len()))
            } else if self.logit_scales.is_none() {
                Out::Store(self.logits)
            } else {
                Out::Logits(self.logits, self.logit_scales)
            };
            self.multiply::<K, D>((queue, member), last, &self.head, out);
            member.meet();
            watch.lap(Part::Head);
        }
    }

    /// One member's share of the layers; gives the stream of the tokens that sample.
    #[inline(always)]
    unsafe fn layers<K: Kernel<E>, D: Dots>(
        &self,
        member: &Member<'_>,
        watch: &mut Watch,
    ) -> Stream {
        let count = self.tokens.len();
        let mut stream = Stream { x: self.x, count };
        // SAFETY: as for `compute`.
        unsafe {
            self.embed(member, stream);
            for (index, layer) in self.layers.iter().enumerate() {
                let queues = &self.queues[index * QUEUES_A_LAYER..][..QUEUES_A_LAYER];
                let attends = &self.attentions[layer.attention];
                // No closure for what is done four times: it would not be compiled for the
                // processor.
                let queue = |index: usize| (&queues[index], member);
                let normed = self.normalise::<K>(member, stream, &layer.input_norm);
                watch.lap(Part::Norm);
                let qkv = Out::Store(self.qkv);
                self.multiply::<K, D>(queue(0), normed, &layer.qkv.matrix(), qkv);
                let stride = layer.qkv.outputs;
                let to = Results { first: self.qkv, stride, scale: 1.0 };
                self.adapt::<K>((index, Product::Qkv), normed, to, member);
                member.meet();
                watch.lap(Part::Qkv);
                let recurrence = layer.recurrence.as_ref().map(|it| (it, layer.qkv.outputs));
                if let Some(recurrence) = recurrence {
                    self.recur::<K>(recurrence, (&queues[4], member));
                } else if !self.decodes {
                    let scratch = &mut *self.scratch.add(member.index);
                    for token in member.share(count) {
                        for kv_head in 0..attends.shape.kv_heads {
                            self.keep::<K>((layer, attends), (token, kv_head), scratch);
                        }
                    }
                    member.meet();
                    watch.lap(Part::Keep);
                }
                let mut units = attends.units;
                if index + 1 == self.layers.len() && self.sampled.len() < count {
                    // Nobody will read what comes of the other tokens.
                    let sampled = Stream { x: self.sampled_x, count: self.sampled.len() };
                    for row in member.share(sampled.count) {
                        let from = self.row(stream, self.sampled[row]);
                        self.row(sampled, row).copy_from_slice(from);
                    }
                    stream = sampled;
                    units = attends.last_units;
                }
                if let Some(recurrence) = recurrence {
                    self.gate_states::<K>(recurrence, member, stream);
                } else {
                    self.attend::<K>((layer, attends), units, (&queues[4], member));
                    member.meet();
                    if attends.gate {
                        let queries = attends.shape.heads * attends.shape.head_dim;
                        let widths = (queries, layer.qkv.outputs);
                        self.gate_attended::<K>(widths, member, stream);
                    }
                }
                watch.lap(Part::Attend);
                let mut normed = normed;
                if layer.parallel {
                    // Again, since the stream may have become that of the tokens that sample.
                    normed = self.normalise::<K>(member, stream, &layer.input_norm);
                    member.meet();
                    watch.lap(Part::Norm);
                }
                let attended = Rows { first: self.attended.cast_const(), count: stream.count };
                let output = (&layer.output.matrix(), layer.attended_norm.as_slice());
                let at = (index, Product::Output);
                self.add_part::<K, D>(queue(1), (at, attended), output, stream);
                watch.lap(Part::Output);
                if !layer.parallel {
                    normed = self.normalise::<K>(member, stream, &layer.post_norm);
                    watch.lap(Part::Norm);
                }
                if let Some(mixture) = &layer.mixture {
                    let queues = (&queues[5..], member);
                    self.experts::<K, D>(mixture, (stream, normed), queues, watch);
                }
                let Some([gate_up, down]) = &layer.feed else { continue };
                let before = self.adapted_gates(index, normed);
                let gate = self.gates_to(before);
                self.multiply::<K, D>(queue(2), normed, &gate_up.matrix(), gate);
                if let Some(first) = before {
                    let to = Results { first, stride: gate_up.outputs, scale: 1.0 };
                    self.adapt::<K>((index, Product::GateUp), normed, to, member);
                    member.meet();
                    let sizes = (stream.count, gate_up.outputs / 2);
                    self.finish_gates::<K>(first, sizes, member);
                }
                member.meet();
                if let Some(mixture) = &layer.mixture {
                    self.gate_shared::<K::Vector>(mixture, (normed, gate_up.outputs / 2), member);
                }
                watch.lap(Part::GateUp);
                let gated = Rows { first: self.gated.cast_const(), count: stream.count };
                let down = (&down.matrix(), layer.fed_norm.as_slice());
                let at = (index, Product::Down);
                self.add_part::<K, D>(queue(3), (at, gated), down, stream);
                watch.lap(Part::Down);
            }
        }
        stream
    }

    /// Adds a part's last product to the stream, normalised if there is a `norm`. Whoever comes
    /// back has met the others since they wrote.
    #[inline(always)]
    unsafe fn add_part<K: Kernel<E>, D: Dots>(
        &self,
        (queue, member): (&Queue, &Member<'_>),
        (at, rows): ((usize, Product), Rows<E>),
        (matrix, norm): (&Matrix<'_, E>, &[f32]),
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
            self.adapt::<K>(at, rows, to, member);
            member.meet();
            if behind {
                for row in member.share(stream.count) {
                    let from = self.part.add(row * self.hidden);
                    let from = std::slice::from_raw_parts(from, self.hidden);
                    let to = self.row(stream, row);
                    let scales = (self.eps, self.scales.residuals);
                    math::add_rms_norm::<K::Vector>(to, from, norm, scales);
                }
                member.meet();
            }
        }
    }

    /// Fills the stream with the tokens' inputs.
    #[inline(always)]
    unsafe fn embed(&self, member: &Member<'_>, stream: Stream) {
        for token in member.share(stream.count) {
            // SAFETY: a token's input; this member's rows of x.
            unsafe {
                let Token { input, is_given, .. } = self.tokens[token];
                let from = std::slice::from_raw_parts(input, self.hidden);
                let scale = if is_given { self.scales.inputs } else { self.scales.embeddings };
                for (to, from) in self.row(stream, token).iter_mut().zip(from) {
                    *to = from.to_f32() * scale;
                }
            }
        }
        member.meet();
    }

    /// # Safety
    /// No other member writes this row now, or reads it while this one writes.
    #[inline(always)]
    #[expect(
        clippy::mut_from_ref,
        reason = "members share the buffer and each writes its own rows"
    )]
    unsafe fn row(&self, stream: Stream, row: usize) -> &mut [f32] {
        // SAFETY: inside x, see above.
        unsafe { std::slice::from_raw_parts_mut(stream.x.add(row * self.hidden), self.hidden) }
    }

    /// The stream, normalised: this member's own of few rows, and of more what [`Self::multiply`]
    /// will make this member prepare.
    #[inline(always)]
    unsafe fn normalise<K: Kernel<E>>(
        &self,
        member: &Member<'_>,
        stream: Stream,
        weight: &[f32],
    ) -> Rows<E> {
        let own = if stream.count <= FEW { member.index * FEW * self.hidden } else { 0 };
        // SAFETY: this member's own part of what is normalised, or its share; nobody writes the
        // stream now.
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

    /// The tiles that a member prepares: all of them for few rows, for itself, and otherwise its
    /// share, for all members.
    #[inline(always)]
    fn tiles<K: Kernel<E>>(&self, member: &Member<'_>, rows: Rows<E>) -> Range<usize> {
        let tiles = rows.tiles::<K>();
        if rows.count <= FEW { 0..tiles } else { member.share(tiles) }
    }

    /// A product with whatever the matrix is stored as. First the rows become what it is multiplied
    /// with: codes where it is quantised, and otherwise numbers as tiles read them. Every member
    /// does that for itself where they are few, and otherwise all do together, who then meet.
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
        // SAFETY: nobody writes the rows now; what is made of them is this member's own, or its
        // share. Whoever still read that of an earlier product was met since.
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

    /// Writes a token's key and value to their page.
    #[inline(always)]
    unsafe fn keep<K: Kernel<E>>(
        &self,
        (layer, attends): (&Layer<E>, &Attends<'_>),
        (token, kv_head): (usize, usize),
        scratch: &mut Scratch<E>,
    ) {
        let shape = &attends.shape;
        let &Shape { heads, kv_heads, head_dim: dim, .. } = shape;
        let Token { position, entry, .. } = self.tokens[token];
        // SAFETY: this member's token and head; the entry belongs to it alone.
        unsafe {
            let heads_of = self.qkv.add(token * layer.qkv.outputs);
            let keys = std::slice::from_raw_parts(heads_of.add(heads * dim), kv_heads * dim);
            let value = heads_of.add((heads + kv_heads + kv_head) * dim);
            let value = std::slice::from_raw_parts(value, dim);
            let key = &mut scratch.head[..dim];
            key.copy_from_slice(&keys[kv_head * dim..][..dim]);
            let weight = layer.qk_norm.as_ref().map(|(_, norm)| norm.as_slice());
            let norm = self.head_norm::<K::Vector>(attends, weight, (keys, kv_head));
            turn::<K::Vector>(key, norm, self.eps, attends.angles(position));
            if shape.coded {
                layer.pool.keep_codes::<K::Vector>(shape, (entry, kv_head), key, value);
                return;
            }
            // Where the unit's queries will be: there is room for more than two heads.
            let (narrow_key, rest) = scratch.queries.split_at_mut(dim);
            math::narrow::<E, K>(key, narrow_key);
            math::narrow::<E, K>(value, &mut rest[..dim]);
            layer.pool.keep(shape, (entry, kv_head), narrow_key, &rest[..dim]);
        }
    }

    /// The norm of a head, of queries or of keys, among all of its token's.
    #[inline(always)]
    fn head_norm<'w, V: Vector>(
        &self,
        attends: &Attends<'_>,
        weight: Option<&'w [f32]>,
        (all, head): (&[f32], usize),
    ) -> Option<HeadNorm<'w>> {
        let weight = weight?;
        if !attends.norm_rows {
            return Some(HeadNorm { weight, factor: None });
        }
        let dim = attends.shape.head_dim;
        let factor = Some(math::rms_factor::<V>(all, self.eps));
        Some(HeadNorm { weight: &weight[head * dim..][..dim], factor })
    }

    #[inline(always)]
    unsafe fn attend<K: Kernel<E>>(
        &self,
        (layer, attends): (&Layer<E>, &Attends<'_>),
        shared: attention::Shared<'_>,
        (queue, member): (&Queue, &Member<'_>),
    ) {
        // SAFETY: the member's own.
        let scratch = unsafe { &mut *self.scratch.add(member.index) };
        loop {
            let mine = queue.take(shared.units.len(), member.members);
            if mine.is_empty() {
                break;
            }
            for index in mine {
                let (unit, then) = (&shared.units[index], shared.units.get(index + 1));
                // SAFETY: a unit is taken by one member, and what it writes is its own; its pages
                // were checked.
                unsafe {
                    if self.decodes && unit.sees_itself() {
                        let first = unit.queries.held.kv_head;
                        for kv_head in first..first + unit.heads {
                            let place = (unit.queries.token, kv_head);
                            self.keep::<K>((layer, attends), place, scratch);
                        }
                    }
                    self.turn_queries::<K>((layer, attends), (unit, then), scratch);
                    let (units, out) = ((unit, then), self.attended);
                    let read = (layer.pool, layer.sinks.as_slice());
                    attention::attend::<E, K>(&attends.shape, shared, units, read, out, scratch);
                }
            }
        }
    }

    /// Puts a unit's queries, normalised where the model does that, and turned, into the scratch.
    #[inline(always)]
    unsafe fn turn_queries<K: Kernel<E>>(
        &self,
        (layer, attends): (&Layer<E>, &Attends<'_>),
        (unit, then): (&Unit, Option<&Unit>),
        scratch: &mut Scratch<E>,
    ) {
        let shape = &attends.shape;
        let &Shape { heads, head_dim: dim, .. } = shape;
        let group = shape.group();
        let expected = then.filter(|then| self.decodes && then.sees_itself());
        let together = unit.heads * group;
        let weight = layer.qk_norm.as_ref().map(|(norm, _)| norm.as_slice());
        for index in 0..unit.queries.tokens {
            let token = unit.queries.token + index;
            // SAFETY: the unit's queries, which others that attend to parts of the same ones only
            // read.
            unsafe {
                let position = self.tokens[token].position;
                let angles = attends.angles(position);
                let scale = match self.query_scales.is_null() {
                    true => 1.0,
                    false => *self.query_scales.add(position),
                };
                let all = self.qkv.add(token * layer.qkv.outputs);
                let all = std::slice::from_raw_parts(all, heads * dim);
                let first = unit.queries.held.kv_head * group;
                let mut norm = self.head_norm::<K::Vector>(attends, weight, (all, first));
                for head in 0..together {
                    let at = (first + head) * dim;
                    let query = &mut scratch.head[..dim];
                    query.copy_from_slice(&all[at..][..dim]);
                    if let (Some(norm), Some(weight), true) = (&mut norm, weight, attends.norm_rows)
                    {
                        norm.weight = &weight[at..][..dim];
                    }
                    turn::<K::Vector>(query, norm, self.eps, angles);
                    if scale != 1.0 {
                        query.iter_mut().for_each(|x| *x *= scale);
                    }
                    let to = &mut scratch.queries[(index * together + head) * dim..][..dim];
                    math::narrow::<E, K>(query, to);
                    if let Some(then) = expected {
                        let entry = self.tokens[then.queries.token].entry;
                        let kv_head = then.queries.held.kv_head + head / group;
                        layer.pool.expect::<K>(shape, (entry, kv_head), (head % group, group));
                    }
                }
            }
        }
    }
}
