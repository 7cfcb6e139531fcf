//! Shares of a step's token budget between prompts.

use std::collections::BTreeMap;

use forebay_protocol::{ROW_OK, StepPlan, StepResult};
use forebay_scheduler::{DecodeGap, Event, Policy, Request, Scheduler, SchedulerConfig};
use proptest::prelude::*;

use crate::harness::{config, request};

const BUDGET: u32 = 1024;

/// A scheduler, and a device that only simulates the time of a step.
struct Replica {
    scheduler: Scheduler,
    plan: StepPlan,
    events: Vec<Event>,
    steps: usize,
    /// Microseconds of the last step.
    device_us: u32,
}

fn large() -> SchedulerConfig {
    SchedulerConfig {
        slots: 96,
        max_running: 64,
        pages: 20_000,
        page_size: 16,
        token_budget: BUDGET,
        fair: true,
        step_shares: true,
        ..config()
    }
}

impl Replica {
    fn new(config: SchedulerConfig) -> Self {
        let scheduler = Scheduler::new(config);
        let (plan, events) = (StepPlan::default(), Vec::new());
        Self { scheduler, plan, events, steps: 0, device_us: 0 }
    }

    /// Submits a prompt of one repeated token. Each request has a different token, so that no
    /// blocks are shared.
    fn submit(&mut self, client: u64, id: u64, prompt: u32, max_tokens: u32) {
        let prompt = vec![id as i32; prompt as usize];
        self.scheduler.submit(Request { client, ..request(id, prompt, max_tokens) });
    }

    /// Runs one step; returns the prompt tokens of each request in it.
    fn step(&mut self) -> BTreeMap<u64, u32> {
        self.events.clear();
        assert!(self.scheduler.next_plan(&mut self.plan, &mut self.events), "there is work");
        let sampled = self.plan.rows().filter(|row| row.want.samples()).count();
        let us = |row: forebay_protocol::Row| match row.length {
            1 => 10,
            length => 20 * length + length * (row.start / 1000),
        };
        self.device_us = 8000 + self.plan.rows().map(us).sum::<u32>();
        let mut result = StepResult {
            step: self.plan.step(),
            tokens: vec![7; sampled],
            row_errors: vec![ROW_OK; self.plan.rows().len()],
            ..StepResult::default()
        };
        result.timing.device_us = self.device_us;
        self.scheduler.apply(&result, &mut self.events).expect("the result fits");
        assert_eq!(self.scheduler.check_integrity(), Ok(()));
        self.steps += 1;
        let mut tokens = BTreeMap::new();
        for event in &self.events {
            if let Event::Prefilled { id, tokens: computed } = event {
                *tokens.entry(*id).or_default() += computed;
            }
        }
        tokens
    }

    /// Runs steps until a request has ended; returns their number, and fails after `limit`.
    fn steps_to_end(&mut self, id: u64, limit: usize) -> usize {
        for steps in 1..=limit {
            self.step();
            let ends = |event: &Event| matches!(event, Event::Finished { id: of, .. } if *of == id);
            if self.events.iter().any(ends) {
                return steps;
            }
        }
        panic!("{id} has not ended after {limit} steps");
    }
}

#[test]
fn a_short_prompt_passes_a_long_one_in_the_next_step() {
    for step_shares in [true, false] {
        let mut replica = Replica::new(SchedulerConfig { step_shares, ..large() });
        replica.submit(1, 1, 10_240, 1);
        assert_eq!(
            replica.step(),
            BTreeMap::from([(1, BUDGET)]),
            "a prompt alone has the whole step"
        );
        replica.submit(1, 2, 200, 1);
        let rows = replica.step();
        if step_shares {
            assert_eq!(rows, BTreeMap::from([(1, BUDGET - 200), (2, 200)]));
        } else {
            assert_eq!(rows, BTreeMap::from([(1, BUDGET)]));
        }
    }
}

#[test]
fn a_longer_prompt_of_the_same_client_waits_for_its_turn() {
    let mut replica = Replica::new(large());
    replica.submit(1, 1, 10_240, 1);
    replica.submit(1, 2, 20_480, 1);
    for _ in 0..10 {
        assert_eq!(replica.step(), BTreeMap::from([(1, BUDGET)]));
    }
    assert_eq!(replica.step(), BTreeMap::from([(2, BUDGET)]));
}

#[test]
fn under_a_flood_the_first_in_turn_has_half_of_every_step() {
    let mut replica = Replica::new(large());
    replica.submit(1, 1, 20 * BUDGET, 1);
    replica.step();
    let mut next = 2;
    for _ in 0..38 {
        for _ in 0..10 {
            replica.submit(1 + next % 3, next, 100, 1);
            next += 1;
        }
        let rows = replica.step();
        assert!(rows[&1] >= BUDGET / 2, "{rows:?}");
        assert_eq!(rows.values().sum::<u32>(), BUDGET);
    }
    assert!(!replica.step().contains_key(&1), "a prompt of 20 steps ends within 39");
}

#[test]
fn two_clients_with_long_prompts_get_the_same() {
    let mut replica = Replica::new(large());
    replica.submit(1, 1, 50 * BUDGET, 1);
    replica.step();
    replica.submit(2, 2, 100 * BUDGET, 1);
    let mut tokens = BTreeMap::new();
    for _ in 0..40 {
        for (id, computed) in replica.step() {
            *tokens.entry(id).or_insert(0) += computed;
        }
    }
    assert_eq!(tokens, BTreeMap::from([(1, 20 * BUDGET), (2, 20 * BUDGET)]));
}

#[test]
fn the_client_that_has_received_least_passes_first() {
    let mut replica = Replica::new(large());
    replica.submit(1, 1, 50 * BUDGET, 1);
    replica.step();
    let mut next = 100;
    let mut received: BTreeMap<u64, u32> = BTreeMap::new();
    replica.submit(3, 2, 40 * BUDGET, 1);
    for _ in 0..60 {
        // The second client has the shortest prompts, and always more of them than can be computed.
        for _ in 0..10 {
            replica.submit(2, next, 100, 1);
            next += 1;
        }
        for (id, tokens) in replica.step() {
            *received.entry(id.min(3)).or_default() += tokens;
        }
    }
    // The first client gets half, because it is first in turn. The others share the other half.
    assert_eq!(received[&1], 30 * BUDGET);
    assert!(received[&2].abs_diff(received[&3]) <= BUDGET, "{received:?}");
}

#[test]
fn priorities_hold_in_a_step() {
    let config = SchedulerConfig { policy: Policy::Priority, ..large() };
    let mut replica = Replica::new(config);
    let submit = |replica: &mut Replica, id: u64, prompt: u32, priority| {
        let prompt = vec![id as i32; prompt as usize];
        replica.scheduler.submit(Request { priority, ..request(id, prompt, 1) });
    };
    submit(&mut replica, 1, 10 * BUDGET, 0);
    replica.step();
    submit(&mut replica, 2, 2 * BUDGET, 5);
    submit(&mut replica, 3, 100, 0);
    assert_eq!(
        replica.step(),
        BTreeMap::from([(2, BUDGET)]),
        "the higher priority has the whole step"
    );
    assert_eq!(
        replica.step(),
        BTreeMap::from([(2, BUDGET)]),
        "no short prompt of lower priority passes it"
    );
    assert_eq!(replica.step(), BTreeMap::from([(1, BUDGET - 100), (3, 100)]));
}

/// Pages are scarce, and short prompts keep arriving. Those that pass the first waiting prompt may
/// have as many tokens together as that prompt, and no more.
#[test]
fn a_waiting_prompt_is_passed_by_no_more_tokens_than_its_own() {
    let mut replica = Replica::new(SchedulerConfig { pages: 250, ..large() });
    replica.submit(1, 1, 1600, 500);
    replica.step();
    replica.step();
    replica.submit(1, 2, 3000, 1);
    let (mut next, mut before) = (3, 0);
    while !replica.step().contains_key(&2) {
        let admitted = |event: &&Event| matches!(event, Event::Admitted { .. });
        before += replica.events.iter().filter(admitted).count();
        replica.submit(1, next, 100, 1);
        next += 1;
        assert!(replica.steps < 600, "the long prompt never had its turn");
    }
    assert_eq!(before, 29, "each counts 101 tokens, and 3001 may pass");
}

#[test]
fn nobody_takes_the_last_slot_before_its_turn() {
    let mut replica = Replica::new(SchedulerConfig { max_running: 2, slots: 4, ..large() });
    replica.submit(1, 1, 100 * BUDGET, 1);
    replica.step();
    replica.submit(1, 2, 3000, 1);
    replica.submit(1, 3, 100, 1);
    assert!(replica.step().contains_key(&2));
}

#[test]
fn a_prompt_whose_beginning_is_cached_counts_by_the_rest() {
    let mut replica = Replica::new(large());
    replica.submit(1, 1, 12 * BUDGET, 1);
    replica.steps_to_end(1, 12);
    replica.submit(1, 2, 10 * BUDGET, 1);
    replica.step();
    // This prompt is longer than the one before it, but all except one page is cached.
    let prompt = vec![1; 12 * BUDGET as usize];
    let names = large().namer.chain(0, &prompt, 16);
    let names = names.into();
    replica.scheduler.submit(Request { names, client: 1, ..request(3, prompt, 1) });
    let rows = replica.step();
    assert_eq!(rows[&3], 16, "{rows:?}");
}

#[test]
fn a_prompt_that_lacks_pages_is_passed_and_keeps_its_turn() {
    // The pages hold one long prompt. The second long one waits, and the short one passes it.
    let mut replica = Replica::new(SchedulerConfig { pages: 230, ..large() });
    replica.submit(1, 1, 3000, 400);
    for _ in 0..3 {
        replica.step();
    }
    replica.submit(1, 2, 3000, 1);
    replica.submit(1, 3, 100, 1);
    assert_eq!(
        replica.step(),
        BTreeMap::from([(3, 100)]),
        "the short prompt fits, and the one before it does not"
    );
    replica.steps_to_end(1, 500);
    replica.submit(1, 4, 3000, 1);
    assert!(replica.step().contains_key(&2));
}

#[test]
fn a_step_beside_running_streams_takes_no_longer_than_the_gap() {
    let gap = DecodeGap::Micros(16_000);
    for (decode_gap, bounded) in [(gap, true), (DecodeGap::Auto, true), (DecodeGap::Off, false)] {
        let mut replica = Replica::new(SchedulerConfig { decode_gap, ..large() });
        for id in 0..8 {
            replica.submit(1, id, 20, 5000);
        }
        for _ in 0..20 {
            replica.step();
        }
        replica.submit(1, 100, 100 * BUDGET, 1);
        let mut longest = 0;
        let mut steps = 0;
        loop {
            let rows = replica.step();
            let Some(&tokens) = rows.get(&100) else { break };
            steps += 1;
            // The scheduler learns the cost of a prompt token from the first step that has one.
            if steps > 2 {
                longest = longest.max(replica.device_us);
            }
            assert!(tokens > 0);
        }
        let bound = if decode_gap == gap { 17_600 } else { 53_300 };
        let within = longest <= bound;
        assert_eq!(within, bounded, "{decode_gap:?}: {longest} us");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// In any order of arrivals, every prompt is computed. None takes more than about twice as many
    /// steps as without `step_shares`.
    #[test]
    fn nobody_waits_more_than_twice_as_long(
        arrivals in prop::collection::vec((0..40_usize, 0..4_u64, 1..6000_u32), 1..40),
    ) {
        let mut ends = Vec::new();
        for step_shares in [true, false] {
            let mut replica = Replica::new(SchedulerConfig { step_shares, fair: false, ..large() });
            let mut end = vec![0; arrivals.len()];
            let mut alive = arrivals.len();
            while alive > 0 {
                for (id, &(at, client, prompt)) in arrivals.iter().enumerate() {
                    if at == replica.steps {
                        replica.submit(client, id as u64, prompt, 1);
                    }
                }
                if replica.scheduler.live().next().is_none() {
                    replica.steps += 1;
                    continue;
                }
                replica.step();
                for event in &replica.events {
                    if let Event::Finished { id, .. } = event {
                        end[*id as usize] = replica.steps;
                        alive -= 1;
                    }
                }
            }
            ends.push(end);
        }
        for (id, &(at, ..)) in arrivals.iter().enumerate() {
            let (with, without) = (ends[0][id] - at, ends[1][id] - at);
            // In its last step, an older prompt may leave some of its half to other prompts.
            let older = arrivals.iter().enumerate();
            let older = older.filter(|&(other, &(began, ..))| {
                (began, other) < (at, id) && ends[0][other] > at
            });
            let most = 2 * without + 2 + older.count();
            prop_assert!(with <= most, "{id} took {with} steps, and {without}");
        }
    }
}
