//! The brain's certificate, and the token that identifies the certificate, stored in two files.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};
use serde::{Deserialize, Serialize};

use crate::token::JoinToken;

/// The host name in the certificate. No outpost checks it.
pub(crate) const NAME: &str = "forebay";

/// The brain's certificate with its private key, and the token for outposts.
#[derive(Debug, Clone)]
pub struct Credentials {
    pub(crate) token: JoinToken,
    pub(crate) certificate: Vec<u8>,
    pub(crate) key: Vec<u8>,
}

/// The content of the key file, which is beside the token's file and stays on the brain's machine.
/// Both fields are base64.
#[derive(Serialize, Deserialize)]
struct Kept {
    certificate: String,
    key: String,
}

impl Credentials {
    /// Creates new credentials.
    ///
    /// # Errors
    /// The system can't provide random numbers.
    pub fn make() -> io::Result<Self> {
        let made =
            rcgen::generate_simple_self_signed([NAME.to_owned()]).map_err(io::Error::other)?;
        let certificate = made.cert.der().to_vec();
        let mut secret = [0; 32];
        SystemRandom::new().fill(&mut secret).map_err(|_| io::Error::other("no random numbers"))?;
        let token = JoinToken { fingerprint: fingerprint(&certificate), secret };
        Ok(Self { token, certificate, key: made.signing_key.serialize_der() })
    }

    /// Reads the credentials in the files `token` and `token.key`. If neither file exists, both are
    /// created. Only the owner may read them.
    ///
    /// # Errors
    /// A file can't be read or written, only one of the files exists, or they belong to different
    /// certificates.
    pub fn open(token: &Path) -> io::Result<Self> {
        let beside = neighbour(token);
        match (token.exists(), beside.exists()) {
            (false, false) => {
                let made = Self::make()?;
                let encode = |bytes: &[u8]| base64_simd::STANDARD.encode_to_string(bytes);
                let kept = Kept { certificate: encode(&made.certificate), key: encode(&made.key) };
                write(&beside, &serde_json::to_string(&kept)?)?;
                write(token, &format!("{}\n", made.token))?;
                Ok(made)
            }
            (true, true) => read(token, &beside),
            (there, _) => {
                let (has, lacks) = if there { (token, &*beside) } else { (&*beside, token) };
                let (has, lacks) = (has.display(), lacks.display());
                Err(io::Error::other(format!(
                    "{has} is there without {lacks}: bring both, or remove it and a new token is made"
                )))
            }
        }
    }

    /// The token with which outposts join.
    #[must_use]
    pub fn token(&self) -> &JoinToken {
        &self.token
    }
}

/// Returns the path of the file with the certificate and its key, for the path of the token's file.
fn neighbour(token: &Path) -> PathBuf {
    let mut name = token.as_os_str().to_owned();
    name.push(".key");
    name.into()
}

fn fingerprint(certificate: &[u8]) -> [u8; 32] {
    let mut found = [0; 32];
    found.copy_from_slice(digest(&SHA256, certificate).as_ref());
    found
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    let mut file = File::options().create_new(true).write(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())
}

fn read(token: &Path, beside: &Path) -> io::Result<Credentials> {
    let bad = |path: &Path, why: &dyn std::fmt::Display| {
        io::Error::other(format!("{}: {why}", path.display()))
    };
    let line = fs::read_to_string(token).map_err(|error| bad(token, &error))?;
    let token_read: JoinToken = line.parse().map_err(|error| bad(token, &error))?;
    let text = fs::read_to_string(beside).map_err(|error| bad(beside, &error))?;
    let kept: Kept = serde_json::from_str(&text).map_err(|error| bad(beside, &error))?;
    let decode =
        |text: &str| base64_simd::STANDARD.decode_to_vec(text).map_err(|error| bad(beside, &error));
    let (certificate, key) = (decode(&kept.certificate)?, decode(&kept.key)?);
    if fingerprint(&certificate) != token_read.fingerprint {
        return Err(bad(
            token,
            &format!("the token of another certificate than {}", beside.display()),
        ));
    }
    Ok(Credentials { token: token_read, certificate, key })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn an_identity_is_made_once_and_for_its_owner() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let made = Credentials::open(&path).unwrap();
        let again = Credentials::open(&path).unwrap();
        assert_eq!((made.token(), &made.key), (again.token(), &again.key));
        assert_ne!(made.token(), Credentials::make().unwrap().token());
        for file in [path.clone(), neighbour(&path)] {
            assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
        }
    }

    #[test]
    fn halves_and_mixtures_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        Credentials::open(&one).unwrap();
        Credentials::open(&two).unwrap();
        fs::copy(&two, &one).unwrap();
        let mixed = Credentials::open(&one).unwrap_err().to_string();
        assert!(mixed.contains("the token of another certificate"), "{mixed}");
        fs::write(&one, "fbw1.12.34").unwrap();
        assert!(Credentials::open(&one).unwrap_err().to_string().contains("no token"));
        fs::remove_file(neighbour(&one)).unwrap();
        assert!(Credentials::open(&one).unwrap_err().to_string().contains("is there without"));
        fs::remove_file(&two).unwrap();
        assert!(Credentials::open(&two).unwrap_err().to_string().contains("is there without"));
    }
}
