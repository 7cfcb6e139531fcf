//! Background requests, which never delay foreground requests.

use std::collections::{BTreeSet, VecDeque};

use forebay_protocol::{ROW_OK, StepPlan, StepResult, StepTiming};
use forebay_scheduler::{Event, Policy, Request, Scheduler, SchedulerConfig};
use proptest::prelude::*;

use crate::harness::{config, request};

/// The first id of background requests.
const BACKGROUND: u64 = 1 << 32;

/// A scheduler, a device whose tokens are arbitrary, and the requests that wait.
struct Replica {
    scheduler: Scheduler,
    plan: StepPlan,
    /// Foreground requests that wait for admission.
    waiting: BTreeSet<u64>,
    ended: BTreeSet<u64>,
    submitted: usize,
    /// Results of plans in flight, at most `lookahead` of them.
    results: VecDeque<StepResult>,
    lookahead: usize,
    /// Microseconds per step, and per position in it; 0 if the device reports no times.
    times: (u32, u32),
    /// The total time of all steps so far, in microseconds.
    us: u64,
    /// The number of tokens that background requests have received.
    given: usize,
}

impl Replica {
    fn new(config: SchedulerConfig) -> Self {
        let scheduler = Scheduler::new(config);
        Self {
            scheduler,
            plan: StepPlan::default(),
            waiting: BTreeSet::new(),
            ended: BTreeSet::new(),
            submitted: 0,
            results: VecDeque::new(),
            lookahead: 0,
            times: (0, 0),
            us: 0,
            given: 0,
        }
    }

    fn submit(&mut self, request: Request) {
        if !request.background {
            self.waiting.insert(request.id);
        }
        self.submitted += 1;
        self.scheduler.submit(request);
    }

    /// Runs one step. Checks that a background request is admitted only if no foreground request
    /// waits.
    fn step(&mut self) -> bool {
        let mut events = Vec::new();
        let planned = self.scheduler.next_plan(&mut self.plan, &mut events);
        let mut in_background = Vec::new();
        for event in &events {
            match event {
                Event::Admitted { id, .. } if *id >= BACKGROUND => in_background.push(*id),
                Event::Admitted { id, .. } => _ = self.waiting.remove(id),
                Event::Preempted { id } if *id < BACKGROUND => _ = self.waiting.insert(*id),
                _ => {}
            }
        }
        assert!(
            in_background.is_empty() || self.waiting.is_empty(),
            "{in_background:?} went before {:?}",
            self.waiting
        );
        if planned {
            let sampled = self.plan.rows().filter(|row| row.want.samples()).count();
            let positions: u32 = self.plan.rows().map(|row| row.length).sum();
            let device_us = self.times.0 + self.times.1 * positions;
            self.us += u64::from(device_us);
            self.results.push_back(StepResult {
                step: self.plan.step(),
                tokens: vec![7; sampled],
                row_errors: vec![ROW_OK; self.plan.rows().len()],
                timing: StepTiming { device_us, ..StepTiming::default() },
                ..StepResult::default()
            });
        }
        let due = !planned || self.results.len() > self.lookahead;
        let result = if due { self.results.pop_front() } else { None };
        let works = planned || result.is_some();
        if let Some(result) = result {
            self.scheduler.apply(&result, &mut events).expect("the result fits");
        }
        for event in events {
            self.given += usize::from(matches!(event, Event::Token { id, .. } if id >= BACKGROUND));
            if let Event::Finished { id, .. } = event {
                // A result that was in flight may end a preempted request.
                self.waiting.remove(&id);
                assert!(self.ended.insert(id), "{id} ends once");
            }
        }
        assert_eq!(self.scheduler.check_integrity(), Ok(()));
        works
    }

    fn finish(&mut self) {
        while self.ended.len() < self.submitted {
            assert!(self.step(), "there is work");
        }
    }
}

fn in_background(client: u64, id: u64, prompt: usize, max_tokens: u32) -> Request {
    let id = BACKGROUND + id;
    Request { client, background: true, ..request(id, vec![1; prompt], max_tokens) }
}

fn small() -> SchedulerConfig {
    SchedulerConfig {
        slots: 8,
        max_running: 4,
        pages: 400,
        page_size: 16,
        token_budget: 256,
        fair: true,
        step_shares: true,
        ..config()
    }
}

/// Background requests make room for foreground requests in nearly every step. This also holds for
/// requests of the same client, for the worst priority, and when pages are scarce.
#[test]
fn a_step_frees_a_place_for_each_that_comes() {
    for policy in [Policy::Fcfs, Policy::Priority, Policy::PriorityAscending] {
        for (fair, step_shares) in [(true, true), (false, true), (true, false), (false, false)] {
            for pages in [400, 60] {
                let config = SchedulerConfig { policy, fair, step_shares, pages, ..small() };
                let mut replica = Replica::new(config);
                for id in 0..40 {
                    replica.submit(in_background(1, id, 200, 500));
                }
                for _ in 0..30 {
                    replica.step();
                }
                for id in 0..4 {
                    let priority = if policy == Policy::Priority { i32::MIN } else { i32::MAX };
                    let others = Request { client: 1, priority, ..request(id, vec![1; 200], 5) };
                    replica.submit(others);
                }
                let steps = (1..100).find(|_| {
                    replica.step();
                    replica.waiting.is_empty()
                });
                let bound = if pages == 60 { 12 } else { 5 };
                assert!(steps.is_some_and(|steps| steps <= bound), "{steps:?}, {pages} pages");
                replica.finish();
            }
        }
    }
}

#[test]
fn nobody_gives_way_to_work_in_the_background() {
    let mut replica = Replica::new(small());
    for id in 0..4 {
        replica.submit(Request { client: 1, ..request(id, vec![1; 20], 300) });
    }
    replica.step();
    // Submit a background request of a client that has no share yet.
    replica.submit(in_background(2, 0, 20, 5));
    while replica.ended.is_empty() {
        replica.step();
        assert_eq!(replica.scheduler.stats().preemptions, 0);
    }
    replica.finish();
}

/// The scheduler has promised a background client another client's slot, which becomes free after a
/// step in flight. A foreground request that arrives meanwhile is admitted first.
#[test]
fn a_promise_to_work_in_the_background_holds_while_nobody_else_waits() {
    let mut replica = Replica::new(SchedulerConfig { slots: 4, ..small() });
    replica.lookahead = 1;
    for id in 0..4 {
        replica.submit(in_background(1, id, 20, 300));
    }
    replica.step();
    replica.step();
    replica.submit(in_background(2, 4, 20, 5));
    replica.step();
    assert_eq!(replica.scheduler.stats().preemptions, 1, "the second client gets its share");
    replica.submit(Request { client: 3, ..request(1, vec![1; 20], 5) });
    replica.step();
    assert!(replica.waiting.is_empty(), "the foreground request goes first");
    replica.finish();
}

/// Runs four streams beside background requests. Returns the time of 2000 steps relative to steps
/// with the streams alone, and the number of tokens of the background requests.
fn slowed(percent: u32, times: (u32, u32), lookahead: usize) -> (f64, usize) {
    let config =
        SchedulerConfig { background_share: percent, max_running: 8, pages: 2000, ..small() };
    let mut replica = Replica::new(SchedulerConfig { slots: 12, ..config });
    (replica.times, replica.lookahead) = (times, lookahead);
    for id in 0..4 {
        replica.submit(Request { client: 1, ..request(id, vec![1; 16], 4000) });
    }
    replica.step();
    replica.step();
    for id in 0..8 {
        replica.submit(in_background(2, id, 64, 3000));
    }
    replica.us = 0;
    for _ in 0..2000 {
        assert!(replica.step());
    }
    (replica.us as f64 / f64::from(2000 * (times.0 + 4 * times.1)), replica.given)
}

#[test]
fn streams_lose_their_share_to_work_in_the_background_and_no_more() {
    for lookahead in [0, 1] {
        // One device is compute-bound; the other reads all its weights in each step, for any number
        // of rows.
        let (slow, few) = slowed(5, (0, 1000), lookahead);
        assert!(slow < 1.06 && few > 100, "{slow}, {few} tokens");
        let (slow, many) = slowed(5, (10_000, 10), lookahead);
        assert!(slow < 1.06 && many > 7000, "{slow}, {many} tokens");
        let (slow, all) = slowed(100, (0, 1000), lookahead);
        assert!(slow > 1.9 && all > 7000, "without a bound: {slow}, {all} tokens");
        assert_eq!(
            slowed(0, (10_000, 10), lookahead).1,
            0,
            "a share of 0 leaves background requests no token beside others"
        );
    }
}

#[test]
fn work_in_the_background_has_all_when_the_others_have_ended() {
    let mut replica = Replica::new(SchedulerConfig { background_share: 0, ..small() });
    replica.times = (1000, 100);
    replica.submit(Request { client: 1, ..request(0, vec![1; 16], 50) });
    replica.step();
    for id in 0..3 {
        replica.submit(in_background(2, id, 64, 50));
    }
    while replica.ended.is_empty() {
        replica.step();
    }
    assert_eq!(replica.given, 0);
    replica.finish();
    assert_eq!(replica.given, 150);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    /// In any order of arrivals, no foreground request waits for a background request, and all end.
    #[test]
    fn nobody_waits_behind_work_in_the_background(
        arrivals in prop::collection::vec(
            (any::<bool>(), 0..3_u64, 1..300_usize, 1..60_u32, 0..6_usize), 1..60,
        ),
        pages in 30..200_u32,
        fair in any::<bool>(),
        step_shares in any::<bool>(),
        lookahead in 0..2_usize,
        background_share in prop::sample::select(vec![0, 5, 100]),
        times in prop::sample::select(vec![(0, 0), (1000, 1), (10, 100)]),
    ) {
        let config = SchedulerConfig { pages, fair, step_shares, background_share, ..small() };
        let mut replica = Replica::new(config);
        (replica.lookahead, replica.times) = (lookahead, times);
        for (id, (background, client, prompt, max_tokens, steps)) in (0..).zip(arrivals) {
            let come = in_background(client, id, prompt, max_tokens);
            let id = if background { come.id } else { id };
            replica.submit(Request { id, background, ..come });
            for _ in 0..steps {
                replica.step();
            }
        }
        replica.finish();
    }
}
