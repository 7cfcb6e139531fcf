//! Files and batches, in the API's form and in the stored form.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A file, in OpenAI's shape.
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
    /// `batch`, or `batch_output` for a file of answers.
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

/// The state of a file. Lines are checked by the batch that uses it.
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
    /// The lines of the input are being checked, or wait for the check.
    Validating,
    /// It was not computed, because lines are invalid or there was no room for its answers.
    Failed,
    /// The requests are being computed.
    InProgress,
    /// The answers are being written to files.
    Finalizing,
    /// Every request has an answer.
    Completed,
    /// The time ran out before every request had an answer.
    Expired,
    /// The owner has cancelled the batch, and running requests are ending.
    Cancelling,
    /// The owner cancelled the batch.
    Cancelled,
}

impl BatchStatus {
    /// True if the state is final.
    #[must_use]
    pub fn is_over(self) -> bool {
        matches!(self, Self::Failed | Self::Completed | Self::Expired | Self::Cancelled)
    }
}

/// A batch, in OpenAI's shape.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchObject {
    /// The id that clients use.
    pub id: String,
    #[serde(default)]
    object: BatchKind,
    /// The route of all its requests.
    pub endpoint: String,
    /// The reasons why the batch was not computed.
    pub errors: Option<BatchErrors>,
    /// The file of its requests.
    pub input_file_id: String,
    /// The time in which it has to finish, as its owner wrote it.
    pub completion_window: String,
    /// The state of the batch.
    pub status: BatchStatus,
    /// The file of answers, once it is there.
    pub output_file_id: Option<String>,
    /// The file of refusals, once it is there.
    pub error_file_id: Option<String>,
    /// Seconds since 1970, as all that follow.
    pub created_at: u64,
    /// The time at which computing began.
    pub in_progress_at: Option<u64>,
    /// The time at which the batch expires.
    pub expires_at: u64,
    /// The time at which computing ended.
    pub finalizing_at: Option<u64>,
    /// The time at which the batch completed.
    pub completed_at: Option<u64>,
    /// The time at which the batch failed, without being computed.
    pub failed_at: Option<u64>,
    /// The time at which the batch expired.
    pub expired_at: Option<u64>,
    /// The time at which the owner cancelled the batch.
    pub cancelling_at: Option<u64>,
    /// The time at which the cancelled batch ended.
    pub cancelled_at: Option<u64>,
    /// Counts of the batch's requests.
    pub request_counts: RequestCounts,
    /// Keys and values that the owner attached.
    pub metadata: Option<BTreeMap<String, String>>,
}

/// Counts of a batch's requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RequestCounts {
    /// The number of all requests.
    pub total: u64,
    /// The number of requests with an answer.
    pub completed: u64,
    /// The number of requests with an error.
    pub failed: u64,
}

/// The reasons why a batch was not computed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchErrors {
    object: ListKind,
    /// The first errors.
    pub data: Vec<BatchError>,
}

impl BatchErrors {
    /// The list of these errors.
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

/// A reason why a batch was not computed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchError {
    /// The code of the error, for programs.
    pub code: String,
    /// The message, one sentence.
    pub message: String,
    /// The field.
    pub param: Option<String>,
    /// The line, from 1.
    pub line: Option<u64>,
}

impl BatchError {
    /// An error of the whole batch.
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

    /// Enters a state, and notes the time.
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

    /// The time at which it ended.
    pub(crate) fn ended_at(&self) -> Option<u64> {
        self.completed_at.or(self.failed_at).or(self.expired_at).or(self.cancelled_at)
    }
}
