//! The shape of a BERT (Devlin et al. 2019) or a `RoBERTa` (Liu et al. 2019), read from a
//! `config.json`. A `RoBERTa` has other weight names and another first position.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::ModelError;
use crate::sizes::{MOST, MOST_HEADS, MOST_LAYERS, MOST_POSITIONS, optional, real, size};

const ARCHITECTURES: [&str; 6] = [
    "BertModel",
    "BertForSequenceClassification",
    "RobertaModel",
    "RobertaForSequenceClassification",
    "XLMRobertaModel",
    "XLMRobertaForSequenceClassification",
];
/// The values of `model_type`, and the architecture that each implies.
const MODEL_TYPES: [(&str, &str); 3] =
    [("bert", "BertModel"), ("roberta", "RobertaModel"), ("xlm-roberta", "XLMRobertaModel")];
/// The prefixes of the encoder's weights in a checkpoint that also has a head.
const BODIES: [&str; 2] = ["bert.", "roberta."];
/// The prefixes of a `RoBERTa`'s scoring layers, and BERT's names for these layers.
const SCORES: [(&str, &str); 2] =
    [("classifier.dense.", "pooler.dense."), ("classifier.out_proj.", "classifier.")];
/// The padding token id of a `RoBERTa` whose config does not state one.
const PADDING: u64 = 1;
/// A buffer of position ids that some checkpoints contain.
const POSITIONS: &str = "embeddings.position_ids";
/// The weight of the position embedding.
const PLACES: &str = "embeddings.position_embeddings.weight";

/// The data from which an encoder is built. Sizes are in elements, and positions in tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BertShape {
    /// The name in `architectures` of a `config.json`.
    pub architecture: String,
    /// The number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Elements of a hidden state.
    pub hidden_size: usize,
    /// The inner size of the feed-forward part of a layer.
    pub intermediate_size: usize,
    /// The number of layers.
    pub layers: usize,
    /// The number of heads. Each has separate keys and values.
    pub heads: usize,
    /// The epsilon of the layer norms.
    pub layer_norm_eps: f64,
    /// The largest number of tokens of a prompt.
    pub max_positions: usize,
    /// The row of the position embedding that a prompt's first token uses.
    pub first_position: usize,
    /// The number of token types (segments).
    pub kinds: usize,
    /// The activation of the feed-forward part, by its name in transformers.
    pub activation: String,
}

/// True if a `config.json` is that of a BERT or a `RoBERTa`. A config without `architectures` is
/// classified by `model_type`.
#[must_use]
pub fn is_bert(config: &Map<String, Value>) -> bool {
    let names = config.get("architectures").and_then(Value::as_array);
    match names.filter(|names| !names.is_empty()) {
        Some(names) => {
            names.iter().filter_map(Value::as_str).any(|name| ARCHITECTURES.contains(&name))
        }
        None => of_type(config).is_some(),
    }
}

/// Returns the architecture that `model_type` implies, for a config without `architectures`.
fn of_type(config: &Map<String, Value>) -> Option<&'static str> {
    let kind = config.get("model_type").and_then(Value::as_str)?;
    MODEL_TYPES.iter().find_map(|&(name, architecture)| (name == kind).then_some(architecture))
}

impl BertShape {
    /// Reads a `config.json`.
    ///
    /// # Errors
    /// The config needs a feature that is not supported, or lacks a needed value.
    pub fn of(config: &Map<String, Value>) -> Result<Self, ModelError> {
        let text = |key: &str| config.get(key).and_then(Value::as_str).filter(|it| !it.is_empty());
        match text("position_embedding_type") {
            None | Some("absolute") => {}
            Some(other) => {
                return Err(ModelError::broken(format!(
                    "position_embedding_type '{other}' is not supported; supported: absolute"
                )));
            }
        }
        let activation = text("hidden_act").unwrap_or("gelu").to_owned();
        if !["gelu", "gelu_new", "gelu_pytorch_tanh", "relu"].contains(&activation.as_str()) {
            return Err(ModelError::broken(format!(
                "hidden_act '{activation}' is not supported: use gelu, gelu_new, gelu_pytorch_tanh, relu"
            )));
        }
        if config.get("is_decoder").and_then(Value::as_bool) == Some(true) {
            return Err(ModelError::broken("a BERT that is a decoder is not supported"));
        }
        let usual = |key, usual, most| -> Result<usize, ModelError> {
            Ok(optional(config, key, most)?.unwrap_or(usual) as usize)
        };
        let heads = size(config, "num_attention_heads", MOST_HEADS)?;
        let hidden_size = size(config, "hidden_size", MOST)?;
        if !hidden_size.is_multiple_of(heads) {
            return Err(ModelError::broken(format!(
                "{hidden_size} elements (hidden_size) can't be shared by {heads} heads (num_attention_heads) equally"
            )));
        }
        let names = config.get("architectures").and_then(Value::as_array).into_iter().flatten();
        let named = names.filter_map(Value::as_str).find(|name| ARCHITECTURES.contains(name));
        let architecture = named.or_else(|| of_type(config)).unwrap_or(ARCHITECTURES[0]);
        let positions = usual("max_position_embeddings", 512, MOST_POSITIONS)?;
        // A `RoBERTa` reserves the position with the padding id, and texts begin after it.
        let first = match architecture.contains("Roberta") {
            true => optional(config, "pad_token_id", MOST)?.unwrap_or(PADDING) as usize + 1,
            false => 0,
        };
        if first >= positions {
            return Err(ModelError::broken(format!(
                "max_position_embeddings {positions} leaves no position after the {first} for padding"
            )));
        }
        Ok(Self {
            architecture: architecture.to_owned(),
            vocab_size: size(config, "vocab_size", MOST)?,
            hidden_size,
            intermediate_size: size(config, "intermediate_size", MOST)?,
            layers: size(config, "num_hidden_layers", MOST_LAYERS)?,
            heads,
            layer_norm_eps: real(config, "layer_norm_eps", 1e-12)?,
            max_positions: positions - first,
            first_position: first,
            kinds: usual("type_vocab_size", 2, MOST)?,
            activation,
        })
    }

    /// Returns the encoder's name for a weight of a checkpoint; `None` if the encoder does not use
    /// the weight. `scores` is true if the model has scoring layers.
    #[must_use]
    pub fn name_of(name: &str, scores: bool) -> Option<String> {
        let name = BODIES.iter().find_map(|body| name.strip_prefix(body)).unwrap_or(name);
        let spare = name == POSITIONS || !scores && name.starts_with("pooler.dense.");
        let renamed = SCORES.iter().find_map(|(theirs, ours)| {
            name.strip_prefix(theirs).map(|rest| format!("{ours}{rest}"))
        });
        (!spare).then(|| renamed.unwrap_or_else(|| name.to_owned()))
    }

    /// Returns the range of a weight's rows that is used, as the first row and the number of rows;
    /// `None` means all rows.
    pub(crate) fn rows_of(&self, name: &str) -> Option<(usize, usize)> {
        (name == PLACES && self.first_position > 0)
            .then_some((self.first_position, self.max_positions))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(changes: &Value) -> Result<BertShape, ModelError> {
        let mut config = json!({
            "architectures": ["BertModel"], "vocab_size": 131, "hidden_size": 48, "intermediate_size": 96,
            "num_hidden_layers": 3, "num_attention_heads": 4,
        });
        for (key, value) in changes.as_object().expect("an object") {
            config[key] = value.clone();
        }
        let config = config.as_object().expect("an object");
        assert!(is_bert(config));
        BertShape::of(config)
    }

    #[test]
    fn a_config_says_little() {
        let shape = of(&json!({"layer_norm_eps": 1e-5})).expect("a model");
        assert_eq!((shape.max_positions, shape.kinds, shape.activation.as_str()), (512, 2, "gelu"));
        assert!((shape.layer_norm_eps - 1e-5).abs() < 1e-12);
    }

    #[test]
    fn whatever_would_be_computed_wrongly_is_refused() {
        for (changes, why) in [
            (json!({"hidden_act": "swish"}), "hidden_act 'swish'"),
            (json!({"position_embedding_type": "relative_key"}), "relative_key"),
            (json!({"is_decoder": true}), "decoder"),
            (json!({"hidden_size": null}), "hidden_size"),
        ] {
            let found = of(&changes);
            assert!(matches!(&found, Err(error) if error.to_string().contains(why)), "{found:?}");
        }
    }

    #[test]
    fn a_config_without_architectures_goes_by_its_type() {
        let is = |config: Value| is_bert(config.as_object().expect("an object"));
        assert!(
            is(json!({"model_type": "bert"}))
                && is(json!({"architectures": [], "model_type": "bert"}))
        );
        assert!(!is(json!({"model_type": "llama"})) && !is(json!({})));
        assert!(!is(json!({"architectures": ["BertForMaskedLM"], "model_type": "bert"})));
    }

    #[test]
    fn positions_of_a_roberta_begin_behind_padding() {
        let xlm =
            of(&json!({"architectures": ["XLMRobertaModel"], "max_position_embeddings": 514}));
        let xlm = xlm.expect("a model");
        assert_eq!((xlm.max_positions, xlm.first_position), (512, 2));
        assert_eq!(xlm.rows_of("embeddings.position_embeddings.weight"), Some((2, 512)));
        assert_eq!(xlm.rows_of("embeddings.word_embeddings.weight"), None);
        let other = json!({"architectures": ["RobertaModel"], "pad_token_id": 5});
        assert_eq!(of(&other).expect("a model").first_position, 6);
        let plain = of(&json!({})).expect("a model");
        assert_eq!(plain.rows_of("embeddings.position_embeddings.weight"), None);
        let typed = json!({"architectures": null, "model_type": "xlm-roberta"});
        assert_eq!(of(&typed).expect("a model").architecture, "XLMRobertaModel");
        let few = json!({"architectures": ["RobertaModel"], "max_position_embeddings": 2});
        assert!(of(&few).is_err_and(|error| error.to_string().contains("max_position_embeddings")));
        let name = |name| BertShape::name_of(name, true).expect("a weight");
        assert_eq!(name("classifier.dense.bias"), "pooler.dense.bias");
        assert_eq!(name("classifier.out_proj.weight"), "classifier.weight");
        assert_eq!(
            name("roberta.encoder.layer.0.output.dense.bias"),
            "encoder.layer.0.output.dense.bias"
        );
    }

    #[test]
    fn weights_lose_the_name_of_the_body() {
        let name = |name, scores| BertShape::name_of(name, scores);
        assert_eq!(
            name("bert.embeddings.LayerNorm.bias", true).as_deref(),
            Some("embeddings.LayerNorm.bias")
        );
        assert_eq!(name("embeddings.position_ids", true), None);
        assert_eq!(name("pooler.dense.weight", false), None);
        assert_eq!(name("bert.pooler.dense.weight", true).as_deref(), Some("pooler.dense.weight"));
    }
}
