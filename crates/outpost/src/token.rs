//! The token with which outposts join. It identifies the brain's certificate, and contains a
//! secret.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

const KIND: &str = "fbw1";
const BYTES: usize = 32;

/// The token, a line such as `fbw1.CERTIFICATE.SECRET`, with both values in hexadecimal. Anyone who
/// has it can run hands for the brain, and read its requests.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    /// The SHA-256 hash of the brain's certificate.
    pub(crate) fingerprint: [u8; BYTES],
    /// 256 random bits.
    pub(crate) secret: [u8; BYTES],
}

/// The error for a text that is not a valid token.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("no token: it is one line, `{KIND}.` and two numbers of 64 hexadecimal digits")]
pub struct TokenError;

impl FromStr for JoinToken {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        let mut parts = text.trim().split('.');
        let mut next = || parts.next().ok_or(TokenError);
        if next()? != KIND {
            return Err(TokenError);
        }
        let token = Self { fingerprint: bytes(next()?)?, secret: bytes(next()?)? };
        if parts.next().is_some() { Err(TokenError) } else { Ok(token) }
    }
}

impl fmt::Display for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{KIND}.{}.{}", hex(&self.fingerprint), hex(&self.secret))
    }
}

impl fmt::Debug for JoinToken {
    /// Writes the token without the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{KIND}.{}...", hex(&self.fingerprint[..4]))
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(text: &str) -> Result<[u8; BYTES], TokenError> {
    if text.len() != 2 * BYTES || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(TokenError);
    }
    let mut found = [0; BYTES];
    for (byte, at) in found.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(&text[at..at + 2], 16).map_err(|_| TokenError)?;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_token_is_read_as_it_is_written(fingerprint: [u8; BYTES], secret: [u8; BYTES]) {
            let token = JoinToken { fingerprint, secret };
            prop_assert_eq!(format!(" {token}\n").parse(), Ok(token.clone()));
            let shown = format!("{token:?}");
            prop_assert!(!shown.contains(&hex(&secret)));
        }

        #[test]
        fn what_is_no_token_is_refused(text in ".{0,200}") {
            prop_assert_eq!(text.parse::<JoinToken>(), Err(TokenError));
        }

        #[test]
        fn a_token_with_a_byte_too_many_or_another_one_is_refused(at in 0usize..134, other in "[^0-9a-fA-F]") {
            let line = JoinToken { fingerprint: [7; BYTES], secret: [9; BYTES] }.to_string();
            let changed = format!("{}{other}{}", &line[..at], &line[at + 1..]);
            prop_assert!(changed == line || changed.parse::<JoinToken>() == Err(TokenError));
            let longer = format!("{}{other}{}", &line[..at], &line[at..]);
            prop_assert!(longer.trim() == line || longer.parse::<JoinToken>() == Err(TokenError));
        }
    }
}
