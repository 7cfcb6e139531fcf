//! One self-contained page about one or several result files: `forebay bench report`.
//!
//! `read` reads files, `run` gives names to what is in them, `histogram` holds a distribution, and
//! `details` makes up for what files of other clients lack. `metrics` and `care` say which rows
//! there are and what to be careful about; `distribution`, `timeline` and `cpu` draw with what
//! `axis` and `chart` have; `page` joins it all.
//!
//! The charts are inline SVG whose colours come from the page's style sheet, so that they follow
//! the reader's choice of light or dark; the charting crates write their colours into the drawing.

mod axis;
mod care;
mod chart;
mod cpu;
mod details;
mod distribution;
mod histogram;
mod metrics;
mod page;
mod read;
mod run;
mod timeline;

use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::Value;

use run::Run;

/// What `forebay bench report` is told.
#[derive(Debug, Clone, clap::Args)]
pub struct ReportArgs {
    /// Result files of `forebay bench serve --output-file`, `bench_serving` or `vllm bench serve
    /// --save-result`; ratios are to the first run of the first file
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,

    /// Where to write the page
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,

    /// The heading of the page
    #[arg(long, default_value = DEFAULT_TITLE, value_name = "TEXT")]
    pub title: String,
}

/// The heading of a page that is given none.
const DEFAULT_TITLE: &str = "Serving benchmark";

/// Writes the page about the runs in `args.files`.
///
/// # Errors
///
/// When a file cannot be read or holds no result, or the page cannot be written.
pub fn report(args: &ReportArgs) -> anyhow::Result<()> {
    write(&args.output, &args.title, &read::read_all(&args.files)?)
}

/// Writes the page about a run that has just ended (what would be its line of the result file),
/// compared with the runs in `compare`; the new run comes last, so that ratios are to what was
/// before.
///
/// # Errors
///
/// When a file of `compare` cannot be read or holds no result, or the page cannot be written.
pub fn report_run(output: &Path, run: Value, compare: &[PathBuf]) -> anyhow::Result<()> {
    let mut runs = read::read_all(compare)?;
    runs.push(Run::new("this run", run));
    write(output, DEFAULT_TITLE, &runs)
}

/// The page about `runs`, as HTML that needs nothing else; the first run is what the others are
/// compared with.
fn render(title: &str, runs: &[Run]) -> String {
    page::page(title, runs)
}

fn write(output: &Path, title: &str, runs: &[Run]) -> anyhow::Result<()> {
    std::fs::write(output, render(title, runs))
        .with_context(|| format!("cannot write {}", output.display()))
}

#[cfg(test)]
mod tests;
