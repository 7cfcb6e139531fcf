//! The `forebay` binary: flags to configuration, and the parts put together.

mod config;
mod flags;
mod logs;
mod model;
mod serve;
mod watch;

use std::process::ExitCode;

use clap::Parser;

use crate::flags::{Command, Flags};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let Command::Serve(flags) = Flags::parse().command;
    match serve::run(&flags) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
