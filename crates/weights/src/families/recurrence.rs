//! Layers that keep a state of fixed size per request. Gated delta nets, Mamba 2 and short
//! convolutions are one recurrence with different parameters.

use serde::{Deserialize, Serialize};

use super::rules::{RowBlocks, Rule, Take};
use super::shape::{Mixer, Shape};

/// Bytes per element of a head's state, which is float32 whatever the model's data type.
const STATE_ELEMENT: usize = 4;

/// Reads the decays of GGUF files, and takes the logarithm, because these files store them without
/// it.
pub(super) const DECAYS: Take = Take::ALL.flat().times(-1.0).log();

/// A linear recurrence after a causal convolution.
///
/// A head's state `S` is `[key_dim, value_dim]`. Each position changes it to `decay * S + k u`, and
/// the output is `q S`. With the delta rule, `u` is `beta (v - k S)`. Otherwise `u` is `step v`,
/// and `skip v` is added to the output. `k`, `q`, `v`, `decay`, `beta` and `step` depend on the
/// position's input; `skip` is a weight. Without heads there is only a convolution between two
/// gates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recurrence {
    /// The number of heads of the state; 0: there is only a convolution.
    pub heads: usize,
    /// The number of heads of keys and queries. Each is used by an equal number of state heads.
    pub key_heads: usize,
    /// True if the state heads that share a key head are `key_heads` apart; false if they are
    /// consecutive.
    pub tiled: bool,
    /// Elements of a key head.
    pub key_dim: usize,
    /// Elements of a value head. Without heads, the number of channels of the convolution.
    pub value_dim: usize,
    /// True if each channel of a head has a decay; false if all channels of a head share one.
    pub channel_decay: bool,
    /// True if the state's old value for a key is subtracted first (delta rule). Keys and queries
    /// are then normalised to length 1.
    pub delta: bool,
    /// The kernel size of the causal convolution that precedes the recurrence.
    pub taps: usize,
    /// True if the convolution has a bias.
    pub conv_bias: bool,
    /// True if the projections have biases.
    pub bias: bool,
    /// The norm of the output, and how the gate is combined with it.
    pub norm: StateNorm,
    /// True if the gate's activation is a sigmoid rather than `x * sigmoid(x)`.
    pub sigmoid_gate: bool,
    /// The rank of the low-rank projections that compute gates and decays; 0: each has a single
    /// full projection.
    pub low_rank: usize,
    /// The number of elements over which `norm` computes a mean.
    pub norm_size: usize,
}

/// The norm of a recurrence's output, and whether it precedes the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateNorm {
    /// There is a gate, but no norm.
    None,
    /// The norm is applied before the gate.
    BeforeGate,
    /// The norm is applied after the gate.
    AfterGate,
}

impl Recurrence {
    /// Creates a convolution of `value_dim` channels between two gates.
    #[must_use]
    pub const fn convolution(value_dim: usize, taps: usize, bias: bool) -> Self {
        Self {
            heads: 0,
            key_heads: 0,
            tiled: false,
            key_dim: 0,
            value_dim,
            channel_decay: false,
            delta: false,
            taps,
            conv_bias: bias,
            bias,
            norm: StateNorm::None,
            sigmoid_gate: false,
            low_rank: 0,
            norm_size: 0,
        }
    }

    /// Elements of all key heads together.
    #[must_use]
    pub const fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Elements of all value heads together.
    #[must_use]
    pub const fn values(&self) -> usize {
        if self.heads == 0 { self.value_dim } else { self.heads * self.value_dim }
    }

    /// Channels of the convolution: queries, keys and values.
    #[must_use]
    pub const fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    /// Bytes of the state of one request, if each input of the convolution takes `element` bytes.
    #[must_use]
    pub const fn state_bytes(&self, element: usize) -> usize {
        let of_heads = self.heads * self.key_dim * self.value_dim * STATE_ELEMENT;
        of_heads + self.channels() * (self.taps - 1) * element
    }
}

impl Shape {
    /// Bytes of a request's recurrent states over all layers; 0: the model has no such layers.
    /// `element` is the size of an element in the model's data type.
    #[must_use]
    pub fn state_bytes(&self, element: usize) -> u64 {
        let of_layer = |layer: usize| {
            self.mixer(layer).recurrence().map_or(0, |found| found.state_bytes(element) as u64)
        };
        (0..self.layers.len()).map(of_layer).sum()
    }
}

/// Returns `width` consecutive rows of a fused matrix, from row `first` on.
const fn behind(first: usize, width: usize) -> Option<RowBlocks> {
    Some(RowBlocks { first, width, step: width, count: 1 })
}

fn of(mixer: &Mixer) -> Option<&Recurrence> {
    mixer.recurrence()
}

/// Rows of the queries in a fused projection of queries, keys and values.
pub(super) fn queries(mixer: &Mixer) -> Option<RowBlocks> {
    behind(0, of(mixer)?.keys())
}

/// Rows of the keys in a fused projection of queries, keys and values.
pub(super) fn keys(mixer: &Mixer) -> Option<RowBlocks> {
    let found = of(mixer)?;
    behind(found.keys(), found.keys())
}

/// Rows of the values in a fused projection of queries, keys and values.
pub(super) fn values(mixer: &Mixer) -> Option<RowBlocks> {
    let found = of(mixer)?;
    behind(2 * found.keys(), found.values())
}

/// Rows of a matrix in which queries, keys, values and gates are grouped by key head.
pub(super) mod grouped {
    use super::{Mixer, RowBlocks, of};

    /// Rows of queries (`number` 0), keys (1), values (2) or gates (3) in each key head.
    fn rows(mixer: &Mixer, number: usize) -> Option<RowBlocks> {
        let found = of(mixer)?;
        let of_values = found.values() / found.key_heads;
        let widths = [found.key_dim, found.key_dim, of_values, of_values];
        Some(RowBlocks {
            first: widths[..number].iter().sum(),
            width: widths[number],
            step: widths.iter().sum(),
            count: found.key_heads,
        })
    }

    pub(in crate::families) fn queries(mixer: &Mixer) -> Option<RowBlocks> {
        rows(mixer, 0)
    }

    pub(in crate::families) fn keys(mixer: &Mixer) -> Option<RowBlocks> {
        rows(mixer, 1)
    }

    pub(in crate::families) fn values(mixer: &Mixer) -> Option<RowBlocks> {
        rows(mixer, 2)
    }

    pub(in crate::families) fn gates(mixer: &Mixer) -> Option<RowBlocks> {
        rows(mixer, 3)
    }

    fn of_heads(mixer: &Mixer, number: usize) -> Option<RowBlocks> {
        let found = of(mixer)?;
        let width = found.heads / found.key_heads;
        let (first, step) = (number * width, 2 * width);
        Some(RowBlocks { first, width, step, count: found.key_heads })
    }

    /// Rows of the strength (`beta`) of each head, the first of two values per head.
    pub(in crate::families) fn strengths(mixer: &Mixer) -> Option<RowBlocks> {
        of_heads(mixer, 0)
    }

    /// Rows of the decay of each head, the second of two values per head.
    pub(in crate::families) fn decays(mixer: &Mixer) -> Option<RowBlocks> {
        of_heads(mixer, 1)
    }
}

/// Rows of Mamba's fused matrices. `in_proj` stacks gates, values, keys, queries and steps, in this
/// order. The convolution stacks values, keys and queries.
pub(super) mod mamba {
    use serde_json::{Map, Value, json};

    use super::{DECAYS, Mixer, RowBlocks, Rule, Take, behind, of};
    use crate::error::ModelError;
    use crate::families::gguf::required;
    use crate::gguf::GgufFiles;

    /// Reads the sizes from a GGUF file, under the names of Bamba's config.
    pub(in crate::families) fn keys_of(
        files: &GgufFiles,
    ) -> Result<Map<String, Value>, ModelError> {
        let has = |end: &str| files.tensors.iter().any(|tensor| tensor.name.ends_with(end));
        let heads = required(files, "ssm.time_step_rank")?;
        let keys = json!({
            "mamba_n_heads": heads,
            "mamba_d_head": required(files, "ssm.inner_size")? / heads.max(1),
            "mamba_d_state": required(files, "ssm.state_size")?,
            "mamba_n_groups": required(files, "ssm.group_count")?,
            "mamba_d_conv": required(files, "ssm.conv_kernel")?,
            "mamba_conv_bias": has("ssm_conv1d.bias"),
            "mamba_proj_bias": has("ssm_in.bias"),
        });
        Ok(keys.as_object().cloned().unwrap_or_default())
    }

    const IN: &str = "model.layers.#.linear_attn.in_proj.*";
    const CONV: &str = "model.layers.#.linear_attn.conv1d.*";
    const GGUF_IN: &str = "blk.#.ssm_in.*";
    const GGUF_CONV: &str = "blk.#.ssm_conv1d.*";

    /// Rules for Mamba's fused tensors. They match names under `linear_attn`, to which a rule of
    /// the family has renamed the tensors.
    pub(in crate::families) const RULES: &[Rule] = &[
        Rule::new(IN, "model.layers.#.linear_attn.in_proj_z.*", part(gates)),
        Rule::new(IN, "model.layers.#.linear_attn.in_proj_v.*", part(values)),
        Rule::new(IN, "model.layers.#.linear_attn.in_proj_k.*", part(keys)),
        Rule::new(IN, "model.layers.#.linear_attn.in_proj_q.*", part(queries)),
        Rule::new(IN, "model.layers.#.linear_attn.in_proj_a.*", part(steps)),
        Rule::new(CONV, "model.layers.#.linear_attn.conv_v.*", part(conv_values)),
        Rule::new(CONV, "model.layers.#.linear_attn.conv_k.*", part(conv_keys)),
        Rule::new(CONV, "model.layers.#.linear_attn.conv_q.*", part(conv_queries)),
    ];

    /// Rules for Mamba's tensors in GGUF files.
    pub(in crate::families) const GGUF_RULES: &[Rule] = &[
        Rule::new(GGUF_IN, "model.layers.#.linear_attn.in_proj_z.*", part(gates)),
        Rule::new(GGUF_IN, "model.layers.#.linear_attn.in_proj_v.*", part(values)),
        Rule::new(GGUF_IN, "model.layers.#.linear_attn.in_proj_k.*", part(keys)),
        Rule::new(GGUF_IN, "model.layers.#.linear_attn.in_proj_q.*", part(queries)),
        Rule::new(GGUF_IN, "model.layers.#.linear_attn.in_proj_a.*", part(steps)),
        Rule::new(GGUF_CONV, "model.layers.#.linear_attn.conv_v.*", part(conv_values)),
        Rule::new(GGUF_CONV, "model.layers.#.linear_attn.conv_k.*", part(conv_keys)),
        Rule::new(GGUF_CONV, "model.layers.#.linear_attn.conv_q.*", part(conv_queries)),
        Rule::new("blk.#.ssm_a", "model.layers.#.linear_attn.A_log", DECAYS),
        Rule::new("blk.#.ssm_d", "model.layers.#.linear_attn.D", Take::ALL.flat()),
        Rule::renamed("blk.#.ssm_dt.bias", "model.layers.#.linear_attn.dt_bias"),
        Rule::new("blk.#.ssm_norm.*", "model.layers.#.linear_attn.norm.*", Take::ALL.flat()),
        Rule::renamed("blk.#.ssm_out.*", "model.layers.#.linear_attn.out_proj.*"),
    ];

    const fn part(blocks: fn(&Mixer) -> Option<RowBlocks>) -> Take {
        Take::ALL.blocks(blocks)
    }

    fn gates(mixer: &Mixer) -> Option<RowBlocks> {
        behind(0, of(mixer)?.values())
    }

    fn values(mixer: &Mixer) -> Option<RowBlocks> {
        let found = of(mixer)?;
        behind(found.values(), found.values())
    }

    fn keys(mixer: &Mixer) -> Option<RowBlocks> {
        let found = of(mixer)?;
        behind(2 * found.values(), found.keys())
    }

    fn queries(mixer: &Mixer) -> Option<RowBlocks> {
        let found = of(mixer)?;
        behind(2 * found.values() + found.keys(), found.keys())
    }

    fn steps(mixer: &Mixer) -> Option<RowBlocks> {
        let found = of(mixer)?;
        behind(2 * found.values() + 2 * found.keys(), found.heads)
    }

    pub(in crate::families) fn conv_values(mixer: &Mixer) -> Option<RowBlocks> {
        behind(0, of(mixer)?.values())
    }

    fn conv_keys(mixer: &Mixer) -> Option<RowBlocks> {
        let found = of(mixer)?;
        behind(found.values(), found.keys())
    }

    fn conv_queries(mixer: &Mixer) -> Option<RowBlocks> {
        let found = of(mixer)?;
        behind(found.values() + found.keys(), found.keys())
    }
}
