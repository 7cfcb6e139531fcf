//! Finds tokenizers for the measuring commands. Models are found as in `serve`, but their weights
//! are not downloaded.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use forebay_bench::TokenizerFinder;
use forebay_text::{Backend, Tokenizer};
use forebay_weights::read_json;
use serde_json::{Map, Value};

use crate::flags::Hand;
use crate::model::{Source, fetch, find_python};

const CONFIG: &str = "tokenizer_config.json";

/// Finds a tokenizer by the name of a model, as `serve` does, or by a `tokenizer.json`.
pub(crate) struct Tokenizers;

impl TokenizerFinder for Tokenizers {
    fn find(&self, name: &str) -> Result<Tokenizer> {
        let path = Path::new(name);
        if path.extension().is_some_and(|ending| ending == "json") && path.is_file() {
            return read(path);
        }
        // A folder with a tokenizer is read directly. Only the search for a model needs the Python
        // interpreter.
        let inside = path.join("tokenizer.json");
        if inside.is_file() {
            return read(&inside);
        }
        let python = std::env::var_os("FOREBAY_PYTHON").map(PathBuf::from);
        let python = find_python(python.as_deref());
        let source = Source { text_alone: true, ..Source::default() };
        let model = fetch(&python, name, source, false, Hand::Auto)?;
        Ok(Tokenizer::from_file_with(&model.tokenizer, Backend::Hf, &model.tokenizer_config)?)
    }
}

/// Reads a tokenizer, with additional tokens from the configuration file in the same folder.
fn read(path: &Path) -> Result<Tokenizer> {
    let config = path.with_file_name(CONFIG);
    let config = if config.is_file() {
        let text = std::fs::read(&config)?;
        match read_json(&text).with_context(|| format!("{} is not JSON", config.display()))? {
            Value::Object(config) => config,
            _ => bail!("{} is not a JSON object", config.display()),
        }
    } else {
        Map::new()
    };
    Ok(Tokenizer::from_file_with(path, Backend::Hf, &config)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_folders_need_no_download() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../text/tests/data/tiny-llama-tokenizer.json");
        let plain = Tokenizers.find(&file.display().to_string()).expect("the file itself");
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::copy(&file, folder.path().join("tokenizer.json")).expect("copied");
        let found = || Tokenizers.find(&folder.path().display().to_string());
        let text = "a <mytoken> b";
        let ids = plain.encode(text, false).expect("ids");
        assert_eq!(found().expect("a folder").encode(text, false), Ok(ids.clone()));
        let config = folder.path().join(CONFIG);
        std::fs::write(&config, r#"{"additional_special_tokens": ["<mytoken>"], "scale": NaN}"#)
            .expect("written");
        let more = found().expect("a folder").encode(text, false).expect("ids");
        assert!(more.len() < ids.len(), "the token of the configuration is one: {more:?}, {ids:?}");
        std::fs::write(&config, "[]").expect("written");
        assert!(found().is_err());
    }
}
