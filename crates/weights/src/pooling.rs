//! The vector that a model gives in place of tokens, by the files of its repository.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::bert::is_bert;
use crate::error::ModelError;
use crate::json::{read_json, read_object};

const MODULES: &str = "modules.json";
/// The end of the names of cross-encoders.
const SCORER: &str = "ForSequenceClassification";
/// The largest number of bytes of `modules.json`, which names a handful of modules.
const MOST_JSON: u64 = 1 << 20;
const MODES: [(&str, &str); 6] = [
    ("pooling_mode_cls_token", "cls"),
    ("pooling_mode_mean_tokens", "mean"),
    ("pooling_mode_lasttoken", "last"),
    ("pooling_mode_max_tokens", "max"),
    ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
    ("pooling_mode_weightedmean_tokens", "weightedmean"),
];

/// The description of a model's pooling; null: it generates.
///
/// Encoders, repositories in the layout of sentence-transformers, and checkpoints without a head
/// always pool. With `forced` any decoder pools: by the last token's state, normalised.
///
/// # Errors
/// The model would be pooled wrongly.
pub(crate) fn read_pooling(
    config: &Map<String, Value>,
    folder: Option<&Path>,
    forced: bool,
) -> Result<Value, ModelError> {
    let modules = folder.map_or(Ok(Vec::new()), modules)?;
    let names = config.get("architectures").and_then(Value::as_array).into_iter().flatten();
    let mut names = names.filter_map(Value::as_str);
    let encoder = is_bert(config);
    let headless = names.clone().any(|name| name.ends_with("Model"));
    if !(forced || encoder || headless || !modules.is_empty()) {
        return Ok(Value::Null);
    }
    let settings = match folder {
        Some(folder) => read_object(&folder.join("sentence_bert_config.json"), true)?,
        None => Map::new(),
    };
    let max_length = settings.get("max_seq_length").and_then(Value::as_u64);
    if encoder && names.any(|name| name.ends_with(SCORER)) {
        return Ok(json!({
            "task": "score",
            "kind": "cls",
            "size": labels(config)?,
            "normalize": false,
            "sigmoid": sigmoid(config)?,
            "max_length": max_length,
        }));
    }
    let (kind, normalize) = match folder {
        Some(folder) if !modules.is_empty() => of_modules(&modules, folder)?,
        // Without a word from the repository or the GGUF file: what other engines do.
        _ => {
            let usual = if encoder { "cls" } else { "last" };
            let kind = config.get("pooling_type").and_then(Value::as_str).unwrap_or(usual);
            (kind.to_owned(), true)
        }
    };
    let sees_all = config.get("is_causal") == Some(&Value::Bool(false))
        || config.get("use_bidirectional_attention").and_then(Value::as_bool) == Some(true);
    if !encoder && sees_all {
        return Err(ModelError::broken(
            "a decoder whose positions see what is behind them is not supported",
        ));
    }
    let kind = match (kind.as_str(), encoder) {
        ("last", false) => "last",
        ("mean", false) => "causal_mean",
        ("mean", true) => "mean",
        ("cls", true) => "cls",
        _ => {
            let what = if encoder { "an encoder" } else { "a causal model" };
            let what = format!("pooling '{kind}' of {what} is not supported");
            return Err(ModelError::broken(what));
        }
    };
    Ok(json!({
        "task": "embed",
        "kind": kind,
        "size": config.get("hidden_size").and_then(Value::as_u64).unwrap_or(0),
        "normalize": normalize,
        "sigmoid": false,
        "max_length": max_length,
    }))
}

/// The number of a cross-encoder's labels, which is 1.
fn labels(config: &Map<String, Value>) -> Result<u64, ModelError> {
    let told = config.get("num_labels").and_then(Value::as_u64).filter(|&labels| labels > 0);
    let named = || match config.get("id2label") {
        Some(Value::Object(names)) if !names.is_empty() => names.len() as u64,
        _ => 2,
    };
    match told.unwrap_or_else(named) {
        1 => Ok(1),
        labels => Err(ModelError::broken(format!(
            "a classifier of {labels} labels is not supported: only cross-encoders of one are"
        ))),
    }
}

/// True if a cross-encoder's scores are squeezed into 0 .. 1.
fn sigmoid(config: &Map<String, Value>) -> Result<bool, ModelError> {
    let own = config.get("sentence_transformers").and_then(|own| own.get("activation_fn"));
    let text = |value: Option<&Value>| {
        value.and_then(Value::as_str).filter(|text| !text.is_empty()).map(str::to_owned)
    };
    let function = text(own)
        .or_else(|| text(config.get("sbert_ce_default_activation_function")))
        .unwrap_or_else(|| "Sigmoid".into());
    match function.rsplit('.').next() {
        Some("Sigmoid") => Ok(true),
        Some("Identity") => Ok(false),
        _ => {
            Err(ModelError::broken(format!("the activation {function} of scores is not supported")))
        }
    }
}

/// The modules that sentence-transformers builds the model of; none: it is not in that layout.
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

/// The kind of pooling, and true if vectors are normalised.
fn of_modules(modules: &[Map<String, Value>], folder: &Path) -> Result<(String, bool), ModelError> {
    let text = |module: &Map<String, Value>, key: &str| {
        module.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let (mut kind, mut normalize) = (None, false);
    for module in modules {
        let name = text(module, "type");
        match name.rsplit('.').next().unwrap_or_default() {
            "Pooling" => {
                let config = folder.join(text(module, "path")).join("config.json");
                kind = Some(mode(&read_object(&config, false)?)?);
            }
            "Normalize" => normalize = true,
            "Transformer" => {}
            other => {
                return Err(ModelError::broken(format!(
                    "the sentence-transformers module {other} is not supported"
                )));
            }
        }
    }
    let kind = kind.ok_or_else(|| ModelError::broken("modules.json names no Pooling module"))?;
    Ok((kind, normalize))
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
        let config = json!({"architectures": [architecture], "hidden_size": 64});
        config.as_object().expect("an object").clone()
    }

    #[test]
    fn a_repository_says_how_it_pools() {
        for (mode, kind) in [
            (json!({"pooling_mode_lasttoken": true}), "last"),
            (json!({"pooling_mode": "last_token"}), "last"),
            (json!({"pooling_mode_mean_tokens": true}), "causal_mean"),
        ] {
            let folder = repository(&mode, &["Normalize"]);
            let found = read_pooling(&config("Qwen3ForCausalLM"), Some(folder.path()), false);
            let wanted = json!({"task": "embed", "kind": kind, "size": 64, "normalize": true, "sigmoid": false,
                "max_length": 256});
            assert_eq!(found, Ok(wanted));
        }
    }

    #[test]
    fn without_a_word_the_last_state_is_the_vector_of_what_has_no_head_or_is_told_to_pool() {
        let empty = tempfile::tempdir().expect("a folder");
        let read = |name, forced| read_pooling(&config(name), Some(empty.path()), forced);
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
            let found = read_pooling(&config("BertModel"), Some(folder.path()), false);
            let found = found.expect("a model that pools");
            assert_eq!((&found["kind"], &found["normalize"]), (&json!(kind), &json!(false)));
        }
        let alone = read_pooling(&config("BertModel"), None, false).expect("a model that pools");
        assert_eq!((&alone["kind"], &alone["normalize"]), (&json!("cls"), &json!(true)));
        let mut cross = config("BertForSequenceClassification");
        cross.insert("id2label".into(), json!({"0": "LABEL_0"}));
        for (function, sigmoid) in [("Sigmoid", true), ("torch.nn.modules.linear.Identity", false)]
        {
            cross.insert("sbert_ce_default_activation_function".into(), json!(function));
            let found = read_pooling(&cross, None, false).expect("a model that scores");
            let told = [&found["task"], &found["size"], &found["sigmoid"]];
            assert_eq!(told, [&json!("score"), &json!(1), &json!(sigmoid)]);
        }
        cross.insert("sbert_ce_default_activation_function".into(), json!("torch.nn.Softmax"));
        assert!(read_pooling(&cross, None, false).is_err());
        cross.insert("id2label".into(), json!({"0": "a", "1": "b", "2": "c"}));
        assert!(read_pooling(&cross, None, false).is_err());
        let last = repository(&json!({"pooling_mode_lasttoken": true}), &[]);
        assert!(read_pooling(&config("BertModel"), Some(last.path()), false).is_err());
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
            (&last, &["Dense"], "module Dense"),
        ] {
            let folder = repository(mode, more);
            let found = read_pooling(&config("Qwen3ForCausalLM"), Some(folder.path()), false);
            assert!(matches!(&found, Err(error) if error.to_string().contains(why)), "{found:?}");
        }
        let mut both_ways = config("Qwen2ForCausalLM");
        both_ways.insert("is_causal".into(), json!(false));
        assert!(read_pooling(&both_ways, None, true).is_err());
    }
}
