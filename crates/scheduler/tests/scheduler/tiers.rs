//! Blocks on the host, which outlive the device's memory.

use forebay_scheduler::{BlockEvent, Finish, HostTier, SavePolicy, SchedulerConfig};

use crate::device::NAN_TOKEN;
use crate::harness::{Harness, config, request};

fn host() -> HostTier {
    HostTier {
        pages: 32,
        policy: SavePolicy::WriteThrough,
        copies_a_step: 8,
        prefetch: 0,
        restore_preempted: true,
    }
}

fn machine(host: HostTier) -> SchedulerConfig {
    SchedulerConfig { host: Some(host), ..config() }
}

/// A prompt of four blocks and one token, different for each `seed`.
fn prompt(seed: i32) -> Vec<i32> {
    (0..17).map(|at| (seed + at * (seed + 3)) % 11).collect()
}

/// Runs until all requests have ended; every copy ends as soon as it can.
fn settle(harness: &mut Harness) {
    loop {
        while harness.plan() {}
        for at in 0..harness.copier.outstanding() {
            harness.copier.end(at, true);
        }
        if !harness.apply() {
            return;
        }
    }
}

/// Fills the device's pages with blocks of other prompts.
fn evict(harness: &mut Harness, first: u64) {
    for id in first..first + 4 {
        harness.submit(request(id, prompt(id as i32), 2));
        settle(harness);
    }
}

/// Creates a harness in which `prompt(0)` was computed, and its blocks are only on the host.
fn pushed_out(config: SchedulerConfig, depth: usize) -> Harness {
    let mut harness = Harness::new(config, depth);
    harness.submit(request(0, prompt(0), 2));
    settle(&mut harness);
    evict(&mut harness, 1);
    harness
}

#[test]
fn a_second_turn_is_restored_not_computed() {
    let mut harness = pushed_out(machine(host()), 2);
    let before = harness.scheduler.stats();
    harness.submit(request(9, prompt(0), 2));
    while harness.plan() {}
    let arriving = harness.scheduler.stats();
    assert_eq!((arriving.host.arriving, arriving.running), (1, 1));
    assert_eq!(harness.plan.rows().len(), 0, "a request whose blocks are restored has no row");
    settle(&mut harness);
    let after = harness.scheduler.stats();
    assert_eq!(harness.clients[&9].cached_tokens, 16);
    assert_eq!(after.host.blocks_restored - before.host.blocks_restored, 4);
    assert_eq!(after.prompt_tokens - before.prompt_tokens, 1);
    assert_eq!((after.host_hits, after.prefix_hits), (before.host_hits + 16, before.prefix_hits));
    harness.drain();
}

#[test]
fn others_go_on_while_blocks_come_back() {
    let mut harness = pushed_out(machine(host()), 2);
    harness.submit(request(9, prompt(0), 2));
    harness.submit(request(10, prompt(7), 3));
    for _ in 0..4 {
        while harness.plan() {}
        harness.apply();
    }
    assert!(harness.ended(10).1.is_some(), "a request waited for the copies of another one");
    assert_eq!(harness.scheduler.stats().host.arriving, 1);
    harness.drain();
}

/// vLLM #48596: the last block of an answer was lost, because its request had ended before the
/// save.
#[test]
fn the_block_that_fills_with_the_last_token_is_saved_too() {
    let mut harness = Harness::new(machine(host()), 2);
    // Four positions of the second block are computed; the last token itself is never computed.
    harness.submit(request(0, prompt(0)[..6].to_vec(), 3));
    settle(&mut harness);
    assert_eq!(harness.scheduler.stats().host.blocks_saved, 2);
    harness.drain();
}

#[test]
fn a_restore_that_fails_costs_a_computation_and_nothing_else() {
    let mut harness = pushed_out(machine(host()), 2);
    harness.submit(request(9, prompt(0), 2));
    while harness.plan() {}
    harness.copier.end(1, false);
    while harness.scheduler.stats().host.copies_failed == 0 {
        harness.apply();
        while harness.plan() {}
    }
    settle(&mut harness);
    assert_eq!(harness.clients[&9].admissions, 2, "the request waited for its turn again");
    let stats = harness.scheduler.stats();
    assert_eq!(stats.host.copies_failed, 1);
    harness.drain();
}

#[test]
fn what_the_host_has_outlives_the_hand() {
    for restores in [true, false] {
        let host = HostTier { restore_preempted: restores, ..host() };
        let mut harness = Harness::new(machine(host), 2);
        harness.submit(request(0, prompt(0), 9));
        while harness.ended(0).0.len() < 4 {
            while harness.plan() {}
            for at in 0..harness.copier.outstanding() {
                harness.copier.end(at, true);
            }
            harness.apply();
        }
        let before = harness.scheduler.stats();
        harness.reset();
        settle(&mut harness);
        let after = harness.scheduler.stats();
        let computed = after.prompt_tokens - before.prompt_tokens;
        assert_eq!(computed, if restores { 1 } else { 17 });
        assert_eq!(after.host.blocks_restored > 0, restores);
        harness.drain();
    }
}

#[test]
fn a_restore_that_loses_the_hand_is_not_tried_again_and_nobody_is_suspected() {
    let mut harness = pushed_out(machine(host()), 2);
    harness.submit(request(9, prompt(0), 2));
    while harness.plan() {}
    assert_eq!(harness.scheduler.stats().host.arriving, 1);
    let before = harness.scheduler.stats();
    // The hand is reset while no row is in flight, so the copies count as the cause.
    harness.reset();
    settle(&mut harness);
    let after = harness.scheduler.stats();
    assert_eq!(after.host.blocks_restored, before.host.blocks_restored);
    assert_eq!(after.prompt_tokens - before.prompt_tokens, 17);
    // Repeat this for copies that hang while rows are in flight.
    harness.submit(request(10, prompt(1), 9));
    while !harness.scheduler.computes() {
        harness.plan();
        for at in 0..harness.copier.outstanding() {
            harness.copier.end(at, true);
        }
        if !harness.scheduler.computes() {
            harness.apply();
        }
    }
    harness.copies_hang();
    settle(&mut harness);
    assert_eq!(harness.clients[&10].deaths, 0);
    harness.drain();
}

#[test]
fn the_policies_save_when_they_say() {
    for (policy, saved) in [
        (SavePolicy::WriteThrough, [4, 4]),
        (SavePolicy::WriteThroughSelective, [0, 4]),
        (SavePolicy::WriteBack, [0, 0]),
    ] {
        let config = SchedulerConfig { pages: 200, ..machine(HostTier { policy, ..host() }) };
        let mut harness = Harness::new(config, 2);
        for (id, saved) in saved.into_iter().enumerate() {
            harness.submit(request(id as u64, prompt(0), 2));
            settle(&mut harness);
            assert_eq!(harness.scheduler.stats().host.blocks_saved, saved, "{policy:?}");
        }
        harness.drain();
    }
    // In a small pool pages are evicted all the time, so every block is saved at once.
    let policy = SavePolicy::WriteBack;
    let mut harness = Harness::new(machine(HostTier { policy, ..host() }), 2);
    harness.submit(request(0, prompt(0), 2));
    settle(&mut harness);
    assert_eq!(harness.scheduler.stats().host.blocks_saved, 4);
    evict(&mut harness, 1);
    assert_eq!(harness.scheduler.stats().host.dropped_unsaved, 0);
    harness.drain();
}

#[test]
fn those_who_wait_have_their_blocks_brought_back_meanwhile() {
    for prefetch in [0, 2] {
        let host = HostTier { prefetch, ..host() };
        let config = SchedulerConfig { max_running: 1, slots: 2, ..machine(host) };
        let mut harness = pushed_out(config, 1);
        harness.submit(request(8, vec![1, 2, 3], 12));
        harness.submit(request(9, prompt(0), 2));
        let before = harness.scheduler.stats().host.blocks_restored;
        for _ in 0..8 {
            while harness.plan() {}
            for at in 0..harness.copier.outstanding() {
                harness.copier.end(at, true);
            }
            harness.apply();
        }
        let restored = harness.scheduler.stats().host.blocks_restored - before;
        assert_eq!(restored, if prefetch > 0 { 4 } else { 0 });
        settle(&mut harness);
        assert_eq!(harness.clients[&9].cached_tokens, 16);
        harness.drain();
    }
}

#[test]
fn a_prompt_with_more_blocks_than_there_is_room_is_brought_back_in_part_and_once() {
    let host = HostTier { prefetch: 2, ..host() };
    let config = SchedulerConfig { max_running: 1, slots: 2, pages: 17, ..machine(host) };
    let mut harness = Harness::new(config, 1);
    let long: Vec<i32> = (0..49).map(|at| (3 + at * 5 + at / 7) % 11).collect();
    harness.submit(request(0, long.clone(), 2));
    settle(&mut harness);
    evict(&mut harness, 1);
    // Request 8 takes most of the pages and keeps request 9 waiting.
    harness.submit(request(8, (0..37).map(|at| at % 9).collect(), 20));
    harness.submit(request(9, long, 2));
    let before = harness.scheduler.stats().host.blocks_restored;
    for _ in 0..16 {
        while harness.plan() {}
        for at in 0..harness.copier.outstanding() {
            harness.copier.end(at, true);
        }
        harness.apply();
    }
    let restored = harness.scheduler.stats().host.blocks_restored - before;
    assert!((1..=6).contains(&restored), "{restored}: there was room for half of the 12 blocks");
    settle(&mut harness);
    harness.drain();
}

#[test]
fn blocks_that_are_not_finite_reach_no_tier() {
    let mut harness = Harness::new(machine(host()), 2);
    let mut bad = prompt(0);
    bad[16] = NAN_TOKEN;
    harness.submit(request(0, bad, 2));
    settle(&mut harness);
    let stats = harness.scheduler.stats();
    assert_eq!((stats.host.pages_used, stats.pages_cached), (0, 0));
    harness.drain();
}

#[test]
fn without_a_host_tier_plans_name_no_copies_and_never_wait() {
    let mut harness = Harness::new(config(), 2);
    harness.submit(request(0, prompt(0), 9));
    while harness.scheduler.live().next().is_some() {
        while harness.plan() {
            assert_eq!((harness.plan.copies().len(), harness.plan.wait_us()), (0, 0));
        }
        harness.apply();
    }
    assert_eq!(harness.scheduler.stats().host, forebay_scheduler::HostStats::default());
    harness.drain();
}

#[test]
fn a_result_that_names_a_copy_that_is_none_is_refused() {
    let mut harness = Harness::new(machine(host()), 1);
    harness.submit(request(0, prompt(0), 2));
    assert!(harness.plan());
    let step = harness.plan.step();
    let rows = harness.plan.rows().len();
    let result = forebay_protocol::StepResult {
        step,
        row_errors: vec![0; rows],
        copied: vec![forebay_protocol::CopyEnd { ticket: 999, error: 0 }],
        ..forebay_protocol::StepResult::default()
    };
    let refused = harness.scheduler.apply(&result, &mut Vec::new());
    assert!(refused.is_err_and(|error| error.to_string().contains("copy 999 ended")));
    harness.drain();
}

#[test]
fn fewer_pages_hold_no_blocks_and_every_request() {
    let mut harness = pushed_out(machine(host()), 2);
    let before = harness.scheduler.stats();
    harness.submit(request(9, prompt(0), 9));
    harness.submit(request(10, prompt(1), 9));
    while harness.plan() {}
    let mut events = Vec::new();
    harness.scheduler.take_block_events(&mut events);
    harness.memory_runs_out(8, 10);
    events.clear();
    harness.scheduler.take_block_events(&mut events);
    assert_eq!(events, [BlockEvent::Cleared], "block events report the reset");
    let after = harness.scheduler.stats();
    assert_eq!((after.host.pages, after.host.pages_used), (10, 0));
    assert_eq!(after.host.blocks_saved, before.host.blocks_saved, "counters never decrease");
    settle(&mut harness);
    harness.drain();
    for id in [9, 10] {
        assert_eq!(harness.ended(id).1, Some(Some(Finish::Length)));
    }
}
