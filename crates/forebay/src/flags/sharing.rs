//! Flags about the clients that may share cached prompts, or know of them.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
#[command(next_help_heading = "Sharing of cached prompts")]
pub(crate) struct SharingFlags {
    /// File with a secret of at least 32 bytes (`openssl rand -hex 32`) that keys the names of
    /// cached blocks. Servers behind one router share it to have the same names. Without it the
    /// secret is drawn at each start.
    #[arg(long, value_name = "FILE")]
    pub(crate) cache_secret_file: Option<PathBuf>,
    /// Let clients with different API keys share cached prompts. Each can then find out the prompts
    /// of others.
    #[arg(long)]
    pub(crate) share_cache_across_keys: bool,
    /// Key of routers in front: only they may list cached blocks and resume streams of other
    /// servers. Without it any router may, if no API key is required.
    #[arg(long, env = "FOREBAY_ROUTER_KEY", hide_env_values = true, value_name = "KEY")]
    pub(crate) router_key: Option<String>,
    /// Do not tell clients how many of their prompts' tokens were found in the prefix cache.
    #[arg(long)]
    pub(crate) hide_cached_tokens: bool,
}
