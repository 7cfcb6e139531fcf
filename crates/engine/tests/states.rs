//! A replica whose model has recurrent layers, with a simulated hand that rejects a row if the
//! state before it is missing.

use std::time::Duration;

use forebay_engine::{EngineConfig, FinishReason, HostConfig, Status};
use forebay_sim::testing::{self, RigParts, VOCAB, alone, request, text};
use forebay_sim::{SimClock, SimConfig, StateModel, Timing};

const PAGE: u32 = 4;

fn rig(config: EngineConfig, state_pages: u32) -> testing::Rig {
    rig_with_host(config, state_pages, 0)
}

fn rig_with_host(config: EngineConfig, state_pages: u32, host_state_pages: u32) -> testing::Rig {
    let states = StateModel { bytes: 1000, pages: state_pages, copy_gbps: None };
    let sim = SimConfig {
        clock: SimClock::virtual_time(),
        timing: Timing { states, ..Timing::default() },
        page_count: 200,
        host_pages: if config.host_tier.is_some() { 400 } else { 0 },
        host_state_pages,
        state_pages,
        vocab_size: VOCAB,
        text: text(),
        ..SimConfig::default()
    };
    let config = EngineConfig {
        max_running_requests: 8,
        slots: 12,
        page_size: PAGE,
        chunked_prefill_size: 32,
        context_length: 400,
        watchdog_timeout: Duration::from_secs(5),
        load_timeout: Duration::ZERO,
        mask_threads: 0,
        ..config
    };
    let rig = testing::Rig::start(config, sim, RigParts::default());
    rig.settled(|status| *status == Status::Ready);
    rig
}

/// Runs a request alone. Returns its tokens, and the number of prompt tokens that a kept state
/// covered.
fn ask(rig: &testing::Rig, id: u64, prompt: &[i32], max_tokens: u32) -> (Vec<i32>, u32) {
    rig.handle.submit(request(id, prompt.to_vec(), max_tokens)).expect("room");
    let story = rig.collect(1).remove(&id).expect("the request has outputs");
    assert_eq!(story.end, Some(FinishReason::Length));
    assert_eq!(story.tokens, alone(prompt.to_vec(), max_tokens), "request {id}");
    (story.tokens, story.cached_tokens)
}

fn prompt(length: i32) -> Vec<i32> {
    (0..length).map(|at| at * 7 % VOCAB as i32).collect()
}

#[test]
fn a_conversation_goes_on_from_kept_states_and_dies_with_the_hand() {
    for lookahead in [0, 1] {
        let rig = rig(EngineConfig { lookahead, ..EngineConfig::default() }, 16);
        let (mut said, mut known) = (prompt(30), 0);
        for turn in 0..10 {
            let (answer, cached) = ask(&rig, turn, &said, 7);
            assert!(cached + PAGE >= known, "turn {turn}: {cached} of {known} tokens");
            said.extend(answer);
            known = said.len() as u32;
            said.extend([3, 1, 4, 1, 5]);
        }
        let stats = rig.handle.stats().scheduler.states;
        assert_eq!((stats.pages, stats.pages_held, stats.loads), (16, 0, 9));
        assert!(stats.hit_tokens > 0 && stats.query_tokens > stats.hit_tokens, "{stats:?}");
        // The next hand has no kept states.
        rig.control.kill();
        while rig.handle.stats().hand.deaths == 0 {
            std::thread::yield_now();
        }
        rig.settled(|status| *status == Status::Ready);
        assert_eq!(ask(&rig, 10, &said, 7).1, 0);
    }
}

#[test]
fn without_state_pages_nothing_is_shared() {
    let rig = rig(EngineConfig::default(), 0);
    let said = prompt(30);
    for id in 0..3 {
        assert_eq!(ask(&rig, id, &said, 9).1, 0);
    }
    assert_eq!(rig.handle.stats().scheduler.prefix_queries, 0);
}

#[test]
fn states_come_back_from_the_host_also_after_a_death() {
    for lookahead in [0, 1] {
        let host_tier = Some(HostConfig::default());
        let config = EngineConfig { lookahead, host_tier, ..EngineConfig::default() };
        let rig = rig_with_host(config, 3, 40);
        let first = prompt(60);
        ask(&rig, 0, &first, 5);
        // Other prompts evict the states from all state pages.
        for (id, length) in (1..).zip([90, 120, 150, 180]) {
            ask(&rig, id, &prompt(length)[length as usize - 59..], 5);
        }
        let before = rig.handle.stats().scheduler;
        assert!(before.states.copied >= 5 && before.states.restored == 0, "{before:?}");
        assert_eq!(ask(&rig, 8, &first, 5).1, 56, "the state comes from the host");
        let after = rig.handle.stats();
        assert!(after.scheduler.states.restored >= 1);
        assert_eq!(after.hand.restored_bytes, 1000 * after.scheduler.states.restored);
        rig.control.kill();
        while rig.handle.stats().hand.deaths == 0 {
            std::thread::yield_now();
        }
        rig.settled(|status| *status == Status::Ready);
        assert_eq!(ask(&rig, 9, &first, 5).1, 56, "blocks and state come from the host");
        let last = rig.handle.stats().scheduler;
        assert!(last.host.blocks_restored >= 14, "{last:?}");
        assert_eq!(last.states.missed_tokens, before.states.missed_tokens);
    }
}

#[test]
fn a_host_tier_without_state_pages_has_blocks_alone() {
    let config = EngineConfig { host_tier: Some(HostConfig::default()), ..EngineConfig::default() };
    let rig = rig(config, 3);
    let first = prompt(60);
    ask(&rig, 0, &first, 5);
    assert_eq!(ask(&rig, 1, &first, 5).1, 56);
    // Other prompts evict the states from all state pages. The blocks of the first prompt are still
    // cached.
    ask(&rig, 2, &prompt(90)[31..], 5);
    ask(&rig, 3, &prompt(120)[62..], 5);
    assert_eq!(ask(&rig, 4, &first, 5).1, 0);
    assert!(rig.handle.stats().scheduler.states.missed_tokens >= 56);
}

#[test]
fn a_model_with_states_has_no_drafts() {
    let drafts = Some(forebay_engine::DraftConfig::default());
    let rig = rig(EngineConfig { drafts, ..EngineConfig::default() }, 4);
    ask(&rig, 0, &[5, 6].repeat(20), 20);
    assert_eq!(rig.handle.stats().scheduler.drafts.rows, 0);
}
