//! Draft heads for speculative decoding. A head is one layer that reads the target model's states.
//! It has separate files (EAGLE-3), or follows the model's last layer (MTP).

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::describe::safetensors_files;
use crate::error::ModelError;
use crate::families::Shape;
use crate::json::read_object;
use crate::manifest::Manifest;
use crate::model::ModelShape;
use crate::sizes::{MOST, MOST_LAYERS, checked, optional, truthy};

/// The names of EAGLE-3 heads in `architectures` of a `config.json`.
const EAGLE3_NAMES: [&str; 2] = ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"];
/// The architectures of target models that an EAGLE-3 head may have.
const EAGLE3_OF: [&str; 2] = ["LlamaForCausalLM", "Qwen3ForCausalLM"];
/// The architectures whose MTP layer can be used.
const MTP_OF: [&str; 2] = ["DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"];
const OWN_EMBEDDING: &str = "embed_tokens.weight";
const OWN_OUTPUT: &str = "lm_head.weight";
const OFFSETS: &str = "d2t";
const AUX_LAYERS: &str = "eagle_aux_hidden_state_layer_ids";
const MTP_LAYERS: &str = "num_nextn_predict_layers";

/// A draft head.
#[derive(Debug, Clone)]
pub struct DraftHead {
    parts: HeadParts,
    /// For EAGLE-3, a model that consists of the head's layer; for MTP, the target model with the
    /// MTP layer as an additional last layer.
    shape: ModelShape,
    files: Vec<PathBuf>,
    /// `None`: the head is described without its weights.
    manifest: Option<Manifest>,
}

/// The properties of a head besides its layer, in the form that hands read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct HeadParts {
    kind: HeadKind,
    /// The layers whose inputs are the head's features. An index equal to the number of layers
    /// means the final states.
    taps: Vec<usize>,
    norm_before_residual: bool,
    /// The size of the head's vocabulary.
    vocab_size: usize,
    /// True if a table maps the head's token ids to the target's.
    mapped: bool,
    own_embedding: bool,
    own_output: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum HeadKind {
    Eagle3,
    Mtp,
}

impl fmt::Display for HeadKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Eagle3 => "an EAGLE-3 head",
            Self::Mtp => "an MTP layer",
        })
    }
}

impl DraftHead {
    /// Reads an EAGLE-3 head (Li et al. 2025) for `target` from a folder. If `weights` is false,
    /// the folder needs no safetensors.
    ///
    /// # Errors
    /// The folder has no such head, or the head belongs to another model.
    pub fn eagle3(folder: &Path, target: &Shape, weights: bool) -> Result<Self, ModelError> {
        check_family(HeadKind::Eagle3, &EAGLE3_OF, target)?;
        let config = read_object(&folder.join("config.json"), false)?;
        let named = folder.display();
        let names = config.get("architectures").and_then(Value::as_array);
        let mut names = names.into_iter().flatten().filter_map(Value::as_str);
        if !names.clone().any(|name| EAGLE3_NAMES.contains(&name)) {
            let found = names.next().unwrap_or("no architecture");
            return Err(ModelError::Unserved(format!(
                "{found} of {named} as a head that drafts: {} is read",
                EAGLE3_NAMES[0]
            )));
        }
        let shape = layer_of_eagle3(&config)?;
        let unfit = |what: String| ModelError::broken(format!("the head {named} {what}"));
        let of_states = optional(&config, "target_hidden_size", MOST)?;
        let read = of_states.map_or(shape.hidden_size, |size| size as usize);
        for (what, own, wanted) in [
            ("states of", read, target.hidden_size),
            ("states of", shape.hidden_size, target.hidden_size),
            ("a vocabulary of", shape.vocab_size, target.vocab_size),
        ] {
            if own != wanted {
                return Err(unfit(format!(
                    "is of another model: it has {what} {own}, not {wanted}"
                )));
            }
        }
        let taps = taps(&config, target.layers.len())?;
        let vocab_size = optional(&config, "draft_vocab_size", MOST)?;
        let vocab_size = vocab_size.map_or(shape.vocab_size, |size| size as usize);
        let shape = ModelShape::Decoder(Box::new(shape));
        let (files, manifest) = match weights {
            false => (Vec::new(), None),
            true => {
                let files = safetensors_files(folder)?;
                let manifest = Manifest::new("safetensors", &files, &shape, false, &[])?;
                (files, Some(manifest))
            }
        };
        let has = |name: &str, usual| manifest.as_ref().map_or(usual, |it| it.has(name));
        let parts = HeadParts {
            kind: HeadKind::Eagle3,
            taps,
            norm_before_residual: truthy(config.get("norm_before_residual")),
            vocab_size,
            mapped: has(OFFSETS, vocab_size != target.vocab_size),
            own_embedding: has(OWN_EMBEDDING, false),
            own_output: has(OWN_OUTPUT, true),
        };
        let fits = vocab_size == target.vocab_size || parts.mapped && parts.own_output;
        if !fits {
            let lacks = if parts.mapped { OWN_OUTPUT } else { OFFSETS };
            return Err(unfit(format!("drafts {vocab_size} tokens, and has no {lacks}")));
        }
        Ok(Self { parts, shape, files, manifest })
    }

    /// Reads the layer for multi-token prediction (DeepSeek-V3, 2024) from the model's safetensors.
    /// Without `files`, the head is described without its weights.
    ///
    /// # Errors
    /// The model has no such layer.
    pub fn mtp(
        config: &Map<String, Value>,
        files: &[PathBuf],
        target: &Shape,
    ) -> Result<Self, ModelError> {
        check_family(HeadKind::Mtp, &MTP_OF, target)?;
        let number = target.layers.len();
        let lacks = || ModelError::broken(format!("the model has no MTP layer ({MTP_LAYERS})"));
        optional(config, MTP_LAYERS, MOST_LAYERS)?.ok_or_else(lacks)?;
        let mut shape = target.clone();
        shape.layers.extend(target.layers.last().copied());
        let shape = ModelShape::Decoder(Box::new(shape));
        let manifest = match files {
            [] => None,
            files => {
                let whole = Manifest::new("safetensors", files, &shape, false, &[])?;
                let own = whole.below(&format!("model.layers.{number}."));
                if own.is_empty() {
                    return Err(ModelError::broken(format!(
                        "the model's files have no layer {number}, which its config names ({MTP_LAYERS})"
                    )));
                }
                Some(own)
            }
        };
        let output = format!("model.layers.{number}.shared_head.head.weight");
        let parts = HeadParts {
            kind: HeadKind::Mtp,
            taps: vec![number],
            norm_before_residual: false,
            vocab_size: target.vocab_size,
            mapped: false,
            own_embedding: false,
            own_output: manifest.as_ref().is_some_and(|it| it.has(&output)),
        };
        Ok(Self { parts, shape, files: files.to_vec(), manifest })
    }

    /// Returns the head's description for hands.
    #[must_use]
    pub fn told(&self) -> Value {
        json!({
            "head": self.parts,
            "shape": self.shape,
            "files": self.files,
            "manifest": self.manifest.as_ref().map(Manifest::to_json),
        })
    }
}

/// Checks that this kind of head supports the target's architecture.
fn check_family(kind: HeadKind, known: &[&str], target: &Shape) -> Result<(), ModelError> {
    let of = target.family.architecture;
    if known.contains(&of) {
        return Ok(());
    }
    Err(ModelError::Unserved(format!("{kind} of {of}: it is read of {}", known.join(" and "))))
}

/// Reads the layer of an EAGLE-3 head, as a model of one layer.
fn layer_of_eagle3(config: &Map<String, Value>) -> Result<Shape, ModelError> {
    let mut config = config.clone();
    config.insert("architectures".into(), json!([EAGLE3_OF[0]]));
    config.insert("tie_word_embeddings".into(), json!(false));
    let shape = Shape::from_config(&config)?;
    shape.check_served()?;
    if shape.layers.len() != 1 {
        return Err(ModelError::unserved_part(&format!(
            "an EAGLE-3 head of {} layers",
            shape.layers.len()
        )));
    }
    Ok(shape)
}

/// Returns the layers whose inputs an EAGLE-3 head reads. The default is the third layer, the
/// middle layer and the third from last.
fn taps(config: &Map<String, Value>, layers: usize) -> Result<Vec<usize>, ModelError> {
    let nested = config.get("eagle_config").and_then(Value::as_object);
    if nested.is_some_and(|it| it.get("use_aux_hidden_state") == Some(&Value::Bool(false))) {
        return Err(ModelError::unserved_part("an EAGLE-3 head that reads the final states"));
    }
    let list = |config: &Map<String, Value>| {
        config.get(AUX_LAYERS).and_then(Value::as_array).filter(|it| !it.is_empty()).cloned()
    };
    // A list inside `eagle_config` (SGLang) has the indices of layers whose outputs are read. A
    // list outside (vLLM) has those whose inputs are read.
    let (found, behind) = match (list(config), nested.and_then(list)) {
        (Some(found), _) => (found, 0),
        (None, Some(found)) => (found, 1),
        (None, None) => {
            let mut usual = vec![2_usize.min(layers - 1), layers / 2, layers.saturating_sub(3)];
            usual.sort_unstable();
            return Ok(usual);
        }
    };
    let most = layers.saturating_sub(1 + behind) as u64;
    let one = |value: &Value| Ok(checked(value, AUX_LAYERS, 0, most)? as usize + behind);
    let mut found = found.iter().map(one).collect::<Result<Vec<usize>, ModelError>>()?;
    found.sort_unstable();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(value: Value) -> Map<String, Value> {
        value.as_object().cloned().unwrap_or_default()
    }

    fn target(layers: usize, name: &str) -> Shape {
        let config = json!({
            "architectures": [name], "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        });
        Shape::from_config(&object(config)).expect("a shape")
    }

    fn eagle3(changes: &Value, target: &Shape) -> Result<Value, ModelError> {
        let mut config = object(json!({
            "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 131, "hidden_size": 64,
            "intermediate_size": 80, "num_hidden_layers": 1, "num_attention_heads": 2,
            "draft_vocab_size": 40,
        }));
        config.extend(object(changes.clone()));
        let folder = tempfile::tempdir().expect("a folder");
        let text = serde_json::to_string(&config).expect("JSON");
        std::fs::write(folder.path().join("config.json"), text).expect("a file");
        DraftHead::eagle3(folder.path(), target, false).map(|head| head.told())
    }

    #[test]
    fn taps_are_numbers_of_inputs() {
        let target = target(9, "Qwen3ForCausalLM");
        for (changes, expected) in [
            (json!({}), [2, 4, 6]),
            (json!({AUX_LAYERS: [8, 1, 5]}), [1, 5, 8]),
            (json!({"eagle_config": {AUX_LAYERS: [1, 3, 7]}}), [2, 4, 8]),
            (json!({"eagle_config": {AUX_LAYERS: []}}), [2, 4, 6]),
        ] {
            let told = eagle3(&changes, &target).expect("a head");
            assert_eq!(told["head"]["taps"], json!(expected), "{changes}");
        }
        let told = eagle3(&json!({"norm_before_residual": true}), &target).expect("a head");
        let parts = json!({
            "kind": "eagle3", "taps": [2, 4, 6], "norm_before_residual": true, "vocab_size": 40,
            "mapped": true, "own_embedding": false, "own_output": true,
        });
        assert_eq!(told["head"], parts);
        assert_eq!(told["shape"]["decoder"]["layers"].as_array().map(Vec::len), Some(1));
    }

    #[test]
    fn what_does_not_fit_is_said() {
        let llama = target(3, "LlamaForCausalLM");
        for (changes, why) in [
            (json!({"vocab_size": 130}), "of another model: it has a vocabulary of 130, not 131"),
            (json!({"hidden_size": 32}), "it has states of 32, not 64"),
            (json!({"target_hidden_size": 96}), "it has states of 96, not 64"),
            (json!({"num_hidden_layers": 2}), "an EAGLE-3 head of 2 layers"),
            (json!({AUX_LAYERS: [1, 3]}), "a whole number from 0 to 2"),
            (json!({"eagle_config": {AUX_LAYERS: [2]}}), "a whole number from 0 to 1"),
            (json!({"eagle_config": {"use_aux_hidden_state": false}}), "reads the final states"),
            (json!({"architectures": ["LlamaForCausalLMEagle"]}), "LlamaForCausalLMEagle of"),
        ] {
            let error = eagle3(&changes, &llama).unwrap_err().to_string();
            assert!(error.contains(why), "{changes}: {error}");
        }
        let other = target(3, "Phi3ForCausalLM");
        let error = eagle3(&json!({}), &other).unwrap_err().to_string();
        assert!(error.contains("an EAGLE-3 head of Phi3ForCausalLM"), "{error}");
        let error = DraftHead::mtp(&Map::new(), &[], &llama).unwrap_err().to_string();
        assert!(error.contains("an MTP layer of LlamaForCausalLM"), "{error}");
    }

    #[test]
    fn an_mtp_layer_is_behind_the_last_one() {
        let config = object(json!({
            "architectures": ["Glm4MoeForCausalLM"], "vocab_size": 131, "hidden_size": 64,
            "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        }));
        let target = Shape::from_config(&config).expect("a shape");
        let none = DraftHead::mtp(&config, &[], &target).unwrap_err().to_string();
        assert!(none.contains("the model has no MTP layer"), "{none}");
        let mut config = config;
        config.insert(MTP_LAYERS.into(), json!(1));
        let told = DraftHead::mtp(&config, &[], &target).expect("a head").told();
        assert_eq!(told["head"]["taps"], json!([3]));
        let layers = told["shape"]["decoder"]["layers"].as_array().cloned().expect("layers");
        assert_eq!((layers.len(), &layers[3]), (4, &layers[2]));
    }
}
