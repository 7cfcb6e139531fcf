//! The folder of a store: uploaded and output files, and the records of files and batches.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The kinds of objects for which there are records.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    File,
    Batch,
}

impl Kind {
    fn folder(self) -> &'static str {
        match self {
            Self::File => "files",
            Self::Batch => "batches",
        }
    }
}

/// The suffix of a record that is being written, or of a file that is being uploaded.
const UNFINISHED: &str = "part";
/// Only the server's user may read stored files.
const FOLDER_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

/// A store's folder, locked against other processes.
#[derive(Debug)]
pub(crate) struct Folder {
    root: PathBuf,
    /// 32 random bytes that are hashed into owners' names, so that nobody can test from a name
    /// whether a key is right.
    pub(crate) salt: [u8; 32],
    _lock: File,
}

impl Folder {
    /// Opens or creates the folder, and deletes unfinished files.
    ///
    /// # Errors
    /// The folder can't be written, or another process uses it.
    pub(crate) fn open(root: &Path) -> io::Result<Self> {
        for kind in [Kind::File, Kind::Batch] {
            DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(root.join(kind.folder()))?;
        }
        let mut lock = private().create(true).truncate(false).open(root.join("salt"))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(io::Error::other("another server uses it"));
            }
            // Some file systems do not support locks.
            Err(TryLockError::Error(_)) => {}
        }
        let mut salt = Vec::new();
        lock.read_to_end(&mut salt)?;
        let salt = match salt.try_into() {
            Ok(salt) => salt,
            Err(_) => {
                let salt = rand::random::<[u8; 32]>();
                fs::write(root.join("salt"), salt)?;
                salt
            }
        };
        let folder = Self { root: root.to_owned(), salt, _lock: lock };
        for kind in [Kind::File, Kind::Batch] {
            for path in folder.paths(kind)? {
                if path.extension().is_some_and(|end| end == UNFINISHED) {
                    fs::remove_file(path)?;
                }
            }
        }
        Ok(folder)
    }

    /// The path of a file's content.
    pub(crate) fn content(&self, id: &str) -> PathBuf {
        self.root.join(Kind::File.folder()).join(format!("{id}.jsonl"))
    }

    /// The path of a file that is being uploaded.
    pub(crate) fn unfinished(&self, id: &str) -> PathBuf {
        self.root.join(Kind::File.folder()).join(format!("{id}.{UNFINISHED}"))
    }

    /// Creates the file for an upload.
    pub(crate) fn create(&self, id: &str) -> io::Result<File> {
        private().create_new(true).open(self.unfinished(id))
    }

    /// Creates the file to which a batch's answers are appended.
    pub(crate) fn prepare(&self, id: &str) -> io::Result<PathBuf> {
        let path = self.content(id);
        private().create(true).truncate(false).open(&path)?;
        Ok(path)
    }

    /// Writes a record atomically: after a failure the old record is intact.
    pub(crate) fn save<T: Serialize>(&self, kind: Kind, id: &str, record: &T) -> io::Result<()> {
        let folder = self.root.join(kind.folder());
        let unfinished = folder.join(format!("{id}.json.{UNFINISHED}"));
        let mut file = private().create(true).truncate(true).open(&unfinished)?;
        file.write_all(&serde_json::to_vec(record)?)?;
        file.sync_all()?;
        fs::rename(unfinished, folder.join(format!("{id}.json")))
    }

    /// Loads all records of a kind. Records that can't be read are skipped and logged.
    pub(crate) fn load<T: DeserializeOwned>(&self, kind: Kind) -> io::Result<Vec<T>> {
        let mut records = Vec::new();
        for path in self.paths(kind)? {
            if path.extension().is_none_or(|end| end != "json") {
                continue;
            }
            match serde_json::from_slice(&fs::read(&path)?) {
                Ok(record) => records.push(record),
                Err(error) => tracing::warn!(path = %path.display(), %error, "left out"),
            }
        }
        Ok(records)
    }

    /// Deletes file contents to which no record refers.
    pub(crate) fn delete_unnamed(&self, is_named: impl Fn(&str) -> bool) -> io::Result<()> {
        for path in self.paths(Kind::File)? {
            let is_content = path.extension().is_some_and(|end| end == "jsonl");
            let name = path.file_stem().and_then(|name| name.to_str());
            if is_content && !name.is_some_and(&is_named) {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }

    /// Deletes a record and, for a file, its content.
    pub(crate) fn delete(&self, kind: Kind, id: &str) -> io::Result<()> {
        if matches!(kind, Kind::File) {
            absent_is_fine(fs::remove_file(self.content(id)))?;
        }
        absent_is_fine(fs::remove_file(self.root.join(kind.folder()).join(format!("{id}.json"))))
    }

    /// The size of a file's content in bytes; 0 if the file does not exist.
    pub(crate) fn size(&self, id: &str) -> u64 {
        fs::metadata(self.content(id)).map_or(0, |facts| facts.len())
    }

    fn paths(&self, kind: Kind) -> io::Result<Vec<PathBuf>> {
        fs::read_dir(self.root.join(kind.folder()))?.map(|entry| Ok(entry?.path())).collect()
    }
}

fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(FILE_MODE);
    options
}

fn absent_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
