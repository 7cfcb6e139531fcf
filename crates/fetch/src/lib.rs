//! Fetches files from the URLs in requests. No URL gives access to the server's own network.
//!
//! A name is resolved once, and all its addresses must be public. The fetcher connects to one of
//! these checked addresses, so a later change of the DNS response has no effect. Each redirect is
//! checked in the same way. `docs/images.md` lists all limits.
//!
//! ```
//! use forebay_fetch::{Config, FetchError, Fetcher};
//!
//! # let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
//! # runtime.block_on(async {
//! let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
//! let fetcher = Fetcher::new(&Config { allowed_local_media_path: Some(folder.into()), ..Config::default() })?;
//! let file = fetcher.fetch(&format!("file://{}/Cargo.toml", folder.display()), |_| true).await?;
//! assert!(file.starts_with(b"[package]"));
//!
//! assert!(fetcher.fetch("file:///etc/hostname", |_| true).await.is_err(), "it is outside of the folder");
//! assert!(fetcher.fetch("http://127.0.0.1/", |_| true).await.is_err(), "it is this machine");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

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
