//! A load generator with reports, like `bench_serving`, and an accuracy evaluation.
//!
//! `dataset` creates [`WorkItem`]s, and `arrival` schedules them. `client` sends them and returns a
//! [`Record`] of each. `summary` computes statistics from the records, and `table` prints them.
//! `output` writes the result file of a run, and `report` turns such files into a page.
//!
//! ```no_run
//! use clap::Parser;
//! use forebay_bench::{ServeArgs, TokenizerFinder, serve};
//! use forebay_text::Tokenizer;
//!
//! #[derive(Parser)]
//! struct Flags {
//!     #[command(flatten)]
//!     serve: ServeArgs,
//! }
//!
//! /// Tokenizers are named by their files.
//! struct Files;
//!
//! impl TokenizerFinder for Files {
//!     fn find(&self, name: &str) -> anyhow::Result<Tokenizer> {
//!         Ok(Tokenizer::from_file(name.as_ref())?)
//!     }
//! }
//!
//! let tokenizer = "model/tokenizer.json";
//! let flags = Flags::parse_from(["bench", "--port", "8000", "--tokenizer", tokenizer]);
//! serve(&flags.serve, &Files)?;
//! # Ok::<(), anyhow::Error>(())
//! ```

pub mod arrival;
mod client;
mod cpu;
pub mod dataset;
mod eval;
mod flags;
mod item;
mod output;
mod progress;
mod record;
mod report;
mod run;
mod serve;
mod summary;
mod table;
mod tokens;

pub use eval::{Gsm8kArgs, gsm8k};
pub use item::{Part, Prompt, WorkItem};
pub use record::{Chunk, Outcome, Record};

pub use client::{Backend, ServerFlags};
pub use flags::{RequestFlags, ResultFlags, RunFlags, ServeArgs};
pub use output::{
    Costs, Details, Histogram, Latencies, ProcessCpu, Rate, RunFile, Second, Settings, Summary,
};
pub use report::{ReportArgs, report, report_run};
pub use serve::serve;
pub use summary::Stats;
pub use tokens::TokenizerFinder;
