//! The command line: the commands, with flags declared by the crates that do the work.

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
    /// The exit status is 3 if all requests have answers and some of these are errors.
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
    /// A hand in Rust, as `serve` starts it: its socket is descriptor 3.
    #[command(hide = true)]
    Hand,
    /// Render chats, as `serve` starts it: its socket is standard input.
    #[command(hide = true)]
    Render,
    /// Compute how many replicas a recorded traffic needs, or how much memory a model's ranks need.
    #[command(args_override_self = true)]
    Plan(Box<PlanFlags>),
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Send requests to a server and measure it.
    #[command(args_override_self = true)]
    Serve(Box<ServeArgs>),
    /// Make a page of result files.
    Report(ReportArgs),
}

#[derive(Debug, Subcommand)]
pub(crate) enum EvalCommand {
    /// Few-shot accuracy on GSM8K, grade school mathematics.
    Gsm8k(Box<Gsm8kArgs>),
}

#[derive(Debug, Subcommand)]
pub(crate) enum SimCommand {
    /// Make a profile from measured step times.
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
