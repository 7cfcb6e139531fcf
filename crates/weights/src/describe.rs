//! Describes a model for the brain and the hand, from files on this machine.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use blake2::{Blake2b, Digest, digest::consts::U16};
use serde_json::{Map, Value, json};

use crate::checkpoint::{INDEX, read_index};
use crate::error::ModelError;
use crate::families::{Shape, hf_config, token_ids};
use crate::gguf::{GgufFiles, GgufValue, special_token, tokenizer_json};
use crate::json::{read_object, token_text};
use crate::model::ModelShape;
use crate::pooling::read_pooling;
use crate::vector::{VectorLayer, check_files};
use crate::vision::read_images;

const PICKLES: [&str; 4] = [".bin", ".pt", ".pth", ".ckpt"];
const WHOLE: &str = "model.safetensors";
/// The version of the files rebuilt from a GGUF file, incremented whenever their content changes.
/// Their cache key includes this version and the file's first bytes, which contain all metadata of
/// any known model.
const REBUILD_VERSION: u32 = 3;
const KEY_BYTES: u64 = 32 << 20;
/// Names of sampling parameters in `generation_config.json`, and their keys in a GGUF file.
const SAMPLING: [(&str, &str); 5] = [
    ("temperature", "temp"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("repetition_penalty", "penalty_repeat"),
];

/// The files to describe, and the options of the description.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// A directory, or a `.gguf` file or one of its parts.
    pub path: &'a Path,
    /// The name of the model; `None`: the name of the directory or the file.
    pub name: Option<&'a str>,
    /// The cache folder for files derived from models.
    pub cache: &'a Path,
    /// True if a directory must have weights.
    pub weights: bool,
    /// True if the model is served for pooling even if it could generate.
    pub embedding: bool,
    /// True if only the text part of a model with a tower is served, without images.
    pub text_alone: bool,
    /// A tokenizer file that replaces the directory's `tokenizer.json`.
    pub tokenizer: Option<&'a Path>,
    /// The results of probing the model in transformers; `None`: Forebay's own code computes the
    /// model.
    pub called: Option<&'a Value>,
}

/// A model's description: a JSON object for the brain.
pub type Description = Value;

/// Describes the model.
///
/// # Errors
/// Files are missing or damaged, or no hand serves the model.
pub fn describe(source: Source<'_>) -> Result<Description, ModelError> {
    let path = std::path::absolute(source.path)
        .map_err(|error| ModelError::unreadable(source.path, &error))?;
    let mut description = if path.is_dir() {
        of_folder(&path, source)?
    } else if !path.is_file() {
        return Err(ModelError::broken(format!("{} doesn't exist", path.display())));
    } else if source.called.is_some() {
        return Err(ModelError::broken(format!(
            "{} is no folder with a config.json, which transformers' code needs",
            path.display()
        )));
    } else if path.extension().is_some_and(|end| end == "gguf") {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        of_gguf(&gguf_parts(&path)?, source.name.unwrap_or(&stem), source)?
    } else if path.extension().is_some_and(|end| PICKLES.iter().any(|it| it[1..] == *end)) {
        return Err(ModelError::broken(format!(
            "{} is a pickle file, which can run code when it is read; use safetensors or GGUF",
            path.display()
        )));
    } else {
        return Err(ModelError::broken(format!(
            "{} is neither a directory nor a .gguf file",
            path.display()
        )));
    };
    description["cache"] = json!(source.cache);
    Ok(description)
}

fn of_folder(folder: &Path, source: Source<'_>) -> Result<Value, ModelError> {
    let present = file_names(folder)?;
    let ggufs: Vec<&String> = present.iter().filter(|name| name.ends_with(".gguf")).collect();
    let named = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let name = source.name.unwrap_or(&named);
    let Some(first) = ggufs.first().filter(|_| {
        source.name.is_none() && !present.iter().any(|name| name.ends_with(".safetensors"))
    }) else {
        if !present.contains("config.json") {
            return Err(ModelError::broken(format!(
                "{} is no model: it has neither config.json nor a .gguf file",
                folder.display()
            )));
        }
        return of_safetensors(folder, name, source);
    };
    let parts = gguf_parts(&folder.join(first))?;
    if parts.len() != ggufs.len() {
        let names: Vec<&str> = ggufs.iter().map(|name| name.as_str()).collect();
        return Err(ModelError::broken(format!(
            "{} has several models, name one of them: {}",
            folder.display(),
            names.join(", ")
        )));
    }
    of_gguf(&parts, name, source)
}

fn file_names(folder: &Path) -> Result<BTreeSet<String>, ModelError> {
    let unreadable = |error: io::Error| ModelError::unreadable(folder, &error);
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if let (true, Some(name)) = (path.is_file(), path.file_name()) {
            names.insert(name.to_string_lossy().into_owned());
        }
    }
    Ok(names)
}

fn shape_of(
    config: &Map<String, Value>,
    headless: bool,
    text_alone: bool,
) -> Result<ModelShape, ModelError> {
    let read = if text_alone { ModelShape::of_text } else { ModelShape::from_config };
    read(config, headless)
}

/// The part of a description that comes from the model's shape, or from probing it in transformers.
struct Facts {
    shape: Option<ModelShape>,
    vocab_size: u64,
    longest_context: u64,
    eos_token_ids: Vec<i32>,
}

impl Facts {
    fn of_config(
        config: &Map<String, Value>,
        headless: bool,
        text_alone: bool,
    ) -> Result<Self, ModelError> {
        let shape = shape_of(config, headless, text_alone)?;
        Ok(Self {
            vocab_size: shape.vocab_size() as u64,
            longest_context: shape.longest_context(),
            eos_token_ids: shape.eos_token_ids(config),
            shape: Some(shape),
        })
    }

    /// Reads the facts of a model that transformers computes.
    fn of_called(config: &Map<String, Value>, called: &Value) -> Self {
        let number = |key: &str| called.get(key).and_then(Value::as_u64).unwrap_or(0);
        let text = config.get("text_config").and_then(Value::as_object);
        let mut eos_token_ids = token_ids(config.get("eos_token_id"));
        eos_token_ids.extend(text.into_iter().flat_map(|it| token_ids(it.get("eos_token_id"))));
        Self {
            shape: None,
            vocab_size: number("vocab_size"),
            longest_context: number("longest_context"),
            eos_token_ids,
        }
    }

    fn decoder(&self) -> Option<&Shape> {
        self.shape.as_ref().and_then(ModelShape::decoder)
    }
}

fn of_safetensors(folder: &Path, name: &str, source: Source<'_>) -> Result<Value, ModelError> {
    let config = read_object(&folder.join("config.json"), false)?;
    // Check this first: a model that Forebay's own code does not serve may be computed by
    // transformers.
    let native = source.called.is_none().then(|| shape_of(&config, false, source.text_alone));
    let native = native.transpose()?;
    let own = folder.join("tokenizer.json");
    let tokenizer = source.tokenizer.map_or(own, Path::to_owned);
    if !tokenizer.is_file() {
        return Err(ModelError::broken(format!(
            "{} has no tokenizer.json, the only form of tokenizer that is supported here",
            folder.display()
        )));
    }
    let mut pooling = read_pooling(&config, Some(folder), native.as_ref(), source.embedding)?;
    let facts = match source.called {
        None => Facts::of_config(&config, !pooling.is_null(), source.text_alone)?,
        Some(called) => Facts::of_called(&config, called),
    };
    if let Some(called) = source.called.filter(|_| pooling["size"].as_u64() == Some(0)) {
        pooling["size"] = called["hidden_size"].clone();
    }
    let tower = facts.decoder().and_then(|shape| shape.tower.as_ref());
    let tokenizer_config = read_object(&folder.join("tokenizer_config.json"), true)?;
    let images = tower.map(|tower| read_images(folder, &config, &tokenizer_config, tower));
    let images = images.transpose()?;
    if images.is_some() && !pooling.is_null() {
        let what = format!(
            "{name}, which sees images, to pool: that is for models of text, as it is with \
             --limit-images 0"
        );
        return Err(ModelError::Unserved(what));
    }
    let files = if source.weights { safetensors_files(folder)? } else { Vec::new() };
    if source.weights {
        check_files(&layers(&pooling))?;
    }
    let generation = read_object(&folder.join("generation_config.json"), true)?;
    let special = read_object(&folder.join("special_tokens_map.json"), true)?;
    let mut eos = facts.eos_token_ids;
    eos.extend(token_ids(generation.get("eos_token_id")));
    let token = |key| token_text(&tokenizer_config, key).or_else(|| token_text(&special, key));
    Ok(json!({
        "name": name,
        "format": "safetensors",
        "directory": folder,
        "files": files,
        "tokenizer": tokenizer,
        "chat_template": chat_template(folder, &tokenizer_config)?,
        "bos_token": token("bos_token"),
        "eos_token": token("eos_token"),
        "eos_token_ids": eos.into_iter().collect::<BTreeSet<i32>>(),
        "context_length": facts.longest_context,
        "vocab_size": facts.vocab_size,
        "config": config,
        "tokenizer_config": tokenizer_config,
        "generation_config": generation,
        "pooling": pooling,
        "images": images,
        "shape": facts.shape,
        "called": source.called,
    }))
}

/// Returns the layers after pooling. Empty if the model does not pool or has no such layers.
fn layers(pooling: &Value) -> Vec<VectorLayer> {
    serde_json::from_value(pooling["layers"].clone()).unwrap_or_default()
}

fn of_gguf(files: &[PathBuf], name: &str, source: Source<'_>) -> Result<Value, ModelError> {
    let folder = source.cache.join("gguf").join(content_key(files)?);
    let (facts_path, tokenizer) = (folder.join("facts.json"), folder.join("tokenizer.json"));
    if !(facts_path.is_file() && tokenizer.is_file()) {
        rebuild(files, &facts_path, &tokenizer)?;
    }
    let facts = read_object(&facts_path, false)?;
    let config = facts.get("config").and_then(Value::as_object).cloned().unwrap_or_default();
    let shape = ModelShape::from_config(&config, false)?;
    let pooling = read_pooling(&config, None, Some(&shape), source.embedding)?;
    let found = Facts::of_config(&config, !pooling.is_null(), source.text_alone)?;
    let fact = |key: &str| facts.get(key).cloned().unwrap_or(Value::Null);
    Ok(json!({
        "name": name,
        "format": "gguf",
        "directory": files[0].parent(),
        "files": files,
        "tokenizer": tokenizer,
        "chat_template": fact("chat_template"),
        "bos_token": fact("bos_token"),
        "eos_token": fact("eos_token"),
        "eos_token_ids": found.eos_token_ids.iter().collect::<BTreeSet<_>>(),
        "context_length": found.longest_context,
        "vocab_size": found.vocab_size,
        "config": config,
        "tokenizer_config": {},
        "generation_config": fact("generation_config"),
        "pooling": pooling,
        "images": null,
        "shape": found.shape,
        "called": null,
    }))
}

/// Returns `path`, or all parts of the split file that it belongs to (`-00002-of-00003`).
fn gguf_parts(path: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let part = stem.rsplit_once("-of-").and_then(|(before, count)| {
        let (stem, number) = before.rsplit_once('-')?;
        let count = digits(count).then(|| count.parse::<u32>().ok())??;
        (digits(number) && !stem.is_empty()).then(|| (stem.to_owned(), count))
    });
    let Some((stem, count)) = part else { return Ok(vec![path.to_owned()]) };
    let parts: Vec<PathBuf> = (1..=count)
        .map(|number| path.with_file_name(format!("{stem}-{number:05}-of-{count:05}.gguf")))
        .collect();
    let missing: Vec<String> = parts
        .iter()
        .filter(|part| !part.is_file())
        .map(|part| part.file_name().unwrap_or_default().to_string_lossy().into_owned())
        .collect();
    if missing.is_empty() && !parts.is_empty() {
        return Ok(parts);
    }
    let folder = path.parent().unwrap_or(path);
    Err(ModelError::broken(format!("{} lacks {}", folder.display(), missing.join(", "))))
}

/// Returns the safetensors files of a folder.
pub(crate) fn safetensors_files(folder: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let names = safetensors_names(folder, &file_names(folder)?)?;
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}

fn safetensors_names(folder: &Path, names: &BTreeSet<String>) -> Result<Vec<String>, ModelError> {
    if let Some(placed) = read_index(folder)? {
        let shards: BTreeSet<String> = placed.into_values().collect();
        let missing: Vec<&str> = shards.difference(names).map(String::as_str).collect();
        if missing.is_empty() && !shards.is_empty() {
            return Ok(shards.into_iter().collect());
        }
        // If the index's shards are missing, they have been merged into one file, and the index is
        // stale.
        if !names.contains(WHOLE) || shards.contains(WHOLE) {
            let lacks = if shards.is_empty() { "every shard".into() } else { missing.join(", ") };
            return Err(ModelError::broken(format!(
                "{} lacks {lacks} of {INDEX}",
                folder.display()
            )));
        }
    }
    // Some repositories also contain an adapter, or a second copy of the weights in the format of
    // the vendor's own tools.
    let weights: Vec<String> = names
        .iter()
        .filter(|name| name.ends_with(".safetensors"))
        .filter(|name| !name.starts_with("consolidated") && !name.starts_with("adapter"))
        .cloned()
        .collect();
    if weights.iter().any(|name| name == WHOLE) {
        return Ok(vec![WHOLE.into()]);
    }
    if !weights.is_empty() {
        return Ok(weights);
    }
    let pickled = names.iter().any(|name| PICKLES.iter().any(|end| name.ends_with(end)));
    let folder = folder.display();
    Err(ModelError::broken(if pickled {
        format!(
            "{folder} has only pickle files for weights, which can run code when they are read; convert them to safetensors, or choose a \
             model that has them"
        )
    } else {
        format!("{folder} has no weights: neither *.safetensors nor *.gguf")
    }))
}

fn rebuild(files: &[PathBuf], facts_path: &Path, tokenizer: &Path) -> Result<(), ModelError> {
    let opened = GgufFiles::open(files)?;
    let config = hf_config(&opened)?;
    ModelShape::from_config(&config, false)?;
    let template = opened.metadata.get("tokenizer.chat_template");
    let facts = json!({
        "config": config,
        "chat_template": template.and_then(|template| template.as_text()),
        "bos_token": special_token(&opened.metadata, "bos"),
        "eos_token": special_token(&opened.metadata, "eos"),
        "generation_config": sampling(&opened.metadata),
    });
    let rebuilt = tokenizer_json(&opened.metadata)?;
    let written = write_json(tokenizer, &rebuilt).and_then(|()| write_json(facts_path, &facts));
    written.map_err(|error| {
        let folder = facts_path.parent().unwrap_or(facts_path).display();
        ModelError::broken(format!("{folder} can't be written: {error}"))
    })
}

/// Reads the sampling parameters that the file's authors recommend, under their names in
/// `generation_config.json`. The file uses llama.cpp's keys (PR #17120).
fn sampling(metadata: &HashMap<String, GgufValue>) -> Map<String, Value> {
    let number = |&(name, key): &(&str, &str)| {
        let number = metadata.get(&format!("general.sampling.{key}"))?.as_f64()?;
        Some((name.to_owned(), Value::from(number)))
    };
    SAMPLING.iter().filter_map(number).collect()
}

fn content_key(files: &[PathBuf]) -> Result<String, ModelError> {
    let unreadable = |path: &Path| {
        let path = path.to_owned();
        move |error| ModelError::unreadable(&path, &error)
    };
    let mut digest = Blake2b::<U16>::new();
    digest.update(format!("rebuild {REBUILD_VERSION}"));
    let first = fs::File::open(&files[0]).map_err(unreadable(&files[0]))?;
    let mut bytes = Vec::new();
    first.take(KEY_BYTES).read_to_end(&mut bytes).map_err(unreadable(&files[0]))?;
    digest.update(&bytes);
    let mut sizes = Vec::new();
    for file in files {
        sizes.push(fs::metadata(file).map_err(unreadable(file))?.len().to_string());
    }
    // Formatted as Python prints a list.
    digest.update(format!("[{}]", sizes.join(", ")));
    Ok(hex(&digest.finalize()))
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes a file atomically.
fn write_json(path: &Path, value: &Value) -> io::Result<()> {
    write_synced(path, value, fs::File::sync_all)
}

fn write_synced(
    path: &Path,
    value: &Value,
    sync: impl FnOnce(&fs::File) -> io::Result<()>,
) -> io::Result<()> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder)?;
    let mut file = new_file(folder, path)?;
    serde_json::to_writer(io::BufWriter::new(&mut file), value)?;
    file.flush()?;
    // Without this, the name could reach the disk before the data.
    sync(file.as_file())?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// Creates a temporary file beside `path`, with the permissions of an ordinary new file.
pub(crate) fn new_file(folder: &Path, path: &Path) -> io::Result<tempfile::NamedTempFile> {
    use std::os::unix::fs::PermissionsExt;
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    // The process's umask is applied to this mode.
    let mode = fs::Permissions::from_mode(0o666);
    tempfile::Builder::new().prefix(&format!(".{name}.")).permissions(mode).tempfile_in(folder)
}

/// Reads the chat template. A separate file has precedence, as in transformers. Of several named
/// templates, the default is used.
fn chat_template(
    folder: &Path,
    tokenizer_config: &Map<String, Value>,
) -> Result<Option<String>, ModelError> {
    let jinja = folder.join("chat_template.jinja");
    if jinja.is_file() {
        let text = fs::read_to_string(&jinja);
        return text.map(Some).map_err(|error| ModelError::unreadable(&jinja, &error));
    }
    let separate = read_object(&folder.join("chat_template.json"), true)?;
    let key = "chat_template";
    let there = |value: &&Value| !value.is_null() && value.as_str() != Some("");
    let found = separate.get(key).filter(there).or_else(|| tokenizer_config.get(key));
    let named = |items: &Vec<Value>| {
        let default = |item: &&Value| item.get("name").and_then(Value::as_str) == Some("default");
        items.iter().rfind(default)?.get("template")?.as_str().map(str::to_owned)
    };
    Ok(match found {
        Some(Value::Array(items)) => named(items),
        Some(Value::String(text)) => Some(text.clone()),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rebuilt_file_is_on_the_disk_before_it_has_its_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("gguf/key/tokenizer.json");
        let value = json!({"model": {"vocab": {"a": 0}}});
        let failed = write_synced(&path, &value, |_| Err(io::Error::other("no room")));
        assert!(failed.is_err() && !path.exists(), "a failed write leaves no file");
        let mut synced = 0;
        let written = write_synced(&path, &value, |file| {
            assert!(!path.exists(), "the file already has its final name");
            synced = file.metadata()?.len();
            file.sync_all()
        });
        written.expect("written");
        let text = fs::read(&path).expect("a file");
        assert_eq!((synced, serde_json::from_slice(&text).ok()), (text.len() as u64, Some(value)));
    }
}
