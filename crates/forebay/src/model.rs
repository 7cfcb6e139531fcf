//! Finds the model, downloads missing files, and has a subprocess of the interpreter describe it.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use forebay_hand::without_keys;
use forebay_hub::{Found, ModelName, Settings};
use forebay_weights::ModelError;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tempfile::TempDir;
use tracing::warn;

use crate::flags::{Hand, ModelImpl, ServeFlags};
use crate::models;

/// The output of `python -m forebay.models.describe`.
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
    pub(crate) pooling: Option<Pooling>,
    /// The way from an image to patches; `None`: the model takes none.
    #[serde(default)]
    pub(crate) images: Option<Images>,
    /// What transformers' code, which computes the model, needs of the engine; `None`: native code
    /// computes it.
    #[serde(default)]
    pub(crate) called: Option<Called>,
    /// The folder for files that Forebay makes of models.
    pub(crate) cache: PathBuf,
    /// The folder of the tokenizer that was rebuilt where no cache can be written. It goes with the
    /// model.
    #[serde(skip)]
    #[expect(dead_code, reason = "its end removes the folder")]
    temporary: Option<Arc<TempDir>>,
}

/// The findings of a probe of a model that transformers' code computes, as
/// `forebay.weights.called` describes them.
#[derive(Debug, Clone, Deserialize, Serialize)]
pub(crate) struct Called {
    /// Bytes of the recurrent states of a request; 0: the model has none.
    pub(crate) state_bytes: u64,
    pub(crate) hidden_size: u32,
    /// The values that only the hand reads.
    #[serde(flatten)]
    pub(crate) rest: Map<String, Value>,
}

/// A model's processing of images, as `forebay.weights.vision` describes it. A position of the
/// decoder is `merge` times `merge` patches.
#[derive(Debug, Clone, Deserialize, Serialize)]
pub(crate) struct Images {
    /// Pixels of a patch, each way.
    pub(crate) patch: u32,
    pub(crate) merge: u32,
    pub(crate) min_pixels: u64,
    pub(crate) max_pixels: u64,
    pub(crate) image_token_id: i32,
    /// The values that only the hand reads.
    #[serde(flatten)]
    pub(crate) rest: Map<String, Value>,
}

/// A model's output in place of tokens, as `forebay.weights.pooling` describes it.
#[derive(Debug, Clone, Deserialize, Serialize)]
pub(crate) struct Pooling {
    pub(crate) task: Task,
    pub(crate) kind: String,
    pub(crate) size: u32,
    pub(crate) normalize: bool,
    pub(crate) sigmoid: bool,
    pub(crate) max_length: Option<u32>,
}

/// The mean of the states of a model whose positions see only earlier ones.
const CAUSAL_MEAN: &str = "causal_mean";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Task {
    Embed,
    Score,
}

impl Pooling {
    /// True if every position sees the whole prompt. The model then keeps nothing, and its prompts
    /// can't be cut into chunks.
    pub(crate) fn whole_prompts(&self) -> bool {
        !matches!(self.kind.as_str(), "last" | CAUSAL_MEAN)
    }

    /// True if every state of a prompt counts. Then none may be left out because its keys and
    /// values are known.
    pub(crate) fn counts_all(&self) -> bool {
        self.kind == CAUSAL_MEAN
    }
}

impl Model {
    /// True if the model keeps one row a position in place of keys and values.
    pub(crate) fn is_latent(&self) -> bool {
        // Transformers' code keeps the keys and values of all heads.
        if self.called.is_some() {
            return false;
        }
        let rank = self.config.get("kv_lora_rank").and_then(Value::as_u64);
        rank.is_some_and(|rank| rank > 0)
    }

    /// True if layers keep a state of all earlier positions, which no prefix of a request has.
    pub(crate) fn has_states(&self) -> bool {
        self.called.as_ref().is_some_and(|called| called.state_bytes > 0)
    }

    /// The part that a hand is told.
    pub(crate) fn told(&self) -> Value {
        json!({
            "format": self.format,
            "directory": self.directory,
            "files": self.files,
            "config": self.config,
            "pooling": self.pooling,
            "images": self.images,
            "called": self.called,
            "cache": self.cache,
        })
    }

    /// Elements of an embedding; 0 where the configuration does not say.
    pub(crate) fn hidden_size(&self) -> u32 {
        if let Some(called) = &self.called {
            return called.hidden_size;
        }
        // A model that sees images has its decoder's numbers apart.
        let config = self.config.get("text_config").and_then(Value::as_object);
        let size = config.unwrap_or(&self.config).get("hidden_size").and_then(Value::as_u64);
        size.and_then(|size| u32::try_from(size).ok()).unwrap_or_default()
    }

    /// The template for chats with tools, if the model has one beside its default: in the list of
    /// its tokenizer's configuration, or in a folder of its own.
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

    /// The other special tokens that chat templates may name as variables.
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

/// The source of models.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) revision: Option<&'a str>,
    pub(crate) download_dir: Option<&'a Path>,
    pub(crate) offline: bool,
    /// True if the model should pool, also one that could generate.
    pub(crate) embedding: bool,
    pub(crate) model_impl: ModelImpl,
}

impl ServeFlags {
    /// The source of the model.
    pub(crate) fn source(&self) -> Source<'_> {
        Source {
            revision: self.loading.revision.as_deref(),
            download_dir: self.loading.download_dir.as_deref(),
            offline: self.loading.offline,
            embedding: self.loading.is_embedding,
            model_impl: self.loading.model_impl,
        }
    }
}

/// Resolves `name`, and downloads missing files. Progress goes to stderr.
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
        // A model that can't be run should say so before gigabytes are downloaded.
        describe(&found, false)?;
        hub.complete(&mut found).with_context(missing)?;
    }
    describe(&found, weights)
}

/// The folder for tokenizers that are rebuilt from GGUF files: the cache, or a temporary one where
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

/// Describes `found` by its files. The interpreter describes models that are not known here. Both
/// give the same for one model.
fn describe_any(
    python: &Path,
    (name, hand): (&str, Hand),
    found: &Found,
    cache: &Path,
    source: Source<'_>,
    weights: bool,
) -> Result<Model> {
    if source.model_impl == ModelImpl::Transformers {
        if hand == Hand::Rust {
            bail!(
                "--model-impl transformers: the Rust hand has native code only; leave --hand off"
            );
        }
        return describe(python, name, found, cache, source, weights);
    }
    let files = forebay_weights::Source {
        path: &found.path,
        name: found.name.as_deref(),
        cache,
        weights,
        embedding: source.embedding,
    };
    let why = match forebay_weights::describe(files) {
        Ok(_) if hand == Hand::Torch => {
            return describe(python, name, found, cache, source, weights);
        }
        Ok(description) => {
            return serde_json::from_value(description).context("a description without a model");
        }
        Err(error) => error,
    };
    match why {
        ModelError::Unserved(_) if hand == Hand::Rust || !may_be_called(found, source) => {
            Err(why).with_context(|| format!("the model {name} is not available"))
        }
        ModelError::Unserved(_) => {
            describe(python, name, found, cache, source, weights).map_err(|error| {
                if without_interpreter(&error) {
                    error.context(format!("the model {name} has no native code: {why}"))
                } else {
                    error
                }
            })
        }
        _ if hand == Hand::Torch => describe(python, name, found, cache, source, weights),
        ModelError::Elsewhere(what) if hand == Hand::Rust => {
            bail!("--hand rust: the Rust hand does not have {what}; leave the flag off")
        }
        _ if hand == Hand::Rust => {
            Err(why).with_context(|| format!("the model {name} is not available"))
        }
        ModelError::Elsewhere(what) => describe(python, name, found, cache, source, weights)
            .with_context(|| {
                format!("PyTorch's hand is asked, as the Rust hand does not have {what}")
            }),
        ModelError::Broken(_) => {
            describe(python, name, found, cache, source, weights).or_else(|error| {
                // Without an interpreter this program says itself what is wrong.
                if without_interpreter(&error) {
                    return Err(why).with_context(|| format!("the model {name} is not available"));
                }
                Err(error)
            })
        }
    }
}

/// True if transformers' code may compute a model that native code does not have.
fn may_be_called(found: &Found, source: Source<'_>) -> bool {
    source.model_impl == ModelImpl::Auto && found.path.join("config.json").is_file()
}

/// True if no interpreter with our packages could be asked.
fn without_interpreter(error: &anyhow::Error) -> bool {
    error.is::<std::io::Error>() || error.is::<crate::python::Incomplete>()
}

/// Asks the interpreter what `found` is.
fn describe(
    python: &Path,
    name: &str,
    found: &Found,
    cache: &Path,
    source: Source<'_>,
    weights: bool,
) -> Result<Model> {
    crate::python::check(python)?;
    let mut command = Command::new(python);
    without_keys(&mut command);
    command.args(crate::python::arguments("forebay.models.describe")).arg(&found.path);
    command.args(["--model-impl", source.model_impl.name()]);
    if let Some(name) = &found.name {
        command.args(["--name", name]);
    }
    command.arg("--cache-dir").arg(cache);
    if source.embedding {
        command.arg("--is-embedding");
    }
    if !weights {
        command.arg("--no-weights");
    }
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {}", python.display()))?;
    if !output.status.success() {
        bail!("the model {name} is not available (see above)");
    }
    let description = forebay_weights::read_json(&output.stdout).and_then(serde_json::from_value);
    description.context("forebay.models.describe printed no model")
}

/// The interpreter to use: named, beside this program, of the active virtual environment, or on the
/// path.
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
        // A file where the folder should be, which not even the superuser can write below.
        let file = root.path().join("file");
        std::fs::write(&file, "").expect("a file");
        let (made, temporary) = rebuilding_folder(&file).expect("a folder");
        let temporary = temporary.expect("a temporary folder");
        assert_eq!(made, temporary.path());
        let mode = std::fs::metadata(&made).expect("a folder").permissions().mode();
        assert_eq!(mode & 0o077, 0, "others can't put a tokenizer there");
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
