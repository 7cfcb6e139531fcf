//! The HTTP server, from its start until it has stopped.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use forebay_engine::Status;
use forebay_replicas::Replicas;
use forebay_server::{
    AdapterSettings, AppState, BatchConfig, BatchStore, CommonParts, Guard, HealthThread, Intake,
    IntakeMode, ModelInfo, PdParts, ServerParts, WeightSettings,
};
use tokio::runtime::Runtime;
use tracing::info;

use super::engines::{EngineEnd, Engines};
use super::language::Language;
use super::listeners::Listeners;
use super::outputs::Outputs;
use super::process::Process;
use crate::flags::ServeFlags;
use crate::listening::Bound;
use crate::model::Model;
use crate::resolve::{Resolved, model_name, why_one_pool};
use crate::{grammar, sampling, signals, threads, watch};

/// The assembled server.
pub(super) struct Server(pub(super) AppState);

/// Services of the process, and settings from the command line, that a model's server uses.
pub(super) struct Surroundings {
    pub(super) guard: Guard,
    pub(super) log_lines_dropped: Arc<AtomicU64>,
    /// The parts that the models of a server share; `None` if there is only one model.
    pub(super) common: Option<CommonParts>,
    /// Names that requests may use but model lists omit.
    pub(super) aliases: Vec<String>,
    /// The settings of adapters; `None` if requests can't name adapters.
    pub(super) adapters: Option<AdapterSettings>,
    /// The settings of weight updates; `None` if the weights can't be replaced.
    pub(super) weights: Option<WeightSettings>,
}

/// How long tasks may run after the runtime begins to shut down.
pub(super) const LAST_TASKS: Duration = Duration::from_secs(1);

/// Creates the runtime of the HTTP threads.
pub(super) fn runtime(threads: u16) -> io::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads.into())
        .thread_name("http")
        .enable_all()
        .build()
}

impl Server {
    /// Builds the server. `name` is the model as typed.
    pub(super) fn new(
        name: &str,
        model: &Model,
        resolved: &Resolved,
        language: Language,
        outputs: Outputs,
        engines: &Engines,
        surroundings: Surroundings,
    ) -> Result<Self> {
        let Surroundings { guard, log_lines_dropped, common, aliases, adapters, weights } =
            surroundings;
        let images = resolved.images.as_ref();
        let info = ModelInfo {
            served_names: resolved.model.served_model_names.clone(),
            aliases,
            root: name.to_owned(),
            facts: resolved.model.facts.clone(),
            eos: model.eos_token_ids.clone().into(),
            defaults: resolved.model.sampling_defaults,
            pooling: outputs.pooling,
            tokenizer_config: model.tokenizer_config.clone(),
            dialect: language.dialect,
            marks: language.marks,
            grammars: language.grammars,
            images: images
                .zip(model.images.as_ref())
                .map(|(settings, images)| settings.model(images))
                .transpose()?,
            fetcher: images.map(|settings| settings.fetcher()).transpose()?,
            markers: grammar::markers(&language.tokenizer, language.dialect),
        };
        let settings = &resolved.server;
        let engine = Arc::new(engines.replicas.clone());
        let mode = match settings.inline_intake {
            true => IntakeMode::Engine(engine.clone()),
            false => IntakeMode::Threads(settings.intake_threads.into()),
        };
        let pixel_bytes = info.images.map_or(0, |images| {
            let bytes = settings.server.max_request_bytes_in_flight;
            images.decoding_bytes(settings.intake_threads.into(), bytes)
        });
        let (arena, queue) = (engines.arena.clone(), resolved.engine.max_queued_requests);
        let batches = settings.server.batches.as_ref().map(open_batches).transpose()?;
        Ok(Self(AppState::new(ServerParts {
            config: settings.server.clone(),
            info: serde_json::to_value(resolved)?,
            guard: guard.clone(),
            log_lines_dropped,
            model: info,
            engine,
            text: language.text,
            intake: Intake::start(mode, Arc::new(arena), queue, pixel_bytes, &guard)?,
            egress: outputs.egress,
            metrics: outputs.metrics,
            blocks: outputs.blocks,
            batches,
            adapters,
            weights,
            pd: pd_parts(model, resolved, engines)?,
            common,
        })))
    }

    /// Serves until a signal arrives or an engine ends, then stops everything.
    pub(super) fn run(
        self,
        flags: &ServeFlags,
        Listeners { main, health }: Listeners,
        resolved: &Resolved,
        (engines, ended): (Engines, EngineEnd),
        process: &mut Process,
    ) -> Result<()> {
        let runtime = runtime(resolved.server.http_threads)?;
        threads::shorten_turns()?;
        let health =
            health.map(|listener| HealthThread::start(listener, self.0.clone())).transpose()?;
        let served =
            runtime.block_on(self.serve(main, (&engines, ended), resolved, flags, process));
        drop(health);
        engines.stop();
        runtime.shutdown_timeout(LAST_TASKS);
        served
    }

    async fn serve(
        self,
        bound: Bound,
        (engines, ended): (&Engines, EngineEnd),
        resolved: &Resolved,
        flags: &ServeFlags,
        Process { guard, logs }: &mut Process,
    ) -> Result<()> {
        let (url, curl) = bound.url(flags.access.ssl_certfile.is_some())?;
        let url = format!("{url}{}", flags.access.root_path);
        let (listener, _file) = bound.listener()?;
        let engine = &engines.replicas;
        let banner = banner(engine.clone(), resolved.clone(), url, curl);
        let greeting = {
            let lines = logs.lines().clone();
            let work = async move {
                if let Some(banner) = banner.await {
                    lines.push_always(format!("{banner}\n").as_bytes());
                }
            };
            tokio::spawn(guard.clone().task("the banner", work))
        };
        if !flags.log.log_interval.is_zero() {
            let lines = watch::step_log(engine.clone(), flags.log.log_interval);
            tokio::spawn(guard.clone().task("the step log", lines));
        }
        let told = signals::count()?;
        let mut engine_died = false;
        let stopped = async {
            tokio::select! {
                () = signals::another(told.clone()) => {}
                _ = ended => engine_died = true,
                () = guard.failed() => {}
            }
            greeting.abort();
        };
        let hurry = signals::another(told.clone());
        forebay_server::serve(listener, self.0, stopped, hurry).await?;
        if engine_died {
            // The engine panicked, so its state can't be trusted, or no replica is left that could
            // be started.
            for report in engine.reports() {
                if let Status::Failed(reason) = report.status {
                    bail!("{reason}");
                }
            }
        }
        if let Some(cause) = guard.cause() {
            bail!("{cause}");
        }
        info!("drained, stopping");
        Ok(())
    }
}

/// Returns the banner once the hand is ready; `None` if the hand never becomes ready.
async fn banner(engine: Replicas, resolved: Resolved, url: String, curl: String) -> Option<String> {
    if !watch::loading(&engine).await {
        return None;
    }
    let why_one_pool = why_one_pool(&resolved.engine, &resolved.device).unwrap_or("a flag says so");
    let drafts = watch::drafts_line(resolved.engine.drafts.is_some());
    let Resolved { model, device, choice, hand, .. } = resolved;
    let samples = match model.pooling {
        None => sampling::banner_line(&model.sampling_defaults),
        Some(_) => String::new(),
    };
    let facts = engine.facts();
    let facts = facts.map(|facts| facts.hand).unwrap_or_default();
    let windows = watch::windows_line(&facts, why_one_pool);
    let blocks = facts.blocks;
    let automatic = hand.quantization.as_deref() == Some("auto");
    let blocks = watch::blocks_line(&blocks, automatic.then_some(&hand.dtype));
    Some(watch::banner(
        &url,
        &curl,
        &model.served_model_names[0],
        model.pooling.as_ref().map(|pooling| pooling.task),
        model.chat.as_ref(),
        device.simulated.as_ref(),
        &(choice.line() + &blocks + &windows + drafts + &samples),
    ))
}

/// The components of a server that computes only a part of each request; `None` if it computes
/// whole requests.
fn pd_parts(model: &Model, resolved: &Resolved, engines: &Engines) -> Result<Option<PdParts>> {
    let Some(config) = resolved.disaggregation.clone() else { return Ok(None) };
    let model = model_name(model, &resolved.hand)?;
    Ok(Some(PdParts { config, model, tiers: engines.tiers.clone() }))
}

fn open_batches(config: &BatchConfig) -> Result<Arc<BatchStore>> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let store = BatchStore::open(config.clone(), now);
    let store = store.with_context(|| format!("--batch-dir {}", config.batch_dir.display()))?;
    Ok(Arc::new(store))
}
