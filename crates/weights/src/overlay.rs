//! Overlays: changed tensors on top of a safetensors checkpoint, without a copy of the other
//! tensors.
//!
//! An overlay is a folder that is a checkpoint itself: files with the changed tensors, links to the
//! files with the other tensors, and an index of all tensors.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::Dtype;
use serde_json::{Map, Value, json};

use crate::checkpoint::{HEAD, INDEX, Index};
use crate::error::ModelError;
use crate::safe::{SafeFile, SafeTensor};

/// The file with tensors that an earlier overlay changed and this overlay does not.
const KEPT: &str = "kept.safetensors";
/// Bytes per copy operation.
const AT_ONCE: usize = 1 << 20;
/// Bytes per element of the widest data type that trainers send.
const WIDEST: u64 = 4;
/// An upper limit for a tensor's entry in a header: name, type, shape and offsets.
const HEADER_OF_ONE: u64 = 1 << 10;
/// An upper limit for the other bytes of a header.
const HEADER: u64 = 1 << 20;

/// The safetensors checkpoint that hands load.
#[derive(Debug, Clone, Copy)]
pub struct ServedCheckpoint<'a> {
    /// The folder with the files that are not tensors.
    pub folder: &'a Path,
    /// The files with tensors.
    pub files: &'a [PathBuf],
    /// True if the folder is an overlay. Its files are removed together with the folder.
    pub is_overlay: bool,
    /// True if the output head is the embedding matrix.
    pub tied: bool,
}

impl ServedCheckpoint<'_> {
    /// The largest size in bytes of one update, which may contain every tensor, with headers.
    ///
    /// # Errors
    /// A file can't be read or is damaged.
    pub fn most_bytes(&self) -> Result<u64, ModelError> {
        let of_tensor = |(_, tensor): &Placed| {
            let elements: usize = tensor.shape.iter().product();
            let own = tensor.bytes as u64;
            let widest = if is_float(tensor.dtype) { WIDEST * elements as u64 } else { 0 };
            own.max(widest) + HEADER_OF_ONE
        };
        Ok(self.tensors()?.values().map(of_tensor).sum::<u64>() + HEADER)
    }

    /// Turns `folder`, which contains the files `changed`, into an overlay over this checkpoint.
    /// Tensors must have the checkpoint's names, shapes and types; float types may differ. A head
    /// that is tied to the embedding may be among them, and has no effect.
    ///
    /// # Errors
    /// A file is damaged, a tensor is not in the checkpoint or occurs twice, or the folder can't be
    /// written. The message is one line for the client.
    pub fn lay(&self, folder: &Path, changed: &[PathBuf]) -> Result<(), ModelError> {
        let mut served = self.tensors()?;
        let mut placed: BTreeMap<String, String> = BTreeMap::new();
        let lone_head = self.tied && !served.contains_key(HEAD);
        for (number, path) in changed.iter().enumerate() {
            let file = SafeFile::open(path)
                .map_err(|error| ModelError::broken(in_words(&error, path, number)))?;
            let shard = name_of(path);
            for (name, tensor) in &file.tensors {
                if placed.contains_key(name) {
                    return Err(ModelError::broken(format!("{name} is there twice")));
                }
                match served.remove(name) {
                    Some((_, own)) => check(name, tensor, &own)?,
                    None if lone_head && name == HEAD => continue,
                    None => {
                        let reason = format!("the served checkpoint has no tensor {name}");
                        return Err(ModelError::broken(reason));
                    }
                }
                placed.insert(name.clone(), shard.clone());
            }
        }
        if placed.is_empty() {
            return Err(ModelError::broken("there is no tensor to change"));
        }
        self.place_others(folder, served, &mut placed)?;
        self.link_rest(folder)?;
        let index = json!({"metadata": {}, "weight_map": placed});
        let path = folder.join(INDEX);
        fs::write(&path, index.to_string()).map_err(|error| unwritable(&path, &error))
    }

    /// Returns the tensors that the model uses, by name.
    fn tensors(&self) -> Result<BTreeMap<String, Placed>, ModelError> {
        let index = Index::beside(self.files)?;
        let mut found: BTreeMap<String, Placed> = BTreeMap::new();
        for path in self.files {
            let file = Arc::new(SafeFile::open(path)?);
            for (name, tensor) in &file.tensors {
                // If there is no index and two files have the same tensor, the first file is used.
                if index.places(name, path) && !found.contains_key(name) {
                    found.insert(name.clone(), (Arc::clone(&file), tensor.clone()));
                }
            }
        }
        Ok(found)
    }

    /// Links the files of unchanged tensors. Files that belong to an older overlay are copied,
    /// because they are removed with that overlay.
    fn place_others(
        &self,
        folder: &Path,
        others: BTreeMap<String, Placed>,
        placed: &mut BTreeMap<String, String>,
    ) -> Result<(), ModelError> {
        let mut links: HashMap<PathBuf, String> = HashMap::new();
        let mut kept: Vec<(String, Placed)> = Vec::new();
        for (name, (file, tensor)) in others {
            if self.is_overlay && !file.path().is_symlink() {
                placed.insert(name.clone(), KEPT.to_owned());
                kept.push((name, (file, tensor)));
                continue;
            }
            let next = format!("served-{:05}.safetensors", links.len());
            let link = match links.get(file.path()) {
                Some(link) => link.clone(),
                None => {
                    link(file.path(), &folder.join(&next))?;
                    links.insert(file.path().to_owned(), next.clone());
                    next
                }
            };
            placed.insert(name, link);
        }
        if kept.is_empty() { Ok(()) } else { copy(&kept, &folder.join(KEPT)) }
    }

    /// Links the files that contain no tensors.
    fn link_rest(&self, folder: &Path) -> Result<(), ModelError> {
        let unreadable = |error| ModelError::unreadable(self.folder, &error);
        let mut names = BTreeSet::new();
        for entry in fs::read_dir(self.folder).map_err(unreadable)? {
            names.insert(entry.map_err(unreadable)?.file_name());
        }
        for name in names {
            let text = name.to_string_lossy();
            if !text.ends_with(".safetensors") && text != INDEX {
                link(&self.folder.join(&name), &folder.join(&name))?;
            }
        }
        Ok(())
    }
}

/// A tensor, and the file that contains it.
type Placed = (Arc<SafeFile>, SafeTensor);

fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16)
}

fn check(name: &str, sent: &SafeTensor, served: &SafeTensor) -> Result<(), ModelError> {
    if sent.shape != served.shape {
        return Err(ModelError::broken(format!(
            "{name} has the shape {:?}, and {:?} in the served checkpoint",
            sent.shape, served.shape
        )));
    }
    if sent.dtype != served.dtype && !(is_float(sent.dtype) && is_float(served.dtype)) {
        return Err(ModelError::broken(format!(
            "{name} has the type {}, and {} in the served checkpoint",
            sent.dtype, served.dtype
        )));
    }
    Ok(())
}

/// Returns the message for an error in a file that a client sent. The client does not know the
/// file's path.
fn in_words(error: &ModelError, path: &Path, number: usize) -> String {
    if is_pickle(path) {
        return "tensors came as a pickle, which can run code when it is read: send safetensors, as `safetensors.torch.save` makes them"
            .to_owned();
    }
    error.to_string().replace(&path.display().to_string(), &format!("safetensors number {number}"))
}

/// True if the file is output of `pickle.dumps` (protocol 2 and later) or `torch.save`. These first
/// bytes could also be the header length of a safetensors file, so this is checked only after
/// parsing has failed.
fn is_pickle(path: &Path) -> bool {
    let mut first = [0; 2];
    let read = File::open(path).and_then(|file| file.read_exact_at(&mut first, 0));
    read.is_ok() && (first[0] == 0x80 && (2..=5).contains(&first[1]) || &first == b"PK")
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Creates a link to the final target of `from`, so that no link goes through another overlay.
fn link(from: &Path, to: &Path) -> Result<(), ModelError> {
    let target = from.canonicalize().map_err(|error| ModelError::unreadable(from, &error))?;
    symlink(target, to).map_err(|error| unwritable(to, &error))
}

fn copy(tensors: &[(String, Placed)], to: &Path) -> Result<(), ModelError> {
    let mut header = Map::new();
    let mut at = 0;
    for (name, (_, tensor)) in tensors {
        let place = json!({
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [at, at + tensor.bytes],
        });
        header.insert(name.clone(), place);
        at += tensor.bytes;
    }
    let header = Value::Object(header).to_string();
    let failed = |error| unwritable(to, &error);
    let mut out = BufWriter::new(File::create(to).map_err(failed)?);
    out.write_all(&(header.len() as u64).to_le_bytes()).map_err(failed)?;
    out.write_all(header.as_bytes()).map_err(failed)?;
    let mut bytes = vec![0; AT_ONCE];
    for (_, (file, tensor)) in tensors {
        for first in (0..tensor.bytes).step_by(AT_ONCE) {
            let some = &mut bytes[..AT_ONCE.min(tensor.bytes - first)];
            file.read(tensor.offset + first as u64, some)?;
            out.write_all(some).map_err(failed)?;
        }
    }
    out.flush().map_err(failed)
}

fn unwritable(path: &Path, error: &std::io::Error) -> ModelError {
    ModelError::broken(format!("{} can't be written: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use safetensors::tensor::TensorView;

    use super::*;

    /// Writes tensors with the given values.
    fn write(path: &Path, tensors: &[(&str, &[f32])], dtype: Dtype) {
        let bytes: Vec<Vec<u8>> = tensors
            .iter()
            .map(|(_, numbers)| match dtype {
                Dtype::F32 => numbers.iter().flat_map(|number| number.to_le_bytes()).collect(),
                _ => numbers.iter().flat_map(|&number| [number as u8; 2]).collect(),
            })
            .collect();
        let views = tensors.iter().zip(&bytes).map(|((name, numbers), bytes)| {
            (*name, TensorView::new(dtype, vec![numbers.len()], bytes).expect("a tensor"))
        });
        let file = safetensors::serialize(views.collect::<Vec<_>>(), None).expect("a file");
        fs::write(path, file).expect("written");
    }

    /// Creates a folder with a checkpoint of two files.
    fn checkpoint() -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        write(&path("one.safetensors"), &[("a", &[1.0, 2.0]), ("b", &[3.0])], Dtype::F32);
        write(&path("two.safetensors"), &[("c", &[4.0]), ("a", &[9.0, 9.0])], Dtype::F32);
        fs::write(path("config.json"), "{}").expect("written");
        folder
    }

    fn files(folder: &Path) -> Vec<PathBuf> {
        let found = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("one").path());
        let mut found: Vec<_> = found.filter(|it| name_of(it).ends_with(".safetensors")).collect();
        found.sort();
        found
    }

    fn served<'a>(
        folder: &'a Path,
        files: &'a [PathBuf],
        is_overlay: bool,
    ) -> ServedCheckpoint<'a> {
        ServedCheckpoint { folder, files, is_overlay, tied: true }
    }

    /// Returns the values of all tensors that are served from a folder.
    fn numbers(folder: &Path) -> BTreeMap<String, Vec<f32>> {
        let files = files(folder);
        let tensors = served(folder, &files, true).tensors().expect("a checkpoint");
        let read = |(file, tensor): Placed| {
            let mut bytes = vec![0; tensor.bytes];
            file.read(tensor.offset, &mut bytes).expect("read");
            let (numbers, _) = bytes.as_chunks::<4>();
            numbers.iter().map(|&number| f32::from_le_bytes(number)).collect()
        };
        tensors.into_iter().map(|(name, placed)| (name, read(placed))).collect()
    }

    fn overlay(over: &Path, is_overlay: bool, tensors: &[(&str, &[f32])]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        let changed = folder.path().join("changed-0.safetensors");
        write(&changed, tensors, Dtype::F32);
        let files = files(over);
        served(over, &files, is_overlay).lay(folder.path(), &[changed]).expect("an overlay");
        folder
    }

    #[test]
    fn overlays_of_overlays_need_only_the_first_checkpoint() {
        let base = checkpoint();
        let first = overlay(base.path(), false, &[("a", &[5.0, 6.0]), (HEAD, &[0.0])]);
        let found = |values: [&[f32]; 3]| {
            ["a", "b", "c"]
                .into_iter()
                .map(str::to_owned)
                .zip(values.map(<[f32]>::to_vec))
                .collect()
        };
        let expected: BTreeMap<String, Vec<f32>> = found([&[5.0, 6.0], &[3.0], &[4.0]]);
        assert_eq!(numbers(first.path()), expected);
        assert!(first.path().join("config.json").is_file());
        let second = overlay(first.path(), true, &[("c", &[7.0])]);
        drop(first);
        let expected: BTreeMap<String, Vec<f32>> = found([&[5.0, 6.0], &[3.0], &[7.0]]);
        assert_eq!(numbers(second.path()), expected);
        let third = overlay(second.path(), true, &[("a", &[8.0, 8.0]), ("c", &[1.0])]);
        drop(second);
        assert!(!third.path().join(KEPT).exists(), "nothing of the overlay is left");
        let expected: BTreeMap<String, Vec<f32>> = found([&[8.0, 8.0], &[3.0], &[1.0]]);
        assert_eq!(numbers(third.path()), expected);
        assert_eq!(numbers(base.path())["a"], [1.0, 2.0]);
    }

    #[test]
    fn what_has_no_place_is_refused_by_name() {
        let base = checkpoint();
        let folder = tempfile::tempdir().expect("a folder");
        let (one, other) = (folder.path().join("changed-0"), folder.path().join("changed-1"));
        let files = files(base.path());
        let error = |changed: &[PathBuf]| {
            let laid = served(base.path(), &files, false).lay(folder.path(), changed);
            laid.expect_err("no overlay").to_string()
        };
        write(&one, &[("d", &[1.0])], Dtype::F32);
        assert_eq!(error(std::slice::from_ref(&one)), "the served checkpoint has no tensor d");
        write(&one, &[("b", &[1.0, 2.0])], Dtype::F32);
        assert_eq!(
            error(std::slice::from_ref(&one)),
            "b has the shape [2], and [1] in the served checkpoint"
        );
        write(&one, &[("b", &[1.0])], Dtype::I16);
        assert_eq!(
            error(std::slice::from_ref(&one)),
            "b has the type I16, and F32 in the served checkpoint"
        );
        write(&one, &[("b", &[1.0])], Dtype::BF16);
        write(&other, &[("b", &[1.0])], Dtype::F32);
        assert_eq!(error(&[one.clone(), other]), "b is there twice");
        write(&one, &[], Dtype::F32);
        assert_eq!(error(std::slice::from_ref(&one)), "there is no tensor to change");
        fs::write(&one, b"\x80").expect("written");
        assert_eq!(
            error(std::slice::from_ref(&one)),
            "safetensors number 0 is damaged: it has no header"
        );
        for pickle in
            [&b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00}."[..], b"PK\x03\x04rest of it"]
        {
            fs::write(&one, pickle).expect("written");
            assert!(error(std::slice::from_ref(&one)).contains("send safetensors"));
        }
    }

    #[test]
    fn an_update_has_room_for_wide_numbers_of_all_tensors() {
        let base = checkpoint();
        let files = files(base.path());
        let most = served(base.path(), &files, false).most_bytes().expect("a checkpoint");
        assert_eq!(most, HEADER + 3 * HEADER_OF_ONE + 4 * WIDEST);
    }
}
