//! Flags about which clients share cached prompts, and what clients learn about the cache.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
#[command(next_help_heading = "Sharing of cached prompts")]
pub(crate) struct SharingFlags {
    /// File with a secret of at least 32 bytes (`openssl rand -hex 32`) from which the names of
    /// cached blocks are derived. Servers behind one router need the same secret. Without the flag,
    /// the secret is random at each start.
    #[arg(long, value_name = "FILE")]
    pub(crate) cache_secret_file: Option<PathBuf>,
    /// Let clients with different API keys share cached prompts. Each client can then find out
    /// which prompts others have sent.
    #[arg(long)]
    pub(crate) share_cache_across_keys: bool,
    /// Key of routers. Only routers with this key may list cached blocks, and resume streams of
    /// other servers. Without the flag any router may do this, unless API keys are required.
    #[arg(long, env = "FOREBAY_ROUTER_KEY", hide_env_values = true, value_name = "KEY")]
    pub(crate) router_key: Option<String>,
    /// Do not report to clients how many of their prompt tokens were cached.
    #[arg(long)]
    pub(crate) hide_cached_tokens: bool,
}
