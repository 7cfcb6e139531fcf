//! The salt that keeps a request's cached blocks apart from others.

use std::sync::Arc;

use crate::error::ApiError;
use crate::limits::CACHE_SALT_BYTES;

const PARAM: &str = "cache_salt";

/// Checks a `cache_salt`.
///
/// # Errors
/// It is empty or too long.
pub(crate) fn check_salt(salt: Option<&str>) -> Result<Option<Arc<str>>, ApiError> {
    let wrong = |reason: String| Err(ApiError::invalid(PARAM, format!("`{PARAM}`: {reason}")));
    match salt {
        Some("") => wrong("must not be empty".into()),
        Some(salt) if salt.len() > CACHE_SALT_BYTES => {
            wrong(format!("{} bytes are more than {CACHE_SALT_BYTES}", salt.len()))
        }
        salt => Ok(salt.map(Into::into)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_salt_has_from_one_to_256_bytes() {
        assert_eq!(check_salt(None), Ok(None));
        for fine in ["a", &"x".repeat(CACHE_SALT_BYTES)] {
            assert_eq!(check_salt(Some(fine)), Ok(Some(fine.into())));
        }
        for wrong in ["", &"x".repeat(CACHE_SALT_BYTES + 1), &"é".repeat(CACHE_SALT_BYTES / 2 + 1)]
        {
            let error = check_salt(Some(wrong)).unwrap_err();
            assert_eq!(error, ApiError::invalid(PARAM, error.to_string()));
        }
    }
}
