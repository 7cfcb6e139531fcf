//! The intake of large requests, away from the threads of steps and streams.
//!
//! The intake threads parse a body above [`LARGE_BODY`], and decode its base64. Data that is too
//! big for a plan goes into memory that the hand reads (`forebay_engine::Payloads`). A request
//! first waits in line for room there (`room`). Then the intake threads convert the data and write
//! it there, once. Only then is the request submitted. If the client goes away, its room is given
//! back, at any point of this way.

pub(crate) mod body;
mod room;
pub(crate) mod turns;
mod workers;

use std::io;
use std::sync::Arc;

use forebay_api::limits::{Limited, Weight};
use forebay_api::{ApiError, EmbeddedPrompt, parse_request};
use forebay_engine::{Dtype, Embeds, Payload, Payloads, PictureError, Placed};
use tokio::sync::Semaphore;

use crate::budget::Charge;
use crate::engine::Engine;
use crate::guard::Guard;
use body::{BodyLimit, Pieces};
use room::Room;
use turns::Turns;
use workers::Workers;

/// Bytes from which on parsing takes many times as long as a change of thread.
pub(crate) const LARGE_BODY: usize = 64 << 10;

/// The threads of the intake.
pub enum IntakeMode {
    /// This many threads of its own.
    Threads(usize),
    /// The engine's thread, between two steps, for comparison.
    Engine(Arc<dyn Engine>),
}

/// The intake: it parses large bodies and writes payloads into memory that the hand reads.
pub struct Intake {
    workers: Workers,
    room: Room,
    turns: Turns,
}

/// Counts of waiting requests, and of bytes in the arena.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct IntakeStats {
    /// Large bodies that wait to be parsed.
    pub(crate) unread: usize,
    /// Requests that wait for room in the arena.
    pub(crate) in_line: usize,
    /// Reserved bytes of the arena.
    pub(crate) arena_bytes: usize,
    /// Bytes that requests in flight are charged.
    pub(crate) request_bytes: usize,
}

impl Intake {
    /// Starts the threads, under `guard`. At most `queue` bodies wait to be parsed, and at most
    /// `queue` requests wait for room in `payloads`.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start(
        mode: IntakeMode,
        payloads: Arc<dyn Payloads>,
        queue: usize,
        guard: &Guard,
    ) -> io::Result<Self> {
        let queue = queue.min(Semaphore::MAX_PERMITS);
        // As many large bodies are read at a time as are parsed.
        let turns = match &mode {
            IntakeMode::Threads(count) => (*count).max(1),
            IntakeMode::Engine(_) => 1,
        };
        Ok(Self {
            workers: Workers::start(mode, queue, guard)?,
            room: Room::new(payloads, queue),
            turns: Turns::new(turns),
        })
    }

    /// The turns of clients that may read a large body now.
    pub(crate) fn turns(&self) -> &Turns {
        &self.turns
    }

    /// This moment.
    pub(crate) fn stats(&self) -> IntakeStats {
        IntakeStats {
            unread: self.workers.waiting(),
            in_line: self.room.in_line(),
            arena_bytes: self.room.used(),
            request_bytes: 0,
        }
    }

    /// Parses a body, on an intake thread if it is large. Gives the names of unread parameters too.
    pub(crate) async fn parse<T>(
        &self,
        body: Pieces,
        limit: BodyLimit,
        charge: &Arc<Charge>,
    ) -> Result<(T, Vec<String>), ApiError>
    where
        T: Limited + Send + 'static,
    {
        if body.len() < LARGE_BODY {
            return parse_body(body, limit, charge);
        }
        // Whoever leaves meanwhile leaves the body, and what was charged for it.
        let charge = Arc::clone(charge);
        self.workers.begin(move || parse_body(body, limit, &charge)).await
    }

    /// Runs `work` on an intake thread, for long reads of parts of a request.
    pub(crate) async fn read<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.workers.begin(work).await
    }

    /// Has `write` put so many bytes of patches where the hand reads them.
    ///
    /// # Errors
    /// There will never be room, too many wait for it, or `write` fails.
    pub(crate) async fn place_patches(
        &self,
        bytes: usize,
        write: impl FnOnce(&dyn Payload) -> Result<(), PictureError> + Send + 'static,
    ) -> Placed {
        let failed = |error: ApiError| PictureError::Failed(error.to_string());
        let payload = self.room.take(bytes, "messages").await.map_err(failed)?;
        let payload: Arc<dyn Payload> = payload.into();
        let work = move || Ok(write(&*payload).map(|()| payload));
        self.workers.go_on(work).await.map_err(failed)?
    }

    /// Puts the embeddings of a request's prompts, from `param`, into the memory that the hand
    /// reads. Gives the number of positions and the place of each.
    ///
    /// # Errors
    /// There will never be room, too many requests wait for room, or an element is not finite.
    pub(crate) async fn place(
        &self,
        prompts: Vec<EmbeddedPrompt>,
        dtype: Dtype,
        param: &'static str,
    ) -> Result<Vec<(u32, Embeds)>, ApiError> {
        let bytes = prompts.iter().map(|prompt| prompt.bytes(dtype)).sum();
        let payload: Arc<dyn Payload> = self.room.take(bytes, param).await?.into();
        let write = move || -> Result<Vec<(u32, Embeds)>, ApiError> {
            let mut at = 0;
            let mut placed = Vec::with_capacity(prompts.len());
            for prompt in &prompts {
                // Offsets of the arena fit into 32 bits, and this one is inside it.
                let offset = payload.offset() + at as u32;
                placed.push((prompt.rows(), Embeds { payload: Arc::clone(&payload), offset }));
                prompt.convert(dtype, |piece| {
                    payload.write(at, piece).map_err(no_memory)?;
                    at += piece.len();
                    Ok(())
                })?;
            }
            Ok(placed)
        };
        self.workers.go_on(write).await
    }
}

fn parse_body<T>(
    body: Pieces,
    limit: BodyLimit,
    charge: &Charge,
) -> Result<(T, Vec<String>), ApiError>
where
    T: Limited,
{
    let body = body.join();
    let fits = |weight: Weight| {
        let json = body.len().saturating_sub(weight.embeds);
        if json > limit.json { Err(limit.error(limit.json)) } else { Ok(()) }
    };
    let parsed = parse_request::<T>(&body, fits)?;
    let Weight { values, embeds } = parsed.weight;
    charge.read(body.len().saturating_sub(embeds), embeds, values)?;
    Ok((parsed.request, parsed.unread))
}

fn no_memory(error: io::Error) -> ApiError {
    ApiError::Internal {
        reason: format!("the arena could not be written: {error}"),
        code: Some("arena_write"),
    }
}
