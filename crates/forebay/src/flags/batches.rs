//! Flags about the store of batch files.

use std::path::PathBuf;

use clap::Args;
use forebay_server::BatchConfig;

#[derive(Debug, Args)]
#[command(next_help_heading = "Files and batches")]
pub(crate) struct BatchFlags {
    /// Folder for /v1/files and /v1/batches, used by this server only. Files and batches survive a
    /// restart. Without the flag both routes are off.
    #[arg(long, value_name = "DIR")]
    pub(crate) batch_dir: Option<PathBuf>,
    /// Largest total size of all files in bytes.
    #[arg(long, default_value_t = BatchConfig::default().batch_max_bytes, value_name = "BYTES", requires = "batch_dir")]
    batch_max_bytes: u64,
    /// Largest total size of the files of one API key in bytes, including output files.
    #[arg(long, default_value_t = BatchConfig::default().batch_key_bytes, value_name = "BYTES", requires = "batch_dir")]
    batch_key_bytes: u64,
    /// Largest size in bytes of a file that a client uploads.
    #[arg(long, default_value_t = BatchConfig::default().batch_max_file_bytes, value_name = "BYTES", requires = "batch_dir")]
    batch_max_file_bytes: u64,
    /// Largest number of requests in a batch.
    #[arg(long, default_value_t = BatchConfig::default().batch_max_requests, value_name = "N", requires = "batch_dir")]
    batch_max_requests: u64,
    /// Largest number of batch requests that run or wait in the queue at the same time [default:
    /// for each replica, twice --max-running-requests, but at most --max-queued-requests].
    #[arg(long, value_name = "N", requires = "batch_dir", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    batch_concurrency: Option<u32>,
    /// Seconds for which files and finished batches are kept.
    #[arg(long, default_value_t = BatchConfig::default().batch_ttl, value_name = "SECONDS", requires = "batch_dir")]
    batch_ttl: u64,
}

impl BatchFlags {
    /// The bounds of the store; `None`: there is no store. `longest_line` is the largest size of a
    /// line in bytes. `usual` is the default of `batch_concurrency`.
    pub(crate) fn store(&self, longest_line: usize, usual: usize) -> Option<BatchConfig> {
        Some(BatchConfig {
            batch_dir: self.batch_dir.clone()?,
            batch_max_bytes: self.batch_max_bytes,
            batch_key_bytes: self.batch_key_bytes,
            batch_max_file_bytes: self.batch_max_file_bytes,
            batch_max_requests: self.batch_max_requests,
            batch_concurrency: self.batch_concurrency.map_or(usual, |given| given as usize),
            batch_ttl: self.batch_ttl,
            longest_line,
        })
    }
}
