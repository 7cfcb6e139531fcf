//! Reads measured steps from files.

use std::path::Path;

use serde::Deserialize;
use thiserror::Error;

use crate::load::StepLoad;
use crate::record::StepRecord;

/// A measured step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// The load of the step.
    pub load: StepLoad,
    /// The measured time in microseconds.
    pub step_us: f64,
}

/// Why no profile could be fitted.
#[derive(Debug, Error)]
pub enum FitError {
    /// The file could not be read.
    #[error("{path}: {source}")]
    Read {
        /// The path of the file.
        path: String,
        /// The error of the system.
        source: std::io::Error,
    },
    /// A line is neither a recorded step nor a row of a table.
    #[error("{path}, line {line}: {reason}")]
    Malformed {
        /// The path of the file.
        path: String,
        /// The line, counted from 1.
        line: u64,
        /// Why the line is invalid.
        reason: String,
    },
    /// Too few steps took any time.
    #[error("{found} steps that took time are too few to fit a profile: at least {needed}")]
    TooFew {
        /// The number of steps that took time.
        found: usize,
        /// The number of steps that are needed.
        needed: usize,
    },
}

/// A row of a table of step times.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TableRow {
    rows: u32,
    #[serde(default)]
    decode_rows: Option<u32>,
    prefill_tokens: u32,
    context: u64,
    #[serde(default)]
    attention: Option<u64>,
    step_us: f64,
}

impl From<TableRow> for Sample {
    fn from(row: TableRow) -> Self {
        let prefills = u32::from(row.prefill_tokens > 0);
        let load = StepLoad {
            rows: row.rows,
            decode_rows: row.decode_rows.unwrap_or(row.rows.saturating_sub(prefills)),
            prefill_tokens: row.prefill_tokens,
            context: row.context,
            attention: row.attention.unwrap_or(0),
        };
        Self { load, step_us: row.step_us }
    }
}

/// Reads the steps of a recording (one JSON object per line, as a [`crate::Recorder`] writes them),
/// or of a CSV table with the columns `rows`, `prefill_tokens`, `context` and `step_us`.
///
/// Without a column `decode_rows`, each step with prefill tokens is assumed to have one prefill
/// row. Without `attention`, the other columns absorb its cost.
///
/// # Errors
/// The file could not be read, or has neither format.
pub fn read_samples(path: &Path) -> Result<Vec<Sample>, FitError> {
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path)
        .map_err(|source| FitError::Read { path: name.clone(), source })?;
    let samples = if text.trim_start().starts_with('{') { recorded(&text) } else { table(&text) };
    samples.map_err(|(line, reason)| FitError::Malformed { path: name, line, reason })
}

fn recorded(text: &str) -> Result<Vec<Sample>, (u64, String)> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let read = |(at, line)| {
        let step: StepRecord =
            serde_json::from_str(line).map_err(|error| (at as u64 + 1, error.to_string()))?;
        Ok(Sample { load: step.load, step_us: f64::from(step.device_us) })
    };
    lines.map(read).collect()
}

fn table(text: &str) -> Result<Vec<Sample>, (u64, String)> {
    let mut reader = csv::ReaderBuilder::new()
        .trim(csv::Trim::All)
        .comment(Some(b'#'))
        .from_reader(text.as_bytes());
    let rows = reader.deserialize::<TableRow>();
    rows.map(|row| {
        let row = row.map_err(|e| (e.position().map_or(0, csv::Position::line), e.to_string()))?;
        Ok(row.into())
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_needs_no_more_than_what_is_published() {
        let text = "# from a paper\nrows, prefill_tokens, context, step_us\n8,0,800,1500\n1,512,512,9000.5\n";
        let samples = table(text).expect("samples");
        let prefill =
            StepLoad { rows: 1, prefill_tokens: 512, context: 512, ..StepLoad::default() };
        let decode = StepLoad { rows: 8, decode_rows: 8, context: 800, ..StepLoad::default() };
        let expected =
            [Sample { load: decode, step_us: 1500.0 }, Sample { load: prefill, step_us: 9000.5 }];
        assert_eq!(samples, expected);
    }

    #[test]
    fn what_is_wrong_is_found_by_its_line() {
        let (line, _) =
            table("rows,prefill_tokens,context,step_us\n1,0,1,5\n1,0,x,5\n").expect_err("x");
        assert_eq!(line, 3);
        assert!(table("rows,prefill_tokens,context,step_ms\n1,0,1,5\n").is_err());
        let (line, _) = recorded("\n{\"step\":1}\n").expect_err("lacks all");
        assert_eq!(line, 2);
    }
}
