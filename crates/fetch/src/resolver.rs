//! The resolver from names to addresses.

use std::io;
use std::net::IpAddr;
use std::pin::Pin;

/// Addresses that are on their way.
pub(crate) type Resolving = Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send>>;

/// Finds the addresses of a name.
pub(crate) trait Resolver: Send + Sync {
    /// All addresses of `name`.
    fn resolve(&self, name: &str) -> Resolving;
}

/// The machine's own: its hosts file, its name servers.
#[derive(Debug)]
pub(crate) struct System;

impl Resolver for System {
    fn resolve(&self, name: &str) -> Resolving {
        let name = name.to_owned();
        Box::pin(async move {
            Ok(tokio::net::lookup_host((name, 0)).await?.map(|address| address.ip()).collect())
        })
    }
}
