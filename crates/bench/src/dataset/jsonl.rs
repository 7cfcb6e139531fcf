//! Files with one JSON value per line.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::Path;

use anyhow::Context as _;
use serde::de::DeserializeOwned;

/// Parses every line of `path` that is not blank. Returns `(line number, value)` for each.
///
/// # Errors
/// If the file can't be read, or a line does not parse. The message contains the line number.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> anyhow::Result<Vec<(usize, T)>> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    let mut values = Vec::new();
    for (index, line) in BufReader::new(file).lines().enumerate() {
        let place = || format!("{}, line {}", path.display(), index + 1);
        let line = line.with_context(place)?;
        // Some editors begin files with a byte order mark.
        let line = if index == 0 { line.trim_start_matches('\u{feff}') } else { line.as_str() };
        if !line.trim().is_empty() {
            values.push((index + 1, serde_json::from_str(line).with_context(place)?));
        }
    }
    Ok(values)
}
