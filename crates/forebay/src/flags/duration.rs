//! Parsers of durations in flags.

use std::time::Duration;

/// Parses a number of seconds.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let value: f64 = text.parse().map_err(|_| "expected seconds")?;
    Duration::try_from_secs_f64(value).map_err(|e| e.to_string())
}
