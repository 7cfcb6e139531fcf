//! A complete fetch: checks, name resolution, connections and redirects.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::header::LOCATION;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use url::Url;

use crate::address::{is_public, is_public_or_private};
use crate::config::{Config, Domains, InvalidConfig};
use crate::connection::{self, Answer, Room};
use crate::error::FetchError;
use crate::local::Folder;
use crate::place::{self, Place};
use crate::resolver::{Resolver, System};

/// Fetches files. Clones share their configuration.
#[derive(Clone)]
pub struct Fetcher(Arc<Inner>);

struct Inner {
    remote: bool,
    domains: Domains,
    folder: Option<Folder>,
    timeout: Duration,
    max_bytes: usize,
    max_redirects: usize,
    resolver: Box<dyn Resolver>,
    may_be_dialled: fn(IpAddr) -> bool,
    tls: Arc<ClientConfig>,
}

impl fmt::Debug for Fetcher {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Fetcher")
    }
}

impl Fetcher {
    /// Creates a fetcher that uses the machine's name servers and trusted certificates. This reads
    /// files, so call it once.
    ///
    /// # Errors
    /// A domain is malformed, or the folder can't be used.
    pub fn new(config: &Config) -> Result<Self, InvalidConfig> {
        let mut roots = RootCertStore::empty();
        // Without any certificates, fetches from https servers fail with an error. That is no
        // reason not to start the server.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let may_be_dialled =
            if config.media_allow_private { is_public_or_private } else { is_public };
        Self::build(config, Box::new(System), may_be_dialled, roots)
    }

    pub(crate) fn build(
        config: &Config,
        resolver: Box<dyn Resolver>,
        may_be_dialled: fn(IpAddr) -> bool,
        roots: RootCertStore,
    ) -> Result<Self, InvalidConfig> {
        let tls = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("the provider has ciphers of both versions")
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self(Arc::new(Inner {
            remote: config.remote_media,
            domains: Domains::of(&config.allowed_media_domains)?,
            folder: config.allowed_local_media_path.as_deref().map(Folder::open).transpose()?,
            timeout: config.timeout,
            max_bytes: config.max_bytes,
            max_redirects: config.max_redirects,
            resolver,
            may_be_dialled,
            tls: Arc::new(tls),
        })))
    }

    /// Fetches the file at `url`: `http:`, `https:`, or `file:` with an absolute path. `room` is
    /// called before the file's buffer grows to a total size, and may abort the fetch by returning
    /// false. Dropping the future closes the connection.
    ///
    /// # Errors
    /// The message is short and may be sent to the client. See [`FetchError`].
    pub async fn fetch(
        &self,
        url: &str,
        mut room: impl FnMut(usize) -> bool + Send,
    ) -> Result<Bytes, FetchError> {
        let url = place::parse(url)?;
        let work = async {
            if url.scheme() == "file" {
                self.local(url, &mut room).await
            } else {
                self.remote(url, &mut room).await
            }
        };
        let waited = tokio::time::timeout(self.0.timeout, work).await;
        waited.unwrap_or_else(|_| Err(FetchError::TooSlow(self.0.timeout)))
    }

    async fn local(&self, url: Url, room: Room<'_>) -> Result<Bytes, FetchError> {
        let folder = self.0.folder.clone().ok_or(FetchError::NoLocalFiles)?;
        let limit = self.0.max_bytes;
        let opening = tokio::task::spawn_blocking(move || folder.find(&url, limit));
        let file = opening.await.unwrap_or(Err(FetchError::NoSuchFile))?;
        if !room(file.bytes()) {
            return Err(FetchError::NoRoom);
        }
        let reading = tokio::task::spawn_blocking(move || file.read());
        reading.await.unwrap_or(Err(FetchError::NoSuchFile))
    }

    async fn remote(&self, mut url: Url, room: Room<'_>) -> Result<Bytes, FetchError> {
        for _ in 0..=self.0.max_redirects {
            let answer = self.ask(&url).await?;
            let host = || url.host_str().unwrap_or_default().to_owned();
            match answer.status() {
                200 => return answer.body(self.0.max_bytes, room).await,
                301 | 302 | 303 | 307 | 308 => {
                    let to = answer.header(LOCATION).and_then(|to| url.join(to).ok());
                    url = to.ok_or_else(|| FetchError::BadRedirect(host()))?;
                }
                status => return Err(FetchError::Status { host: host(), status }),
            }
        }
        Err(FetchError::Redirects(self.0.max_redirects))
    }

    /// Sends the request for one URL after all checks. Also used for each redirect.
    async fn ask(&self, url: &Url) -> Result<Answer, FetchError> {
        // An unsupported scheme is reported even if fetching is off.
        let place = Place::of(url, &self.0.domains)?;
        if !self.0.remote {
            return Err(FetchError::Off);
        }
        let addresses = match place.address {
            Some(address) => vec![address],
            None => self.0.resolver.resolve(&place.host).await.unwrap_or_default(),
        };
        if addresses.is_empty() {
            return Err(FetchError::NoAddress(place.host));
        }
        // One private address is reason enough to refuse: a name with public and private addresses
        // could lead to a connection to a private one.
        if !addresses.iter().all(|address| (self.0.may_be_dialled)(*address)) {
            return Err(FetchError::NotPublic(place.host));
        }
        connection::ask(place, &addresses, &self.0.tls).await
    }
}
