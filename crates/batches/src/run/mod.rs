//! Computes batches: the batches of an owner one after the other, those of several owners in
//! parallel.

use std::collections::HashSet;
use std::fs::File;
use std::future::Future;
use std::io::BufReader;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{Instant, sleep, sleep_until};

use crate::input::BatchInput;
use crate::line::{BatchLine, BatchRequest, LineFault};
use crate::lines::Lines;
use crate::names::{BatchNames, SeenBefore};
use crate::objects::{BatchError, BatchStatus, RequestCounts};
use crate::output::{BatchAnswer, BatchOutput};
use crate::store::{BatchStore, Job, Owner, StoreError};

/// The largest number of invalid lines that a batch reports.
const SHOWN_ERRORS: usize = 100;
/// While a batch's requests in flight have more than this many bytes in total, no further lines are
/// read.
const IN_FLIGHT: usize = 64 << 20;
/// The interval at which expired files and batches are deleted.
const SWEEP: Duration = Duration::from_secs(60);
/// The pause after a disk error.
const DISK_WAIT: Duration = Duration::from_secs(10);

/// Computes requests for batches; implemented by the server.
pub trait BatchModel: Send + Sync + 'static {
    /// Computes a request of an owner. Retries for as long as the server is busy. Dropping the
    /// future aborts the request.
    fn answer(
        &self,
        owner: &Owner,
        request: BatchRequest,
    ) -> impl Future<Output = BatchOutcome> + Send;
}

/// The outcome of a request.
#[derive(Debug)]
pub enum BatchOutcome {
    /// A response of the server, which may be an error.
    Answer {
        /// The HTTP status.
        status: u16,
        /// The id of the request.
        id: Option<String>,
        /// The body of the response.
        body: Vec<u8>,
    },
    /// The server no longer accepts the owner's key.
    Unauthorized,
    /// The server is stopping. Unanswered requests are computed after its next start.
    Stopped,
}

/// Computes batches until the server stops. `now` returns seconds since 1970.
pub async fn run_batches<M: BatchModel>(
    store: Arc<BatchStore>,
    model: Arc<M>,
    now: impl Fn() -> u64 + Clone + Send + Sync + 'static,
) {
    let permits = Arc::new(Semaphore::new(store.config().batch_concurrency.max(1)));
    let mut changed = store.changed();
    let mut owners = JoinSet::new();
    let mut busy = HashSet::new();
    loop {
        for owner in store.waiting() {
            if busy.insert(owner.clone()) {
                let (store, model) = (Arc::clone(&store), Arc::clone(&model));
                let work = Work { store, model, permits: Arc::clone(&permits), now: now.clone() };
                owners.spawn(async move {
                    let ended = work.run_all(&owner).await;
                    (owner, ended)
                });
            }
        }
        tokio::select! {
            // The sender is part of the store, which outlives this loop, so this can't fail.
            _ = changed.changed() => {}
            Some(ended) = owners.join_next(), if !owners.is_empty() => match ended {
                Ok((_, End::Stopped)) => return,
                Ok((owner, End::Idle)) => { busy.remove(&owner); }
                Err(error) => {
                    tracing::error!(%error, "batches of a key are not computed until the next start");
                }
            },
            () = sleep(SWEEP) => {
                let (store, now) = (Arc::clone(&store), now());
                spawn_blocking(move || store.expire(now)).await.ok();
            }
        }
    }
}

/// The reason why a task no longer computes an owner's batches.
enum End {
    Idle,
    Stopped,
}

struct Work<M, N> {
    store: Arc<BatchStore>,
    model: Arc<M>,
    /// One permit for each request in flight. Permits are granted in the order in which they are
    /// requested.
    permits: Arc<Semaphore>,
    now: N,
}

/// The final state of a batch, and its errors.
struct BatchEnd {
    status: BatchStatus,
    errors: Vec<BatchError>,
}

impl BatchEnd {
    fn well(status: BatchStatus) -> Self {
        Self { status, errors: Vec::new() }
    }

    fn failed(code: &str, message: impl Into<String>) -> Self {
        let errors = vec![BatchError::of_all(code, message)];
        Self { status: BatchStatus::Failed, errors }
    }
}

/// The output files for answers and for errors.
struct Answers {
    output: BatchOutput,
    errors: BatchOutput,
}

/// The answer to the request in a line, and the size of that request in bytes.
struct Done {
    answer: Result<BatchAnswer, BatchOutcome>,
    size: usize,
    _permit: OwnedSemaphorePermit,
}

impl<M: BatchModel, N: Fn() -> u64 + Clone + Send + Sync + 'static> Work<M, N> {
    async fn run_all(&self, owner: &Owner) -> End {
        loop {
            let (store, whose) = (Arc::clone(&self.store), owner.clone());
            let job = match blocking(move || Ok(store.next_job(&whose)?)).await {
                Ok(Some(job)) => Arc::new(job),
                Ok(None) => return End::Idle,
                Err(error) => {
                    tracing::error!("a batch could not be begun: {error:#}");
                    sleep(DISK_WAIT).await;
                    continue;
                }
            };
            let result = self.run_one(&job).await;
            let ended = match result {
                Ok(Some(ended)) => ended,
                Ok(None) => {
                    self.store.leave(&job.id);
                    return End::Stopped;
                }
                Err(error) => match error.downcast_ref::<StoreError>() {
                    Some(StoreError::Full(reason)) => {
                        BatchEnd::failed("storage_quota_exceeded", reason.clone())
                    }
                    _ => {
                        tracing::error!(batch = job.id, "a batch failed: {error:#}");
                        BatchEnd::failed(
                            "storage_error",
                            "the server could not read or write files",
                        )
                    }
                },
            };
            tracing::info!(batch = job.id, status = ?ended.status, "batch ended");
            let (store, of, now) = (Arc::clone(&self.store), Arc::clone(&job), (self.now)());
            let end = move || Ok(store.end(&of, ended.status, ended.errors, now)?);
            if let Err(error) = blocking(end).await {
                tracing::error!(batch = job.id, "a batch could not be ended: {error:#}");
                sleep(DISK_WAIT).await;
            }
            self.store.leave(&job.id);
        }
    }

    /// Computes a batch; `None`: the server is stopping.
    async fn run_one(&self, job: &Arc<Job>) -> Result<Option<BatchEnd>> {
        if self.store.is_cancelled(&job.id) {
            return Ok(Some(BatchEnd::well(BatchStatus::Cancelled)));
        }
        let (checked, longest) = (Arc::clone(job), self.store.config().longest_line);
        let most = self.store.config().batch_max_requests;
        let total = match blocking(move || check(&checked, longest, most)).await? {
            Ok(total) => total,
            Err(errors) => return Ok(Some(BatchEnd { status: BatchStatus::Failed, errors })),
        };
        let opened = Arc::clone(job);
        let (answers, names, before) = blocking(move || open(&opened)).await?;
        let counts = RequestCounts { total, ..before };
        let (store, of, now) = (Arc::clone(&self.store), Arc::clone(job), (self.now)());
        blocking(move || Ok(store.begin(&of.id, counts, now)?)).await?;
        let input = BatchInput::open(&job.input, names, longest)?;
        let answers = Arc::new(Mutex::new(answers));
        let ended = self.answer_all(job, input, &answers).await?;
        if matches!(&ended, Some(ended) if ended.status == BatchStatus::Expired) {
            drop(answers);
            self.expire_rest(job).await?;
        }
        Ok(ended)
    }

    /// Computes the answers to the lines of a batch; `None`: the server is stopping.
    async fn answer_all(
        &self,
        job: &Arc<Job>,
        mut input: BatchInput,
        answers: &Arc<Mutex<Answers>>,
    ) -> Result<Option<BatchEnd>> {
        let left = job.expires_at.saturating_sub((self.now)());
        if left == 0 {
            return Ok(Some(BatchEnd::well(BatchStatus::Expired)));
        }
        let deadline = sleep_until(Instant::now() + Duration::from_secs(left));
        tokio::pin!(deadline);
        let mut changed = self.store.changed();
        let mut running = JoinSet::new();
        let (mut bytes, mut is_reading, mut is_stopping, mut permit) = (0, true, false, None);
        loop {
            if !is_reading && running.is_empty() {
                let completed = BatchEnd::well(BatchStatus::Completed);
                return Ok((!is_stopping).then_some(completed));
            }
            if self.store.is_cancelled(&job.id) {
                return Ok(Some(BatchEnd::well(BatchStatus::Cancelled)));
            }
            let has_room = is_reading && bytes < IN_FLIGHT;
            tokio::select! {
                biased;
                () = &mut deadline => return Ok(Some(BatchEnd::well(BatchStatus::Expired))),
                _ = changed.changed() => {}
                Some(done) = running.join_next(), if !running.is_empty() => {
                    let Done { answer, size, .. } = done?;
                    bytes -= size;
                    match answer {
                        Ok(answer) => self.write(job, answers, answer).await?,
                        Err(BatchOutcome::Unauthorized) => {
                            let message = "the key of its owner is not accepted any more";
                            return Ok(Some(BatchEnd::failed("invalid_api_key", message)));
                        }
                        // Requests that are already running may still finish.
                        Err(_) => (is_reading, is_stopping) = (false, true),
                    }
                }
                free = Arc::clone(&self.permits).acquire_owned(), if has_room && permit.is_none() => {
                    permit = Some(free?);
                }
                line = input.next(), if has_room && permit.is_some() => match (line, permit.take()) {
                    (Some(line), Some(permit)) => {
                        let line = line?;
                        bytes += line.size();
                        self.take(job, answers, line, permit, &mut running).await?;
                    }
                    _ => is_reading = false,
                },
            }
        }
    }

    /// Starts to compute the answer to a line.
    async fn take(
        &self,
        job: &Arc<Job>,
        answers: &Arc<Mutex<Answers>>,
        line: BatchLine,
        permit: OwnedSemaphorePermit,
        running: &mut JoinSet<Done>,
    ) -> Result<()> {
        let size = line.size();
        let BatchLine { number, name, request } = line;
        match request {
            Ok(request) => {
                let (model, owner) = (Arc::clone(&self.model), job.owner.clone());
                running.spawn(async move {
                    let answer = match model.answer(&owner, request).await {
                        BatchOutcome::Answer { status, id, body } => {
                            Ok(BatchAnswer::from_server(name, status, id, body))
                        }
                        other => Err(other),
                    };
                    Done { answer, size, _permit: permit }
                });
                Ok(())
            }
            // The line was valid when it was checked, so the file has been changed on disk.
            Err(fault) => {
                self.write(job, answers, BatchAnswer::from_fault(number, name, fault)).await
            }
        }
    }

    async fn write(
        &self,
        job: &Arc<Job>,
        answers: &Arc<Mutex<Answers>>,
        answer: BatchAnswer,
    ) -> Result<()> {
        let (store, job, answers) = (Arc::clone(&self.store), Arc::clone(job), Arc::clone(answers));
        blocking(move || {
            let (line, failed) = (answer.to_line()?, answer.is_error());
            store.count(&job, line.len() as u64, failed)?;
            let mut answers = answers.lock();
            let Answers { output, errors } = &mut *answers;
            (if failed { errors } else { output }).write_line(&line)
        })
        .await
    }

    /// Writes an error for each request without an answer: the batch has expired.
    async fn expire_rest(&self, job: &Arc<Job>) -> Result<()> {
        let opened = Arc::clone(job);
        let (answers, names, _) = blocking(move || open(&opened)).await?;
        let answers = Arc::new(Mutex::new(answers));
        let mut input = BatchInput::open(&job.input, names, self.store.config().longest_line)?;
        while let Some(line) = input.next().await {
            let BatchLine { number, name, .. } = line?;
            let answer = BatchAnswer::from_fault(number, name, LineFault::expired());
            self.write(job, &answers, answer).await?;
        }
        Ok(())
    }
}

/// Opens a batch's output files, and reads the answers that they contain.
fn open(job: &Job) -> Result<(Answers, BatchNames, RequestCounts)> {
    let (output, good) = BatchOutput::open(&job.output)?;
    let (errors, bad) = BatchOutput::open(&job.errors)?;
    let counts = RequestCounts { total: 0, completed: good.count, failed: bad.count };
    let mut names = good.names;
    names.add_all(bad.names);
    Ok((Answers { output, errors }, names, counts))
}

/// Checks the lines of a batch. Returns the number of its requests, or the errors of its lines.
fn check(job: &Job, longest: usize, most: u64) -> Result<Result<u64, Vec<BatchError>>> {
    let file = File::open(&job.input).context("the input")?;
    let mut lines = Lines::new(BufReader::new(file), longest);
    let (mut total, mut errors, mut names) = (0, Vec::new(), BatchNames::default());
    while let Some(text) = lines.next()? {
        let Some(line) = BatchLine::parse(&text) else { continue };
        total += 1;
        if total > most {
            let message = format!("a batch has {most} requests at most (--batch-max-requests)");
            return Ok(Err(vec![BatchError::of_all("too_many_requests", message)]));
        }
        let fault = match (line.request, &line.name) {
            (Err(fault), _) => fault,
            (Ok(request), _) if request.path != job.endpoint => {
                LineFault::other_route(&job.endpoint)
            }
            (Ok(_), Some(name)) if names.add_request(name) == SeenBefore::Request => {
                LineFault::repeated(name)
            }
            _ => continue,
        };
        if errors.len() < SHOWN_ERRORS {
            let LineFault { code, message, param } = fault;
            errors.push(BatchError {
                code: code.to_owned(),
                message,
                param: param.map(str::to_owned),
                line: Some(line.number),
            });
        }
    }
    if total == 0 {
        errors.push(BatchError::of_all("empty_file", "the file has no requests"));
    }
    Ok(if errors.is_empty() { Ok(total) } else { Err(errors) })
}

/// Runs work that may wait for the disk on a thread for blocking work.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    spawn_blocking(work).await?
}

#[cfg(test)]
mod tests;
