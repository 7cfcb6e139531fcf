//! Finds the model, downloads missing files, and describes it. Python is needed only if
//! transformers' code computes the model, or if a tokenizer has to be converted.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use forebay_hand::without_keys;
use forebay_hub::{Found, ModelName, Settings};
use forebay_weights::{Manifest, ModelError, ModelShape, VectorLayer, weight_files};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tempfile::TempDir;
use tracing::warn;

use crate::flags::{Hand, ModelImpl, ServeFlags};
use crate::models;

/// A model on this machine.
#[derive(Debug, Clone, Deserialize, Serialize)]
pub(crate) struct Model {
    pub(crate) name: String,
    pub(crate) format: String,
    pub(crate) directory: PathBuf,
    pub(crate) files: Vec<PathBuf>,
    pub(crate) config: Map<String, Value>,
    pub(crate) tokenizer: PathBuf,
    pub(crate) tokenizer_config: Map<String, Value>,
    pub(crate) chat_template: Option<String>,
    pub(crate) generation_config: Map<String, Value>,
    pub(crate) eos_token_ids: Vec<i32>,
    pub(crate) bos_token: Option<String>,
    pub(crate) eos_token: Option<String>,
    pub(crate) context_length: u32,
    pub(crate) vocab_size: u32,
    /// The shape from which native code builds the model; `None`: transformers' code computes it.
    #[serde(default)]
    pub(crate) shape: Option<ModelShape>,
    pub(crate) pooling: Option<Pooling>,
    /// How images are turned into patches; `None`: the model takes no images.
    #[serde(default)]
    pub(crate) images: Option<Images>,
    /// The engine's settings for transformers' code; `None`: native code computes the model.
    #[serde(default)]
    pub(crate) called: Option<Called>,
    /// The folder for files that Forebay derives from models.
    pub(crate) cache: PathBuf,
    /// The folder of a rebuilt tokenizer, if no cache can be written. It is removed with the model.
    #[serde(skip)]
    #[expect(dead_code, reason = "its end removes the folder")]
    temporary: Option<Arc<TempDir>>,
}

/// The result of probing a model that transformers' code computes, as `forebay.weights.called`
/// describes it.
#[derive(Debug, Clone, Deserialize, Serialize)]
pub(crate) struct Called {
    /// Bytes of the recurrent states of a request; 0: the model has none.
    pub(crate) state_bytes: u64,
    pub(crate) hidden_size: u32,
    /// The values that only the hand uses.
    #[serde(flatten)]
    pub(crate) rest: Map<String, Value>,
}

/// The model's image processing, in the hand's format. A position of the decoder covers `merge`
/// times `merge` patches.
#[derive(Debug, Clone, Deserialize, Serialize)]
pub(crate) struct Images {
    /// Height and width of a patch in pixels.
    pub(crate) patch: u32,
    pub(crate) merge: u32,
    pub(crate) min_pixels: u64,
    pub(crate) max_pixels: u64,
    /// Rows and columns of positions, equal for all images; `None`: they depend on the image's
    /// size.
    #[serde(default)]
    pub(crate) fixed: Option<[u32; 2]>,
    pub(crate) image_token_id: i32,
    /// The text that replaces an image in chat templates; `None`: the template's text is used
    /// unchanged.
    #[serde(default)]
    pub(crate) mark: Option<Mark>,
    /// The values that only the hand uses.
    #[serde(flatten)]
    pub(crate) rest: Map<String, Value>,
}

/// The mark that a chat template writes for an image, and the text that the model needs instead.
#[derive(Debug, Clone, Deserialize, Serialize)]
pub(crate) struct Mark {
    pub(crate) written: String,
    pub(crate) becomes: String,
}

impl Mark {
    /// Returns the template with the mark replaced. The template is changed rather than its output,
    /// because the output may also contain the mark as text of a client. A mark next to expressions
    /// becomes an expression, so that its white space is kept.
    pub(crate) fn replaced(&self, template: &str) -> String {
        let (mut text, mut last) = (String::with_capacity(template.len()), 0);
        for (at, mark) in template.match_indices(&self.written) {
            let before = &template[..at];
            let opened = before.rfind("{{").max(before.rfind("{%"));
            let closed = before.rfind("}}").max(before.rfind("%}"));
            text.push_str(&template[last..at]);
            if opened > closed {
                text.push_str(&self.becomes);
            } else {
                text.push_str("{{ \"");
                text.push_str(&self.becomes);
                text.push_str("\" }}");
            }
            last = at + mark.len();
        }
        text.push_str(&template[last..]);
        text
    }
}

/// The output of a pooling model, as `forebay.weights.pooling` describes it.
#[derive(Debug, Clone, Deserialize, Serialize)]
pub(crate) struct Pooling {
    pub(crate) task: Task,
    pub(crate) kind: String,
    pub(crate) size: u32,
    pub(crate) normalize: bool,
    /// The activation function that turns the model's outputs into scores.
    pub(crate) function: Function,
    /// The label of each score; empty: the model returns vectors.
    pub(crate) labels: Vec<String>,
    /// The layers after pooling.
    pub(crate) layers: Vec<VectorLayer>,
    pub(crate) max_length: Option<u32>,
}

/// The kind of pooling that averages the states of a model with causal attention.
const CAUSAL_MEAN: &str = "causal_mean";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Task {
    Embed,
    Score,
    Classify,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Function {
    Identity,
    Sigmoid,
    Softmax,
}

impl Pooling {
    /// True if attention is not causal: every position attends to the whole prompt. Such a model
    /// keeps no KV cache, and its prompts can't be cut into chunks.
    pub(crate) fn whole_prompts(&self) -> bool {
        !matches!(self.kind.as_str(), "last" | CAUSAL_MEAN)
    }

    /// True if layers after pooling compute scores from the vector.
    pub(crate) fn scores(&self) -> bool {
        self.task != Task::Embed
    }

    /// True if the output depends on the state of every prompt position. All positions then have to
    /// be computed, even those with cached keys and values.
    pub(crate) fn counts_all(&self) -> bool {
        self.kind == CAUSAL_MEAN
    }
}

impl Model {
    /// True if the model uses latent attention, which caches one row per position instead of keys
    /// and values.
    pub(crate) fn is_latent(&self) -> bool {
        self.shape.as_ref().is_some_and(ModelShape::is_latent)
    }

    /// True if layers keep a recurrent state of all earlier positions, which can't be cut to a
    /// prefix.
    pub(crate) fn has_states(&self) -> bool {
        self.state_bytes(1) > 0
    }

    /// Bytes of the recurrent states of a request, for a data type of `element` bytes; 0: the model
    /// has none.
    pub(crate) fn state_bytes(&self, element: u64) -> u64 {
        match (&self.called, self.shape.as_ref().and_then(ModelShape::decoder)) {
            (Some(called), _) => called.state_bytes,
            (None, Some(shape)) => shape.state_bytes(element as usize),
            (None, None) => 0,
        }
    }

    /// The description of the model that is sent to hands in the handshake.
    pub(crate) fn told(&self) -> Value {
        json!({
            "format": self.format,
            "directory": self.directory,
            "files": weight_files(&self.files, self.vector_layers()),
            "config": self.config,
            "shape": self.shape,
            "pooling": self.pooling,
            "images": self.images,
            "called": self.called,
            "cache": self.cache,
        })
    }

    /// The layers after pooling; empty if there are none or the model generates.
    fn vector_layers(&self) -> &[VectorLayer] {
        self.pooling.as_ref().map_or(&[], |pooling| &pooling.layers)
    }

    /// The number of elements of an embedding.
    pub(crate) fn hidden_size(&self) -> u32 {
        let called = || self.called.as_ref().map_or(0, |called| called.hidden_size);
        self.shape
            .as_ref()
            .map_or_else(called, |shape| u32::try_from(shape.hidden_size()).unwrap_or_default())
    }

    /// The locations of the weights in the model's files, for a hand that does not find them
    /// itself.
    ///
    /// # Errors
    /// A file is missing or damaged, or belongs to another model.
    pub(crate) fn manifest(&self) -> Result<Value> {
        let Some(shape) = &self.shape else { return Ok(Value::Null) };
        let scores = self.pooling.as_ref().is_some_and(Pooling::scores);
        let layers = self.vector_layers();
        let found = Manifest::new(&self.format, &self.files, shape, scores, layers);
        let found = found.with_context(|| format!("the model {} is not available", self.name))?;
        Ok(found.to_json())
    }

    /// The template for chats with tools, if the model has a separate one: in the template list of
    /// its tokenizer configuration, or in a folder.
    pub(crate) fn tool_use_template(&self) -> Result<Option<String>> {
        const NAME: &str = "tool_use";
        let file = self.directory.join("additional_chat_templates").join(format!("{NAME}.jinja"));
        if self.format == "safetensors" && file.is_file() {
            let source = std::fs::read_to_string(&file);
            return source.map(Some).with_context(|| format!("{}", file.display()));
        }
        let listed = self.tokenizer_config.get("chat_template").and_then(Value::as_array);
        let named = listed.into_iter().flatten().rfind(|item| item["name"] == NAME);
        Ok(named.and_then(|item| item["template"].as_str()).map(str::to_owned))
    }

    /// Special tokens that chat templates may use as variables, besides BOS and EOS.
    pub(crate) fn named_special_tokens(&self) -> BTreeMap<String, String> {
        let content = |value: &Value| match value {
            Value::String(text) => Some(text.clone()),
            Value::Object(token) => token.get("content")?.as_str().map(str::to_owned),
            _ => None,
        };
        self.tokenizer_config
            .iter()
            .filter(|(name, _)| name.ends_with("_token"))
            .filter_map(|(name, value)| Some((name.clone(), content(value)?)))
            .collect()
    }
}

/// Where and how to find a model, as flags specify.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) revision: Option<&'a str>,
    pub(crate) download_dir: Option<&'a Path>,
    pub(crate) offline: bool,
    /// True if a model that could generate should pool instead.
    pub(crate) embedding: bool,
    /// True if a model that takes images should be served for text only.
    pub(crate) text_alone: bool,
    pub(crate) model_impl: ModelImpl,
}

impl ServeFlags {
    /// The flags about finding the model.
    pub(crate) fn source(&self) -> Source<'_> {
        Source {
            revision: self.loading.revision.as_deref(),
            download_dir: self.loading.download_dir.as_deref(),
            offline: self.loading.offline,
            embedding: self.loading.is_embedding,
            text_alone: self.images.limit_images == 0 || self.run.hand == Hand::Rust,
            model_impl: self.loading.model_impl,
        }
    }
}

/// Resolves `name`, downloads missing files, and describes the model. Progress goes to stderr.
pub(crate) fn fetch(
    python: &Path,
    name: &str,
    source: Source<'_>,
    weights: bool,
    hand: Hand,
) -> Result<Model> {
    let missing = || format!("the model {name} is not available");
    let settings = Settings::from_env(source.download_dir, source.offline).with_context(missing)?;
    let cache = settings.cache.clone();
    let (made, temporary) = rebuilding_folder(&cache)?;
    let describe = |found: &Found, weights| {
        let model = describe_any(python, (name, hand), found, &made, source, weights)?;
        // Packed weights are too large for a temporary folder.
        Ok(Model { cache: cache.clone(), temporary: temporary.clone(), ..model })
    };
    let hub = models::hub(settings, python)?;
    let named = ModelName::parse(name, source.revision).with_context(missing)?;
    let mut found = hub.find(&named, weights).with_context(missing)?;
    if !found.is_complete() {
        // Refuse a model that can't be run before gigabytes are downloaded.
        describe(&found, false)?;
        hub.complete(&mut found).with_context(missing)?;
    }
    describe(&found, weights)
}

/// Resolves the name of an additional part of a model, such as a draft head, and downloads missing
/// files. Returns their folder.
pub(crate) fn fetch_part(
    python: &Path,
    name: &str,
    source: Source<'_>,
    weights: bool,
) -> Result<PathBuf> {
    let missing = || format!("{name} is not available");
    let settings = Settings::from_env(source.download_dir, source.offline).with_context(missing)?;
    let hub = models::hub(settings, python)?;
    let named = ModelName::parse(name, source.revision).with_context(missing)?;
    let mut found = hub.find_part(&named, weights).with_context(missing)?;
    hub.complete(&mut found).with_context(missing)?;
    Ok(found.path)
}

/// The folder for tokenizers that are rebuilt from GGUF files: the cache, or a temporary folder if
/// the cache can't be written.
fn rebuilding_folder(cache: &Path) -> Result<(PathBuf, Option<Arc<TempDir>>)> {
    let folder = cache.join("gguf");
    let made = std::fs::create_dir_all(&folder).and_then(|()| tempfile::tempfile_in(&folder));
    let Err(error) = made else { return Ok((cache.to_owned(), None)) };
    let own = std::fs::Permissions::from_mode(0o700);
    let folder = tempfile::Builder::new().prefix("forebay-").permissions(own).tempdir();
    let folder = folder.context("no folder for files that are made of models")?;
    warn!(
        "{} can't be written ({error}): what is made of the model is made again at each start; --download-dir or FOREBAY_CACHE names \
         another folder",
        cache.display()
    );
    Ok((folder.path().to_owned(), Some(Arc::new(folder))))
}

/// Describes `found` from its files. If there is no native code for the model, Python probes
/// whether transformers' code can compute it.
fn describe_any(
    python: &Path,
    (name, hand): (&str, Hand),
    found: &Found,
    cache: &Path,
    source: Source<'_>,
    weights: bool,
) -> Result<Model> {
    let missing = || format!("the model {name} is not available");
    let forced = source.model_impl == ModelImpl::Transformers;
    if forced && hand == Hand::Rust {
        bail!("--model-impl transformers: the Rust hand has native code only; leave --hand off");
    }
    let files = forebay_weights::Source {
        path: &found.path,
        name: found.name.as_deref(),
        cache,
        weights,
        embedding: source.embedding,
        text_alone: source.text_alone,
        tokenizer: None,
        called: None,
    };
    let may_be_called = source.model_impl == ModelImpl::Auto
        && hand != Hand::Rust
        && found.path.join("config.json").is_file();
    let unserved = if forced {
        None
    } else {
        match forebay_weights::describe(files) {
            Ok(description) => return read(description),
            Err(error @ ModelError::Unserved(_)) if may_be_called => Some(error),
            Err(error) if may_have_tokenizer(found) => {
                let made = match ask(python, found, cache, false) {
                    Ok(answer) => answer.tokenizer,
                    // Without an interpreter, report the original error.
                    Err(failed) if without_interpreter(&failed) => None,
                    Err(failed) => return Err(failed.context(missing())),
                };
                let Some(made) = made else { return Err(error).with_context(missing) };
                let files = forebay_weights::Source { tokenizer: Some(&made), ..files };
                return read(forebay_weights::describe(files).with_context(missing)?);
            }
            Err(error) => return Err(error).with_context(missing),
        }
    };
    let answer = ask(python, found, cache, true).map_err(|error| match &unserved {
        Some(why) if without_interpreter(&error) => {
            error.context(format!("the model {name} has no native code: {why}"))
        }
        Some(why) => error.context(format!(
            "the model {name} is not available: {why}; transformers' code can't serve it either"
        )),
        None => error.context(missing()),
    })?;
    let (tokenizer, called) = (answer.tokenizer.as_deref(), answer.called.as_ref());
    let files = forebay_weights::Source { tokenizer, called, ..files };
    read(forebay_weights::describe(files).with_context(missing)?)
}

fn read(description: Value) -> Result<Model> {
    serde_json::from_value(description).context("a description without a model")
}

/// True if there may be a tokenizer in another format, which can be converted.
fn may_have_tokenizer(found: &Found) -> bool {
    let has = |name: &str| found.path.join(name).is_file();
    has("config.json") && !has("tokenizer.json")
}

/// True if the error is that no interpreter with our packages could be run.
fn without_interpreter(error: &anyhow::Error) -> bool {
    error.is::<std::io::Error>() || error.is::<crate::python::Incomplete>()
}

/// The output of `python -m forebay.models.describe`.
#[derive(Debug, Deserialize)]
struct Answer {
    /// The `tokenizer.json` that was converted from another format; `None`: nothing was converted.
    tokenizer: Option<PathBuf>,
    /// The result of the probe; `None`: the model was not probed.
    called: Option<Value>,
}

/// Runs Python to get facts about `found` that only transformers can determine. If `probed`, they
/// include facts about the model's code that the engine needs.
fn ask(python: &Path, found: &Found, cache: &Path, probed: bool) -> Result<Answer> {
    crate::python::check(python)?;
    let mut command = Command::new(python);
    without_keys(&mut command);
    command.args(crate::python::arguments("forebay.models.describe")).arg(&found.path);
    command.arg("--cache-dir").arg(cache);
    if probed {
        command.arg("--probe");
    }
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {}", python.display()))?;
    if !output.status.success() {
        bail!("see above");
    }
    let answer = forebay_weights::read_json(&output.stdout).and_then(serde_json::from_value);
    answer.context("forebay.models.describe printed no answer")
}

/// Chooses the interpreter: the given one, otherwise the first of those beside this program, in the
/// active virtual environment, and on the path.
pub(crate) fn find_python(named: Option<&Path>) -> PathBuf {
    if let Some(python) = named {
        return python.to_owned();
    }
    let beside = std::env::current_exe().ok().and_then(|exe| exe.parent().map(Path::to_owned));
    let venv = std::env::var_os("VIRTUAL_ENV").map(|dir| PathBuf::from(dir).join("bin"));
    [beside, venv]
        .into_iter()
        .flatten()
        .flat_map(|dir| [dir.join("python3"), dir.join("python")])
        .find(|python| python.is_file())
        .unwrap_or_else(|| "python3".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_that_can_t_be_written_has_a_temporary_one_beside_it() {
        let root = tempfile::tempdir().expect("a folder");
        let cache = root.path().join("cache");
        let (made, temporary) = rebuilding_folder(&cache).expect("a folder");
        assert_eq!((made, temporary.is_none()), (cache, true));
        // A file takes the place of the folder: not even root can create files below it.
        let file = root.path().join("file");
        std::fs::write(&file, "").expect("a file");
        let (made, temporary) = rebuilding_folder(&file).expect("a folder");
        let temporary = temporary.expect("a temporary folder");
        assert_eq!(made, temporary.path());
        let mode = std::fs::metadata(&made).expect("a folder").permissions().mode();
        assert_eq!(mode & 0o077, 0, "other users could put a tokenizer there");
        drop(temporary);
        assert!(!made.exists());
    }

    fn model(tokenizer_config: Value, directory: &Path) -> Model {
        let description = json!({
            "name": "m", "format": "safetensors", "directory": directory, "files": [], "config": {}, "tokenizer": "t",
            "tokenizer_config": tokenizer_config, "chat_template": "d", "generation_config": {}, "eos_token_ids": [],
            "bos_token": null, "eos_token": null, "context_length": 1, "vocab_size": 1, "pooling": null, "cache": "c",
        });
        serde_json::from_value(description).expect("a model")
    }

    #[test]
    fn the_mark_of_an_image_is_replaced_where_the_template_writes_it() {
        let (written, becomes) = ("<image>".to_owned(), "\n\n<image><p></image>\n\n".to_owned());
        let mark = Mark { written, becomes };
        for (template, replaced) in [
            ("{{ '<image>' }}a", "{{ '\n\n<image><p></image>\n\n' }}a"),
            ("{% set x = '<image>' %}", "{% set x = '\n\n<image><p></image>\n\n' %}"),
            ("{{ a }}<image>{{ b }}", "{{ a }}{{ \"\n\n<image><p></image>\n\n\" }}{{ b }}"),
            ("<image>", "{{ \"\n\n<image><p></image>\n\n\" }}"),
            ("no mark", "no mark"),
        ] {
            assert_eq!(mark.replaced(template), replaced);
        }
    }

    #[test]
    fn the_template_for_tools_is_in_a_list_or_in_a_folder() {
        let root = tempfile::tempdir().expect("a folder");
        let found =
            |config: Value| model(config, root.path()).tool_use_template().expect("no error");
        let one = |name: &str| json!({"name": name, "template": format!("of {name}")});
        for (config, expected) in [
            (json!({}), None),
            (json!({"chat_template": "d"}), None),
            (json!({"chat_template": [one("default"), one("rag")]}), None),
            (
                json!({"chat_template": [one("default"), one("tool_use")]}),
                Some("of tool_use".to_owned()),
            ),
        ] {
            assert_eq!(found(config.clone()), expected, "{config}");
        }
        let folder = root.path().join("additional_chat_templates");
        std::fs::create_dir(&folder).expect("a folder");
        std::fs::write(folder.join("tool_use.jinja"), "of the file").expect("a file");
        assert_eq!(found(json!({})), Some("of the file".to_owned()));
    }
}
