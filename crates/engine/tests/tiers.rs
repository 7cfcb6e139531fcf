//! A replica with a host tier, on a simulated hand whose copies take time, fail, or never finish.

use std::collections::HashMap;
use std::ops::Deref;
use std::time::Duration;

use forebay_engine::{
    EngineConfig, FinishReason, HostConfig, Preemption, RequestId, SavePolicy, SaveUnit, Stats,
    Status,
};
use forebay_sim::testing::{self, Hook, RigParts, Story, VOCAB, alone, request, text};
use forebay_sim::{CopyModel, DeviceModel, PageBytes, SimClock, SimConfig, Timing};

const PAGE: u32 = 4;
/// The number of pages on the device: enough for two prompts of these tests, plus a few pages.
const PAGES: u32 = 40;

struct Rig(testing::Rig);

impl Deref for Rig {
    type Target = testing::Rig;

    fn deref(&self) -> &testing::Rig {
        &self.0
    }
}

/// Kills the hand once, after this many tokens.
fn killing(mut left: Option<usize>) -> Hook {
    Box::new(move |control, outputs| {
        if let Some(tokens) = &mut left {
            let new = outputs.iter().filter(|output| output.token.is_some()).count();
            *tokens = tokens.saturating_sub(new);
            if *tokens == 0 {
                left = None;
                control.kill();
            }
        }
    })
}

fn host(policy: SavePolicy) -> HostConfig {
    HostConfig { hicache_write_policy: policy, kv_copy_pages_per_step: 64, ..HostConfig::default() }
}

impl Rig {
    /// A page takes 100 us to save, and `restore_us` to restore.
    fn start(host: Option<HostConfig>, restore_us: f64, lookahead: u32) -> Self {
        Self::with(host, restore_us, lookahead, SimClock::virtual_time(), None, 0)
    }

    fn with(
        host: Option<HostConfig>,
        restore_us: f64,
        lookahead: u32,
        clock: SimClock,
        kill_after: Option<usize>,
        hot_row_tokens: u32,
    ) -> Self {
        let sim = SimConfig {
            host_pages: 400,
            clock: clock.clone(),
            timing: Timing {
                model: DeviceModel { step_us: 1000.0, token_us: 100.0, ..DeviceModel::INSTANT },
                copy: CopyModel {
                    save_gbps: Some(0.01),
                    restore_gbps: Some(1.0 / restore_us),
                    latency_us: 0.0,
                    ..CopyModel::default()
                },
                bytes: PageBytes { main: 1000, ..PageBytes::default() },
                ..Timing::default()
            },
            hot_row_tokens,
            load_us: 1000,
            page_count: PAGES,
            vocab_size: VOCAB,
            text: text(),
            ..SimConfig::default()
        };
        let config = EngineConfig {
            max_running_requests: 8,
            slots: 12,
            page_size: PAGE,
            chunked_prefill_size: 32,
            lookahead,
            max_queued_requests: 1000,
            context_length: 128,
            watchdog_timeout: Duration::from_secs(5),
            load_timeout: Duration::ZERO,
            mask_threads: 0,
            host_tier: host,
            ..EngineConfig::default()
        };
        let parts = RigParts { hooks: vec![killing(kill_after)], ..RigParts::default() };
        let rig = Self(testing::Rig::start(config, sim, parts));
        rig.settled(|status| *status == Status::Ready);
        rig
    }

    /// Waits for a condition. No assertion depends on how long this takes.
    fn until(&self, wanted: impl Fn(&Self) -> bool) {
        while !wanted(self) {
            std::thread::yield_now();
        }
    }

    fn submit(&self, id: u64, prompt: Vec<i32>, max_tokens: u32) {
        self.handle.submit(request(id, prompt, max_tokens)).expect("there is room");
    }

    /// Waits until `count` requests have ended. Returns, for each request, the number of tokens
    /// found in a tier and the generated tokens.
    fn follow(&self, count: usize) -> HashMap<u64, (u32, Vec<i32>)> {
        let told = |(id, story): (u64, Story)| {
            assert!(matches!(story.end, Some(FinishReason::Length | FinishReason::Abort)));
            (id, (story.cached_tokens, story.tokens))
        };
        self.collect(count).into_iter().map(told).collect()
    }

    /// Runs one request after the other.
    fn turns(&self, ids: std::ops::Range<u64>) -> HashMap<u64, (u32, Vec<i32>)> {
        let mut all = HashMap::new();
        for id in ids {
            self.submit(id, prompt(id % 3), 5);
            all.extend(self.follow(1));
        }
        all
    }

    /// Runs requests that arrive at the same moment and generate 60 tokens each.
    fn at_once(
        &self,
        count: u64,
        prompt: impl Fn(u64) -> Vec<i32>,
    ) -> HashMap<u64, (u32, Vec<i32>)> {
        self.control.hold();
        for id in 0..count {
            self.submit(id, prompt(id), 60);
        }
        self.control.release();
        self.follow(count as usize)
    }

    /// Waits until no copy is in flight.
    fn settle(&self) -> Stats {
        self.until(|rig| rig.handle.stats().scheduler.host.copies_outstanding == 0);
        self.handle.stats()
    }
}

/// Returns one of three prompts, each of 15 blocks and two tokens. The device holds at most two of
/// them.
fn prompt(who: u64) -> Vec<i32> {
    (0..62).map(|at| (who as i32 * 131 + at * 7) % VOCAB as i32).collect()
}

fn assert_exact(stories: &HashMap<u64, (u32, Vec<i32>)>) {
    for (id, (_, tokens)) in stories {
        assert_eq!(tokens, &alone(prompt(id % 3), 5), "request {id}");
    }
}

#[test]
fn turns_are_restored_and_give_the_same_tokens_under_every_policy() {
    for lookahead in [0, 1] {
        let policies = [
            (None, 0),
            (Some(SavePolicy::WriteThrough), 6),
            // This policy saves blocks at their second use, and these turns reuse only blocks that
            // are still on the device.
            (Some(SavePolicy::WriteThroughSelective), 0),
            (Some(SavePolicy::WriteBack), 6),
        ];
        for (policy, restored) in policies {
            let rig = Rig::start(policy.map(host), 10.0, lookahead);
            let stories = rig.turns(0..9);
            assert_exact(&stories);
            let found = stories.values().filter(|story| story.0 == 60).count();
            assert!(found >= restored, "{policy:?}: {found} of 9 turns found their blocks");
            let stats = rig.settle().scheduler;
            assert!(stats.host.blocks_restored >= 5 * restored as u64, "{policy:?}: {stats:?}");
            assert_eq!((stats.pages_held, stats.host.copies_failed), (0, 0));
        }
    }
}

#[test]
fn what_takes_longer_to_restore_than_to_compute_is_computed() {
    // A block takes 4 * 100 us to compute, less than to restore.
    let rig = Rig::start(Some(host(SavePolicy::WriteThrough)), 5000.0, 1);
    let stories = rig.turns(0..12);
    assert_exact(&stories);
    let stats = rig.settle().scheduler.host;
    assert!(stats.restores_declined > 0, "{stats:?}");
    assert!(stats.restores_chosen < 4, "only a few restores are tried, to measure them: {stats:?}");
}

#[test]
fn copies_that_fail_cost_time_and_nothing_else() {
    let rig = Rig::start(Some(host(SavePolicy::WriteThrough)), 10.0, 1);
    rig.control.fail_copies(20);
    assert_exact(&rig.turns(0..6));
    rig.control.fail_copies(7);
    assert_exact(&rig.turns(6..12));
    let stats = rig.settle().scheduler;
    assert!(stats.host.copies_failed > 20);
    assert_eq!((stats.pages_held, rig.handle.status()), (0, Status::Ready));
}

#[test]
fn copies_that_never_end_end_the_hand_and_nothing_is_lost() {
    let rig = Rig::start(Some(host(SavePolicy::WriteThrough)), 10.0, 1);
    assert_exact(&rig.turns(0..3));
    rig.settle();
    rig.control.hang_copies();
    // The prompt's blocks are on the host, but the restores never finish. The watchdog kills the
    // hand, and the next one restores the blocks.
    assert_exact(&rig.turns(3..6));
    let stats = rig.settle();
    assert!(stats.hand.deaths >= 1);
    assert!(stats.hand.copy_wait_us >= 5_000_000 || stats.hand.replayed > 0);
    assert_eq!(stats.scheduler.pages_held, 0);
}

#[test]
fn what_the_host_has_is_not_computed_again_after_a_death() {
    let computed = [None, Some(host(SavePolicy::WriteThrough))].map(|host| {
        let rig = Rig::with(host, 10.0, 1, SimClock::virtual_time(), Some(20), 0);
        rig.submit(0, prompt(0), 60);
        let stories = rig.follow(1);
        assert_eq!(stories[&0].1, alone(prompt(0), 60));
        let stats = rig.settle();
        assert_eq!((stats.hand.deaths, stats.hand.replayed), (1, 1));
        stats.scheduler.recomputed_tokens
    });
    assert!(computed[0] > 80);
    assert!(computed[1] * 10 < computed[0], "{computed:?}: only unsaved blocks are computed again");
}

#[test]
fn who_is_aborted_while_its_blocks_come_back_leaves_nothing_behind() {
    // This test uses real time, and each page takes 10 ms to restore.
    let host = Some(host(SavePolicy::WriteThrough));
    let rig = Rig::with(host, 10_000.0, 1, SimClock::real(), None, 0);
    assert_exact(&rig.turns(0..3));
    rig.settle();
    rig.submit(9, prompt(0), 5);
    rig.until(|rig| rig.handle.stats().scheduler.host.arriving == 1);
    rig.handle.abort(RequestId(9));
    let stories = rig.follow(1);
    assert_eq!(stories[&9].1, [0; 0]);
    let stats = rig.settle().scheduler;
    assert_eq!((stats.pages_held, stats.host.arriving, stats.running), (0, 0, 0));
}

#[test]
fn an_overload_computes_less_than_a_page_again_for_each_preemption() {
    let lost = [Preemption::Restore, Preemption::Recompute].map(|preemption| {
        let host = HostConfig { preemption, ..host(SavePolicy::WriteThrough) };
        let rig = Rig::start(Some(host), 1.0, 1);
        // Six requests that finally need 31 pages each, on a device of 40 pages.
        let stories = rig.at_once(6, prompt);
        for (id, (_, tokens)) in &stories {
            assert_eq!(tokens, &alone(prompt(*id), 60), "request {id}");
        }
        let stats = rig.settle().scheduler;
        assert!(stats.preemptions > 0);
        stats.recomputed_tokens as f64 / stats.preemptions as f64
    });
    assert!(lost[0] < f64::from(PAGE), "{lost:?}");
    assert!(lost[1] > lost[0], "{lost:?}");
}

/// Creates a rig whose requests may be sparse, with two pages for the hot rows of each request.
fn sparse(lookahead: u32, kv_save: SaveUnit, kill_after: Option<usize>) -> Rig {
    let host = HostConfig { kv_save, ..host(SavePolicy::WriteThrough) };
    Rig::with(Some(host), 10.0, lookahead, SimClock::virtual_time(), kill_after, 2 * PAGE)
}

/// Runs six requests at once that grow from 16 to 31 pages each, on a device of 40 pages.
fn crowd(rig: &Rig) -> HashMap<u64, (u32, Vec<i32>)> {
    rig.at_once(6, own_prompt)
}

fn own_prompt(id: u64) -> Vec<i32> {
    (0..62).map(|at| (id as i32 * 97 + at * 5) % VOCAB as i32).collect()
}

fn assert_crowd(stories: &HashMap<u64, (u32, Vec<i32>)>) {
    for (&id, (_, tokens)) in stories {
        assert_eq!(tokens, &alone(own_prompt(id), 60), "request {id}");
    }
}

#[test]
fn sparse_requests_give_the_same_tokens_and_none_is_preempted() {
    for (lookahead, kv_save) in
        [(0, SaveUnit::Page), (1, SaveUnit::Page), (0, SaveUnit::Token), (1, SaveUnit::Token)]
    {
        let rig = sparse(lookahead, kv_save, None);
        assert_crowd(&crowd(&rig));
        let stats = rig.settle().scheduler;
        assert!(stats.sparse.conversions >= 4, "{stats:?}");
        assert!(stats.sparse.pages_dropped > 80, "{stats:?}");
        assert_eq!((stats.preemptions, stats.pages_held, stats.sparse.requests), (0, 0, 0));
        let rows = stats.host.copies_outstanding;
        assert_eq!((stats.sparse.waited_us, rows), (0, 0), "no row waits for a save");
    }
}

#[test]
fn sparse_requests_survive_the_hand_and_failing_copies() {
    for after in [1, 40, 150, 300] {
        let rig = sparse(1, SaveUnit::Page, Some(after));
        rig.control.fail_copies(9);
        assert_crowd(&crowd(&rig));
        let stats = rig.settle();
        assert_eq!((stats.hand.deaths, stats.scheduler.pages_held), (1, 0), "after {after}");
        assert!(stats.scheduler.sparse.conversions > 0);
    }
}

#[test]
fn a_prompt_has_to_be_on_the_device_and_an_answer_has_not() {
    let rig = sparse(1, SaveUnit::Page, None);
    let facts = rig.handle.facts().expect("the worker is ready");
    assert_eq!((facts.context_length, facts.prompt_length), (128, 128));
    assert_eq!(facts.hand.hot_row_tokens, 2 * PAGE);
}
