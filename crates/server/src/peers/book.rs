//! Requests that came from routers, and load reports to these routers.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay_api::peer::{LoadReport, QueuedDispatch, RouterTag};
use parking_lot::Mutex;
use rustc_hash::FxBuildHasher;
use tokio::sync::watch;

/// The shortest interval between two reports in streams to the same router. The head of every
/// response carries a report anyway.
const BETWEEN_COMMENTS: Duration = Duration::from_millis(4);
/// The number of routers that are remembered. Routers without requests are forgotten first.
const MAX_ROUTERS: usize = 64;

/// The number of later dispatches of a router that may arrive before a missing dispatch counts as
/// lost.
const MAX_AHEAD: usize = 4096;

/// The state of one router.
#[derive(Debug, Default)]
struct Sender {
    /// Every dispatch up to this number has arrived, or counts as lost.
    low: u64,
    /// Dispatches above `low` that have arrived.
    above: BTreeSet<u64>,
    /// The number of this router's calls that are alive.
    own: u32,
    /// The ids of the calls' engine requests, by dispatch.
    submitted: BTreeMap<u64, Vec<u64>>,
    /// When a stream last carried a report, in microseconds since the book's creation.
    commented: Arc<AtomicU64>,
}

impl Sender {
    fn arrived(&mut self, tag: &RouterTag) {
        self.low = self.low.max(tag.floor.saturating_sub(1));
        if tag.seq > self.low {
            self.above.insert(tag.seq);
        }
        while self.above.len() > MAX_AHEAD
            || self.above.first().is_some_and(|&first| first <= self.low.saturating_add(1))
        {
            self.low = self.low.max(self.above.pop_first().unwrap_or(0));
        }
    }
}

/// All running calls, and which router sent each.
#[derive(Debug)]
pub(crate) struct Book {
    epoch: u64,
    start: Instant,
    reports: AtomicU64,
    /// The number of calls that are alive.
    live: watch::Sender<usize>,
    routers: Mutex<HashMap<u64, Sender, FxBuildHasher>>,
}

impl Book {
    pub(crate) fn new() -> Self {
        Self {
            epoch: rand::random(),
            start: Instant::now(),
            reports: AtomicU64::new(0),
            live: watch::Sender::new(0),
            routers: Mutex::default(),
        }
    }

    /// Records that a call begins. `tag` is the router's, if a router sent the call.
    pub(crate) fn enter(&self, tag: Option<&RouterTag>) {
        let Some(tag) = tag else { return self.live.send_modify(|live| *live += 1) };
        let mut routers = self.routers.lock();
        if !routers.contains_key(&tag.router) && routers.len() >= MAX_ROUTERS {
            routers.retain(|_, sender| sender.own > 0);
        }
        let sender = routers.entry(tag.router).or_default();
        sender.arrived(tag);
        sender.own += 1;
        // Still under the lock, so that a report counts a call both in the total and for its
        // router, or in neither.
        self.live.send_modify(|live| *live += 1);
    }

    /// Records that the call with this tag has submitted an engine request.
    pub(crate) fn submitted(&self, tag: &RouterTag, id: u64) {
        if let Some(sender) = self.routers.lock().get_mut(&tag.router) {
            sender.submitted.entry(tag.seq).or_default().push(id);
        }
    }

    /// Records that a call has ended.
    pub(crate) fn leave(&self, tag: Option<&RouterTag>) {
        let Some(tag) = tag else { return self.live.send_modify(|live| *live -= 1) };
        let mut routers = self.routers.lock();
        if let Some(sender) = routers.get_mut(&tag.router) {
            sender.own -= 1;
            sender.submitted.remove(&tag.seq);
        }
        self.live.send_modify(|live| *live -= 1);
    }

    /// Returns up to `most` of a router's dispatches whose engine requests all wait, the latest
    /// first. `waiting` returns the tokens of a waiting engine request.
    pub(crate) fn queued(
        &self,
        router: u64,
        most: usize,
        waiting: impl Fn(u64) -> Option<u64>,
    ) -> Vec<QueuedDispatch> {
        let routers = self.routers.lock();
        let Some(sender) = routers.get(&router) else { return Vec::new() };
        let latest = sender.submitted.iter().rev();
        let queued = latest.filter_map(|(&seq, ids)| {
            let tokens = ids.iter().map(|&id| waiting(id)).sum::<Option<u64>>()?;
            Some(QueuedDispatch { seq, tokens })
        });
        queued.take(most).collect()
    }

    /// Returns the calls' part of a report to a router; the engine's part is left empty.
    pub(crate) fn report(&self, router: Option<u64>) -> LoadReport {
        let routers = self.routers.lock();
        let sender = router.and_then(|router| routers.get(&router));
        LoadReport {
            epoch: self.epoch,
            at: self.reports.fetch_add(1, Ordering::Relaxed) + 1,
            seen: sender.map_or(0, |sender| sender.low),
            own: sender.map_or(0, |sender| sender.own),
            requests: u32::try_from(*self.live.borrow()).unwrap_or(u32::MAX),
            ..LoadReport::default()
        }
    }

    /// Returns the pace at which a router's streams carry reports.
    pub(crate) fn pace(&self, router: u64) -> Pace {
        let mut routers = self.routers.lock();
        let commented = Arc::clone(&routers.entry(router).or_default().commented);
        Pace { start: self.start, commented }
    }

    /// Returns a receiver of the number of calls that are alive.
    pub(crate) fn watch(&self) -> watch::Receiver<usize> {
        self.live.subscribe()
    }
}

/// Decides when a report is due, across all streams to one router.
#[derive(Debug)]
pub(crate) struct Pace {
    start: Instant,
    commented: Arc<AtomicU64>,
}

impl Pace {
    /// True if this stream should carry a report at `now`. Then `is_due` is false for the router's
    /// other streams until the interval has passed.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let now = micros(now.saturating_duration_since(self.start));
        let last = self.commented.load(Ordering::Relaxed);
        now >= last.saturating_add(micros(BETWEEN_COMMENTS))
            && self
                .commented
                .compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tag(router: u64, seq: u64, floor: u64) -> RouterTag {
        RouterTag { router, seq, floor, seed: 0, blocks: false }
    }

    #[test]
    fn each_router_hears_of_its_own_calls_and_of_all() {
        let book = Book::new();
        book.enter(None);
        book.enter(Some(&tag(1, 1, 1)));
        book.enter(Some(&tag(2, 1, 1)));
        book.enter(Some(&tag(1, 2, 1)));
        let (one, two) = (book.report(Some(1)), book.report(Some(2)));
        assert_eq!((one.own, one.requests, one.seen), (2, 4, 2));
        assert_eq!((two.own, two.requests, two.seen), (1, 4, 1));
        assert!(two.at > one.at && two.epoch == one.epoch);
        book.leave(Some(&tag(1, 1, 1)));
        book.leave(None);
        let one = book.report(Some(1));
        assert_eq!((one.own, one.requests, one.seen), (1, 2, 2));
        assert_eq!(book.report(None).requests, 2);
    }

    #[test]
    fn a_lost_dispatch_is_passed_by_the_floor() {
        let book = Book::new();
        book.enter(Some(&tag(1, 1, 1)));
        book.enter(Some(&tag(1, 3, 1)));
        assert_eq!(book.report(Some(1)).seen, 1);
        book.enter(Some(&tag(1, 4, 3)));
        assert_eq!(book.report(Some(1)).seen, 4);
    }

    #[test]
    fn a_dispatch_is_queued_while_all_that_it_has_submitted_waits() {
        let book = Book::new();
        for seq in 1..=4 {
            book.enter(Some(&tag(1, seq, 1)));
        }
        book.enter(Some(&tag(2, 1, 1)));
        for (router, seq, id) in [(1, 1, 10), (1, 2, 20), (1, 2, 21), (1, 3, 30), (2, 1, 40)] {
            book.submitted(&tag(router, seq, 1), id);
        }
        let all = |id| Some(id);
        let found = |most, waiting: fn(u64) -> Option<u64>| {
            let queued = book.queued(1, most, waiting);
            queued.iter().map(|queued| (queued.seq, queued.tokens)).collect::<Vec<_>>()
        };
        // The fourth dispatch has submitted nothing yet.
        assert_eq!(found(8, all), [(3, 30), (2, 41), (1, 10)]);
        assert_eq!(found(2, all), [(3, 30), (2, 41)]);
        assert_eq!(found(8, |id| (id != 21).then_some(id)), [(3, 30), (1, 10)]);
        book.leave(Some(&tag(1, 3, 1)));
        assert_eq!(found(8, all), [(2, 41), (1, 10)]);
        assert!(book.queued(7, 8, all).is_empty());
    }

    #[test]
    fn a_router_with_gaps_does_not_make_the_book_grow() {
        let book = Book::new();
        let count = 3 * MAX_AHEAD as u64;
        for number in 1..=count {
            book.enter(Some(&tag(1, 2 * number, 1)));
        }
        let kept = book.routers.lock()[&1].above.len();
        assert!(kept <= MAX_AHEAD, "{kept}");
        assert_eq!(book.report(Some(1)).seen, 2 * (count - MAX_AHEAD as u64));
        book.enter(Some(&tag(1, u64::MAX, 1)));
        book.enter(Some(&tag(1, u64::MAX, u64::MAX)));
        assert_eq!(book.report(Some(1)).seen, u64::MAX);
    }

    #[test]
    fn one_stream_in_a_while_carries_a_report() {
        let book = Book::new();
        let (one, two) = (book.pace(1), book.pace(1));
        let start = book.start + BETWEEN_COMMENTS;
        assert!(one.is_due(start) && !two.is_due(start) && book.pace(2).is_due(start));
        assert!(!one.is_due(start + BETWEEN_COMMENTS / 2));
        assert!(two.is_due(start + BETWEEN_COMMENTS));
    }

    proptest! {
        /// In whatever order dispatches arrive, `LoadReport::seen` is the last number before the
        /// first gap.
        #[test]
        fn seen_is_without_gaps(order in Just((1..20u64).collect::<Vec<_>>()).prop_shuffle(), count in 1usize..19) {
            let book = Book::new();
            let arrived = &order[..count];
            for &seq in arrived {
                book.enter(Some(&tag(1, seq, 1)));
            }
            let whole = (1..).take_while(|seq| arrived.contains(seq)).count() as u64;
            prop_assert_eq!(book.report(Some(1)).seen, whole);
        }
    }
}
