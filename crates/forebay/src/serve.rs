//! `forebay serve`: starts the parts in order and stops them in reverse.

use std::ffi::OsString;
use std::fs::File;
use std::net::TcpListener;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use forebay_engine::{
    BlockObserver, Clock, EngineThread, Executor, OutputSink, Status, SystemClock,
};
use forebay_hand::{Arena, HandExecutor, HandSpec, RankSpec, Site};
use forebay_outpost::Collectives;
use forebay_replicas::{Listeners, Member, Replicas};
use forebay_server::{
    AppState, BlockLog, EgressConfig, EgressMode, EgressSink, Guard, HealthThread, Intake,
    IntakeMode, Metrics, ModelInfo, PooledModel, PoolingTask, ServerConfig, Sharing, StoreConfig,
    egress, pooled,
};
use forebay_sim::{Recorder, SimClock, SimExecutor};
use forebay_text::{ChatTemplate, Tokenizer};
use tokio::sync::oneshot;
use tracing::{info, warn};

use crate::config::Config;
use crate::flags::{
    AccessFlags, Device, Egress, LoadFormat, Quantization, ServeFlags, visible_keys,
};
use crate::listening::{self, Bound};
use crate::logs::Logs;
use crate::model::{Model, Task, fetch, find_python};
use crate::{
    affinity, collectives, descriptors, dialect, gpus, grammar, hands, images, logs, outposts,
    parent, sampling, secret, signals, simulate, text, threads, vocabulary, watch,
};

/// Steps and registrations that may wait for an egress thread before the engine waits for it.
const EGRESS_STEPS: usize = 1024;

/// Serves until a signal, or until the engine ends.
pub(crate) fn run(flags: &ServeFlags) -> Result<()> {
    let guard = Guard::default();
    let logs = logs::init(&flags.log.lines, flags.log.otlp_traces_endpoint.as_deref(), &guard)?;
    warn_of_visible_keys();
    if let Some(parent) = flags.run.parent {
        parent::end_with(parent)?;
    }
    let name = flags.model_name().context("no model named")?;
    // Taken before minutes of downloads, so that a port in use is said at once.
    let (bound, health, door) = open(flags)?;
    let python = find_python(flags.run.python.as_deref());
    let simulated = flags.run.device == Device::Sim;
    let weights = !simulated && flags.loading.load_format != LoadFormat::Dummy;
    let mut model = fetch(&python, name, flags.source(), weights, flags.run.hand)?;
    let mut config = Config::resolve(flags, &model)?;
    if !config.cpu_affinity.brain.is_empty() {
        affinity::pin(&config.cpu_affinity.brain)?;
    }
    info!(model = %config.model, device = config.device, hand = config.hand.hand, context_length = config.context_length, dtype = config.dtype, "resolved");
    let idle_flags = flags.without_effect_on_sim();
    if simulated && !idle_flags.is_empty() {
        warn!("without effect on a simulated device: {}", idle_flags.join(", "));
    }

    let backend = flags.text.tokenizer_backend.into();
    let added = &model.tokenizer_config;
    let tokenizer = Arc::new(Tokenizer::from_file_with(&model.tokenizer, backend, added)?);
    model.eos_token_ids = vocabulary::check(&tokenizer, &model)?;
    let mut template = chat_template(flags, &model)?;
    if template.is_none() && model.pooling.is_none() {
        warn!("the model has no chat template: /v1/chat/completions will answer 400");
    }
    let (dialect, marks, facts) = dialect::find(&flags.dialect, template.as_mut(), &tokenizer)?;
    let template = template.map(Arc::new);
    config.chat = model.pooling.is_none().then_some(facts);
    let text = flags.text.pool(&config, tokenizer.clone(), template, &guard)?;
    let grammars = grammar::start(&flags.grammar, &tokenizer, &model, &guard)?;
    let metrics = Arc::new(Metrics::new(
        &config.served_model_names[0],
        config.context_length,
        config.dp_size,
    )?);
    let egress_config = EgressConfig {
        threads: config.egress_threads.into(),
        capacity: EGRESS_STEPS,
        window: Duration::from_micros(config.stream_flush_us),
    };
    let (egress_sink, egress) = egress(&metrics, egress_config, &guard)?;
    let (sink, pooling) = sinks(&model, egress_sink, &metrics, &guard)?;

    let namer = secret::namer(flags.sharing.cache_secret_file.as_deref())?;
    let arena = Arena::new(config.arena_bytes).context("no arena")?;
    let (site, placed) = outposts::open(&flags.replicas, &python, &config, &guard)?;
    let (executors, clock) = executors(flags, &python, &config, &model, &tokenizer, &arena, site)?;
    let (ended, engine_ended) = oneshot::channel();
    let on_exit = move || {
        // Nobody waits any more when the server went first.
        let _ = ended.send(());
    };
    let block_log = config.prefix_cache.then(BlockLog::default);
    let listeners = || Listeners {
        sink: sink(),
        blocks: block_log.as_ref().map(|log| Box::new(log.replica()) as Box<dyn BlockObserver>),
    };
    let member = |executor| Member {
        config: config.engine(namer.clone()),
        executor,
        replicas: (0..config.arrangement.members()).map(|_| listeners()).collect(),
    };
    let members = executors.into_iter().map(member).collect();
    let (engine, threads) = Replicas::start(config.replicas(), members, clock, on_exit)?;
    // Only the engines' own clones may keep the streams waiting for an end.
    drop(sink);

    let info = ModelInfo {
        served_names: config.served_model_names.clone(),
        root: name.to_owned(),
        eos: model.eos_token_ids.clone().into(),
        defaults: config.sampling_defaults,
        pooling,
        tokenizer_config: model.tokenizer_config.clone(),
        dialect,
        marks,
        grammars,
        images: images::seen(&flags.images, &model)?,
        fetcher: images::fetcher(&flags.images, &model)?,
        markers: grammar::markers(&tokenizer, dialect),
    };
    let server = ServerConfig {
        sharing: Sharing { namer, across_keys: flags.sharing.share_cache_across_keys },
        guard: guard.clone(),
        log_lines_dropped: logs.dropped(),
        info: serde_json::to_value(&config)?,
        ..settings(flags, &config, door)
    };
    let intake_mode = match config.inline_intake {
        true => IntakeMode::Engine(Arc::new(engine.clone())),
        false => IntakeMode::Threads(config.intake_threads.into()),
    };
    let pixel_bytes = info.images.map_or(0, |images| {
        images.decoding_bytes(config.intake_threads.into(), config.max_request_bytes_in_flight)
    });
    let queue = config.max_queued_requests;
    let intake = Intake::start(intake_mode, Arc::new(arena), queue, pixel_bytes, &guard)?;
    let text = Arc::new(text);
    let state = AppState::new(
        server,
        info,
        Arc::new(engine.clone()),
        text,
        intake,
        egress,
        metrics,
        block_log,
    );
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(config.http_threads.into())
        .thread_name("http")
        .enable_all()
        .build()?;
    threads::shorten_turns()?;
    let health = health.map(|listener| HealthThread::start(listener, &state)).transpose()?;
    let mut life = Life { engine_ended, guard, logs };
    let served = runtime.block_on(serve(bound, state, &engine, &config, flags, &mut life));
    drop(health);
    engine.stop();
    threads.into_iter().for_each(EngineThread::join);
    drop(placed);
    runtime.shutdown_timeout(Duration::from_secs(1));
    drop(life);
    served
}

/// Opens the listeners, the main one and that for health, with the rules of access.
fn open(flags: &ServeFlags) -> Result<(Bound, Option<TcpListener>, ServerConfig)> {
    let bound = Bound::open(&flags.listen)?;
    let health_port = flags.listen.health_port;
    let health = health_port.map(|port| listening::tcp(&flags.listen.host, port)).transpose()?;
    let descriptors = descriptors::raise();
    let max_connections = descriptors::connections(
        flags.listen.max_connections,
        descriptors,
        flags.replicas.ranks.dp_size,
    )?;
    let (api_keys, admin_keys) = (flags.access.keys()?, flags.access.admin_keys()?);
    if let Some(warning) = AccessFlags::shared_administration(&api_keys, &admin_keys) {
        warn!("{warning}");
    }
    let access = flags.access.access(bound.loopback()?.as_deref(), &api_keys);
    let tls = flags.access.tls()?;
    let door = ServerConfig {
        api_keys,
        admin_keys,
        access,
        max_connections,
        tls,
        ..ServerConfig::default()
    };
    Ok((bound, health, door))
}

/// Makes a sink for each replica.
type Sinks = Box<dyn Fn() -> Box<dyn OutputSink>>;

/// The way of the replicas' outputs, and the model if it pools.
fn sinks(
    model: &Model,
    egress: EgressSink,
    metrics: &Arc<Metrics>,
    guard: &Guard,
) -> Result<(Sinks, Option<PooledModel>)> {
    let Some(told) = &model.pooling else {
        return Ok((Box::new(move || Box::new(egress.clone())), None));
    };
    let (sink, outputs) = pooled(Arc::clone(metrics), EGRESS_STEPS, guard)?;
    let pooling = PooledModel {
        task: match told.task {
            Task::Embed => PoolingTask::Embed,
            Task::Score => PoolingTask::Score,
        },
        size: told.size as usize,
        normalize: told.normalize,
        sigmoid: told.sigmoid,
        outputs,
    };
    Ok((Box::new(move || Box::new(sink.clone())), Some(pooling)))
}

/// The server's settings behind its `door`, except for those of a running process.
fn settings(flags: &ServeFlags, config: &Config, door: ServerConfig) -> ServerConfig {
    ServerConfig {
        router_key: flags.sharing.router_key.clone(),
        responses: StoreConfig {
            bytes: flags.responses.response_store_bytes,
            ttl: Duration::from_secs(flags.responses.response_store_ttl),
        },
        hide_cached_tokens: flags.sharing.hide_cached_tokens,
        root_path: flags.access.root_path.clone(),
        trusted_proxies: flags.access.trusted_proxies.clone(),
        max_client_priority: config.max_client_priority.unwrap_or(u32::MAX),
        max_body_bytes: flags.limits.max_body_bytes,
        max_json_bytes: flags.limits.max_json_bytes,
        max_request_bytes_in_flight: config.max_request_bytes_in_flight,
        header_timeout: flags.http.receive_timeout,
        body_timeout: flags.http.receive_timeout,
        send_timeout: flags.http.send_timeout,
        max_unread_bytes: flags.http.max_unread_bytes,
        drain_timeout: flags.http.drain_timeout,
        egress: match config.egress {
            Egress::Direct => EgressMode::Direct,
            Egress::Tasks => EgressMode::Tasks,
            Egress::Naive => EgressMode::Naive,
        },
        stream_interval: config.stream_interval,
        webui: !flags.http.no_webui,
        queue_while_loading: flags.http.queue_while_loading,
        strict_params: flags.http.strict_params,
        max_tokenize_tokens: flags.text.max_tokenize_tokens.map(NonZeroUsize::get),
        ..door
    }
}

/// The events that end the server without a signal, and the logs that report them.
struct Life {
    engine_ended: oneshot::Receiver<()>,
    guard: Guard,
    logs: Logs,
}

/// Says which keys other users of the machine can read.
pub(crate) fn warn_of_visible_keys() {
    let arguments = std::env::args_os().map(|argument| argument.to_string_lossy().into_owned());
    let visible = visible_keys(arguments);
    if !visible.is_empty() {
        let flags = visible.join(", ");
        warn!("{flags}: the list of processes shows the key; a file or the environment does not");
    }
}

/// The executors of the rank groups, and their common clock.
type Executors = (Vec<Box<dyn Executor>>, Arc<dyn Clock>);

/// The hands, or simulated ones. Their steps are recorded if the flags want that.
fn executors(
    flags: &ServeFlags,
    python: &Path,
    config: &Config,
    model: &Model,
    tokenizer: &Arc<Tokenizer>,
    arena: &Arena,
    site: Option<Arc<dyn Site>>,
) -> Result<Executors> {
    let mut executors: Vec<Box<dyn Executor>> = Vec::new();
    let clock: Arc<dyn Clock> = if config.simulated.is_some() {
        let clock = SimClock::real();
        for (group, simulated) in (0..).zip(&config.simulated_groups) {
            let clock = clock.clone();
            let sim = simulate::config(config, simulated, model, tokenizer, clock, group)?;
            executors.push(Box::new(SimExecutor::group(sim, config.arrangement.members()).0));
        }
        Arc::new(clock)
    } else {
        let (program, args) = config.hand.program(python);
        if config.hand.hand == "torch" && site.is_none() {
            crate::python::check(python)?;
        }
        for group in 0..config.arrangement.groups as usize {
            executors.push(Box::new(HandExecutor::new(HandSpec {
                program: program.clone(),
                args: args.clone(),
                // Another machine has its own.
                env: if site.is_some() { Vec::new() } else { hands::environment() },
                config: config.hand(model),
                arena: arena.clone(),
                ranks: ranks(config, group, site.is_some()),
                site: site.clone(),
            })?));
        }
        Arc::new(SystemClock::default())
    };
    // Of one replica only, which was checked.
    if let Some(file) = &flags.run.record_steps
        && let Some(executor) = executors.pop()
    {
        let steps =
            File::create(file).with_context(|| format!("--record-steps {}", file.display()))?;
        executors.push(Box::new(Recorder::new(executor, steps)?));
    }
    Ok((executors, clock))
}

/// The ranks of a group. A rank with a GPU sees no other, so all of them compute on their first.
fn ranks(config: &Config, group: usize, apart: bool) -> Vec<RankSpec> {
    let count = config.arrangement.ranks as usize;
    let hands = (0..count).map(|rank| group * count + rank);
    // Those of other machines are chosen there.
    let together = count > 1 && !apart;
    let collectives = if together { Collectives::Machine } else { Collectives::None };
    let is_set = |name: &str| std::env::var_os(name).is_some();
    let interfaces = collectives::environment(&collectives, None, is_set).into_iter();
    let interfaces = interfaces.map(|(name, value)| (name.into(), value.into()));
    let interfaces: Vec<(OsString, OsString)> = interfaces.collect();
    let gpu = |hand: usize| config.gpus.get(hand).map(|gpu| (gpus::VISIBLE.into(), gpu.into()));
    let rank = |hand: usize| RankSpec {
        env: gpu(hand).into_iter().chain(interfaces.iter().cloned()).collect(),
        cpus: config.cpu_affinity.hands.get(hand).cloned().unwrap_or_default(),
    };
    hands.map(rank).collect()
}

async fn serve(
    bound: Bound,
    state: AppState,
    engine: &Replicas,
    config: &Config,
    flags: &ServeFlags,
    Life { engine_ended, guard, logs }: &mut Life,
) -> Result<()> {
    let (url, curl) = bound.url(flags.access.ssl_certfile.is_some())?;
    let url = format!("{url}{}", flags.access.root_path);
    let (listener, _file) = bound.listener()?;
    let name = config.served_model_names[0].clone();
    let (hand, automatic) = (config.hand.line(), config.quantization == Some(Quantization::Auto));
    let samples = match config.pooling {
        None => sampling::banner_line(&config.sampling_defaults),
        Some(_) => String::new(),
    };
    let dtype = config.dtype;
    let simulated = config.simulated.clone();
    let chat = config.chat.clone();
    let task = config.pooling.as_ref().map(|pooling| pooling.task);
    let greeting = {
        let engine = engine.clone();
        let lines = logs.lines().clone();
        let work = async move {
            if watch::loading(&engine).await {
                let facts = engine.facts();
                let blocks = facts.map_or_else(String::new, |facts| facts.hand.blocks);
                let blocks = watch::blocks_line(&blocks, automatic.then_some(dtype));
                let hand = hand + &blocks + &samples;
                let banner = watch::banner(
                    &url,
                    &curl,
                    &name,
                    task,
                    chat.as_ref(),
                    simulated.as_ref(),
                    &hand,
                );
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
            _ = engine_ended => engine_died = true,
            () = guard.failed() => {}
        }
        greeting.abort();
    };
    let hurry = signals::another(told.clone());
    forebay_server::serve(listener, state, stopped, hurry).await?;
    if engine_died {
        // It panicked, and its state cannot be trusted; or no replica is left that could be
        // started.
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

fn chat_template(flags: &ServeFlags, model: &Model) -> Result<Option<ChatTemplate>> {
    let (bos, eos) = (model.bos_token.as_deref(), model.eos_token.as_deref());
    let tokens = model.named_special_tokens();
    let compile = |source: &str| {
        ChatTemplate::isolated(source, bos, eos, &tokens, text::renderer)
            .context("the chat template, with chats of a few words")
    };
    if let Some(file) = &flags.loading.chat_template {
        let source = std::fs::read_to_string(file)
            .with_context(|| format!("--chat-template {}", file.display()))?;
        return compile(&source).map(Some);
    }
    let tool_use = model.tool_use_template()?;
    let Some(source) = model.chat_template.as_ref().or(tool_use.as_ref()) else { return Ok(None) };
    let template = compile(source)?;
    let other = tool_use.as_ref().filter(|tool_use| *tool_use != source);
    Ok(Some(match other {
        Some(tool_use) => template.with_tool_use(compile(tool_use)?),
        None => template,
    }))
}
