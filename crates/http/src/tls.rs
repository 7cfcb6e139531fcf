//! TLS: the certificate, its key, and the acceptor that encrypts a connection.

use std::fmt::{self, Display};
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::server::TlsStream;

/// The ALPN name of the only supported protocol.
const HTTP_1_1: &[u8] = b"http/1.1";

/// A certificate and its key, loaded and checked.
#[derive(Clone)]
pub struct Tls(TlsAcceptor);

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TLS")
    }
}

impl Tls {
    /// Reads a certificate, followed by its chain, and its key, both as PEM.
    ///
    /// # Errors
    /// A file cannot be read, has no certificate or key, or the key is encrypted or does not match.
    /// The message is one line and names the file.
    pub fn from_files(certificate: &Path, key: &Path) -> Result<Self, String> {
        let pem = read(certificate)?;
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
        let chain = chain.map_err(|error| wrong(certificate, error))?;
        if chain.is_empty() {
            return Err(wrong(certificate, "it has no certificate in PEM"));
        }
        let pem = read(key)?;
        // An encrypted key is either in PKCS #8 or in OpenSSL's old format.
        let text = String::from_utf8_lossy(&pem);
        if text.contains("ENCRYPTED PRIVATE KEY") || text.contains("Proc-Type: 4,ENCRYPTED") {
            let how = "the key is encrypted; `openssl pkey` writes it without its password";
            return Err(wrong(key, how));
        }
        let private = PrivateKeyDer::from_pem_slice(&pem).map_err(|error| wrong(key, error))?;
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_no_client_auth()
            .with_single_cert(chain, private);
        let mut config = config.map_err(|error| wrong(certificate, error))?;
        config.alpn_protocols = vec![HTTP_1_1.into()];
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }

    pub(crate) async fn accept<I>(&self, io: I) -> io::Result<TlsStream<I>>
    where
        I: AsyncRead + AsyncWrite + Unpin,
    {
        self.0.accept(io).await
    }
}

fn read(file: &Path) -> Result<Vec<u8>, String> {
    fs::read(file).map_err(|error| wrong(file, error))
}

fn wrong(file: &Path, reason: impl Display) -> String {
    format!("{}: {reason}", file.display())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn data(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
    }

    #[test]
    fn what_is_wrong_with_a_file_is_said_in_one_line() {
        let (certificate, key) = (data("certificate.pem"), data("key.pem"));
        assert!(Tls::from_files(&certificate, &key).is_ok());
        let cases = [
            (&key, &key, "key.pem: it has no certificate"),
            (&certificate, &certificate, "certificate.pem: "),
            (&certificate, &data("encrypted_key.pem"), "the key is encrypted"),
            (&data("none.pem"), &key, "none.pem: No such file"),
        ];
        for (certificate, key, part) in cases {
            let error = Tls::from_files(certificate, key).unwrap_err();
            assert!(error.contains(part) && !error.contains('\n'), "{error}");
        }
    }
}
