//! Recurrent states that are dropped on the device and restored from the host tier.

use forebay_scheduler::{HostTier, Request, SavePolicy, SchedulerConfig, StateCache};
use proptest::prelude::*;

use crate::copier::CopyFault;
use crate::device::NAN_TOKEN;
use crate::harness::states::Spoilt;
use crate::harness::{Harness, request};
use crate::model::{ops, run};
use crate::states::{is_found, machine, recurrent, text};

fn host(policy: SavePolicy) -> HostTier {
    HostTier { pages: 400, policy, copies_a_step: 8, prefetch: 0, restore_preempted: true }
}

/// A configuration with few states on the device and many on the host.
fn with_host(pages: u32, host: HostTier) -> SchedulerConfig {
    let states = Some(StateCache { pages, interval: 0, host_pages: 64, weight: 3 });
    SchedulerConfig { states, host: Some(host), ..machine(pages, 0) }
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

/// Runs a request alone. Returns the number of prompt tokens that a kept state covered.
fn ask(harness: &mut Harness, id: u64, prompt: Vec<i32>, max_tokens: u32) -> u32 {
    harness.submit(request(id, prompt, max_tokens));
    settle(harness);
    harness.clients[&id].cached_tokens
}

/// Creates a harness in which the states of `text(1, 21)` at two positions are only on the host.
fn pushed_out(config: SchedulerConfig) -> Harness {
    let mut harness = Harness::new(config, 2);
    assert_eq!(ask(&mut harness, 0, text(1, 21), 9), 0);
    for id in 1..6 {
        ask(&mut harness, id, text(id as i32 + 1, 21), 9);
    }
    harness
}

#[test]
fn a_state_that_the_device_gave_up_comes_back() {
    for policy in [SavePolicy::WriteThrough, SavePolicy::WriteBack] {
        for goes_on in [false, true] {
            let mut harness = pushed_out(with_host(3, host(policy)));
            let before = harness.scheduler.stats();
            assert!(before.states.evictions > 0 && before.states.copied > 0, "{policy:?}");
            assert_eq!(before.states.restored, 0);
            // Submit the same prompt again, or the next turn, which continues after the answer.
            let next = [text(1, 21), harness.clients[&0].tokens.clone(), text(9, 4)].concat();
            let (asked, cached) = if goes_on { (next, 28) } else { (text(1, 21), 20) };
            assert_eq!(ask(&mut harness, 10, asked, 2), cached, "{policy:?}");
            let after = harness.scheduler.stats();
            assert_eq!(after.states.restored, 1);
            let hits = after.host_hits - before.host_hits;
            assert_eq!(hits, u64::from(cached), "only the state came from the host");
            assert_eq!(after.states.missed_tokens, before.states.missed_tokens);
            harness.drain();
        }
    }
}

#[test]
fn a_state_that_two_have_used_is_saved() {
    let mut harness = Harness::new(with_host(8, host(SavePolicy::WriteThroughSelective)), 1);
    ask(&mut harness, 0, text(1, 21), 2);
    assert_eq!(harness.scheduler.stats().states.copied, 0);
    assert_eq!(ask(&mut harness, 1, text(1, 21), 2), 20);
    assert_eq!(harness.scheduler.stats().states.copied, 1);
    harness.drain();
}

#[test]
fn others_go_on_while_a_state_comes_back() {
    let mut harness = pushed_out(with_host(3, host(SavePolicy::WriteThrough)));
    harness.submit(request(10, text(1, 21), 2));
    harness.submit(request(11, text(8, 9), 3));
    for _ in 0..5 {
        while harness.plan() {}
        harness.apply();
    }
    assert!(harness.ended(11).1.is_some(), "a request waited for the copy of another one");
    assert_eq!(harness.scheduler.stats().host.arriving, 1);
    harness.drain();
}

#[test]
fn the_host_s_states_outlive_the_hand() {
    let mut harness = Harness::new(with_host(16, host(SavePolicy::WriteThrough)), 2);
    ask(&mut harness, 0, text(1, 30), 9);
    harness.reset();
    assert_eq!(harness.scheduler.stats().states.pages_cached, 0);
    let before = harness.scheduler.stats();
    assert_eq!(ask(&mut harness, 1, text(1, 33), 9), 28);
    let after = harness.scheduler.stats();
    assert_eq!(after.states.restored - before.states.restored, 1);
    assert_eq!(after.host.blocks_restored - before.host.blocks_restored, 7);
    harness.drain();
}

#[test]
fn a_request_goes_on_from_its_prompt_s_last_state_after_a_death() {
    let mut harness = Harness::new(with_host(16, host(SavePolicy::WriteThrough)), 2);
    harness.submit(request(0, text(1, 70), 20));
    while harness.ended(0).0.len() < 10 {
        while harness.plan() {}
        for at in 0..harness.copier.outstanding() {
            harness.copier.end(at, true);
        }
        harness.apply();
    }
    let before = harness.scheduler.stats().prompt_tokens;
    harness.reset();
    settle(&mut harness);
    assert_eq!(harness.scheduler.stats().prompt_tokens - before, 2, "the state covers 68 tokens");
    harness.drain();
}

#[test]
fn a_victim_s_state_comes_back_where_others_took_its_page() {
    for steps in 20..36 {
        let config = SchedulerConfig {
            max_running: 1,
            slots: 2,
            ..with_host(2, host(SavePolicy::WriteThrough))
        };
        let mut harness = Harness::new(config, 1);
        harness.submit(Request { background: true, ..request(0, text(1, 30), 40) });
        for _ in 0..steps {
            harness.plan();
            for at in 0..harness.copier.outstanding() {
                harness.copier.end(at, true);
            }
            harness.apply();
        }
        for id in 1..4 {
            harness.submit(request(id, text(id as i32 + 1, 19), 6));
        }
        settle(&mut harness);
        let stats = harness.scheduler.stats();
        assert!(stats.preemptions >= 1 && stats.states.restored >= 1, "after {steps} steps");
        assert!(stats.recomputed_tokens <= 5, "{steps}: {}", stats.recomputed_tokens);
        harness.drain();
    }
}

#[test]
fn a_state_that_cannot_be_restored_costs_a_computation_and_nothing_else() {
    let mut harness = pushed_out(with_host(3, host(SavePolicy::WriteThrough)));
    let before = harness.scheduler.stats();
    harness.submit(request(10, text(1, 21), 2));
    while harness.plan() {}
    assert_eq!(harness.copier.outstanding(), 1, "only the state is restored");
    harness.copier.end(0, false);
    settle(&mut harness);
    let after = harness.scheduler.stats();
    assert_eq!(after.host.copies_failed - before.host.copies_failed, 1);
    assert_eq!(harness.clients[&10].admissions, 2, "the request waited for its turn again");
    harness.drain();
}

#[test]
fn a_restore_that_loses_the_hand_is_not_tried_again() {
    let mut harness = pushed_out(with_host(3, host(SavePolicy::WriteThrough)));
    harness.submit(request(10, text(1, 21), 2));
    while harness.plan() {}
    let before = harness.scheduler.stats().states.restored;
    harness.reset();
    settle(&mut harness);
    assert_eq!(harness.scheduler.stats().states.restored, before);
    assert_eq!(harness.clients[&10].deaths, 0);
    harness.drain();
}

#[test]
fn states_that_are_not_finite_reach_no_tier() {
    let mut harness = Harness::new(with_host(8, host(SavePolicy::WriteThrough)), 2);
    let mut bad = text(1, 21);
    bad[20] = NAN_TOKEN;
    ask(&mut harness, 0, bad, 2);
    let stats = harness.scheduler.stats().states;
    assert_eq!((stats.host_pages_used, stats.pages_cached), (0, 0));
    harness.drain();
}

#[test]
fn those_who_wait_have_their_state_brought_back_meanwhile() {
    let host = HostTier { prefetch: 2, ..host(SavePolicy::WriteThrough) };
    let config = SchedulerConfig { max_running: 1, slots: 2, ..with_host(3, host) };
    let mut harness = pushed_out(config);
    let before = harness.scheduler.stats().states.restored;
    harness.submit(request(10, text(8, 3), 12));
    harness.submit(request(11, text(1, 21), 2));
    for _ in 0..6 {
        while harness.plan() {}
        for at in 0..harness.copier.outstanding() {
            harness.copier.end(at, true);
        }
        harness.apply();
    }
    assert!(harness.ended(10).1.is_none(), "the running request ended before the restore");
    assert_eq!(harness.scheduler.stats().states.restored - before, 1);
    settle(&mut harness);
    assert_eq!(harness.clients[&11].cached_tokens, 20);
    harness.drain();
}

#[test]
fn other_weights_have_other_states() {
    let mut harness = Harness::new(with_host(8, host(SavePolicy::WriteThrough)), 1);
    ask(&mut harness, 0, text(1, 21), 2);
    harness.reset();
    harness.scheduler.forget_blocks();
    assert_eq!(harness.scheduler.stats().states.host_pages_used, 0);
    assert_eq!(ask(&mut harness, 1, text(1, 21), 2), 0);
    harness.drain();
}

/// Configurations with states on the host.
fn tiered() -> impl Strategy<Value = SchedulerConfig> {
    (recurrent(), 1..6_u32, 2..20_u32, any::<bool>()).prop_map(
        |(config, pages, host_pages, writes_back)| SchedulerConfig {
            states: Some(StateCache { pages, interval: 8, host_pages, weight: 1 }),
            host: Some(host(match writes_back {
                true => SavePolicy::WriteBack,
                false => SavePolicy::WriteThrough,
            })),
            ..config
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn everybody_ends_as_if_alone_with_states_on_the_host(
        config in tiered(), depth in 1..=2_usize, ops in ops(&[NAN_TOKEN], 1),
    ) {
        run(config, depth, ops);
    }
}

/// Checks that the random runs would detect a scheduler that used a state which was not restored,
/// saved a state too early, or mixed up pages of the host.
#[test]
fn each_fault_of_copies_is_found() {
    for fault in [
        CopyFault::NoRestores,
        CopyFault::EarlySaves,
        CopyFault::MixedSaves,
        CopyFault::MixedRestores,
    ] {
        assert!(is_found(Spoilt::Copies(fault), tiered()), "{fault:?} changes nothing");
    }
}
