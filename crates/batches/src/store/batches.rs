//! The batches of a store, and their output files.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::PathBuf;

use forebay_api::ROUTES;
use serde::Deserialize;

use super::{BatchStore, Kept, OBJECTS, OwnedObject, Owner, Shelf, StoreError, new_id};
use crate::folder::Kind;
use crate::objects::RequestCounts;
use crate::objects::{BatchError, BatchErrors, BatchObject, BatchStatus, FileObject};

/// The largest number of pairs in `metadata`.
const PAIRS: usize = 16;
/// The largest size of a key of `metadata` in bytes.
const KEY: usize = 64;
/// The largest size of a value of `metadata` in bytes.
const VALUE: usize = 512;
/// The longest allowed `completion_window`, in hours.
const LONGEST_WINDOW: u64 = 30 * 24;
/// The purpose of output files.
const OUTPUT_PURPOSE: &str = "batch_output";

/// The request body for creating a batch, in OpenAI's format.
#[derive(Debug, Clone, Deserialize)]
pub struct NewBatch {
    /// The file of requests.
    pub input_file_id: String,
    /// The route of all requests.
    pub endpoint: String,
    /// The time in which the batch has to finish: hours such as `24h`, or days such as `7d`.
    pub completion_window: String,
    /// Keys and values that the owner attached.
    #[serde(default)]
    pub metadata: Option<BTreeMap<String, String>>,
}

/// A batch that a task is computing. No other task gets the batch until `BatchStore::leave` is
/// called.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) id: String,
    pub(crate) owner: Owner,
    pub(crate) endpoint: String,
    /// The time at which the batch expires, in seconds since 1970.
    pub(crate) expires_at: u64,
    pub(crate) input: PathBuf,
    pub(crate) output: PathBuf,
    pub(crate) errors: PathBuf,
}

impl NewBatch {
    /// The completion window in seconds; `None`: it is invalid.
    fn window(&self) -> Option<u64> {
        let (number, unit) = self
            .completion_window
            .split_at_checked(self.completion_window.len().checked_sub(1)?)?;
        let hours = match unit {
            "h" => 1,
            "d" => 24,
            _ => return None,
        };
        let hours = number.parse::<u64>().ok()?.checked_mul(hours)?;
        (1..=LONGEST_WINDOW).contains(&hours).then_some(hours * 3600)
    }

    fn check(&self) -> Result<u64, StoreError> {
        let invalid = |param, reason: String| StoreError::Invalid { param, reason };
        let is_route = ROUTES.iter().any(|route| route.path == self.endpoint);
        if !is_route {
            let reason = "it is no route for a batch, as /v1/chat/completions is".to_owned();
            return Err(invalid("endpoint", reason));
        }
        for (key, value) in self.metadata.iter().flatten() {
            if key.len() > KEY || value.len() > VALUE {
                let reason = format!("names have {KEY} bytes at most, and values {VALUE}");
                return Err(invalid("metadata", reason));
            }
        }
        if self.metadata.as_ref().is_some_and(|pairs| pairs.len() > PAIRS) {
            return Err(invalid("metadata", format!("at most {PAIRS} pairs")));
        }
        self.window().ok_or_else(|| {
            let reason =
                format!("hours as in `24h`, or days as in `7d`, of {LONGEST_WINDOW} hours at most");
            invalid("completion_window", reason)
        })
    }
}

impl BatchStore {
    /// Creates a batch.
    ///
    /// # Errors
    /// A field is invalid, the file does not exist, or the owner has too many batches.
    pub fn create(
        &self,
        owner: &Owner,
        new: NewBatch,
        now: u64,
    ) -> Result<BatchObject, StoreError> {
        let window = new.check()?;
        let file = self.file(owner, &new.input_file_id, now)?;
        if file.purpose == OUTPUT_PURPOSE {
            let reason = "a file of answers has no requests".to_owned();
            return Err(StoreError::Invalid { param: "input_file_id", reason });
        }
        let mut shelf = self.shelf.lock();
        self.make_room(&mut shelf, owner)?;
        let batch = BatchObject::new(
            new_id("batch_"),
            new.endpoint,
            new.input_file_id,
            new.completion_window,
            (now, now.saturating_add(window)),
            new.metadata,
        );
        let kept = Kept { output: new_id("file-"), errors: new_id("file-"), batch: batch.clone() };
        let owned = shelf.own(owner, kept);
        self.folder.save(Kind::Batch, &batch.id, &owned)?;
        shelf.batches.insert(batch.id.clone(), owned);
        drop(shelf);
        self.tell();
        Ok(batch)
    }

    /// Deletes the owner's oldest finished batch if the owner has too many batches.
    fn make_room(&self, shelf: &mut Shelf, owner: &Owner) -> Result<(), StoreError> {
        let own = || shelf.batches.values().filter(|kept| kept.owner == *owner);
        if own().count() < OBJECTS {
            return Ok(());
        }
        let ended = own().filter_map(|kept| {
            let batch = &kept.object.batch;
            Some((batch.ended_at()?, batch.id.clone()))
        });
        match ended.min() {
            Some((_, id)) => {
                self.remove_batch(shelf, &id);
                Ok(())
            }
            None => Err(StoreError::Full(format!("{OBJECTS} batches of this key have not ended"))),
        }
    }

    /// Returns the batches of an owner, newest first.
    pub fn batches(&self, owner: &Owner, now: u64) -> Vec<BatchObject> {
        self.expire(now);
        let shelf = self.shelf.lock();
        let own = shelf.batches.values().filter(|kept| kept.owner == *owner);
        let mut batches: Vec<_> = own.collect();
        batches.sort_by_key(|kept| Reverse(kept.serial));
        batches.into_iter().map(|kept| kept.object.batch.clone()).collect()
    }

    /// Returns a batch.
    ///
    /// # Errors
    /// The owner has no such batch.
    pub fn batch(&self, owner: &Owner, id: &str, now: u64) -> Result<BatchObject, StoreError> {
        self.expire(now);
        let shelf = self.shelf.lock();
        let found = shelf.batches.get(id).filter(|kept| kept.owner == *owner);
        let found = found.map(|kept| kept.object.batch.clone());
        found.ok_or_else(|| StoreError::UnknownBatch(id.to_owned()))
    }

    /// Cancels a batch. The answers that exist so far become output files.
    ///
    /// # Errors
    /// The owner has no such batch, or it has ended.
    pub fn cancel(&self, owner: &Owner, id: &str, now: u64) -> Result<BatchObject, StoreError> {
        let batch = self.batch(owner, id, now)?;
        if batch.status.is_over() {
            return Err(StoreError::Conflict("the batch has ended".into()));
        }
        let batch = self.enter(id, BatchStatus::Cancelling, now)?;
        self.tell();
        Ok(batch)
    }

    fn enter(&self, id: &str, status: BatchStatus, now: u64) -> Result<BatchObject, StoreError> {
        self.change(&mut self.shelf.lock(), id, |batch| {
            // The task that computes the batch may not have noticed the cancellation yet.
            if batch.status != BatchStatus::Cancelling || status.is_over() {
                batch.enter(status, now);
            }
        })
    }

    /// Changes a batch both on disk and in memory, or not at all.
    fn change(
        &self,
        shelf: &mut Shelf,
        id: &str,
        change: impl FnOnce(&mut BatchObject),
    ) -> Result<BatchObject, StoreError> {
        let unknown = || StoreError::UnknownBatch(id.to_owned());
        let kept = shelf.batches.get_mut(id).ok_or_else(unknown)?;
        let mut changed = kept.clone();
        change(&mut changed.object.batch);
        self.folder.save(Kind::Batch, id, &changed)?;
        *kept = changed;
        Ok(kept.object.batch.clone())
    }

    /// Returns the owners that have a batch which is not being computed yet.
    pub(crate) fn waiting(&self) -> Vec<Owner> {
        let shelf = self.shelf.lock();
        let waiting = shelf.batches.values().filter(|kept| shelf.waits(kept));
        let mut owners: Vec<_> = waiting.map(|kept| kept.owner.clone()).collect();
        owners.sort();
        owners.dedup();
        owners
    }

    /// Returns the owner's oldest batch that has not ended and is not being computed.
    pub(crate) fn next_job(&self, owner: &Owner) -> Result<Option<Job>, StoreError> {
        let mut shelf = self.shelf.lock();
        let own = shelf.batches.values().filter(|kept| kept.owner == *owner && shelf.waits(kept));
        let oldest = own.min_by_key(|kept| kept.serial);
        let Some(Kept { output, errors, batch }) = oldest.map(|kept| kept.object.clone()) else {
            return Ok(None);
        };
        let job = Job {
            owner: owner.clone(),
            endpoint: batch.endpoint,
            expires_at: batch.expires_at,
            input: self.folder.content(&batch.input_file_id),
            output: self.folder.prepare(&output)?,
            errors: self.folder.prepare(&errors)?,
            id: batch.id,
        };
        shelf.running.insert(job.id.clone());
        Ok(Some(job))
    }

    /// Marks a batch as no longer being computed.
    pub(crate) fn leave(&self, id: &str) {
        self.shelf.lock().running.remove(id);
    }

    /// True if the owner has cancelled the batch.
    pub(crate) fn is_cancelled(&self, id: &str) -> bool {
        let shelf = self.shelf.lock();
        let batch = shelf.batches.get(id).map(|kept| kept.object.batch.status);
        batch.is_none_or(|status| status == BatchStatus::Cancelling)
    }

    /// Records that a batch's requests are being computed. `counts` includes answers of an earlier
    /// run.
    pub(crate) fn begin(
        &self,
        id: &str,
        counts: RequestCounts,
        now: u64,
    ) -> Result<(), StoreError> {
        self.change(&mut self.shelf.lock(), id, |batch| {
            batch.request_counts = counts;
            if batch.status != BatchStatus::Cancelling {
                batch.enter(BatchStatus::InProgress, now);
            }
        })?;
        Ok(())
    }

    /// Counts an answer of `bytes` bytes that is about to be written. Fails if it exceeds the
    /// limits.
    pub(crate) fn count(&self, job: &Job, bytes: u64, failed: bool) -> Result<(), StoreError> {
        let mut shelf = self.shelf.lock();
        self.take(&mut shelf, &job.owner, bytes)?;
        if let Some(kept) = shelf.batches.get_mut(&job.id) {
            let counts = &mut kept.object.batch.request_counts;
            *if failed { &mut counts.failed } else { &mut counts.completed } += 1;
        }
        Ok(())
    }

    /// Ends a batch: its answers become output files.
    pub(crate) fn end(
        &self,
        job: &Job,
        status: BatchStatus,
        errors: Vec<BatchError>,
        now: u64,
    ) -> Result<(), StoreError> {
        self.enter(&job.id, BatchStatus::Finalizing, now)?;
        let mut shelf = self.shelf.lock();
        let unknown = || StoreError::UnknownBatch(job.id.clone());
        let kept = shelf.batches.get(&job.id).ok_or_else(unknown)?.object.clone();
        let mut named = [None, None];
        for (at, (id, what)) in
            [(kept.output, "output"), (kept.errors, "errors")].into_iter().enumerate()
        {
            let bytes = self.folder.size(&id);
            if bytes == 0 {
                self.folder.delete(Kind::File, &id)?;
                continue;
            }
            let object = FileObject::new(
                id.clone(),
                bytes,
                (now, now.saturating_add(self.config.batch_ttl)),
                format!("{}_{what}.jsonl", job.id),
                OUTPUT_PURPOSE,
            );
            let owned = shelf.own(&job.owner, object);
            self.folder.save(Kind::File, &id, &owned)?;
            shelf.files.insert(id.clone(), owned);
            named[at] = Some(id);
        }
        self.change(&mut shelf, &job.id, |batch| {
            [batch.output_file_id, batch.error_file_id] = named;
            if !errors.is_empty() {
                batch.errors = Some(BatchErrors::new(errors));
            }
            batch.enter(status, now);
        })?;
        Ok(())
    }
}

impl Shelf {
    /// True if the batch has not ended and is not being computed.
    fn waits(&self, kept: &OwnedObject<Kept>) -> bool {
        let batch = &kept.object.batch;
        !batch.status.is_over() && !self.running.contains(&batch.id)
    }
}
