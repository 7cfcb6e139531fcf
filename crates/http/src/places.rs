//! Limits the number of connections: which connection is closed to make room for a new one.
//!
//! A connection is idle while none of its requests is being served. It may have sent nothing or a
//! part of a head, or wait for the next request. Closing it loses nothing. So at the limit, the
//! connection that was idle longest is closed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;

const IDLE: u8 = 0;
/// A request is being served.
const BUSY: u8 = 1;
/// The response is complete, but not all of it was passed to the system.
const WRITING: u8 = 2;

/// The seats for connections of one kind, and which of these connections are idle.
#[derive(Debug)]
pub(crate) struct Places {
    limit: usize,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    taken: usize,
    /// The idle connections in the order in which they became idle, the longest idle first.
    idle: BTreeMap<u64, Arc<Place>>,
    next: u64,
}

impl Inner {
    fn rest(&mut self, place: &Arc<Place>) {
        self.next += 1;
        place.since.store(self.next, Ordering::Relaxed);
        self.idle.insert(self.next, Arc::clone(place));
    }

    fn shed(&mut self) -> bool {
        let Some((_, oldest)) = self.idle.pop_first() else { return false };
        oldest.go.notify_one();
        true
    }
}

/// The state of a connection.
#[derive(Debug)]
pub(crate) struct Place {
    state: AtomicU8,
    /// The connection's key in the map of idle connections.
    since: AtomicU64,
    go: Notify,
}

/// One unit of the connection limit, held by a connection. It is freed when the seat is dropped.
#[derive(Debug)]
pub(crate) struct Seat {
    places: Arc<Places>,
    place: Arc<Place>,
}

impl Places {
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit: limit.max(1), inner: Mutex::default() })
    }

    /// Returns a seat for a new connection. At the limit, the connection that was idle longest is
    /// closed for it. `None`: all connections are busy.
    pub(crate) fn take(self: &Arc<Self>) -> Option<Seat> {
        let mut inner = self.inner.lock();
        if inner.taken >= self.limit && !inner.shed() {
            return None;
        }
        // A connection that is being closed will free its seat soon.
        inner.taken += 1;
        let state = AtomicU8::new(IDLE);
        let place = Arc::new(Place { state, since: AtomicU64::new(0), go: Notify::new() });
        inner.rest(&place);
        Some(Seat { places: Arc::clone(self), place })
    }

    /// Signals the connection that was idle longest to close. Returns false if none is idle.
    pub(crate) fn shed(&self) -> bool {
        self.inner.lock().shed()
    }

    /// Signals all idle connections to close.
    pub(crate) fn shed_all(&self) {
        let mut inner = self.inner.lock();
        while inner.shed() {}
    }
}

impl Seat {
    /// Waits until another connection needs the seat. If a request has arrived before the
    /// connection could close, the connection stays, and the limit is exceeded for a moment.
    pub(crate) async fn told_to_go(&self) {
        loop {
            self.place.go.notified().await;
            if self.place.state.load(Ordering::Acquire) == IDLE {
                return;
            }
        }
    }

    /// Records that a request's head is complete.
    pub(crate) fn begin(&self) {
        self.place.state.store(BUSY, Ordering::Release);
        self.places.inner.lock().idle.remove(&self.place.since.load(Ordering::Relaxed));
    }

    /// True if a request is being served.
    pub(crate) fn is_busy(&self) -> bool {
        self.place.state.load(Ordering::Acquire) == BUSY
    }

    /// Records that the response is complete, but not fully written.
    pub(crate) fn end(&self) {
        self.place.state.store(WRITING, Ordering::Release);
    }

    /// Records that all written bytes were passed to the system. If the response is complete, the
    /// connection is idle.
    pub(crate) fn flushed(&self) {
        let state = &self.place.state;
        // Check before taking the lock, because a stream is flushed often but ends only once.
        if state.load(Ordering::Acquire) == WRITING {
            state.store(IDLE, Ordering::Release);
            self.places.inner.lock().rest(&self.place);
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut inner = self.places.inner.lock();
        inner.taken -= 1;
        inner.idle.remove(&self.place.since.load(Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    fn goes(seat: &Seat) -> bool {
        pin!(seat.told_to_go()).poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn the_connection_that_was_idle_for_longest_makes_room() {
        let places = Places::new(3);
        let seats: Vec<Seat> = (0..3).map(|_| places.take().unwrap()).collect();
        seats[0].begin();
        // The first connection is busy, so the second has been idle longest.
        let fourth = places.take().unwrap();
        assert!(!goes(&seats[0]) && goes(&seats[1]) && !goes(&seats[2]));
        // A connection is not closed while its response is not fully written.
        seats[0].end();
        let fifth = places.take().unwrap();
        assert!(!goes(&seats[0]) && goes(&seats[2]) && !goes(&fourth));
        seats[0].flushed();
        let sixth = places.take().unwrap();
        assert!(goes(&fourth) && !goes(&seats[0]));
        // The first connection became idle again after the fifth, so the fifth has been idle
        // longer.
        drop((places.take().unwrap(), sixth));
        assert!(goes(&fifth) && !goes(&seats[0]));
    }

    #[test]
    fn busy_connections_keep_their_places() {
        let places = Places::new(2);
        let seats = [places.take().unwrap(), places.take().unwrap()];
        seats.iter().for_each(Seat::begin);
        assert!(places.take().is_none());
        let [first, second] = seats;
        drop(first);
        let third = places.take().unwrap();
        assert!(!goes(&second) && !goes(&third));
        places.shed_all();
        assert!(!goes(&second) && goes(&third));
        assert!(!places.shed());
    }
}
