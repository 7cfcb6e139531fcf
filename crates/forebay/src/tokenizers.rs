//! Tokenizers for the commands that measure: found where `serve` finds models, without their
//! weights.

use std::path::{Path, PathBuf};

use anyhow::Result;
use forebay_bench::TokenizerFinder;

use crate::flags::Hand;
use crate::model::{Source, fetch, find_python};

/// Finds a tokenizer by the model's name in `serve`, or takes a `tokenizer.json`.
pub(crate) struct Tokenizers;

impl TokenizerFinder for Tokenizers {
    fn find(&self, name: &str) -> Result<PathBuf> {
        let path = Path::new(name);
        if path.extension().is_some_and(|ending| ending == "json") && path.is_file() {
            return Ok(path.to_owned());
        }
        // No interpreter is needed for what is already there.
        let inside = path.join("tokenizer.json");
        if inside.is_file() {
            return Ok(inside);
        }
        let python = std::env::var_os("FOREBAY_PYTHON").map(PathBuf::from);
        let python = find_python(python.as_deref());
        Ok(fetch(&python, name, Source::default(), false, Hand::Auto)?.tokenizer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_folders_need_no_download() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../text/tests/data");
        let file = folder.join("tiny-llama-tokenizer.json");
        let name = file.display().to_string();
        assert_eq!(Tokenizers.find(&name).expect("the file itself"), file);
    }
}
