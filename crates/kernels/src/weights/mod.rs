//! The weights of a decoder, packed in the order that the kernels read.

mod experts;
mod inputs;
mod latent;
mod matrix;
mod recurrence;

use crate::adapters::AdapterSizes;
use crate::packing::{Unfit, unfit};
use crate::sizes::{AttentionSizes, Sizes};

pub use self::experts::{BesideWeights, ExpertBiases, ExpertMatrices};
pub use self::inputs::{InputMatrices, LayerInputWeights, Table};
pub use self::latent::{LatentWeights, LowRankQuery};
pub(crate) use self::matrix::of_size;
pub use self::matrix::{Bytes, DenseMatrices, Matrix};
pub use self::recurrence::{RecurrenceWeights, StatePart};

/// The weights of one layer. Vectors are of the model's type.
#[derive(Clone)]
pub struct Layer {
    /// The index of the layer's kind of attention in [`Sizes::attentions`]. Ignored for a layer
    /// without attention.
    pub attention: usize,
    /// The recurrence in place of attention; `None` if the layer has attention, or no mixer of
    /// positions. With a recurrence, the outputs of `qkv` are queries, keys, values, gates, decays
    /// and strengths, and the inputs of `output` are values.
    pub recurrence: Option<RecurrenceWeights>,
    /// A recurrence beside the attention, whose output is added too; `None` if there is none.
    pub beside: Option<StatePart>,
    /// The additional weights of latent attention; `None` if heads have their own keys and values.
    /// With latent attention, the outputs of `qkv` are the queries or their low rank, and then the
    /// latent row of the position, `[rank + shared part, hidden]`. The inputs of `output` are the
    /// values of heads.
    pub latent: Option<LatentWeights>,
    /// The earlier layer whose keys and values this layer reads; `None` if it has its own.
    pub keys_of: Option<usize>,
    /// True if attention and feed-forward network read the same states, normalised by `input_norm`.
    pub parallel: bool,
    /// The norm before the attention, `[hidden]`.
    pub input_norm: Option<Bytes>,
    /// The norm of the attention's output, `[hidden]`.
    pub attended_norm: Option<Bytes>,
    /// The norm of the feed-forward network's output, `[hidden]`.
    pub fed_norm: Option<Bytes>,
    /// A sink for each query head: a score that takes weight but has no value, `[heads]`.
    pub sinks: Option<Bytes>,
    /// The projections of queries, keys and values, `[(heads + 2 * kv_heads) * head_dim, hidden]`.
    /// Projections that the layer lacks are left out; the projection of gates, if there is one,
    /// follows. `None` if the layer has only a feed-forward network.
    pub qkv: Option<Matrix>,
    /// The bias of `qkv`, one value per output.
    pub qkv_bias: Option<Bytes>,
    /// The norms of query heads and of key heads, `[head_dim]` each, or of all heads of a position.
    /// The second one is `None` if the layer has no keys of its own.
    pub head_norms: Option<(Bytes, Option<Bytes>)>,
    /// The output projection of the attention, `[hidden, heads * head_dim]`; `None` if there is no
    /// `qkv`.
    pub output: Option<Matrix>,
    /// The bias of `output`, `[hidden]`.
    pub output_bias: Option<Bytes>,
    /// The norm before the feed-forward network, `[hidden]`.
    pub post_norm: Option<Bytes>,
    /// The feed-forward network; `None` if there is none.
    pub feed: Option<FeedForward>,
    /// The weights that process the per-layer input; `None` if the layer has no such input.
    pub inputs: Option<InputMatrices>,
    /// The factor of the layer's output, `[1]`.
    pub factor: Option<Bytes>,
}

/// The feed-forward network of a layer.
#[derive(Clone)]
pub enum FeedForward {
    /// One network for all tokens.
    Dense(DenseMatrices),
    /// Many networks (experts), of which each token uses some.
    Experts(ExpertMatrices),
}

/// All weights of a decoder.
pub struct Weights {
    /// The embedding, `[vocabulary, hidden]`, of the model's type.
    pub embedding: Bytes,
    /// The norm of embeddings before the first layer, `[hidden]`.
    pub embedding_norm: Option<Bytes>,
    /// The norm after the last layer, `[hidden]`.
    pub final_norm: Bytes,
    /// The output head, `[vocabulary, hidden]`; `None` if the decoder returns only vectors.
    pub head: Option<Matrix>,
    /// The layers, in order.
    pub layers: Vec<Layer>,
    /// The cosines and the sines of the angles at each position, `[positions, rotary_dim / 2]`.
    pub angles: Vec<(Vec<f32>, Vec<f32>)>,
    /// The factor of queries at each position, `[positions]`; empty if there are none.
    pub query_scales: Vec<f32>,
    /// The weights of per-layer inputs; `None` if layers have no such inputs.
    pub layer_inputs: Option<LayerInputWeights>,
}

impl Layer {
    /// True if the layer has attention.
    pub(crate) fn attends(&self) -> bool {
        self.qkv.is_some() && self.recurrence.is_none()
    }

    /// The layer's recurrence, whether in place of attention or beside it.
    pub(crate) fn state(&self) -> Option<&RecurrenceWeights> {
        self.recurrence.as_ref().or(self.beside.as_ref().map(|beside| &beside.recurrence))
    }

    /// The number of outputs of the mixer's first projection, and of inputs of its last projection.
    /// Both are 0 if there is no mixer.
    pub(crate) fn widths(&self, sizes: &Sizes) -> (usize, usize) {
        if self.qkv.is_none() {
            return (0, 0);
        }
        let attention = &sizes.attentions[self.attention];
        let (queries, [keys, values]) = attention.products(self.keys_of.is_none());
        let gates = if attention.gate { queries } else { 0 };
        let of_heads = (queries + keys + values + gates, queries);
        let attending = attention.latent_widths().unwrap_or(of_heads);
        self.recurrence.as_ref().map_or(attending, |recurrence| recurrence.sizes.widths())
    }

    fn check(&self, sizes: &Sizes) -> Result<(), Unfit> {
        let hidden = sizes.hidden;
        let Some(attention) = sizes.attentions.get(self.attention) else {
            return unfit("a layer of a kind of attention that is not there");
        };
        let &AttentionSizes { heads, head_dim, norm_rows, .. } = attention;
        let (queries, keys) = attention.elements();
        let (projected, mixed) = self.widths(sizes);
        self.check_parts()?;
        self.recurrence.iter().try_for_each(|recurrence| recurrence.check(sizes))?;
        self.beside.iter().try_for_each(|beside| beside.check(sizes))?;
        let is_latent = self.attends() && attention.latent.is_some();
        if is_latent != self.latent.is_some() {
            return unfit("latent attention without its weights, or weights without it");
        }
        if let Some(latent) = &self.latent {
            if self.keys_of.is_some() || self.head_norms.is_some() || self.sinks.is_some() {
                return unfit("no kernel computes latent attention with parts of other attention");
            }
            latent.check(attention, sizes)?;
        }
        for (matrix, size) in [(&self.qkv, (projected, hidden)), (&self.output, (hidden, mixed))] {
            matrix.iter().try_for_each(|it| it.check(sizes.dtype, size, false))?;
        }
        match &self.feed {
            Some(FeedForward::Dense(dense)) => {
                if !(1..=sizes.intermediate).contains(&dense.inner) {
                    return unfit("a dense part that is wider than the widest");
                }
                dense.check(sizes)?;
            }
            Some(FeedForward::Experts(experts)) => experts.check(sizes)?,
            None => {}
        }
        let [of_query, of_key] = if norm_rows { [queries, keys] } else { [head_dim; 2] };
        let norms = [&self.input_norm, &self.post_norm, &self.attended_norm, &self.fed_norm];
        let norms = norms.into_iter().flatten().map(|norm| (norm, hidden));
        if self.head_norms.as_ref().is_some_and(|(_, k)| k.is_some() != self.keys_of.is_none()) {
            return unfit("a norm of keys that are not there, or keys without theirs");
        }
        let of_heads = self.head_norms.iter().flat_map(|(q, k)| {
            std::iter::once((q, of_query)).chain(k.iter().map(move |k| (k, of_key)))
        });
        norms
            .chain(of_heads)
            .try_for_each(|(norm, size)| of_size(norm, size * sizes.norm_bytes()))?;
        let behind = [&self.attended_norm, &self.fed_norm];
        if sizes.mean_norms && behind.iter().any(|norm| norm.is_some()) {
            return unfit("norms behind a part do not subtract the mean");
        }
        let beside = sizes.experts.is_some_and(|of| of.beside);
        if let Some(FeedForward::Experts(of)) = &self.feed {
            if self.fed_norm.is_some() != beside {
                return unfit("a norm behind experts needs all of their output in one place");
            }
            if of.latent.is_some() && self.fed_norm.is_some() {
                return unfit("a norm behind experts of other states");
            }
            if self.factor.is_some() && self.inputs.is_none() && of.shared.is_none() {
                return unfit("a factor behind experts alone");
            }
        }
        if self.inputs.is_some() != sizes.layer_inputs.is_some() {
            return unfit("a layer with an input of a model that has none, or without its own");
        }
        self.inputs.iter().try_for_each(|inputs| inputs.check(sizes))?;
        let others = [
            (&self.qkv_bias, projected),
            (&self.output_bias, hidden),
            (&self.sinks, heads),
            (&self.factor, 1),
        ];
        others
            .into_iter()
            .filter_map(|(it, size)| Some((it.as_ref()?, size)))
            .try_for_each(|(it, size)| of_size(it, size * sizes.dtype.bytes()))
    }
}

impl Layer {
    /// Checks that the layer has a mixer or a feed-forward network, and no weights of components
    /// that it lacks.
    fn check_parts(&self) -> Result<(), Unfit> {
        let mixes = self.qkv.is_some();
        if mixes != self.output.is_some() {
            return unfit("a first product without a second, or the other way round");
        }
        let alone = self.parallel || self.attended_norm.is_some();
        if self.beside.is_some() && (!self.attends() || alone) {
            return unfit("a recurrence beside no attention, or beside parts with other norms");
        }
        if mixes && self.feed.is_some() {
            return Ok(());
        }
        let of_mixer = self.recurrence.is_some() || self.keys_of.is_some() || self.sinks.is_some();
        let of_heads = self.head_norms.is_some() || self.qkv_bias.is_some();
        let others = self.parallel
            || self.inputs.is_some()
            || self.factor.is_some()
            || self.attended_norm.is_some()
            || self.fed_norm.is_some()
            || if mixes { self.post_norm.is_some() } else { self.input_norm.is_some() };
        if !mixes && (self.feed.is_none() || of_mixer || of_heads || self.output_bias.is_some()) {
            return unfit("a layer without parts, or with those of a mixer that it does not have");
        }
        if others {
            return unfit("a layer of one part with more than a norm in front of it");
        }
        Ok(())
    }
}

impl Weights {
    pub(crate) fn adapter_sizes(&self, sizes: &Sizes) -> AdapterSizes {
        let layers = self.layers.iter().map(|layer| {
            let inner = match &layer.feed {
                Some(FeedForward::Dense(dense)) => dense.inner,
                Some(FeedForward::Experts(_)) | None => 0,
            };
            let alone = layer.attends() && layer.beside.is_none();
            let attention = alone.then_some(layer.attention);
            sizes.adapted_widths(attention, layer.keys_of.is_none(), inner)
        });
        AdapterSizes::new(sizes.dtype, sizes.hidden, layers)
    }

    pub(crate) fn check(&self, sizes: &Sizes) -> Result<(), Unfit> {
        let &Sizes { dtype, hidden, vocabulary, positions, .. } = sizes;
        of_size(&self.embedding, vocabulary * hidden * dtype.bytes())?;
        let mut norms = self.embedding_norm.iter().chain([&self.final_norm]);
        norms.try_for_each(|norm| of_size(norm, hidden * sizes.norm_bytes()))?;
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
        match (&self.layer_inputs, sizes.layer_inputs) {
            (None, None) => {}
            (Some(inputs), Some(of)) => inputs.check(sizes, of, self.layers.len())?,
            _ => return unfit("layers' inputs of another model"),
        }
        self.layers.iter().try_for_each(|layer| layer.check(sizes))?;
        (0..self.layers.len()).try_for_each(|layer| self.check_pages(sizes, layer))
    }

    /// Checks that the keys and values that a layer reads exist and match its sizes.
    fn check_pages(&self, sizes: &Sizes, layer: usize) -> Result<(), Unfit> {
        let Some(source) = self.layers[layer].keys_of else { return Ok(()) };
        let heads = |layer: &Layer| {
            let AttentionSizes { kv_heads, head_dim, .. } = sizes.attentions[layer.attention];
            (kv_heads, head_dim)
        };
        let fits = |of: &Layer| {
            of.attends() && of.keys_of.is_none() && heads(of) == heads(&self.layers[layer])
        };
        let here = self.layers[layer].attends() && !sizes.both_ways();
        match self.layers[..layer].get(source) {
            Some(of) if fits(of) && here => Ok(()),
            _ => unfit(format!("layer {layer} can't read the keys of layer {source}")),
        }
    }

    /// The layer whose pages hold a layer's keys and values. If queries also attend to later
    /// positions, each layer overwrites the pages, so all layers of a kind share the pages of the
    /// first one.
    pub(crate) fn pages_of(&self, sizes: &Sizes, layer: usize) -> usize {
        let of = &self.layers[layer];
        let first = |other: &Layer| other.attention == of.attention && other.attends();
        match of.keys_of {
            Some(source) => source,
            None if !sizes.attentions[of.attention].both_ways => layer,
            None => self.layers.iter().position(first).unwrap_or(layer),
        }
    }
}
