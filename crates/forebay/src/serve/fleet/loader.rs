//! Starts and stops the models of a server with several models.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use anyhow::Result;
use forebay_machine::Machine;
use forebay_server::{CommonParts, Guard, ModelEntry, ModelLoader, StartedModel};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tracing::{Instrument, info_span, warn};

use super::super::engines::Engines;
use super::super::language::Language;
use super::super::outputs::Outputs;
use super::super::server::{Server, Surroundings};
use super::recipes::Recipe;
use crate::flags::Device;
use crate::model::Model;
use crate::resolve::Resolved;
use crate::{threads, watch};

/// The largest share of the free memory that all hands of a model may get together.
const LARGEST_SHARE: f64 = 0.95;

/// A model, with all settings that are decided before it is loaded.
pub(super) struct PlannedModel {
    pub(super) recipe: Recipe,
    pub(super) model: Model,
    pub(super) resolved: Resolved,
    /// The state of a sleeping model; `None`: the next start has to create this state.
    pub(super) kept: Mutex<Option<Kept>>,
}

/// The state of a model that is kept for its next start.
pub(super) struct Kept {
    guard: Guard,
    model: Model,
    resolved: Resolved,
    language: Language,
}

/// Starts the models of a server.
pub(super) struct Loader {
    pub(super) models: Vec<PlannedModel>,
    pub(super) python: PathBuf,
    pub(super) common: CommonParts,
    pub(super) log_lines_dropped: Arc<AtomicU64>,
    pub(super) log_interval: Duration,
}

impl Loader {
    fn prepare(&self, planned: &PlannedModel) -> Result<Kept> {
        let guard = Guard::default();
        let (mut model, mut resolved) = (planned.model.clone(), planned.resolved.clone());
        let language = Language::load(&planned.recipe.flags, &mut model, &mut resolved, &guard)?;
        Ok(Kept { guard, model, resolved, language })
    }

    fn try_start(
        &self,
        planned: &PlannedModel,
        entry: &ModelEntry,
        bytes: u64,
    ) -> Result<StartedModel> {
        let mut place = planned.kept.lock();
        let usable = place.take().filter(|kept| kept.guard.cause().is_none());
        let kept = match usable {
            Some(kept) => kept,
            None => self.prepare(planned)?,
        };
        let Kept { guard, model, resolved, language } = &kept;
        let mut resolved = resolved.clone();
        if resolved.device.device == Device::Cpu
            && let Some(available) = self.available()
        {
            let hands = f64::from(resolved.device.arrangement.hands());
            // After the first load, `bytes` is the memory that the model took. A start needs more
            // for a short time, and should get as many pages as the first load. So it gets at least
            // the planned memory.
            let granted = bytes.max(entry.plan.bytes);
            let share = (granted as f64 / available.max(1) as f64).min(LARGEST_SHARE);
            resolved.hand.mem_fraction_static = share / hands;
        }
        let Recipe { flags, source, .. } = &planned.recipe;
        let (outputs, sinks) = Outputs::start(model, &resolved, guard)?;
        let tokenizer = &language.tokenizer;
        let started =
            Engines::start(flags, &self.python, model, &resolved, tokenizer, &sinks, guard);
        let (engines, ended) = started?;
        // Only the engines may keep senders of the output streams, so that the streams close with
        // them.
        drop(sinks);
        let surroundings = Surroundings {
            guard: guard.clone(),
            log_lines_dropped: Arc::clone(&self.log_lines_dropped),
            common: Some(self.common.clone()),
            aliases: entry.aliases.clone(),
            // The command line refuses adapters in a server of several models.
            adapters: None,
            // Weights are not replaced in a server of several models: other weights would be
            // another model with its own name.
            weights: None,
        };
        let language = language.clone();
        let server =
            Server::new(source, model, &resolved, language, outputs, &engines, surroundings);
        let Server(state) = match server {
            Ok(server) => server,
            Err(error) => {
                engines.stop();
                return Err(error);
            }
        };
        if let Err(error) = threads::shorten_turns() {
            warn!("threads could not be given short time slices: {error:#}");
        }
        let name = resolved.model.served_model_names[0].clone();
        let steps = (!self.log_interval.is_zero()).then(|| {
            let lines = watch::step_log(engines.replicas.clone(), self.log_interval);
            Handle::current().spawn(lines.instrument(info_span!("steps", model = %name)))
        });
        let stop = move || {
            if let Some(steps) = steps {
                steps.abort();
            }
            engines.stop();
        };
        *place = Some(kept);
        Ok(StartedModel { state, ended, stop: Box::new(stop) })
    }
}

impl ModelLoader for Loader {
    fn start(&self, model: usize, entry: &ModelEntry, bytes: u64) -> Result<StartedModel, String> {
        self.try_start(&self.models[model], entry, bytes).map_err(|error| format!("{error:#}"))
    }

    fn forget(&self, model: usize) {
        self.models[model].kept.lock().take();
    }

    fn available(&self) -> Option<u64> {
        Machine::here().memory().available
    }
}
