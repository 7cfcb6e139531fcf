//! Backends from a file and from DNS names, both read repeatedly, and leases of registrations that
//! expire.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_api::{BackendUrl, UrlError};
use tokio::net::lookup_host;
use tokio::time::sleep;

use crate::registry::Source;
use crate::shared::Shared;

/// The interval at which leases are checked.
const LEASES: Duration = Duration::from_millis(500);

/// Parses the URLs in the text of a file: one per line; `#` begins a comment.
///
/// # Errors
/// A line is not the URL of a backend.
pub(crate) fn listed(text: &str) -> Result<Vec<BackendUrl>, UrlError> {
    // Some editors write a byte order mark at the beginning of files.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    lines.filter(|line| !line.is_empty()).map(BackendUrl::parse).collect()
}

/// Reads a file of backends.
///
/// # Errors
/// The file cannot be read, or a line is not the URL of a backend.
pub(crate) fn read_list(file: &Path) -> Result<Vec<BackendUrl>, String> {
    let text = std::fs::read_to_string(file).map_err(|error| error.to_string())?;
    listed(&text).map_err(|error| error.to_string())
}

/// Rereads a file for ever. While it cannot be read, its last content remains valid.
pub(crate) async fn follow_file(shared: Arc<Shared>, file: std::path::PathBuf) {
    let mut last = None;
    loop {
        match read_list(&file) {
            Ok(urls) if last.as_ref() != Some(&urls) => {
                shared.registry.set(Source::File, urls.clone());
                last = Some(urls);
            }
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(file = %file.display(), error, "the list of backends could not be read: the last one stays in use")
            }
        }
        sleep(shared.config.sources.interval).await;
    }
}

/// Resolves a name for ever. While it cannot be resolved, its last addresses remain valid.
pub(crate) async fn follow_name(shared: Arc<Shared>, name: String) {
    loop {
        match lookup_host(&name).await {
            Ok(addresses) => {
                let mut addresses: Vec<SocketAddr> = addresses.collect();
                addresses.sort_unstable();
                let urls =
                    addresses.iter().flat_map(|address| BackendUrl::parse(&address.to_string()));
                shared.registry.set(Source::Dns(name.clone()), urls.collect());
            }
            Err(error) => {
                tracing::warn!(name, %error, "the list of backends could not be read: the last one stays in use")
            }
        }
        sleep(shared.config.sources.interval).await;
    }
}

/// Removes expired leases, for ever.
pub(crate) async fn end_leases(shared: Arc<Shared>) {
    loop {
        sleep(LEASES).await;
        shared.registry.expire(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_comments_and_empty_lines() {
        let urls = listed("# all\n\nhttp://a:1\n  b:2 # second\n").unwrap();
        assert_eq!(
            urls.iter().map(BackendUrl::url).collect::<Vec<_>>(),
            ["http://a:1", "http://b:2"]
        );
        assert_eq!(listed("\u{feff}http://a:1\r\n").map(|urls| urls.len()), Ok(1));
        assert!(listed("http://a:1\nftp://b").is_err());
    }
}
