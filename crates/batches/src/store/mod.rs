//! The files and batches of a server's clients, on disk, with limits.
//!
//! An owner is identified by an API key, and can't access other owners' objects. Bytes are limited
//! per owner and in total. The numbers of files and batches are limited, and both are deleted at a
//! given age. Methods may block on the disk.

mod batches;
mod files;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::path::PathBuf;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio::sync::watch;

use crate::folder::{Folder, Kind};
use crate::objects::{BatchObject, FileObject};

pub(crate) use batches::Job;
pub use batches::NewBatch;
pub use files::Upload;

/// The largest number of files per owner, and of batches per owner.
const OBJECTS: usize = 1000;

/// The limits of a store. A field that is set by a flag has the flag's name.
#[derive(Debug, Clone, Serialize)]
pub struct BatchConfig {
    /// The folder of the store.
    pub batch_dir: PathBuf,
    /// The largest total size of all files in bytes.
    pub batch_max_bytes: u64,
    /// The largest total size of the files of one key in bytes, including output files.
    pub batch_key_bytes: u64,
    /// The largest size of an uploaded file in bytes.
    pub batch_max_file_bytes: u64,
    /// The largest number of requests in a batch.
    pub batch_max_requests: u64,
    /// The largest number of requests in flight for all batches together.
    pub batch_concurrency: usize,
    /// Seconds for which files and batches are kept.
    pub batch_ttl: u64,
    /// The largest size of a line in bytes.
    #[serde(skip)]
    pub longest_line: usize,
}

impl Default for BatchConfig {
    /// The defaults of the flags. The folder has no default.
    fn default() -> Self {
        Self {
            batch_dir: PathBuf::new(),
            batch_max_bytes: 16 << 30,
            batch_key_bytes: 4 << 30,
            batch_max_file_bytes: 200 << 20,
            batch_max_requests: 50_000,
            batch_concurrency: 64,
            batch_ttl: 30 * 24 * 3600,
            longest_line: 4 << 20,
        }
    }
}

/// The name of an owner, which does not reveal the API key.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Owner(Box<str>);

/// The reason why the store refuses an operation.
#[derive(Debug, Error)]
pub enum StoreError {
    /// This owner has no such file.
    #[error("no file `{0}`: it was deleted, is too old, or is another key's")]
    UnknownFile(String),
    /// This owner has no such batch.
    #[error("no batch `{0}`: it is too old, or another key's")]
    UnknownBatch(String),
    /// A field has an invalid value.
    #[error("`{param}`: {reason}")]
    Invalid {
        /// The field at fault.
        param: &'static str,
        /// The reason.
        reason: String,
    },
    /// Another operation has to finish first, or the batch has already ended.
    #[error("{0}")]
    Conflict(String),
    /// The file is too large.
    #[error("the file is larger than the limit of {0} bytes (--batch-max-file-bytes)")]
    TooLarge(u64),
    /// The owner, or all owners together, have reached a limit of bytes or objects.
    #[error("{0}")]
    Full(String),
    /// The disk failed.
    #[error("the batch folder: {0}")]
    Disk(#[from] io::Error),
}

/// A stored object with its owner.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct OwnedObject<T> {
    owner: Owner,
    /// A number that increases with each object that the store creates.
    serial: u64,
    #[serde(flatten)]
    object: T,
}

/// A batch, and the ids of its output files.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Kept {
    output: String,
    errors: String,
    batch: BatchObject,
}

/// A store, locked against other processes.
#[derive(Debug)]
pub struct BatchStore {
    config: BatchConfig,
    folder: Folder,
    shelf: Mutex<Shelf>,
    /// Signals changes that concern the tasks that compute batches.
    changes: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Shelf {
    files: HashMap<String, OwnedObject<FileObject>>,
    batches: BTreeMap<String, OwnedObject<Kept>>,
    /// The serial number of the next object.
    next_serial: u64,
    /// The stored bytes of each owner, including files that are being written.
    bytes: HashMap<Owner, u64>,
    /// The number of uploads of each owner.
    uploads: HashMap<Owner, u64>,
    /// The ids of the batches that are being computed.
    running: HashSet<String>,
}

impl BatchStore {
    /// Opens or creates a store. `now` is in seconds since 1970.
    ///
    /// # Errors
    /// The folder can't be written, or another process uses it.
    pub fn open(config: BatchConfig, now: u64) -> io::Result<Self> {
        let folder = Folder::open(&config.batch_dir)?;
        let mut shelf = Shelf::default();
        for file in folder.load::<OwnedObject<FileObject>>(Kind::File)? {
            shelf.files.insert(file.object.id.clone(), file);
        }
        for batch in folder.load::<OwnedObject<Kept>>(Kind::Batch)? {
            shelf.batches.insert(batch.object.batch.id.clone(), batch);
        }
        let files = shelf.files.values().map(|file| file.serial);
        let serials = files.chain(shelf.batches.values().map(|batch| batch.serial));
        shelf.next_serial = serials.max().map_or(0, |last| last + 1);
        // An unfinished batch continues after a restart, so its output files have to be kept.
        let answers: HashMap<String, Owner> = shelf
            .batches
            .values()
            .filter(|kept| !kept.object.batch.status.is_over())
            .flat_map(|kept| {
                let files = [&kept.object.output, &kept.object.errors];
                files.map(|id| (id.clone(), kept.owner.clone()))
            })
            .collect();
        folder.delete_unnamed(|id| shelf.files.contains_key(id) || answers.contains_key(id))?;
        let files = shelf.files.values().map(|file| (file.object.id.clone(), file.owner.clone()));
        let all: HashMap<String, Owner> = answers.into_iter().chain(files).collect();
        for (id, owner) in all {
            *shelf.bytes.entry(owner).or_default() += folder.size(&id);
        }
        let store =
            Self { config, folder, shelf: Mutex::new(shelf), changes: watch::Sender::default() };
        store.expire(now);
        Ok(store)
    }

    /// The limits of the store.
    pub fn config(&self) -> &BatchConfig {
        &self.config
    }

    /// Returns the owner with this key, or the common owner if no keys are required.
    pub fn owner(&self, key: Option<&str>) -> Owner {
        let Some(key) = key else { return Owner("all".into()) };
        let hash = blake3::keyed_hash(&self.folder.salt, key.as_bytes());
        Owner(hash.to_hex()[..32].into())
    }

    /// Returns a receiver of changes that concern the tasks that compute batches.
    pub(crate) fn changed(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn tell(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    /// The total size of all files in bytes.
    pub fn bytes(&self) -> u64 {
        self.shelf.lock().bytes.values().sum()
    }

    /// Deletes files and batches that have expired.
    pub fn expire(&self, now: u64) {
        let mut shelf = self.shelf.lock();
        let used = shelf.used();
        let old: Vec<String> = shelf
            .files
            .values()
            .filter(|file| file.object.expires_at <= now && !used.contains(&file.object.id))
            .map(|file| file.object.id.clone())
            .collect();
        for id in old {
            self.remove_file(&mut shelf, &id);
        }
        let is_old = |ended: u64| ended.saturating_add(self.config.batch_ttl) <= now;
        let old: Vec<String> = shelf
            .batches
            .values()
            .map(|kept| &kept.object.batch)
            .filter(|batch| batch.ended_at().is_some_and(is_old))
            .map(|batch| batch.id.clone())
            .collect();
        for id in old {
            self.remove_batch(&mut shelf, &id);
        }
    }

    fn remove_file(&self, shelf: &mut Shelf, id: &str) {
        let size = self.folder.size(id);
        if let Err(error) = self.folder.delete(Kind::File, id) {
            tracing::warn!(file = id, %error, "a file could not be deleted");
            return;
        }
        if let Some(file) = shelf.files.remove(id) {
            shelf.free(&file.owner, size);
        }
    }

    fn remove_batch(&self, shelf: &mut Shelf, id: &str) {
        if let Err(error) = self.folder.delete(Kind::Batch, id) {
            tracing::warn!(batch = id, %error, "a batch could not be deleted");
        }
        shelf.batches.remove(id);
    }

    /// Counts bytes that are about to be written. Fails if they exceed a limit.
    fn take(&self, shelf: &mut Shelf, owner: &Owner, bytes: u64) -> Result<(), StoreError> {
        let all: u64 = shelf.bytes.values().sum();
        let own = shelf.bytes.get(owner).copied().unwrap_or_default();
        let (limit, flag, has) = if own + bytes > self.config.batch_key_bytes {
            (self.config.batch_key_bytes, "--batch-key-bytes", "the files of this key")
        } else if all + bytes > self.config.batch_max_bytes {
            (self.config.batch_max_bytes, "--batch-max-bytes", "all files together")
        } else {
            *shelf.bytes.entry(owner.clone()).or_default() += bytes;
            return Ok(());
        };
        let reason = format!("no room: {has} may have {limit} bytes ({flag}); delete some");
        Err(StoreError::Full(reason))
    }
}

impl Shelf {
    fn own<T>(&mut self, owner: &Owner, object: T) -> OwnedObject<T> {
        let serial = self.next_serial;
        self.next_serial += 1;
        OwnedObject { owner: owner.clone(), serial, object }
    }

    fn free(&mut self, owner: &Owner, bytes: u64) {
        if let Some(own) = self.bytes.get_mut(owner) {
            *own = own.saturating_sub(bytes);
            if *own == 0 {
                self.bytes.remove(owner);
            }
        }
    }

    /// The ids of the input files of unfinished batches.
    fn used(&self) -> HashSet<String> {
        let batches = self.batches.values().map(|kept| &kept.object.batch);
        let open = batches.filter(|batch| !batch.status.is_over());
        open.map(|batch| batch.input_file_id.clone()).collect()
    }
}

/// Creates an id that can't be guessed.
fn new_id(prefix: &str) -> String {
    format!("{prefix}{:024x}", rand::random::<u128>() >> 32)
}

#[cfg(test)]
mod tests;
