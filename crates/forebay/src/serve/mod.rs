//! `forebay serve`: starts the components in order, and stops them in reverse order.

mod adapters;
mod engines;
mod fleet;
mod language;
mod listeners;
mod outputs;
mod overlays;
mod planned;
mod process;
mod server;
mod trainer;
mod weights;

use std::ffi::OsString;
use std::path::Path;

use anyhow::{Context, Result};
use forebay_server::ServerConfig;

use crate::affinity;
use crate::flags::ServeFlags;
use crate::model::{Model, find_python};
use crate::resolve::Resolved;

use engines::Engines;
use language::Language;
use listeners::Listeners;
use outputs::Outputs;
use process::Process;
use server::{Server, Surroundings};

/// Serves until a signal arrives or the engine ends. `flags` were parsed from `arguments`.
pub(crate) fn run(flags: &ServeFlags, arguments: &[OsString]) -> Result<()> {
    if flags.is_fleet() {
        return fleet::run(flags, arguments);
    }
    let mut process = Process::start(flags)?;
    let name = flags.model_name().context("no model named")?;
    // Listen before downloads that may take minutes, so that a port in use is reported at once.
    let (listeners, access) = Listeners::open(flags)?;
    let python = find_python(flags.run.python.as_deref());
    let (mut model, mut resolved) = load(flags, name, &python, access)?;
    // Read adapters before a hand starts, so that a faulty adapter is reported at once.
    let adapters = adapters::settings(flags, &model, &resolved)?;
    let guard = &process.guard;
    let language = Language::load(flags, &mut model, &mut resolved, guard)?;
    let (outputs, sinks) = Outputs::start(&model, &resolved, guard)?;
    let tokenizer = &language.tokenizer;
    let (engines, ended) =
        Engines::start(flags, &python, &model, &resolved, tokenizer, &sinks, guard)?;
    // Only the engines may keep senders of the output streams, so that the streams close when the
    // engines end.
    drop(sinks);
    let surroundings = Surroundings {
        guard: guard.clone(),
        log_lines_dropped: process.logs.dropped(),
        common: None,
        aliases: Vec::new(),
        adapters,
        weights: weights::settings(flags, &python, &resolved),
    };
    let server = Server::new(name, &model, &resolved, language, outputs, &engines, surroundings)?;
    server.run(flags, listeners, &resolved, (engines, ended), &mut process)
}

/// Downloads the model, resolves its settings, and binds the brain to its processors.
fn load(
    flags: &ServeFlags,
    name: &str,
    python: &Path,
    access: ServerConfig,
) -> Result<(Model, Resolved)> {
    let (model, resolved) = planned::find(flags, name, python, access)?;
    let brain = &resolved.device.cpu_affinity.brain;
    if !brain.is_empty() {
        affinity::pin(brain)?;
    }
    Ok((model, resolved))
}
