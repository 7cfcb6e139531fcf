//! The measured server and its address.

use std::net::{SocketAddr, ToSocketAddrs};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use clap::Args;
use http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HOST};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};

use super::Backend;

/// Flags that specify the server.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Server")]
pub struct ServerFlags {
    /// Kind of server and route.
    #[arg(long, value_enum, default_value = "openai")]
    pub backend: Backend,
    /// URL of the server, such as http://localhost:8000.
    #[arg(long, value_name = "URL", conflicts_with_all = ["host", "port"])]
    pub base_url: Option<String>,
    /// Host of the server.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port of the server [default: the usual port of the backend: SGLang 30000, llama-server 8080,
    /// otherwise 8000].
    #[arg(long)]
    pub port: Option<u16>,
    /// Path for requests, instead of the usual path of the backend.
    #[arg(long, value_name = "PATH")]
    pub endpoint: Option<String>,
    /// Header to send with every request; may be repeated.
    #[arg(long = "header", value_name = "KEY=VALUE", num_args = 1.., value_parser = header)]
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Key to send as a bearer token.
    #[arg(long, value_name = "KEY", env = "OPENAI_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
}

impl ServerFlags {
    /// The server's address as a URL.
    pub fn url(&self) -> String {
        let port = self.port.unwrap_or(self.backend.default_port());
        self.base_url.clone().unwrap_or_else(|| format!("http://{}:{port}", self.host))
    }
}

fn header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let (name, value) = text.split_once(['=', ':']).ok_or("expected KEY=VALUE")?;
    let name = name.trim().parse::<HeaderName>().map_err(|error| error.to_string())?;
    let value = value.trim().parse::<HeaderValue>().map_err(|error| error.to_string())?;
    Ok((name, value))
}

/// A server and the route to measure.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    /// The kind of server.
    pub(crate) backend: Backend,
    /// The addresses to connect to.
    pub(super) addresses: Vec<SocketAddr>,
    /// Path and query of the route to measure.
    pub(super) route: String,
    /// Path prefix of every route, without a trailing slash.
    prefix: String,
    /// The header lines of every request, as sent.
    headers: Vec<u8>,
}

impl Target {
    /// Parses the flags, and resolves the server's host name.
    ///
    /// # Errors
    /// The URL is not a plain http URL, or its host is unknown.
    pub(crate) fn new(flags: &ServerFlags) -> Result<Self> {
        let url = flags.url();
        let uri: Uri = url.parse().with_context(|| format!("{url} is no address"))?;
        if uri.scheme_str() != Some("http") {
            bail!("{url}: only http:// can be measured; put a proxy that ends TLS in front");
        }
        let authority = uri.authority().with_context(|| format!("{url} names no host"))?;
        let host = authority.host().trim_matches(['[', ']']);
        let addresses: Vec<SocketAddr> = (host, authority.port_u16().unwrap_or(80))
            .to_socket_addrs()
            .with_context(|| format!("cannot find {host}"))?
            .collect();
        // A `/v1` at the end is removed, because users of OpenAI's clients include it in the URL.
        let path = uri.path().trim_end_matches('/');
        let prefix = path.strip_suffix("/v1").unwrap_or(path).to_owned();
        let mut headers = HeaderMap::new();
        headers.insert(HOST, authority.as_str().parse()?);
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(key) = &flags.api_key {
            let value =
                format!("Bearer {key}").parse().context("--api-key does not fit in a header")?;
            headers.insert(AUTHORIZATION, value);
        }
        headers.extend(flags.headers.iter().cloned());
        let route = flags.endpoint.as_deref().unwrap_or(flags.backend.route());
        let mut target = Self {
            backend: flags.backend,
            addresses,
            route: String::new(),
            prefix,
            headers: lines(&headers),
        };
        target.route = target.path(route);
        let _: Uri =
            target.route.parse().with_context(|| format!("{} is no path", target.route))?;
        Ok(target)
    }

    /// Returns the path of a route, including the prefix of all routes.
    pub(super) fn path(&self, route: &str) -> String {
        format!("{}/{}", self.prefix, route.trim_start_matches('/'))
    }

    /// Returns the head of a request to `path` with a body of `length` bytes.
    pub(super) fn head(&self, method: &Method, path: &str, length: usize) -> Bytes {
        let start = format!("{method} {path} HTTP/1.1\r\n{CONTENT_LENGTH}: {length}\r\n");
        [start.as_bytes(), &self.headers, b"\r\n"].concat().into()
    }
}

/// Encodes headers as lines. A header's value may contain any bytes.
fn lines(headers: &HeaderMap) -> Vec<u8> {
    let lines = headers
        .iter()
        .map(|(name, value)| [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat());
    lines.collect::<Vec<_>>().concat()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        flags: ServerFlags,
    }

    fn flags(arguments: &[&str]) -> ServerFlags {
        Cli::parse_from([&["x"], arguments].concat()).flags
    }

    #[test]
    fn addresses_and_routes() {
        let target = Target::new(&flags(&["--backend", "sglang"])).unwrap();
        assert_eq!(target.addresses, ["127.0.0.1:30000".parse().unwrap()]);
        assert_eq!(target.route, "/generate");
        let base = ["--base-url", "http://127.0.0.1:9/some/v1/", "--backend", "openai-chat"];
        let target = Target::new(&flags(&base)).unwrap();
        assert_eq!(target.route, "/some/v1/chat/completions");
        let own = ["--host", "127.0.0.1", "--port", "1", "--endpoint", "x?y=1"];
        assert_eq!(Target::new(&flags(&own)).unwrap().route, "/x?y=1");
        assert!(Target::new(&flags(&["--base-url", "https://127.0.0.1"])).is_err());
        assert!(Target::new(&flags(&["--base-url", "nonsense"])).is_err());
    }

    #[test]
    fn headers_are_sent() {
        let given = flags(&["--header", "x-a=1=2", "--api-key", "k", "--port", "7"]);
        let target = Target::new(&given).unwrap();
        let head = target.head(&Method::POST, "/x", 12);
        let text = std::str::from_utf8(&head).unwrap();
        assert!(text.starts_with("POST /x HTTP/1.1\r\n") && text.ends_with("\r\n\r\n"), "{text}");
        for line in
            ["content-length: 12", "x-a: 1=2", "authorization: Bearer k", "host: 127.0.0.1:7"]
        {
            assert!(text.contains(&format!("{line}\r\n")), "{text}");
        }
    }
}
