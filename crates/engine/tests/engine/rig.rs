//! An engine on a simulated hand, and the expected tokens of its requests.

use std::collections::HashMap;
use std::time::Duration;

use forebay_engine::{BlockObserver, EngineConfig, FinishReason};
use forebay_sim::testing::{self, Hook, Rig, RigParts, Story, VOCAB, alone, quiet};
use forebay_sim::{DeviceModel, SimClock, SimConfig, SimText, Timing};

pub(crate) fn config() -> EngineConfig {
    EngineConfig {
        max_running_requests: 16,
        slots: 24,
        page_size: 4,
        chunked_prefill_size: 32,
        max_queued_requests: 1000,
        context_length: 256,
        watchdog_timeout: Duration::from_secs(10),
        load_timeout: Duration::ZERO,
        mask_threads: 0,
        ..EngineConfig::default()
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
        load_us: 1_000_000,
        page_count: pages,
        vocab_size: VOCAB,
        text: text(),
        ..SimConfig::default()
    };
    let parts = RigParts { hooks: vec![hook], blocks, ..RigParts::default() };
    Rig::start(config, sim, parts).held()
}

pub(crate) fn text() -> SimText {
    testing::text().with_vectors(8)
}

/// Returns prompts of different lengths, some with a common prefix.
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
