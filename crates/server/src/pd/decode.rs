//! Fetches blocks of prompts that a prefill server computes for this decode server.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use forebay_api::BackendUrl;
use forebay_egress::{Engine, PdCounts};
use forebay_engine::{BlockHash, Facts, Loan, TierMemory};
use http_body_util::{BodyExt, Limited};
use parking_lot::Mutex;
use tokio::time::timeout;

use super::ask::{AskError, OpenAnswer, ask};
use super::counts::{FetchCounters, Outcome};
use super::parts::{DecodeConfig, layout};
use super::room::{ReceivedRoom, Reservation};
use super::tier::{PageSizes, TierPages};
use super::wire::{BlockReceiver, PrefillRequest, WireError};

/// The longest time without a byte of a response.
const SILENCE: Duration = Duration::from_secs(5);
/// How long a failed prefill server gets no requests, unless a router names it.
const PAUSE: Duration = Duration::from_secs(5);
/// The number of pages for received blocks is the number of host pages divided by this.
const RECEIVED_SHARE: u32 = 2;
/// The maximum number of bytes that are read of an error response.
const MAX_REFUSAL: usize = 4 << 10;

/// A configured prefill server.
#[derive(Debug)]
struct PrefillServer {
    url: BackendUrl,
    /// The number of requests in flight to this server.
    asked: AtomicUsize,
    /// The server gets no requests before this time.
    paused: Mutex<Option<Instant>>,
}

/// The state of a server with `--disaggregation-mode decode`.
#[derive(Debug)]
pub(crate) struct DecodeSide {
    config: DecodeConfig,
    model: String,
    memory: Arc<dyn TierMemory>,
    /// The memory for received blocks. It is created once the hand has reported its facts.
    room: Mutex<Option<Arc<ReceivedRoom>>>,
    servers: Vec<PrefillServer>,
    /// The last failure that was logged, to log repeated failures once.
    told: Mutex<String>,
    counts: FetchCounters,
}

/// A prompt, and the other fields that a prefill server needs.
#[derive(Debug)]
pub(crate) struct PrefillPrompt<'a> {
    pub(crate) tokens: &'a [i32],
    /// The names of the prompt's full blocks.
    pub(crate) names: &'a [BlockHash],
    /// Identifies the secret with which these blocks are named; equal on servers with the same
    /// secret.
    pub(crate) namer: u64,
    pub(crate) salt: u64,
    pub(crate) client: u64,
    pub(crate) priority: i32,
    pub(crate) background: bool,
    /// The prefill server that a router has named.
    pub(crate) server: Option<&'a BackendUrl>,
    /// The router key that is sent to prefill servers.
    pub(crate) key: Option<&'a str>,
}

/// A failed request: its outcome, and a sentence for the log.
type Failed = (Outcome, String);

/// Counts a request to a prefill server while it is in flight.
struct OpenQuestion<'a>(&'a PrefillServer);

impl<'a> OpenQuestion<'a> {
    fn new(server: &'a PrefillServer) -> Self {
        server.asked.fetch_add(1, Ordering::Relaxed);
        Self(server)
    }
}

impl Drop for OpenQuestion<'_> {
    fn drop(&mut self) {
        self.0.asked.fetch_sub(1, Ordering::Relaxed);
    }
}

impl DecodeSide {
    pub(crate) fn new(config: DecodeConfig, model: String, memory: Arc<dyn TierMemory>) -> Self {
        let server = |url: &BackendUrl| PrefillServer {
            url: url.clone(),
            asked: AtomicUsize::new(0),
            paused: Mutex::default(),
        };
        let servers = config.pd_prefill_servers.iter().map(server).collect();
        Self {
            config,
            model,
            memory,
            room: Mutex::default(),
            servers,
            told: Mutex::default(),
            counts: FetchCounters::default(),
        }
    }

    /// True if this server was configured with this prefill server.
    pub(crate) fn knows(&self, url: &BackendUrl) -> bool {
        self.servers.iter().any(|server| server.url == *url)
    }

    pub(crate) fn counts(&self) -> PdCounts {
        self.counts.counts()
    }

    /// Counts a request that is not handed over because of its kind.
    pub(crate) fn stays(&self) -> Outcome {
        self.counts.ended(Outcome::Kind);
        Outcome::Kind
    }

    /// Has a prefill server compute a prompt, unless little of it is left to compute. Returns a
    /// loan of the received blocks. Dropping the future cancels the request.
    pub(crate) async fn fetch(
        &self,
        engine: &dyn Engine,
        prompt: &PrefillPrompt<'_>,
    ) -> (Option<Arc<Loan>>, Outcome) {
        let (loan, outcome) = self.look(engine, prompt).await;
        self.counts.ended(outcome);
        (loan.map(Arc::new), outcome)
    }

    async fn look(
        &self,
        engine: &dyn Engine,
        prompt: &PrefillPrompt<'_>,
    ) -> (Option<Loan>, Outcome) {
        let Some(facts) = engine.facts() else { return (None, Outcome::Nothing) };
        let size = facts.page_size.max(1) as usize;
        // This server has to compute at least one position itself.
        let wanted = prompt.tokens.len().saturating_sub(1) / size;
        let names = &prompt.names[..wanted.min(prompt.names.len())];
        let cached = usize::try_from(engine.cached(names)).unwrap_or(0) / size;
        let skip = cached.min(names.len());
        let left = prompt.tokens.len() - skip * size;
        if left <= self.config.pd_local_tokens as usize || skip == names.len() {
            return (None, Outcome::Short);
        }
        let chosen = self.choose(prompt.server);
        let Some((url, known)) = chosen else { return (None, Outcome::NoServer) };
        let Some(reserved) = self.reserve(engine, &facts, names.len() - skip) else {
            return (None, Outcome::Full);
        };
        let _under_way = known.map(OpenQuestion::new);
        let Some(layout) = layout(&self.model, &facts) else {
            self.tell(
                url,
                "this server's layout of pages has no name, so prefill servers can't fill them",
            );
            return (None, Outcome::Refused);
        };
        let question = PrefillRequest {
            layout,
            names: prompt.namer,
            salt: prompt.salt,
            prompt: prompt.tokens[..=names.len() * size].to_vec(),
            skip,
            client: prompt.client,
            priority: prompt.priority,
            background: prompt.background,
        };
        let names = &names[skip..];
        let mut landing = BlockReceiver::new(names, &reserved);
        let mut bytes = 0;
        let coming = receive(url, prompt.key, &question, &mut landing, &mut bytes);
        let ended = timeout(self.config.pd_timeout, coming).await;
        let seconds = self.config.pd_timeout.as_secs();
        let late = || (Outcome::Late, format!("it has not ended within {seconds} seconds"));
        let ended = ended.unwrap_or_else(|_| Err(late()));
        let (blocks, states) = (landing.blocks(), landing.states());
        self.counts.came(blocks.len(), bytes);
        let outcome = match ended {
            Ok(()) if blocks.is_empty() => Outcome::Nothing,
            Ok(()) => Outcome::Came,
            Err((outcome, reason)) => {
                self.tell(url, &reason);
                let paused = known.filter(|_| outcome.is_failure() || outcome == Outcome::Busy);
                paused.into_iter().for_each(|server| {
                    *server.paused.lock() = Some(Instant::now() + PAUSE);
                });
                outcome
            }
        };
        // With recurrent layers, blocks are useless without a state.
        let useless = facts.hand.state_bytes > 0 && states.is_empty();
        // Blocks of a server that violates the protocol are discarded. Blocks that were complete
        // before a connection broke are kept.
        if outcome == Outcome::Wrong || blocks.is_empty() || useless {
            return (None, outcome);
        }
        (Some(reserved.lend(blocks, states)), outcome)
    }

    /// Returns the server that a router has named, or the configured server with the fewest
    /// requests.
    fn choose<'a>(
        &'a self,
        named: Option<&'a BackendUrl>,
    ) -> Option<(&'a BackendUrl, Option<&'a PrefillServer>)> {
        if let Some(url) = named {
            return Some((url, None));
        }
        let now = Instant::now();
        let ready = |server: &&PrefillServer| server.paused.lock().is_none_or(|until| until <= now);
        let least = self.servers.iter().filter(ready);
        let least = least.min_by_key(|server| server.asked.load(Ordering::Relaxed))?;
        Some((&least.url, Some(least)))
    }

    /// Reserves pages for `blocks` blocks, and for a state if the model has recurrent layers.
    fn reserve(&self, engine: &dyn Engine, facts: &Facts, blocks: usize) -> Option<Reservation> {
        let mut room = self.room.lock();
        if room.is_none() {
            let hand = &facts.hand;
            let counts = [hand.host_page_count, hand.host_state_page_count];
            let counts = counts.map(|count| count / RECEIVED_SHARE);
            let memory = Arc::clone(&self.memory);
            match TierPages::create(memory, PageSizes::new(facts), counts) {
                Ok(pages) => *room = Some(ReceivedRoom::new(pages, counts, engine.count())),
                Err(error) => tracing::warn!("no memory for blocks of other servers: {error}"),
            }
        }
        let states = usize::from(facts.hand.state_bytes > 0);
        room.as_ref()?.reserve([blocks, states])
    }

    /// Logs a failure, unless the last logged failure was the same.
    fn tell(&self, url: &BackendUrl, reason: &str) {
        let sentence = format!("prefill server {}: {reason}", url.url());
        let mut told = self.told.lock();
        if *told != sentence {
            tracing::warn!("{sentence}; this server computes the prompt");
            *told = sentence;
        }
    }
}

/// Sends a request to a prefill server, and writes the blocks of the response to their pages.
async fn receive(
    url: &BackendUrl,
    key: Option<&str>,
    question: &PrefillRequest,
    landing: &mut BlockReceiver<'_, '_>,
    bytes: &mut u64,
) -> Result<(), Failed> {
    let body = serde_json::to_vec(question).map_err(|error| (Outcome::Wrong, error.to_string()))?;
    let silent = |_| {
        let reason = format!("it has sent nothing for {} seconds", SILENCE.as_secs());
        (Outcome::Late, reason)
    };
    let failed = |error: AskError| match error {
        AskError::Connect(_) | AskError::Url => (Outcome::Unreachable, error.to_string()),
        AskError::Broken(_) => (Outcome::Broken, error.to_string()),
    };
    let mut asked = timeout(SILENCE, ask(url, key, body)).await.map_err(silent)?.map_err(failed)?;
    if asked.response.status() != StatusCode::OK {
        return Err(timeout(SILENCE, refusal(asked)).await.map_err(silent)?);
    }
    while !landing.has_ended() {
        let frame = timeout(SILENCE, asked.response.frame()).await.map_err(silent)?;
        let broken = |reason: String| (Outcome::Broken, reason);
        let frame = frame.ok_or_else(|| broken("its answer has no end".into()))?;
        let frame = frame.map_err(|error| broken(format!("the connection broke: {error}")))?;
        let Some(data) = frame.data_ref() else { continue };
        *bytes += data.len() as u64;
        landing.push(data).map_err(|wrong| {
            let outcome = match wrong {
                WireError::Frame(_) => Outcome::Wrong,
                WireError::Memory(_) => Outcome::Full,
            };
            (outcome, wrong.to_string())
        })?;
    }
    Ok(())
}

/// Returns the reason that a prefill server states for rejecting a request.
async fn refusal(mut asked: OpenAnswer) -> Failed {
    let status = asked.response.status();
    let body = Limited::new(asked.response.body_mut(), MAX_REFUSAL).collect().await;
    let body = body.map(|body| body.to_bytes()).unwrap_or_default();
    let body: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
    let message = body["error"]["message"].as_str().unwrap_or("it does not say why").to_owned();
    let busy = [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE];
    let outcome = if busy.contains(&status) { Outcome::Busy } else { Outcome::Refused };
    (outcome, format!("{status}: {message}"))
}
