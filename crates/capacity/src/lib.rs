//! Capacity planning: the number of replicas that a recorded traffic needs, and the memory of
//! ranks.
//!
//! `simulate` runs the traffic against replicas in virtual time: real schedulers, with a profile's
//! step times in place of devices. `search` looks for the least number that meets the objectives.
//! `outcome` has the results of one number of replicas, and `report` prints them. `memory` shows
//! the weights and pages of ranks.
//!
//! ```
//! use clap::Parser;
//! use forebay_capacity::{PlanArgs, plan};
//!
//! #[derive(Parser)]
//! struct Flags {
//!     #[command(flatten)]
//!     plan: PlanArgs,
//! }
//!
//! let folder = std::env::temp_dir().join(format!("forebay-plan-{}", std::process::id()));
//! std::fs::create_dir_all(&folder)?;
//! let trace = folder.join("trace.jsonl");
//! let request = r#"{"timestamp": 0, "input_length": 300, "output_length": 9, "hash_ids": [1]}"#;
//! std::fs::write(&trace, request)?;
//!
//! let profile = "h100-llama-3.1-8b";
//! let path = trace.display().to_string();
//! let flags = ["plan", "--trace", &path, "--sim-profile", profile, "--slo", "ttft:500"];
//! plan(&Flags::parse_from(flags).plan, 1)?;
//! # std::fs::remove_dir_all(&folder)?;
//! # Ok::<(), anyhow::Error>(())
//! ```

mod args;
mod groups;
mod images;
mod memory;
mod outcome;
mod replica;
mod report;
mod router;
mod search;
mod simulate;
mod sparse;
#[cfg(test)]
mod tests;
mod traffic;

use anyhow::{Context, Result, bail};
use forebay_sim::Profile;

pub use args::{MoveArgs, PlanArgs, Router, ShareArgs, Slo, SloMetric, WritePolicy};
pub use memory::{Memory, RankMemory};
pub use sparse::{KvSave, KvSaveOrder, SparseArgs, hot_row_tokens};

use forebay_bench::dataset::trace;
use outcome::Outcome;
use report::PlanFile;
use simulate::Setup;
use traffic::Traffic;

/// `forebay plan` of a traffic: prints the number of replicas of `ranks` ranks that meets the
/// objectives, and the results of each tried number.
///
/// # Errors
/// The trace or the profile can't be read, or no number up to `--max-replicas` meets the
/// objectives.
pub fn plan(args: &PlanArgs, ranks: u32) -> Result<()> {
    let (Some(file), Some(profile)) = (&args.trace, &args.sim_profile) else {
        bail!("a traffic is planned of --trace and --sim-profile");
    };
    let profile = Profile::find(profile)?;
    let entries = trace::read(file)?;
    let traffic = Traffic::new(&entries, args.num_prompts, args.speed)?;
    let seeing = args.images.resolve(&profile, &traffic)?;
    let setup = Setup { seeing, ..Setup::new(args, &profile, ranks)? };
    let goal = args.goal();
    report::print_head(args, &profile, &traffic);
    let started = cpu_seconds();
    let mut rows = report::Rows::default();
    let mut tried = Vec::new();
    let answer = search::least(args.max_replicas, |replicas| {
        let outcome = Outcome::of(&simulate::run(&setup, &traffic, replicas), &goal);
        rows.print(&outcome);
        let met = outcome.met;
        tried.push(outcome);
        met
    });
    tried.sort_by_key(|outcome| outcome.replicas);
    let cpu_seconds = cpu_seconds() - started;
    let file =
        PlanFile::new(args, &profile, &traffic, answer, tried, (setup.host_ratio(), cpu_seconds));
    file.print();
    if let Some(path) = &args.output_file {
        let text = serde_json::to_string_pretty(&file)?;
        std::fs::write(path, text + "\n").with_context(|| path.display().to_string())?;
    }
    if answer.is_none() {
        bail!(
            "the objectives are not met by 1 replica up to {} (--max-replicas)",
            args.max_replicas
        );
    }
    Ok(())
}

/// CPU time of this thread.
fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
