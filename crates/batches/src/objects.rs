//! File and batch objects, as the API returns them and as the store saves them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A file, in OpenAI's format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileObject {
    /// The id that clients use.
    pub id: String,
    #[serde(default)]
    object: FileKind,
    /// The size in bytes.
    pub bytes: u64,
    /// Seconds since 1970.
    pub created_at: u64,
    /// When the file will be deleted, in seconds since 1970.
    pub expires_at: u64,
    /// The file name that the client gave.
    pub filename: String,
    /// `batch`, or `batch_output` for an output file.
    pub purpose: String,
    #[serde(default)]
    status: FileStatus,
}

/// The kind of object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum FileKind {
    #[default]
    File,
}

/// The state of a file. The file's lines are not checked until a batch uses the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum FileStatus {
    #[default]
    Processed,
}

impl FileObject {
    pub(crate) fn new(
        id: String,
        bytes: u64,
        (created_at, expires_at): (u64, u64),
        filename: String,
        purpose: &str,
    ) -> Self {
        Self {
            id,
            object: FileKind::File,
            bytes,
            created_at,
            expires_at,
            filename,
            purpose: purpose.to_owned(),
            status: FileStatus::Processed,
        }
    }
}

/// The kind of object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum BatchKind {
    #[default]
    Batch,
}

/// The state of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchStatus {
    /// The lines of the input are being checked, or wait to be checked.
    Validating,
    /// The batch was not completed, because lines are invalid, the owner's key is no longer
    /// accepted, or the storage is full or broken.
    Failed,
    /// The requests are being computed.
    InProgress,
    /// The output files are being completed.
    Finalizing,
    /// Every request has an answer or an error.
    Completed,
    /// The completion window ended before every request had an answer.
    Expired,
    /// The owner has cancelled the batch, and running requests are being stopped.
    Cancelling,
    /// The batch was cancelled, and has ended.
    Cancelled,
}

impl BatchStatus {
    /// True if the state is final.
    #[must_use]
    pub fn is_over(self) -> bool {
        matches!(self, Self::Failed | Self::Completed | Self::Expired | Self::Cancelled)
    }
}

/// A batch, in OpenAI's format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchObject {
    /// The id that clients use.
    pub id: String,
    #[serde(default)]
    object: BatchKind,
    /// The route of all requests.
    pub endpoint: String,
    /// The reasons why the batch failed; `None`: it did not fail.
    pub errors: Option<BatchErrors>,
    /// The file of requests.
    pub input_file_id: String,
    /// The time in which the batch has to finish, as the owner specified it.
    pub completion_window: String,
    /// The state of the batch.
    pub status: BatchStatus,
    /// The output file with the answers, once it exists.
    pub output_file_id: Option<String>,
    /// The output file with the errors, once it exists.
    pub error_file_id: Option<String>,
    /// The time of creation. All times are in seconds since 1970.
    pub created_at: u64,
    /// The time at which computing began.
    pub in_progress_at: Option<u64>,
    /// The time at which the batch expires.
    pub expires_at: u64,
    /// The time at which computing ended.
    pub finalizing_at: Option<u64>,
    /// The time at which the batch completed.
    pub completed_at: Option<u64>,
    /// The time at which the batch failed.
    pub failed_at: Option<u64>,
    /// The time at which the batch expired.
    pub expired_at: Option<u64>,
    /// The time at which the owner cancelled the batch.
    pub cancelling_at: Option<u64>,
    /// The time at which the cancelled batch had stopped.
    pub cancelled_at: Option<u64>,
    /// Counts of the batch's requests.
    pub request_counts: RequestCounts,
    /// Keys and values that the owner attached.
    pub metadata: Option<BTreeMap<String, String>>,
}

/// Counts of a batch's requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RequestCounts {
    /// The number of requests.
    pub total: u64,
    /// The number of requests with a successful answer.
    pub completed: u64,
    /// The number of requests whose answer is an error.
    pub failed: u64,
}

/// The reasons why a batch failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchErrors {
    object: ListKind,
    /// The first errors of the batch.
    pub data: Vec<BatchError>,
}

impl BatchErrors {
    /// Creates the list of these errors.
    #[must_use]
    pub fn new(data: Vec<BatchError>) -> Self {
        Self { object: ListKind::List, data }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ListKind {
    #[default]
    List,
}

/// A reason why a batch failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchError {
    /// A machine-readable error code.
    pub code: String,
    /// An error message of one sentence.
    pub message: String,
    /// The field at fault.
    pub param: Option<String>,
    /// The number of the line at fault, from 1; `None`: the error concerns the whole batch.
    pub line: Option<u64>,
}

impl BatchError {
    /// Creates an error that concerns the whole batch.
    #[must_use]
    pub fn of_all(code: &str, message: impl Into<String>) -> Self {
        Self { code: code.to_owned(), message: message.into(), param: None, line: None }
    }
}

impl BatchObject {
    pub(crate) fn new(
        id: String,
        endpoint: String,
        input_file_id: String,
        completion_window: String,
        (created_at, expires_at): (u64, u64),
        metadata: Option<BTreeMap<String, String>>,
    ) -> Self {
        Self {
            id,
            object: BatchKind::Batch,
            endpoint,
            errors: None,
            input_file_id,
            completion_window,
            status: BatchStatus::Validating,
            output_file_id: None,
            error_file_id: None,
            created_at,
            in_progress_at: None,
            expires_at,
            finalizing_at: None,
            completed_at: None,
            failed_at: None,
            expired_at: None,
            cancelling_at: None,
            cancelled_at: None,
            request_counts: RequestCounts::default(),
            metadata,
        }
    }

    /// Enters a state, and records the time.
    pub(crate) fn enter(&mut self, status: BatchStatus, now: u64) {
        self.status = status;
        let time = match status {
            BatchStatus::Validating => return,
            BatchStatus::InProgress => &mut self.in_progress_at,
            BatchStatus::Finalizing => &mut self.finalizing_at,
            BatchStatus::Completed => &mut self.completed_at,
            BatchStatus::Failed => &mut self.failed_at,
            BatchStatus::Expired => &mut self.expired_at,
            BatchStatus::Cancelling => &mut self.cancelling_at,
            BatchStatus::Cancelled => &mut self.cancelled_at,
        };
        time.get_or_insert(now);
    }

    /// The time at which the batch ended; `None`: it has not ended.
    pub(crate) fn ended_at(&self) -> Option<u64> {
        self.completed_at.or(self.failed_at).or(self.expired_at).or(self.cancelled_at)
    }
}
