//! The client's preference for a replica.

use forebay_engine::Preference;

use crate::error::ApiError;
use crate::limits::ROUTING_KEY_BYTES;
use crate::sampling::Limits;

/// Checks a routing key and a replica's index, each given with the name of its parameter.
///
/// # Errors
/// The key is empty or too long, or there is no such replica.
pub fn preference(
    (key_param, key): (&str, Option<&str>),
    (replica_param, replica): (&str, Option<i64>),
    limits: Limits,
) -> Result<Preference, ApiError> {
    let wrong =
        |param: &str, reason: String| Err(ApiError::invalid(param, format!("`{param}`: {reason}")));
    if key.is_some_and(str::is_empty) {
        return wrong(key_param, "must not be empty".into());
    }
    if let Some(key) = key.filter(|key| key.len() > ROUTING_KEY_BYTES) {
        return wrong(key_param, format!("{} bytes are more than {ROUTING_KEY_BYTES}", key.len()));
    }
    let replica = match replica.map(|given| (given, u32::try_from(given))) {
        None => None,
        Some((_, Ok(replica))) if replica < limits.replicas => Some(replica),
        Some((given, _)) => {
            let most = limits.replicas.saturating_sub(1);
            return wrong(replica_param, format!("{given} is not a replica from 0 to {most}"));
        }
    };
    Ok(Preference { key: key.map(Into::into), replica })
}
