//! A decoder as a list of layers, which refer to its distinct parts.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::Family;
use super::experts::Experts;
use super::latent::Latent;
use super::recurrence::Recurrence;
use crate::quantised::Quantisation;
use crate::vision::VisionTower;

/// The data from which a decoder is built. Sizes count elements, and positions are tokens.
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
    /// Factors of states and logits.
    pub scales: Scales,
    /// Factors on layers' weights that files do not include, by name suffix, such as
    /// `self_attn.k_proj.weight`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub factors: BTreeMap<String, f64>,
    /// The distinct rotary embeddings.
    pub ropes: Vec<Rope>,
    /// The distinct parts that mix positions.
    pub mixers: Vec<Mixer>,
    /// The distinct feed-forward parts.
    pub feeds: Vec<FeedShape>,
    /// The computed layers. A checkpoint may have more.
    pub layers: Vec<LayerShape>,
    /// Per-layer inputs for each token; `None`: there are none.
    pub layer_inputs: Option<LayerInputs>,
    /// The tower that encodes images for the prompt; `None`: the model takes no images.
    pub tower: Option<VisionTower>,
    /// How the checkpoint stores quantised matrices; `None`: they are not quantised.
    pub quantised: Option<Quantisation>,
    /// The largest number of positions that the model was trained for.
    pub max_positions: u64,
    /// True if the head is the embedding.
    pub tied: bool,
    /// True if the head is not used because the model pools. Configs do not state it.
    pub headless: bool,
    /// Tokens that end a generation.
    pub eos_token_ids: Vec<i32>,
}

/// One layer, as indices of its parts in [`Shape`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerShape {
    /// The part that mixes positions.
    pub mixer: u16,
    /// The rotary embedding; `None`: positions rotate nothing.
    pub rope: Option<u16>,
    /// The part behind the mixer.
    pub feed: u16,
    /// The places of the layer's norms.
    pub norms: NormPlacement,
    /// The layer whose keys and values this one reads; `None`: it has its own.
    pub keys_of: Option<u16>,
    /// True if the layer's output is multiplied by a learned number.
    pub scaled: bool,
}

/// Per-layer embeddings (Gemma 3n, 2025): each layer gets an input beside the residual stream. The
/// input combines the token's row of a second embedding table with a projection of the token's
/// embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerInputs {
    /// The number of tokens that have rows in the second table.
    pub vocab_size: usize,
    /// Elements of a layer's input.
    pub size: usize,
}

/// A kind of norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Norm {
    /// Divides by the root of the mean square.
    Rms,
    /// RMS norm with stored weights `w` that are applied as `1 + w`. The sum needs 32 bits.
    RmsBesideOne,
    /// Subtracts the mean first (layer norm).
    Mean,
}

/// The places of a layer's norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormPlacement {
    /// Before each part.
    Before,
    /// Before the second part.
    BeforeFeed,
    /// After each part, before its output is added.
    After,
    /// On both sides of each part.
    Around,
    /// One norm before both parts, which read the same states.
    Parallel,
}

/// Factors on states and logits; 1: none.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Scales {
    /// The factor of embeddings.
    pub embeddings: f64,
    /// The factor on inputs that replace token embeddings.
    pub inputs: f64,
    /// The factor on a part's output before it is added.
    pub residuals: f64,
    /// The factor of logits.
    pub logits: f64,
    /// The soft cap on logits; `None`: there is none.
    pub logit_cap: Option<f64>,
}

impl Scales {
    /// No factor and no cap.
    pub const NONE: Self =
        Self { embeddings: 1.0, inputs: 1.0, residuals: 1.0, logits: 1.0, logit_cap: None };
}

/// A rotary embedding (Su et al. 2021).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// The number of leading elements of a head that are rotated.
    pub dim: usize,
    /// The base.
    pub theta: f64,
    /// The scaling with transformers 4's names, including `rope_type`; `None`: there is none.
    pub scaling: Option<Map<String, Value>>,
    /// True if neighbours `(2i, 2i + 1)` are rotated, rather than `(i, i + dim / 2)`.
    pub interleaved: bool,
    /// How a position's three numbers share the frequencies; `None`: a position is one number.
    pub sections: Option<RotarySections>,
}

/// How a position's three numbers share the rotary frequencies (M-RoPE, Qwen2-VL, 2024).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RotarySections {
    /// The frequencies of time, row and column.
    pub counts: [usize; 3],
    /// True if rows and columns take every third of the first frequencies, and time the rest;
    /// otherwise the shares are consecutive.
    pub interleaved: bool,
}

/// A part that mixes positions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Mixer {
    /// Attention with keys and values of heads.
    Attention(Attention),
    /// Attention with one short row for each position.
    Latent(Latent),
    /// A state of fixed size for each request.
    Recurrence(Recurrence),
    /// Attention and a recurrent state side by side, whose outputs are added.
    Beside(Beside),
    /// None: the layer is a feed-forward part.
    None,
}

/// Attention and a recurrent state side by side.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Beside {
    /// The attention.
    pub attention: Attention,
    /// The state.
    pub recurrence: Recurrence,
}

impl Mixer {
    /// The attention; `None`: it has none.
    #[must_use]
    pub const fn attention(&self) -> Option<&Attention> {
        match self {
            Self::Attention(attention) | Self::Beside(Beside { attention, .. }) => Some(attention),
            Self::Latent(_) | Self::Recurrence(_) | Self::None => None,
        }
    }

    /// The state; `None`: it keeps none.
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

/// Attention with keys and values of some heads each (Ainslie et al. 2023).
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
    /// The factor on scores; `None`: `head_dim` to the power of -1/2.
    pub scale: Option<f64>,
    /// The number of positions that a query attends to, its own included; `None`: all.
    pub window: Option<u64>,
    /// The chunk length, within which positions attend to each other; `None`: no chunks.
    pub chunk: Option<u64>,
    /// True if each head has a learned score that takes part in the softmax but adds no value (a
    /// sink).
    pub sinks: bool,
    /// The soft cap on scores; `None`: there is none.
    pub cap: Option<f64>,
    /// The norms of queries and keys before the rotation.
    pub qk_norm: QkNorm,
    /// True if each head of values is normalised, without weights.
    pub value_norm: bool,
    /// True if values are the same product as keys.
    pub keys_are_values: bool,
    /// True if the output is multiplied by the sigmoid of a gate.
    pub gate: bool,
    /// True if queries, keys and values have biases.
    pub qkv_bias: bool,
    /// True if the output has a bias.
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
    /// The growth.
    pub beta: f64,
    /// The number of positions with one factor.
    pub every: u64,
    /// The number of the first position.
    pub first: u64,
}

impl QueryScale {
    /// The factor of queries at a position.
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
    /// There is none.
    None,
    /// Each head has its own mean.
    Heads,
    /// All heads of a position have one mean.
    Rows,
    /// Each head has its own mean, and there are no weights.
    Plain,
}

/// The part of a layer behind the mixer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum FeedShape {
    /// One feed-forward part for every token.
    Dense(DenseFeed),
    /// A mixture of experts.
    Experts(Experts),
    /// There is none: the layer is a mixer.
    None,
}

/// One feed-forward part for every token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DenseFeed {
    /// Elements between the products.
    pub intermediate_size: usize,
    /// The function between the products.
    pub activation: Activation,
    /// True if the activation's result is multiplied by a second product.
    pub gated: bool,
    /// True if the products have biases.
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
    /// `x * Phi(x)`, by a hyperbolic tangent.
    GeluTanh,
    /// The square of the positive part.
    SquaredRelu,
    /// `gate * sigmoid(1.702 * gate) * (up + 1)`, with inputs clamped at 7 (gpt-oss).
    ClampedSwiglu,
}

impl Activation {
    /// Finds a function by its name in transformers.
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

    /// The name in transformers.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Silu => "silu",
            Self::Gelu => "gelu",
            Self::GeluTanh => "gelu_pytorch_tanh",
            Self::SquaredRelu => "relu2",
            // vLLM's name: transformers has none.
            Self::ClampedSwiglu => "swigluoai",
        }
    }
}

impl Shape {
    /// The mixer of a layer.
    #[must_use]
    pub fn mixer(&self, layer: usize) -> &Mixer {
        &self.mixers[usize::from(self.layers[layer].mixer)]
    }

    /// The part behind the mixer of a layer.
    #[must_use]
    pub fn feed(&self, layer: usize) -> &FeedShape {
        &self.feeds[usize::from(self.layers[layer].feed)]
    }

    /// The experts of a layer; `None`: it has none, or is not a computed layer.
    #[must_use]
    pub fn experts(&self, layer: usize) -> Option<&Experts> {
        match self.feeds.get(usize::from(self.layers.get(layer)?.feed))? {
            FeedShape::Experts(experts) => Some(experts),
            FeedShape::Dense(_) | FeedShape::None => None,
        }
    }

    /// True if attention is bidirectional. Such a model has no KV cache, and only pools.
    #[must_use]
    pub fn both_ways(&self) -> bool {
        self.mixers.iter().filter_map(Mixer::attention).any(|it| it.both_ways)
    }

    /// True if a checkpoint's layer may belong to the computed ones. After them, checkpoints with
    /// experts may have layers that only predict further tokens (MTP).
    pub(crate) fn has_place_for(&self, layer: usize) -> bool {
        let experts = |feed: &FeedShape| matches!(feed, FeedShape::Experts(_));
        layer < self.layers.len() || !self.feeds.iter().any(experts)
    }

    /// True if the checkpoint's head is superfluous.
    pub(crate) fn has_spare_head(&self) -> bool {
        self.tied || self.headless
    }

    /// The largest number of positions of a request. With yarn it may exceed the config's.
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
