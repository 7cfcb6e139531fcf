//! A decoder for callers in Rust: the C interface with its promises kept by types and checks.
//!
//! Weights, pages and tables have the stated form, or [`Decoder::new`] and [`Decoder::step`] return
//! the fault. Every call here is safe.

mod experts;
mod recurrence;
mod sizes;

use std::collections::HashSet;
use std::ffi::c_void;
use std::sync::Arc;

use crate::adapters::{AdapterMatrices, AdapterSizes, Groups};
use crate::any_model::AnyModel;
use crate::dispatch::Level;
use crate::experts::{ExpertsSpec, RoutingSpec};
use crate::layer::{AttentionSpec, LayerSpec};
use crate::matmul::Activation;
use crate::memory::Room;
use crate::model::{ModelSpec, StepError, StepSpec};
use crate::packing::{Dtype, Packing, Storage, Unfit, aligned, unfit};
use crate::pool::Threads;
use crate::recurrence::RecurrenceSpec;
use crate::team::{Kind, Team};

pub use experts::{ExpertBiases, ExpertMatrices, ExpertSizes};
pub use recurrence::{RecurrenceSizes, RecurrenceWeights, StateGate};
pub use sizes::{AttentionSizes, Factors, GateKind, Sizes};

/// Memory of weights, which other objects may read too.
pub type Bytes = Arc<Room>;

/// A matrix in the order of the kernels.
#[derive(Clone)]
pub struct Matrix {
    /// The number format of the matrix's products.
    pub storage: Storage,
    /// The output of [`Packing::pack`].
    pub packed: Bytes,
}

/// One layer. Vectors are of the model's type.
#[derive(Clone)]
pub struct Layer {
    /// The number of its kind of attention in [`Sizes::attentions`]. One that does not attend has
    /// any.
    pub attention: usize,
    /// What the layer has in place of attention; `None`: it attends. `qkv` then has the rows of
    /// queries, keys, values, gates, steps and strengths, and `output` has the values as inputs.
    pub recurrence: Option<RecurrenceWeights>,
    /// True if both parts read the states in front of the layer, normalised by `input_norm`.
    pub parallel: bool,
    /// The norm before the attention, `[hidden]`.
    pub input_norm: Option<Bytes>,
    /// The norm of the attention's output, `[hidden]`.
    pub attended_norm: Option<Bytes>,
    /// The norm of the feed-forward part's output, `[hidden]`.
    pub fed_norm: Option<Bytes>,
    /// A score of each query head that takes weight and gives nothing, `[heads]`.
    pub sinks: Option<Bytes>,
    /// Queries, keys and values, `[(heads + 2 * kv_heads) * head_dim, hidden]`, and behind them the
    /// gates, if there are any.
    pub qkv: Matrix,
    /// The bias of queries, keys and values, one for each output.
    pub qkv_bias: Option<Bytes>,
    /// The norms of query heads and of key heads, `[head_dim]` each, or of all heads of a position.
    pub head_norms: Option<(Bytes, Bytes)>,
    /// The attention's output, `[hidden, heads * head_dim]`.
    pub output: Matrix,
    /// The bias of the attention's output, `[hidden]`.
    pub output_bias: Option<Bytes>,
    /// The norm before the feed-forward part, `[hidden]`.
    pub post_norm: Option<Bytes>,
    /// The part behind the attention.
    pub feed: FeedForward,
}

/// The part of a layer behind the attention.
#[derive(Clone)]
pub enum FeedForward {
    /// One gated part for every token.
    Dense(Gated),
    /// Many gated parts, of which each token has some.
    Experts(ExpertMatrices),
}

/// A gated feed-forward part.
#[derive(Clone)]
pub struct Gated {
    /// Gates and then the gated rows, `[2 * intermediate, hidden]`, interleaved.
    pub gate_up: Matrix,
    /// The bias of `gate_up`, `[2 * intermediate]`.
    pub gate_up_bias: Option<Bytes>,
    /// The second product, `[hidden, intermediate]`.
    pub down: Matrix,
    /// The bias of `down`, `[hidden]`.
    pub down_bias: Option<Bytes>,
}

/// All weights of a decoder.
pub struct Weights {
    /// The embedding, `[vocabulary, hidden]`, of the model's type.
    pub embedding: Bytes,
    /// The norm behind the last layer, `[hidden]`.
    pub final_norm: Bytes,
    /// The output head, `[vocabulary, hidden]`; `None`: the decoder gives vectors only.
    pub head: Option<Matrix>,
    /// The layers, in order.
    pub layers: Vec<Layer>,
    /// The cosines and the sines of the angles at each position, `[positions, rotary_dim / 2]`.
    pub angles: Vec<(Vec<f32>, Vec<f32>)>,
    /// Factors of queries, `[positions]`; empty: there are none.
    pub query_scales: Vec<f32>,
}

/// A row of a step whose first inputs come from the caller.
#[derive(Clone, Copy)]
pub struct Given<'a> {
    /// Inputs of the slot from position 0 on, `[until, hidden]` of the model's type.
    pub inputs: &'a [u8],
    /// The position from which on inputs are the embedding's.
    pub until: usize,
}

/// A step's rows and the tables that they name.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// The slot of each row.
    pub slot: &'a [i64],
    /// The first position of each row.
    pub start: &'a [i64],
    /// The number of positions of each row.
    pub length: &'a [i64],
    /// The given inputs of each row. Empty: all inputs are the embedding's.
    pub given: &'a [Option<Given<'a>>],
    /// The adapter that changes each row. Empty: none changes any.
    pub adapters: &'a [Option<Arc<AdapterMatrices>>],
    /// The tokens of slots, `[slots, token_stride]`.
    pub tokens: &'a [i32],
    /// The number of positions of a slot.
    pub token_stride: usize,
    /// The pages of slots, `[slots, page_stride]`.
    pub pages: &'a [i32],
    /// The number of pages of a slot.
    pub page_stride: usize,
    /// The tokens with a result. They are numbered over all rows, and ascend.
    pub sample: &'a [i64],
    /// The row of the states' tables before each row, and that behind its last token. Empty without
    /// recurrent layers.
    pub states: &'a [[i64; 2]],
}

/// The output of a step for the tokens in [`Rows::sample`].
pub enum Wanted<'a> {
    /// Logits, `[sampled, vocabulary]`.
    Logits(&'a mut [f32]),
    /// The first of the largest logits, and 1 if all are finite, `[sampled]` each.
    Best(&'a mut [i32], &'a mut [u8]),
    /// States for [`Decoder::head`], `[sampled, hidden]`.
    States(&'a mut [f32]),
    /// The final states, normalised, `[sampled, hidden]`.
    Vectors(&'a mut [f32]),
}

/// A decoder that is ready to compute.
pub struct Decoder {
    model: AnyModel,
    sizes: Sizes,
    /// The weights that the model points to.
    weights: Weights,
    adapter_sizes: AdapterSizes,
    _pages: Vec<[Room; 2]>,
    /// The states' tables of each layer: last inputs of the convolution, and heads' states. Both
    /// are empty where the layer attends.
    states: Vec<[Room; 2]>,
    /// Rows of these tables.
    state_rows: usize,
}

// SAFETY: a model has pointers to what it owns through `weights`, `_pages` and `states`, which any
// thread may read and write in turn.
unsafe impl Send for Decoder {}

impl Decoder {
    /// A decoder that computes with `threads`. `pages` are keys and values of each layer, of
    /// [`Sizes::pool_bytes`] each for its kind of attention, and empty where it does not attend.
    /// The states of recurrent layers have `state_rows` rows.
    ///
    /// # Errors
    /// A part has a wrong size, or the kernels can't compute it.
    pub fn new(
        sizes: Sizes,
        weights: Weights,
        mut pages: Vec<[Room; 2]>,
        state_rows: usize,
        threads: &Arc<Threads>,
    ) -> Result<Self, Unfit> {
        sizes.check()?;
        weights.check(&sizes)?;
        let fits = |(layer, rooms): (&Layer, &[Room; 2])| {
            let bytes = match &layer.recurrence {
                None => sizes.pool_bytes(layer.attention),
                Some(_) => 0,
            };
            rooms.iter().all(|room| room.len() == bytes)
        };
        if pages.len() != weights.layers.len() || !weights.layers.iter().zip(&pages).all(fits) {
            return unfit("the pages are not of this model");
        }
        let mut states = tables(&weights.layers, state_rows)?;
        let recurrences: Vec<Option<RecurrenceSpec>> = weights
            .layers
            .iter()
            .zip(&mut states)
            .map(|(layer, tables)| layer.recurrence.as_ref().map(|it| it.spec(tables)))
            .collect();
        let address = |bytes: &Bytes| bytes.as_ptr().cast::<c_void>();
        let optional = |bytes: &Option<Bytes>| bytes.as_ref().map_or(std::ptr::null(), address);
        let layer = |((layer, [keys, values]), recurrence): (
            (&Layer, &mut [Room; 2]),
            &Option<RecurrenceSpec>,
        )| {
            let (dense, experts) = match &layer.feed {
                FeedForward::Dense(dense) => (Some(dense), ExpertsSpec::NONE),
                FeedForward::Experts(experts) => (experts.shared.as_ref(), experts.spec()),
            };
            let norm = |norm: Option<&Bytes>| norm.map_or(std::ptr::null(), address);
            let packed =
                |of: Option<&Matrix>| of.map_or(std::ptr::null(), |of| address(&of.packed));
            let number = |of: Option<&Matrix>| of.map_or(0, |of| of.storage.number());
            let bias = |of: Option<&Option<Bytes>>| of.map_or(std::ptr::null(), optional);
            let (gate_up, down) = (dense.map(|of| &of.gate_up), dense.map(|of| &of.down));
            LayerSpec {
                input_norm: optional(&layer.input_norm),
                qkv: address(&layer.qkv.packed),
                qkv_bias: optional(&layer.qkv_bias),
                q_norm: norm(layer.head_norms.as_ref().map(|(norm, _)| norm)),
                k_norm: norm(layer.head_norms.as_ref().map(|(_, norm)| norm)),
                output: address(&layer.output.packed),
                output_bias: optional(&layer.output_bias),
                post_norm: optional(&layer.post_norm),
                attended_norm: optional(&layer.attended_norm),
                fed_norm: optional(&layer.fed_norm),
                sinks: optional(&layer.sinks),
                attention: layer.attention as u32,
                parallel: layer.parallel.into(),
                gate_up: packed(gate_up),
                gate_up_bias: bias(dense.map(|of| &of.gate_up_bias)),
                down: packed(down),
                down_bias: bias(dense.map(|of| &of.down_bias)),
                keys: keys.as_mut_ptr().cast(),
                values: values.as_mut_ptr().cast(),
                formats: [Some(&layer.qkv), Some(&layer.output), gate_up, down].map(number),
                experts,
                recurrence: recurrence.as_ref().map_or(std::ptr::null(), |it| it),
            }
        };
        let layers = weights.layers.iter().zip(&mut pages).zip(&recurrences).map(layer);
        let layers: Vec<LayerSpec> = layers.collect();
        let kinds: Vec<AttentionSpec> =
            sizes.attentions.iter().map(|kind| kind.spec(&weights.angles)).collect();
        let spec = ModelSpec {
            dtype: sizes.dtype.number(),
            layers: layers.len() as u32,
            hidden: sizes.hidden as u32,
            attentions: kinds.len() as u32,
            attention: kinds.as_ptr(),
            mean_norms: sizes.mean_norms.into(),
            wide_norms: sizes.wide_norms.into(),
            activation: match sizes.gate {
                GateKind::Silu => Activation::Silu as u32,
                GateKind::Gelu => Activation::Gelu as u32,
                GateKind::GeluTanh => Activation::GeluTanh as u32,
                GateKind::ClampedSwiglu => Activation::ClampedSwiglu as u32,
            },
            embedding_scale: sizes.factors.embeddings,
            input_scale: sizes.factors.inputs,
            residual_scale: sizes.factors.residuals,
            logit_scale: sizes.factors.logits,
            logit_cap: sizes.factors.logit_cap.unwrap_or(0.0),
            intermediate: sizes.intermediate as u32,
            vocabulary: sizes.vocabulary as u32,
            positions: sizes.positions as u32,
            page_size: sizes.page_size as u32,
            page_count: sizes.page_count as u32,
            threads: threads.count() as u32,
            eps: sizes.eps,
            embedding: address(&weights.embedding),
            final_norm: address(&weights.final_norm),
            head: weights.head.as_ref().map_or(std::ptr::null(), |head| address(&head.packed)),
            head_format: weights.head.as_ref().map_or(0, |head| head.storage.number()),
            layer: layers.as_ptr(),
            routing: sizes.experts.map_or_else(RoutingSpec::default, |experts| experts.spec()),
            kv_codes: u32::from(sizes.kv_codes),
            query_scales: match weights.query_scales.is_empty() {
                true => std::ptr::null(),
                false => weights.query_scales.as_ptr(),
            },
        };
        // SAFETY: the description was checked, and what it points to lives in the decoder.
        if unsafe { !spec.is_possible() } {
            return unfit(
                "an inner dimension of a quantised matrix is no multiple of 32, or a norm stands behind experts, or subtracts the mean behind a part",
            );
        }
        let team = Team { threads: threads.count(), kind: Kind::Kept(threads.clone()) };
        // SAFETY: as above.
        let model = unsafe { AnyModel::new(&spec, team) };
        let adapter_sizes = weights.adapter_sizes(&sizes);
        Ok(Self { model, sizes, weights, adapter_sizes, _pages: pages, states, state_rows })
    }

    /// Copies a row of the states of all layers.
    ///
    /// # Errors
    /// There is no such row.
    pub fn copy_state(&mut self, from: usize, to: usize) -> Result<(), Unfit> {
        self.check_state_rows([from, to])?;
        for table in self.states.iter_mut().flatten() {
            let bytes = table.len() / self.state_rows;
            table.copy_within(from * bytes..(from + 1) * bytes, to * bytes);
        }
        Ok(())
    }

    /// Makes a row of the states of all layers that of no position.
    ///
    /// # Errors
    /// There is no such row.
    pub fn clear_state(&mut self, row: usize) -> Result<(), Unfit> {
        self.check_state_rows([row])?;
        for table in self.states.iter_mut().flatten() {
            let bytes = table.len() / self.state_rows;
            table[row * bytes..(row + 1) * bytes].fill(0);
        }
        Ok(())
    }

    fn check_state_rows(&self, rows: impl IntoIterator<Item = usize>) -> Result<(), Unfit> {
        match rows.into_iter().find(|&row| row >= self.state_rows) {
            None => Ok(()),
            Some(row) => unfit(format!("row {row} of {} rows of states", self.state_rows)),
        }
    }

    /// Checks the states of rows: each row has two, and no other row has them.
    fn check_states(&self, rows: &Rows<'_>) -> Result<(), Unfit> {
        let recurrent = self.weights.layers.iter().any(|layer| layer.recurrence.is_some());
        if rows.states.len() != if recurrent { rows.slot.len() } else { 0 } {
            return unfit("rows without their states, or states for layers that have none");
        }
        let mut seen = HashSet::new();
        for &[source, target] in rows.states {
            let distinct = if source == target { vec![source] } else { vec![source, target] };
            for row in distinct {
                let number = usize::try_from(row).unwrap_or(usize::MAX);
                self.check_state_rows([number])?;
                if !seen.insert(row) {
                    return unfit("two rows of a step with one state");
                }
            }
        }
        Ok(())
    }

    /// Computes a step. Writes keys and values of every row, and the wanted outputs.
    ///
    /// # Errors
    /// A row is outside of the tables, or of the model. Nothing is written then.
    pub fn step(&mut self, rows: &Rows<'_>, wanted: Wanted<'_>) -> Result<(), Unfit> {
        let count = rows.check(&self.sizes)?;
        self.check_states(rows)?;
        let &Sizes { vocabulary, hidden, .. } = &self.sizes;
        let sampled = rows.sample.len();
        let ascending = rows.sample.windows(2).all(|pair| pair[0] < pair[1]);
        let inside = rows.sample.iter().all(|&token| (0..count as i64).contains(&token));
        if !(ascending && inside) {
            return unfit("a result of a token that the step does not have");
        }
        if rows.slot.is_empty() {
            return Ok(());
        }
        let mut step = StepSpec {
            rows: rows.slot.len() as u64,
            slot: rows.slot.as_ptr(),
            start: rows.start.as_ptr(),
            length: rows.length.as_ptr(),
            tokens: rows.tokens.as_ptr(),
            token_stride: rows.token_stride as u64,
            pages: rows.pages.as_ptr(),
            page_stride: rows.page_stride as u64,
            sample: rows.sample.as_ptr(),
            sampled: sampled as u64,
            given: std::ptr::null(),
            given_until: std::ptr::null(),
            logits: std::ptr::null_mut(),
            best: std::ptr::null_mut(),
            finite: std::ptr::null_mut(),
            times: std::ptr::null_mut(),
            states: std::ptr::null_mut(),
            vectors: std::ptr::null_mut(),
            state_rows: match rows.states.is_empty() {
                true => std::ptr::null(),
                false => rows.states.as_flattened().as_ptr(),
            },
        };
        if self.weights.head.is_none() && !matches!(wanted, Wanted::Vectors(_)) {
            return unfit("something else than vectors of a decoder without a head");
        }
        let room = match wanted {
            Wanted::Logits(logits) => {
                step.logits = logits.as_mut_ptr();
                logits.len() == sampled * vocabulary
            }
            Wanted::Best(best, finite) => {
                (step.best, step.finite) = (best.as_mut_ptr(), finite.as_mut_ptr());
                best.len() == sampled && finite.len() == sampled
            }
            Wanted::States(states) => {
                step.states = states.as_mut_ptr();
                states.len() == sampled * hidden
            }
            Wanted::Vectors(vectors) => {
                step.vectors = vectors.as_mut_ptr();
                vectors.len() == sampled * hidden
            }
        };
        if !room {
            return unfit("too little room for what a step gives");
        }
        let inputs: Vec<*const c_void>;
        let until: Vec<i64>;
        if !rows.given.is_empty() {
            let of = |given: &Option<Given<'_>>| {
                given.map_or((std::ptr::null(), 0), |given| {
                    (given.inputs.as_ptr().cast(), given.until as i64)
                })
            };
            (inputs, until) = rows.given.iter().map(of).unzip();
            (step.given, step.given_until) = (inputs.as_ptr(), until.as_ptr());
        }
        let fits = |of: &Arc<AdapterMatrices>| of.sizes == self.adapter_sizes;
        if !rows.adapters.iter().flatten().all(fits) {
            return unfit("an adapter of another model");
        }
        let groups = Groups::of(rows.adapters, rows.length, rows.sample);
        // SAFETY: rows lie within the tables and the model's positions, what is given has so many
        // rows, adapters are of this model, and all results have room.
        let done = unsafe { self.model.step(&step, groups.as_ref()) };
        done.map_err(|error| {
            Unfit(
                match error {
                    StepError::Page => "a row has a position without a page",
                    StepError::Token => "a row has a token that is not of the vocabulary",
                }
                .into(),
            )
        })
    }

    /// Computes logits `[count, vocabulary]` of states `[count, hidden]` from a step.
    ///
    /// # Errors
    /// The numbers of logits and states differ, or there is no head.
    pub fn head(&mut self, states: &[f32], logits: &mut [f32]) -> Result<(), Unfit> {
        if self.weights.head.is_none() {
            return unfit("logits of a decoder without a head");
        }
        let count = states.len() / self.sizes.hidden;
        if states.len() != count * self.sizes.hidden
            || logits.len() != count * self.sizes.vocabulary
        {
            return unfit("too little room for logits");
        }
        // SAFETY: both have the sizes that were checked.
        unsafe { self.model.head((states.as_ptr(), count), logits.as_mut_ptr()) };
        Ok(())
    }
}

/// The tables of states, of so many rows, zero at first.
fn tables(layers: &[Layer], rows: usize) -> Result<Vec<[Room; 2]>, Unfit> {
    let of_layer =
        |layer: &Layer| layer.recurrence.as_ref().map_or([0; 2], |it| it.sizes.row_bytes());
    let sizes = layers.iter().flat_map(of_layer).map(|bytes| bytes * rows);
    let rooms = Room::parts(sizes).map_err(|error| Unfit(error.to_string()))?;
    let mut rooms = rooms.into_iter();
    let mut found = Vec::with_capacity(layers.len());
    while let (Some(inputs), Some(states)) = (rooms.next(), rooms.next()) {
        found.push([inputs, states]);
    }
    Ok(found)
}

impl Layer {
    fn check(&self, sizes: &Sizes) -> Result<(), Unfit> {
        let hidden = sizes.hidden;
        let Some(attention) = sizes.attentions.get(self.attention) else {
            return unfit("a layer of a kind of attention that is not there");
        };
        let &AttentionSizes { heads, kv_heads, head_dim, norm_rows, .. } = attention;
        let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
        let gates = if attention.gate { queries } else { 0 };
        let attending = (queries + 2 * keys + gates, queries);
        let (projected, mixed) = match &self.recurrence {
            None => attending,
            Some(recurrence) => recurrence.sizes.widths(),
        };
        self.recurrence.iter().try_for_each(|recurrence| recurrence.check(sizes))?;
        self.qkv.check(sizes.dtype, (projected, hidden), false)?;
        self.output.check(sizes.dtype, (hidden, mixed), false)?;
        match &self.feed {
            FeedForward::Dense(dense) => dense.check(sizes, sizes.intermediate)?,
            FeedForward::Experts(experts) => experts.check(sizes)?,
        }
        let [of_query, of_key] = if norm_rows { [queries, keys] } else { [head_dim; 2] };
        let norms = [&self.input_norm, &self.post_norm, &self.attended_norm, &self.fed_norm];
        let norms = norms.into_iter().flatten().map(|norm| (norm, hidden));
        let of_heads = self.head_norms.iter().flat_map(|(q, k)| [(q, of_query), (k, of_key)]);
        norms
            .chain(of_heads)
            .try_for_each(|(norm, size)| of_size(norm, size * sizes.norm_bytes()))?;
        let others =
            [(&self.qkv_bias, projected), (&self.output_bias, hidden), (&self.sinks, heads)];
        others
            .into_iter()
            .filter_map(|(it, size)| Some((it.as_ref()?, size)))
            .try_for_each(|(it, size)| of_size(it, size * sizes.dtype.bytes()))
    }
}

impl Gated {
    fn check(&self, sizes: &Sizes, intermediate: usize) -> Result<(), Unfit> {
        let &Sizes { hidden, dtype, .. } = sizes;
        self.gate_up.check(dtype, (2 * intermediate, hidden), true)?;
        self.down.check(dtype, (hidden, intermediate), false)?;
        let biases = [(&self.gate_up_bias, 2 * intermediate), (&self.down_bias, hidden)];
        biases
            .into_iter()
            .filter_map(|(bias, size)| Some((bias.as_ref()?, size)))
            .try_for_each(|(bias, size)| of_size(bias, size * dtype.bytes()))
    }
}

impl Matrix {
    pub(crate) fn check(
        &self,
        dtype: Dtype,
        (outputs, inputs): (usize, usize),
        interleaved: bool,
    ) -> Result<(), Unfit> {
        let packing = Packing { outputs, inputs, interleaved, dtype, storage: self.storage };
        of_size(&self.packed, packing.bytes()?)
    }
}

impl Weights {
    fn adapter_sizes(&self, sizes: &Sizes) -> AdapterSizes {
        let layers = self.layers.iter().map(|layer| {
            let dense = matches!(layer.feed, FeedForward::Dense(_));
            let attention = layer.recurrence.is_none().then_some(layer.attention);
            sizes.adapted_widths(attention, dense)
        });
        AdapterSizes::new(sizes.dtype, sizes.hidden, layers)
    }

    fn check(&self, sizes: &Sizes) -> Result<(), Unfit> {
        let &Sizes { dtype, hidden, vocabulary, positions, .. } = sizes;
        of_size(&self.embedding, vocabulary * hidden * dtype.bytes())?;
        of_size(&self.final_norm, hidden * sizes.norm_bytes())?;
        if let Some(head) = &self.head {
            head.check(dtype, (vocabulary, hidden), false)?;
        }
        let has_angles = |attention: &AttentionSizes| {
            let Some(number) = attention.angles else { return true };
            let wanted = positions * attention.rotary_dim / 2;
            let tables = self.angles.get(number);
            tables.is_some_and(|(cos, sin)| cos.len() == wanted && sin.len() == wanted)
        };
        if !sizes.attentions.iter().all(has_angles) {
            return unfit("angles of another number of positions");
        }
        if ![0, positions].contains(&self.query_scales.len()) {
            return unfit("factors of queries of another number of positions");
        }
        self.layers.iter().try_for_each(|layer| layer.check(sizes))
    }
}

pub(crate) fn of_size(bytes: &Bytes, wanted: usize) -> Result<(), Unfit> {
    match bytes.len() {
        found if found == wanted => Ok(()),
        found => unfit(format!("a weight of {found} bytes in place of {wanted}")),
    }
}

impl Rows<'_> {
    /// Gives the number of tokens.
    fn check(&self, sizes: &Sizes) -> Result<usize, Unfit> {
        let rows = self.slot.len();
        let columns = self.start.len() == rows
            && self.length.len() == rows
            && (self.given.is_empty() || self.given.len() == rows)
            && (self.adapters.is_empty() || self.adapters.len() == rows);
        if !columns || self.token_stride == 0 || self.page_stride == 0 {
            return unfit("columns of rows that are not equally long");
        }
        let slots =
            (self.tokens.len() / self.token_stride).min(self.pages.len() / self.page_stride) as i64;
        let most = sizes
            .positions
            .min(self.token_stride)
            .min(self.page_stride.saturating_mul(sizes.page_size)) as i64;
        let mut count = 0;
        for row in 0..rows {
            let (slot, start, length) = (self.slot[row], self.start[row], self.length[row]);
            let inside = (0..slots).contains(&slot)
                && (0..most).contains(&start)
                && (1..=most - start).contains(&length);
            if !inside {
                return unfit(format!(
                    "a row outside of {slots} slots of {most} positions: slot {slot}, start {start}, length {length}"
                ));
            }
            if let Some(Some(given)) = self.given.get(row) {
                let wanted = given.until * sizes.hidden * sizes.dtype.bytes();
                if given.inputs.len() != wanted || !aligned(given.inputs, sizes.dtype) {
                    return unfit("embeddings of another size, or at an odd address");
                }
            }
            count += length as usize;
        }
        Ok(count)
    }
}

/// The instructions in use, by name.
#[must_use]
pub fn level() -> &'static str {
    Level::current().name().to_str().unwrap_or("unknown")
}

/// Restricts the kernels to levels up to this one. False: this processor has no such level.
#[must_use]
pub fn limit(level: &std::ffi::CStr) -> bool {
    Level::limit(Some(level))
}

/// The name of the order of packed weights. Two builds of the same sources have the same name.
#[must_use]
pub fn build() -> &'static str {
    env!("FOREBAY_KERNELS_BUILD")
}
