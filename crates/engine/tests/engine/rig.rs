//! An engine on a simulated hand, and what its requests give.

use std::collections::HashMap;

use forebay_engine::{BlockObserver, EngineConfig, FinishReason, Namer, Policy};
use forebay_sim::testing::{self, Hook, Rig, RigParts, Story, VOCAB, alone, quiet};
use forebay_sim::{DeviceModel, SimClock, SimConfig, SimText, Timing};

pub(crate) fn config() -> EngineConfig {
    EngineConfig {
        max_running: 16,
        slots: 24,
        page_size: 4,
        token_budget: 32,
        prefix_cache: true,
        namer: Namer::open(),
        policy: Policy::Fcfs,
        fair: true,
        lookahead: 1,
        max_queued: 1000,
        queue_timeout_us: 0,
        context_length: 256,
        watchdog_us: 10_000_000,
        load_timeout_us: 0,
        restart_limit: 3,
        mask_threads: 0,
        mask_share: 10,
        image_budget: 1000,
        host: None,
    }
}

pub(crate) fn start(config: EngineConfig, pages: u32) -> Rig {
    hooked(config, pages, quiet())
}

pub(crate) fn hooked(config: EngineConfig, pages: u32, hook: Hook) -> Rig {
    observed(config, pages, 1, hook, None)
}

pub(crate) fn observed(
    config: EngineConfig,
    pages: u32,
    tokens_a_row: u32,
    hook: Hook,
    blocks: Option<Box<dyn BlockObserver>>,
) -> Rig {
    let clock = SimClock::virtual_time();
    let sim = SimConfig {
        tokens_a_row,
        host_pages: 0,
        clock: clock.clone(),
        timing: Timing {
            model: DeviceModel {
                step_us: 1000.0,
                row_us: 10.0,
                token_us: 5.0,
                context_us: 0.1,
                ..DeviceModel::INSTANT
            },
            ..Timing::default()
        },
        hot_row_tokens: 0,
        seed: 0,
        load_us: 1_000_000,
        page_count: pages,
        vocab_size: VOCAB,
        hidden_size: 4,
        text: text(),
        device: "sim".into(),
        tower: None,
    };
    let parts = RigParts { hooks: vec![hook], blocks, ..RigParts::default() };
    Rig::start(config, sim, parts).held()
}

pub(crate) fn text() -> SimText {
    testing::text().with_vectors(8)
}

/// Prompts of many lengths, some with a common beginning.
pub(crate) fn prompt(id: u64) -> Vec<i32> {
    testing::prompt(id, 20)
}

pub(crate) fn assert_exact(
    stories: &HashMap<u64, Story>,
    count: u64,
    max_tokens: impl Fn(u64) -> u32,
) {
    assert_eq!(stories.len() as u64, count);
    for id in 0..count {
        let story = &stories[&id];
        assert_eq!(story.tokens, alone(prompt(id), max_tokens(id)), "request {id}");
        assert_eq!(story.end, Some(FinishReason::Length), "request {id}");
    }
}
