//! A decoder as a list of layers, which refer by index to the distinct parts of the model.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::Family;
use super::experts::Experts;
use super::latent::Latent;
use super::recurrence::Recurrence;
use crate::quantised::Quantisation;
use crate::vision::VisionTower;

/// The data from which a decoder is built. Sizes are in elements, and positions in tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Shape {
    /// The family, whose rules map a file's tensors to weights.
    #[serde(with = "super::by_name")]
    pub family: &'static Family,
    /// The number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Elements of the residual stream.
    pub hidden_size: usize,
    /// The kind of all norms.
    pub norm: Norm,
    /// The epsilon of the norms.
    pub norm_eps: f64,
    /// True if embeddings are normalised before the first layer.
    pub embedding_norm: bool,
    /// Factors on states and logits.
    pub scales: Scales,
    /// Factors that are still to be applied to weights of a file. The key is the weight's name
    /// within its layer, such as `self_attn.k_proj.weight`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub factors: BTreeMap<String, f64>,
    /// The distinct rotary embeddings.
    pub ropes: Vec<Rope>,
    /// The distinct mixers: the parts of layers that mix positions.
    pub mixers: Vec<Mixer>,
    /// The distinct feed-forward parts.
    pub feeds: Vec<FeedShape>,
    /// The layers that are computed. A checkpoint may contain more layers.
    pub layers: Vec<LayerShape>,
    /// Per-layer embeddings; `None`: the model has none.
    pub layer_inputs: Option<LayerInputs>,
    /// The vision tower, which encodes images; `None`: the model takes no images.
    pub tower: Option<VisionTower>,
    /// How the checkpoint stores quantised matrices; `None`: they are not quantised.
    pub quantised: Option<Quantisation>,
    /// The largest number of positions that the model was trained for.
    pub max_positions: u64,
    /// True if the output head shares the embedding matrix.
    pub tied: bool,
    /// True if the output head is not used because the model only pools. Configs do not state this.
    pub headless: bool,
    /// Tokens that end a generation.
    pub eos_token_ids: Vec<i32>,
}

/// One layer, as indices into the lists of [`Shape`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerShape {
    /// The index of its mixer.
    pub mixer: u16,
    /// The index of its rotary embedding; `None`: it has no rotary embedding.
    pub rope: Option<u16>,
    /// The index of its feed-forward part.
    pub feed: u16,
    /// Where the layer has norms.
    pub norms: NormPlacement,
    /// The layer whose keys and values this layer reads; `None`: it computes its own.
    pub keys_of: Option<u16>,
    /// True if the layer's output is multiplied by a learned scalar.
    pub scaled: bool,
}

/// Per-layer embeddings (Gemma 3n, 2025): each layer gets an input in addition to the residual
/// stream. It combines the token's row of a second embedding table with a projection of the token's
/// embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerInputs {
    /// The number of tokens that have rows in the second table.
    pub vocab_size: usize,
    /// Elements of the input of one layer.
    pub size: usize,
}

/// A kind of norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Norm {
    /// Divides by the root of the mean square.
    Rms,
    /// RMS norm with stored weights `w` that are applied as `1 + w`. The sum needs float32.
    RmsBesideOne,
    /// Subtracts the mean first (layer norm).
    Mean,
}

/// Where a layer has norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormPlacement {
    /// Before the attention and before the feed-forward part.
    Before,
    /// Only before the feed-forward part.
    BeforeFeed,
    /// After each part, before its output is added to the residual stream.
    After,
    /// Before and after each part.
    Around,
    /// One norm before both parts, which read the same input.
    Parallel,
}

/// Factors on states and logits; 1: the value is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Scales {
    /// The factor on token embeddings.
    pub embeddings: f64,
    /// The factor on input embeddings that replace token embeddings.
    pub inputs: f64,
    /// The factor on the output of each part, before it is added to the residual stream.
    pub residuals: f64,
    /// The factor on logits.
    pub logits: f64,
    /// The soft cap on logits; `None`: there is none.
    pub logit_cap: Option<f64>,
}

impl Scales {
    /// All factors are 1, and there is no cap.
    pub const NONE: Self =
        Self { embeddings: 1.0, inputs: 1.0, residuals: 1.0, logits: 1.0, logit_cap: None };
}

/// A rotary embedding (Su et al. 2021).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// The number of leading elements of a head that are rotated.
    pub dim: usize,
    /// The base of the frequencies.
    pub theta: f64,
    /// The scaling under transformers 4's names, including `rope_type`; `None`: there is no
    /// scaling.
    pub scaling: Option<Map<String, Value>>,
    /// True if the pairs `(2i, 2i + 1)` are rotated, rather than `(i, i + dim / 2)`.
    pub interleaved: bool,
    /// How the three values of a position share the frequencies; `None`: a position is one number.
    pub sections: Option<RotarySections>,
}

/// How the three values of a position share the rotary frequencies (M-RoPE, Qwen2-VL, 2024).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RotarySections {
    /// The number of frequencies for time, for row and for column.
    pub counts: [usize; 3],
    /// True if row and column each get every third of the leading frequencies, and time gets the
    /// rest; false if the three shares are consecutive.
    pub interleaved: bool,
}

/// The part of a layer that mixes positions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Mixer {
    /// Attention that caches keys and values per head.
    Attention(Attention),
    /// Latent attention, which caches one short row per position.
    Latent(Latent),
    /// A recurrence with a state of fixed size per request.
    Recurrence(Recurrence),
    /// Attention and a recurrence in parallel. Their outputs are added.
    Beside(Beside),
    /// No mixer: the layer is only a feed-forward part.
    None,
}

/// Attention and a recurrence in parallel.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Beside {
    /// The attention.
    pub attention: Attention,
    /// The recurrence.
    pub recurrence: Recurrence,
}

impl Mixer {
    /// Returns the attention; `None`: the mixer has no attention.
    #[must_use]
    pub const fn attention(&self) -> Option<&Attention> {
        match self {
            Self::Attention(attention) | Self::Beside(Beside { attention, .. }) => Some(attention),
            Self::Latent(_) | Self::Recurrence(_) | Self::None => None,
        }
    }

    /// Returns the recurrence; `None`: the mixer has no recurrence.
    #[must_use]
    pub const fn recurrence(&self) -> Option<&Recurrence> {
        match self {
            Self::Recurrence(recurrence) | Self::Beside(Beside { recurrence, .. }) => {
                Some(recurrence)
            }
            Self::Attention(_) | Self::Latent(_) | Self::None => None,
        }
    }
}

/// Grouped-query attention (Ainslie et al. 2023): several query heads share a head of keys and
/// values.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Attention {
    /// The number of query heads.
    pub heads: usize,
    /// The number of heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a query or key head.
    pub head_dim: usize,
    /// Elements of a value head.
    pub value_dim: usize,
    /// The factor on attention scores; `None`: `head_dim` to the power of -1/2.
    pub scale: Option<f64>,
    /// The number of positions that a query attends to, including its own; `None`: all positions.
    pub window: Option<u64>,
    /// The length of chunks. A query attends only to positions in its chunk; `None`: no chunks.
    pub chunk: Option<u64>,
    /// True if each head has a sink: a learned score that is part of the softmax but adds no value.
    pub sinks: bool,
    /// The soft cap on attention scores; `None`: there is none.
    pub cap: Option<f64>,
    /// The norms of queries and keys before RoPE.
    pub qk_norm: QkNorm,
    /// True if each head of values is normalised. These norms have no weights.
    pub value_norm: bool,
    /// True if the key projection also gives the values.
    pub keys_are_values: bool,
    /// True if the attention's output is multiplied by the sigmoid of a gate.
    pub gate: bool,
    /// True if queries, keys and values have biases.
    pub qkv_bias: bool,
    /// True if the output projection has a bias.
    pub output_bias: bool,
    /// The factor on queries that grows with position; `None`: there is none.
    pub query_scale: Option<QueryScale>,
    /// True if attention is bidirectional. A window then has the same length on both sides.
    pub both_ways: bool,
}

/// A factor on queries that grows with position: `1 + beta ln(1 + floor((first + position) /
/// every))` (Llama 4, 2025).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct QueryScale {
    /// The strength of the growth.
    pub beta: f64,
    /// The number of consecutive positions with the same factor.
    pub every: u64,
    /// The number that the first position has in this formula.
    pub first: u64,
}

impl QueryScale {
    /// Returns the factor on queries at a position.
    #[must_use]
    pub fn at(&self, position: u64) -> f32 {
        let steps = ((position + self.first) / self.every) as f32;
        1.0 + self.beta as f32 * (1.0 + steps).ln()
    }
}

/// The norms of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    /// No norms.
    None,
    /// Each head is normalised separately.
    Heads,
    /// All heads of a position are normalised together.
    Rows,
    /// Each head is normalised separately, without weights.
    Plain,
}

/// The feed-forward part of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum FeedShape {
    /// A dense feed-forward part, the same for every token.
    Dense(DenseFeed),
    /// A mixture of experts.
    Experts(Experts),
    /// No feed-forward part: the layer is only a mixer.
    None,
}

/// A dense feed-forward part, the same for every token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DenseFeed {
    /// The inner size.
    pub intermediate_size: usize,
    /// The activation between the projections.
    pub activation: Activation,
    /// True if the result of the activation is multiplied by a second projection (`up_proj`).
    pub gated: bool,
    /// True if the projections have biases.
    pub bias: bool,
}

/// The activation of a feed-forward part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x * sigmoid(x)`
    Silu,
    /// `x * Phi(x)`, exactly.
    Gelu,
    /// `x * Phi(x)`, approximated with the hyperbolic tangent.
    GeluTanh,
    /// The square of the positive part.
    SquaredRelu,
    /// `gate * sigmoid(1.702 * gate) * (up + 1)`, with inputs clamped at 7 (gpt-oss).
    ClampedSwiglu,
}

impl Activation {
    /// Returns the activation with this name in transformers.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "silu" | "swish" => Some(Self::Silu),
            "gelu" => Some(Self::Gelu),
            "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Some(Self::GeluTanh),
            "relu2" => Some(Self::SquaredRelu),
            _ => None,
        }
    }

    /// Returns the name in transformers.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Silu => "silu",
            Self::Gelu => "gelu",
            Self::GeluTanh => "gelu_pytorch_tanh",
            Self::SquaredRelu => "relu2",
            // The name in vLLM. transformers has no name for it.
            Self::ClampedSwiglu => "swigluoai",
        }
    }
}

impl Shape {
    /// Returns the mixer of a layer.
    #[must_use]
    pub fn mixer(&self, layer: usize) -> &Mixer {
        &self.mixers[usize::from(self.layers[layer].mixer)]
    }

    /// Returns the feed-forward part of a layer.
    #[must_use]
    pub fn feed(&self, layer: usize) -> &FeedShape {
        &self.feeds[usize::from(self.layers[layer].feed)]
    }

    /// Returns the experts of a layer; `None`: it has no experts, or is not a computed layer.
    #[must_use]
    pub fn experts(&self, layer: usize) -> Option<&Experts> {
        match self.feeds.get(usize::from(self.layers.get(layer)?.feed))? {
            FeedShape::Experts(experts) => Some(experts),
            FeedShape::Dense(_) | FeedShape::None => None,
        }
    }

    /// True if attention is bidirectional. Such a model has no KV cache and is only used for
    /// pooling.
    #[must_use]
    pub fn both_ways(&self) -> bool {
        self.mixers.iter().filter_map(Mixer::attention).any(|it| it.both_ways)
    }

    /// Returns false for a layer of the checkpoint that is not read: in a model with experts, one
    /// after the computed layers, for multi-token prediction (MTP).
    pub(crate) fn has_place_for(&self, layer: usize) -> bool {
        let experts = |feed: &FeedShape| matches!(feed, FeedShape::Experts(_));
        layer < self.layers.len() || !self.feeds.iter().any(experts)
    }

    /// True if a head in the checkpoint is not used.
    pub(crate) fn has_spare_head(&self) -> bool {
        self.tied || self.headless
    }

    /// The largest number of positions of a request. With YaRN it may exceed `max_positions`.
    #[must_use]
    pub fn longest_context(&self) -> u64 {
        let of_rope = |rope: &Rope| {
            let scaling = rope.scaling.as_ref()?;
            if scaling.get("rope_type").and_then(Value::as_str) != Some("yarn") {
                return None;
            }
            let number =
                |key| scaling.get(key).and_then(Value::as_f64).filter(|&value| value != 0.0);
            let original =
                number("original_max_position_embeddings").unwrap_or(self.max_positions as f64);
            Some((original * number("factor").unwrap_or(1.0)) as u64)
        };
        let longest = self.ropes.iter().filter_map(of_rope).max();
        self.max_positions.max(longest.unwrap_or(0))
    }
}
