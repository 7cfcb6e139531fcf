//! `forebay run-batch`: processes a file of requests, and writes a file of their responses.
//!
//! Lines have the format of OpenAI's batches. Responses are written as they arrive. A run that was
//! killed can be resumed: requests with a response in the file are not sent again. Memory is
//! bounded, except for 16 bytes per request to recognise its id.

mod client;
mod progress;

use std::future::{Future, pending};
use std::path::PathBuf;
use std::pin::Pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, anyhow};
use clap::Args;
use forebay_batches::{BatchAnswer, BatchInput, BatchLine, BatchOutput, BatchRequest};
use http::{Method, StatusCode};
use rustix::process::{Resource, getrlimit};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinSet;
use tokio::time::interval;

use self::client::{Client, Reply};
use self::progress::{Progress, REDRAW, Tally};
use crate::link::Link;
use crate::server::StartedServer;

/// The maximum length of an input line in bytes.
const LINE: usize = 64 << 20;
/// The total size of requests in flight, in bytes, beyond which no further line is read.
const IN_FLIGHT: usize = 256 << 20;
/// The maximum size in bytes of a response that is received concurrently with others.
const SMALL_ANSWER: usize = 1 << 20;
/// The number of requests in flight for a server that does not report its capacity.
const UNKNOWN_SERVER: u64 = 64;
/// The exit status of a run that has processed all requests, some with an error.
const SOME_ERRORS: u8 = 3;

/// The flags of `forebay run-batch`.
#[derive(Debug, Args)]
pub struct BatchArgs {
    /// File of requests, one JSON object per line: `custom_id`, `method`, `url` and `body`. `-`
    /// means standard input.
    #[arg(long, short, value_name = "FILE")]
    input_file: PathBuf,
    /// File for the answers. Requests with an answer there are not sent again.
    #[arg(long, short, value_name = "FILE")]
    output_file: PathBuf,
    /// Model to serve (as in `forebay serve`): a server is started for the run and stopped
    /// afterwards.
    #[arg(long, default_value = "smollm2", conflicts_with = "url")]
    model: String,
    /// URL of a running server, such as http://127.0.0.1:8000.
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// API key that the server at `--url` requires.
    #[arg(long, env = "FOREBAY_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<String>,
    /// Largest number of requests in flight [default: twice as many as the server runs].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    max_concurrency: Option<u32>,
    /// Flags for the started server (those of `serve`), after `--`.
    #[arg(last = true, value_name = "FLAGS", conflicts_with = "url")]
    serve: Vec<String>,
}

impl BatchArgs {
    /// Returns the model for which a server is started; `None`: a running server is used.
    #[must_use]
    pub fn model(&self) -> Option<&str> {
        self.url.is_none().then_some(&self.model)
    }

    /// Returns the flags for a new server.
    #[must_use]
    pub fn serve_flags(&self) -> &[String] {
        &self.serve
    }
}

/// Processes the requests of a file. `program` is the path of this program, for starting a server.
/// The exit status is 0 if all requests succeeded, and 3 if some failed.
///
/// # Errors
/// A file cannot be read or written, the server cannot be reached, or a signal arrived. Responses
/// that were written are kept.
pub fn run_batch(args: &BatchArgs, program: PathBuf) -> Result<ExitCode> {
    let (output, answered) = BatchOutput::open(&args.output_file)?;
    let input = BatchInput::open(&args.input_file, answered.names, LINE)?;
    let progress = Progress::new(input.size);
    let tally = Tally { answered: 0, errors: answered.errors };
    let mut run = Run { input, output, progress, tally };
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let ended = runtime.block_on(run.answer_all(args, program));
    run.progress.clear();
    let Tally { answered, errors } = run.tally;
    ended.with_context(|| {
        format!("stopped after {answered} answers; the same command goes on from there")
    })?;
    let before = run.input.counts.before.load(Ordering::Relaxed);
    eprintln!("{answered} answered, {before} before, {errors} errors");
    Ok(if errors == 0 { ExitCode::SUCCESS } else { ExitCode::from(SOME_ERRORS) })
}

struct Run {
    input: BatchInput,
    output: BatchOutput,
    progress: Progress,
    tally: Tally,
}

/// A future that resolves to an error when the run is interrupted.
type Interruption = Pin<Box<dyn Future<Output = anyhow::Error>>>;

impl Run {
    async fn answer_all(&mut self, args: &BatchArgs, program: PathBuf) -> Result<()> {
        let mut interruption = interruption()?;
        // If all requests have responses already, no server is needed.
        let Some(first) = self.first(&mut interruption).await? else { return Ok(()) };
        let (mut started, link) = match &args.url {
            Some(url) => (None, Link::to(url, args.api_key.as_deref())?),
            None => {
                let started = tokio::select! {
                    started = StartedServer::start(program, &args.model, &args.serve) => started?,
                    error = &mut interruption => return Err(error),
                };
                let link = started.link();
                (Some(started), link)
            }
        };
        let most = match args.max_concurrency {
            Some(most) => most as usize,
            None => capacity(&link).await,
        };
        let client = Arc::new(Client::new(link.in_background()));
        let mut running = JoinSet::new();
        let death = async {
            match &mut started {
                Some(server) => server.death().await,
                None => pending().await,
            }
        };
        let ended = tokio::select! {
            ended = self.answer_rest(first, &client, most, &mut running) => ended,
            error = death => Err(error),
            error = &mut interruption => Err(error),
        };
        // Write the responses that have already arrived.
        while let Some(done) = running.try_join_next() {
            if let Ok(Ok(done)) = done {
                self.write(&done.answer)?;
            }
        }
        if let Some(server) = started {
            server.stop().await;
        }
        ended
    }

    /// Returns the first valid request; writes errors for the invalid lines before it.
    async fn first(&mut self, interruption: &mut Interruption) -> Result<Option<Job>> {
        loop {
            let line = tokio::select! {
                line = self.input.next() => line,
                error = &mut *interruption => return Err(error),
            };
            let Some(line) = line else { return Ok(None) };
            if let Some(job) = self.take(line?)? {
                return Ok(Some(job));
            }
        }
    }

    /// Returns the request of a line; `None`: the line is not valid, and its error was written.
    fn take(&mut self, line: BatchLine) -> Result<Option<Job>> {
        let size = line.size();
        let BatchLine { number, name, request } = line;
        match request {
            Ok(request) => Ok(Some(Job { number, name, request, size })),
            Err(fault) => {
                self.write(&BatchAnswer::from_fault(number, name, fault))?;
                Ok(None)
            }
        }
    }

    fn write(&mut self, answer: &BatchAnswer) -> Result<()> {
        self.output.write(answer)?;
        self.tally.answered += 1;
        self.tally.errors += u64::from(answer.is_error());
        Ok(())
    }

    /// Processes `first` and all following requests, `most` at a time.
    async fn answer_rest(
        &mut self,
        first: Job,
        client: &Arc<Client>,
        most: usize,
        running: &mut JoinSet<Result<Done>>,
    ) -> Result<()> {
        let (mut bytes, mut read) = (0, true);
        let mut redraw = interval(REDRAW);
        let mut next = Some(first);
        loop {
            if let Some(job) = next.take() {
                bytes += job.size;
                running.spawn(job.run(Arc::clone(client)));
            }
            if !read && running.is_empty() {
                return Ok(());
            }
            let room = running.len() < most && bytes < IN_FLIGHT;
            tokio::select! {
                line = self.input.next(), if read && room => match line {
                    Some(line) => next = self.take(line?)?,
                    None => read = false,
                },
                Some(done) = running.join_next(), if !running.is_empty() => {
                    let done = done??;
                    self.write(&done.answer)?;
                    bytes -= done.size;
                }
                _ = redraw.tick() => {
                    self.progress.show(&self.input.counts, self.tally, running.len());
                }
            }
        }
    }
}

/// A request, and the data that identifies its response.
struct Job {
    number: u64,
    name: Option<String>,
    request: BatchRequest,
    size: usize,
}

/// A processed request.
struct Done {
    answer: BatchAnswer,
    size: usize,
    /// The permit of a large response, which is held until the response is written.
    _large: Option<OwnedSemaphorePermit>,
}

impl Job {
    async fn run(self, client: Arc<Client>) -> Result<Done> {
        let Self { number, name, request, size } = self;
        let (answer, large) = match client.ask(&request).await? {
            Ok(Reply { status, id, body, large, .. }) => {
                (BatchAnswer::from_server(name, status.as_u16(), id, body), large)
            }
            Err(fault) => (BatchAnswer::from_fault(number, name, fault), None),
        };
        Ok(Done { answer, size, _large: large })
    }
}

/// Returns the number of requests in flight that keep a server busy: twice as many as it runs at a
/// time, so that half of them wait.
async fn capacity(link: &Link) -> usize {
    let allowed = match link.ask(Method::GET, "/server_info").await {
        Ok((StatusCode::OK, info)) => {
            let number = |name: &str| info["config"][name].as_u64();
            let running = number("max_running_requests").unwrap_or(UNKNOWN_SERVER / 2);
            let replicas = number("dp_size").unwrap_or(1);
            let queued = number("max_queued_requests").unwrap_or(u64::MAX);
            (2 * running * replicas).min(queued)
        }
        // The key has no access to this route, or the server is not Forebay.
        _ => UNKNOWN_SERVER,
    };
    // Each request in flight uses a connection, which is an open file.
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(allowed.min(files / 2).max(1)).unwrap_or(1)
}

fn interruption() -> Result<Interruption> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(Box::pin(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        anyhow!("interrupted")
    }))
}
