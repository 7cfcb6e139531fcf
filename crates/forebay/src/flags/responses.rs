//! Flags about the store of responses.

use std::time::Duration;

use clap::Args;
use forebay_server::StoreConfig;

#[derive(Debug, Args)]
#[command(next_help_heading = "Kept responses")]
pub(crate) struct ResponseFlags {
    /// Size in bytes of the store that keeps responses of /v1/responses for later turns. When it is
    /// full, the oldest responses of the API key with the most bytes are removed. 0: store none.
    #[arg(long, default_value_t = StoreConfig::default().response_store_bytes, value_name = "BYTES")]
    pub(crate) response_store_bytes: usize,
    /// Seconds for which a response is stored.
    #[arg(long, default_value_t = StoreConfig::default().response_store_ttl.as_secs(), value_name = "SECONDS")]
    pub(crate) response_store_ttl: u64,
}

impl ResponseFlags {
    /// The limits of the store of responses.
    pub(crate) fn store(&self) -> StoreConfig {
        StoreConfig {
            response_store_bytes: self.response_store_bytes,
            response_store_ttl: Duration::from_secs(self.response_store_ttl),
        }
    }
}
