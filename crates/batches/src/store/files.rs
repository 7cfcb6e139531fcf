//! The files of a store.

use std::cmp::Reverse;
use std::fs::{self, File};
use std::io::Write;
use std::sync::Arc;

use super::{BatchStore, OBJECTS, Owner, StoreError, new_id};
use crate::folder::Kind;
use crate::objects::FileObject;

/// The longest file name that a client may give, in bytes.
const FILENAME: usize = 255;
/// The only purpose for which clients may upload files.
const PURPOSE: &str = "batch";
/// The smallest `expires_after` in seconds: an hour.
const SHORTEST: u64 = 3600;
/// The largest `expires_after` in seconds: 30 days.
const LONGEST: u64 = 30 * 24 * 3600;
/// The largest number of simultaneous uploads of one owner.
const UPLOADS: u64 = 8;

/// A file that is being uploaded. Dropping the upload before it is finished deletes the file.
#[derive(Debug)]
pub struct Upload {
    store: Arc<BatchStore>,
    owner: Owner,
    id: String,
    file: File,
    bytes: u64,
    finished: bool,
}

impl BatchStore {
    /// Starts an upload.
    ///
    /// # Errors
    /// The owner has too many files or uploads.
    pub fn upload(self: &Arc<Self>, owner: &Owner) -> Result<Upload, StoreError> {
        let mut shelf = self.shelf.lock();
        let files = shelf.files.values().filter(|file| file.owner == *owner).count();
        if files >= OBJECTS {
            return Err(StoreError::Full(format!(
                "a key has {OBJECTS} files at most: delete some"
            )));
        }
        let uploads = shelf.uploads.entry(owner.clone()).or_default();
        if *uploads >= UPLOADS {
            let reason = format!("a key sends {UPLOADS} files at a time at most");
            return Err(StoreError::Conflict(reason));
        }
        let id = new_id("file-");
        let file = self.folder.create(&id)?;
        *uploads += 1;
        let store = Arc::clone(self);
        Ok(Upload { store, owner: owner.clone(), id, file, bytes: 0, finished: false })
    }

    /// Returns the files of an owner, newest first.
    pub fn files(&self, owner: &Owner, now: u64) -> Vec<FileObject> {
        self.expire(now);
        let shelf = self.shelf.lock();
        let own = shelf.files.values().filter(|file| file.owner == *owner);
        let mut files: Vec<_> = own.collect();
        files.sort_by_key(|file| Reverse(file.serial));
        files.into_iter().map(|file| file.object.clone()).collect()
    }

    /// Returns a file.
    ///
    /// # Errors
    /// The owner has no such file.
    pub fn file(&self, owner: &Owner, id: &str, now: u64) -> Result<FileObject, StoreError> {
        self.expire(now);
        let shelf = self.shelf.lock();
        let found = shelf.files.get(id).filter(|file| file.owner == *owner);
        let found = found.map(|file| file.object.clone());
        found.ok_or_else(|| StoreError::UnknownFile(id.to_owned()))
    }

    /// Opens a file for reading. It stays readable even if it is deleted during that time.
    ///
    /// # Errors
    /// The owner has no such file, or the file can't be read.
    pub fn content(
        &self,
        owner: &Owner,
        id: &str,
        now: u64,
    ) -> Result<(FileObject, File), StoreError> {
        let object = self.file(owner, id, now)?;
        Ok((object, File::open(self.folder.content(id))?))
    }

    /// Deletes a file.
    ///
    /// # Errors
    /// The owner has no such file, or an unfinished batch needs the file.
    pub fn delete_file(&self, owner: &Owner, id: &str, now: u64) -> Result<(), StoreError> {
        self.file(owner, id, now)?;
        let mut shelf = self.shelf.lock();
        if shelf.used().contains(id) {
            let reason = "a batch that has not ended needs the file: cancel the batch first";
            return Err(StoreError::Conflict(reason.into()));
        }
        self.remove_file(&mut shelf, id);
        Ok(())
    }
}

impl Upload {
    /// Appends a chunk to the file.
    ///
    /// # Errors
    /// The file is too large, or a limit of the store is reached.
    pub fn write(&mut self, part: &[u8]) -> Result<(), StoreError> {
        let most = self.store.config.batch_max_file_bytes;
        let bytes = part.len() as u64;
        if self.bytes + bytes > most {
            return Err(StoreError::TooLarge(most));
        }
        self.store.take(&mut self.store.shelf.lock(), &self.owner, bytes)?;
        self.bytes += bytes;
        self.file.write_all(part)?;
        Ok(())
    }

    /// Finishes the upload and stores the file. `expires_after` is in seconds.
    ///
    /// # Errors
    /// A field is invalid, the file is empty, or the disk fails.
    pub fn finish(
        mut self,
        filename: &str,
        purpose: Option<&str>,
        expires_after: Option<u64>,
        now: u64,
    ) -> Result<FileObject, StoreError> {
        let invalid = |param, reason: String| Err(StoreError::Invalid { param, reason });
        match purpose {
            Some(PURPOSE) => {}
            Some(_) => return invalid("purpose", format!("only `{PURPOSE}` is served")),
            None => return invalid("purpose", format!("it is missing; `{PURPOSE}` is served")),
        }
        if filename.len() > FILENAME {
            return invalid("filename", format!("at most {FILENAME} bytes"));
        }
        if self.bytes == 0 {
            return invalid("file", "it is empty".into());
        }
        let ttl = self.store.config.batch_ttl;
        let after = match expires_after {
            Some(after) if !(SHORTEST..=LONGEST).contains(&after) => {
                let reason = format!("from {SHORTEST} to {LONGEST} seconds");
                return invalid("expires_after[seconds]", reason);
            }
            Some(after) => after.min(ttl),
            None => ttl,
        };
        let filename = if filename.is_empty() { "input.jsonl" } else { filename };
        let object = FileObject::new(
            self.id.clone(),
            self.bytes,
            (now, now.saturating_add(after)),
            filename.to_owned(),
            PURPOSE,
        );
        let folder = &self.store.folder;
        self.file.sync_all()?;
        fs::rename(folder.unfinished(&self.id), folder.content(&self.id))?;
        let owned = self.store.shelf.lock().own(&self.owner, object.clone());
        if let Err(error) = folder.save(Kind::File, &self.id, &owned) {
            folder.delete(Kind::File, &self.id)?;
            return Err(error.into());
        }
        self.store.shelf.lock().files.insert(self.id.clone(), owned);
        self.finished = true;
        Ok(object)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let mut shelf = self.store.shelf.lock();
        if let Some(uploads) = shelf.uploads.get_mut(&self.owner) {
            *uploads -= 1;
            if *uploads == 0 {
                shelf.uploads.remove(&self.owner);
            }
        }
        if !self.finished {
            shelf.free(&self.owner, self.bytes);
            // This fails if `finish` has already renamed the file. The renamed file has no record,
            // so the server deletes the file at its next start at the latest.
            let _ = fs::remove_file(self.store.folder.unfinished(&self.id));
        }
    }
}
