//! A cache of packed weights on disk, for later starts.
//!
//! A file is in the safetensors format, so that any tool can inspect it. It is read into allocated
//! memory rather than mapped, because allocated memory can use huge pages. A step that reads all
//! weights from 4 KiB pages of a mapping is slower.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use blake2::{Blake2b, Digest, digest::consts::U16};
use rustix::fs::{FlockOperation, flock, statvfs};
use serde_json::{Map, Value, json};

pub use self::header::Entry;
use self::header::{Fault, Header, Place};
use self::read::read_all;
use crate::describe::{hex, new_file};

mod header;
mod read;

/// The version of the format, incremented whenever the layout or the conversion from a checkpoint
/// changes.
const VERSION: u32 = 3;
const EDGE: u64 = 1 << 20;
const PIECES: u64 = 64;
const PIECE: usize = 4096;
/// Bytes per read and checksum: large enough that the cost of calls is negligible, and small enough
/// that all threads finish at about the same time.
const CHUNK: usize = 16 << 20;
const LENGTH: usize = 8;
const ALIGNMENT: usize = 64;
/// The size limit of a header, far beyond that of any model.
const MOST_HEADER: u64 = 256 << 20;
const METADATA: &str = "__metadata__";
const SEAL: &str = "seal";
const SUMS: &str = "sums";
const LOCK: &str = ".lock";

/// Returns the file name for the packed weights of a model's files under `facts`.
///
/// The name depends on each file's size, modification time, first and last MiB, and 64 samples in
/// between. Reading all of a large model would take as long as the cache saves. So a change
/// elsewhere in a file that keeps its size and time is not noticed.
///
/// # Errors
/// A file can't be read.
pub fn content_key(files: &[PathBuf], facts: &Value) -> io::Result<String> {
    digest_of(files, facts, true)
}

/// Returns a digest of a model's files and `facts` that is equal on all machines. It depends on the
/// same parts of each file as [`content_key`], but not on times.
///
/// # Errors
/// A file can't be read.
pub fn content_digest(files: &[PathBuf], facts: &Value) -> io::Result<String> {
    digest_of(files, facts, false)
}

fn digest_of(files: &[PathBuf], facts: &Value, timed: bool) -> io::Result<String> {
    let mut digest = Blake2b::<U16>::new();
    digest.update(json!([VERSION, facts]).to_string());
    for path in files {
        let file = File::open(path)?;
        let found = file.metadata()?;
        let size = found.len();
        let since = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH);
        let changed = since(found.modified()?).map_err(io::Error::other)?.as_nanos();
        let changed = if timed { changed } else { 0 };
        digest.update(format!("{size} {changed}"));
        let edges = [(0, EDGE as usize), (size.saturating_sub(EDGE), EDGE as usize)];
        let pieces = (0..PIECES).map(|piece| {
            let at = u128::from(size) * u128::from(piece) / u128::from(PIECES);
            (at as u64, PIECE)
        });
        for (offset, length) in edges.into_iter().chain(pieces) {
            let mut bytes = vec![0; length];
            let mut filled = 0;
            loop {
                match file.read_at(&mut bytes[filled..], offset + filled as u64)? {
                    0 => break,
                    count => filled += count,
                }
            }
            digest.update(&bytes[..filled]);
        }
    }
    Ok(hex(&digest.finalize()))
}

/// The cache file of a key, in a folder with a limit on total size. The file may not exist.
///
/// Errors here do not prevent serving the model. A file that can't be read counts as absent, and
/// writing may fail: one line on standard error states the reason. Every byte is verified on
/// reading. A file with corrupt data is removed and counts as absent.
pub struct PackedFile {
    path: PathBuf,
    limit: u64,
    found: Option<Header>,
}

impl PackedFile {
    /// Opens the file of `key` in `folder`. `limit` is the limit on the folder's total size, in
    /// bytes.
    #[must_use]
    pub fn open(folder: &Path, key: &str, limit: u64) -> Self {
        let mut file = Self { path: folder.join(key), limit, found: None };
        match file.header() {
            Ok(found) => file.found = found,
            Err(Fault::Header(why) | Fault::Data(why)) => file.say(&format!("is not used: {why}")),
        }
        file
    }

    /// Returns the notes stored with the tensors; `None`: there is no usable file.
    #[must_use]
    pub fn notes(&self) -> Option<&Map<String, Value>> {
        self.found.as_ref().map(|header| &header.notes)
    }

    /// Returns the data type and shape of a tensor in the file.
    #[must_use]
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        Some(&self.found.as_ref()?.places.get(name)?.entry)
    }

    /// Reads these tensors into buffers of their sizes. Returns false if that fails, and the
    /// buffers' content is then undefined. `each` gets a count and a task, and has to call the task
    /// once for every index below the count, in any order and on any threads. `report` gets the
    /// bytes read so far and the total.
    pub fn read(
        &mut self,
        into: Vec<(&str, &mut [u8])>,
        each: impl FnOnce(usize, &(dyn Fn(usize) + Sync)),
        report: &(dyn Fn(u64, u64) + Sync),
    ) -> bool {
        let Some(header) = &self.found else { return false };
        match read_all(&self.path, header, into, each, report) {
            Ok(()) => {
                // Record the use, since the least recently used file is removed first. In a
                // read-only folder this fails, and nothing is removed either.
                let now = SystemTime::now();
                let times = fs::FileTimes::new().set_accessed(now).set_modified(now);
                if let Ok(file) = File::options().append(true).open(&self.path) {
                    let _ = file.set_times(times);
                }
                true
            }
            Err(Fault::Data(why)) => {
                // Otherwise the file would never be replaced, because its header is valid.
                self.say(&format!("is not used and removed: {why}"));
                self.remove();
                false
            }
            Err(Fault::Header(why)) => {
                self.say(&format!("is not used: {why}"));
                false
            }
        }
    }

    /// Writes the file, unless it exists by now or there is no room. The least recently used files
    /// are removed to make room.
    pub fn write(&self, tensors: &[(&str, &Entry, &[u8])], notes: &Map<String, Value>) {
        if let Err(error) = self.try_write(tensors, notes) {
            self.say(&format!("can't be written: {error}"));
        }
    }

    /// Removes the file if possible, because its data is corrupt.
    pub fn remove(&mut self) {
        self.found = None;
        let _ = fs::remove_file(&self.path);
    }

    fn try_write(
        &self,
        tensors: &[(&str, &Entry, &[u8])],
        notes: &Map<String, Value>,
    ) -> io::Result<()> {
        let head = self.head(tensors, notes);
        let size = head.len() as u64 + tensors.iter().map(|(.., it)| it.len() as u64).sum::<u64>();
        let folder = self.path.parent().unwrap_or(&self.path);
        fs::create_dir_all(folder)?;
        // Anyone who can write to this folder can change the model's weights. If another user owns
        // the folder, its permissions are up to that user.
        let _ = fs::set_permissions(folder, fs::Permissions::from_mode(0o700));
        let lock = File::create(folder.join(LOCK))?;
        // Wait until no other process writes into the folder. If a process dies, its lock is
        // released.
        flock(&lock, FlockOperation::LockExclusive)?;
        if matches!(self.header(), Ok(Some(_))) || !self.make_room(folder, size)? {
            return Ok(());
        }
        let mut file = new_file(folder, &self.path)?;
        file.write_all(&head)?;
        for (.., bytes) in tensors {
            file.write_all(bytes)?;
        }
        // Without this, the name could reach the disk before the data.
        file.as_file().sync_all()?;
        file.persist(&self.path).map_err(|error| error.error)?;
        Ok(())
    }

    fn head(&self, tensors: &[(&str, &Entry, &[u8])], notes: &Map<String, Value>) -> Vec<u8> {
        let mut sums = Map::new();
        let mut entries = Map::new();
        entries.insert(METADATA.into(), Value::Null);
        let mut at = 0;
        for (name, entry, bytes) in tensors {
            let of_chunks: Vec<u32> = bytes.chunks(CHUNK).map(crc32fast::hash).collect();
            sums.insert((*name).into(), json!(of_chunks));
            let end = at + bytes.len();
            let entry =
                json!({"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [at, end]});
            entries.insert((*name).into(), entry);
            at = end;
        }
        let mut metadata = notes.clone();
        let sums = json!({"chunk": CHUNK, "crc32": sums}).to_string();
        metadata.insert(SUMS.into(), sums.into());
        entries.insert(METADATA.into(), Value::Object(metadata));
        let seal = self.seal(&entries);
        if let Some(Value::Object(metadata)) = entries.get_mut(METADATA) {
            metadata.insert(SEAL.into(), seal.into());
        }
        let mut text = Value::Object(entries).to_string().into_bytes();
        text.resize((LENGTH + text.len()).next_multiple_of(ALIGNMENT) - LENGTH, b' ');
        [&(text.len() as u64).to_le_bytes()[..], &text].concat()
    }

    /// Returns the digest that proves that a header is complete and belongs to this key.
    fn seal(&self, entries: &Map<String, Value>) -> String {
        let key = self.path.file_name().unwrap_or_default().to_string_lossy();
        let mut digest = Blake2b::<U16>::new();
        digest.update(key.as_bytes());
        digest.update(Value::Object(entries.clone()).to_string());
        hex(&digest.finalize())
    }

    /// Reads the header of the file; `None`: it does not exist.
    fn header(&self) -> Result<Option<Header>, Fault> {
        let file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                ) =>
            {
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        let size = file.metadata()?.len();
        let mut length = [0; LENGTH];
        let cut = || Fault::Header("it is no packed file, or was cut".into());
        file.read_exact_at(&mut length, 0).map_err(|_| cut())?;
        let length = u64::from_le_bytes(length);
        if length > size - LENGTH as u64 || length > MOST_HEADER {
            return Err(cut());
        }
        let mut text = vec![0; length as usize];
        file.read_exact_at(&mut text, LENGTH as u64)?;
        self.parse(&text, LENGTH as u64 + length, size).map(Some)
    }

    fn parse(&self, text: &[u8], start: u64, size: u64) -> Result<Header, Fault> {
        let damaged = || Fault::Header("it is damaged, or was made of something else".into());
        let mut entries = match serde_json::from_slice(text) {
            Ok(Value::Object(entries)) => entries,
            _ => return Err(damaged()),
        };
        let metadata = entries.get_mut(METADATA).and_then(Value::as_object_mut);
        let seal = metadata.and_then(|metadata| metadata.shift_remove(SEAL)).ok_or_else(damaged)?;
        if seal.as_str() != Some(&self.seal(&entries)) {
            return Err(damaged());
        }
        let Some(Value::Object(mut notes)) = entries.shift_remove(METADATA) else {
            return Err(damaged());
        };
        let sums = notes.shift_remove(SUMS);
        let sums = sums.as_ref().and_then(Value::as_str).ok_or_else(damaged)?;
        let sums: Value = serde_json::from_str(sums).map_err(|_| damaged())?;
        let chunk = sums["chunk"].as_u64().filter(|&chunk| chunk > 0).ok_or_else(damaged)?;
        let chunk = usize::try_from(chunk).map_err(|_| damaged())?;
        let mut places = HashMap::new();
        let mut end = start;
        for (name, entry) in entries {
            let shape = entry["shape"].as_array().ok_or_else(damaged)?;
            let shape: Option<Vec<usize>> =
                shape.iter().map(|n| usize::try_from(n.as_u64()?).ok()).collect();
            let dtype = entry["dtype"].as_str().ok_or_else(damaged)?.to_owned();
            let found = Entry { dtype, shape: shape.ok_or_else(damaged)? };
            let first = entry["data_offsets"][0].as_u64().ok_or_else(damaged)?;
            let bytes = found.bytes().ok_or_else(damaged)?;
            let offset = start.checked_add(first).ok_or_else(damaged)?;
            end = end.max(offset.checked_add(bytes as u64).ok_or_else(damaged)?);
            let list = sums["crc32"][&name].as_array().ok_or_else(damaged)?;
            let list: Option<Vec<u32>> =
                list.iter().map(|sum| u32::try_from(sum.as_u64()?).ok()).collect();
            let list = list.filter(|list| list.len() == bytes.div_ceil(chunk));
            let sums = list.ok_or_else(damaged)?;
            places.insert(name, Place { entry: found, offset, bytes, sums });
        }
        if end != size {
            return Err(Fault::Header(format!("it has {size} bytes in place of {end}")));
        }
        Ok(Header { notes, places, chunk })
    }

    /// Makes room for a file of `size` bytes by removing other files. Returns false if the file may
    /// not be written. The caller has to hold the folder's lock.
    fn make_room(&self, folder: &Path, size: u64) -> io::Result<bool> {
        if size > self.limit {
            self.say(&format!(
                "is not written: it would take {} of the {} that all may take",
                mib(size),
                mib(self.limit)
            ));
            return Ok(false);
        }
        let mut kept = Vec::new();
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path == self.path || (name.starts_with('.') && name != LOCK) {
                // This is a damaged file, or a file that a process left unfinished when it died.
                fs::remove_file(&path)?;
            } else if name != LOCK {
                let found = fs::metadata(&path)?;
                kept.push((found.modified()?, found.len(), path));
            }
        }
        let mut total: u64 = kept.iter().map(|(_, length, _)| length).sum();
        let disk = statvfs(folder)?;
        let mut free = disk.f_bavail.saturating_mul(disk.f_frsize);
        kept.sort();
        let mut leaving = Vec::new();
        for (_, length, path) in kept {
            if total + size <= self.limit {
                break;
            }
            leaving.push(path);
            total -= length;
            free += length;
        }
        if free < 2 * size {
            self.say(&format!(
                "is not written: it takes {}, and the disk has {}",
                mib(size),
                mib(free)
            ));
            return Ok(false);
        }
        leaving.iter().try_for_each(fs::remove_file)?;
        Ok(true)
    }

    fn say(&self, what: &str) {
        eprintln!("the file of packed weights {} {what}", self.path.display());
    }
}

fn mib(size: u64) -> String {
    format!("{:.0} MiB", size as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(dtype: &str, shape: &[usize]) -> Entry {
        Entry { dtype: dtype.into(), shape: shape.to_vec() }
    }

    fn serially(count: usize, work: &(dyn Fn(usize) + Sync)) {
        (0..count).for_each(work);
    }

    fn write(folder: &Path, key: &str, limit: u64) {
        let (one, two) = (entry("BF16", &[2, 3]), entry("U8", &[5]));
        let notes = json!({"stored": "{}"});
        PackedFile::open(folder, key, limit).write(
            &[("one", &one, &[1; 12]), ("two", &two, b"abcde")],
            notes.as_object().expect("an object"),
        );
    }

    fn read(folder: &Path, key: &str) -> Option<(Vec<u8>, Vec<u8>)> {
        let mut file = PackedFile::open(folder, key, 1 << 20);
        let sizes = ["one", "two"].map(|name| file.entry(name).and_then(Entry::bytes));
        let (mut one, mut two) = (vec![0; sizes[0]?], vec![0; sizes[1]?]);
        let into = vec![("one", &mut one[..]), ("two", &mut two[..])];
        file.read(into, serially, &|_, _| {}).then_some((one, two))
    }

    #[test]
    fn what_is_written_is_read_and_what_is_damaged_is_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        write(folder.path(), "key", 1 << 20);
        assert_eq!(read(folder.path(), "key"), Some((vec![1; 12], b"abcde".to_vec())));
        assert_eq!(read(folder.path(), "other"), None);
        let path = folder.path().join("key");
        let mut bytes = fs::read(&path).expect("a file");
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&path, &bytes).expect("written");
        assert_eq!(read(folder.path(), "key"), None);
        assert!(!path.exists(), "a file with a complete header would never be replaced");
    }

    #[test]
    fn the_oldest_make_room() {
        let folder = tempfile::tempdir().expect("a folder");
        write(folder.path(), "first", 1 << 20);
        let size = fs::metadata(folder.path().join("first")).expect("a file").len();
        fs::write(folder.path().join(".second.x"), "what a writer left").expect("written");
        write(folder.path(), "second", size + size / 2);
        let mut names: Vec<String> = fs::read_dir(folder.path())
            .expect("a folder")
            .map(|entry| entry.expect("one").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        assert_eq!(names, [".lock", "second"]);
        write(folder.path(), "third", size - 1);
        assert!(!folder.path().join("third").exists());
    }

    #[test]
    fn the_folder_is_for_its_owner_only() {
        let above = tempfile::tempdir().expect("a folder");
        let folder = above.path().join("packed");
        write(&folder, "key", 1 << 20);
        let mode = fs::metadata(&folder).expect("a folder").permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn a_folder_that_can_not_be_written_to_is_no_error() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        write(file.path(), "key", 1 << 20);
        assert_eq!(read(file.path(), "key"), None);
    }

    #[test]
    fn a_key_is_of_content_and_not_of_names() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = |name: &str| folder.path().join(name);
        let long_ago = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1000);
        let put = |name: &str, bytes: &[u8]| {
            fs::write(place(name), bytes).expect("written");
            let file = File::options().write(true).open(place(name)).expect("a file");
            file.set_modified(long_ago).expect("a time");
        };
        let key =
            |names: [&str; 2], facts: &Value| content_key(&names.map(place), facts).expect("a key");
        let bytes = vec![7; 3 << 20];
        put("one", &bytes);
        put("two", b"small");
        let facts = json!({"dtype": "a"});
        let old = key(["one", "two"], &facts);
        fs::rename(place("one"), place("three")).expect("moved");
        assert_eq!(key(["three", "two"], &facts), old);
        assert_ne!(key(["two", "three"], &facts), old);
        assert_ne!(key(["three", "two"], &json!({"dtype": "b"})), old);
        for at in [0, bytes.len() / 4, bytes.len() / 2, bytes.len() - 1] {
            let mut other = bytes.clone();
            other[at] = 8;
            put("three", &other);
            assert_ne!(key(["three", "two"], &facts), old, "{at}");
        }
        put("three", &bytes);
        assert_eq!(key(["three", "two"], &facts), old);
        let digest = || content_digest(&["three", "two"].map(place), &facts).expect("a digest");
        let elsewhere = digest();
        fs::write(place("two"), b"small").expect("written");
        assert_ne!(key(["three", "two"], &facts), old, "the modification time changes the key");
        assert_eq!(digest(), elsewhere, "another machine has other times");
        put("two", b"smull");
        assert_ne!(digest(), elsewhere);
        assert!(content_key(&[place("none")], &facts).is_err());
    }

    proptest! {
        #[test]
        fn a_damaged_file_is_as_if_it_were_not_there(at in 0..600_usize, value in any::<u8>(), cut in 0..600_usize) {
            let folder = tempfile::tempdir().expect("a folder");
            write(folder.path(), "key", 1 << 20);
            let path = folder.path().join("key");
            let whole = fs::read(&path).expect("a file");
            let mut bytes = whole.clone();
            let at = at % bytes.len();
            bytes[at] = value;
            bytes.truncate(cut.max(1).min(bytes.len()));
            fs::write(&path, &bytes).expect("written");
            let found = read(folder.path(), "key");
            if let Some(found) = found {
                prop_assert_eq!(found, (vec![1; 12], b"abcde".to_vec()));
            } else {
                prop_assert!(bytes != whole);
            }
        }
    }
}
