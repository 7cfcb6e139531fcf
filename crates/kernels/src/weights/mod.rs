//! The weights of a decoder in the order of the kernels.

mod experts;
mod matrix;
mod recurrence;

use crate::adapters::AdapterSizes;
use crate::packing::{Unfit, unfit};
use crate::sizes::{AttentionSizes, Sizes};

pub use self::experts::{ExpertBiases, ExpertMatrices};
pub(crate) use self::matrix::of_size;
pub use self::matrix::{Bytes, Gated, Matrix};
pub use self::recurrence::RecurrenceWeights;

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

impl Layer {
    /// Outputs of the first product, and inputs of the second.
    pub(crate) fn widths(&self, sizes: &Sizes) -> (usize, usize) {
        let attention = &sizes.attentions[self.attention];
        let (queries, keys) = attention.elements();
        let gates = if attention.gate { queries } else { 0 };
        let attending = (queries + 2 * keys + gates, queries);
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
        let behind = [&self.attended_norm, &self.fed_norm];
        if sizes.mean_norms && behind.iter().any(|norm| norm.is_some()) {
            return unfit("norms behind a part do not subtract the mean");
        }
        if self.fed_norm.is_some() && matches!(self.feed, FeedForward::Experts(_)) {
            return unfit("a norm behind experts needs all of their output in one place");
        }
        let others =
            [(&self.qkv_bias, projected), (&self.output_bias, hidden), (&self.sinks, heads)];
        others
            .into_iter()
            .filter_map(|(it, size)| Some((it.as_ref()?, size)))
            .try_for_each(|(it, size)| of_size(it, size * sizes.dtype.bytes()))
    }
}

impl Weights {
    pub(crate) fn adapter_sizes(&self, sizes: &Sizes) -> AdapterSizes {
        let layers = self.layers.iter().map(|layer| {
            let dense = matches!(layer.feed, FeedForward::Dense(_));
            let attention = layer.recurrence.is_none().then_some(layer.attention);
            sizes.adapted_widths(attention, dense)
        });
        AdapterSizes::new(sizes.dtype, sizes.hidden, layers)
    }

    pub(crate) fn check(&self, sizes: &Sizes) -> Result<(), Unfit> {
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
