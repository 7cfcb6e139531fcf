//! Flags about responses that are kept.

use std::time::Duration;

use clap::Args;
use forebay_server::StoreConfig;

#[derive(Debug, Args)]
#[command(next_help_heading = "Responses that are kept")]
pub(crate) struct ResponseFlags {
    /// The largest number of bytes of responses of /v1/responses that are kept with their
    /// conversations, for clients that go on from them. The oldest of the key that keeps most give
    /// room first. 0: none is kept.
    #[arg(long, default_value_t = StoreConfig::default().response_store_bytes, value_name = "BYTES")]
    pub(crate) response_store_bytes: usize,
    /// The seconds for which a response is kept.
    #[arg(long, default_value_t = StoreConfig::default().response_store_ttl.as_secs(), value_name = "SECONDS")]
    pub(crate) response_store_ttl: u64,
}

impl ResponseFlags {
    /// The bounds of kept responses.
    pub(crate) fn store(&self) -> StoreConfig {
        StoreConfig {
            response_store_bytes: self.response_store_bytes,
            response_store_ttl: Duration::from_secs(self.response_store_ttl),
        }
    }
}
