//! Flags about responses that are kept.

use clap::Args;

#[derive(Debug, Args)]
#[command(next_help_heading = "Responses that are kept")]
pub(crate) struct ResponseFlags {
    /// Most bytes of responses of /v1/responses that are kept with their conversations, for clients
    /// that go on from them. The oldest of the key that keeps most give room first. 0: none is
    /// kept.
    #[arg(long, default_value_t = 64 << 20, value_name = "BYTES")]
    pub(crate) response_store_bytes: usize,
    /// The seconds for which a response is kept.
    #[arg(long, default_value_t = 24 * 3600, value_name = "SECONDS")]
    pub(crate) response_store_ttl: u64,
}
