//! Files that requests name by URL, fetched so that no URL can be turned against the network that
//! the server runs in.
//!
//! A name is resolved once, and every address that it has must be public. The fetcher dials the
//! address that was checked, so a DNS answer that changes meanwhile has no effect. Each redirect
//! goes through the same checks. `docs/images.md` lists all limits.

mod address;
mod config;
mod connection;
mod error;
mod fetcher;
mod local;
mod place;
mod resolver;

#[cfg(test)]
mod tests;

pub use config::{Config, InvalidConfig};
pub use error::FetchError;
pub use fetcher::Fetcher;
