//! A server with several models.

mod loader;
mod recipes;

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Error, Result, bail, ensure};
use forebay_machine::Machine;
use forebay_server::{
    CommonParts, FleetBounds, FleetModel, FleetParts, HealthThread, ModelEntry, ModelServer,
    ServerConfig,
};
use parking_lot::Mutex;
use tracing::{info, warn};

use super::listeners::Listeners;
use super::process::Process;
use super::{planned, server};
use crate::flags::{Device, FleetFlags, ServeFlags};
use crate::listening::Bound;
use crate::model::find_python;
use crate::resolve::mem_fraction;
use crate::signals;

use loader::{Loader, PlannedModel};
use recipes::Recipe;

/// The least memory for steps and pages that a model needs, relative to the size of its weights.
/// With less memory, the model is not loaded.
const LEAST_PAGES: f64 = 0.25;

/// Serves several models until a signal. `flags` were parsed from `arguments`.
pub(super) fn run(flags: &ServeFlags, arguments: &[OsString]) -> Result<()> {
    let mut process = Process::start(flags)?;
    let recipes = recipes::read(flags, arguments)?;
    // Listen before downloads that may take minutes, so that a port in use is reported at once.
    let (listeners, access) = Listeners::open(flags)?;
    let python = find_python(flags.run.python.as_deref());
    let mut models = Vec::new();
    for recipe in recipes {
        models.extend(find(recipe, &python, &access)?);
    }
    let Some(first) = models.first() else { bail!("there is no model to serve") };
    let settings = &first.resolved.server;
    let (config, http_threads) = (settings.server.clone(), settings.http_threads);
    for model in &mut models {
        // The server removes the root path before it passes requests to a model.
        model.resolved.server.server.root_path = String::new();
    }
    let bounds = bounds(&flags.fleet, &models)?;
    let entries = entries(&models, &bounds);
    let common = CommonParts::new(&config);
    let loader = Loader {
        models,
        python,
        common: common.clone(),
        log_lines_dropped: process.logs.dropped(),
        log_interval: flags.log.log_interval,
    };
    let parts = FleetParts {
        config,
        common,
        guard: process.guard.clone(),
        models: entries.clone(),
        bounds,
        loader: Arc::new(loader),
    };
    let fleet = ModelServer::new(parts).map_err(Error::msg)?;
    let runtime = server::runtime(http_threads)?;
    let Listeners { main, health } = listeners;
    let health = health.map(|listener| HealthThread::start(listener, fleet.clone())).transpose()?;
    let served = runtime.block_on(serve(&fleet, main, flags, &entries, &mut process));
    drop(health);
    runtime.block_on(fleet.stop());
    runtime.shutdown_timeout(server::LAST_TASKS);
    served
}

/// Finds a model, and downloads missing files. Returns `None` if the model was found in a folder
/// and can't be served.
fn find(recipe: Recipe, python: &Path, access: &ServerConfig) -> Result<Option<PlannedModel>> {
    let found = planned::find(&recipe.flags, &recipe.source, python, access.clone());
    let (model, resolved) = match found {
        Ok(found) => found,
        Err(error) if recipe.is_found => {
            warn!("{} is left out: {error:#}", recipe.source);
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    Ok(Some(PlannedModel { recipe, model, resolved, kept: Mutex::new(None) }))
}

/// The limits on the number and memory of loaded models.
fn bounds(flags: &FleetFlags, models: &[PlannedModel]) -> Result<FleetBounds> {
    let device = |wanted| models.iter().any(|model| model.resolved.device.device == wanted);
    let on_gpu = models.iter().any(|model| model.resolved.device.cuda());
    let most = flags.models_max.map(|most| most as usize);
    ensure!(
        !on_gpu || most.is_none_or(|most| most == 1),
        "--models-max: on a GPU one model is in memory at a time"
    );
    let memory = Machine::here().memory();
    let given = models[0].recipe.flags.schedule.mem_fraction_static;
    let share = mem_fraction(given, false, memory.limit.is_some(), 1);
    let share = memory.available.map(|bytes| (bytes as f64 * share) as u64);
    let share = share.filter(|_| device(Device::Cpu));
    let millis = u64::try_from(flags.models_min_stay.as_millis()).unwrap_or(u64::MAX);
    Ok(FleetBounds {
        memory_bytes: flags.models_memory.or(share).unwrap_or(u64::MAX),
        models_max: if on_gpu { 1 } else { most.unwrap_or(usize::MAX) },
        queue: flags.models_queue as usize,
        stay_ms: millis,
        ..FleetBounds::default()
    })
}

/// The models in the server's list. On a CPU, the planned memory of a model is its weights and the
/// least pages, or its share of the memory limit if that is larger. Elsewhere it is 0.
fn entries(models: &[PlannedModel], bounds: &FleetBounds) -> Vec<ModelEntry> {
    let places = models.len().min(bounds.models_max) as u64;
    let entry = |planned: &PlannedModel| {
        let PlannedModel { recipe, model, resolved, .. } = planned;
        let sizes = model.files.iter().filter_map(|file| file.metadata().ok());
        let stored_bytes: u64 = sizes.map(|file| file.len()).sum();
        let measures = resolved.device.device == Device::Cpu;
        let least = (stored_bytes as f64 * (1.0 + LEAST_PAGES)) as u64;
        let has_pages = !model.pooling.as_ref().is_some_and(|pooling| pooling.whole_prompts());
        let bytes = match measures {
            false => 0,
            true if has_pages && bounds.memory_bytes < u64::MAX => {
                least.max(bounds.memory_bytes / places)
            }
            true => least,
        };
        let millis = |time: std::time::Duration| u64::try_from(time.as_millis());
        ModelEntry {
            names: resolved.model.served_model_names.clone(),
            aliases: recipe.aliases.clone(),
            root: recipe.source.clone(),
            facts: resolved.model.facts.clone(),
            stored_bytes,
            generates: model.pooling.is_none(),
            defaults: resolved.model.sampling_defaults,
            template: model.chat_template.clone().unwrap_or_default(),
            context_length: resolved.engine.context_length,
            measures,
            plan: FleetModel {
                bytes,
                pinned: recipe.pinned,
                idle_ms: recipe.idle.map(|time| millis(time).unwrap_or(u64::MAX)),
            },
        }
    };
    models.iter().map(entry).collect()
}

async fn serve(
    fleet: &ModelServer,
    bound: Bound,
    flags: &ServeFlags,
    entries: &[ModelEntry],
    Process { guard, logs }: &mut Process,
) -> Result<()> {
    let (url, _) = bound.url(flags.access.ssl_certfile.is_some())?;
    let (listener, _file) = bound.listener()?;
    fleet.begin();
    let names: Vec<&str> = entries.iter().map(|entry| &*entry.names[0]).collect();
    let banner = format!(
        "\n  Forebay serves {} models at {url}{}, and loads each when it is asked for:\n    {}\n\n",
        names.len(),
        flags.access.root_path,
        names.join("\n    ")
    );
    logs.lines().push_always(banner.as_bytes());
    let told = signals::count()?;
    let stopped = async {
        tokio::select! {
            () = signals::another(told.clone()) => {}
            () = guard.failed() => {}
        }
    };
    let hurry = signals::another(told.clone());
    forebay_server::serve(listener, fleet.clone(), stopped, hurry).await?;
    if let Some(cause) = guard.cause() {
        bail!("{cause}");
    }
    info!("drained, stopping");
    Ok(())
}
