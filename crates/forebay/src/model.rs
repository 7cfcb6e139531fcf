//! Finds the model, downloads missing files, and has a subprocess of the interpreter describe it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use forebay_hand::without_keys;
use forebay_hub::{Found, ModelName, Settings};
use forebay_weights::ModelError;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::flags::{Hand, ServeFlags};
use crate::models;

/// The output of `python -m forebay.weights.describe`.
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
    /// The folder for files that Forebay makes of models.
    pub(crate) cache: PathBuf,
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
        let rank = self.config.get("kv_lora_rank").and_then(Value::as_u64);
        rank.is_some_and(|rank| rank > 0)
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
            "cache": self.cache,
        })
    }

    /// Elements of an embedding; 0 where the configuration does not say.
    pub(crate) fn hidden_size(&self) -> u32 {
        // A model that sees images has its decoder's numbers apart.
        let config = self.config.get("text_config").and_then(Value::as_object);
        let size = config.unwrap_or(&self.config).get("hidden_size").and_then(Value::as_u64);
        size.and_then(|size| u32::try_from(size).ok()).unwrap_or_default()
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
}

impl ServeFlags {
    /// The source of the model.
    pub(crate) fn source(&self) -> Source<'_> {
        Source {
            revision: self.loading.revision.as_deref(),
            download_dir: self.loading.download_dir.as_deref(),
            offline: self.loading.offline,
            embedding: self.loading.is_embedding,
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
    let describe =
        |found: &Found, weights| describe_any(python, (name, hand), found, &cache, source, weights);
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
        // An interpreter with PyTorch would refuse it too, and need not be installed for that.
        ModelError::Unserved(_) => {
            Err(why).with_context(|| format!("the model {name} is not available"))
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
                if error.is::<std::io::Error>() || error.is::<crate::python::Incomplete>() {
                    return Err(why).with_context(|| format!("the model {name} is not available"));
                }
                Err(error)
            })
        }
    }
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
    command.args(crate::python::arguments("forebay.weights.describe")).arg(&found.path);
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
    serde_json::from_slice(&output.stdout).context("forebay.weights.describe printed no model")
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
