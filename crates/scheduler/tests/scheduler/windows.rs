//! Sliding-window layers, whose pages are in a separate pool.

use std::panic::{AssertUnwindSafe, catch_unwind};

use forebay_protocol::least_window_pages;
use forebay_scheduler::{Request, SchedulerConfig, Tower, WindowPart};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use crate::device::{NAN_TOKEN, VOCAB};
use crate::harness::{Harness, config, request};
use crate::model::{all_machines, ops, run, run_on};

/// A configuration with pages of 4 positions, and windows of 9.
fn machine(pages: u32) -> SchedulerConfig {
    let windows = Some(WindowPart { pages, window: 9 });
    SchedulerConfig { pages: 200, max_running: 8, slots: 12, windows, ..config() }
}

fn text(seed: i32, length: i32) -> Vec<i32> {
    (0..length).map(|at| (at * (seed + 3) + at / 5 + seed) % VOCAB).collect()
}

/// Runs until all requests have ended. Returns the peak number of held pages of the window part.
fn settle(harness: &mut Harness) -> usize {
    let mut most = 0;
    loop {
        while harness.plan() {
            most = most.max(harness.scheduler.stats().windows.pages_held);
        }
        if !harness.apply() {
            return most;
        }
    }
}

/// Runs a request alone. Returns the number of its prompt tokens that were cached.
fn ask(harness: &mut Harness, id: u64, prompt: Vec<i32>, max_tokens: u32) -> u32 {
    harness.submit(request(id, prompt, max_tokens));
    settle(harness);
    harness.clients[&id].cached_tokens
}

#[test]
fn a_long_request_holds_the_pages_of_its_window_and_of_its_rows() {
    for depth in [1, 2] {
        let mut harness = Harness::new(machine(40), depth);
        harness.submit(request(0, text(1, 400), 200));
        let most = settle(&mut harness);
        // These are the pages of two steps of 16 tokens, of the window before them, and one
        // incomplete page.
        assert!(most <= 12, "{most} of 150 pages");
        let stats = harness.scheduler.stats();
        assert!(stats.windows.passed >= 145, "{:?}", stats.windows);
        assert_eq!(stats.preemptions, 0);
        harness.drain();
    }
}

#[test]
fn a_request_needs_no_more_than_the_fewest_pages() {
    for depth in [1, 2] {
        for window in 1..20 {
            let least = least_window_pages(window, 4);
            let windows = Some(WindowPart { pages: least, window });
            let mut harness = Harness::new(SchedulerConfig { windows, ..machine(4) }, depth);
            let masked = Request { masked: true, ..request(1, text(2, 50), 30) };
            harness.submit(request(0, text(1, 100), 50));
            harness.submit(masked);
            harness.drain();
        }
    }
}

#[test]
fn a_conversation_computes_a_page_at_most_beside_what_is_new() {
    let mut harness = Harness::new(machine(16), 2);
    let (mut said, mut known) = (text(1, 30), 0);
    for turn in 0..10_u64 {
        let cached = ask(&mut harness, turn, said.clone(), 7) as usize;
        assert!(cached + 4 >= known, "turn {turn}: {cached} of {known} tokens");
        said.extend(&harness.clients[&turn].tokens);
        known = said.len();
        said.extend(text(turn as i32, 5));
    }
    assert_eq!(harness.scheduler.stats().windows.missed_tokens, 0);
    harness.drain();
}

#[test]
fn ends_of_requests_stay_while_others_pass_pages() {
    let mut harness = Harness::new(machine(16), 2);
    let first = text(1, 40);
    assert_eq!(ask(&mut harness, 0, first.clone(), 1), 0);
    // This prompt uses, one after another, four times as many pages as the pool has.
    assert_eq!(ask(&mut harness, 1, text(2, 256), 1), 0);
    let next = [&first[..], &text(3, 5)[..]].concat();
    assert_eq!(ask(&mut harness, 2, next, 1), 40);
    // The pages in the middle of the second prompt were dropped, so its prefix cannot be used.
    let middle = [&text(2, 256)[..128], &text(4, 5)[..]].concat();
    assert_eq!(ask(&mut harness, 3, middle, 1), 0);
    assert_eq!(harness.scheduler.stats().windows.missed_tokens, 128);
    harness.drain();
}

#[test]
fn the_search_goes_back_from_the_longest_match() {
    let mut harness = Harness::new(machine(200), 2);
    let shared = text(1, 60);
    ask(&mut harness, 0, shared.clone(), 1);
    for (id, length) in [(1, 58), (2, 41), (3, 23), (4, 9), (5, 3)] {
        let prompt = [&shared[..length], &text(id + 4, 5)[..]].concat();
        let cached = ask(&mut harness, id as u64, prompt, 1);
        assert_eq!(cached as usize, length / 4 * 4, "all full pages of the prefix are found");
    }
    harness.drain();
    // Only the pages of the first prompt and of the last one are left.
    let mut harness = Harness::new(machine(8), 2);
    ask(&mut harness, 0, shared[..20].to_vec(), 1);
    ask(&mut harness, 1, shared.clone(), 1);
    let prompt = [&shared[..30], &text(9, 5)[..]].concat();
    let cached = ask(&mut harness, 2, prompt, 1);
    assert!(cached < 28, "{cached}");
    let missed = harness.scheduler.stats().windows.missed_tokens;
    assert_eq!(missed, u64::from(28 - cached));
    harness.drain();
}

#[test]
fn a_victim_comes_back_at_every_step() {
    for depth in [1, 2] {
        for steps in 2..40 {
            let config = SchedulerConfig { max_running: 1, slots: 2, ..machine(12) };
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
            assert!(stats.recomputed_tokens <= 5, "{steps}: {}", stats.recomputed_tokens);
        }
    }
}

/// Configurations with a window pool, which has few pages, or as many as the main pool.
fn windowed() -> impl Strategy<Value = SchedulerConfig> {
    (all_machines(), 1..30_u32, 0..30_u32, 6..40_u32).prop_map(|(config, window, more, pages)| {
        let least = least_window_pages(window, config.page_size);
        let part = WindowPart { pages: least.saturating_add(more).min(pages), window };
        // If images have to be whole, there is only one page pool.
        let tower = config.tower.map(|tower| Tower { whole: false, ..tower });
        SchedulerConfig {
            windows: Some(part),
            tower,
            pages,
            host: None,
            sparse: None,
            states: None,
            ..config
        }
    })
}

/// The number of random runs: `FOREBAY_WINDOWS`, or the default.
fn stories() -> ProptestConfig {
    let cases = std::env::var("FOREBAY_WINDOWS").map(|count| count.parse().expect("a number"));
    ProptestConfig::with_cases(cases.unwrap_or(1024))
}

proptest! {
    #![proptest_config(stories())]

    /// The fake device rejects each row that reads a dropped page, or a page that another request
    /// has written.
    #[test]
    fn everybody_ends_as_if_alone_with_a_window_part(
        config in windowed(), depth in 1..=2_usize, ops in ops(&[NAN_TOKEN], 1),
    ) {
        run(config, depth, ops);
    }
}

/// Checks that the random runs detect a page that is dropped one position too early.
#[test]
fn a_page_that_is_dropped_too_early_is_found() {
    let mut runner = TestRunner::deterministic();
    let story = (windowed(), 1..=2_usize, ops(&[], 0));
    let found = (0..4000).any(|_| {
        let tree = story.new_tree(&mut runner).expect("nothing is filtered");
        let (config, depth, ops) = tree.current();
        let spoilt = || {
            let mut harness = Harness::new(config.clone(), depth);
            harness.device.widen_window(1);
            harness
        };
        catch_unwind(AssertUnwindSafe(|| drop(run_on(spoilt(), &config, ops.clone())))).is_err()
    });
    assert!(found, "no run reads a page that was dropped too early");
}
