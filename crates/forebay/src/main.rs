//! The `forebay` binary: turns flags into configuration, and connects the crates.

mod affinity;
mod chat;
mod collectives;
mod command;
mod descriptors;
mod dialect;
mod doctor;
mod flags;
mod gpus;
mod grammar;
mod hands;
mod lines;
mod listening;
mod logs;
mod model;
mod models;
mod outposts;
mod parent;
mod placement;
mod plan;
mod python;
mod resolve;
mod route;
mod sampling;
mod script;
mod secret;
mod serve;
mod signals;
mod simulate;
mod text;
mod threads;
mod tokenizers;
mod vocabulary;
mod watch;
mod worker;

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;

use crate::command::{BenchCommand, Command, EvalCommand, Flags, SimCommand};
use crate::flags::foreign;
use crate::tokenizers::Tokenizers;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The exit status for an invalid command line, the same as clap's.
const WRONG_USAGE: u8 = 2;

fn main() -> ExitCode {
    let translated = match foreign::translate(std::env::args_os()) {
        Ok(translated) => translated,
        Err(lines) => {
            say(format!("error: {lines}"));
            return ExitCode::from(WRONG_USAGE);
        }
    };
    let arguments = translated.arguments;
    let command = Flags::parse_from(&arguments).command;
    for note in translated.notes {
        say(format!("note: {note}"));
    }
    if matches!(command, Command::Hand) {
        return forebay_cpuhand::main();
    }
    match run(command, &arguments) {
        Ok(status) => status,
        Err(error) => {
            say(format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Writes the last line of the process, without waiting long for a full pipe.
fn say(line: String) {
    let (done, said) = std::sync::mpsc::channel();
    let write = move || {
        eprintln!("{line}");
        // The caller may no longer wait.
        let _ = done.send(());
    };
    if std::thread::Builder::new().spawn(write).is_ok() {
        let _ = said.recv_timeout(lines::LAST_LINES);
    }
}

fn run(command: Command, arguments: &[OsString]) -> Result<ExitCode> {
    if !matches!(command, Command::Serve(_) | Command::Route(_) | Command::Worker(_)) {
        logs::init_warnings()?;
    }
    let done = match command {
        Command::Serve(mut flags) => {
            flags.settle_pd()?;
            serve::run(&flags, arguments)
        }
        Command::Route(flags) => route::run(&flags),
        Command::Worker(flags) => worker::run(&flags),
        Command::Chat(args) => chat::run(&args),
        Command::RunBatch(args) => return chat::run_batch(&args),
        Command::Bench(BenchCommand::Serve(args)) => forebay_bench::serve(&args, &Tokenizers),
        Command::Bench(BenchCommand::Report(args)) => forebay_bench::report(&args),
        Command::Eval(EvalCommand::Gsm8k(args)) => forebay_bench::gsm8k(&args),
        Command::Sim(SimCommand::Fit(flags)) => simulate::run_fit(&flags),
        Command::Sim(SimCommand::Profiles(flags)) => simulate::run_profiles(&flags),
        Command::Pull(flags) => models::pull(&flags),
        Command::Ls(flags) => models::list(&flags),
        Command::Rm(flags) => models::remove(&flags),
        Command::Doctor(flags) => doctor::run(&flags),
        Command::Plan(flags) => plan::run(&flags),
        Command::Hand => Ok(()),
        Command::Render => Ok(forebay_text::render_templates()?),
    };
    done.map(|()| ExitCode::SUCCESS)
}
