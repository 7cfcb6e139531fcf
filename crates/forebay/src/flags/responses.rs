//! Flags about responses that are kept.

use std::time::Duration;

use clap::Args;
use forebay_server::StoreConfig;

#[derive(Debug, Args)]
#[command(next_help_heading = "Kept responses")]
pub(crate) struct ResponseFlags {
    /// Size in bytes of the store of /v1/responses for later turns. When it is full, the API key
    /// with the most bytes loses its oldest responses. 0: store none.
    #[arg(long, default_value_t = StoreConfig::default().response_store_bytes, value_name = "BYTES")]
    pub(crate) response_store_bytes: usize,
    /// Seconds for which a response is kept.
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
