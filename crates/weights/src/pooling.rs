//! How a model pools, read from the files of its repository.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::bert::is_bert;
use crate::error::ModelError;
use crate::families::{Family, Shape, score_layers};
use crate::json::{read_json, read_object};
use crate::model::ModelShape;
use crate::sizes::optional;
use crate::vector::{VectorLayer, of_config, size_behind};

const MODULES: &str = "modules.json";
/// The suffix of the architecture names of cross-encoders.
const SCORER: &str = "ForSequenceClassification";
/// The largest number of labels of a classifier.
const MOST_LABELS: u64 = 1 << 16;
/// The size limit of `modules.json` in bytes. The file names a handful of modules.
const MOST_JSON: u64 = 1 << 20;
const MODES: [(&str, &str); 6] = [
    ("pooling_mode_cls_token", "cls"),
    ("pooling_mode_mean_tokens", "mean"),
    ("pooling_mode_lasttoken", "last"),
    ("pooling_mode_max_tokens", "max"),
    ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
    ("pooling_mode_weightedmean_tokens", "weightedmean"),
];

/// Returns the description of a model's pooling; null: the model generates.
///
/// Encoders, decoders with bidirectional attention, repositories in the layout of
/// sentence-transformers, and checkpoints without a head always pool. With `forced`, any decoder
/// pools the last token's normalised state. `shape` is the model's; `None`: the model is computed
/// by transformers.
///
/// # Errors
/// This kind of pooling is not supported for this model.
pub(crate) fn read_pooling(
    config: &Map<String, Value>,
    folder: Option<&Path>,
    shape: Option<&ModelShape>,
    forced: bool,
) -> Result<Value, ModelError> {
    let modules = folder.map_or(Ok(Vec::new()), modules)?;
    let names = config.get("architectures").and_then(Value::as_array).into_iter().flatten();
    let mut names = names.filter_map(Value::as_str);
    let encoder = is_bert(config);
    let decoder = shape.and_then(ModelShape::decoder);
    let sees_all = decoder.is_some_and(Shape::both_ways);
    let headless = names.clone().any(|name| name.ends_with("Model"));
    if !(forced || encoder || sees_all || headless || !modules.is_empty()) {
        return Ok(Value::Null);
    }
    let settings = match folder {
        Some(folder) => read_object(&folder.join("sentence_bert_config.json"), true)?,
        None => Map::new(),
    };
    let max_length = settings.get("max_seq_length").and_then(Value::as_u64);
    if (encoder || sees_all) && names.any(|name| name.ends_with(SCORER)) {
        return of_scorer(config, decoder.map(|shape| shape.family), max_length);
    }
    let pooled = match folder {
        Some(folder) if !modules.is_empty() => of_modules(&modules, folder)?,
        // If neither the repository nor the GGUF file names a pooling, use the default of other
        // engines.
        _ => {
            let usual = if encoder || sees_all { "cls" } else { "last" };
            let kind = config.get("pooling_type").and_then(Value::as_str).unwrap_or(usual);
            Modules { kind: kind.to_owned(), normalize: true, layers: of_config(config)? }
        }
    };
    let is_said = config.get("is_causal") == Some(&Value::Bool(false))
        || config.get("use_bidirectional_attention").and_then(Value::as_bool) == Some(true);
    if !encoder && !sees_all && is_said {
        return Err(ModelError::broken(
            "a decoder of this family with bidirectional attention is not supported",
        ));
    }
    let kind = match (pooled.kind.as_str(), encoder || sees_all) {
        ("last", false) => "last",
        ("mean", false) => "causal_mean",
        ("mean", true) => "mean",
        ("cls", true) => "cls",
        (kind, whole) => {
            let what = if encoder {
                "an encoder"
            } else if whole {
                "a decoder with bidirectional attention"
            } else {
                "a causal model"
            };
            let what = format!("pooling '{kind}' of {what} is not supported");
            return Err(ModelError::broken(what));
        }
    };
    if !pooled.layers.is_empty() && !sees_all {
        let what = if encoder { "an encoder" } else { "a causal model" };
        return Err(ModelError::broken(format!(
            "the sentence-transformers module Dense of {what} is not supported"
        )));
    }
    let hidden = config.get("hidden_size").and_then(Value::as_u64).unwrap_or(0);
    Ok(json!({
        "task": "embed",
        "kind": kind,
        "size": size_behind(hidden as usize, &pooled.layers)?,
        "normalize": pooled.normalize,
        "function": "identity",
        "labels": [],
        "layers": pooled.layers,
        "max_length": max_length,
    }))
}

/// Returns the pooling of a model that scores texts or pairs of texts: one score, or one score per
/// label. `family` is the decoder's; `None`: the model is an encoder.
fn of_scorer(
    config: &Map<String, Value>,
    family: Option<&'static Family>,
    max_length: Option<u64>,
) -> Result<Value, ModelError> {
    let labels = labels(config)?;
    let layers = match family {
        None => Vec::new(),
        Some(family) => score_layers(config, family, labels.len()).ok_or_else(|| {
            let what = format!("scores of {}", family.architecture);
            ModelError::unserved_part(&what)
        })??,
    };
    let kind = match config.get("classifier_pooling").filter(|kind| !kind.is_null()) {
        Some(kind) if family.is_some() => kind.as_str().unwrap_or_default(),
        _ => "cls",
    };
    if !["cls", "mean"].contains(&kind) {
        let what = format!("pooling {kind:?} of scores is not supported");
        return Err(ModelError::broken(what));
    }
    Ok(json!({
        "task": if labels.len() == 1 { "score" } else { "classify" },
        "kind": kind,
        "size": labels.len(),
        "normalize": false,
        "function": function(config, labels.len())?,
        "labels": labels,
        "layers": layers,
        "max_length": max_length,
    }))
}

/// Returns the names of a classifier's labels, in the order of its scores.
fn labels(config: &Map<String, Value>) -> Result<Vec<String>, ModelError> {
    let named = config.get("id2label").and_then(Value::as_object).filter(|it| !it.is_empty());
    let count = match optional(config, "num_labels", MOST_LABELS)? {
        Some(count) => count as usize,
        None => named.map_or(2, Map::len),
    };
    let name = |label: usize| {
        let found = named.and_then(|names| names.get(&label.to_string())).and_then(Value::as_str);
        found.map_or_else(|| format!("LABEL_{label}"), str::to_owned)
    };
    Ok((0..count.min(MOST_LABELS as usize)).map(name).collect())
}

/// Returns the function that is applied to scores: the one that the authors configured, or the one
/// that the model was trained with. A single score goes through a sigmoid.
fn function(config: &Map<String, Value>, labels: usize) -> Result<&'static str, ModelError> {
    let own = config.get("sentence_transformers").and_then(|own| own.get("activation_fn"));
    let text = |value: Option<&Value>| {
        value.and_then(Value::as_str).filter(|text| !text.is_empty()).map(str::to_owned)
    };
    let named = text(own).or_else(|| text(config.get("sbert_ce_default_activation_function")));
    let problem = config.get("problem_type").and_then(Value::as_str);
    match named.as_deref().map(|name| name.rsplit('.').next().unwrap_or_default()) {
        Some("Sigmoid") => Ok("sigmoid"),
        Some("Identity") => Ok("identity"),
        Some("Softmax") if labels > 1 => Ok("softmax"),
        Some(_) => {
            let name = named.unwrap_or_default();
            Err(ModelError::broken(format!("the activation {name} of scores is not supported")))
        }
        None if labels == 1 => Ok("sigmoid"),
        None => Ok(match problem {
            Some("regression") => "identity",
            Some("multi_label_classification") => "sigmoid",
            _ => "softmax",
        }),
    }
}

/// Reads the modules from which sentence-transformers builds the model. Empty if the repository has
/// another layout.
fn modules(folder: &Path) -> Result<Vec<Map<String, Value>>, ModelError> {
    let path = folder.join(MODULES);
    let Ok(about) = fs::metadata(&path) else { return Ok(Vec::new()) };
    let found = (about.len() <= MOST_JSON)
        .then(|| fs::read(&path).ok())
        .flatten()
        .and_then(|bytes| read_json(&bytes).ok());
    let Some(Value::Array(found)) = found else {
        return Err(ModelError::broken(format!("{} is no list of modules", path.display())));
    };
    Ok(found
        .into_iter()
        .filter_map(|module| match module {
            Value::Object(module) => Some(module),
            _ => None,
        })
        .collect())
}

/// The sentence-transformers modules that follow the model.
struct Modules {
    /// The kind of pooling.
    kind: String,
    /// True if the final vectors are normalised.
    normalize: bool,
    /// The layers between pooling and normalisation.
    layers: Vec<VectorLayer>,
}

fn of_modules(modules: &[Map<String, Value>], folder: &Path) -> Result<Modules, ModelError> {
    let text = |module: &Map<String, Value>, key: &str| {
        module.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let (mut kind, mut normalize, mut layers) = (None, false, Vec::new());
    for module in modules {
        let name = text(module, "type");
        match name.rsplit('.').next().unwrap_or_default() {
            "Pooling" => {
                let config = folder.join(text(module, "path")).join("config.json");
                kind = Some(mode(&read_object(&config, false)?)?);
            }
            "Dense" if kind.is_some() && !normalize => {
                let path = folder.join(text(module, "path"));
                layers.push(VectorLayer::of_dense(&path, layers.len())?);
            }
            "Normalize" => normalize = true,
            "Transformer" => {}
            other => {
                return Err(ModelError::broken(format!(
                    "the sentence-transformers module {other} is not supported{}",
                    if other == "Dense" { " at this place" } else { "" }
                )));
            }
        }
    }
    let kind = kind.ok_or_else(|| ModelError::broken("modules.json names no Pooling module"))?;
    Ok(Modules { kind, normalize, layers })
}

fn mode(config: &Map<String, Value>) -> Result<String, ModelError> {
    if let Some(mode) = config.get("pooling_mode").and_then(Value::as_str) {
        return Ok(match mode {
            "lasttoken" | "last_token" => "last".into(),
            other => other.into(),
        });
    }
    let on = |&&(key, _): &&(&str, &str)| config.get(key).and_then(Value::as_bool) == Some(true);
    let chosen: Vec<&str> = MODES.iter().filter(on).map(|&(_, kind)| kind).collect();
    match chosen[..] {
        [kind] => Ok(kind.into()),
        [] => Err(ModelError::broken("pooling by nothing is not supported")),
        _ => {
            let named = chosen.join(" and ");
            Err(ModelError::broken(format!("pooling by {named} is not supported")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vector::VectorActivation;

    fn repository(mode: &Value, more: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        let names = ["Transformer", "Pooling"].iter().chain(more).enumerate();
        let modules: Vec<Value> = names
            .map(|(at, name)| json!({"path": format!("{at}_{name}"), "type": format!("sentence_transformers.models.{name}")}))
            .collect();
        let write = |path: &str, value: &Value| {
            fs::write(folder.path().join(path), value.to_string()).expect("a file");
        };
        fs::create_dir(folder.path().join("1_Pooling")).expect("a folder");
        write("modules.json", &json!(modules));
        write("1_Pooling/config.json", mode);
        write("sentence_bert_config.json", &json!({"max_seq_length": 256}));
        folder
    }

    fn config(architecture: &str) -> Map<String, Value> {
        let config = json!({
            "architectures": [architecture], "hidden_size": 64, "vocab_size": 131,
            "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        });
        config.as_object().expect("an object").clone()
    }

    /// Returns the pooling of a model with this config.
    fn pooling(
        config: &Map<String, Value>,
        folder: Option<&Path>,
        forced: bool,
    ) -> Result<Value, ModelError> {
        let shape = ModelShape::from_config(config, false)?;
        read_pooling(config, folder, Some(&shape), forced)
    }

    #[test]
    fn a_repository_says_how_it_pools() {
        for (mode, kind) in [
            (json!({"pooling_mode_lasttoken": true}), "last"),
            (json!({"pooling_mode": "last_token"}), "last"),
            (json!({"pooling_mode_mean_tokens": true}), "causal_mean"),
        ] {
            let folder = repository(&mode, &["Normalize"]);
            let found = pooling(&config("Qwen3ForCausalLM"), Some(folder.path()), false);
            let wanted = json!({"task": "embed", "kind": kind, "size": 64, "normalize": true,
                "function": "identity", "labels": [], "layers": [], "max_length": 256});
            assert_eq!(found, Ok(wanted));
        }
    }

    #[test]
    fn without_a_word_the_last_state_is_the_vector_of_what_has_no_head_or_is_told_to_pool() {
        let empty = tempfile::tempdir().expect("a folder");
        let read = |name, forced| pooling(&config(name), Some(empty.path()), forced);
        assert_eq!(read("Qwen3ForCausalLM", false), Ok(Value::Null));
        for (name, forced) in [("Qwen3ForCausalLM", true), ("Qwen3Model", false)] {
            let found = read(name, forced).expect("a model that pools");
            assert_eq!((&found["kind"], &found["normalize"]), (&json!("last"), &json!(true)));
            assert_eq!(found["max_length"], Value::Null);
        }
    }

    #[test]
    fn encoders_pool_and_cross_encoders_score() {
        for (mode, kind) in [("mean_tokens", "mean"), ("cls_token", "cls")] {
            let folder = repository(&json!({format!("pooling_mode_{mode}"): true}), &[]);
            let found = pooling(&config("BertModel"), Some(folder.path()), false);
            let found = found.expect("a model that pools");
            assert_eq!((&found["kind"], &found["normalize"]), (&json!(kind), &json!(false)));
        }
        let alone = pooling(&config("BertModel"), None, false).expect("a model that pools");
        assert_eq!((&alone["kind"], &alone["normalize"]), (&json!("cls"), &json!(true)));
        let mut cross = config("BertForSequenceClassification");
        cross.insert("id2label".into(), json!({"0": "LABEL_0"}));
        for (named, function) in
            [("Sigmoid", "sigmoid"), ("torch.nn.modules.linear.Identity", "identity")]
        {
            cross.insert("sbert_ce_default_activation_function".into(), json!(named));
            let found = pooling(&cross, None, false).expect("a model that scores");
            let told = [&found["task"], &found["size"], &found["function"]];
            assert_eq!(told, [&json!("score"), &json!(1), &json!(function)]);
        }
        cross.insert("sbert_ce_default_activation_function".into(), json!("torch.nn.Softmax"));
        assert!(pooling(&cross, None, false).is_err(), "softmax of a single score");
        let last = repository(&json!({"pooling_mode_lasttoken": true}), &[]);
        assert!(pooling(&config("BertModel"), Some(last.path()), false).is_err());
    }

    #[test]
    fn a_classifier_has_a_probability_for_each_label() {
        for (changes, labels, function) in [
            (json!({}), &["LABEL_0", "LABEL_1"][..], "softmax"),
            (json!({"id2label": {"1": "b", "0": "a", "2": "c"}}), &["a", "b", "c"], "softmax"),
            (
                json!({"num_labels": 3, "problem_type": "multi_label_classification"}),
                &["LABEL_0", "LABEL_1", "LABEL_2"],
                "sigmoid",
            ),
            (
                json!({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}),
                &["LABEL_0", "LABEL_1"],
                "identity",
            ),
            (json!({"problem_type": "regression"}), &["LABEL_0", "LABEL_1"], "identity"),
        ] {
            for architecture in
                ["BertForSequenceClassification", "ModernBertForSequenceClassification"]
            {
                let mut config = config(architecture);
                config.extend(changes.as_object().expect("an object").clone());
                let found = pooling(&config, None, false).expect("a classifier");
                let told = [&found["task"], &found["labels"], &found["function"]];
                assert_eq!(told, [&json!("classify"), &json!(labels), &json!(function)]);
                assert_eq!(found["size"], json!(labels.len()));
            }
        }
        let mut reranker = config("ModernBertForSequenceClassification");
        reranker.insert("num_labels".into(), json!(1));
        reranker.insert("classifier_pooling".into(), json!("mean"));
        let found = pooling(&reranker, None, false).expect("a reranker");
        assert_eq!((&found["task"], &found["kind"]), (&json!("score"), &json!("mean")));
        let names: Vec<_> = (0..2).map(|at| found["layers"][at]["name"].clone()).collect();
        assert_eq!(names, ["head.dense", "classifier"]);
        reranker.insert("classifier_pooling".into(), json!("max"));
        assert!(pooling(&reranker, None, false).is_err());
    }

    #[test]
    fn dense_modules_follow_pooling_where_positions_see_the_whole_prompt() {
        let mean = json!({"pooling_mode_mean_tokens": true});
        let folder = repository(&mean, &["Dense", "Dense", "Normalize"]);
        let dense = |at: usize, config: &Value| {
            let path = folder.path().join(format!("{at}_Dense"));
            fs::create_dir_all(&path).expect("a folder");
            fs::write(path.join("config.json"), config.to_string()).expect("a file");
        };
        let identity = "torch.nn.modules.linear.Identity";
        dense(
            2,
            &json!({"in_features": 64, "out_features": 96, "bias": false, "activation_function": identity}),
        );
        dense(3, &json!({"in_features": 96, "out_features": 32}));
        let mut gemma = config("Gemma3TextModel");
        gemma.insert("use_bidirectional_attention".into(), json!(true));
        let read = |config: &Map<String, Value>| pooling(config, Some(folder.path()), false);
        let found = read(&gemma).expect("an embedder");
        assert_eq!((&found["kind"], &found["size"]), (&json!("mean"), &json!(32)));
        let layers: Vec<VectorLayer> =
            serde_json::from_value(found["layers"].clone()).expect("layers");
        let told = layers.iter().map(|it| (it.name.as_str(), it.bias, it.activation));
        let (first, second) = (VectorActivation::Identity, VectorActivation::Tanh);
        assert!(told.eq([("dense.0", false, first), ("dense.1", true, second)]));
        let file = |at: &str| Some(folder.path().join(at).join("model.safetensors"));
        assert_eq!([&layers[0].file, &layers[1].file], [&file("2_Dense"), &file("3_Dense")]);
        let refusal = |config: &Map<String, Value>| read(config).unwrap_err().to_string();
        assert!(refusal(&config("Gemma3TextModel")).contains("Dense of a causal model"));
        dense(3, &json!({"in_features": 64, "out_features": 32}));
        assert!(refusal(&gemma).contains("takes vectors of 64 elements, and gets 96"));
        dense(3, &json!({"in_features": 96, "out_features": 32, "activation_function": "x.Mish"}));
        assert!(refusal(&gemma).contains("x.Mish"));
    }

    #[test]
    fn whatever_would_be_pooled_wrongly_is_refused() {
        let last = json!({"pooling_mode_lasttoken": true});
        for (mode, more, why) in [
            (&json!({"pooling_mode_max_tokens": true}), &[][..], "'max' of a causal model"),
            (&json!({}), &[], "by nothing"),
            (
                &json!({"pooling_mode_lasttoken": true, "pooling_mode_cls_token": true}),
                &[],
                "cls and last",
            ),
            (&last, &["LSTM"], "module LSTM"),
        ] {
            let folder = repository(mode, more);
            let found = pooling(&config("Qwen3ForCausalLM"), Some(folder.path()), false);
            assert!(matches!(&found, Err(error) if error.to_string().contains(why)), "{found:?}");
        }
        let mut both_ways = config("Qwen2ForCausalLM");
        both_ways.insert("is_causal".into(), json!(false));
        assert!(pooling(&both_ways, None, true).is_err());
    }
}
