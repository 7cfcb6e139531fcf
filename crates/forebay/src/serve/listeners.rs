//! The listening sockets for clients, and the access rules.

use std::net::TcpListener;

use anyhow::Result;
use forebay_server::ServerConfig;
use tracing::warn;

use crate::descriptors;
use crate::flags::{AccessFlags, ServeFlags};
use crate::listening::{self, Bound};

/// The open listeners.
pub(super) struct Listeners {
    pub(super) main: Bound,
    /// The listener that serves only health and metrics.
    pub(super) health: Option<TcpListener>,
}

impl Listeners {
    /// Opens the listeners. Also returns a configuration with the access rules; its other settings
    /// are defaults.
    pub(super) fn open(flags: &ServeFlags) -> Result<(Self, ServerConfig)> {
        let main = Bound::open(&flags.listen)?;
        let health_port = flags.listen.health_port;
        let health =
            health_port.map(|port| listening::tcp(&flags.listen.host, port)).transpose()?;
        let descriptors = descriptors::raise();
        let max_connections = descriptors::connections(
            flags.listen.max_connections,
            descriptors,
            flags.replicas.ranks.dp_size,
        )?;
        let (api_keys, admin_keys) = (flags.access.keys()?, flags.access.admin_keys()?);
        if let Some(warning) = AccessFlags::shared_administration(&api_keys, &admin_keys) {
            warn!("{warning}");
        }
        let access = flags.access.access(main.loopback()?.as_deref(), &api_keys);
        let tls = flags.access.tls()?;
        let rules = ServerConfig {
            api_keys,
            admin_keys,
            access,
            max_connections,
            tls,
            ..ServerConfig::default()
        };
        Ok((Self { main, health }, rules))
    }
}
