//! `forebay serve`: starts the parts in order and stops them in reverse.

mod engines;
mod language;
mod listeners;
mod outputs;
mod process;
mod server;

use std::path::Path;

use anyhow::{Context, Result};
use forebay_server::ServerConfig;
use tracing::{info, warn};

use crate::affinity;
use crate::flags::{Device, LoadFormat, ServeFlags};
use crate::model::{Model, fetch, find_python};
use crate::resolve::Resolved;

use engines::Engines;
use language::Language;
use listeners::Listeners;
use outputs::Outputs;
use process::Process;
use server::Server;

pub(crate) use process::warn_of_visible_keys;

/// Serves until a signal, or until the engine ends.
pub(crate) fn run(flags: &ServeFlags) -> Result<()> {
    let mut process = Process::start(flags)?;
    let name = flags.model_name().context("no model named")?;
    // Taken before minutes of downloads, so that a port in use is said at once.
    let (listeners, access) = Listeners::open(flags)?;
    let python = find_python(flags.run.python.as_deref());
    let (mut model, mut resolved) = load(flags, name, &python, access)?;
    let guard = &process.guard;
    let language = Language::load(flags, &mut model, &mut resolved, guard)?;
    let (outputs, sinks) = Outputs::start(&model, &resolved, guard)?;
    let tokenizer = &language.tokenizer;
    let engines = Engines::start(flags, &python, &model, &resolved, tokenizer, &sinks, guard)?;
    // Only the engines' own clones may keep the streams waiting for an end.
    drop(sinks);
    let server = Server::new(name, &model, &resolved, language, outputs, &engines, &process)?;
    server.run(flags, listeners, &resolved, engines, &mut process)
}

/// Fetches the model, and resolves the settings for it.
fn load(
    flags: &ServeFlags,
    name: &str,
    python: &Path,
    access: ServerConfig,
) -> Result<(Model, Resolved)> {
    let simulated = flags.run.device == Device::Sim;
    let weights = !simulated && flags.loading.load_format != LoadFormat::Dummy;
    let model = fetch(python, name, flags.source(), weights, flags.run.hand)?;
    let resolved = Resolved::new(flags, &model, access)?;
    let brain = &resolved.device.cpu_affinity.brain;
    if !brain.is_empty() {
        affinity::pin(brain)?;
    }
    let (hand, context_length) = (&resolved.hand, resolved.engine.context_length);
    info!(
        model = %resolved.model.model,
        device = %hand.device,
        hand = resolved.choice.hand,
        context_length,
        dtype = %hand.dtype,
        "resolved"
    );
    let idle_flags = flags.without_effect_on_sim();
    if simulated && !idle_flags.is_empty() {
        warn!("without effect on a simulated device: {}", idle_flags.join(", "));
    }
    Ok((model, resolved))
}
