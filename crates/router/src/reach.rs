//! Gets a response from some backend: chooses a backend, makes an attempt, and tries others as long
//! as the client has received nothing.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use forebay_api::ApiError;
use forebay_http::ClientId;
use http::Response;
use http::header::RETRY_AFTER;
use tokio::time::{sleep_until, timeout_at};

use crate::ask::{Ask, Resume};
use crate::attempt::{Beside, Failed, Reached, Trouble, attempt};
use crate::backend::{Backend, Check, Sent};
use crate::breaker::FailureOrigin;
use crate::flow::Broken;
use crate::leg::attempt_pair;
use crate::pairs::no_pair;
use crate::shared::{Choice, Dispatch, Shared, Worker};
use crate::watch::has_died;

/// The longest pause before a waiting request looks for a backend again. Changes that only time
/// causes, such as in a circuit breaker, do not wake it.
const LOOK: Duration = Duration::from_secs(1);
/// The longest accepted `Retry-After`, in seconds; longer times are reduced to it.
const LONGEST_RETRY_AFTER: u64 = 86_400;

/// The failure of a request: an error, or the last response of a backend, which goes to the client.
#[derive(Debug)]
pub(crate) enum Failure {
    /// No backend could be reached, or none responded.
    Api(ApiError),
    /// The response of the last backend, which refused the request.
    Refused(Response<Bytes>),
}

/// Backends that must not get a request before a given time.
#[derive(Default)]
struct Avoided(Vec<(u32, Instant)>);

impl Avoided {
    fn push(&mut self, backend: u32, until: Instant) {
        self.0.retain(|(avoided, _)| *avoided != backend);
        self.0.push((backend, until));
    }

    fn ids(&self) -> Vec<u32> {
        self.0.iter().map(|&(backend, _)| backend).collect()
    }

    /// Returns the time at which the first of these backends may be tried again, at least `pause`
    /// from now.
    fn first(&self, pause: Duration) -> Instant {
        let earliest = Instant::now() + pause;
        self.0.iter().map(|&(_, until)| until).min().map_or(earliest, |first| first.max(earliest))
    }

    fn release(&mut self) {
        let now = Instant::now();
        self.0.retain(|&(_, until)| until > now);
    }
}

/// The backends that failed a request, without duplicates.
#[derive(Default)]
struct Failures(Vec<Arc<Backend>>);

impl Failures {
    fn push(&mut self, backend: &Arc<Backend>) {
        if !self.0.iter().any(|failed| failed.id == backend.id) {
            self.0.push(Arc::clone(backend));
        }
    }

    /// Charges the failures to the backends' circuit breakers, unless the request failed at several
    /// backends and succeeded at none: then the request itself is at fault.
    fn settle(self, client: ClientId, answered: bool) {
        if answered || self.0.len() == 1 {
            self.0.iter().for_each(|backend| backend.charge(FailureOrigin::Client(client.0)));
        }
    }
}

/// Tries backends until one responds. With `resume`, tries them until one continues the stream that
/// `resume` describes. `broke` is the dispatch that broke off, if this follows one.
pub(crate) async fn reach(
    worker: &Arc<Worker>,
    ask: &Arc<Ask>,
    resume: Option<&Resume>,
    broke: Option<Sent>,
) -> Result<Reached, Failure> {
    let mut failures = Failures::default();
    let mut avoided = Avoided::default();
    if let Some(sent) = broke {
        let backend = Arc::clone(&sent.backend);
        avoided.push(backend.id, Instant::now());
        if !mourn(&worker.shared, ask, sent).await? {
            failures.push(&backend);
        }
    }
    let reached = search(worker, ask, resume, avoided, &mut failures).await;
    failures.settle(ask.client, reached.is_ok());
    reached
}

async fn search(
    worker: &Arc<Worker>,
    ask: &Arc<Ask>,
    resume: Option<&Resume>,
    mut avoided: Avoided,
    failures: &mut Failures,
) -> Result<Reached, Failure> {
    let shared = &worker.shared;
    let retry = shared.config.retry;
    let mut last = None;
    // A "not found" answer. The backend that sent it does not keep the response that the request
    // names.
    let mut unkept = None;
    let (mut attempts, mut rounds) = (0, 0);
    // A failure on a reused connection may only mean that the backend had closed it. After one such
    // failure only new connections are used.
    let mut fresh = false;
    // The backend to which the queued request is to move.
    let mut target: Option<u32> = None;
    loop {
        let moved = target.take().and_then(|to| shared.dispatch_to(ask, to));
        let chosen = match moved {
            Some(moved) => Some(moved),
            None => choose(shared, ask, &avoided.ids(), resume.is_some()).await,
        };
        let Some(Dispatch { prefill, sent }) = chosen else {
            if let Some(unkept) = unkept {
                return Err(unkept);
            }
            // All available backends have been tried.
            rounds += 1;
            let patient = is_patient(shared, ask);
            let pause = retry.pause(rounds, rand::random());
            let (pause, longest) = match patient {
                true => (pause.min(LOOK), LOOK.max(retry.last_pause)),
                false => (pause, pause.max(retry.last_pause)),
            };
            let until = avoided.first(pause);
            let in_vain = !patient && (avoided.0.is_empty() || rounds > retry.retries);
            if in_vain || until > Instant::now() + longest || until >= ask.deadline {
                return Err(give_up(shared, ask, last));
            }
            sleep_until(until.into()).await;
            avoided.release();
            continue;
        };
        let backend = Arc::clone(&sent.backend);
        let reached = match prefill {
            Some(prefill) => attempt_pair(worker, ask, resume, (prefill, sent), fresh).await,
            None => attempt(worker, ask, resume, (sent, fresh), Beside::default()).await,
        };
        let Failed { trouble, leg, sent } = match reached {
            Ok(reached) => {
                let trial_is_over = ask.past.lock().produced();
                if let Some(flow) = &reached.flow
                    && trial_is_over
                {
                    backend.end_trial(flow.sent.seq);
                }
                return Ok(reached);
            }
            Err(failed) => failed,
        };
        let backend = leg.unwrap_or(backend);
        let died = match sent {
            Some(sent) => mourn(shared, ask, sent).await?,
            None => false,
        };
        if trouble.is_failure() && !died {
            failures.push(&backend);
        }
        let now = Instant::now();
        let until = retry_after(&trouble).map_or(now, |time| now + time);
        avoided.push(backend.id, until);
        match verdict(shared, &backend, trouble, died) {
            Verdict::Again => {
                fresh = true;
                avoided.0.pop();
                continue;
            }
            Verdict::Moved(to) => {
                ask.note_move();
                backend.counters.moved.fetch_add(1, Ordering::Relaxed);
                target = Some(to);
                avoided.0.pop();
                continue;
            }
            Verdict::Aside(failure) => {
                unkept = Some(failure);
                continue;
            }
            Verdict::Final(failure) => return Err(failure),
            Verdict::Next(failure) => last = Some(failure),
        }
        // A death may not be the request's fault, so it does not count as an attempt while the
        // request may be tried again.
        attempts += u32::from(!died || retry.retries == 0);
        if attempts > retry.retries {
            return Err(last.unwrap_or_else(|| no_backend(shared, ask)));
        }
        shared.totals.retries.fetch_add(1, Ordering::Relaxed);
    }
}

/// True if a request whose last backend died may still wait for another backend.
fn is_patient(shared: &Shared, ask: &Ask) -> bool {
    let died = ask.past.lock().suspected();
    let waits = |died: Instant| Instant::now() < died + shared.config.trial_wait;
    died.is_some_and(waits) && !shared.draining.load(Ordering::Acquire)
}

/// Returns the failure of a request that no backend takes.
fn give_up(shared: &Shared, ask: &Ask, last: Option<Failure>) -> Failure {
    match last {
        _ if Instant::now() >= ask.deadline => broken(&Broken::Deadline),
        Some(refused @ Failure::Refused(_)) => refused,
        _ if ask.past.lock().suspected().is_some() => not_taken(),
        last => last.unwrap_or_else(|| no_backend(shared, ask)),
    }
}

/// Returns the delay in the `Retry-After` header of the backend's response.
fn retry_after(trouble: &Trouble) -> Option<Duration> {
    let Trouble::Refused(response) = trouble else { return None };
    let seconds: u64 = response.headers().get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds.min(LONGEST_RETRY_AFTER)))
}

/// The decision after a failed attempt.
enum Verdict {
    /// Try again on a new connection. The same backend may be chosen.
    Again,
    /// Try this backend, without counting an attempt.
    Moved(u32),
    /// Try another backend, without counting an attempt.
    Aside(Failure),
    /// Try another backend, if attempts are left.
    Next(Failure),
    /// Try no other backend.
    Final(Failure),
}

fn verdict(shared: &Shared, backend: &Backend, trouble: Trouble, died: bool) -> Verdict {
    match trouble {
        Trouble::Stale if !died => Verdict::Again,
        Trouble::Stale => Verdict::Next(not_reached()),
        Trouble::Moved(to) => Verdict::Moved(to),
        Trouble::Refused(response) => Verdict::Next(Failure::Refused(response)),
        Trouble::Unkept(response) => Verdict::Aside(Failure::Refused(response)),
        Trouble::GivenUp(response) | Trouble::Answered(response) => {
            Verdict::Final(Failure::Refused(response))
        }
        Trouble::Broken(Broken::Deadline) => Verdict::Final(broken(&Broken::Deadline)),
        Trouble::Broken(reason) => {
            tracing::debug!(backend = backend.url.url(), %reason, died, "no response");
            Verdict::Next(broken(&reason))
        }
        Trouble::Connect(reason) => {
            tracing::debug!(backend = backend.url.url(), %reason, "no connection");
            if reason.is_refused() {
                backend.checked(Check::Absent, &shared.config.health);
            } else if reason.is_remote() {
                backend.charge(FailureOrigin::Router);
            }
            Verdict::Next(not_reached())
        }
    }
}

/// Chooses a backend for the next attempt. A suspect waits for its trial at a backend.
async fn choose(shared: &Shared, ask: &Ask, avoid: &[u32], resumed: bool) -> Option<Dispatch> {
    let (trial, deaths) = {
        let past = ask.past.lock();
        (past.trial(), past.deaths())
    };
    let Some(trial) = trial else {
        return match shared.dispatch(ask, avoid, resumed, None) {
            Choice::Sent(dispatch) => Some(dispatch),
            Choice::OnTrial | Choice::Nobody => None,
        };
    };
    let ticket = shared.registry.trials.enter(ask.client, deaths);
    loop {
        match shared.dispatch(ask, avoid, resumed, Some((trial, &ticket))) {
            Choice::Sent(dispatch) => return Some(dispatch),
            Choice::Nobody => return None,
            Choice::OnTrial if Instant::now() >= ask.deadline => return None,
            Choice::OnTrial => {
                let look = ask.deadline.min(Instant::now() + LOOK);
                // After a wake-up or the timeout, look for a backend again.
                let _ = timeout_at(look.into(), ticket.woken()).await;
            }
        }
    }
}

/// Determines whether a broken dispatch was in flight at its backend's death. If so, records the
/// death and returns true.
///
/// # Errors
///
/// The backend died, and the request must not be tried again.
async fn mourn(shared: &Shared, ask: &Ask, sent: Sent) -> Result<bool, Failure> {
    if !has_died(shared, &sent).await {
        return Ok(false);
    }
    let backend = &sent.backend;
    let role = backend.role(sent.seq, sent.life);
    let (goes_on, deaths) = {
        let mut past = ask.past.lock();
        (past.died(role, sent.since, Instant::now()), past.deaths())
    };
    shared.totals.suspects.fetch_add(1, Ordering::Relaxed);
    tracing::debug!(backend = backend.url.url(), ?role, deaths, "a backend died");
    if goes_on {
        return Ok(true);
    }
    shared.totals.given_up.fetch_add(1, Ordering::Relaxed);
    tracing::warn!(deaths, "backends died while they computed this request: it is not retried");
    Err(Failure::Api(ApiError::BackendDied { deaths }))
}

fn no_backend(shared: &Shared, ask: &Ask) -> Failure {
    let reason = match ask.pair {
        Some(_) => no_pair(&shared.registry.current()),
        None => "no backend takes requests now".to_owned(),
    };
    Failure::Api(ApiError::Unavailable { reason, code: "no_backend" })
}

fn not_taken() -> Failure {
    let reason =
        "a backend died while it computed this request, and no other has accepted it".to_owned();
    Failure::Api(ApiError::Unavailable { reason, code: "no_backend" })
}

fn not_reached() -> Failure {
    let reason = "the backend could not be reached".to_owned();
    Failure::Api(ApiError::Unavailable { reason, code: "backend_failed" })
}

fn broken(reason: &Broken) -> Failure {
    Failure::Api(unanswered(reason))
}

/// Returns the error for a client whose response broke off.
pub(crate) fn unanswered(reason: &Broken) -> ApiError {
    let said = reason.to_string();
    match reason {
        Broken::Deadline => ApiError::BackendTimeout { reason: said },
        Broken::Link(error) if error.is_parse() => {
            ApiError::BadAnswer { reason: said, code: "backend_answer_garbled" }
        }
        Broken::Params(_) => ApiError::BadAnswer { reason: said, code: "backend_answer_garbled" },
        Broken::Link(_) | Broken::Gone | Broken::Moved(_) | Broken::Prefill => {
            ApiError::Unavailable { reason: said, code: "backend_failed" }
        }
        Broken::Excess => ApiError::BadAnswer { reason: said, code: "backend_answer_too_large" },
    }
}
