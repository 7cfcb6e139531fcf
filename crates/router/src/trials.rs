//! Decides the order in which suspects get their trials.
//!
//! Suspects with fewer deaths come first, since their trials are shorter. Among equals, clients
//! take turns, so that a client with many suspects does not delay others. A suspect may use any
//! suitable backend, unless a suspect before it in this order waits for that backend too.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_http::ClientId;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::sync::Notify;

/// The suspects that wait for a trial.
#[derive(Debug, Default)]
pub(crate) struct Trials(Mutex<Queue>);

#[derive(Debug, Default)]
struct Queue {
    waiting: BTreeMap<Place, Waiter>,
    clients: FxHashMap<ClientId, Turns>,
    /// The `turn` of the suspect that was tried last.
    turn: u64,
    next: u64,
}

/// A position in the queue; the smallest is first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    deaths: u8,
    turn: u64,
    number: u64,
}

#[derive(Debug)]
struct Waiter {
    wake: Arc<Notify>,
    /// Backends that are not suitable for the suspect.
    unfit: Vec<u32>,
}

/// The turns of a client with waiting suspects.
#[derive(Debug, Default)]
struct Turns {
    last: u64,
    waiting: usize,
}

impl Queue {
    /// Wakes the first suspect for which a backend is suitable.
    fn wake(&self, backend: u32) {
        let mut waiting = self.waiting.values();
        if let Some(first) = waiting.find(|waiter| !waiter.unfit.contains(&backend)) {
            first.wake.notify_one();
        }
    }
}

impl Trials {
    /// Adds a suspect to the queue.
    pub(crate) fn enter(self: &Arc<Self>, client: ClientId, deaths: u8) -> Ticket {
        let wake = Arc::<Notify>::default();
        let mut queue = self.0.lock();
        let (turn, number) = (queue.turn, queue.next);
        queue.next += 1;
        let turns = queue.clients.entry(client).or_default();
        turns.last = turns.last.max(turn) + 1;
        turns.waiting += 1;
        let place = Place { deaths, turn: turns.last, number };
        queue.waiting.insert(place, Waiter { wake: Arc::clone(&wake), unfit: Vec::new() });
        drop(queue);
        Ticket { trials: Arc::clone(self), client, place, wake }
    }

    /// Wakes the next suspect for a backend, because no suspect is on trial there now.
    pub(crate) fn is_free(&self, backend: u32) {
        self.0.lock().wake(backend);
    }

    /// The number of suspects that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.0.lock().waiting.len()
    }
}

/// A suspect's position in the queue. Dropping it removes the suspect.
#[derive(Debug)]
pub(crate) struct Ticket {
    trials: Arc<Trials>,
    client: ClientId,
    place: Place,
    wake: Arc<Notify>,
}

impl Ticket {
    /// Waits until a backend may be free for a trial.
    pub(crate) async fn woken(&self) {
        self.wake.notified().await;
    }

    /// Returns the backends among `free` for which this suspect is next. It will not be woken for
    /// `unfit` backends.
    pub(crate) fn turns(&self, free: &[u32], unfit: Vec<u32>) -> Vec<u32> {
        let mut queue = self.trials.0.lock();
        if let Some(waiter) = queue.waiting.get_mut(&self.place) {
            waiter.unfit = unfit;
        }
        let earlier = |backend: &u32| {
            let mut before = queue.waiting.range(..self.place);
            before.any(|(_, waiter)| !waiter.unfit.contains(backend))
        };
        free.iter().copied().filter(|backend| !earlier(backend)).collect()
    }

    /// Records that the suspect is being tried, and wakes other suspects for the `free` backends.
    pub(crate) fn used(&self, free: impl Iterator<Item = u32>) {
        let mut queue = self.trials.0.lock();
        queue.waiting.remove(&self.place);
        queue.turn = queue.turn.max(self.place.turn);
        free.for_each(|backend| queue.wake(backend));
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut queue = self.trials.0.lock();
        if let Some(turns) = queue.clients.get_mut(&self.client) {
            turns.waiting -= 1;
            if turns.waiting == 0 {
                queue.clients.remove(&self.client);
            }
        }
        // If this suspect was woken for a backend, the next suspect is woken for it instead.
        if queue.waiting.remove(&self.place).is_some()
            && let Some(next) = queue.waiting.values().next()
        {
            next.wake.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: u32 = 1;
    const TWO: u32 = 2;

    fn is_woken(ticket: &Ticket) -> bool {
        let mut woken = std::pin::pin!(ticket.wake.notified());
        woken.as_mut().enable()
    }

    /// Returns the order in which one backend would try these requests.
    fn order(tickets: Vec<Ticket>) -> Vec<usize> {
        let mut left: Vec<(usize, Ticket)> = tickets.into_iter().enumerate().collect();
        let mut order = Vec::new();
        while !left.is_empty() {
            let first =
                left.iter().position(|(_, ticket)| !ticket.turns(&[ONE], vec![]).is_empty());
            let (index, ticket) = left.remove(first.unwrap());
            ticket.used(std::iter::empty());
            order.push(index);
        }
        order
    }

    #[test]
    fn clients_take_turns() {
        let trials = Arc::<Trials>::default();
        let enter = |client| trials.enter(ClientId(client), 1);
        let tickets = vec![enter(7), enter(7), enter(7), enter(8), enter(8), enter(9)];
        assert_eq!(trials.waiting(), 6);
        assert_eq!(order(tickets), [0, 3, 5, 1, 4, 2]);
        assert!(trials.waiting() == 0 && trials.0.lock().clients.is_empty());
        // Once the queue is empty, earlier turns do not count any more.
        let tickets = vec![enter(7), enter(7), enter(8)];
        assert_eq!(order(tickets), [0, 2, 1]);
    }

    #[test]
    fn shorter_trials_come_first() {
        let trials = Arc::<Trials>::default();
        let enter = |deaths| trials.enter(ClientId(1), deaths);
        assert_eq!(order(vec![enter(3), enter(2), enter(1), enter(2), enter(1)]), [2, 4, 1, 3, 0]);
    }

    #[test]
    fn the_first_that_may_have_a_backend_is_woken_for_it() {
        let trials = Arc::<Trials>::default();
        let enter = || trials.enter(ClientId(1), 1);
        let (first, second, third) = (enter(), enter(), enter());
        assert!(first.turns(&[TWO], vec![ONE]) == [TWO] && second.turns(&[TWO], vec![]).is_empty());
        assert_eq!(second.turns(&[ONE, TWO], vec![]), [ONE]);
        trials.is_free(ONE);
        assert_eq!([is_woken(&first), is_woken(&second), is_woken(&third)], [false, true, false]);
        // A free backend that the second suspect leaves is offered to the first suspect.
        second.used([TWO].into_iter());
        assert_eq!([is_woken(&first), is_woken(&third)], [true, false]);
        // If the woken suspect leaves the queue, the next suspect is woken.
        trials.is_free(TWO);
        drop(first);
        assert!(is_woken(&third));
        assert_eq!(third.turns(&[ONE, TWO], vec![]), [ONE, TWO]);
    }
}
