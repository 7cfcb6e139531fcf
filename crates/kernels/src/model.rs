//! A decoder as a list of computations, and one step of it.

use std::ffi::c_void;

use crate::adapters::{self, Groups};
use crate::attention::{self, Queries, Scratch};
use crate::codes::{CodesRoom, Format, SHARED};
use crate::element::Element;
use crate::experts::{self, RoutingSpec};
use crate::layer::{AttentionSpec, Layer, LayerSpec, Norms, Owned, Widths};
use crate::matmul::{Activation, Best, LogitScales};
use crate::memory::grow;
use crate::pages::{Held, Shape, takes_codes};
use crate::recurrence::StateRow;
use crate::step::{Attends, QUEUES_A_LAYER, Scales, Step, Token};
use crate::team::{FEW, Queue, Team};

/// A decoder, as the caller describes it. The memory that it points to lives as long as the model.
#[repr(C)]
pub struct ModelSpec {
    /// 0: float32, 1: bfloat16; of weights, activations and pages without codes.
    pub(crate) dtype: u32,
    pub(crate) layers: u32,
    pub(crate) hidden: u32,
    pub(crate) intermediate: u32,
    pub(crate) vocabulary: u32,
    /// Rows of angles.
    pub(crate) positions: u32,
    pub(crate) page_size: u32,
    pub(crate) page_count: u32,
    pub(crate) threads: u32,
    /// The number of kinds of attention.
    pub(crate) attentions: u32,
    /// 1: norms subtract the mean. 0: they do not.
    pub(crate) mean_norms: u32,
    /// 1: norms are float32. 0: they are of `dtype`.
    pub(crate) wide_norms: u32,
    /// The function of gates, see [`Activation::of`].
    pub(crate) activation: u32,
    pub(crate) eps: f32,
    /// The factor of the embedding's rows.
    pub(crate) embedding_scale: f32,
    /// The factor of inputs that the caller gives in place of embeddings.
    pub(crate) input_scale: f32,
    /// The factor of a part's output before it is added.
    pub(crate) residual_scale: f32,
    /// The factor of logits.
    pub(crate) logit_scale: f32,
    /// The bound that logits then approach; 0: there is none.
    pub(crate) logit_cap: f32,
    /// `[vocabulary, hidden]`, as in the checkpoint.
    pub(crate) embedding: *const c_void,
    pub(crate) final_norm: *const c_void,
    /// Packed; null where steps give no logits and no tokens.
    pub(crate) head: *const c_void,
    pub(crate) layer: *const LayerSpec,
    pub(crate) attention: *const AttentionSpec,
    /// The format of the head.
    pub(crate) head_format: u32,
    /// The routing of the layers with experts.
    pub(crate) routing: RoutingSpec,
    /// 1: pages have 8-bit codes of keys and values. 0: they have elements.
    pub(crate) kv_codes: u32,
    /// float32 `[positions]`: factors of queries at each position; null: there are none.
    pub(crate) query_scales: *const f32,
}

impl ModelSpec {
    /// True if all inner dimensions are even, as pairs need them, those of quantised matrices
    /// multiples of [`SHARED`], and pages fit to what they have.
    ///
    /// # Safety
    /// The description is true.
    pub(crate) unsafe fn is_possible(&self) -> bool {
        // SAFETY: the caller's description.
        let layers = unsafe { std::slice::from_raw_parts(self.layer, self.layers as usize) };
        // SAFETY: the caller's description.
        let kinds = unsafe { self.kinds() };
        let fits = |(format, inputs): (u32, u32)| {
            Format::of(format).is_none() || (inputs as usize).is_multiple_of(SHARED)
        };
        let layer_fits = |layer: &LayerSpec| {
            let Some(kind) = kinds.get(layer.attention as usize) else { return false };
            let inner = self.intermediate_of(layer);
            // SAFETY: the caller's description.
            let recurrence = unsafe { layer.recurrence.as_ref() };
            let of_heads = kind.heads * kind.head_dim;
            let mixed = recurrence.map_or(of_heads, |spec| spec.values() as u32);
            let inputs = [self.hidden, mixed, self.hidden, inner];
            let of_experts = [self.hidden, self.routing.intermediate];
            // A norm behind a part needs all of it in one place.
            let behind = !layer.fed_norm.is_null() && layer.experts.is_there();
            let added = [layer.attended_norm, layer.fed_norm];
            let normed = added.iter().any(|norm| !norm.is_null()) && self.mean_norms == 1;
            !(behind || normed || mixed % 2 > 0)
                && layer.formats.into_iter().zip(inputs).all(fits)
                && layer.experts.formats.into_iter().zip(of_experts).all(fits)
        };
        let kind_fits = |kind: &AttentionSpec| {
            [kind.head_dim, kind.rotary_dim].iter().all(|size| size % 2 == 0)
                && kind.rotary_dim <= kind.head_dim
                && (self.kv_codes == 0
                    || takes_codes(self.page_size as usize, kind.head_dim as usize))
        };
        let routing = &self.routing;
        [self.hidden, self.intermediate, routing.intermediate, routing.shared]
            .iter()
            .all(|size| size % 2 == 0)
            && Activation::of(self.activation).is_some()
            && kinds.iter().all(kind_fits)
            && routing.is_possible()
            && fits((self.head_format, self.hidden))
            && layers.iter().all(layer_fits)
    }

    /// # Safety
    /// The description is true.
    unsafe fn kinds(&self) -> &[AttentionSpec] {
        // SAFETY: the contract.
        unsafe { std::slice::from_raw_parts(self.attention, self.attentions as usize) }
    }

    fn shape(&self, kind: &AttentionSpec) -> Shape {
        Shape {
            heads: kind.heads as usize,
            kv_heads: kind.kv_heads as usize,
            head_dim: kind.head_dim as usize,
            page_size: self.page_size as usize,
            scale: kind.scale,
            coded: self.kv_codes == 1,
            window: kind.window as usize,
            chunk: kind.chunk as usize,
            cap: kind.cap,
        }
    }

    /// Elements between the two products that all tokens of a layer have.
    fn intermediate_of(&self, layer: &LayerSpec) -> u32 {
        if layer.experts.is_there() { self.routing.shared } else { self.intermediate }
    }
}

/// One step, as the caller describes it.
#[repr(C)]
pub struct StepSpec {
    pub(crate) rows: u64,
    /// int64 `[rows]` each.
    pub(crate) slot: *const i64,
    pub(crate) start: *const i64,
    pub(crate) length: *const i64,
    /// int32 `[slots, token_stride]`.
    pub(crate) tokens: *const i32,
    pub(crate) token_stride: u64,
    /// int32 `[slots, page_stride]`.
    pub(crate) pages: *const i32,
    pub(crate) page_stride: u64,
    /// int64 `[sampled]`: tokens that get logits, numbered over all rows, ascending.
    pub(crate) sample: *const i64,
    pub(crate) sampled: u64,
    /// `[rows]`, or null for none: where the inputs `[positions, hidden]` of a row's slot begin, or
    /// null where the embedding has all of them.
    pub(crate) given: *const *const c_void,
    /// int64 `[rows]`, where `given` is: positions from here on have the inputs of the embedding.
    pub(crate) given_until: *const i64,
    /// float32 `[sampled, vocabulary]`, or null where the most likely tokens are enough.
    pub(crate) logits: *mut f32,
    /// int32 and bool `[sampled]`, written when `logits` is null.
    pub(crate) best: *mut i32,
    pub(crate) finite: *mut u8,
    /// `[PARTS]`, or null: what each of [`crate::step::Part`] took is added here, in nanoseconds.
    pub(crate) times: *mut u64,
    /// float32 `[sampled, hidden]`, or null: in place of logits, what [`Model::head`] makes them
    /// of.
    pub(crate) states: *mut f32,
    /// float32 `[sampled, hidden]`, or null: in place of logits, the final states, normalised.
    pub(crate) vectors: *mut f32,
    /// int64 `[rows, 2]`, or null without recurrent layers: the rows of the states' tables before a
    /// row and behind its last token.
    pub(crate) state_rows: *const i64,
}

/// The reason for which a step was not computed. Nothing was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum StepError {
    /// A position lies on no page, or on a page that does not exist.
    Page = 1,
    /// A token is not of the vocabulary.
    Token = 2,
}

/// A decoder with its buffers. Steps are computed one at a time.
pub(crate) struct Model<E> {
    kinds: Vec<Kind>,
    hidden: usize,
    /// Elements of the widest layer's queries, or values of a recurrence.
    queries: usize,
    /// The inner size of the widest layer.
    intermediate: usize,
    routing: RoutingSpec,
    activation: Activation,
    scales: Scales,
    logit_scales: LogitScales,
    mean_norms: bool,
    vocabulary: usize,
    page_size: usize,
    page_count: usize,
    eps: f32,
    embedding: *const E,
    final_norm: Vec<f32>,
    head: Owned<E>,
    query_scales: *const f32,
    layers: Vec<Layer<E>>,
    /// True if any matrix is quantised.
    quantised: bool,
    team: Team,
    work: Work<E>,
}

/// A kind of attention, and its work in a step.
struct Kind {
    shape: Shape,
    spec: AttentionSpec,
    work: attention::Work,
    /// The work of the last layer, if it is of this kind and not the same.
    last: attention::Work,
}

/// The number of rows of a member from which on members do not share a row's heads.
const ROWS_A_MEMBER: usize = 4;

/// Buffers of a step, kept from step to step.
#[derive(Default)]
struct Work<E> {
    /// The residual stream `[tokens, hidden]`.
    x: Vec<f32>,
    /// The states of the tokens that sample, once the others are done.
    sampled_x: Vec<f32>,
    normed: Vec<E>,
    qkv: Vec<f32>,
    attended: Vec<E>,
    mixed: Vec<f32>,
    gated: Vec<E>,
    /// The output of a part with a norm behind it, `[tokens, hidden]`.
    part: Vec<f32>,
    tokens: Vec<Token<E>>,
    state_rows: Vec<StateRow>,
    experts: experts::Work<E>,
    adapters: adapters::Buffers<E>,
    queues: Vec<Queue>,
    best: Vec<Best>,
    scratch: Vec<Scratch<E>>,
    /// Activations as tiles read them: numbers of a type that the processor decides.
    arranged: Vec<f32>,
    /// Activations as a quantised matrix takes them: codes, their scales and sums.
    codes: Vec<i8>,
    code_scales: Vec<f32>,
    code_sums: Vec<i32>,
}

impl<E: Element> Model<E> {
    /// # Safety
    /// `spec` describes what is there, and it stays there.
    pub(crate) unsafe fn new(spec: &ModelSpec, team: Team) -> Self {
        // SAFETY: the caller's description.
        let kinds = unsafe { spec.kinds() };
        let kind = |&kind: &AttentionSpec| {
            let (work, last) = (attention::Work::default(), attention::Work::default());
            Kind { shape: spec.shape(&kind), spec: kind, work, last }
        };
        let kinds: Vec<Kind> = kinds.iter().map(kind).collect();
        let hidden = spec.hidden as usize;
        let norms = Norms { wide: spec.wide_norms == 1 };
        // SAFETY: the caller's description.
        let layers = unsafe { std::slice::from_raw_parts(spec.layer, spec.layers as usize) };
        let layers: Vec<Layer<E>> = layers
            .iter()
            .map(|layer| {
                let inner = spec.intermediate_of(layer) as usize;
                let kind = &kinds[layer.attention as usize];
                let of_kind = (&kind.shape, &kind.spec);
                let widths = (norms, Widths { hidden, inner });
                // SAFETY: the caller's description.
                unsafe { Layer::new(layer, &spec.routing, of_kind, widths) }
            })
            .collect();
        let head = (spec.head, spec.head_format);
        let of_head = (spec.vocabulary as usize, hidden);
        // SAFETY: the caller's description.
        let (final_norm, head) = unsafe {
            let norm = norms.read::<E>(spec.final_norm, hidden);
            (norm, Owned::new(head, of_head, std::ptr::null()))
        };
        let quantised = head.is_quantised() || layers.iter().any(Layer::is_quantised);
        let routing = match layers.iter().any(|layer| layer.mixture.is_some()) {
            true => spec.routing,
            false => RoutingSpec::default(),
        };
        let mut work = Work { scratch: Vec::new(), ..Work::default() };
        let shapes: Vec<Shape> = kinds.iter().map(|kind| kind.shape).collect();
        work.scratch.resize_with(team.threads, || Scratch::new(&shapes));
        work.queues.resize_with(QUEUES_A_LAYER * layers.len() + 1, Queue::default);
        let of_heads = shapes.iter().map(|it| it.heads * it.head_dim);
        let of_states = layers.iter().filter_map(|it| Some(it.recurrence.as_ref()?.spec.values()));
        Self {
            queries: of_heads.chain(of_states).max().unwrap_or(0),
            kinds,
            hidden,
            intermediate: spec.intermediate.max(routing.shared) as usize,
            routing,
            activation: Activation::of(spec.activation).unwrap_or(Activation::Silu),
            scales: Scales {
                embeddings: spec.embedding_scale,
                inputs: spec.input_scale,
                residuals: spec.residual_scale,
            },
            logit_scales: LogitScales { scale: spec.logit_scale, cap: spec.logit_cap },
            mean_norms: spec.mean_norms == 1,
            vocabulary: spec.vocabulary as usize,
            page_size: spec.page_size as usize,
            page_count: spec.page_count as usize,
            eps: spec.eps,
            embedding: spec.embedding.cast(),
            final_norm,
            head,
            query_scales: spec.query_scales,
            layers,
            quantised,
            team,
            work,
        }
    }

    /// Computes a step: writes keys and values of every row, and logits or the most likely tokens
    /// of those that sample. Adapters change the rows of their `groups`.
    ///
    /// # Safety
    /// `step` describes what is there; rows lie within the tables and within the model's positions;
    /// adapters have the model's sizes; `run` lets every member of the team compute its share.
    pub(crate) unsafe fn step(
        &mut self,
        step: &StepSpec,
        groups: Option<&Groups<'_>>,
        run: impl Fn(&Team, &Step<'_, E>),
    ) -> Result<(), StepError> {
        // SAFETY: the caller's description.
        let chosen = unsafe { self.lay_out(step)? };
        let count = self.work.tokens.len();
        let sampled = chosen.len();
        let decodes = count == step.rows as usize && count == sampled;
        let projected = self.layers.iter().map(|layer| layer.qkv.outputs).max().unwrap_or(0);
        let norms = |layer: &Layer<E>| [&layer.attended_norm, &layer.fed_norm].map(Vec::len);
        let keeps_parts = self.layers.iter().flat_map(norms).any(|length| length > 0);
        let zero = E::default();
        let work = &mut self.work;
        grow(&mut work.x, count * self.hidden, 0.0);
        grow(&mut work.sampled_x, sampled * self.hidden, 0.0);
        grow(&mut work.qkv, count * projected, 0.0);
        grow(&mut work.attended, count * self.queries, zero);
        let channels =
            self.layers.iter().filter_map(|it| Some(it.recurrence.as_ref()?.spec.channels()));
        grow(&mut work.mixed, count * channels.max().unwrap_or(0), 0.0);
        if keeps_parts {
            grow(&mut work.part, count * self.hidden, 0.0);
        }
        let of_experts = self.routing.per_token as usize * self.routing.intermediate as usize;
        grow(&mut work.gated, count * self.intermediate.max(of_experts), zero);
        if self.routing.count > 0 {
            let sizes = (count, self.hidden, self.team.threads);
            work.experts.make_room(&self.routing, sizes);
        }
        self.make_room(count);
        let work = &mut self.work;
        work.best.clear();
        let picks = step.logits.is_null() && step.states.is_null() && step.vectors.is_null();
        if picks {
            work.best.resize(self.team.threads * sampled, Best::NONE);
        }
        let x = self.work.x.as_mut_ptr();
        let team = self.team.clone();
        let view = Step {
            logits: step.logits,
            states: step.states,
            vectors: step.vectors,
            times: step.times,
            decodes,
            ..self.view(x, &chosen, groups)
        };
        run(&team, &view);
        if picks {
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

    /// Logits `[count, vocabulary]` of states `[count, hidden]` that a step has given.
    ///
    /// # Safety
    /// As [`Self::step`]; `states` and `logits` have room for so many.
    pub(crate) unsafe fn head(
        &mut self,
        (states, count): (*const f32, usize),
        logits: *mut f32,
        run: impl Fn(&Team, &Step<'_, E>),
    ) {
        self.work.tokens.clear();
        self.work.state_rows.clear();
        self.make_room(count);
        let team = self.team.clone();
        // Only read, as a step without tokens is not added to.
        let view = Step { logits, given: count, ..self.view(states.cast_mut(), &[], None) };
        run(&team, &view);
    }

    /// Has room for normalised rows, and makes the queues ready.
    fn make_room(&mut self, count: usize) {
        let widest = self.hidden.max(self.intermediate).max(self.queries);
        let rows = count.max(self.team.threads * FEW);
        let of_experts = self.hidden.max(self.routing.intermediate as usize);
        let chosen = count * self.routing.per_token as usize;
        let numbers = (rows * widest).max(chosen * of_experts);
        let work = &mut self.work;
        grow(&mut work.normed, rows * self.hidden, E::default());
        grow(&mut work.arranged, numbers, 0.0);
        if self.quantised {
            grow(&mut work.codes, numbers, 0);
            grow(&mut work.code_scales, numbers / SHARED, 0.0);
            grow(&mut work.code_sums, numbers / SHARED, 0);
        }
        work.queues.iter_mut().for_each(Queue::reset);
    }

    /// A step over the buffers as they are, which gives nothing yet.
    fn view<'a>(
        &'a mut self,
        x: *mut f32,
        sampled: &'a [usize],
        groups: Option<&'a Groups<'a>>,
    ) -> Step<'a, E> {
        let work = &mut self.work;
        let sizes = (work.tokens.len(), self.team.threads, self.intermediate);
        let attends = |kind: &'a mut Kind| Attends {
            shape: kind.shape,
            norm_rows: kind.spec.norm_rows == 1,
            gate: kind.spec.gate == 1,
            half: kind.spec.rotary_dim as usize / 2,
            cos: kind.spec.cos,
            sin: kind.spec.sin,
            units: kind.work.shared(),
            last_units: kind.last.shared(),
        };
        Step {
            x,
            sampled_x: work.sampled_x.as_mut_ptr(),
            normed: work.normed.as_mut_ptr(),
            qkv: work.qkv.as_mut_ptr(),
            attended: work.attended.as_mut_ptr(),
            mixed: work.mixed.as_mut_ptr(),
            gated: work.gated.as_mut_ptr(),
            part: work.part.as_mut_ptr(),
            experts: work.experts.buffers(),
            routing: self.routing,
            best: work.best.as_mut_ptr(),
            scratch: work.scratch.as_mut_ptr(),
            arranged: work.arranged.as_mut_ptr(),
            codes: CodesRoom {
                codes: work.codes.as_mut_ptr(),
                scales: work.code_scales.as_mut_ptr(),
                sums: work.code_sums.as_mut_ptr(),
            },
            logits: std::ptr::null_mut(),
            states: std::ptr::null_mut(),
            vectors: std::ptr::null_mut(),
            times: std::ptr::null_mut(),
            tokens: &work.tokens,
            state_rows: &work.state_rows,
            attentions: self.kinds.iter_mut().map(attends).collect(),
            queues: &work.queues,
            sampled,
            given: 0,
            decodes: false,
            hidden: self.hidden,
            eps: self.eps,
            activation: self.activation,
            scales: self.scales,
            logit_scales: self.logit_scales,
            mean_norms: self.mean_norms,
            query_scales: self.query_scales,
            final_norm: &self.final_norm,
            head: self.head.matrix(),
            layers: &self.layers,
            adapted: groups.map(|groups| work.adapters.prepare(groups, sizes)),
        }
    }

    /// Finds every token and its page, and cuts the attention into units; gives the tokens that
    /// sample.
    unsafe fn lay_out(&mut self, step: &StepSpec) -> Result<Vec<usize>, StepError> {
        let count = step.rows as usize;
        // SAFETY: the caller's description.
        let column = |from: *const i64| unsafe { std::slice::from_raw_parts(from, count) };
        let (slots, starts, lengths) = (column(step.slot), column(step.start), column(step.length));
        let work = &mut self.work;
        work.tokens.clear();
        work.state_rows.clear();
        for kind in &mut self.kinds {
            kind.work.clear();
            kind.last.clear();
        }
        let page_size = self.page_size;
        let together = count >= ROWS_A_MEMBER * self.team.threads;
        let mut rows = Vec::with_capacity(count);
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
                let is_given = position < until;
                let input = match is_given {
                    true => unsafe { given.cast::<E>().add(position * self.hidden) },
                    false => unsafe { self.embedding.add(id * self.hidden) },
                };
                work.tokens.push(Token { input, is_given, position, entry });
            }
            if !step.state_rows.is_null() {
                // SAFETY: two numbers for each row.
                let of = |at: usize| unsafe { *step.state_rows.add(2 * row + at) as usize };
                let (source, target) = (of(0), of(1));
                work.state_rows.push(StateRow { first, length, source, target });
            }
            let held = Held { pages, kv_head: 0 };
            let queries =
                Queries { token: first, to: first, tokens: length, position: start, held };
            for Kind { shape, work, .. } in &mut self.kinds {
                work.add(shape, queries, together);
            }
            rows.push(queries);
        }
        // SAFETY: the caller's description.
        let sample = unsafe { std::slice::from_raw_parts(step.sample, step.sampled as usize) };
        let chosen: Vec<usize> = sample.iter().map(|&token| token as usize).collect();
        let of_last = self.layers.last().map_or(0, |layer| layer.attention);
        if let Some(Kind { shape, last, .. }) = self.kinds.get_mut(of_last)
            && chosen.len() < work.tokens.len()
        {
            let mut to = 0;
            for row in rows {
                // Those that follow one another are computed together.
                let end = row.token + row.tokens;
                while let Some(&token) = chosen.get(to).filter(|&&token| token < end) {
                    let run = (token..end).zip(&chosen[to..]).take_while(|(a, b)| a == *b).count();
                    let position = row.position + token - row.token;
                    let queries = Queries { token, to, tokens: run, position, held: row.held };
                    last.add(shape, queries, together);
                    to += run;
                }
            }
        }
        for Kind { shape, work, last, .. } in &mut self.kinds {
            work.arrange(shape);
            last.arrange(shape);
        }
        Ok(chosen)
    }
}
