//! A local folder as a model. Detects frequent mistakes.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::choose::{ADAPTER, IS_ADAPTER, is_companion, part};
use crate::error::HubError;

/// The beginning of a pointer file, which Git LFS puts in place of a large file.
const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";
/// The extensions of files that Git LFS may replace.
const KEPT: [&str; 3] = [".safetensors", ".gguf", ".json"];

/// Returns the path of the model at `path`: the path itself, or the single model among the GGUF
/// files in a folder.
///
/// # Errors
/// The files are not a model: they are pointers of Git LFS, or an adapter.
pub(crate) fn model_at(path: PathBuf) -> Result<PathBuf, HubError> {
    if !path.is_dir() {
        check_pointer(&path)?;
        return Ok(path);
    }
    let entries = fs::read_dir(&path).map_err(|error| HubError::disk(&path, "read", &error))?;
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    let has = |name: &str| names.iter().any(|other| other == name);
    if has(ADAPTER) && !has("config.json") {
        return Err(HubError::Path(format!("{} {IS_ADAPTER}", path.display())));
    }
    for name in names.iter().filter(|name| KEPT.iter().any(|end| name.ends_with(end))) {
        check_pointer(&path.join(name))?;
    }
    if has("config.json") || names.iter().any(|name| name.ends_with(".safetensors")) {
        return Ok(path);
    }
    let (companions, models): (Vec<&String>, Vec<&String>) =
        names.iter().filter(|name| name.ends_with(".gguf")).partition(|name| is_companion(name));
    let first = models.first().filter(|_| !companions.is_empty());
    let Some(first) = first else { return Ok(path) };
    let stem = |name: &str| part(name).map_or(name.to_owned(), |(stem, ..)| stem.to_owned());
    let one = models.iter().all(|name| stem(name) == stem(first));
    Ok(if one { path.join(first) } else { path })
}

/// Returns an error if the file is a Git LFS pointer. The error names the command that fetches the
/// file.
fn check_pointer(path: &Path) -> Result<(), HubError> {
    let mut begins = [0; POINTER.len()];
    // If the file is unreadable, the code that needs it reports the error.
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut begins));
    if read.is_err() || begins != POINTER {
        return Ok(());
    }
    let path = path.display();
    Err(HubError::Path(format!(
        "{path} is a pointer of Git LFS in place of the file: `git lfs pull` in its folder brings it"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, content) in files {
            fs::write(folder.path().join(name), content).expect("a file");
        }
        folder
    }

    fn found(files: &[&str]) -> String {
        let files: Vec<(&str, &[u8])> = files.iter().map(|name| (*name, &b"x"[..])).collect();
        let folder = folder(&files);
        let path = model_at(folder.path().to_owned()).expect("a model");
        path.strip_prefix(folder.path()).expect("inside").display().to_string()
    }

    #[test]
    fn the_one_model_among_gguf_files_is_found() {
        assert_eq!(found(&["t-Q8_0.gguf", "mmproj-t.gguf"]), "t-Q8_0.gguf");
        assert_eq!(found(&["t.gguf", "t.imatrix.gguf", "imatrix.dat"]), "t.gguf");
        let parts = ["t-00001-of-00002.gguf", "t-00002-of-00002.gguf", "mmproj.gguf"];
        assert_eq!(found(&parts), "t-00001-of-00002.gguf");
        // For these files the folder itself is returned. The code that reads the folder accepts the
        // files or reports an error.
        for files in [
            &["a.gguf", "b.gguf", "mmproj.gguf"][..],
            &["t.gguf"],
            &["mmproj.gguf"],
            &["config.json", "model.safetensors", "t.gguf", "mmproj.gguf"],
            &[],
        ] {
            assert_eq!(found(files), "", "{files:?}");
        }
    }

    #[test]
    fn pointers_and_adapters_are_named_as_such() {
        let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
        for name in ["model.safetensors", "tokenizer.json", "t.gguf"] {
            let folder = folder(&[("config.json", b"{}"), (name, pointer)]);
            for path in [folder.path().to_owned(), folder.path().join(name)] {
                let error = model_at(path).expect_err("a pointer").to_string();
                assert!(error.contains(&format!("{name} is a pointer of Git LFS")), "{error}");
            }
        }
        let adapter = folder(&[(ADAPTER, b"{}"), ("adapter_model.safetensors", b"x")]);
        let error = model_at(adapter.path().to_owned()).expect_err("an adapter").to_string();
        assert!(error.contains("is an adapter"), "{error}");
        let merged = folder(&[(ADAPTER, b"{}"), ("config.json", b"{}")]);
        assert!(model_at(merged.path().to_owned()).is_ok());
    }
}
