//! A queue of jobs in which clients take turns.
//!
//! The queue uses start-time fair queueing over measured time, like the scheduler's queue. In
//! virtual time, a job starts at the end of its client's previous job, and the job with the
//! earliest start runs first. So a client whose jobs take long is served less often, however many
//! jobs it has. A client's cheap jobs run before its expensive ones. But after `CHEAP_FIRST` cheap
//! jobs, an expensive one that waits runs next, unless the caller takes only cheap jobs. When the
//! queue is empty, the virtual times of all clients are forgotten.

use std::collections::{BTreeMap, VecDeque};

/// The largest number of cheap jobs of a client that run while an expensive job of the same client
/// waits. A caller that takes only cheap jobs may exceed this number.
const CHEAP_FIRST: u32 = 8;

/// The queue of waiting jobs.
#[derive(Debug)]
pub(crate) struct Turns<T> {
    /// The present virtual time, in microseconds.
    now: u64,
    lanes: BTreeMap<u64, Lane<T>>,
    waiting: usize,
}

/// A client's waiting jobs.
#[derive(Debug)]
struct Lane<T> {
    /// The start of the client's next job in virtual time.
    start: u64,
    cheap: VecDeque<Ticket<T>>,
    others: VecDeque<Ticket<T>>,
    /// The number of cheap jobs taken since the last job that was not cheap.
    passed: u32,
}

/// A job, and its expected time.
#[derive(Debug)]
pub(crate) struct Ticket<T> {
    pub(crate) client: u64,
    pub(crate) cheap: bool,
    pub(crate) expected_us: u64,
    pub(crate) job: T,
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Self { now: 0, lanes: BTreeMap::new(), waiting: 0 }
    }
}

impl<T> Turns<T> {
    pub(crate) fn push(&mut self, ticket: Ticket<T>) {
        let start = self.now;
        let lane = self.lanes.entry(ticket.client).or_insert_with(|| Lane {
            start,
            cheap: VecDeque::new(),
            others: VecDeque::new(),
            passed: 0,
        });
        if lane.cheap.is_empty() && lane.others.is_empty() {
            lane.start = lane.start.max(start);
        }
        let jobs = if ticket.cheap { &mut lane.cheap } else { &mut lane.others };
        jobs.push_back(ticket);
        self.waiting += 1;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Removes and returns the next job. With `cheap`, considers only cheap jobs.
    pub(crate) fn pop(&mut self, cheap: bool) -> Option<Ticket<T>> {
        let able = self.lanes.values_mut().filter(|lane| {
            let others = !cheap && !lane.others.is_empty();
            others || !lane.cheap.is_empty()
        });
        let lane = able.min_by_key(|lane| lane.start)?;
        let overdue = lane.cheap.is_empty() || lane.passed >= CHEAP_FIRST;
        let ticket = if !cheap && overdue && !lane.others.is_empty() {
            lane.passed = 0;
            lane.others.pop_front()
        } else {
            lane.passed = lane.passed.saturating_add(1);
            lane.cheap.pop_front()
        }?;
        self.now = self.now.max(lane.start);
        lane.start = lane.start.saturating_add(ticket.expected_us.max(1));
        self.took();
        Some(ticket)
    }

    /// Corrects a client's virtual time: its job took `us` microseconds, not `expected_us`.
    pub(crate) fn done(&mut self, client: u64, expected_us: u64, us: u64) {
        if let Some(lane) = self.lanes.get_mut(&client) {
            let (expected, taken) = (expected_us.max(1), us.max(1));
            lane.start = lane.start.saturating_add(taken).saturating_sub(expected);
        }
    }

    /// Removes the first matching job.
    pub(crate) fn remove(&mut self, mut is: impl FnMut(&T) -> bool) -> Option<Ticket<T>> {
        let ticket = self.lanes.values_mut().find_map(|lane| {
            [&mut lane.cheap, &mut lane.others].into_iter().find_map(|jobs| {
                let at = jobs.iter().position(|ticket| is(&ticket.job))?;
                jobs.remove(at)
            })
        })?;
        self.took();
        Some(ticket)
    }

    fn took(&mut self) {
        self.waiting -= 1;
        if self.waiting == 0 {
            self.lanes.clear();
            self.now = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ticket(client: u64, cheap: bool, expected_us: u64, job: u32) -> Ticket<u32> {
        Ticket { client, cheap, expected_us, job }
    }

    #[test]
    fn a_client_with_dear_jobs_has_its_turn_after_the_time_that_they_took() {
        let mut turns = Turns::default();
        for job in 0..50 {
            turns.push(ticket(1, false, 0, job));
        }
        let mut order = Vec::new();
        for round in 0..40 {
            if round < 30 {
                turns.push(ticket(2, true, 100, 100 + round));
            }
            let next = turns.pop(false).expect("many wait");
            turns.done(next.client, next.expected_us, if next.client == 1 { 1000 } else { 100 });
            order.push(next.client);
        }
        assert_eq!(order[..12], [1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1]);
        assert_eq!(order.iter().filter(|&&client| client == 2).count(), 30, "{order:?}");
    }

    #[test]
    fn a_client_s_own_cheap_jobs_go_first_but_do_not_starve_the_others() {
        let mut turns = Turns::default();
        turns.push(ticket(1, false, 0, 0));
        for job in 1..20 {
            turns.push(ticket(1, true, 10, job));
        }
        let order: Vec<u32> = std::iter::from_fn(|| turns.pop(false)).map(|t| t.job).collect();
        assert_eq!(order.iter().position(|&job| job == 0), Some(CHEAP_FIRST as usize));
        assert_eq!(order.len(), 20);
    }

    proptest! {
        /// Each job is returned once. Jobs of one client and kind are returned in order. When the
        /// queue is empty, no client's virtual time is kept.
        #[test]
        fn everything_comes_out_once(
            ops in prop::collection::vec((0..4_u64, any::<bool>(), 0..3000_u64, 0..5_u8), 1..200),
        ) {
            let mut turns = Turns::default();
            let mut inside: Vec<(u64, bool, u32)> = Vec::new();
            for (job, (client, cheap, us, op)) in (0..).zip(ops) {
                match op {
                    0..=2 => {
                        turns.push(ticket(client, cheap, us / 2, job));
                        inside.push((client, cheap, job));
                    }
                    3 => {
                        let found = turns.pop(cheap);
                        prop_assert_eq!(found.is_some(), inside.iter().any(|job| job.1 || !cheap));
                        let Some(found) = found else { continue };
                        let of = (found.client, found.cheap, found.job);
                        let first = inside.iter().find(|job| (job.0, job.1) == (of.0, of.1));
                        prop_assert_eq!(first, Some(&of));
                        turns.done(found.client, found.expected_us, us);
                        inside.retain(|job| job.2 != of.2);
                    }
                    _ => {
                        let wanted = inside.first().map_or(u32::MAX, |job| job.2);
                        let found = turns.remove(|&job| job == wanted).map(|ticket| ticket.job);
                        prop_assert_eq!(found.is_some(), !inside.is_empty());
                        inside.retain(|job| Some(job.2) != found);
                    }
                }
                prop_assert_eq!(turns.is_empty(), inside.is_empty());
                prop_assert!(!turns.is_empty() || turns.lanes.is_empty(), "a debt is left");
            }
        }
    }
}
