//! Files that requests name by URL, fetched so that no URL can be turned against the network that
//! the server runs in.
//!
//! A name is resolved once, every address that it has must be public, and the address that was
//! checked is the one dialled: an answer of the DNS that changes meanwhile changes nothing. Each
//! redirect goes through the same checks. `docs/images.md` lists all limits.

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
