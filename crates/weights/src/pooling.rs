//! The vector that a model gives in place of tokens, by the files of its repository.
//! `python/forebay/weights/pooling.py` reads the same, and this is its part about decoders.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::describe::read_object;
use crate::error::ModelError;

const MODULES: &str = "modules.json";
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

/// The description of a decoder's pooling, in the fields of Python's `Pooling`; null: it generates.
///
/// Repositories in the layout of sentence-transformers always pool, and so do checkpoints without a
/// head. With `forced` any model pools: by the last token's state, normalised.
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
    let headless = names.filter_map(Value::as_str).any(|name| name.ends_with("Model"));
    if !(forced || headless || !modules.is_empty()) {
        return Ok(Value::Null);
    }
    let (kind, normalize) = match folder {
        Some(folder) if !modules.is_empty() => of_modules(&modules, folder)?,
        // Without a word from the repository: what other engines do.
        _ => ("last".to_owned(), true),
    };
    let sees_all = config.get("is_causal") == Some(&Value::Bool(false))
        || config.get("use_bidirectional_attention").and_then(Value::as_bool) == Some(true);
    if sees_all {
        return Err(ModelError::broken(
            "a decoder whose positions see what is behind them is not supported",
        ));
    }
    let kind = match kind.as_str() {
        "last" => "last",
        "mean" => "causal_mean",
        _ => {
            let what = format!("pooling '{kind}' of a causal model is not supported");
            return Err(ModelError::broken(what));
        }
    };
    let settings = match folder {
        Some(folder) => read_object(&folder.join("sentence_bert_config.json"), true)?,
        None => Map::new(),
    };
    Ok(json!({
        "task": "embed",
        "kind": kind,
        "size": config.get("hidden_size").and_then(Value::as_u64).unwrap_or(0),
        "normalize": normalize,
        "sigmoid": false,
        "max_length": settings.get("max_seq_length").and_then(Value::as_u64),
    }))
}

/// The modules that sentence-transformers builds the model of; none: it is not in that layout.
fn modules(folder: &Path) -> Result<Vec<Map<String, Value>>, ModelError> {
    let path = folder.join(MODULES);
    let Ok(about) = fs::metadata(&path) else { return Ok(Vec::new()) };
    let found = (about.len() <= MOST_JSON)
        .then(|| fs::read(&path).ok())
        .flatten()
        .and_then(|bytes| serde_json::from_slice::<Vec<Value>>(&bytes).ok());
    let Some(found) = found else {
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
