//! Flags about the addresses to listen on and the number of connections.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
#[command(next_help_heading = "HTTP")]
pub(crate) struct ListenFlags {
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) host: String,
    /// Port to listen on; 0 picks a free one.
    #[arg(long, default_value_t = 8000)]
    pub(crate) port: u16,
    /// Unix socket to listen on, instead of an address and port. A stale socket is replaced.
    #[arg(long, value_name = "PATH", conflicts_with = "host")]
    pub(crate) uds: Option<PathBuf>,
    /// Second port at the same address, only for /livez, /health and /metrics. A separate thread
    /// serves it, without TLS.
    #[arg(long, value_name = "PORT", conflicts_with = "uds")]
    pub(crate) health_port: Option<u16>,
    /// Largest number of simultaneous connections. At the limit, the longest idle connection is
    /// closed; if none is idle, new connections get 503 [default: what the limit of open files
    /// allows, at most 65536].
    #[arg(long, value_name = "CONNECTIONS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_connections: Option<u32>,
}
