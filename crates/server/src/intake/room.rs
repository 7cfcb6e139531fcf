//! The queue of requests that wait for room in the arena, in which clients take turns.

use std::sync::Arc;

use forebay_api::ApiError;
use forebay_engine::{Payload, Payloads};
use forebay_fair::{Holdings, Shares};
use forebay_http::ClientId;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::line::Line;

/// Room in the arena, given to clients in turns. A small request does not overtake a large one
/// whose turn has come, or the large one might never get its room.
pub(crate) struct Room {
    payloads: Arc<dyn Payloads>,
    freed: Arc<Notify>,
    /// Held by the first request in the queue.
    turn: Arc<Line>,
    waiting: Mutex<Holdings>,
    limit: usize,
}

impl Room {
    /// Creates the queue, with at most `limit` requests in it.
    pub(crate) fn new(payloads: Arc<dyn Payloads>, limit: usize) -> Self {
        let freed = Arc::new(Notify::new());
        let told = Arc::clone(&freed);
        // Only the first task in the queue waits for notifications. A notification between two of
        // its checks is stored.
        payloads.on_freed(Box::new(move || told.notify_one()));
        Self { payloads, freed, turn: Line::new(1, 1), waiting: Mutex::default(), limit }
    }

    /// Returns the number of requests in the queue, including the one that is reserving its room.
    pub(crate) fn in_line(&self) -> usize {
        self.waiting.lock().all()
    }

    /// Returns the reserved bytes of the arena.
    pub(crate) fn used(&self) -> usize {
        self.payloads.used()
    }

    /// Waits for `bytes` bytes of room for `client`, all at once: tasks that keep some room and
    /// wait for more could deadlock. Dropping the future removes the request from the queue.
    pub(crate) async fn take(
        &self,
        client: ClientId,
        bytes: usize,
        param: &'static str,
    ) -> Result<Box<dyn Payload>, ApiError> {
        let limit = self.payloads.capacity();
        if bytes > limit {
            return Err(ApiError::PayloadTooLarge { param, bytes, limit });
        }
        if !self.waiting.lock().take(client.0, 1, Shares::of_places(self.limit)) {
            let reason = format!(
                "{} requests wait for room in the arena; at most {} may wait, half of them for one client",
                self.in_line(),
                self.limit
            );
            return Err(ApiError::Overloaded { reason });
        }
        let _place = Place { room: self, client };
        let _turn = self.turn.take(client).await;
        loop {
            if let Some(payload) = self.payloads.reserve(bytes) {
                return Ok(payload);
            }
            self.freed.notified().await;
        }
    }
}

/// An entry in the queue, removed when it is dropped.
struct Place<'a> {
    room: &'a Room,
    client: ClientId,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.room.waiting.lock().give_back(self.client.0, 1);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::future::Future;
    use std::io;
    use std::pin::{Pin, pin};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Poll, Waker};

    use super::*;

    const ONE: ClientId = ClientId(1);
    const OTHER: ClientId = ClientId(2);

    /// A fake arena that only counts bytes.
    #[derive(Clone, Default)]
    struct Bytes {
        free: Arc<AtomicUsize>,
        freed: Arc<parking_lot::Mutex<Option<Notice>>>,
    }
    type Notice = Box<dyn Fn() + Send + Sync>;

    struct Part(usize, Bytes);

    impl std::fmt::Debug for Part {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            self.0.fmt(f)
        }
    }

    impl Payload for Part {
        fn offset(&self) -> u32 {
            0
        }
        fn write(&self, _: usize, _: &[u8]) -> io::Result<()> {
            Ok(())
        }
        fn read(&self, _: usize, _: &mut [u8]) -> io::Result<usize> {
            Ok(0)
        }
    }

    impl Drop for Part {
        fn drop(&mut self) {
            self.1.free.fetch_add(self.0, Ordering::SeqCst);
            if let Some(notify) = &*self.1.freed.lock() {
                notify();
            }
        }
    }

    impl Payloads for Bytes {
        fn capacity(&self) -> usize {
            100
        }
        fn used(&self) -> usize {
            100 - self.free.load(Ordering::SeqCst)
        }
        fn reserve(&self, bytes: usize) -> Option<Box<dyn Payload>> {
            let left = |free: usize| free.checked_sub(bytes);
            self.free.fetch_update(Ordering::SeqCst, Ordering::SeqCst, left).ok()?;
            Some(Box::new(Part(bytes, self.clone())))
        }
        fn on_freed(&self, notify: Notice) {
            *self.freed.lock() = Some(notify);
        }
    }

    /// Creates a fake arena of 100 bytes.
    pub(in crate::intake) fn memory() -> Arc<dyn Payloads> {
        let bytes = Bytes::default();
        bytes.free.store(100, Ordering::SeqCst);
        Arc::new(bytes)
    }

    fn room(limit: usize) -> Room {
        Room::new(memory(), limit)
    }

    fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    fn got<F>(future: Pin<&mut F>) -> Box<dyn Payload>
    where
        F: Future<Output = Result<Box<dyn Payload>, ApiError>>,
    {
        match poll(future) {
            Poll::Ready(Ok(payload)) => payload,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn nobody_overtakes_and_whoever_leaves_makes_room_in_the_line() {
        let room = room(10);
        let first = got(pin!(room.take(ONE, 60, "p")));
        let mut large = Box::pin(room.take(ONE, 90, "p"));
        let mut small = Box::pin(room.take(ONE, 30, "p"));
        let mut last = Box::pin(room.take(ONE, 20, "p"));
        assert!(poll(large.as_mut()).is_pending());
        assert!(poll(small.as_mut()).is_pending(), "a small payload fits, but waits for its turn");
        assert!(poll(last.as_mut()).is_pending());
        assert_eq!((room.in_line(), room.used()), (3, 60));
        drop(large);
        let small = got(small.as_mut());
        assert!(poll(last.as_mut()).is_pending(), "10 bytes are left");
        drop(first);
        let last = got(last.as_mut());
        assert_eq!(room.in_line(), 0);
        drop((small, last));
        got(pin!(room.take(ONE, 100, "p")));
    }

    #[test]
    fn clients_take_turns_and_share_the_line() {
        let room = room(8);
        let all = got(pin!(room.take(ONE, 100, "p")));
        let mut many: Vec<_> = (0..8).map(|_| Box::pin(room.take(ONE, 100, "p"))).collect();
        assert!(many.iter_mut().all(|one| poll(one.as_mut()).is_pending()));
        assert!(
            matches!(poll(pin!(room.take(ONE, 1, "p"))), Poll::Ready(Err(_))),
            "the client's queue is full"
        );
        let mut other = Box::pin(room.take(OTHER, 100, "p"));
        assert!(poll(other.as_mut()).is_pending(), "another client may still wait");
        drop(all);
        drop(got(many[0].as_mut()));
        drop(got(many[1].as_mut()));
        assert!(poll(many[2].as_mut()).is_pending(), "the other client has its turn");
        drop(got(other.as_mut()));
        assert_eq!(room.in_line(), 6);
        drop(got(many[2].as_mut()));
    }

    #[test]
    fn room_that_came_back_between_two_looks_is_not_missed() {
        let room = room(10);
        let first = got(pin!(room.take(ONE, 100, "p")));
        let mut second = Box::pin(room.take(ONE, 100, "p"));
        // The notification arrives while no task waits for it.
        drop(first);
        let second = got(second.as_mut());
        let mut third = Box::pin(room.take(ONE, 50, "p"));
        assert!(poll(third.as_mut()).is_pending());
        drop(second);
        got(third.as_mut());
    }

    #[test]
    fn the_line_is_bounded() {
        let room = room(2);
        let all = got(pin!(room.take(ONE, 100, "p")));
        let mut waiting = [Box::pin(room.take(ONE, 1, "p")), Box::pin(room.take(ONE, 1, "p"))];
        for one in &mut waiting {
            assert!(poll(one.as_mut()).is_pending());
        }
        let refused = poll(pin!(room.take(ONE, 1, "p")));
        assert!(matches!(refused, Poll::Ready(Err(ApiError::Overloaded { .. }))));
        let never = poll(pin!(room.take(ONE, 101, "p")));
        let expected = ApiError::PayloadTooLarge { param: "p", bytes: 101, limit: 100 };
        assert!(matches!(never, Poll::Ready(Err(error)) if error == expected));
        drop(all);
        got(waiting[0].as_mut());
    }
}
