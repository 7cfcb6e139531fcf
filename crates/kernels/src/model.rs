//! A decoder with its buffers, and the preparation of a step.

use std::sync::Arc;

use crate::adapters::{self, Groups};
use crate::attention::{self, Queries, Scratch};
use crate::codes::{CodesRoom, SHARED};
use crate::element::Element;
use crate::experts;
use crate::latent;
use crate::layer::Layer;
use crate::matmul::{Best, GateKind, LogitScales};
use crate::memory::{Room, grow};
use crate::owned::Owned;
use crate::pages::{Held, Pool, Shape};
use crate::pool::Threads;
use crate::recurrence::StateRow;
use crate::rows::{Rows, Wanted};
use crate::rows_of_layers::RowsOfLayers;
use crate::sizes::{AttentionSizes, ExpertSizes, Sizes};
use crate::step::{Attends, OTHER_QUEUES, QUEUES_A_LAYER, Scales, Step, Token};
use crate::team::{FEW, Queue};
use crate::tile::{BLOCK, NR};
use crate::weights::Weights;

/// Why a step was not computed. Nothing was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StepError {
    /// A position has no page, or its page number is outside of the pool.
    Page,
    /// A token is not in the vocabulary.
    Token,
}

/// A decoder with its buffers. Steps are computed one at a time.
pub(crate) struct Model<E> {
    weights: Arc<Weights>,
    /// The keys and values of each layer, which the layers point to.
    _pages: Vec<[Room; 2]>,
    /// The state tables of each layer, which the layers point to. They are empty if the layer has
    /// no recurrence.
    states: Vec<[Room; 2]>,
    kinds: Vec<Kind>,
    hidden: usize,
    /// The largest size, over all layers, of an attention's output, or of a recurrence's values or
    /// low ranks.
    attended: usize,
    /// The number of inputs of the widest product; products of experts, adapters and heads are not
    /// counted.
    widest: usize,
    /// The inner size of the widest layer.
    intermediate: usize,
    /// Computes the per-layer inputs of Gemma 3n and 4; `None` if the model has none.
    rows_of_layers: Option<RowsOfLayers>,
    /// The sizes of the experts; `None` if no layer has experts.
    experts: Option<ExpertSizes>,
    activation: GateKind,
    has_gates: bool,
    scales: Scales,
    logit_scales: LogitScales,
    mean_norms: bool,
    vocabulary: usize,
    page_size: usize,
    page_count: usize,
    window_page_count: usize,
    eps: f32,
    final_norm: Vec<f32>,
    /// The norm of embeddings; empty if there is none.
    embedding_norm: Vec<f32>,
    head: Option<Owned>,
    layers: Vec<Layer<E>>,
    /// True if any matrix is quantised.
    quantised: bool,
    threads: Arc<Threads>,
    work: Work<E>,
}

/// A kind of attention, and its work in the current step.
struct Kind {
    sizes: AttentionSizes,
    shape: Shape,
    work: attention::Work,
    /// The work of the last layer, if that layer has this kind of attention and computes only the
    /// sampled tokens.
    last: attention::Work,
}

impl Kind {
    fn new(sizes: &AttentionSizes, of: &Sizes) -> Self {
        let shape = Shape {
            heads: sizes.heads,
            kv_heads: sizes.key_heads(),
            head_dim: sizes.head_dim,
            page_size: of.page_size,
            scale: sizes.scale,
            coded: of.kv_codes,
            window: sizes.window.unwrap_or(0),
            chunk: sizes.chunk.unwrap_or(0),
            both_ways: sizes.both_ways,
            cap: sizes.cap.unwrap_or(0.0),
            latent: sizes.latent.map_or(0, |latent| latent.rank),
        };
        let (work, last) = (attention::Work::default(), attention::Work::default());
        Self { sizes: *sizes, shape, work, last }
    }

    /// The part of the page tables: 0 is the main part, 1 the window part.
    fn part(&self) -> usize {
        usize::from(self.sizes.in_window_part)
    }
}

/// With at least this many rows per member, the heads of a row are not divided among members.
const ROWS_A_MEMBER: usize = 4;

/// Buffers of a step, reused from step to step.
#[derive(Default)]
struct Work<E> {
    /// The residual stream `[tokens, hidden]`.
    x: Vec<f32>,
    /// The residual stream of the sampled tokens, once the last layer needs no other tokens.
    sampled_x: Vec<f32>,
    normed: Vec<E>,
    qkv: Vec<f32>,
    attended: Vec<E>,
    mixed: Vec<f32>,
    /// Outputs of the low-rank down projections of gates and decays, and of their up projections.
    low_ranks: Vec<E>,
    low: Vec<f32>,
    gated: Vec<E>,
    /// The output of a component that is followed by a norm, `[tokens, hidden]`.
    part: Vec<f32>,
    /// Per-layer inputs `[tokens, layers, size]`.
    inputs: Vec<f32>,
    tokens: Vec<Token<E>>,
    state_rows: Vec<StateRow>,
    experts: experts::Work<E>,
    latent: latent::Work<E>,
    adapters: adapters::Buffers<E>,
    queues: Vec<Queue>,
    best: Vec<Best>,
    scratch: Vec<Scratch<E>>,
    /// Activations in the tiles' order, in numbers of the kernel's type.
    arranged: Vec<f32>,
    /// Activations as codes for quantised matrices, with their scales and sums.
    codes: Vec<i8>,
    code_scales: Vec<f32>,
    code_sums: Vec<i32>,
}

impl<E: Element> Model<E> {
    /// Creates a model of the element type `E`. The caller must have checked sizes and weights.
    pub(crate) fn new(
        sizes: &Sizes,
        weights: Arc<Weights>,
        mut pages: Vec<[Room; 2]>,
        mut states: Vec<[Room; 2]>,
        threads: Arc<Threads>,
    ) -> Self {
        let kinds = sizes.attentions.iter().map(|kind| Kind::new(kind, sizes));
        let kinds: Vec<Kind> = kinds.collect();
        let hidden = sizes.hidden;
        let pool = |[keys, values]: &mut [Room; 2]| Pool {
            keys: keys.as_mut_ptr().cast(),
            values: values.as_mut_ptr().cast(),
        };
        let pools: Vec<Pool<E>> = pages.iter_mut().map(pool).collect();
        let of_layers = weights.layers.iter().zip(&mut states).enumerate();
        let layers: Vec<Layer<E>> = of_layers
            .map(|(number, (layer, states))| {
                Layer::new(layer, sizes, pools[weights.pages_of(sizes, number)], states)
            })
            .collect();
        let embedding_norm = weights.embedding_norm.as_ref().map(|norm| sizes.read_norm::<E>(norm));
        let count = layers.len();
        let rows_of_layers =
            weights.layer_inputs.as_ref().map(|of| RowsOfLayers::new::<E>(of, sizes, count));
        let of_head = (sizes.vocabulary, hidden);
        let head = weights.head.as_ref().map(|head| Owned::new::<E>(head, of_head, None));
        let mut others = head.iter().chain(rows_of_layers.iter().map(|of| &of.projection));
        let quantised = others.any(Owned::is_quantised) || layers.iter().any(Layer::is_quantised);
        let has_experts = layers.iter().any(|layer| layer.mixture.is_some());
        let experts = sizes.experts.filter(|_| has_experts);
        let mut work = Work { scratch: Vec::new(), ..Work::default() };
        let shapes: Vec<Shape> = kinds.iter().map(|kind| kind.shape).collect();
        work.scratch.resize_with(threads.count(), || Scratch::new(&shapes));
        work.queues.resize_with(QUEUES_A_LAYER * layers.len() + OTHER_QUEUES, Queue::default);
        let of_heads = sizes.attentions.iter().map(AttentionSizes::attended);
        let of_states = layers.iter().filter_map(Layer::recurrence);
        let of_states = of_states.map(|it| it.sizes.values().max(it.sizes.low_rank));
        let factors = &sizes.factors;
        let attended = of_heads.chain(of_states).max().unwrap_or(0);
        let intermediate = sizes
            .intermediate
            .max(experts.map_or(0, |experts| experts.shared))
            .max(sizes.layer_inputs.map_or(0, |of| of.size));
        let widest = layers.iter().map(Layer::widest_input).max().unwrap_or(0);
        let of_experts = experts.map_or(0, |of| of.latent);
        Self {
            attended,
            widest: widest.max(hidden).max(intermediate).max(of_experts),
            kinds,
            hidden,
            intermediate,
            rows_of_layers,
            experts,
            activation: sizes.gate,
            has_gates: sizes.gated,
            scales: Scales {
                embeddings: factors.embeddings,
                inputs: factors.inputs,
                residuals: factors.residuals,
            },
            logit_scales: LogitScales {
                scale: factors.logits,
                cap: factors.logit_cap.unwrap_or(0.0),
            },
            mean_norms: sizes.mean_norms,
            vocabulary: sizes.vocabulary,
            page_size: sizes.page_size,
            page_count: sizes.page_count,
            window_page_count: sizes.window_page_count,
            eps: sizes.eps,
            final_norm: sizes.read_norm::<E>(&weights.final_norm),
            embedding_norm: embedding_norm.unwrap_or_default(),
            head,
            layers,
            quantised,
            threads,
            work,
            weights,
            _pages: pages,
            states,
        }
    }

    /// The state tables of each layer.
    pub(crate) fn states(&mut self) -> &mut [[Room; 2]] {
        &mut self.states
    }

    /// Computes a step: writes the keys and values of every row, and the wanted outputs of the
    /// sampled tokens. Adapters change the rows of their `groups`.
    ///
    /// # Safety
    /// Rows must lie within the tables and within the model's positions. No two rows may share a
    /// state, and the wanted outputs must have room. Adapters must have the model's sizes. `run`
    /// must make every member of the team compute its share.
    pub(crate) unsafe fn step(
        &mut self,
        rows: &Rows<'_>,
        wanted: Wanted<'_>,
        groups: Option<&Groups<'_>>,
        run: impl Fn(&Threads, &Step<'_, E>),
    ) -> Result<(), StepError> {
        // SAFETY: the caller upholds the contract.
        let chosen = unsafe { self.lay_out(rows)? };
        let count = self.work.tokens.len();
        let sampled = chosen.len();
        let decodes = count == rows.slot.len() && count == sampled;
        let of_input = self.rows_of_layers.as_ref().map_or(0, |of| of.size);
        let widths = self.layers.iter().map(Layer::widest);
        let projected = widths.chain([of_input]).max().unwrap_or(0);
        let keeps_parts = self.layers.iter().any(Layer::keeps_parts);
        let zero = E::default();
        let work = &mut self.work;
        grow(&mut work.x, count * self.hidden, 0.0);
        grow(&mut work.sampled_x, sampled * self.hidden, 0.0);
        // Vector operations on per-layer inputs and gates write past the end of the last row.
        grow(&mut work.qkv, count * projected + NR, 0.0);
        grow(&mut work.inputs, count * self.layers.len() * of_input + NR, 0.0);
        grow(&mut work.attended, count * self.attended, zero);
        let channels = self.layers.iter().filter_map(|it| Some(it.recurrence()?.sizes.channels()));
        grow(&mut work.mixed, count * channels.max().unwrap_or(0), 0.0);
        let lows = self.layers.iter().filter_map(|layer| layer.recurrence()?.low.as_ref());
        let ranks = |[gates, _]: &[Owned; 2]| gates.inputs;
        let results = |[gates, decays]: &[Owned; 2]| gates.outputs + decays.outputs;
        let low = lows.clone().map(ranks).max().unwrap_or(0);
        grow(&mut work.low_ranks, count * 2 * low, zero);
        grow(&mut work.low, count * lows.map(results).max().unwrap_or(0), 0.0);
        if keeps_parts {
            grow(&mut work.part, count * self.hidden, 0.0);
        }
        let of_experts = self.experts.map_or(0, |of| of.per_token * of.intermediate);
        grow(&mut work.gated, count * self.intermediate.max(of_experts), zero);
        if let Some(experts) = &self.experts {
            let sizes = (count, self.hidden, self.threads.count());
            work.experts.make_room(experts, sizes);
        }
        for kind in &self.kinds {
            work.latent.make_room(&kind.sizes, (count, self.threads.count()));
        }
        self.make_room(count);
        let work = &mut self.work;
        work.best.clear();
        if matches!(wanted, Wanted::Best(..)) {
            work.best.resize(self.threads.count() * sampled, Best::NONE);
        }
        let x = self.work.x.as_mut_ptr();
        let threads = self.threads.clone();
        let mut view = Step { decodes, ..self.view(x, &chosen, groups) };
        let best = match wanted {
            Wanted::Logits(logits) => {
                view.logits = logits.as_mut_ptr();
                None
            }
            Wanted::States(states) => {
                view.states = states.as_mut_ptr();
                None
            }
            Wanted::Vectors(vectors) => {
                view.vectors = vectors.as_mut_ptr();
                None
            }
            Wanted::Best(best, finite) => Some((best, finite)),
        };
        run(&threads, &view);
        if let Some((tokens, finite)) = best {
            for (row, (token, finite)) in tokens.iter_mut().zip(finite).enumerate() {
                let mut best = Best::NONE;
                for member in self.work.best.chunks_exact(sampled) {
                    best.merge(member[row]);
                }
                *token = best.output.cast_signed();
                *finite = u8::from(best.finite);
            }
        }
        Ok(())
    }

    /// Computes the logits `[count, vocabulary]` of states `[count, hidden]` that a step has
    /// computed.
    ///
    /// # Safety
    /// The conditions of [`Self::step`] must hold. `states` must have `count` rows, and `logits`
    /// room for as many.
    pub(crate) unsafe fn head(
        &mut self,
        (states, count): (*const f32, usize),
        logits: *mut f32,
        run: impl Fn(&Threads, &Step<'_, E>),
    ) {
        self.work.tokens.clear();
        self.work.state_rows.clear();
        self.make_room(count);
        let threads = self.threads.clone();
        // The states are only read: a step without tokens adds nothing to them.
        let view = Step { logits, given: count, ..self.view(states.cast_mut(), &[], None) };
        run(&threads, &view);
    }

    /// Reserves memory for normalised rows, and resets the queues.
    fn make_room(&mut self, count: usize) {
        let rows = count.max(self.threads.count() * FEW);
        let of_experts =
            self.experts.map_or(0, |of| of.per_token * of.states(self.hidden).max(of.intermediate));
        let numbers = (rows * self.widest).max(count * of_experts);
        let of_heads = self.kinds.iter().map(|kind| kind.sizes.latent_inputs()).max().unwrap_or(0);
        let work = &mut self.work;
        grow(&mut work.normed, rows * self.hidden, E::default());
        grow(&mut work.arranged, numbers.max(count * of_heads), 0.0);
        if self.quantised {
            grow(&mut work.codes, numbers, 0);
            grow(&mut work.code_scales, numbers / SHARED, 0.0);
            grow(&mut work.code_sums, numbers / SHARED, 0);
        }
        work.queues.iter_mut().for_each(Queue::reset);
    }

    /// Creates the view of a step over the current buffers, without outputs yet.
    fn view<'a>(
        &'a mut self,
        x: *mut f32,
        sampled: &'a [usize],
        groups: Option<&'a Groups<'a>>,
    ) -> Step<'a, E> {
        let work = &mut self.work;
        let sizes = (work.tokens.len(), self.threads.count(), self.intermediate);
        let weights = &*self.weights;
        let attends = |kind: &'a mut Kind| {
            let angles = kind.sizes.angles.map(|number| &weights.angles[number]);
            let (cos, sin) = angles.map_or((&[][..], &[][..]), |(cos, sin)| (&cos[..], &sin[..]));
            Attends {
                shape: kind.shape,
                part: kind.part(),
                norm_rows: kind.sizes.norm_rows,
                gate: kind.sizes.gate,
                keys_are_values: kind.sizes.keys_are_values,
                value_norm: kind.sizes.value_norm,
                query_scales: if kind.sizes.scaled_queries { &weights.query_scales } else { &[] },
                half: kind.sizes.rotary_dim / 2,
                cos,
                sin,
                units: kind.work.shared(),
                last_units: kind.last.shared(),
            }
        };
        Step {
            x,
            sampled_x: work.sampled_x.as_mut_ptr(),
            normed: work.normed.as_mut_ptr(),
            qkv: work.qkv.as_mut_ptr(),
            attended: work.attended.as_mut_ptr(),
            mixed: work.mixed.as_mut_ptr(),
            low_ranks: work.low_ranks.as_mut_ptr(),
            low: work.low.as_mut_ptr(),
            gated: work.gated.as_mut_ptr(),
            part: work.part.as_mut_ptr(),
            inputs: work.inputs.as_mut_ptr(),
            experts: work.experts.buffers(),
            latent: work.latent.buffers(),
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
            has_gates: self.has_gates,
            scales: self.scales,
            logit_scales: self.logit_scales,
            mean_norms: self.mean_norms,
            final_norm: &self.final_norm,
            embedding_norm: &self.embedding_norm,
            head: self.head.as_ref().map(Owned::matrix),
            layers: &self.layers,
            rows_of_layers: self.rows_of_layers.as_ref(),
            adapted: groups.map(|groups| work.adapters.prepare(groups, sizes)),
        }
    }

    /// Locates every token and its page, and divides the attention into units. Returns the sampled
    /// tokens.
    ///
    /// # Safety
    /// The conditions of [`Self::step`] hold.
    unsafe fn lay_out(&mut self, step: &Rows<'_>) -> Result<Vec<usize>, StepError> {
        let work = &mut self.work;
        work.tokens.clear();
        work.state_rows.clear();
        for kind in &mut self.kinds {
            kind.work.clear();
            kind.last.clear();
        }
        let (page_size, hidden) = (self.page_size, self.hidden);
        let embedding = self.weights.embedding.as_ptr().cast::<E>();
        let together = step.slot.len() >= ROWS_A_MEMBER * self.threads.count();
        let mut rows = Vec::with_capacity(step.slot.len());
        let columns = step.slot.iter().zip(step.start).zip(step.length);
        for (row, ((&slot, &start), &length)) in columns.enumerate() {
            let (slot, start, length) = (slot as usize, start as usize, length as usize);
            let given = step.given.get(row).copied().flatten();
            let pages = &step.pages[slot * step.page_stride..][..step.page_stride];
            let ids = &step.tokens[slot * step.token_stride..][..step.token_stride];
            let page_of = |index: usize| {
                usize::try_from(pages[index])
                    .ok()
                    .filter(|&page| page < self.page_count)
                    .ok_or(StepError::Page)
            };
            for index in 0..start / page_size {
                page_of(index)?;
            }
            let window = match self.window_page_count {
                0 => &[][..],
                _ => &step.window_pages[slot * step.page_stride..][..step.page_stride],
            };
            let window_page_of = |index: usize| {
                let page = usize::try_from(window[index]).ok();
                page.filter(|&page| page < self.window_page_count).ok_or(StepError::Page)
            };
            let in_window = self.kinds.iter().filter(|kind| kind.sizes.in_window_part);
            if let Some(seen) = in_window.map(|kind| kind.shape.first_seen(start)).min() {
                // Blocks of positions are read whole, so their pages must exist.
                for &page in &window[seen / BLOCK * BLOCK / page_size..seen / page_size] {
                    if !(0..=self.window_page_count as i32).contains(&page) {
                        return Err(StepError::Page);
                    }
                }
                for index in seen / page_size..start / page_size {
                    window_page_of(index)?;
                }
            }
            let first = work.tokens.len();
            for (position, &id) in (start..).zip(&ids[start..start + length]) {
                let id = usize::try_from(id).ok().filter(|&id| id < self.vocabulary);
                let entry = |page: usize| page * page_size + position % page_size;
                let of_window = match window {
                    [] => 0,
                    _ => entry(window_page_of(position / page_size)?),
                };
                let entries = [entry(page_of(position / page_size)?), of_window];
                let id = id.ok_or(StepError::Token)?;
                let given = given.filter(|given| position < given.until);
                // SAFETY: the address is that of a row of the given inputs, or of the embedding.
                let input = match given {
                    Some(given) => unsafe {
                        given.inputs.as_ptr().cast::<E>().add(position * hidden)
                    },
                    None => unsafe { embedding.add(id * hidden) },
                };
                let is_given = given.is_some();
                // If an input embedding was given in place of a token, the per-layer input is that
                // of the padding token, as in transformers.
                let id = if is_given { 0 } else { id };
                work.tokens.push(Token { id, input, is_given, position, entries });
            }
            if let Some(&[source, target]) = step.states.get(row) {
                let (source, target) = (source as usize, target as usize);
                work.state_rows.push(StateRow { first, length, source, target });
            }
            let held = [pages, window].map(|pages| Held { pages: pages.as_ptr(), kv_head: 0 });
            let queries =
                Queries { token: first, to: first, tokens: length, position: start, held: held[0] };
            for kind in &mut self.kinds {
                let held = held[kind.part()];
                kind.work.add(&kind.shape, Queries { held, ..queries }, start + length, together);
            }
            rows.push((queries, held));
        }
        let chosen: Vec<usize> = step.sample.iter().map(|&token| token as usize).collect();
        let of_last = self.layers.last().map_or(0, |layer| layer.attention);
        if let Some(kind) = self.kinds.get_mut(of_last)
            && chosen.len() < work.tokens.len()
        {
            let (part, mut to) = (kind.part(), 0);
            let Kind { shape, last, .. } = kind;
            for (row, held) in rows {
                // Consecutive tokens are computed together.
                let end = row.token + row.tokens;
                while let Some(&token) = chosen.get(to).filter(|&&token| token < end) {
                    let run = (token..end).zip(&chosen[to..]).take_while(|(a, b)| a == *b).count();
                    let position = row.position + token - row.token;
                    let held = held[part];
                    let queries = Queries { token, to, tokens: run, position, held };
                    last.add(shape, queries, row.position + row.tokens, together);
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
