//! Resolves names to addresses.

use std::io;
use std::net::IpAddr;
use std::pin::Pin;

/// A future that yields a name's addresses.
pub(crate) type Resolving = Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send>>;

/// Resolves names.
pub(crate) trait Resolver: Send + Sync {
    /// Returns all addresses of `name`.
    fn resolve(&self, name: &str) -> Resolving;
}

/// The machine's resolver, which uses its hosts file and name servers.
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
