//! The shape of a decoder, read from a Hugging Face `config.json` of any age.

use serde_json::{Map, Value};

use crate::error::ModelError;
use crate::experts::{Experts, experts, is_sparse};
use crate::sizes::{MOST, MOST_HEADS, MOST_LAYERS, MOST_POSITIONS, optional, real, size, truthy};

const DEFAULT_ROPE_THETA: f64 = 10000.0;
const PARTIAL_ROTARY_FACTOR: f64 = 0.5;
/// The numbers of a scaling that are divisors.
const FACTORS: [&str; 6] = [
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "original_max_position_embeddings",
];

/// The types of a model's computation, by PyTorch's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TorchNumber {
    /// `torch.float32`
    Float32,
    /// `torch.bfloat16`
    Bfloat16,
}

/// A family of decoders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    Glm4Moe,
}

/// The data from which a decoder is built. Sizes are numbers of elements, and positions are tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// The number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Elements of the residual stream.
    pub hidden_size: usize,
    /// Elements between the products of a dense feed-forward part; 0: no layer has one.
    pub intermediate_size: usize,
    /// The experts of the layers that have some; `None`: there are none.
    pub experts: Option<Experts>,
    /// True for each layer that has experts in place of a dense part.
    pub sparse: Vec<bool>,
    /// The number of layers.
    pub layers: usize,
    /// The number of query heads.
    pub heads: usize,
    /// The number of heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// The number of first elements of a head that positions rotate.
    pub rotary_dim: usize,
    /// True if queries, keys and values have biases.
    pub qkv_bias: bool,
    /// True if the attention's output has a bias.
    pub output_bias: bool,
    /// True if the feed-forward part has biases.
    pub mlp_bias: bool,
    /// True if query and key heads are normalised before they are rotated.
    pub head_norms: bool,
    /// The epsilon of the norms.
    pub rms_norm_eps: f64,
    /// The base of the rotary embedding.
    pub rope_theta: f64,
    /// The scaling of rotary positions with the names of transformers 4, `rope_type` among them;
    /// `None`: there is none.
    pub rope_scaling: Option<Map<String, Value>>,
    /// The largest number of positions that the model was trained for.
    pub max_positions: u64,
    /// True if the head is the embedding.
    pub tied: bool,
    /// True if the head is not used, because the model pools. [`Self::of`] sets it to false.
    pub headless: bool,
    /// The number of tokens that a position sees, itself included; `None`: all.
    pub sliding_window: Option<u64>,
    /// Tokens that end a generation.
    pub eos_token_ids: Vec<i32>,
}

impl Shape {
    /// Reads a `config.json`.
    ///
    /// # Errors
    /// The model is not a decoder of the families here, or the config lacks a needed value.
    pub fn of(config: &Map<String, Value>) -> Result<Self, ModelError> {
        let family = family(config)?;
        if truthy(config.get("quantization_config")) {
            return Err(ModelError::elsewhere("a checkpoint that is quantised"));
        }
        let layers = size(config, "num_hidden_layers", MOST_LAYERS)? as u64;
        let (rope_theta, rope_scaling) = rope(config, family)?;
        match config.get("hidden_act").and_then(Value::as_str).unwrap_or("silu") {
            "silu" => {}
            other => return Err(ModelError::elsewhere(format!("the activation {other:?}"))),
        }
        let heads = size(config, "num_attention_heads", MOST_HEADS)?;
        let kv_heads = optional(config, "num_key_value_heads", MOST_HEADS)?;
        let kv_heads = kv_heads.unwrap_or(heads as u64) as usize;
        if !heads.is_multiple_of(kv_heads) {
            return Err(ModelError::broken(format!(
                "{heads} query heads (num_attention_heads) can't share {kv_heads} heads of keys and values \
                 (num_key_value_heads) equally"
            )));
        }
        let hidden_size = size(config, "hidden_size", MOST)?;
        let all_biases = flag(config, "attention_bias", false);
        let sparse: Vec<bool> =
            (0..layers).map(|layer| is_sparse(config, family, layer)).collect::<Result<_, _>>()?;
        let count = sparse.iter().filter(|&&sparse| sparse).count();
        let experts = if count > 0 { Some(experts(config, family, count)?) } else { None };
        // A model of experts alone needs no size of a dense layer.
        let all_sparse = count == sparse.len();
        let usual = if family == Family::Qwen3 { 128 } else { hidden_size / heads };
        let head_dim = optional(config, "head_dim", MOST_HEADS)?.unwrap_or(usual as u64) as usize;
        if head_dim == 0 {
            return Err(ModelError::broken(format!(
                "{hidden_size} elements (hidden_size) can't be shared by {heads} heads (num_attention_heads), \
                 and the model's config has no 'head_dim'"
            )));
        }
        let with_norms = match family {
            Family::Qwen3 | Family::Qwen3Moe => true,
            Family::Glm4Moe => flag(config, "use_qk_norm", false),
            Family::Llama | Family::Mistral | Family::Qwen2 => false,
        };
        Ok(Self {
            vocab_size: size(config, "vocab_size", MOST)?,
            hidden_size,
            intermediate_size: if all_sparse {
                0
            } else {
                size(config, "intermediate_size", MOST)?
            },
            experts,
            sparse,
            layers: layers as usize,
            heads,
            kv_heads,
            head_dim,
            rotary_dim: rotary_dim(config, family, head_dim)?,
            qkv_bias: flag(config, "qkv_bias", family == Family::Qwen2 || all_biases),
            // Llama and Qwen3 have biases on all four projections or none, Qwen2 and GLM on three.
            output_bias: all_biases && !matches!(family, Family::Qwen2 | Family::Glm4Moe),
            mlp_bias: flag(config, "mlp_bias", false),
            head_norms: with_norms,
            rms_norm_eps: real(config, "rms_norm_eps", 1e-6)?,
            rope_theta,
            rope_scaling,
            max_positions: optional(config, "max_position_embeddings", MOST_POSITIONS)?
                .unwrap_or(2048),
            tied: flag(config, "tie_word_embeddings", false),
            headless: false,
            sliding_window: sliding_window(config, family, layers)?,
            eos_token_ids: token_ids(config.get("eos_token_id")),
        })
    }

    /// True if a checkpoint's layer may belong to the computed ones. Behind them checkpoints with
    /// experts have layers that only predict further tokens (MTP).
    pub(crate) fn has_place_for(&self, layer: usize) -> bool {
        self.experts.is_none() || layer < self.layers
    }

    /// True if a head in the checkpoint is one too many.
    pub(crate) fn has_spare_head(&self) -> bool {
        self.tied || self.headless
    }

    /// The largest number of positions of a request. With yarn it may exceed the config's.
    #[must_use]
    pub fn longest_context(&self) -> u64 {
        let Some(scaling) = self.rope_scaling.as_ref() else { return self.max_positions };
        if scaling.get("rope_type").and_then(Value::as_str) != Some("yarn") {
            return self.max_positions;
        }
        let number = |key| scaling.get(key).and_then(Value::as_f64).filter(|&value| value != 0.0);
        let original =
            number("original_max_position_embeddings").unwrap_or(self.max_positions as f64);
        self.max_positions.max((original * number("factor").unwrap_or(1.0)) as u64)
    }
}

pub(crate) fn flag(config: &Map<String, Value>, key: &str, default: bool) -> bool {
    match config.get(key) {
        None => default,
        found => truthy(found),
    }
}

/// A token id, a list of them or nothing, as the `eos_token_id` of the two config files may be.
pub(crate) fn token_ids(value: Option<&Value>) -> Vec<i32> {
    let id = |value: &Value| value.as_i64().and_then(|id| i32::try_from(id).ok());
    match value {
        Some(Value::Array(items)) => items.iter().filter_map(id).collect(),
        Some(value) => id(value).into_iter().collect(),
        None => Vec::new(),
    }
}

fn family(config: &Map<String, Value>) -> Result<Family, ModelError> {
    let names = config.get("architectures").and_then(Value::as_array);
    let mut names = names.into_iter().flatten().filter_map(Value::as_str);
    // A checkpoint without a head has the name of the body.
    let known = names.clone().find_map(|name| match name {
        "LlamaForCausalLM" | "LlamaModel" => Some(Family::Llama),
        "MistralForCausalLM" | "MistralModel" => Some(Family::Mistral),
        "Qwen2ForCausalLM" | "Qwen2Model" => Some(Family::Qwen2),
        "Qwen3ForCausalLM" | "Qwen3Model" => Some(Family::Qwen3),
        "Qwen3MoeForCausalLM" => Some(Family::Qwen3Moe),
        "Glm4MoeForCausalLM" => Some(Family::Glm4Moe),
        _ => None,
    });
    known.ok_or_else(|| {
        let name = names.next().unwrap_or("without a name");
        ModelError::elsewhere(format!("the architecture {name}"))
    })
}

/// The base, and the scaling in the form of transformers 4: transformers 5 keeps both in
/// `rope_parameters`.
fn rope(
    config: &Map<String, Value>,
    family: Family,
) -> Result<(f64, Option<Map<String, Value>>), ModelError> {
    let object = |key| config.get(key).filter(|value| truthy(Some(value)))?.as_object();
    let mut parameters =
        object("rope_parameters").or_else(|| object("rope_scaling")).cloned().unwrap_or_default();
    let theta = real(&parameters, "rope_theta", real(config, "rope_theta", DEFAULT_ROPE_THETA)?)?;
    parameters.shift_remove("rope_theta");
    let text = |value: Option<Value>| value.and_then(|value| value.as_str().map(str::to_owned));
    let legacy = text(parameters.shift_remove("type"));
    let kind = text(parameters.shift_remove("rope_type")).or(legacy);
    let kind = kind.unwrap_or_else(|| "default".into());
    let part = parameters.shift_remove("partial_rotary_factor").and_then(|value| value.as_f64());
    if family != Family::Glm4Moe && part.is_some_and(|part| part != 1.0) {
        return Err(ModelError::elsewhere("heads that are rotated in part"));
    }
    if kind == "default" {
        if parameters.values().any(Value::is_object) {
            return Err(ModelError::elsewhere("rotary embeddings that differ between layers"));
        }
        return Ok((theta, None));
    }
    if !["linear", "llama3", "yarn"].contains(&kind.as_str()) {
        return Err(ModelError::elsewhere(format!("the rope scaling {kind:?}")));
    }
    if parameters.get("factor").is_none_or(Value::is_null) {
        return Err(ModelError::broken(format!("rope scaling '{kind}' without a factor")));
    }
    for key in FACTORS {
        let there = parameters.get(key).is_some_and(|value| !value.is_null());
        if there && real(&parameters, key, 0.0)? == 0.0 {
            return Err(ModelError::broken(format!("rope scaling '{kind}' with a {key} of 0")));
        }
    }
    let [low, high] = ["low_freq_factor", "high_freq_factor"].map(|key| parameters.get(key));
    if kind == "llama3" && low == high {
        return Err(ModelError::broken(
            "rope scaling 'llama3' with a low_freq_factor that is the high_freq_factor",
        ));
    }
    parameters.insert("rope_type".into(), kind.into());
    Ok((theta, Some(parameters)))
}

/// Elements of a head that are rotated; transformers 5 keeps the factor beside the base.
fn rotary_dim(
    config: &Map<String, Value>,
    family: Family,
    head_dim: usize,
) -> Result<usize, ModelError> {
    if family != Family::Glm4Moe {
        return Ok(head_dim);
    }
    let rope = config.get("rope_parameters").and_then(Value::as_object);
    let key = "partial_rotary_factor";
    let usual = real(config, key, PARTIAL_ROTARY_FACTOR)?;
    let factor = rope.map_or(Ok(usual), |rope| real(rope, key, usual))?;
    match (head_dim as f64 * factor) as usize {
        0 => Err(ModelError::elsewhere("heads that are not rotated")),
        rotated if rotated > head_dim => Err(ModelError::broken(format!(
            "heads of {head_dim} elements have no {rotated} to rotate (partial_rotary_factor)"
        ))),
        rotated => Ok(rotated),
    }
}

fn sliding_window(
    config: &Map<String, Value>,
    family: Family,
    layers: u64,
) -> Result<Option<u64>, ModelError> {
    let qwen = matches!(family, Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe);
    let there = config.get("sliding_window").is_some_and(|window| !window.is_null());
    let has_some = !qwen || flag(config, "use_sliding_window", false);
    if !there || family == Family::Llama || !has_some {
        return Ok(None);
    }
    let window = size(config, "sliding_window", MOST_POSITIONS)? as u64;
    let windowed = match config.get("layer_types").and_then(Value::as_array) {
        Some(kinds) => {
            let windowed = |kind: &&Value| kind.as_str() == Some("sliding_attention");
            kinds.iter().take(layers as usize).filter(windowed).count() as u64
        }
        None if qwen => {
            // Qwen counts the other way round: the layers below `max_window_layers` see everything.
            let below = config.get("max_window_layers").and_then(Value::as_u64).unwrap_or(28);
            layers.saturating_sub(below)
        }
        None => layers,
    };
    let longest = optional(config, "max_position_embeddings", MOST_POSITIONS)?.unwrap_or(window);
    if windowed == 0 || window >= longest {
        return Ok(None);
    }
    if windowed < layers {
        return Err(ModelError::elsewhere("a sliding window in some of the layers"));
    }
    Ok(Some(window))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(changes: Value) -> Result<Shape, ModelError> {
        let mut config = json!({
            "architectures": ["LlamaForCausalLM"], "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        });
        for (key, value) in changes.as_object().expect("an object") {
            config[key] = value.clone();
        }
        Shape::of(config.as_object().expect("an object"))
    }

    #[test]
    fn families_have_their_biases_and_norms() {
        let llama = of(json!({"attention_bias": true, "mlp_bias": true})).expect("a model");
        assert!(llama.qkv_bias && llama.output_bias && llama.mlp_bias && !llama.head_norms);
        assert_eq!(llama.head_dim, 16);
        let qwen2 = of(json!({"architectures": ["Qwen2ForCausalLM"]})).expect("a model");
        assert!(qwen2.qkv_bias && !qwen2.output_bias);
        let qwen3 = of(json!({"architectures": ["Qwen3ForCausalLM"]})).expect("a model");
        assert!(qwen3.head_norms && qwen3.head_dim == 128);
        assert!(qwen3.experts.is_none() && qwen3.sparse == [false; 3]);
    }

    #[test]
    fn others_are_elsewhere_with_a_reason() {
        for (changes, reason) in [
            (json!({"architectures": ["DeepseekV3ForCausalLM"]}), "DeepseekV3ForCausalLM"),
            (json!({"rope_parameters": {"partial_rotary_factor": 0.5}}), "rotated in part"),
            (json!({"hidden_act": "gelu"}), "gelu"),
            (json!({"quantization_config": {"quant_method": "fp8"}}), "quantised"),
            (json!({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}), "longrope"),
        ] {
            let error = of(changes).expect_err("elsewhere");
            assert!(
                matches!(&error, ModelError::Elsewhere(why) if why.contains(reason)),
                "{error:?}"
            );
        }
        assert!(matches!(of(json!({"vocab_size": -1})), Err(ModelError::Broken(_))));
        assert!(matches!(of(json!({"hidden_size": null})), Err(ModelError::Broken(_))));
    }

    #[test]
    fn ropes_of_both_generations_are_one() {
        let new = json!({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5.0, "factor": 4.0,
            "original_max_position_embeddings": 64}});
        let old = json!({"rope_theta": 5.0, "rope_scaling": {"type": "yarn", "factor": 4.0,
            "original_max_position_embeddings": 64}});
        let (new, old) = (of(new).expect("a model"), of(old).expect("a model"));
        assert_eq!((new.rope_theta, &new.rope_scaling), (5.0, &old.rope_scaling));
        assert_eq!((new.longest_context(), old.longest_context()), (256, 256));
    }
}
