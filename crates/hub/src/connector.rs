//! Connections: direct or through a proxy of the environment, with or without TLS.

use std::error::Error;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::Uri;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tower::Service;

use crate::proxies::Proxies;

type Cause = Box<dyn Error + Send + Sync>;

/// Opens connections for `hyper_util`'s client.
#[derive(Debug, Clone)]
pub(crate) struct Connector {
    tcp: HttpConnector,
    /// `None` if the machine has no CA certificates to verify servers.
    tls: Option<Arc<ClientConfig>>,
    proxies: Arc<Proxies>,
    patience: Duration,
}

impl Connector {
    /// Creates a connector. `patience` is the timeout for connecting.
    pub(crate) fn new(proxies: Arc<Proxies>, patience: Duration) -> Self {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        // One timeout for all addresses of a name together.
        tcp.set_connect_timeout(Some(patience));
        Self { tcp, tls: tls().map(Arc::new), proxies, patience }
    }

    async fn connect(mut self, to: Uri) -> Result<Stream, Cause> {
        let encrypted = to.scheme_str() == Some("https");
        let Some(proxy) = self.proxies.intercept(&to) else {
            let stream = self.tcp.call(to.clone()).await?.into_inner();
            return if encrypted {
                self.encrypt(stream, &to).await
            } else {
                Ok(Stream::new(stream))
            };
        };
        if proxy.uri().scheme_str() != Some("http") {
            let scheme = proxy.uri().scheme_str().unwrap_or_default();
            return Err(
                format!("a proxy is named by {scheme}://, and only http:// is supported").into()
            );
        }
        let failed =
            |error: &dyn Error| format!("the proxy {}: {}", host(proxy.uri()), deepest(error));
        if encrypted {
            let mut tunnel = Tunnel::new(proxy.uri().clone(), self.tcp.clone());
            if let Some(auth) = proxy.basic_auth() {
                tunnel = tunnel.with_auth(auth.clone());
            }
            let stream = tunnel.call(to.clone()).await.map_err(|error| failed(&error))?;
            return self.encrypt(stream.into_inner(), &to).await;
        }
        let stream = self.tcp.call(proxy.uri().clone()).await.map_err(|error| failed(&error))?;
        Ok(Stream { proxied: true, ..Stream::new(stream.into_inner()) })
    }

    async fn encrypt<S>(&self, stream: S, to: &Uri) -> Result<Stream, Cause>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let Some(tls) = &self.tls else {
            return Err(
                "no certificates to know servers by: install ca-certificates, or set SSL_CERT_FILE"
                    .into(),
            );
        };
        // An IPv6 address in a URL has brackets, which are not part of the server's name.
        let name = host(to).trim_matches(['[', ']']).trim_end_matches('.').to_owned();
        let stream = TlsConnector::from(Arc::clone(tls))
            .connect(ServerName::try_from(name)?, stream)
            .await?;
        Ok(Stream::new(stream))
    }
}

impl Service<Uri> for Connector {
    type Response = Stream;
    type Error = Cause;
    type Future = Pin<Box<dyn Future<Output = Result<Stream, Cause>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Cause>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let this = self.clone();
        Box::pin(async move {
            let late = format!("no connection to {} within {:?}", host(&to), this.patience);
            tokio::time::timeout(this.patience, this.connect(to)).await.map_err(|_| late)?
        })
    }
}

/// A connection.
pub(crate) struct Stream {
    io: TokioIo<Box<dyn Both>>,
    /// True if the connection's peer is a proxy.
    proxied: bool,
}

trait Both: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Both for S {}

impl Stream {
    fn new<S: Both + 'static>(stream: S) -> Self {
        Self { io: TokioIo::new(Box::new(stream)), proxied: false }
    }
}

impl Connection for Stream {
    fn connected(&self) -> Connected {
        Connected::new().proxy(self.proxied)
    }
}

impl Read for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, into)
    }
}

impl Write for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// Returns a TLS configuration that trusts the system's certificate authorities, or those of
/// `SSL_CERT_FILE`; `None` if there are none.
fn tls() -> Option<ClientConfig> {
    let mut roots = RootCertStore::empty();
    // A certificate that can't be parsed is not trusted.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        return None;
    }
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .ok()?;
    Some(config.with_root_certificates(roots).with_no_client_auth())
}

fn host(uri: &Uri) -> &str {
    uri.host().unwrap_or_default()
}

/// Returns the message of an error's innermost cause, because the outer errors only name the
/// library's steps.
pub(crate) fn deepest(error: &dyn Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    let text = error.to_string();
    let line = text.lines().next().unwrap_or("no details");
    line.split(" (os error").next().unwrap_or(line).to_owned()
}
