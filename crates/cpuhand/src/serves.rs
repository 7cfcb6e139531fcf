//! The models and settings that this hand supports, and the reasons why others are refused. This
//! module is the only list of the features that the hand lacks.

use forebay_kernels::Sizes;
use forebay_protocol::HandConfig;
use forebay_weights::{BertShape, ModelError, ModelShape, Scheme, Shape};
use serde_json::Value;

use crate::encoder;
use crate::parts::DecoderParts;
use crate::pooled::{Pooler, kind};

/// Weight formats that a hand converts to or chooses. All other formats are those of checkpoints.
const MADE: [&str; 3] = ["auto", "w8a8_int8", "gguf"];
/// The common name of all checkpoint formats with 8-bit floats.
const FLOATS: &str = "fp8";

/// The requested model and settings, which the brain knows before it starts a hand.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// The shape of the model.
    pub model: &'a ModelShape,
    /// The kind of pooling; `None` if the model generates tokens.
    pub pooling: Option<&'a str>,
    /// True if the model accepts images.
    pub sees: bool,
    /// The kind of device.
    pub device: &'a str,
    /// The weight format for matrix products, or the checkpoint's format. `auto` means a GGUF
    /// file's blocks if they are faster.
    pub quantization: Option<&'a str>,
    /// The data type of keys and values in pages; `None` if it is the model's type.
    pub kv_cache_dtype: Option<&'a str>,
    /// The number of positions per page.
    pub page_size: u32,
    /// The number of ranks in the group that computes the model.
    pub ranks: u32,
    /// True if requests may continue with selected positions only, while host pages hold the other
    /// positions.
    pub sparse: bool,
    /// True if the user named an attention backend.
    pub attention_backend: bool,
    /// True if requests may name adapters.
    pub adapters: bool,
    /// True if a draft model or a drafting head is used.
    pub draft_model: bool,
}

impl<'a> Asked<'a> {
    /// Reads the settings from a hand's configuration.
    pub(crate) fn of(config: &'a HandConfig, model: &'a ModelShape) -> Self {
        let there = |key: &str| !config.model.get(key).is_none_or(Value::is_null);
        Self {
            model,
            pooling: kind(config),
            sees: there("images"),
            device: &config.device,
            quantization: config.quantization.as_deref(),
            kv_cache_dtype: config.kv_cache_dtype.as_deref(),
            page_size: config.page_size,
            ranks: config.world_size,
            sparse: config.hot_row_tokens.is_some(),
            attention_backend: config.attention_backend.is_some(),
            adapters: config.lora.is_some(),
            draft_model: config.draft.is_some(),
        }
    }
}

/// Checks that this hand serves a model with these settings. The error text completes a sentence
/// that begins with `the Rust hand does not have`.
///
/// # Errors
/// If the hand lacks a feature, or the model's config is invalid.
pub fn serves(asked: &Asked<'_>) -> Result<(), ModelError> {
    let lacks = |what: &str| Err(ModelError::Elsewhere(what.into()));
    if asked.device != "cpu" {
        return lacks(&format!("the device {}", asked.device));
    }
    let encodes = sees_whole(asked.model);
    let knows = |kind: &&str| if encodes { encoder::knows(kind) } else { Pooler::knows(kind) };
    if let Some(kind) = asked.pooling.filter(|kind| !knows(kind)) {
        return lacks(&format!("the pooling {kind:?}"));
    }
    if asked.sees {
        return lacks("images");
    }
    if asked.ranks > 1 {
        return lacks("several ranks");
    }
    if asked.sparse {
        return lacks("sparse decoding");
    }
    if asked.attention_backend {
        return lacks("backends of attention");
    }
    // The code that starts hands refuses adapters for such models before it chooses a hand.
    if asked.adapters && (encodes || asked.pooling.is_some()) {
        return lacks("adapters of models that pool");
    }
    if asked.draft_model {
        return lacks("draft models, or draft heads");
    }
    if let Some(why) = why_no_codes(asked).or_else(|| why_not_stored(asked)) {
        return Err(ModelError::Broken(why));
    }
    if encodes && asked.pooling.is_none() {
        return Err(ModelError::Broken("an encoder generates nothing".into()));
    }
    match asked.model {
        ModelShape::Encoder(shape) => serves_encoder(shape),
        ModelShape::Decoder(shape) => DecoderParts::new(shape).map(drop),
    }
}

/// Why pages can't store the requested 8-bit type; `None` if they can, or if only another hand can
/// decide.
#[must_use]
pub fn why_no_codes(asked: &Asked<'_>) -> Option<String> {
    let kept = asked.kv_cache_dtype?;
    let Some(shape) = asked.model.decoder().filter(|shape| !shape.both_ways()) else {
        return Some("--kv-cache-dtype is for keys and values, and an encoder keeps none".into());
    };
    if kept != "int8" {
        return (asked.device == "cpu").then(|| {
            format!("--kv-cache-dtype {kept} is for a GPU's kernels: leave it off, or use int8")
        });
    }
    let parts = DecoderParts::new(shape).ok()?;
    let takes = |dim| Sizes::takes_codes(asked.page_size as usize, dim);
    let kind = parts.kinds.iter().find(|kind| !takes(kind.attention.head_dim))?;
    let (what, size) =
        (if kind.latent.is_some() { "latent rows" } else { "heads" }, asked.page_size);
    let dim = kind.attention.head_dim;
    Some(format!(
        "--kv-cache-dtype int8 needs pages of a multiple of 16 tokens and {what} of a multiple of 32: there are {size} and {dim}"
    ))
}

/// Why a checkpoint does not have the format that `--quantization` requires; `None` if it has this
/// format, or if only another hand can decide.
#[must_use]
pub fn why_not_stored(asked: &Asked<'_>) -> Option<String> {
    let named = asked.quantization.filter(|name| !MADE.contains(name))?;
    if asked.device != "cpu" {
        return None;
    }
    let stored = asked.model.decoder().and_then(|shape| shape.quantised.as_ref());
    let missing = match stored {
        None if named == FLOATS => {
            return Some(format!(
                "quantization {named} makes 8-bit floats for a GPU's kernels: leave it off, or use w8a8_int8 on a CPU"
            ));
        }
        None => "the checkpoint has no quantization_config".to_owned(),
        Some(it) if named == FLOATS && matches!(it.scheme, Scheme::Fp8 { .. }) => return None,
        Some(it) if named != FLOATS && it.method == named => return None,
        Some(it) => format!("the checkpoint is quantised by {}", it.method),
    };
    Some(format!("quantization {named} is not what the model has: {missing}; leave it off"))
}

/// True if attention is bidirectional, so that the model caches no keys and values.
fn sees_whole(model: &ModelShape) -> bool {
    model.decoder().is_none_or(Shape::both_ways)
}

fn serves_encoder(shape: &BertShape) -> Result<(), ModelError> {
    let head = shape.hidden_size / shape.heads.max(1);
    if shape.hidden_size != head * shape.heads
        || [head, shape.intermediate_size].iter().any(|size| size % 2 > 0)
    {
        return Err(ModelError::Elsewhere("inner dimensions that are odd".into()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn shape(config: &Value) -> ModelShape {
        let config = config.as_object().expect("an object");
        ModelShape::from_config(config, false).expect("a model")
    }

    fn asked<'a>(model: &'a ModelShape, pooling: Option<&'a str>) -> Asked<'a> {
        Asked {
            model,
            pooling,
            sees: false,
            device: "cpu",
            quantization: None,
            kv_cache_dtype: None,
            page_size: 16,
            ranks: 1,
            sparse: false,
            attention_backend: false,
            adapters: false,
            draft_model: false,
        }
    }

    #[test]
    fn what_it_lacks_has_a_sentence() {
        let model = shape(&json!({
            "architectures": ["LlamaForCausalLM"], "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 128,
        }));
        let good = asked(&model, None);
        assert_eq!(serves(&good), Ok(()));
        assert_eq!(serves(&Asked { quantization: Some("gguf"), adapters: true, ..good }), Ok(()));
        assert_eq!(serves(&Asked { pooling: Some("last"), ..good }), Ok(()));
        for (asked, why) in [
            (Asked { pooling: Some("cls"), ..good }, "the pooling \"cls\""),
            (Asked { sees: true, ..good }, "images"),
            (Asked { draft_model: true, ..good }, "draft models, or draft heads"),
            (Asked { device: "cuda", ..good }, "the device cuda"),
            (Asked { ranks: 2, ..good }, "several ranks"),
            (Asked { sparse: true, ..good }, "sparse decoding"),
            (Asked { attention_backend: true, ..good }, "backends of attention"),
            (
                Asked { adapters: true, pooling: Some("last"), ..good },
                "adapters of models that pool",
            ),
        ] {
            assert_eq!(serves(&asked), Err(ModelError::Elsewhere(why.into())));
        }
        let Err(ModelError::Broken(why)) = serves(&Asked { kv_cache_dtype: Some("int8"), ..good })
        else {
            panic!("heads of 16 have no codes");
        };
        assert!(why.ends_with("heads of a multiple of 32: there are 16 and 16"), "{why}");
        let floats = Asked { kv_cache_dtype: Some("fp8_e4m3"), ..good };
        assert!(why_no_codes(&floats).is_some_and(|why| why.ends_with("or use int8")));
        assert_eq!(why_no_codes(&Asked { device: "cuda", ..floats }), None);
    }

    #[test]
    fn a_flag_may_name_the_form_of_the_checkpoint() {
        let model = |stored: Value| {
            shape(&json!({
                "architectures": ["LlamaForCausalLM"], "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96,
                "num_hidden_layers": 3, "num_attention_heads": 4, "quantization_config": stored,
            }))
        };
        let float = json!({"num_bits": 8, "type": "float", "strategy": "channel"});
        let group = json!({"weights": float, "input_activations": null});
        let models = [
            model(Value::Null),
            model(json!({"quant_method": "fp8"})),
            model(json!({"quant_method": "awq", "bits": 4})),
            model(json!({"quant_method": "gptq", "bits": 4})),
            model(
                json!({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"a": group}}),
            ),
        ];
        for (model, fitting) in models.iter().zip([
            &[][..],
            &["fp8"],
            &["awq"],
            &["gptq"],
            &["fp8", "compressed-tensors"],
        ]) {
            for named in ["fp8", "awq", "gptq", "compressed-tensors"] {
                let asked = Asked { quantization: Some(named), ..asked(model, None) };
                let found = serves(&asked);
                assert_eq!(found.is_ok(), fitting.contains(&named), "{found:?}");
                let on_a_gpu = Asked { device: "cuda", ..asked };
                assert_eq!(why_not_stored(&on_a_gpu), None);
            }
            for made in MADE {
                assert_eq!(
                    serves(&Asked { quantization: Some(made), ..asked(model, None) }),
                    Ok(())
                );
            }
        }
        let why = |model, named| {
            let why = why_not_stored(&Asked { quantization: Some(named), ..asked(model, None) });
            why.expect("a reason")
        };
        assert!(why(&models[0], "fp8").contains("makes 8-bit floats for a GPU's kernels"));
        assert!(why(&models[0], "awq").contains("the checkpoint has no quantization_config"));
        assert!(why(&models[3], "awq").contains("the checkpoint is quantised by gptq"));
    }

    #[test]
    fn encoders_pool() {
        let encoder = |heads| {
            shape(&json!({
                "architectures": ["BertModel"], "vocab_size": 131, "hidden_size": 48, "intermediate_size": 96,
                "num_hidden_layers": 3, "num_attention_heads": heads,
            }))
        };
        let (even, odd) = (encoder(4), encoder(16));
        assert_eq!(serves(&asked(&even, Some("mean"))), Ok(()));
        assert!(matches!(serves(&asked(&even, None)), Err(ModelError::Broken(_))));
        assert!(matches!(serves(&asked(&even, Some("last"))), Err(ModelError::Elsewhere(_))));
        assert!(matches!(serves(&asked(&odd, Some("cls"))), Err(ModelError::Elsewhere(_))));
    }
}
