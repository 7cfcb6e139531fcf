//! `forebay bench serve`: runs a benchmark and prints its table.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use forebay_text::Tokenizer;
use http::Method;
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::client::{Client, Dialect, Live, PlannedRequest, RequestOptions, Target};
use crate::cpu::Trees;
use crate::flags::ServeArgs;
use crate::item::{Part, Prompt, WorkItem};
use crate::output::{Costs, Rate, RunFile, Settings};
use crate::progress::Progress;
use crate::record::{Outcome, Record};
use crate::run::{self, Driven, Work};
use crate::table::Table;
use crate::tokens::{self, TokenizerFinder};
use crate::{arrival, dataset, report, summary};

/// The largest number of tokens that a warm-up request generates.
const WARMUP_TOKENS: u32 = 32;
/// The pause between the warm-up and the run, during which the server becomes idle.
const PAUSE: Duration = Duration::from_secs(1);
/// The pause between two checks of a server that is not ready.
const READY_PAUSE: Duration = Duration::from_millis(200);

/// Measures a server: sends it the requests of a dataset by a schedule, prints the table, and
/// writes the requested files.
///
/// # Errors
/// The server can't be reached, the dataset can't be created, a file can't be written, or no
/// request succeeded.
pub fn serve(args: &ServeArgs, finder: &dyn TokenizerFinder) -> Result<()> {
    let goals = args.result.goals()?;
    run::raise_file_limit();
    let runtime = run::runtime(usize::from(args.run.client_threads), args.run.precise)?;
    let target = Target::new(&args.server)?;
    let client = Arc::new(Client::new(target, args.request.request_timeout));
    runtime.block_on(wait_until_ready(&client, args.run.ready_check_timeout))?;
    let model = Model::find(args, &client, &runtime)?;
    let tokenizer = finder
        .find(&model.tokenizer)
        .with_context(|| format!("no tokenizer of {}", model.tokenizer))?;

    let items = dataset::load(&args.dataset, args.run.seed, Some(&tokenizer))?;
    ensure!(!items.is_empty(), "the dataset is empty");
    let schedule = arrival::schedule(&args.arrivals, args.run.seed, &items)?;
    let options = options(args, &model);
    warm_up(args, &client, &runtime, &options, &items[0])?;

    let (work, asked) = prepare(args, &options, items, schedule)?;
    let count = work.len();
    let (driven, costs) = measure(args, &runtime, &client, work);
    let accept_length = runtime.block_on(accept_length(&client));
    // Aborts the tasks of an interrupted run.
    drop(runtime);
    if driven.interrupted {
        let unfinished = count - driven.sent.len();
        eprintln!(
            "interrupted: {unfinished} requests were not sent or had not ended, and do not count"
        );
    }

    let records = records(driven, &asked, &tokenizer)?;
    let summary = summary::summarise(&records, &goals, &tokenizer)?;
    let file = RunFile {
        settings: settings(args, model.served, count),
        goodput_slos: goals,
        accept_length,
        costs: costs.per_token(summary.total_output_tokens),
        details: args.result.output_details.then(|| summary::details(&records)),
        summary,
    };
    let generates = args.server.backend.dialect() != Dialect::Embeddings;
    print!("\n{}", Table { run: &file, generates });
    if let Some(path) = &args.result.output_file {
        file.append(path)?;
    }
    if let Some(path) = &args.result.report {
        report::report_run(path, serde_json::to_value(&file)?, &args.result.compare)?;
    }
    match records.iter().find(|record| record.outcome == Outcome::Success) {
        Some(_) => Ok(()),
        None => bail!("no request succeeded"),
    }
}

async fn wait_until_ready(client: &Client, patience: Duration) -> Result<()> {
    let start = Instant::now();
    loop {
        let problem = match client.status(Method::GET, "/v1/models").await {
            Ok((status, _)) if status < 500 => return Ok(()),
            Ok((status, _)) => anyhow::anyhow!("it answers HTTP {status}"),
            Err(error) => error,
        };
        if start.elapsed() >= patience {
            return Err(problem.context("the server is not ready"));
        }
        tokio::time::sleep(READY_PAUSE).await;
    }
}

/// The names of the model.
struct Model {
    /// The server's name for the model.
    served: String,
    /// The model whose tokenizer counts tokens.
    tokenizer: String,
}

impl Model {
    fn find(args: &ServeArgs, client: &Client, runtime: &Runtime) -> Result<Self> {
        let flags = &args.request;
        let (model, root) = match &flags.model {
            Some(model) => (model.clone(), None),
            None => runtime
                .block_on(client.first_model())
                .context("the server does not say its model; name it with --model")?,
        };
        Ok(Self {
            served: flags.served_model_name.clone().unwrap_or_else(|| model.clone()),
            tokenizer: flags.tokenizer.clone().or(root).unwrap_or(model),
        })
    }
}

fn options(args: &ServeArgs, model: &Model) -> RequestOptions {
    let flags = &args.request;
    RequestOptions {
        model: model.served.clone(),
        stream: !flags.disable_stream,
        continuous_usage: flags.continuous_usage,
        temperature: flags.temperature,
        ignore_eos: !flags.disable_ignore_eos,
        stop: Vec::new(),
        extra: flags.extra_request_body.clone().unwrap_or_default(),
    }
}

/// Sends several copies of the first request at the same time. Then, if flags require it, flushes
/// the server's cache and pauses.
fn warm_up(
    args: &ServeArgs,
    client: &Arc<Client>,
    runtime: &Runtime,
    options: &RequestOptions,
    first: &WorkItem,
) -> Result<()> {
    let count = args.run.warmup_requests as usize;
    if count > 0 {
        let item =
            WorkItem { output_tokens: first.output_tokens.min(WARMUP_TOKENS), ..first.clone() };
        let body = options.body(args.server.backend, &item)?;
        let work = Work { body, output_tokens: item.output_tokens, arrival: Duration::ZERO };
        let drive = run::drive(
            Arc::clone(client),
            vec![work; count],
            args.run.max_concurrency.map(|most| most as usize),
            Duration::MAX,
            Arc::new(Live::default()),
        );
        let driven = runtime.block_on(drive);
        ensure!(!driven.interrupted, "interrupted");
        if !driven.sent.iter().any(|sent| sent.reply.succeeded()) {
            let reply = driven.sent.into_iter().next().context("no warm-up request ended")?.reply;
            match reply.into_record(0, &PlannedRequest::default()).0.outcome {
                Outcome::Failed(message) => bail!("the warm-up failed: {message}"),
                Outcome::Success => {}
            }
        }
    }
    if args.run.flush_cache {
        runtime
            .block_on(client.call(Method::POST, "/flush_cache"))
            .context("cannot flush the server's cache")?;
    }
    if count > 0 || args.run.flush_cache {
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// Converts items into request bodies in advance, so that sending a request only writes the body.
fn prepare(
    args: &ServeArgs,
    options: &RequestOptions,
    items: Vec<WorkItem>,
    schedule: Vec<Duration>,
) -> Result<(Vec<Work>, Vec<PlannedRequest>)> {
    let mut work = Vec::with_capacity(items.len());
    let mut asked = Vec::with_capacity(items.len());
    for (item, arrival) in items.into_iter().zip(schedule) {
        let body = options.body(args.server.backend, &item)?;
        work.push(Work { body, output_tokens: item.output_tokens, arrival });
        asked.push(PlannedRequest {
            text_tokens: item.text_tokens,
            output_tokens: item.output_tokens,
            images: matches!(&item.prompt, Prompt::Parts(parts)
                if parts.iter().any(|part| matches!(part, Part::Image(_)))),
        });
    }
    Ok((work, asked))
}

/// Carries out the run, and measures CPU time and server metrics.
fn measure(
    args: &ServeArgs,
    runtime: &Runtime,
    client: &Arc<Client>,
    work: Vec<Work>,
) -> (Driven, Costs) {
    let live = Arc::new(Live::default());
    let progress =
        (!args.run.no_progress).then(|| Progress::start(Arc::clone(&live), work.len() as u64));
    let servers = (!args.run.server_pid.is_empty()).then(|| Trees::of(&args.run.server_pid));
    let late_after = Duration::from_secs_f64(args.run.late_threshold_ms / 1e3);
    let driven = runtime.block_on(run::drive(
        Arc::clone(client),
        work,
        args.run.max_concurrency.map(|most| most as usize),
        late_after,
        live,
    ));
    let server_cpu = servers.map(|before| before.used_since());
    drop(progress);
    let lateness = || driven.sent.iter().map(|sent| Duration::from_micros(sent.late_us));
    let costs = Costs {
        late_sends: lateness().filter(|late| *late > late_after).count() as u64,
        late_threshold_ms: args.run.late_threshold_ms,
        max_lateness_ms: lateness().max().unwrap_or_default().as_secs_f64() * 1e3,
        client_cpu_seconds: driven.client_cpu.as_secs_f64(),
        server_cpu,
        ..Costs::default()
    };
    (driven, costs)
}

impl Costs {
    /// Adds the costs per token, for `tokens` generated tokens.
    fn per_token(self, tokens: u64) -> Self {
        let each = |seconds: f64| if tokens > 0 { seconds * 1e6 / tokens as f64 } else { 0.0 };
        let server = self
            .server_cpu
            .as_ref()
            .map(|processes| each(processes.iter().map(|one| one.seconds()).sum()));
        Self {
            client_cpu_us_per_token: each(self.client_cpu_seconds),
            server_cpu_us_per_token: server,
            ..self
        }
    }
}

fn records(driven: Driven, asked: &[PlannedRequest], tokenizer: &Tokenizer) -> Result<Vec<Record>> {
    let sent = driven.sent.into_iter();
    sent.map(|sent| {
        let (mut record, exact) = sent.reply.into_record(sent.intended_us, &asked[sent.index]);
        if !exact {
            tokens::guess_chunk_tokens(&mut record, tokenizer)?;
        }
        Ok(record)
    })
    .collect()
}

fn settings(args: &ServeArgs, model: String, count: usize) -> Settings {
    let arrivals = &args.arrivals;
    let request_rate = match (arrivals.ramp_up_start_rps, arrivals.ramp_up_end_rps) {
        (Some(start), Some(end)) => Rate::Named(format!("{start}-{end}")),
        _ if arrivals.use_trace_timestamps => Rate::Named("trace".into()),
        _ => arrivals.request_rate.into(),
    };
    Settings {
        label: args.result.label.clone(),
        backend: args.server.backend.name().into(),
        base_url: args.server.url(),
        model,
        dataset_name: args.dataset.dataset_name.name().into(),
        num_prompts: count as u64,
        request_rate,
        burstiness: arrivals.burstiness,
        max_concurrency: args.run.max_concurrency.map(u64::from),
        seed: args.run.seed,
        date: jiff::Timestamp::now().to_string(),
        forebay_version: env!("CARGO_PKG_VERSION").into(),
    }
}

/// The mean number of tokens per step of speculative decoding, if the server reports it.
async fn accept_length(client: &Client) -> Option<f64> {
    if !client.target().backend.has_server_info() {
        return None;
    }
    let body = client.call(Method::GET, "/server_info").await.ok()?;
    let info: Value = serde_json::from_slice(&body).ok()?;
    info["internal_states"][0]["avg_spec_accept_length"].as_f64()
}
