//! Facts about the model's files, in the formats that clients expect.

use serde::Serialize;
use serde_json::{Map, Value, json};

/// Facts about the files of a model.
#[derive(Debug, Clone, Default, Serialize)]
pub struct ModelFacts {
    /// The format of the files: `gguf` or `safetensors`.
    pub format: String,
    /// The family in lower case, such as `llama`.
    pub family: String,
    /// The number of parameters; `None`: not known.
    pub parameters: Option<u64>,
    /// The type of most weights, such as `BF16` or `Q4_K_M`; empty: not known.
    pub weight_type: String,
    /// The content of `config.json`, or the metadata of a GGUF file in the same form.
    #[serde(skip)]
    pub config: Map<String, Value>,
}

/// GGUF metadata keys (without the family's prefix), and their names in `config.json`.
const KEYS: [(&str, &[&str]); 12] = [
    ("attention.head_count", &["num_attention_heads"]),
    ("attention.head_count_kv", &["num_key_value_heads"]),
    ("attention.key_length", &["head_dim"]),
    ("attention.layer_norm_epsilon", &["layer_norm_eps"]),
    ("attention.layer_norm_rms_epsilon", &["rms_norm_eps"]),
    ("attention.sliding_window", &["sliding_window"]),
    ("block_count", &["num_hidden_layers"]),
    ("embedding_length", &["hidden_size"]),
    ("expert_count", &["num_experts", "n_routed_experts", "num_local_experts"]),
    ("expert_used_count", &["num_experts_per_tok"]),
    ("feed_forward_length", &["intermediate_size"]),
    ("vocab_size", &["vocab_size"]),
];

impl ModelFacts {
    /// Creates the facts of a model with this `config.json`.
    #[must_use]
    pub fn new(
        format: &str,
        config: &Map<String, Value>,
        parameters: Option<u64>,
        weight_type: &str,
    ) -> Self {
        Self {
            format: format.into(),
            family: family(config),
            parameters,
            weight_type: weight_type.into(),
            config: config.clone(),
        }
    }

    /// Returns the number of parameters in Ollama's format, such as `134.52M`; empty: not known.
    pub(crate) fn parameter_size(&self) -> String {
        let Some(parameters) = self.parameters else { return String::new() };
        let number = parameters as f64;
        match parameters {
            1_000_000_000.. if parameters.is_multiple_of(1_000_000_000) => {
                format!("{:.0}B", number / 1e9)
            }
            1_000_000_000.. => format!("{:.1}B", number / 1e9),
            1_000_000.. if parameters.is_multiple_of(1_000_000) => format!("{:.0}M", number / 1e6),
            1_000_000.. => format!("{:.2}M", number / 1e6),
            1_000.. => format!("{:.0}K", number / 1e3),
            _ => parameters.to_string(),
        }
    }

    /// Returns the model's dimensions under the metadata keys of a GGUF file. Dimensions that the
    /// model does not have are left out.
    pub(crate) fn metadata(&self, context_length: u32) -> Map<String, Value> {
        let family = &self.family;
        // Configurations of vision models have the decoder's sizes in `text_config`.
        let text = self.config.get("text_config").and_then(Value::as_object);
        let config = text.unwrap_or(&self.config);
        let number = |name: &str| config.get(name).filter(|value| value.is_number()).cloned();
        let mut found = Map::new();
        found.insert("general.architecture".into(), json!(family));
        if let Some(parameters) = self.parameters {
            found.insert("general.parameter_count".into(), json!(parameters));
        }
        found.insert(format!("{family}.context_length"), json!(context_length));
        for (key, names) in KEYS {
            if let Some(value) = names.iter().find_map(|name| number(name)) {
                found.insert(format!("{family}.{key}"), value);
            }
        }
        let rope = || config.get("rope_parameters")?.get("rope_theta").cloned();
        if let Some(base) = number("rope_theta").or_else(rope) {
            found.insert(format!("{family}.rope.freq_base"), base);
        }
        found
    }
}

/// Returns the family of a model: its `model_type`, or else the start of its architecture's name.
fn family(config: &Map<String, Value>) -> String {
    if let Some(kind) = config.get("model_type").and_then(Value::as_str) {
        return kind.to_owned();
    }
    let names = config.get("architectures").and_then(Value::as_array);
    let name = names.and_then(|names| names.first()?.as_str()).unwrap_or_default();
    name.split("For").next().unwrap_or_default().trim_end_matches("Model").to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(config: &Value, parameters: Option<u64>) -> ModelFacts {
        let config = config.as_object().expect("an object");
        ModelFacts::new("safetensors", config, parameters, "BF16")
    }

    #[test]
    fn a_family_is_the_type_or_the_architecture() {
        for (config, expected) in [
            (json!({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}), "qwen2"),
            (json!({"architectures": ["LlamaForCausalLM"]}), "llama"),
            (json!({"architectures": ["BertModel"]}), "bert"),
            (json!({"architectures": []}), ""),
            (json!({}), ""),
        ] {
            assert_eq!(facts(&config, None).family, expected, "{config}");
        }
    }

    #[test]
    fn a_number_of_parameters_is_short() {
        for (parameters, expected) in [
            (None, ""),
            (Some(512), "512"),
            (Some(22_713), "23K"),
            (Some(134_515_008), "134.52M"),
            (Some(22_000_000), "22M"),
            (Some(8_030_261_248), "8.0B"),
            (Some(70_000_000_000), "70B"),
        ] {
            assert_eq!(facts(&json!({}), parameters).parameter_size(), expected);
        }
    }

    #[test]
    fn sizes_have_the_keys_of_a_file() {
        let decoder = json!({"hidden_size": 64, "num_hidden_layers": 2, "rope_parameters": {"rope_theta": 1e6},
            "sliding_window": null, "n_routed_experts": 8, "num_attention_heads": [4, 4]});
        let config = json!({"model_type": "seen", "hidden_size": 7, "text_config": decoder});
        let found = facts(&config, Some(9)).metadata(128);
        let expected = json!({
            "general.architecture": "seen", "general.parameter_count": 9, "seen.context_length": 128,
            "seen.embedding_length": 64, "seen.block_count": 2, "seen.expert_count": 8, "seen.rope.freq_base": 1e6,
        });
        assert_eq!(Value::Object(found), expected);
    }
}
