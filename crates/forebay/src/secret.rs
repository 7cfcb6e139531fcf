//! The secret from which the names of cached blocks are derived.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use forebay_engine::Namer;
use tracing::warn;

/// The smallest size of a secret in bytes.
const SHORTEST: usize = 32;
/// The largest size of the file in bytes. A larger file is not a secret.
const LONGEST: u64 = 4096;

/// Creates the namer of blocks. Processes that read the same secret give blocks the same names.
/// Without a file, the secret is random.
pub(crate) fn namer(file: Option<&Path>) -> Result<Namer> {
    let Some(file) = file else { return Ok(Namer::new(&rand::random::<[u8; SHORTEST]>())) };
    let named = || format!("--cache-secret-file {}", file.display());
    let mut secret = Vec::new();
    let opened = File::open(file).with_context(named)?;
    let mode = opened.metadata().with_context(named)?.permissions().mode();
    opened.take(LONGEST + 1).read_to_end(&mut secret).with_context(named)?;
    if secret.len() as u64 > LONGEST {
        bail!("{}: a secret has at most {LONGEST} bytes", named());
    }
    // An editor may have added a newline.
    let secret = secret.trim_ascii_end();
    if secret.len() < SHORTEST {
        let found = secret.len();
        bail!(
            "{}: {found} bytes are too few for a secret; `openssl rand -hex 32 > FILE` makes one",
            named()
        );
    }
    if mode & 0o077 != 0 {
        warn!("{}: others than its owner may read it: chmod 600 keeps it secret", named());
    }
    Ok(Namer::new(secret))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(content: &[u8]) -> Result<u64, String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("secret");
        std::fs::write(&file, content).unwrap();
        namer(Some(&file)).map(|namer| namer.id()).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn names_agree_where_the_secret_does_and_nowhere_else() {
        let secret = [b'a'; SHORTEST];
        assert_eq!(of(&secret), of(&[&secret[..], b"\r\n"].concat()));
        assert_ne!(of(&secret), of(&[b'b'; SHORTEST]));
        let drawn = || namer(None).unwrap().id();
        assert_ne!(drawn(), drawn());
    }

    #[test]
    fn a_file_that_is_no_secret_is_said_in_one_line() {
        for (content, reason) in [
            (&b""[..], "0 bytes are too few"),
            (&[b'a'; SHORTEST - 1][..], "31 bytes are too few"),
            (&[b'\n'; SHORTEST][..], "0 bytes are too few"),
            (&[b'a'; LONGEST as usize + 1][..], "at most 4096 bytes"),
        ] {
            let error = of(content).unwrap_err();
            assert!(error.contains(reason) && error.lines().count() == 1, "{error}");
            assert!(error.starts_with("--cache-secret-file "), "{error}");
        }
        let missing = namer(Some(Path::new("/nothing/here"))).unwrap_err();
        assert!(format!("{missing:#}").contains("/nothing/here"), "{missing:#}");
        let endless = namer(Some(Path::new("/dev/zero"))).unwrap_err();
        assert!(format!("{endless:#}").contains("at most"), "{endless:#}");
    }
}
