//! Sizes and other numbers in a model's `config.json`. Each is checked once, when it is read.

use serde_json::{Map, Value};

use crate::error::ModelError;

/// The default upper bound. It is far above the values of known models, and a product of two such
/// values fits in 64 bits.
pub(crate) const MOST: u64 = 1 << 22;
/// The largest number of heads, and of elements per head.
pub(crate) const MOST_HEADS: u64 = 1 << 16;
/// The largest number of layers. The limit exists because weight names are made for each layer
/// before any file is read.
pub(crate) const MOST_LAYERS: u64 = 1 << 12;
/// The largest number of positions.
pub(crate) const MOST_POSITIONS: u64 = i32::MAX as u64;
/// The number of characters of a wrong value that an error shows.
const SHOWN: usize = 40;

/// True if Python would treat the value as true.
pub(crate) fn truthy(value: Option<&Value>) -> bool {
    match value {
        None | Some(Value::Null | Value::Bool(false)) => false,
        Some(Value::Bool(true)) => true,
        Some(Value::Number(number)) => number.as_f64() != Some(0.0),
        Some(Value::String(text)) => !text.is_empty(),
        Some(Value::Array(items)) => !items.is_empty(),
        Some(Value::Object(entries)) => !entries.is_empty(),
    }
}

/// Reads a required number from 1 to `most`.
pub(crate) fn size(config: &Map<String, Value>, key: &str, most: u64) -> Result<usize, ModelError> {
    let there = config.get(key).filter(|value| !value.is_null());
    let value =
        there.ok_or_else(|| ModelError::broken(format!("the model's config has no '{key}'")))?;
    Ok(checked(value, key, 1, most)? as usize)
}

/// Reads a required number from 1 to `most`, which is under one of several keys.
pub(crate) fn size_of(
    config: &Map<String, Value>,
    keys: &[&str],
    most: u64,
) -> Result<usize, ModelError> {
    let there = |key: &&&str| config.get(**key).is_some_and(|value| !value.is_null());
    size(config, keys.iter().find(there).unwrap_or(&keys[0]), most)
}

/// Reads a number of at most `most`; `None`: it is missing, null or 0.
pub(crate) fn optional(
    config: &Map<String, Value>,
    key: &str,
    most: u64,
) -> Result<Option<u64>, ModelError> {
    let there = config.get(key).filter(|value| truthy(Some(value)));
    there.map(|value| checked(value, key, 1, most)).transpose()
}

/// Reads a positive real number; `usual` if it is missing, null or 0.
pub(crate) fn real(config: &Map<String, Value>, key: &str, usual: f64) -> Result<f64, ModelError> {
    let Some(value) = config.get(key).filter(|value| truthy(Some(value))) else {
        return Ok(usual);
    };
    value.as_f64().filter(|value| *value > 0.0 && value.is_finite()).ok_or_else(|| {
        let what = format!("the model's config has {key} {}", shown(value));
        ModelError::broken(format!("{what}, which is no number above 0"))
    })
}

/// Checks that a value is a whole number from `least` to `most`.
pub(crate) fn checked(value: &Value, key: &str, least: u64, most: u64) -> Result<u64, ModelError> {
    value.as_u64().filter(|number| (least..=most).contains(number)).ok_or_else(|| {
        ModelError::broken(format!(
            "the model's config has {key} {}: it has to be a whole number from {least} to {most}",
            shown(value)
        ))
    })
}

/// Returns the beginning of a value, on one line.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::bert::BertShape;
    use crate::error::ModelError;
    use crate::families::{Mixer, Shape};

    use super::*;

    /// Returns values that are not valid as sizes.
    fn senseless() -> Vec<Value> {
        let huge = serde_json::from_str(&"9".repeat(300)).expect("a number");
        let long = Value::String("x".repeat(10_000));
        vec![
            json!(-1),
            json!(0.5),
            json!("64"),
            json!([1]),
            json!({"a": 1}),
            json!(1_u64 << 63),
            huge,
            long,
        ]
    }

    fn decoder(name: &str, more: &Value) -> Map<String, Value> {
        let mut config = json!({
            "architectures": [name], "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "max_position_embeddings": 128,
        });
        let config = config.as_object_mut().expect("an object");
        config.extend(more.as_object().expect("an object").clone());
        config.clone()
    }

    fn with(one: &Value, other: &Value) -> Value {
        let of = |it: &Value| it.as_object().cloned().unwrap_or_default();
        Value::Object(of(one).into_iter().chain(of(other)).collect())
    }

    fn configs() -> Vec<Map<String, Value>> {
        let experts = json!({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 2});
        let groups = json!({"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1});
        let latent = json!({"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
            "v_head_dim": 12});
        let indexed =
            with(&latent, &json!({"index_topk": 8, "index_n_heads": 4, "index_head_dim": 16}));
        let states = json!({"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "full_attention_interval": 2});
        vec![
            decoder("LlamaForCausalLM", &json!({})),
            decoder("MistralForCausalLM", &json!({"sliding_window": 16})),
            decoder("Qwen3MoeForCausalLM", &experts),
            decoder("Glm4MoeForCausalLM", &groups),
            decoder("DeepseekV3ForCausalLM", &with(&groups, &latent)),
            decoder("GlmMoeDsaForCausalLM", &with(&groups, &indexed)),
            decoder("Qwen3_5ForCausalLM", &states),
        ]
    }

    fn bert() -> Map<String, Value> {
        let mut config = decoder("BertModel", &json!({"type_vocab_size": 2}));
        config.retain(|key, _| !matches!(key.as_str(), "num_key_value_heads" | "head_dim"));
        config
    }

    fn read(config: &Map<String, Value>) -> Result<(), ModelError> {
        let shape = Shape::from_config(config)?;
        let dims = shape.ropes.iter().map(|rope| rope.dim);
        let mut sizes: Vec<usize> = dims.chain([shape.vocab_size, shape.hidden_size]).collect();
        for mixer in &shape.mixers {
            match mixer {
                Mixer::Attention(attention) => {
                    sizes.extend([attention.heads, attention.kv_heads, attention.head_dim]);
                    assert_eq!(attention.heads % attention.kv_heads, 0);
                }
                Mixer::Latent(latent) => {
                    sizes.extend([latent.heads, latent.rank, latent.nope_dim, latent.rotary_dim]);
                    sizes.extend([latent.value_dim]);
                    sizes.extend(latent.query_rank);
                }
                Mixer::Recurrence(of_layer) => {
                    sizes.extend([of_layer.heads, of_layer.key_heads, of_layer.key_dim]);
                    sizes.extend([of_layer.value_dim, of_layer.taps]);
                    assert_eq!(of_layer.heads % of_layer.key_heads, 0);
                }
                Mixer::Beside(_) | Mixer::None => {}
            }
        }
        assert!(sizes.into_iter().all(|size| size >= 1));
        Ok(())
    }

    #[test]
    fn a_size_that_is_none_is_named_in_one_line() {
        type Reader = fn(&Map<String, Value>) -> Result<(), ModelError>;
        let decoders = configs().into_iter().map(|config| (config, read as Reader));
        let encoder = (bert(), (|config| BertShape::of(config).map(drop)) as Reader);
        for (config, read) in decoders.chain([encoder]) {
            read(&config).expect("a model");
            // A model with latent attention has its head sizes under other keys.
            let latent = config.contains_key("kv_lora_rank");
            let unread = |key: &str| {
                key == "architectures"
                    || latent && ["num_key_value_heads", "head_dim"].contains(&key)
            };
            for key in config.keys().filter(|key| !unread(key)) {
                for value in senseless() {
                    let mut config = config.clone();
                    config[key] = value.clone();
                    let error = read(&config).expect_err(key).to_string();
                    assert!(error.contains(key.as_str()), "{key} {value}: {error}");
                    assert!(!error.contains('\n') && error.len() < 300, "{error}");
                }
                for value in [
                    json!(0),
                    json!(null),
                    json!(false),
                    json!(true),
                    json!(""),
                    json!(7),
                    json!(1 << 16),
                ] {
                    let mut config = config.clone();
                    config[key] = value;
                    // The result is a model or an error, but never a panic.
                    let _ = read(&config);
                }
            }
        }
    }

    #[test]
    fn heads_share_what_there_is() {
        for (changes, key) in [
            (json!({"num_attention_heads": 0}), "num_attention_heads"),
            (json!({"num_attention_heads": 5}), "num_key_value_heads"),
            (json!({"num_key_value_heads": 8}), "num_key_value_heads"),
            (json!({"num_attention_heads": 128, "head_dim": null}), "head_dim"),
            (json!({"vocab_size": 0}), "vocab_size"),
        ] {
            let error = read(&decoder("LlamaForCausalLM", &changes)).expect_err(key).to_string();
            assert!(error.contains(key), "{error}");
        }
        let mut config = bert();
        config["num_attention_heads"] = json!(5);
        let error = BertShape::of(&config).expect_err("five heads").to_string();
        assert!(error.contains("num_attention_heads"), "{error}");
    }

    #[test]
    fn divisors_of_a_rope_scaling_are_above_0() {
        let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64});
        let with = |scaling: &Value| decoder("LlamaForCausalLM", &json!({"rope_scaling": scaling}));
        read(&with(&scaling)).expect("a model");
        for key in ["factor", "low_freq_factor", "high_freq_factor"] {
            for value in [json!(0), json!(-1.0), json!("8"), json!([8])] {
                let mut scaling = scaling.clone();
                scaling[key] = value;
                let error = read(&with(&scaling)).expect_err(key).to_string();
                assert!(error.contains(key), "{error}");
            }
        }
    }
}
