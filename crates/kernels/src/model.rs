//! A decoder as a list of what to compute, and one step of it.

use std::ffi::c_void;

use crate::attention::{self, Scratch, Shape, Unit};
use crate::element::Element;
use crate::math;
use crate::matmul::{Best, Matrix, Out, Rows, multiply};
use crate::team::{Member, Queue, Team};
use crate::tile::Kernel;

/// One layer, as the caller describes it. Matrices are packed, vectors as in the checkpoint; a null pointer is what the layer has not.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct LayerSpec {
    input_norm: *const c_void,
    qkv: *const c_void,
    qkv_bias: *const c_void,
    q_norm: *const c_void,
    k_norm: *const c_void,
    output: *const c_void,
    output_bias: *const c_void,
    post_norm: *const c_void,
    gate_up: *const c_void,
    gate_up_bias: *const c_void,
    down: *const c_void,
    down_bias: *const c_void,
    /// `[entries, kv_heads, head_dim]`.
    keys: *mut c_void,
    values: *mut c_void,
}

/// A decoder, as the caller describes it. What it points to lives as long as the model.
#[repr(C)]
pub struct ModelSpec {
    /// 0: float32, 1: bfloat16; of weights, activations and pages.
    pub(crate) dtype: u32,
    layers: u32,
    hidden: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    intermediate: u32,
    vocabulary: u32,
    /// Rows of `cos` and `sin`.
    positions: u32,
    page_size: u32,
    page_count: u32,
    pub(crate) threads: u32,
    eps: f32,
    /// Of attention scores.
    scale: f32,
    /// `[vocabulary, hidden]`, as in the checkpoint.
    embedding: *const c_void,
    final_norm: *const c_void,
    /// Packed.
    head: *const c_void,
    /// float32 `[positions, head_dim / 2]`.
    cos: *const f32,
    sin: *const f32,
    layer: *const LayerSpec,
}

impl ModelSpec {
    /// Whether all inner dimensions are even, as pairs need them.
    pub(crate) fn is_even(&self) -> bool {
        [self.hidden, self.head_dim, self.intermediate].iter().all(|size| size % 2 == 0)
    }
}

/// One step, as the caller describes it.
#[repr(C)]
pub struct StepSpec {
    rows: u64,
    /// int64 `[rows]` each.
    slot: *const i64,
    start: *const i64,
    length: *const i64,
    /// int32 `[slots, token_stride]`.
    tokens: *const i32,
    token_stride: u64,
    /// int32 `[slots, page_stride]`.
    pages: *const i32,
    page_stride: u64,
    /// int64 `[sampled]`: rows whose last token gets logits, ascending.
    sample: *const i64,
    sampled: u64,
    /// `[rows]`, or null for none: where the inputs `[positions, hidden]` of a row's slot begin, or null where the embedding has all of them.
    given: *const *const c_void,
    /// int64 `[rows]`, where `given` is: positions from here on have the inputs of the embedding.
    given_until: *const i64,
    /// float32 `[sampled, vocabulary]`, or null where the most likely tokens are enough.
    logits: *mut f32,
    /// int32 and bool `[sampled]`, written when `logits` is null.
    best: *mut i32,
    finite: *mut u8,
}

/// Why a step was not computed. Nothing was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum StepError {
    /// A position lies on no page, or on one that is not.
    Page = 1,
    /// A token is not of the vocabulary.
    Token = 2,
}

struct Layer<E> {
    input_norm: Vec<f32>,
    qkv: Owned<E>,
    qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    output: Owned<E>,
    post_norm: Vec<f32>,
    gate_up: Owned<E>,
    down: Owned<E>,
    keys: *mut E,
    values: *mut E,
}

struct Owned<E> {
    panels: *const E,
    outputs: usize,
    inputs: usize,
    bias: Vec<f32>,
}

impl<E> Owned<E> {
    fn matrix(&self) -> Matrix<'_, E> {
        let Self { panels, outputs, inputs, ref bias } = *self;
        Matrix { panels, outputs, inputs, bias }
    }
}

/// A decoder with its buffers. Steps are computed one at a time.
pub(crate) struct Model<E> {
    shape: Shape,
    hidden: usize,
    intermediate: usize,
    vocabulary: usize,
    page_count: usize,
    eps: f32,
    embedding: *const E,
    final_norm: Vec<f32>,
    head: Owned<E>,
    cos: *const f32,
    sin: *const f32,
    layers: Vec<Layer<E>>,
    team: Team,
    work: Work<E>,
}

/// Buffers of a step, kept from step to step.
#[derive(Default)]
struct Work<E> {
    /// The residual stream `[tokens, hidden]`.
    x: Vec<f32>,
    normed: Vec<E>,
    qkv: Vec<f32>,
    q: Vec<E>,
    attended: Vec<E>,
    gated: Vec<E>,
    /// The last tokens of the sampled rows, normalised.
    last: Vec<E>,
    tokens: Vec<Token<E>>,
    units: Vec<Unit>,
    queues: Vec<Queue>,
    best: Vec<Best>,
    scratch: Vec<Scratch<E>>,
}

#[derive(Clone, Copy)]
struct Token<E> {
    /// Its row of the embedding, or what was given in place of that.
    input: *const E,
    position: usize,
    /// Where its keys and values go.
    entry: usize,
}

/// Pieces of work a layer takes from queues: four products and the attention.
const QUEUES_A_LAYER: usize = 5;

impl<E: Element> Model<E> {
    /// # Safety
    /// `spec` describes what is there, and it stays there.
    pub(crate) unsafe fn new(spec: &ModelSpec, team: Team) -> Self {
        let shape = Shape {
            heads: spec.heads as usize,
            kv_heads: spec.kv_heads as usize,
            head_dim: spec.head_dim as usize,
            page_size: spec.page_size as usize,
            scale: spec.scale,
        };
        let (hidden, intermediate) = (spec.hidden as usize, spec.intermediate as usize);
        let (dim, queries) = (shape.head_dim, shape.heads * shape.head_dim);
        let projected = queries + 2 * shape.kv_heads * dim;
        // SAFETY: the caller's description.
        let vector = |from: *const c_void, length: usize| -> Vec<f32> {
            if from.is_null() {
                return Vec::new();
            }
            let values = unsafe { std::slice::from_raw_parts(from.cast::<E>(), length) };
            values.iter().map(|value| value.to_f32()).collect()
        };
        let owned = |panels: *const c_void, outputs: usize, inputs: usize, bias: *const c_void| {
            Owned { panels: panels.cast(), outputs, inputs, bias: vector(bias, outputs) }
        };
        // SAFETY: the caller's description.
        let layers = unsafe { std::slice::from_raw_parts(spec.layer, spec.layers as usize) };
        let layer = |layer: &LayerSpec| Layer {
            input_norm: vector(layer.input_norm, hidden),
            qkv: owned(layer.qkv, projected, hidden, layer.qkv_bias),
            qk_norm: (!layer.q_norm.is_null())
                .then(|| (vector(layer.q_norm, dim), vector(layer.k_norm, dim))),
            output: owned(layer.output, hidden, queries, layer.output_bias),
            post_norm: vector(layer.post_norm, hidden),
            gate_up: owned(layer.gate_up, 2 * intermediate, hidden, layer.gate_up_bias),
            down: owned(layer.down, hidden, intermediate, layer.down_bias),
            keys: layer.keys.cast(),
            values: layer.values.cast(),
        };
        let mut work = Work { scratch: Vec::new(), ..Work::default() };
        work.scratch.resize_with(team.threads, || Scratch::new(&shape));
        work.queues.resize_with(QUEUES_A_LAYER * layers.len() + 1, Queue::default);
        Self {
            shape,
            hidden,
            intermediate,
            vocabulary: spec.vocabulary as usize,
            page_count: spec.page_count as usize,
            eps: spec.eps,
            embedding: spec.embedding.cast(),
            final_norm: vector(spec.final_norm, hidden),
            head: owned(spec.head, spec.vocabulary as usize, hidden, std::ptr::null()),
            cos: spec.cos,
            sin: spec.sin,
            layers: layers.iter().map(layer).collect(),
            team,
            work,
        }
    }

    /// Computes a step: writes keys and values of every row, and logits or the most likely tokens of those that sample.
    ///
    /// # Safety
    /// `step` describes what is there; rows lie within the tables and within the model's positions; `run` lets every member of the team
    /// compute its share.
    pub(crate) unsafe fn step(
        &mut self,
        step: &StepSpec,
        run: impl Fn(&Team, &Step<'_, E>),
    ) -> Result<(), StepError> {
        // SAFETY: the caller's description.
        let last = unsafe { self.lay_out(step)? };
        let count = self.work.tokens.len();
        let sampled = last.len();
        let projected = self.layers.first().map_or(0, |layer| layer.qkv.outputs);
        let queries = self.shape.heads * self.shape.head_dim;
        let zero = E::default();
        let work = &mut self.work;
        grow(&mut work.x, count * self.hidden, 0.0);
        grow(&mut work.normed, count * self.hidden, zero);
        grow(&mut work.qkv, count * projected, 0.0);
        grow(&mut work.q, count * queries, zero);
        grow(&mut work.attended, count * queries, zero);
        grow(&mut work.gated, count * self.intermediate, zero);
        grow(&mut work.last, sampled * self.hidden, zero);
        work.queues.iter_mut().for_each(Queue::reset);
        work.best.clear();
        if step.logits.is_null() {
            work.best.resize(self.team.threads * sampled, Best::NONE);
        }
        let view = Step {
            x: work.x.as_mut_ptr(),
            normed: work.normed.as_mut_ptr(),
            qkv: work.qkv.as_mut_ptr(),
            q: work.q.as_mut_ptr(),
            attended: work.attended.as_mut_ptr(),
            gated: work.gated.as_mut_ptr(),
            last: work.last.as_mut_ptr(),
            best: work.best.as_mut_ptr(),
            scratch: work.scratch.as_mut_ptr(),
            logits: step.logits,
            tokens: &work.tokens,
            units: &work.units,
            queues: &work.queues,
            sampled: &last,
            shape: self.shape,
            hidden: self.hidden,
            eps: self.eps,
            cos: self.cos,
            sin: self.sin,
            final_norm: &self.final_norm,
            head: self.head.matrix(),
            layers: &self.layers,
        };
        run(&self.team, &view);
        if step.logits.is_null() {
            for row in 0..sampled {
                let mut best = Best::NONE;
                for member in self.work.best.chunks_exact(sampled) {
                    best.merge(member[row]);
                }
                // SAFETY: one a sampled row.
                unsafe {
                    *step.best.add(row) = best.output.cast_signed();
                    *step.finite.add(row) = u8::from(best.finite);
                }
            }
        }
        Ok(())
    }

    /// Finds every token and its page, and cuts the attention into units; gives the sampled tokens.
    unsafe fn lay_out(&mut self, step: &StepSpec) -> Result<Vec<usize>, StepError> {
        let count = step.rows as usize;
        // SAFETY: the caller's description.
        let column = |from: *const i64| unsafe { std::slice::from_raw_parts(from, count) };
        let (slots, starts, lengths) = (column(step.slot), column(step.start), column(step.length));
        let work = &mut self.work;
        work.tokens.clear();
        work.units.clear();
        let page_size = self.shape.page_size;
        let most = self.shape.unit_tokens();
        let mut row_end = Vec::with_capacity(count);
        for (row, ((&slot, &start), &length)) in slots.iter().zip(starts).zip(lengths).enumerate() {
            let (slot, start, length) = (slot as usize, start as usize, length as usize);
            // SAFETY: the caller's description.
            let (given, until) = match step.given.is_null() {
                true => (std::ptr::null(), 0),
                false => unsafe { (*step.given.add(row), *step.given_until.add(row)) },
            };
            let until = if given.is_null() { 0 } else { until as usize };
            // SAFETY: rows lie within the tables.
            let pages = unsafe { step.pages.add(slot * step.page_stride as usize) };
            let ids = unsafe { step.tokens.add(slot * step.token_stride as usize) };
            let page_of = |index: usize| {
                // SAFETY: within the row of the page table.
                let page = unsafe { *pages.add(index) };
                usize::try_from(page)
                    .ok()
                    .filter(|&page| page < self.page_count)
                    .ok_or(StepError::Page)
            };
            for index in 0..start / page_size {
                page_of(index)?;
            }
            let first = work.tokens.len();
            for position in start..start + length {
                // SAFETY: within the row of the token table.
                let id = unsafe { *ids.add(position) };
                let id = usize::try_from(id).ok().filter(|&id| id < self.vocabulary);
                let entry = page_of(position / page_size)? * page_size + position % page_size;
                let id = id.ok_or(StepError::Token)?;
                // SAFETY: a row of what was given, or of the embedding.
                let input = match position < until {
                    true => unsafe { given.cast::<E>().add(position * self.hidden) },
                    false => unsafe { self.embedding.add(id * self.hidden) },
                };
                work.tokens.push(Token { input, position, entry });
            }
            for kv_head in 0..self.shape.kv_heads {
                for from in (0..length).step_by(most) {
                    work.units.push(Unit {
                        token: first + from,
                        tokens: most.min(length - from),
                        position: start + from,
                        pages,
                        kv_head,
                    });
                }
            }
            row_end.push(work.tokens.len());
        }
        // The longest first, so that nobody is left with a long one at the end.
        work.units
            .sort_by_key(|unit| std::cmp::Reverse(unit.tokens * (unit.position + unit.tokens)));
        // SAFETY: the caller's description.
        let sample = unsafe { std::slice::from_raw_parts(step.sample, step.sampled as usize) };
        Ok(sample.iter().map(|&row| row_end[row as usize] - 1).collect())
    }
}

fn grow<T: Clone>(buffer: &mut Vec<T>, length: usize, value: T) {
    if buffer.len() < length {
        buffer.resize(length, value);
    }
}

/// A step as its members see it: buffers that they share, each writing its own part between two meetings.
pub(crate) struct Step<'a, E> {
    x: *mut f32,
    normed: *mut E,
    qkv: *mut f32,
    q: *mut E,
    attended: *mut E,
    gated: *mut E,
    last: *mut E,
    best: *mut Best,
    scratch: *mut Scratch<E>,
    logits: *mut f32,
    tokens: &'a [Token<E>],
    units: &'a [Unit],
    queues: &'a [Queue],
    sampled: &'a [usize],
    shape: Shape,
    hidden: usize,
    eps: f32,
    cos: *const f32,
    sin: *const f32,
    final_norm: &'a [f32],
    head: Matrix<'a, E>,
    layers: &'a [Layer<E>],
}

// SAFETY: what the pointers reach is written by one member at a time, see `compute`.
unsafe impl<E> Sync for Step<'_, E> {}

impl<E: Element> Step<'_, E> {
    /// One member's share of the step.
    ///
    /// # Safety
    /// Called once by each member of the team; the processor can run `K`.
    #[inline(always)]
    pub(crate) unsafe fn compute<K: Kernel<E>>(&self, member: &Member<'_>) {
        let count = self.tokens.len();
        let mine = member.share(count);
        for token in mine.clone() {
            // SAFETY: a token's input; this member's rows of x.
            unsafe {
                let from = std::slice::from_raw_parts(self.tokens[token].input, self.hidden);
                for (to, from) in self.row(token).iter_mut().zip(from) {
                    *to = from.to_f32();
                }
            }
        }
        for (layer, queues) in self.layers.iter().zip(self.queues.chunks_exact(QUEUES_A_LAYER)) {
            // SAFETY: between meetings, members write only what is theirs by share or by queue.
            unsafe {
                self.normalise(mine.clone(), &layer.input_norm);
                member.meet();
                let normed = Rows { first: self.normed.cast_const(), count };
                multiply::<E, K>(&queues[0], normed, &layer.qkv.matrix(), Out::Store(self.qkv));
                member.meet();
                for token in mine.clone() {
                    self.rotate_and_keep(layer, token);
                }
                member.meet();
                self.attend::<K>(layer, &queues[1], member.index);
                member.meet();
                let attended = Rows { first: self.attended.cast_const(), count };
                multiply::<E, K>(&queues[2], attended, &layer.output.matrix(), Out::Add(self.x));
                member.meet();
                self.normalise(mine.clone(), &layer.post_norm);
                member.meet();
                multiply::<E, K>(
                    &queues[3],
                    normed,
                    &layer.gate_up.matrix(),
                    Out::Gate(self.gated),
                );
                member.meet();
                let gated = Rows { first: self.gated.cast_const(), count };
                multiply::<E, K>(&queues[4], gated, &layer.down.matrix(), Out::Add(self.x));
                member.meet();
            }
        }
        for index in member.share(self.sampled.len()) {
            // SAFETY: this member's rows of `last`.
            unsafe {
                let to =
                    std::slice::from_raw_parts_mut(self.last.add(index * self.hidden), self.hidden);
                math::rms_norm(self.row(self.sampled[index]), self.final_norm, self.eps, to);
            }
        }
        member.meet();
        let last = Rows { first: self.last.cast_const(), count: self.sampled.len() };
        let queue = &self.queues[self.layers.len() * QUEUES_A_LAYER];
        // SAFETY: logits by queue; each member has its own best.
        unsafe {
            let out = if self.logits.is_null() {
                Out::Best(self.best.add(member.index * self.sampled.len()))
            } else {
                Out::Store(self.logits)
            };
            multiply::<E, K>(queue, last, &self.head, out);
        }
    }

    /// # Safety
    /// No other member writes this token's row now.
    #[inline(always)]
    #[expect(
        clippy::mut_from_ref,
        reason = "members share the buffer and each writes its own rows"
    )]
    unsafe fn row(&self, token: usize) -> &mut [f32] {
        // SAFETY: inside x, see above.
        unsafe { std::slice::from_raw_parts_mut(self.x.add(token * self.hidden), self.hidden) }
    }

    #[inline(always)]
    unsafe fn normalise(&self, tokens: std::ops::Range<usize>, weight: &[f32]) {
        for token in tokens {
            // SAFETY: this member's rows of x and of what is normalised.
            unsafe {
                let to = std::slice::from_raw_parts_mut(
                    self.normed.add(token * self.hidden),
                    self.hidden,
                );
                math::rms_norm(self.row(token), weight, self.eps, to);
            }
        }
    }

    /// Normalises, where the model does, and rotates a token's queries and keys, and writes keys and values to their page.
    #[inline(always)]
    unsafe fn rotate_and_keep(&self, layer: &Layer<E>, token: usize) {
        let Shape { heads, kv_heads, head_dim: dim, .. } = self.shape;
        let Token { position, entry, .. } = self.tokens[token];
        let width = layer.qkv.outputs;
        // SAFETY: this member's token; the entry belongs to it alone.
        unsafe {
            let qkv = std::slice::from_raw_parts_mut(self.qkv.add(token * width), width);
            let cos = std::slice::from_raw_parts(self.cos.add(position * dim / 2), dim / 2);
            let sin = std::slice::from_raw_parts(self.sin.add(position * dim / 2), dim / 2);
            let q = std::slice::from_raw_parts_mut(self.q.add(token * heads * dim), heads * dim);
            let pages = entry * kv_heads * dim;
            let keys = std::slice::from_raw_parts_mut(layer.keys.add(pages), kv_heads * dim);
            let values = std::slice::from_raw_parts_mut(layer.values.add(pages), kv_heads * dim);
            let (queries, rest) = qkv.split_at_mut(heads * dim);
            let (fresh, fresh_values) = rest.split_at_mut(kv_heads * dim);
            for (which, (from, to)) in [(queries, q), (fresh, keys)].into_iter().enumerate() {
                for (head, to) in from.chunks_exact_mut(dim).zip(to.chunks_exact_mut(dim)) {
                    if let Some((q_norm, k_norm)) = &layer.qk_norm {
                        let weight = if which == 0 { q_norm } else { k_norm };
                        let factor = math::rms_factor(head, self.eps);
                        for (x, &weight) in head.iter_mut().zip(weight) {
                            *x = *x * factor * weight;
                        }
                    }
                    math::rotate(head, cos, sin);
                    for (to, &x) in to.iter_mut().zip(head.iter()) {
                        *to = E::from_f32(x);
                    }
                }
            }
            for (to, &x) in values.iter_mut().zip(fresh_values.iter()) {
                *to = E::from_f32(x);
            }
        }
    }

    #[inline(always)]
    unsafe fn attend<K: Kernel<E>>(&self, layer: &Layer<E>, queue: &Queue, member: usize) {
        loop {
            let piece = queue.next();
            let Some(unit) = self.units.get(piece) else { break };
            // SAFETY: a unit is taken by one member; its pages were checked; the scratch is the member's.
            unsafe {
                let pool = (layer.keys.cast_const(), layer.values.cast_const());
                let scratch = &mut *self.scratch.add(member);
                attention::attend::<E, K>(&self.shape, unit, self.q, pool, self.attended, scratch);
            }
        }
    }
}
