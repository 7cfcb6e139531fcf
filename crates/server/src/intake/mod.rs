//! The intake of large requests, on threads separate from those of steps and streams.
//!
//! The intake threads parse a body above [`LARGE_BODY`], and decode its base64. Data that is too
//! big for a plan goes into the arena, which the hand reads (`forebay_engine::Payloads`). A request
//! first waits in the queue for room in the arena (`room`). Then the intake threads convert the
//! data and write it there, once. Only then is the request submitted. If the client disconnects at
//! any point, its room is freed.
//!
//! Separate threads decode images: an image of a few KB can take seconds, and must not delay other
//! work. Clients take turns in every queue.

pub(crate) mod body;
mod line;
mod room;
pub(crate) mod turns;
mod workers;

use std::io;
use std::sync::Arc;

use forebay_api::limits::{Limited, Weight};
use forebay_api::{ApiError, EmbeddedPrompt, parse_request};
use forebay_egress::{Engine, IntakeStats};
use forebay_engine::{Dtype, Embeds, Payload, Payloads, PictureError, Placed};
use forebay_http::{Charge, ClientId, Guard};

use crate::cost::read;
use body::{BodyLimit, Pieces};
use line::Line;
use room::Room;
use turns::Turns;
pub(crate) use workers::Cost;
use workers::Workers;

/// The size in bytes from which a body is parsed on another thread, because parsing takes much
/// longer than the hand-over.
pub(crate) const LARGE_BODY: usize = 64 << 10;

/// The maximum number of concurrent file downloads.
const FETCHES: usize = 256;
/// The maximum number of concurrent file downloads per client.
const FETCHES_EACH: usize = 16;

/// Which threads do the intake's work.
#[derive(Clone)]
pub enum IntakeMode {
    /// A pool of this many threads.
    Threads(usize),
    /// The engine's thread, between two steps. For measurements only, because it delays steps.
    Engine(Arc<dyn Engine>),
}

/// The intake: it parses large bodies and writes payloads to the arena.
pub struct Intake {
    workers: Workers,
    /// The threads that decode images; `None`: the model takes no images.
    pixels: Option<Workers>,
    /// The maximum number of bytes that all image decoding may use.
    pixel_bytes: usize,
    room: Room,
    turns: Turns,
    fetches: Arc<Line>,
}

impl Intake {
    /// Starts the threads, watched by `guard`. At most `queue` bodies wait to be parsed, and at
    /// most `queue` requests wait for room in `payloads`. Images are decoded in the same mode, by
    /// separate workers with a queue of the same length, in at most `pixel_bytes` bytes of memory.
    /// If `pixel_bytes` is 0, no threads decode images.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn start(
        mode: IntakeMode,
        payloads: Arc<dyn Payloads>,
        queue: usize,
        pixel_bytes: usize,
        guard: &Guard,
    ) -> io::Result<Self> {
        // The number of large bodies that are read at a time is the number of threads that can
        // parse them.
        let turns = match &mode {
            IntakeMode::Threads(count) => (*count).max(1),
            IntakeMode::Engine(_) => 1,
        };
        let pixels = (pixel_bytes > 0)
            .then(|| Workers::start(mode.clone(), "image", queue, pixel_bytes, guard));
        Ok(Self {
            workers: Workers::start(mode, "intake", queue, usize::MAX, guard)?,
            pixels: pixels.transpose()?,
            pixel_bytes,
            room: Room::new(payloads, queue),
            turns: Turns::new(turns),
            fetches: Line::new(FETCHES, FETCHES_EACH),
        })
    }

    /// Returns the queue for reading large bodies, in which clients take turns.
    pub(crate) fn turns(&self) -> &Turns {
        &self.turns
    }

    /// Returns the permits for downloads.
    pub(crate) fn fetches(&self) -> &Arc<Line> {
        &self.fetches
    }

    /// Returns the bytes that are reserved for decoding images.
    pub(crate) fn pixel_bytes(&self) -> usize {
        self.pixel_bytes
    }

    /// Returns the current counts.
    pub(crate) fn stats(&self) -> IntakeStats {
        IntakeStats {
            unread: self.workers.waiting(),
            in_line: self.room.in_line(),
            arena_bytes: self.room.used(),
            request_bytes: 0,
        }
    }

    /// Parses a body, on an intake thread if it is large. Also returns the names of the parameters
    /// that were not read.
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
        // If the task is dropped in the meantime, it drops the body and its charge.
        let charge = Arc::clone(charge);
        let (client, cost) = (charge.client(), Cost { time: body.len() as u64, memory: 0 });
        self.workers.begin(client, cost, move || parse_body(body, limit, &charge)).await
    }

    /// Runs `work` on an intake thread: long processing of `bytes` bytes of a request of `client`.
    pub(crate) async fn read<T: Send + 'static>(
        &self,
        client: ClientId,
        bytes: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.workers.begin(client, Cost { time: bytes as u64, memory: 0 }, work).await
    }

    /// Runs `write` on an image thread. It writes `bytes` bytes of patches of an image of `client`
    /// to the arena.
    ///
    /// # Errors
    /// The patches can never fit, too many requests wait for room, or `write` fails.
    pub(crate) async fn place_patches(
        &self,
        client: ClientId,
        bytes: usize,
        cost: Cost,
        write: impl FnOnce(&dyn Payload) -> Result<(), PictureError> + Send + 'static,
    ) -> Placed {
        let failed = |error: ApiError| PictureError::Failed(error.to_string());
        let payload = self.room.take(client, bytes, "messages").await.map_err(failed)?;
        let payload: Arc<dyn Payload> = payload.into();
        let work = move || Ok(write(&*payload).map(|()| payload));
        let workers = self.pixels.as_ref().unwrap_or(&self.workers);
        workers.run(Some(client), cost, work).await.map_err(failed)?
    }

    /// Writes the embeddings of prompts of `client`, which came in `param`, to the arena. Returns
    /// the number of positions and the arena location of each prompt.
    ///
    /// # Errors
    /// The embeddings can never fit, too many requests wait for room, or an element is not finite.
    pub(crate) async fn place(
        &self,
        client: ClientId,
        prompts: Vec<EmbeddedPrompt>,
        dtype: Dtype,
        param: &'static str,
    ) -> Result<Vec<(u32, Embeds)>, ApiError> {
        let bytes = prompts.iter().map(|prompt| prompt.bytes(dtype)).sum();
        let payload: Arc<dyn Payload> = self.room.take(client, bytes, param).await?.into();
        let write = move || -> Result<Vec<(u32, Embeds)>, ApiError> {
            let mut at = 0;
            let mut placed = Vec::with_capacity(prompts.len());
            for prompt in &prompts {
                // Arena offsets fit into 32 bits, and this offset is inside the arena.
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
    charge.set(read(body.len().saturating_sub(embeds), embeds, values))?;
    Ok((parsed.request, parsed.unread))
}

fn no_memory(error: io::Error) -> ApiError {
    ApiError::Internal {
        reason: format!("the arena could not be written: {error}"),
        code: Some("arena_write"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use room::tests::memory;

    const A: ClientId = ClientId(1);
    const B: ClientId = ClientId(2);

    /// Images of one client delay neither the reading of bodies nor an image of another client.
    #[tokio::test]
    async fn pixels_hold_up_nothing_else_and_clients_take_turns() {
        let mode = IntakeMode::Threads(1);
        let intake =
            Arc::new(Intake::start(mode, memory(), 100, 1 << 30, &Guard::default()).unwrap());
        let cost = |pixels: u64| Cost { time: pixels, memory: pixels as usize };
        let (release, held) = mpsc::channel::<()>();
        let (note, order) = mpsc::channel();
        let image = |client, pixels, work: Box<dyn FnOnce() + Send>| {
            let (intake, note) = (Arc::clone(&intake), note.clone());
            tokio::spawn(async move {
                let write = move |_: &dyn Payload| {
                    work();
                    note.send(client).unwrap();
                    Ok(())
                };
                intake.place_patches(client, 1, cost(pixels), write).await.map(drop)
            })
        };
        let mut images = vec![image(A, 49_000_000, Box::new(move || held.recv().unwrap()))];
        images.extend((1..24).map(|_| image(A, 49_000_000, Box::new(|| ()))));
        images.push(image(B, 4096, Box::new(|| ())));
        while intake.pixels.as_ref().unwrap().queued() < 24 {
            tokio::task::yield_now().await;
        }
        // The image thread is blocked, but bodies are still read.
        assert_eq!(intake.read(B, 64 << 10, || Ok(7)).await, Ok(7));
        release.send(()).unwrap();
        for image in images {
            image.await.unwrap().unwrap();
        }
        drop(note);
        let order: Vec<ClientId> = order.iter().collect();
        let place = order.iter().position(|&client| client == B).unwrap();
        assert!(place <= 2, "after {place} images of another client");
    }
}
