//! An HTTP client for one server.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use bytes::Bytes;
use forebay_api::peer::BACKGROUND;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use url::Url;

/// The maximum size in bytes of a response that is read as a whole.
const MOST: usize = 16 << 20;

/// An open connection, which carries one request at a time.
pub(crate) type Connection = http1::SendRequest<Full<Bytes>>;

/// The address of a server.
#[derive(Debug, Clone)]
enum Place {
    Tcp { host: String, port: u16 },
    Tls { host: String, port: u16, trust: Arc<ClientConfig> },
    Unix(PathBuf),
}

/// A server, and the key to send to it.
#[derive(Debug, Clone)]
pub(crate) struct Link {
    place: Place,
    /// The path prefix of the server's routes.
    root: String,
    host: HeaderValue,
    key: Option<HeaderValue>,
    /// True if requests have background priority.
    is_background: bool,
}

impl Link {
    /// Creates a link to the server at `url`.
    ///
    /// # Errors
    /// `url` is not a server's URL, or the key can't be sent in a header.
    pub(crate) fn to(url: &str, key: Option<&str>) -> Result<Self> {
        let parsed = Url::parse(url).with_context(|| format!("`{url}` is no URL"))?;
        let host = parsed.host_str().with_context(|| format!("`{url}` names no host"))?;
        let port = parsed.port_or_known_default().unwrap_or(80);
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let place = match parsed.scheme() {
            "https" => Place::Tls { host, port, trust: Arc::new(trust()?) },
            _ => Place::Tcp { host, port },
        };
        // Users may paste the base URL that OpenAI's clients use.
        let root = parsed.path().trim_end_matches('/').trim_end_matches("/v1").to_owned();
        let name = parsed.authority().rsplit('@').next().unwrap_or_default();
        let key = key.map(|key| HeaderValue::from_str(&format!("Bearer {key}"))).transpose();
        let key = key.context("the key")?.map(|mut key| {
            key.set_sensitive(true);
            key
        });
        let host = HeaderValue::from_str(name)?;
        Ok(Self { place, root, host, key, is_background: false })
    }

    /// Creates a link to a server that listens on a Unix socket.
    pub(crate) fn unix(path: PathBuf) -> Self {
        let host = HeaderValue::from_static("localhost");
        let root = String::new();
        Self { place: Place::Unix(path), root, host, key: None, is_background: false }
    }

    /// Returns the same link with background priority for its requests.
    pub(crate) fn in_background(self) -> Self {
        Self { is_background: true, ..self }
    }

    /// Sends a request on a new connection, which closes when the response is dropped. The response
    /// may have any status.
    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Response<Incoming>> {
        let body = body.map(serde_json::to_vec).transpose()?.map(Bytes::from);
        self.send_on(&mut self.connect().await?, method, path, body).await
    }

    /// Opens a connection.
    pub(crate) async fn connect(&self) -> Result<Connection> {
        let connected = async {
            match &self.place {
                Place::Unix(path) => opened(UnixStream::connect(path).await?).await,
                Place::Tcp { host, port } => opened(tcp(host, *port).await?).await,
                Place::Tls { host, port, trust } => {
                    let name = ServerName::try_from(host.clone())?;
                    let stream = tcp(host, *port).await?;
                    let connector = TlsConnector::from(Arc::clone(trust));
                    opened(connector.connect(name, stream).await?).await
                }
            }
        };
        connected.await.with_context(|| self.trouble())
    }

    /// Sends a request on an open connection.
    pub(crate) async fn send_on(
        &self,
        connection: &mut Connection,
        method: Method,
        path: &str,
        body: Option<Bytes>,
    ) -> Result<Response<Incoming>> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.root));
        request = request.header(HOST, self.host.clone());
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, key.clone());
        }
        if self.is_background {
            request = request.header(BACKGROUND.0, BACKGROUND.1);
        }
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        let request = request.body(Full::new(body.unwrap_or_default()))?;
        connection.send_request(request).await.with_context(|| self.trouble())
    }

    fn trouble(&self) -> String {
        format!("cannot ask {}", self.name())
    }

    /// Sends a request, and returns the status and the JSON of the response.
    pub(crate) async fn ask(&self, method: Method, path: &str) -> Result<(StatusCode, Value)> {
        let response = self.send(method, path, None).await?;
        let status = response.status();
        let body = whole(response).await?;
        Ok((status, serde_json::from_slice(&body).unwrap_or(Value::Null)))
    }

    /// Returns the first model that the server lists.
    pub(crate) async fn first_model(&self) -> Result<String> {
        let (status, answer) = self.ask(Method::GET, "/v1/models").await?;
        if status != StatusCode::OK {
            bail!("{}", refusal(status, &answer));
        }
        let name = answer["data"][0]["id"].as_str();
        name.map(str::to_owned).with_context(|| format!("{} lists no model", self.name()))
    }

    /// Returns the server's name, as shown to the user.
    pub(crate) fn name(&self) -> String {
        match &self.place {
            Place::Tcp { host, port } => format!("http://{host}:{port}"),
            Place::Tls { host, port, .. } => format!("https://{host}:{port}"),
            Place::Unix(path) => path.display().to_string(),
        }
    }
}

/// Returns the error message of a response.
pub(crate) fn refusal(status: StatusCode, answer: &Value) -> String {
    let message = answer["error"]["message"].as_str().or_else(|| answer["message"].as_str());
    match (status, message) {
        (StatusCode::UNAUTHORIZED, _) => "the server wants an API key: --api-key".into(),
        (_, Some(message)) => message.to_owned(),
        (status, None) => format!("the server answered {status}"),
    }
}

/// Reads a response body to its end.
pub(crate) async fn whole(response: Response<Incoming>) -> Result<Bytes> {
    let body = http_body_util::Limited::new(response.into_body(), MOST).collect().await;
    Ok(body.map_err(|error| anyhow!("the answer broke off: {error}"))?.to_bytes())
}

async fn tcp(host: &str, port: u16) -> Result<TcpStream> {
    let stream = TcpStream::connect((host, port)).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

async fn opened<S>(stream: S) -> Result<Connection>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    Ok(sender)
}

fn trust() -> Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let config = config.with_safe_default_protocol_versions()?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_as_people_paste_them() {
        for (url, name, root) in [
            ("http://127.0.0.1:8000", "http://127.0.0.1:8000", ""),
            ("http://localhost:8000/v1/", "http://localhost:8000", ""),
            ("https://example.com/llm/v1", "https://example.com:443", "/llm"),
            ("http://[::1]:9", "http://::1:9", ""),
        ] {
            let link = Link::to(url, Some("key")).unwrap();
            assert_eq!((link.name().as_str(), link.root.as_str()), (name, root));
            assert!(!format!("{link:?}").contains("key\""), "keys are not shown");
        }
        assert!(Link::to("http://", None).is_err());
        assert!(Link::to("http://host", Some("a\nb")).is_err());
    }
}
