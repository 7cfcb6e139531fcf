//! The line of those who wait for room in the arena.

use std::sync::Arc;

use forebay_api::ApiError;
use forebay_engine::{Payload, Payloads};
use tokio::sync::{Mutex, Notify, Semaphore};

/// Room in the arena, given in the order in which it was asked for: a small request does not overtake a large one, which would never get any.
pub(crate) struct Room {
    payloads: Arc<dyn Payloads>,
    freed: Arc<Notify>,
    /// Held by whoever is first in line.
    turn: Mutex<()>,
    places: Semaphore,
    limit: usize,
}

impl Room {
    /// With at most `limit` requests in line.
    pub(crate) fn new(payloads: Arc<dyn Payloads>, limit: usize) -> Self {
        let freed = Arc::new(Notify::new());
        let told = Arc::clone(&freed);
        // Only the first in line listens. If it is between two looks, the notice is kept for it.
        payloads.on_freed(Box::new(move || told.notify_one()));
        Self { payloads, freed, turn: Mutex::new(()), places: Semaphore::new(limit), limit }
    }

    /// Waits for room for `bytes` bytes, all at once: who has some and waited for more could wait for ever. Dropping the future leaves the line.
    pub(crate) async fn take(
        &self,
        bytes: usize,
        param: &'static str,
    ) -> Result<Box<dyn Payload>, ApiError> {
        let limit = self.payloads.capacity();
        if bytes > limit {
            return Err(ApiError::PayloadTooLarge { param, bytes, limit });
        }
        let _place = self.places.try_acquire().map_err(|_| {
            let reason = format!("{} requests wait for room in the arena", self.limit);
            ApiError::Overloaded { reason }
        })?;
        let _turn = self.turn.lock().await;
        loop {
            if let Some(payload) = self.payloads.reserve(bytes) {
                return Ok(payload);
            }
            self.freed.notified().await;
        }
    }
}
