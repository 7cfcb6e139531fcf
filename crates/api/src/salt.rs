//! The salt of a request. Cached blocks are shared only between requests with the same salt.

use std::sync::Arc;

use crate::error::ApiError;

const PARAM: &str = "cache_salt";

/// Checks a `cache_salt`.
///
/// # Errors
/// The salt is empty.
pub(crate) fn check_salt(salt: Option<&str>) -> Result<Option<Arc<str>>, ApiError> {
    match salt {
        Some("") => Err(ApiError::invalid(PARAM, format!("`{PARAM}`: must not be empty"))),
        salt => Ok(salt.map(Into::into)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_salt_is_not_empty() {
        assert_eq!(check_salt(None), Ok(None));
        assert_eq!(check_salt(Some("a")), Ok(Some("a".into())));
        let error = check_salt(Some("")).unwrap_err();
        assert_eq!(error, ApiError::invalid(PARAM, error.to_string()));
    }
}
