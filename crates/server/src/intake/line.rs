//! A limited number of permits that clients take in turn.

use std::collections::HashMap;
use std::sync::Arc;

use forebay_engine::FairQueue;
use forebay_http::ClientId;
use parking_lot::Mutex;
use tokio::sync::oneshot;

/// A limited number of permits. If all are taken, clients take turns: between two turns of its own,
/// a client with forty tasks waits for one turn of each other client.
#[derive(Debug)]
pub(crate) struct Line(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    free: usize,
    /// The maximum number of permits of a client.
    each: usize,
    held: HashMap<ClientId, usize>,
    waiting: FairQueue<oneshot::Sender<Permit>>,
    /// The number of tasks that ever waited.
    arrivals: i64,
    /// The number of permits that were ever given.
    given: u64,
}

/// A client's permit, returned when it is dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    /// The line to return the permit to; `None` if it was returned.
    line: Option<Arc<Line>>,
    client: ClientId,
}

impl Inner {
    fn may(&self, client: ClientId) -> bool {
        self.held.get(&client).copied().unwrap_or(0) < self.each
    }

    fn give(&mut self, line: &Arc<Line>, client: ClientId) -> Permit {
        self.free -= 1;
        self.given += 1;
        *self.held.entry(client).or_default() += 1;
        Permit { line: Some(Arc::clone(line)), client }
    }

    fn take_back(&mut self, client: ClientId) {
        self.free += 1;
        if let Some(held) = self.held.get_mut(&client) {
            *held -= 1;
            if *held == 0 {
                self.held.remove(&client);
            }
        }
    }
}

impl Line {
    /// Creates a line with `all` permits, of which a client has at most `each`.
    pub(crate) fn new(all: usize, each: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Inner {
            free: all,
            each,
            held: HashMap::new(),
            waiting: FairQueue::default(),
            arrivals: 0,
            given: 0,
        })))
    }

    /// Waits for a permit for `client`. Dropping the future removes the task from the queue.
    pub(crate) async fn take(self: &Arc<Self>, client: ClientId) -> Permit {
        let (_wait, permit) = {
            let mut inner = self.0.lock();
            if inner.free > 0 && inner.may(client) {
                return inner.give(self, client);
            }
            let (sender, permit) = oneshot::channel();
            inner.arrivals += 1;
            let arrival = inner.arrivals;
            inner.waiting.insert(client.0, arrival, 1, sender);
            (Wait { line: self, client, arrival }, permit)
        };
        // This borrow keeps the line alive, and so the queue's senders.
        permit.await.unwrap_or(Permit { line: None, client })
    }

    /// Returns the number of waiting tasks.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.0.lock().waiting.upcoming().count()
    }

    /// Returns the number of permits that were ever given.
    #[cfg(test)]
    pub(crate) fn given(&self) -> u64 {
        self.0.lock().given
    }

    /// Returns the number of free permits.
    #[cfg(test)]
    pub(crate) fn free(&self) -> usize {
        self.0.lock().free
    }
}

/// A queued task. Dropping it removes the task from the queue.
struct Wait<'a> {
    line: &'a Line,
    client: ClientId,
    arrival: i64,
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        // The entry was removed already if the task got its permit.
        self.line.0.lock().waiting.take(self.client.0, self.arrival, false);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let Some(line) = self.line.take() else { return };
        let mut inner = line.0.lock();
        inner.take_back(self.client);
        while inner.free > 0 {
            let Inner { waiting, held, each, .. } = &mut *inner;
            let may = |client| held.get(&ClientId(client)).copied().unwrap_or(0) < *each;
            let Some((client, next)) = waiting.pop(may) else { return };
            let permit = inner.give(&line, ClientId(client));
            // If the waiter has left the queue, `send` returns the permit. Its `drop` must not take
            // the lock, which is held here.
            if let Err(mut unwanted) = next.send(permit) {
                unwanted.line = None;
                inner.take_back(ClientId(client));
                inner.given -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn poll<F: Future>(future: &mut Pin<Box<F>>) -> Poll<F::Output> {
        future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
    }

    fn taken<F: Future<Output = Permit>>(mut future: Pin<Box<F>>) -> Permit {
        match poll(&mut future) {
            Poll::Ready(permit) => permit,
            Poll::Pending => panic!("the turn still waits"),
        }
    }

    #[test]
    fn a_client_has_no_more_than_its_part_and_others_pass_it_by() {
        let line = Line::new(4, 2);
        let (greedy, other) = (ClientId(1), ClientId(2));
        let first = taken(Box::pin(line.take(greedy)));
        let _second = taken(Box::pin(line.take(greedy)));
        let mut third = Box::pin(line.take(greedy));
        assert!(poll(&mut third).is_pending(), "two places are free, but for another client");
        let mut others: Vec<_> = (0..3).map(|_| Box::pin(line.take(other))).collect();
        let mut last = others.pop().unwrap();
        let permits: Vec<_> = others.into_iter().map(taken).collect();
        assert!(poll(&mut last).is_pending());
        drop(first);
        let third = taken(third);
        assert_eq!((line.free(), line.given()), (0, 5));
        drop(permits);
        drop((taken(last), third));
        assert_eq!(line.free(), 3);
    }

    #[test]
    fn whoever_leaves_the_line_is_passed_over() {
        let line = Line::new(1, 1);
        let first = taken(Box::pin(line.take(ClientId(1))));
        let mut gone = Box::pin(line.take(ClientId(2)));
        let mut stays = Box::pin(line.take(ClientId(3)));
        assert!(poll(&mut gone).is_pending() && poll(&mut stays).is_pending());
        drop(gone);
        assert_eq!(line.waiting(), 1, "nothing is kept for the dropped turn");
        drop(first);
        drop(taken(stays));
        let mut unread = Box::pin(line.take(ClientId(4)));
        let holder = match poll(&mut unread) {
            Poll::Ready(permit) => permit,
            Poll::Pending => panic!("the place was given back"),
        };
        let mut given_but_unread = Box::pin(line.take(ClientId(5)));
        assert!(poll(&mut given_but_unread).is_pending());
        drop(holder);
        drop(given_but_unread);
        assert_eq!(line.free(), 1, "an untaken place is free again");
    }
}
