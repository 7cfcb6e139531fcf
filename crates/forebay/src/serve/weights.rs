//! Loads new weights into a running server, from files that clients name or send.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use forebay_server::{
    ParameterValues, TensorFolder, TensorReceiver, TrainerGroup, WeightFiles, WeightSettings,
};
use forebay_weights::{ModelShape, ServedCheckpoint, read_parameter};
use serde_json::Value;

use super::adapters::is_local;
use super::overlays::Overlays;
use super::trainer::GroupRank;
use crate::flags::{Device, Hand, LoadFormat, ModelImpl, ServeFlags};
use crate::model::{Model, Pooling, Source, fetch};
use crate::resolve::Resolved;

/// Fields of the model's description on which engine, tokenizer and hands depend: new weights must
/// have the same values.
const SETTLED: [&str; 5] = ["format", "shape", "pooling", "images", "called"];

/// The settings for weight updates; `None` if the hands' weights can't be replaced.
pub(super) fn settings(
    flags: &ServeFlags,
    python: &Path,
    resolved: &Resolved,
) -> Option<WeightSettings> {
    let made = flags.loading.load_format == LoadFormat::Dummy;
    // A request that is handed on to another replica would transfer blocks of the old weights.
    let lends = resolved.replicas.pd.is_some() || resolved.disaggregation.is_some();
    if made || lends || resolved.device.device == Device::Sim {
        return None;
    }
    let model = resolved.hand.model.clone();
    let files = Files {
        python: python.to_owned(),
        first: model.clone(),
        download_dir: flags.loading.download_dir.clone(),
        embedding: flags.loading.is_embedding,
        text_alone: model["images"].is_null(),
        model_impl: flags.loading.model_impl,
        hand: flags.run.hand,
        elsewhere: flags.replicas.elsewhere(),
        overlays: Overlays::default(),
    };
    Some(WeightSettings { model, files: Arc::new(files), open: is_local(flags) })
}

/// Finds and describes weight files for the served model.
struct Files {
    python: PathBuf,
    /// The description of the model with which the server started.
    first: Value,
    download_dir: Option<PathBuf>,
    embedding: bool,
    /// True if the model is served for text only, even if its files contain a vision tower.
    text_alone: bool,
    model_impl: ModelImpl,
    hand: Hand,
    /// The flag that makes hands run on other machines; `None` if the hands run on this machine.
    elsewhere: Option<&'static str>,
    overlays: Overlays,
}

impl WeightFiles for Files {
    fn describe(&self, path: &Path) -> Result<Value, String> {
        let source = Source {
            revision: None,
            download_dir: self.download_dir.as_deref(),
            offline: true,
            embedding: self.embedding,
            text_alone: self.text_alone,
            model_impl: self.model_impl,
        };
        let find = |name: &str| fetch(&self.python, name, source, true, self.hand);
        read(path, &self.first, find).map_err(|error| format!("{error:#}"))
    }

    fn folder(&self, served: &Value) -> Result<TensorFolder, String> {
        let folder = || {
            if let Some(flag) = self.elsewhere {
                anyhow::bail!(
                    "with {flag} hands read the files of their own machines: /update_weights_from_disk names a checkpoint there"
                );
            }
            let checkpoint = Checkpoint::read(served)?;
            let most_bytes = checkpoint.served(&self.overlays).most_bytes()?;
            let folder = self.overlays.add()?;
            Ok(TensorFolder { path: folder.path().to_owned(), most_bytes, guard: Arc::new(folder) })
        };
        folder().map_err(|error| format!("{error:#}"))
    }

    fn lay(
        &self,
        folder: &TensorFolder,
        changed: &[PathBuf],
        served: &Value,
    ) -> Result<Value, String> {
        let lay = || {
            let checkpoint = Checkpoint::read(served)?;
            Ok::<_, anyhow::Error>(checkpoint.served(&self.overlays).lay(&folder.path, changed)?)
        };
        lay().map_err(|error| format!("{error:#}"))?;
        let mut next = self.describe(&folder.path)?;
        // Do not cache packed weights of a training step: they would evict packed weights that are
        // used again.
        next["cache"] = Value::Null;
        Ok(next)
    }

    fn join(&self, group: &TrainerGroup) -> Result<Box<dyn TensorReceiver>, String> {
        let joined = GroupRank::join(&self.python, group);
        joined.map(|rank| Box::new(rank) as _).map_err(|error| format!("{error:#}"))
    }

    fn rows(&self, served: &Value, name: &str, rows: usize) -> Result<ParameterValues, String> {
        let read = || {
            let files: Vec<PathBuf> = field(served, "files")?;
            let format: String = field(served, "format")?;
            let shape: Option<ModelShape> = field(served, "shape")?;
            let pooling: Option<Pooling> = field(served, "pooling")?;
            let scores = pooling.as_ref().is_some_and(Pooling::scores);
            let layers = pooling.map_or_else(Vec::new, |pooling| pooling.layers);
            let pooled = (scores, &layers[..]);
            let found = read_parameter((&format, &files), shape.as_ref(), pooled, name, rows)?;
            Ok::<_, anyhow::Error>(ParameterValues { shape: found.shape, values: found.values })
        };
        read().map_err(|error| format!("{error:#}"))
    }
}

/// A safetensors checkpoint, according to the model's description.
struct Checkpoint {
    folder: PathBuf,
    files: Vec<PathBuf>,
    tied: bool,
}

impl Checkpoint {
    fn read(served: &Value) -> Result<Self> {
        let format: String = field(served, "format")?;
        ensure!(
            format == "safetensors",
            "the served model is in the format {format}, whose tensors are not replaced one by one: serve a checkpoint of safetensors"
        );
        let config = &served["config"];
        let tied = ["tie_word_embeddings", "text_config"].map(|name| &config[name]);
        let tied = tied[0].as_bool().or(tied[1]["tie_word_embeddings"].as_bool());
        let shape: Option<ModelShape> = field(served, "shape")?;
        let of_shape = shape.as_ref().and_then(ModelShape::decoder).map(|shape| shape.tied);
        Ok(Self {
            folder: field(served, "directory")?,
            files: field(served, "files")?,
            tied: of_shape.or(tied).unwrap_or(false),
        })
    }

    fn served(&self, overlays: &Overlays) -> ServedCheckpoint<'_> {
        let is_overlay = overlays.has(&self.folder);
        ServedCheckpoint { folder: &self.folder, files: &self.files, is_overlay, tied: self.tied }
    }
}

/// Returns a field of the model's description.
fn field<T: serde::de::DeserializeOwned>(served: &Value, name: &str) -> Result<T> {
    let found = serde_json::from_value(served[name].clone());
    found.with_context(|| format!("the model's description has another `{name}`"))
}

/// Describes the model at `path` for hands that currently have the model `last`.
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

/// Returns the path of the first field in which two descriptions differ. `place` is the path so
/// far.
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
