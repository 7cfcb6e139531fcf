//! The ledger of a backend: its last report, and the requests that were sent to it and have not
//! ended.
//!
//! A report is always outdated on arrival. It states how many of this router's requests it counts
//! ([`LoadReport::own`]), and up to which dispatch the backend had received them
//! ([`LoadReport::seen`]). So the router takes only the load of *other* requests from the report,
//! and counts its own requests exactly.

use std::collections::BTreeMap;

use forebay_api::peer::LoadReport;

/// The effect of a load report on those of this router's requests that were dispatched after the
/// report was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accounting {
    /// No effect: dispatched requests count until they end.
    Acknowledged,
    /// The report replaces the count of these requests. Routers work like this if they poll loads,
    /// or if reports do not state which requests they count. This variant exists only for
    /// comparison.
    Overwritten,
}

/// A dispatch that has not ended.
#[derive(Debug, Clone, Copy)]
struct Dispatched {
    tokens: u32,
    /// True if a report has counted the request.
    acknowledged: bool,
}

/// The ledger of one backend.
#[derive(Debug)]
pub struct Ledger {
    accounting: Accounting,
    next: u64,
    alive: BTreeMap<u64, Dispatched>,
    report: Option<LoadReport>,
    /// The number of dispatches since the last report.
    since: u32,
}

impl Ledger {
    /// Creates an empty ledger.
    #[must_use]
    pub fn new(accounting: Accounting) -> Self {
        Self { accounting, next: 1, alive: BTreeMap::new(), report: None, since: 0 }
    }

    /// Records a dispatch of about `tokens` tokens. Returns its number and its floor (see
    /// [`forebay_api::peer::RouterTag`]).
    pub fn begin(&mut self, tokens: u32) -> (u64, u64) {
        let seq = self.next;
        self.next += 1;
        self.since += 1;
        self.alive.insert(seq, Dispatched { tokens, acknowledged: false });
        let unseen = self.alive.iter().find(|(_, dispatched)| !dispatched.acknowledged);
        (seq, unseen.map_or(seq, |(&first, _)| first))
    }

    /// Records that the backend has started to answer a dispatch.
    pub fn acknowledge(&mut self, seq: u64) {
        if let Some(dispatched) = self.alive.get_mut(&seq) {
            dispatched.acknowledged = true;
        }
    }

    /// Records the end of a dispatch, for any reason.
    pub fn finish(&mut self, seq: u64) {
        self.alive.remove(&seq);
    }

    /// Applies a report. Returns false if it is older than the last one.
    pub fn report(&mut self, report: LoadReport) -> bool {
        let older = |last: LoadReport| last.epoch == report.epoch && last.at >= report.at;
        if self.report.is_some_and(older) {
            return false;
        }
        self.report = Some(report);
        self.since = 0;
        for (_, dispatched) in self.alive.range_mut(..=report.seen) {
            dispatched.acknowledged = true;
        }
        true
    }

    /// Forgets the last report, because the backend is down.
    pub fn forget(&mut self) {
        self.report = None;
        self.since = 0;
    }

    /// The last report.
    #[must_use]
    pub fn last_report(&self) -> Option<LoadReport> {
        self.report
    }

    /// The number of this router's requests at the backend.
    #[must_use]
    pub fn own(&self) -> u32 {
        u32::try_from(self.alive.len()).unwrap_or(u32::MAX)
    }

    /// The number of all requests at the backend.
    #[must_use]
    pub fn requests(&self) -> u32 {
        match (self.accounting, self.report) {
            (_, None) => self.own(),
            (Accounting::Acknowledged, Some(report)) => {
                self.own().saturating_add(report.requests.saturating_sub(report.own))
            }
            (Accounting::Overwritten, Some(report)) => report.requests.saturating_add(self.since),
        }
    }

    /// The number of tokens of all requests at the backend.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.report.map_or(0, |report| report.tokens).saturating_add(self.unseen())
    }

    /// The number of prompt tokens that the backend has to compute before those of a new request.
    #[must_use]
    pub fn ahead(&self) -> u64 {
        self.report.map_or(0, |report| report.ahead).saturating_add(self.unseen())
    }

    /// True if a dispatch has not ended.
    #[must_use]
    pub fn has(&self, seq: u64) -> bool {
        self.alive.contains_key(&seq)
    }

    /// The number of tokens of dispatches that no report has counted.
    fn unseen(&self) -> u64 {
        let unseen = self.alive.values().filter(|dispatched| !dispatched.acknowledged);
        unseen.map(|dispatched| u64::from(dispatched.tokens)).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, VecDeque};

    use proptest::prelude::*;

    use super::*;

    fn books() -> Ledger {
        Ledger::new(Accounting::Acknowledged)
    }

    /// A simulated backend that counts arrivals, and whose reports are delayed.
    #[derive(Default)]
    struct Backend {
        at: u64,
        low: u64,
        above: BTreeSet<u64>,
        own: BTreeSet<u64>,
        others: u32,
    }

    impl Backend {
        fn arrive(&mut self, (seq, floor): (u64, u64)) {
            self.own.insert(seq);
            self.above.insert(seq);
            self.low = self.low.max(floor - 1);
            while self.above.remove(&(self.low + 1)) {
                self.low += 1;
            }
        }

        fn report(&mut self) -> LoadReport {
            self.at += 1;
            let own = self.own.len() as u32;
            let requests = own + self.others;
            LoadReport { at: self.at, seen: self.low, own, requests, ..LoadReport::default() }
        }
    }

    proptest! {
        /// Each of the router's requests counts from its dispatch to its end, even if reports are
        /// late or reordered.
        #[test]
        fn a_late_report_never_erases_a_newer_dispatch(
            moves in prop::collection::vec((0u8..6, any::<prop::sample::Index>()), 0..200),
            others in 0u32..5,
        ) {
            let (mut ledger, mut backend) = (books(), Backend { others, ..Backend::default() });
            let mut under_way = Vec::new();
            let mut there = BTreeSet::new();
            let mut reports = VecDeque::new();
            let mut reported = false;
            for (kind, index) in moves {
                match kind {
                    0 | 1 => under_way.push(ledger.begin(10)),
                    2 if !under_way.is_empty() => {
                        let sent = under_way.swap_remove(index.index(under_way.len()));
                        backend.arrive(sent);
                        there.insert(sent.0);
                    }
                    3 if !there.is_empty() => {
                        let seq = *there.iter().nth(index.index(there.len())).unwrap();
                        there.remove(&seq);
                        backend.own.remove(&seq);
                        ledger.finish(seq);
                    }
                    4 => reports.push_back(backend.report()),
                    5 if !reports.is_empty() => {
                        let late = reports.remove(index.index(reports.len())).unwrap();
                        ledger.report(late);
                        reported = true;
                    }
                    _ => {}
                }
                let own = (under_way.len() + there.len()) as u32;
                prop_assert_eq!(ledger.own(), own);
                prop_assert_eq!(ledger.requests(), own + if reported { others } else { 0 });
                // Tokens of requests that have not arrived yet always count.
                prop_assert!(ledger.tokens() >= 10 * under_way.len() as u64);
            }
        }

        /// A lost dispatch does not block the acknowledgement of later dispatches for ever.
        #[test]
        fn the_floor_passes_what_is_lost(lost in prop::collection::vec(any::<bool>(), 1..40)) {
            let (mut ledger, mut backend) = (books(), Backend::default());
            let first = ledger.begin(1);
            backend.arrive(first);
            ledger.acknowledge(first.0);
            for lost in lost {
                let sent = ledger.begin(1);
                if lost {
                    ledger.finish(sent.0);
                } else {
                    backend.arrive(sent);
                    ledger.report(backend.report());
                }
            }
            let last = ledger.begin(1);
            backend.arrive(last);
            prop_assert_eq!(backend.report().seen, last.0);
        }
    }

    #[test]
    fn reports_of_a_backend_that_came_back_count_again() {
        let mut ledger = books();
        let report =
            |epoch, at, requests| LoadReport { epoch, at, requests, ..LoadReport::default() };
        assert!(ledger.report(report(1, 9, 4)));
        assert!(!ledger.report(report(1, 8, 7)));
        assert_eq!(ledger.requests(), 4);
        assert!(ledger.report(report(2, 1, 5)));
        assert_eq!(ledger.requests(), 5);
        ledger.forget();
        assert_eq!(ledger.requests(), 0);
    }

    #[test]
    fn no_number_of_a_report_is_too_large() {
        for accounting in [Accounting::Acknowledged, Accounting::Overwritten] {
            let mut ledger = Ledger::new(accounting);
            let requests = u32::MAX;
            let (tokens, ahead) = (u64::MAX, u64::MAX);
            let report = LoadReport { at: 1, requests, tokens, ahead, ..LoadReport::default() };
            ledger.report(report);
            ledger.begin(1);
            assert_eq!((ledger.requests(), ledger.tokens()), (u32::MAX, u64::MAX));
            assert_eq!(ledger.ahead(), u64::MAX);
        }
    }

    #[test]
    fn without_acknowledgement_a_late_report_erases() {
        let mut ledger = Ledger::new(Accounting::Overwritten);
        let late = LoadReport { at: 1, requests: 0, ..LoadReport::default() };
        ledger.begin(1);
        ledger.begin(1);
        assert_eq!(ledger.requests(), 2);
        ledger.report(late);
        assert_eq!(ledger.requests(), 0);
        ledger.begin(1);
        assert_eq!(ledger.requests(), 1);
    }
}
