//! `forebay bench report`: one self-contained page about one or several result files.
//!
//! `read` reads files, and `run` finds values by name. `histogram` represents a distribution, and
//! `details` computes the values that other clients' files lack. `metrics` defines the rows, and
//! `care` the warnings. `distribution`, `timeline` and `cpu` draw charts with `axis` and `chart`.
//! `page` combines everything.
//!
//! The charts are inline SVG. Their colours come from the page's style sheet, so they follow the
//! reader's choice of light or dark. Charting crates would embed fixed colours.

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

/// The flags of `forebay bench report`.
#[derive(Debug, Clone, clap::Args)]
pub struct ReportArgs {
    /// Result files of `forebay bench serve --output-file`, `bench_serving` or `vllm bench serve
    /// --save-result`; ratios are relative to the first run of the first file
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,

    /// File for the page
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,

    /// Heading of the page
    #[arg(long, default_value = DEFAULT_TITLE, value_name = "TEXT")]
    pub title: String,
}

/// The default heading of a page.
const DEFAULT_TITLE: &str = "Serving benchmark";

/// Writes the page about the runs in `args.files`.
///
/// # Errors
/// A file can't be read or contains no result, or the page can't be written.
pub fn report(args: &ReportArgs) -> anyhow::Result<()> {
    write(&args.output, &args.title, &read::read_all(&args.files)?)
}

/// Writes the page that compares a run that has just ended with the runs in `compare`. `run` has
/// the form of a line of a result file. The new run comes last, so ratios refer to the first run in
/// `compare`.
///
/// # Errors
/// A file of `compare` can't be read or contains no result, or the page can't be written.
pub fn report_run(output: &Path, run: Value, compare: &[PathBuf]) -> anyhow::Result<()> {
    let mut runs = read::read_all(compare)?;
    runs.push(Run::new("this run", run));
    write(output, DEFAULT_TITLE, &runs)
}

/// Returns the page about `runs`, as a single HTML document. All runs are compared with the first.
fn render(title: &str, runs: &[Run]) -> String {
    page::page(title, runs)
}

fn write(output: &Path, title: &str, runs: &[Run]) -> anyhow::Result<()> {
    std::fs::write(output, render(title, runs))
        .with_context(|| format!("cannot write {}", output.display()))
}

#[cfg(test)]
mod tests;
