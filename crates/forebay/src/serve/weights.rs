//! The reader of weights that clients have a running server load.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use forebay_server::WeightSettings;
use serde_json::Value;

use super::adapters::is_local;
use crate::flags::{Device, LoadFormat, ServeFlags};
use crate::model::{Model, Source, fetch};
use crate::resolve::Resolved;

/// What engine, tokenizer and hands were set up for. Other weights have the same.
const SETTLED: [&str; 5] = ["format", "shape", "pooling", "images", "called"];

/// The weights of the server; `None`: its hands have none that could be replaced.
pub(super) fn settings(
    flags: &ServeFlags,
    python: &Path,
    resolved: &Resolved,
) -> Option<WeightSettings> {
    let made = flags.loading.load_format == LoadFormat::Dummy;
    // A request that is handed on would take blocks of the old weights along.
    let lends = resolved.replicas.pd.is_some();
    if made || lends || resolved.device.device == Device::Sim {
        return None;
    }
    let model = resolved.hand.model.clone();
    let (python, last) = (python.to_owned(), model.clone());
    let (folder, hand) = (flags.loading.download_dir.clone(), flags.run.hand);
    let (embedding, model_impl) = (flags.loading.is_embedding, flags.loading.model_impl);
    let reader = move |path: &Path| {
        let source = Source {
            revision: None,
            download_dir: folder.as_deref(),
            offline: true,
            embedding,
            model_impl,
        };
        let find = |name: &str| fetch(&python, name, source, true, hand);
        read(path, &last, find).map_err(|error| format!("{error:#}"))
    };
    Some(WeightSettings { model, reader: Arc::new(reader), open: is_local(flags) })
}

/// Describes the model at `path` for hands that have the model `last`.
fn read(path: &Path, last: &Value, find: impl FnOnce(&str) -> Result<Model>) -> Result<Value> {
    let path: PathBuf = path
        .canonicalize()
        .map_err(|error| anyhow::anyhow!("{} can't be read: {error}", path.display()))?;
    let name = path.to_str().ok_or_else(|| anyhow::anyhow!("the path is not UTF-8"))?;
    let model = find(name)?;
    let mut next = model.told();
    for part in SETTLED {
        if let Some(difference) = difference(&last[part], &next[part], part) {
            anyhow::bail!("these are weights of another model: {difference}");
        }
    }
    if !last["manifest"].is_null() {
        next["manifest"] = model.manifest()?;
    }
    Ok(next)
}

/// The first place where two descriptions differ.
fn difference(last: &Value, next: &Value, place: &str) -> Option<String> {
    if last == next {
        return None;
    }
    if let (Value::Object(last), Value::Object(next)) = (last, next) {
        let names = last.keys().chain(next.keys());
        return names.into_iter().find_map(|name| {
            let get = |all: &serde_json::Map<String, Value>| all.get(name).cloned();
            let (last, next) = (get(last).unwrap_or_default(), get(next).unwrap_or_default());
            difference(&last, &next, &format!("{place}.{name}"))
        });
    }
    let short = |value: &Value| {
        let text = value.to_string();
        let end = text.char_indices().nth(80).map_or(text.len(), |(at, _)| at);
        text[..end].to_owned()
    };
    Some(format!("{place} is {} where the server has {}", short(next), short(last)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_first_difference_is_named() {
        let last = json!({"layers": 2, "rope": {"theta": 1e4}});
        assert_eq!(difference(&last, &last, "shape"), None);
        let other = json!({"layers": 2, "rope": {"theta": 5e4, "factor": 2}});
        assert_eq!(
            difference(&last, &other, "shape").unwrap(),
            "shape.rope.theta is 50000.0 where the server has 10000.0"
        );
        let more = json!({"layers": 2, "rope": {"theta": 1e4, "factor": 2}});
        assert_eq!(
            difference(&last, &more, "shape").unwrap(),
            "shape.rope.factor is 2 where the server has null"
        );
    }
}
