//! Recurrent states that are kept in state pages.

use std::panic::{AssertUnwindSafe, catch_unwind};

use forebay_scheduler::{Request, SchedulerConfig, StateCache};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use crate::device::{NAN_TOKEN, VOCAB};
use crate::harness::states::Spoilt;
use crate::harness::{Harness, config, request};
use crate::model::{all_machines, ops, run, run_on, states};

/// A configuration with state pages.
pub(crate) fn machine(pages: u32, interval: u32) -> SchedulerConfig {
    let states = Some(StateCache { pages, interval, host_pages: 0, weight: 1 });
    SchedulerConfig { pages: 200, max_running: 8, slots: 12, states, ..config() }
}

pub(crate) fn text(seed: i32, length: i32) -> Vec<i32> {
    (0..length).map(|at| (at * (seed + 3) + at / 5 + seed) % VOCAB).collect()
}

/// Runs until all requests have ended.
fn settle(harness: &mut Harness) {
    loop {
        while harness.plan() {}
        if !harness.apply() {
            return;
        }
    }
}

/// Runs a request alone. Returns the number of prompt tokens that a kept state covered.
fn ask(harness: &mut Harness, id: u64, prompt: Vec<i32>, max_tokens: u32) -> u32 {
    harness.submit(request(id, prompt, max_tokens));
    settle(harness);
    harness.clients[&id].cached_tokens
}

#[test]
fn a_conversation_of_ten_turns_computes_a_page_at_most_beside_what_is_new() {
    for depth in [1, 2] {
        for answer in 1..9 {
            let mut harness = Harness::new(machine(64, 0), depth);
            let page = 4;
            let (mut said, mut known) = (text(1, 30), 0);
            for turn in 0..10_u64 {
                let cached = ask(&mut harness, turn, said.clone(), answer) as usize;
                assert!(cached + page >= known, "turn {turn}: {cached} of {known} tokens");
                said.extend(&harness.clients[&turn].tokens);
                known = said.len();
                said.extend(text(turn as i32, 5 + turn as i32 % 3));
            }
            harness.drain();
        }
    }
}

#[test]
fn a_thought_that_is_left_out_of_the_next_turn_costs_no_more_than_itself() {
    let mut harness = Harness::new(machine(64, 0), 2);
    let mut said = text(2, 41);
    for turn in 0..5_u64 {
        let known = if turn == 0 { 0 } else { said.len() - 7 };
        let cached = ask(&mut harness, turn, said.clone(), 17) as usize;
        assert!(cached + 4 >= known, "turn {turn}: {cached} of {known} tokens");
        said.extend(text(turn as i32 + 3, 7));
    }
    harness.drain();
}

#[test]
fn the_second_request_that_leaves_a_prefix_finds_its_state() {
    let mut harness = Harness::new(machine(64, 0), 2);
    let system = text(1, 40);
    let with = |tail: i32| [system.clone(), text(tail, 30)].concat();
    assert_eq!(ask(&mut harness, 0, with(4), 3), 0);
    // The prefix's blocks are cached, but no state is. This request keeps a state where the prompts
    // diverge.
    assert_eq!(ask(&mut harness, 1, with(5), 3), 0);
    let stats = harness.scheduler.stats();
    assert_eq!((stats.states.hit_tokens, stats.states.missed_tokens), (0, 40));
    assert_eq!(ask(&mut harness, 2, with(6), 3), 40);
    assert_eq!(ask(&mut harness, 3, with(7), 3), 40);
    // If the same prompt is repeated, only the two tokens of its incomplete last page are computed.
    assert_eq!(ask(&mut harness, 4, with(7), 3), 68);
    harness.drain();
}

#[test]
fn a_long_prompt_keeps_states_on_its_way() {
    let mut harness = Harness::new(machine(64, 30), 2);
    let long = text(1, 200);
    assert_eq!(ask(&mut harness, 0, long.clone(), 2), 0);
    for (id, shared) in [(1, 190), (2, 130), (3, 97), (4, 63), (5, 31)] {
        let prompt = [&long[..shared], &text(id, 9)[..]].concat();
        let cached = ask(&mut harness, id as u64, prompt, 2);
        // States are kept at the interval of 30 tokens, rounded up to whole pages.
        assert_eq!(cached, shared as u32 / 32 * 32, "{shared} shared");
    }
    harness.drain();
}

#[test]
fn without_a_page_nothing_is_shared() {
    let mut harness = Harness::new(machine(0, 0), 2);
    for id in 0..3 {
        assert_eq!(ask(&mut harness, id, text(1, 40), 5), 0);
    }
    let stats = harness.scheduler.stats();
    assert_eq!((stats.prefix_queries, stats.states.saves, stats.pages_cached), (0, 0, 0));
    harness.drain();
}

#[test]
fn a_running_request_has_one_state_of_its_answer_and_the_oldest_give_way() {
    let mut harness = Harness::new(machine(3, 0), 2);
    let first = text(1, 21);
    ask(&mut harness, 0, first.clone(), 60);
    let stats = harness.scheduler.stats().states;
    assert_eq!(
        (stats.pages_cached, stats.evictions),
        (2, 0),
        "one state of the prompt, and the last one"
    );
    assert!(stats.saves > 10);
    for (id, seed) in [(1, 5), (2, 6), (3, 7)] {
        ask(&mut harness, id, text(seed, 21), 2);
    }
    assert_eq!(ask(&mut harness, 4, text(7, 21), 2), 20, "the latest state is kept");
    assert_eq!(ask(&mut harness, 5, first, 2), 0, "the first state was evicted");
    assert!(harness.scheduler.stats().states.evictions > 0);
    harness.drain();
}

#[test]
fn a_victim_goes_on_from_its_last_page() {
    for depth in [1, 2] {
        // The number of steps before the preemption. After some of these numbers the request is in
        // its prompt of 70 tokens, after others in its answer.
        for steps in 2..40 {
            let config = SchedulerConfig { max_running: 1, slots: 2, ..machine(16, 0) };
            let mut harness = Harness::new(config, depth);
            let victim = Request { background: true, ..request(0, text(1, 70), 40) };
            harness.submit(victim);
            for _ in 0..steps {
                harness.plan();
                harness.apply();
            }
            harness.submit(request(1, text(2, 9), 3));
            harness.drain();
            let stats = harness.scheduler.stats();
            assert_eq!(stats.preemptions, 1, "after {steps} steps");
            // The rest of a page, and the token that was in flight, are recomputed.
            assert!(stats.recomputed_tokens <= 5, "{steps}: {}", stats.recomputed_tokens);
        }
    }
}

#[test]
fn states_die_with_the_hand() {
    let mut harness = Harness::new(machine(16, 0), 2);
    assert_eq!(ask(&mut harness, 0, text(1, 30), 9), 0);
    harness.submit(request(1, text(1, 33), 9));
    harness.plan();
    harness.reset();
    assert_eq!(harness.scheduler.stats().states.pages_cached, 0);
    harness.drain();
    assert_eq!(ask(&mut harness, 2, text(1, 33), 9), 0, "the states were flushed");
}

/// Configurations with recurrent states and a prefix cache.
pub(crate) fn recurrent() -> impl Strategy<Value = SchedulerConfig> {
    (all_machines(), states(), 8..40_u32).prop_map(|(config, states, pages)| SchedulerConfig {
        states: Some(states),
        // Adapters cannot be used with recurrent layers.
        places: 0,
        sparse: None,
        tokens_a_row: 1,
        prefix_cache: true,
        pages,
        ..config
    })
}

/// The number of random runs: `FOREBAY_STATES`, or the default.
fn stories() -> ProptestConfig {
    let cases = std::env::var("FOREBAY_STATES").map(|count| count.parse().expect("a number"));
    ProptestConfig::with_cases(cases.unwrap_or(1024))
}

proptest! {
    #![proptest_config(stories())]

    #[test]
    fn everybody_ends_as_if_alone_with_recurrent_states(
        config in recurrent(), depth in 1..=2_usize, ops in ops(&[NAN_TOKEN], 1),
    ) {
        run(config, depth, ops);
    }
}

/// Checks that the random runs detect a missing load, saves that are one plan late, and mixed-up
/// states of slots. So they would detect a scheduler with any of these faults.
#[test]
fn each_fault_of_states_is_found() {
    for fault in [Spoilt::NoLoad, Spoilt::LateSaves, Spoilt::MixedSaves, Spoilt::MixedLoads] {
        assert!(is_found(fault, recurrent()), "{fault:?} changes nothing");
    }
}

/// True if one of the first random runs with these configurations detects the fault.
pub(crate) fn is_found(fault: Spoilt, machines: impl Strategy<Value = SchedulerConfig>) -> bool {
    let mut runner = TestRunner::deterministic();
    let story = (machines, 1..=2_usize, ops(&[], 0));
    (0..4000).any(|_| {
        let tree = story.new_tree(&mut runner).expect("nothing is filtered");
        let (config, depth, ops) = tree.current();
        let spoilt = || Harness::new(config.clone(), depth).spoil(fault);
        catch_unwind(AssertUnwindSafe(|| drop(run_on(spoilt(), &config, ops.clone())))).is_err()
    })
}
