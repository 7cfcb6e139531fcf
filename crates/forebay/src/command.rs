//! The command line. Other crates, which do the work, declare most of the flags.

use clap::{Parser, Subcommand};
use forebay_bench::{Gsm8kArgs, ReportArgs, ServeArgs};
use forebay_chat::{BatchArgs, ChatArgs};

use crate::doctor::DoctorFlags;
use crate::flags::ServeFlags;
use crate::models::{ListFlags, PullFlags, RemoveFlags};
use crate::plan::PlanFlags;
use crate::route::RouteFlags;
use crate::simulate::{FitFlags, ProfilesFlags};
use crate::worker::WorkerFlags;

/// LLM serving whose host side never makes the accelerator wait.
#[derive(Debug, Parser)]
#[command(name = "forebay", version, about)]
pub(crate) struct Flags {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve a model behind an OpenAI-compatible API.
    #[command(args_override_self = true)]
    Serve(Box<ServeFlags>),
    /// Spread requests over several servers behind one address.
    #[command(args_override_self = true)]
    Route(Box<RouteFlags>),
    /// Join this machine's devices to a remote `serve --listen-hands`.
    Worker(WorkerFlags),
    /// Chat in this terminal, with a running server or with one that is started for a model.
    Chat(Box<ChatArgs>),
    /// Answer a file of requests, with a running server or with one that is started for a model.
    /// The exit status is 3 if every request has an answer and some answers are errors.
    RunBatch(Box<BatchArgs>),
    /// Download a model for a later `serve`, and print its path.
    Pull(PullFlags),
    /// List the downloaded models, or those of a running server.
    Ls(ListFlags),
    /// Remove a downloaded model. Files shared with its other revisions are kept.
    Rm(RemoveFlags),
    /// Report facts about this machine that matter for serving, with advice. The exit status is 1
    /// if something prevents serving.
    Doctor(DoctorFlags),
    /// Measure a server, and show the results.
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Measure the accuracy of a served model.
    #[command(subcommand)]
    Eval(EvalCommand),
    /// Manage profiles of simulated devices, for `serve --device sim` and for `plan`.
    #[command(subcommand)]
    Sim(SimCommand),
    /// Run a hand in Rust. `serve` starts this process with a socket as descriptor 3.
    #[command(hide = true)]
    Hand,
    /// Render chat templates. `serve` starts this process with a socket as standard input.
    #[command(hide = true)]
    Render,
    /// Compute how many replicas recorded traffic needs, or how much memory a model's ranks need.
    #[command(args_override_self = true)]
    Plan(Box<PlanFlags>),
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Send requests to a server, and measure the responses.
    #[command(args_override_self = true)]
    Serve(Box<ServeArgs>),
    /// Create a page of charts from result files.
    Report(ReportArgs),
}

#[derive(Debug, Subcommand)]
pub(crate) enum EvalCommand {
    /// Measure few-shot accuracy on GSM8K, a set of grade school mathematics questions.
    Gsm8k(Box<Gsm8kArgs>),
}

#[derive(Debug, Subcommand)]
pub(crate) enum SimCommand {
    /// Create a profile from measured step times.
    Fit(FitFlags),
    /// List the built-in profiles, or print one as a file.
    Profiles(ProfilesFlags),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn flags_are_consistent() {
        Flags::command().debug_assert();
    }
}
