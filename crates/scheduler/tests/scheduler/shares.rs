//! Shares of clients, and the size of plans.

use forebay_protocol::{ROW_OK, SamplingParams, SlotSpec, StepPlan, StepResult};
use forebay_scheduler::{
    Event, MAX_REQUEST_WORDS, Past, Phase, Policy, Request, STEP_WORDS, Scheduler, SchedulerConfig,
    request_words,
};

use crate::harness::{Harness, config, pooled, request, telling};

/// A scheduler, and a device whose tokens are arbitrary.
struct Replica {
    scheduler: Scheduler,
    plan: StepPlan,
    events: Vec<Event>,
}

impl Replica {
    fn new(config: SchedulerConfig) -> Self {
        let scheduler = Scheduler::new(config);
        Self { scheduler, plan: StepPlan::default(), events: Vec::new() }
    }

    fn submit(&mut self, client: u64, id: u64, prompt: Vec<i32>, max_tokens: u32) {
        self.scheduler.submit(Request { client, ..request(id, prompt, max_tokens) });
    }

    /// Runs one step; returns the ids of the requests that it admitted.
    fn step(&mut self) -> Vec<u64> {
        self.events.clear();
        let planned = self.scheduler.next_plan(&mut self.plan, &mut self.events);
        assert!(planned, "there is work");
        let admitted = |event: &Event| match event {
            Event::Admitted { id, .. } => Some(*id),
            _ => None,
        };
        let ids = self.events.iter().filter_map(admitted).collect();
        let sampled = self.plan.rows().filter(|row| row.want.samples()).count();
        let result = StepResult {
            step: self.plan.step(),
            tokens: vec![7; sampled],
            row_errors: vec![ROW_OK; self.plan.rows().len()],
            ..StepResult::default()
        };
        self.scheduler.apply(&result, &mut self.events).expect("the result fits");
        ids
    }

    /// Returns the number of steps until `id` is admitted; `None` after `limit`.
    fn steps_until(&mut self, id: u64, limit: usize) -> Option<usize> {
        (1..=limit).find(|_| self.step().contains(&id))
    }
}

fn large() -> SchedulerConfig {
    SchedulerConfig {
        slots: 384,
        max_running: 256,
        pages: 20_000,
        page_size: 16,
        token_budget: 1024,
        fair: true,
        step_shares: true,
        ..config()
    }
}

#[test]
fn a_crowd_of_long_requests_does_not_keep_another_client_out() {
    for (fair, pages) in [(true, 20_000), (true, 600), (false, 20_000)] {
        let mut replica = Replica::new(SchedulerConfig { fair, pages, ..large() });
        for id in 0..4352 {
            replica.submit(1, id, vec![1], 8000);
        }
        for _ in 0..40 {
            replica.step();
        }
        replica.submit(2, 9999, vec![1; 300], 10);
        let waited = replica.steps_until(9999, 500);
        if fair {
            assert!(waited.is_some_and(|steps| steps <= 30), "with {pages} pages: {waited:?}");
        } else {
            assert_eq!(waited, None, "without turns it waits until a long request ends");
        }
        assert_eq!(replica.scheduler.check_integrity(), Ok(()));
    }
}

#[test]
fn a_request_that_was_handed_on_gets_its_share_and_keeps_no_other_from_theirs() {
    let mut replica = Replica::new(SchedulerConfig { max_running: 4, slots: 8, ..large() });
    for id in 0..4 {
        replica.submit(1, id, vec![1; 20], 2000);
    }
    assert_eq!(replica.step().len(), 4);
    let past = Past { admitted: true, handed: true, ..Past::default() };
    let handed = Request { client: 2, past, ..request(100, vec![1; 20], 2000) };
    replica.scheduler.submit(handed);
    replica.submit(3, 101, vec![1; 20], 2000);
    assert!(replica.steps_until(100, 30).is_some());
    assert!(replica.steps_until(101, 30).is_some());
}

#[test]
fn turns_go_by_what_requests_cost() {
    let mut replica = Replica::new(SchedulerConfig { max_running: 1, slots: 2, ..large() });
    for id in 0..20 {
        replica.submit(1, id, vec![1; 10], 30);
    }
    for id in 100..120 {
        replica.submit(2, id, vec![1; 5], 5);
    }
    let mut admitted = Vec::new();
    while admitted.len() < 20 {
        admitted.extend(replica.step());
    }
    // No request is preempted here: with one slot, no client has more than an even share.
    let cheap = admitted.iter().filter(|&&id| id >= 100).count();
    assert_eq!(cheap, 16, "four requests of ten tokens cost as much as one of forty: {admitted:?}");
}

#[test]
fn a_client_gets_its_even_share_of_what_runs_and_no_more() {
    let config = SchedulerConfig { max_running: 8, slots: 16, ..large() };
    let mut replica = Replica::new(config);
    for id in 0..8 {
        replica.submit(1, id, vec![1; 20], 2000);
    }
    assert_eq!(replica.step().len(), 8);
    for id in 100..108 {
        replica.submit(2, id, vec![1; 20], 1000);
        // The preempted request waits too, and preempts no request in turn.
        replica.steps_until(id, 20);
    }
    for _ in 0..40 {
        replica.step();
    }
    let running = replica.scheduler.views().filter(|view| view.phase != Phase::Queued);
    let second = running.filter(|view| view.id >= 100).count();
    let preempted = replica.scheduler.stats().preemptions;
    assert_eq!((second, preempted), (4, 4), "half of eight slots, after one preemption each");
    assert_eq!(replica.scheduler.check_integrity(), Ok(()));
}

#[test]
fn nobody_gives_way_to_a_client_that_has_its_share_or_is_less_important() {
    let config = SchedulerConfig { policy: Policy::Priority, max_running: 3, slots: 6, ..large() };
    let mut replica = Replica::new(config);
    for id in 0..3 {
        let priority = 1;
        let client = if id == 2 { 2 } else { 1 };
        let request = Request { client, priority, ..request(id, vec![1; 20], 2000) };
        replica.scheduler.submit(request);
    }
    assert_eq!(replica.step().len(), 3);
    let second = Request { client: 2, priority: 1, ..request(4, vec![1], 5) };
    replica.scheduler.submit(second);
    assert_eq!(
        replica.steps_until(4, 200),
        None,
        "two of three slots would be more than an even share"
    );
    replica.scheduler.abort(4);
    replica.scheduler.submit(Request { client: 3, priority: 0, ..request(5, vec![1], 5) });
    assert_eq!(replica.steps_until(5, 200), None, "all other requests have a higher priority");
    replica.scheduler.submit(Request { client: 3, priority: 1, ..request(6, vec![1], 5) });
    assert_eq!(replica.steps_until(6, 200), Some(1));
    assert_eq!(replica.scheduler.stats().preemptions, 1);
    assert_eq!(replica.scheduler.check_integrity(), Ok(()));
}

/// Each new client preempts a request that has much to recompute. This must not take most of the
/// steps.
#[test]
fn a_stream_of_new_clients_makes_others_give_way_only_now_and_then() {
    let config = SchedulerConfig { max_running: 8, slots: 16, token_budget: 64, ..large() };
    let mut replica = Replica::new(config);
    for id in 0..8 {
        replica.submit(1, id, vec![1; 640], 4000);
    }
    while replica.scheduler.stats().generated_tokens < 100 {
        replica.step();
    }
    for client in 0..300 {
        replica.submit(1000 + client, 1000 + client, vec![2], 2);
        replica.step();
    }
    let given_way = replica.scheduler.stats().preemptions;
    assert!(
        (1..=300 / 40).contains(&given_way),
        "{given_way} preemptions, each of ten steps' tokens"
    );
}

#[test]
fn a_probe_goes_first_under_every_policy_and_needs_no_free_place() {
    for policy in [Policy::Fcfs, Policy::Priority, Policy::PriorityAscending] {
        for fair in [false, true] {
            let config = SchedulerConfig { policy, fair, max_running: 2, slots: 4, ..large() };
            let mut replica = Replica::new(config);
            for (id, priority) in [(1, i32::MAX), (2, i32::MIN), (3, i32::MAX), (4, i32::MIN)] {
                let busy = Request { priority, ..request(id, vec![1], 1000) };
                replica.scheduler.submit(busy);
            }
            assert_eq!(replica.step().len(), 2);
            replica.scheduler.submit(Request { probe: true, ..request(9, vec![1], 1) });
            replica.scheduler.submit(Request { probe: true, ..request(10, vec![1], 1) });
            assert_eq!(replica.step(), [9], "a probe may exceed `max_running`, two may not");
            assert_eq!(replica.step(), [10]);
        }
    }
}

#[test]
fn what_is_too_much_for_one_plan_is_spread_over_several() {
    let biased = |id| {
        let logit_bias = vec![(1, 0.5); 1000];
        let sampling =
            SamplingParams { logit_bias: logit_bias.into(), ..SamplingParams::default() };
        let spec = SlotSpec { sampling, ..SlotSpec::default() };
        Request { spec, ..request(id, vec![1; 3], 20) }
    };
    let config = SchedulerConfig { step_words: 7000, max_running: 9, slots: 12, ..large() };
    let mut replica = Replica::new(config);
    for id in 0..9 {
        replica.scheduler.submit(biased(id));
    }
    let admitted: Vec<usize> = (0..4).map(|_| replica.step().len()).collect();
    assert_eq!(admitted, [3, 3, 3, 0], "each request needs two thousand words");
    let mut harness =
        Harness::new(SchedulerConfig { step_words: 0, ..super::harness::config() }, 2);
    for id in 0..5 {
        harness.submit(biased(id));
    }
    assert!(harness.plan());
    assert_eq!(harness.plan.new_slots().count(), 1, "one request is admitted whatever its size");
    harness.drain();
}

#[test]
fn results_have_a_limit_too() {
    let config = SchedulerConfig { vector_size: 1 << 20, ..large() };
    let mut replica = Replica::new(config);
    for id in 0..20 {
        replica.scheduler.submit(pooled(id, vec![1; 3], 0));
    }
    let planned = replica.scheduler.next_plan(&mut replica.plan, &mut replica.events);
    assert!(planned);
    assert_eq!(replica.plan.rows().len(), STEP_WORDS >> 20);
}

#[test]
fn the_words_of_a_request_are_those_of_its_plan() {
    let sampling = SamplingParams {
        logit_bias: vec![(1, 0.5); 30].into(),
        min_tokens: 1,
        ..SamplingParams::default()
    };
    let mut replica = Replica::new(large());
    let spec = SlotSpec { sampling, stop_ids: vec![1; 7].into(), ..SlotSpec::default() };
    let whole = telling(1, vec![3; 100], 1, 1);
    replica.scheduler.submit(Request { spec: spec.clone(), ..whole });
    assert!(replica.scheduler.next_plan(&mut replica.plan, &mut replica.events));
    let empty = StepPlan::default().words();
    // A row that may return several tokens needs one more word.
    assert_eq!((replica.plan.words() - empty) as u64 + 1, request_words(100, &spec, 16, 1));
    let lists = SamplingParams { logit_bias: vec![(1, 0.5); 1024].into(), ..spec.sampling };
    let spec = SlotSpec { sampling: lists, stop_ids: vec![1; 1024].into(), ..spec };
    assert!(request_words(6_000_000, &spec, 1, 2) < MAX_REQUEST_WORDS, "a long context fits");
}

#[test]
#[should_panic(expected = "no room for")]
fn more_slots_than_a_plan_has_room_for_are_refused() {
    drop(Scheduler::new(SchedulerConfig { slots: 150_000, ..large() }));
}
