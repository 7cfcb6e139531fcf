//! Capacity planning: the number of replicas that recorded traffic needs, and the memory of ranks.
//!
//! `simulate` runs the traffic against replicas in virtual time: real schedulers, with a profile's
//! step times in place of devices. `search` finds the smallest number of replicas that meets the
//! objectives. With disaggregated prefill (`pd`, `handing`), it finds the best split of a number of
//! replicas. `outcome` computes the results for a number of replicas, and `report` prints them.
//! `memory` describes the weights and pages of ranks.
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
mod handing;
mod images;
mod memory;
mod outcome;
mod pd;
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
pub use pd::{PdArgs, PdChoice, PdSplit};
pub use sparse::{KvSave, KvSaveOrder, SparseArgs, hot_row_tokens};

use args::Goal;
use forebay_bench::dataset::trace;
use outcome::Outcome;
use pd::Division;
use report::PlanFile;
use simulate::Setup;
use traffic::Traffic;

/// Plans recorded traffic: prints the number of replicas, of `ranks` ranks each, that meets the
/// objectives, and the results for each number that was tried.
///
/// # Errors
/// The trace or the profile can't be read, or no number of replicas up to `--max-replicas` meets
/// the objectives.
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
    let mut trial = Trial::new(&setup, &traffic, &goal);
    let answer = match args.pd.pd {
        None => search::least(args.max_replicas, |replicas| trial.of(replicas, None).met),
        Some(choice) => {
            try_splits(args, choice, &mut trial)?;
            None
        }
    };
    let mut tried = trial.tried;
    tried.sort_by_key(|outcome| (outcome.replicas, outcome.prefill()));
    let cpu_seconds = cpu_seconds() - started;
    let file =
        PlanFile::new(args, &profile, &traffic, answer, tried, (setup.host_ratio(), cpu_seconds));
    file.print();
    if let Some(path) = &args.output_file {
        let text = serde_json::to_string_pretty(&file)?;
        std::fs::write(path, text + "\n").with_context(|| path.display().to_string())?;
    }
    if answer.is_none() && args.pd.pd.is_none() {
        bail!(
            "the objectives are not met by 1 replica up to {} (--max-replicas)",
            args.max_replicas
        );
    }
    Ok(())
}

/// The outcomes of the tried numbers of replicas. Each is printed as soon as it is known.
struct Trial<'a> {
    setup: &'a Setup,
    traffic: &'a Traffic,
    goal: &'a Goal,
    rows: report::Rows,
    tried: Vec<Outcome>,
}

impl<'a> Trial<'a> {
    fn new(setup: &'a Setup, traffic: &'a Traffic, goal: &'a Goal) -> Self {
        Self { setup, traffic, goal, rows: report::Rows::default(), tried: Vec::new() }
    }

    /// Simulates `replicas` replicas, and returns the outcome.
    fn of(&mut self, replicas: u32, division: Option<Division>) -> &Outcome {
        let setup = Setup { division, ..self.setup.clone() };
        let outcome = Outcome::of(&simulate::run(&setup, self.traffic, replicas), self.goal);
        self.rows.print(&outcome);
        self.tried.push(outcome);
        &self.tried[self.tried.len() - 1]
    }
}

/// Simulates replicas that each do both prefill and decode, and then splits of the same number of
/// replicas.
fn try_splits(args: &PlanArgs, choice: PdChoice, trial: &mut Trial<'_>) -> Result<()> {
    if trial.setup.seeing.is_some() {
        bail!("--pd: images are not handed on yet, and the trace has some");
    }
    let local_tokens = args.pd.pd_local_tokens;
    let division = |prefill| Some(Division { prefill, local_tokens });
    match choice {
        PdChoice::Split(split) => {
            trial.of(split.replicas(), None);
            trial.of(split.replicas(), division(split.prefill));
        }
        PdChoice::Auto if args.max_replicas < 2 => bail!("--pd auto: --max-replicas from 2 on"),
        PdChoice::Auto => {
            trial.of(args.max_replicas, None);
            search::best_split(args.max_replicas, |prefill| {
                trial.of(args.max_replicas, division(prefill)).score()
            });
        }
    }
    Ok(())
}

/// The CPU time that this thread has used, in seconds.
fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
