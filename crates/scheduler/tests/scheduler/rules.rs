//! The rules of planning and applying, one test for each.

use forebay_protocol::{Row, SamplingParams, SlotSpec, StepPlan, StepResult, Want};
use forebay_scheduler::{
    ApplyError, Event, Finish, Past, Policy, Request, Scheduler, SchedulerConfig,
};

use crate::device::{NAN_TOKEN, VOCAB};
use crate::harness::{Harness, alone, config, pooled, request, telling};

fn rows(harness: &Harness) -> Vec<(u32, u32, bool)> {
    harness.plan.rows().map(|row| (row.start, row.length, row.want.samples())).collect()
}

fn text(length: i32) -> Vec<i32> {
    (0..length).map(|at| (at * 5 + at / 3) % VOCAB).collect()
}

#[test]
fn decode_runs_ahead_of_its_tokens_and_stops_at_the_last_that_needs_compute() {
    let mut harness = Harness::new(config(), 2);
    harness.submit(request(1, text(3), 3));
    assert!(harness.plan());
    assert_eq!(rows(&harness), [(0, 3, true)]);
    assert!(harness.plan(), "a decode step is planned before its token is known");
    assert_eq!(rows(&harness), [(3, 1, true)]);
    assert!(harness.apply() && harness.plan());
    assert_eq!(rows(&harness), [(4, 1, true)]);
    assert!(harness.apply() && !harness.plan(), "the third token is the last and needs no compute");
    harness.drain();
    assert_eq!(harness.ended(1).1, Some(Some(Finish::Length)));
}

#[test]
fn prefill_is_chunked_beside_decode_and_keeps_at_least_a_page() {
    let mut harness = Harness::new(SchedulerConfig { token_budget: 6, ..config() }, 1);
    harness.submit(request(1, text(2), 20));
    assert!(harness.plan() && harness.apply());
    harness.submit(request(2, vec![9; 13], 2));
    assert!(harness.plan() && harness.apply());
    assert_eq!(rows(&harness), [(2, 1, true), (0, 5, false)]);
    assert!(harness.plan() && harness.apply());
    assert_eq!(rows(&harness), [(3, 1, true), (5, 5, false)]);
    harness.drain();

    let mut harness = Harness::new(SchedulerConfig { token_budget: 0, ..config() }, 1);
    harness.submit(request(1, text(5), 2));
    assert!(harness.plan() && harness.apply());
    assert_eq!(rows(&harness), [(0, 4, false)]);
    harness.drain();
}

#[test]
fn a_prefill_under_way_goes_before_new_ones_and_nobody_overtakes() {
    let mut harness = Harness::new(config(), 1);
    harness.submit(request(1, text(20), 2));
    harness.submit(request(2, vec![1; 40], 2));
    harness.submit(request(3, vec![2; 2], 2));
    assert!(harness.plan() && harness.apply());
    assert_eq!(rows(&harness), [(0, 16, false)]);
    assert!(harness.plan() && harness.apply());
    assert_eq!(rows(&harness), [(16, 4, true)], "prompt 2 does not fit, prompt 3 may not pass it");
    harness.drain();
}

#[test]
fn priority_counts_only_under_its_policy() {
    for (policy, first) in
        [(Policy::Fcfs, 1), (Policy::Priority, 2), (Policy::PriorityAscending, 3)]
    {
        let mut harness = Harness::new(SchedulerConfig { policy, max_running: 1, ..config() }, 1);
        harness.submit(request(1, text(2), 2));
        harness.submit(Request { priority: 5, ..request(2, text(3), 2) });
        harness.submit(Request { priority: -5, ..request(3, text(4), 2) });
        assert!(harness.plan());
        assert!(harness.clients[&first].resident);
        harness.drain();
    }
}

#[test]
fn a_request_that_is_handed_on_waits_its_turn_unless_nobody_continues_it() {
    for (returned, first) in [(false, 1), (true, 2)] {
        // With fair turns the harness does not check the order of admission.
        let config = SchedulerConfig { max_running: 1, fair: true, ..config() };
        let mut harness = Harness::new(config, 1);
        harness.submit(request(1, text(2), 2));
        let past = Past { admitted: true, handed: true, returned, ..Past::default() };
        harness.submit(Request { past, ..request(2, text(3), 2) });
        assert!(harness.plan());
        assert!(harness.clients[&first].resident);
        harness.drain();
    }
}

#[test]
fn a_request_that_was_handed_on_to_a_dead_hand_goes_first_elsewhere() {
    let mut scheduler = Scheduler::new(SchedulerConfig { max_running: 1, ..config() });
    let past = Past { admitted: true, handed: true, ..Past::default() };
    scheduler.submit(request(1, text(2), 2));
    scheduler.submit(Request { past, ..request(2, text(3), 2) });
    let given = scheduler.surrender();
    let pasts: Vec<Past> = given.into_iter().map(|request| request.past).collect();
    assert_eq!(pasts, [Past::default(), Past { returned: true, ..past }]);
}

#[test]
fn a_request_keeps_its_pages_while_others_are_handed_on() {
    // The pages suffice for two of these requests.
    let mut harness = Harness::new(SchedulerConfig { pages: 12, ..config() }, 1);
    harness.submit(request(1, text(4), 18));
    for id in 2..8 {
        assert!(harness.plan() && harness.apply());
        let past = Past { admitted: true, handed: true, ..Past::default() };
        harness.submit(Request { past, ..request(id, vec![id as i32; 4], 18) });
    }
    harness.drain();
    assert_eq!(harness.clients[&1].preemptions, 0);
    assert!((2..8).any(|id| harness.clients[&id].preemptions > 0));
}

#[test]
fn a_prefix_is_shared_with_the_next_plan_by_whole_blocks() {
    let mut harness = Harness::new(config(), 2);
    harness.submit(request(1, text(12), 4));
    assert!(harness.plan());
    harness.submit(request(2, text(12), 4));
    harness.submit(request(3, text(7), 4));
    harness.submit(Request { cache_salt: 1, ..request(4, text(12), 4) });
    assert!(harness.plan(), "the first result has not come");
    harness.drain();
    let cached = [1, 2, 3, 4].map(|id| harness.clients[&id].cached_tokens);
    assert_eq!(cached, [0, 8, 4, 0], "at least one token is computed; salts share nothing");
    let stats = harness.scheduler.stats();
    assert_eq!((stats.prefix_queries, stats.prefix_hits), (43, 12));
    assert_eq!((stats.prompt_tokens, stats.generated_tokens), (31, 16));
}

#[test]
fn embedded_prompts_share_nothing() {
    let mut harness = Harness::new(config(), 2);
    for (id, embeds) in [(1, Some(0)), (2, Some(0)), (3, None), (4, Some(1))] {
        let mut request = request(id, text(12), 4);
        request.spec.embeds = embeds;
        harness.submit(request);
        assert!(harness.plan());
        harness.apply();
    }
    harness.drain();
    assert!((1..=4).all(|id| harness.clients[&id].cached_tokens == 0));
    let stats = harness.scheduler.stats();
    assert_eq!(
        (stats.prefix_queries, stats.prefix_hits),
        (12, 0),
        "only prompts of tokens are looked up"
    );
    assert_eq!(stats.prompt_tokens, 48);
}

#[test]
fn generated_blocks_are_shared_too() {
    let mut harness = Harness::new(config(), 2);
    let first = request(1, text(6), 8);
    harness.submit(first.clone());
    while harness.ended(1).1.is_none() {
        harness.plan();
        harness.apply();
    }
    let mut prompt = first.prompt.to_vec();
    prompt.extend(alone(&first).0);
    harness.submit(request(2, prompt, 1));
    harness.drain();
    assert_eq!(
        harness.clients[&2].cached_tokens, 12,
        "13 of 14 positions were computed: three full blocks"
    );
}

#[test]
fn without_the_cache_nothing_is_shared_or_kept() {
    let mut harness = Harness::new(SchedulerConfig { prefix_cache: false, ..config() }, 2);
    harness.submit(request(1, text(12), 4));
    assert!(harness.plan());
    harness.submit(request(2, text(12), 4));
    while harness.scheduler.live().next().is_some() {
        harness.plan();
        harness.apply();
    }
    assert_eq!(harness.clients[&2].cached_tokens, 0);
    assert_eq!(harness.scheduler.stats().pages_cached, 0);
    assert_eq!(harness.scheduler.stats().prefix_queries, 0);
    harness.drain();
}

#[test]
fn slots_and_pages_of_an_aborted_request_are_retired() {
    let mut harness = Harness::new(SchedulerConfig { slots: 1, max_running: 1, ..config() }, 2);
    harness.submit(request(1, text(6), 8));
    harness.submit(request(2, text(9), 2));
    assert!(harness.plan());
    harness.abort(1);
    assert_eq!(harness.scheduler.stats().pages_held, 2);
    assert!(!harness.plan(), "the only slot is in flight");
    assert!(harness.apply());
    assert_eq!(harness.scheduler.stats().pages_held, 0);
    assert!(harness.plan());
    harness.drain();
    assert_eq!(harness.ended(1), (&[] as &[i32], Some(None)));
}

#[test]
fn the_last_in_order_is_preempted_and_comes_back_with_its_tokens() {
    for depth in [1, 2] {
        let mut harness = Harness::new(SchedulerConfig { pages: 6, ..config() }, depth);
        harness.submit(request(1, text(7), 16));
        harness.submit(request(2, vec![3; 7], 16));
        harness.drain();
        let preemptions = [1, 2].map(|id| harness.clients[&id].preemptions);
        assert_eq!(preemptions, [0, 1], "at depth {depth}");
        assert_eq!(harness.clients[&2].admissions, 2);
        assert_eq!(harness.scheduler.stats().preemptions, 1);
    }
}

#[test]
fn a_stop_id_ends_with_its_token_and_what_ran_ahead_is_ignored() {
    let mut probe = request(1, text(5), 30);
    let given = alone(&probe).0;
    let stop = given[4];
    let mut stop_ids = [99, stop, -1];
    stop_ids.sort_unstable();
    probe.spec.stop_ids = stop_ids.into();
    let first =
        given.iter().position(|&token| token == stop).expect("the answer has the stop token");
    let mut harness = Harness::new(config(), 2);
    harness.submit(probe);
    harness.drain();
    let end = Some(Some(Finish::Stop { token: stop }));
    assert_eq!(harness.ended(1), (&given[..=first], end));
}

#[test]
fn blocks_behind_logits_that_are_not_finite_are_not_shared() {
    let mut harness = Harness::new(config(), 2);
    let mut prompt = text(12);
    prompt[2] = NAN_TOKEN;
    harness.submit(request(1, prompt, 4));
    assert!(harness.plan());
    assert!(harness.apply());
    assert_eq!(harness.ended(1).1, Some(Some(Finish::NotFinite)));
    assert_eq!(harness.scheduler.stats().pages_cached, 0);
    harness.drain();
}

#[test]
fn a_reset_replays_prompt_and_generated_tokens() {
    let mut harness = Harness::new(config(), 2);
    harness.submit(request(1, text(5), 9));
    for _ in 0..3 {
        assert!(harness.plan() && harness.apply());
    }
    assert!(harness.plan());
    assert_eq!(harness.reset(), [0; 0]);
    assert!(harness.plan());
    assert_eq!(rows(&harness), [(0, 8, true)]);
    let new = harness.plan.new_slots().next().expect("a new slot");
    assert_eq!(new.tokens[5..], alone(&request(1, text(5), 9)).0[..3]);
    harness.drain();
}

#[test]
fn a_result_that_does_not_fit_is_refused_and_changes_nothing() {
    let mut scheduler = Scheduler::new(config());
    let (mut plan, mut events) = (StepPlan::default(), Vec::new());
    let good = StepResult { step: 1, tokens: vec![3], row_errors: vec![0], ..Default::default() };
    let refused = scheduler.apply(&good, &mut events);
    assert_eq!(refused, Err(ApplyError::NothingInFlight { step: 1 }));
    scheduler.submit(request(1, text(3), 3));
    assert!(scheduler.next_plan(&mut plan, &mut events));
    events.clear();
    let wrong = ApplyError::WrongStep { expected: 1, got: 2 };
    let result = StepResult { step: 2, ..good.clone() };
    assert_eq!(scheduler.apply(&result, &mut events), Err(wrong));
    let bad = [
        StepResult { row_errors: vec![], ..good.clone() },
        StepResult { tokens: vec![1, 2], ..good.clone() },
        StepResult { logprob_counts: vec![1, 1], ..good.clone() },
        StepResult { logprob_counts: vec![2], logprob_ids: vec![3], ..good.clone() },
        StepResult { logprob_counts: vec![1], logprob_ids: vec![3], ..good.clone() },
        StepResult { logprob_counts: vec![-1], ..good.clone() },
    ];
    for (at, result) in bad.iter().enumerate() {
        let refused = scheduler.apply(result, &mut events);
        assert!(matches!(refused, Err(ApplyError::Column { step: 1, .. })), "{at}: {refused:?}");
    }
    assert_eq!((events.len(), scheduler.in_flight()), (0, 1));
    scheduler.apply(&good, &mut events).unwrap();
    let token = Event::Token { id: 1, nth: 1, token: 3, logprobs: None };
    assert_eq!(events, [Event::Prefilled { id: 1, tokens: 3 }, token]);
}

#[test]
fn log_probabilities_go_to_whoever_asked() {
    let mut scheduler = Scheduler::new(config());
    let (mut plan, mut events) = (StepPlan::default(), Vec::new());
    let sampling = SamplingParams { logprobs: Some(1), ..SamplingParams::default() };
    scheduler.submit(request(1, text(3), 3));
    let spec = SlotSpec { sampling, ..SlotSpec::default() };
    scheduler.submit(Request { spec, ..request(2, text(4), 3) });
    assert!(scheduler.next_plan(&mut plan, &mut events));
    events.clear();
    let result = StepResult {
        step: 1,
        tokens: vec![7, 8],
        row_errors: vec![0, 0],
        logprob_counts: vec![0, 2],
        logprob_ids: vec![8, 5],
        logprob_values: vec![-1.5, -0.5],
        ..Default::default()
    };
    scheduler.apply(&result, &mut events).unwrap();
    let logprobs = Some(vec![(8, -1.5), (5, -0.5)].into_boxed_slice());
    let expected = [
        Event::Prefilled { id: 1, tokens: 3 },
        Event::Token { id: 1, nth: 1, token: 7, logprobs: None },
        Event::Prefilled { id: 2, tokens: 4 },
        Event::Token { id: 2, nth: 1, token: 8, logprobs },
    ];
    assert_eq!(events, expected);
}

#[test]
fn no_more_than_two_plans_are_in_flight_and_unknown_ids_are_nobody() {
    let mut scheduler = Scheduler::new(config());
    let (mut plan, mut events) = (StepPlan::default(), Vec::new());
    scheduler.submit(request(1, text(3), 9));
    assert!(scheduler.next_plan(&mut plan, &mut events));
    assert!(scheduler.next_plan(&mut plan, &mut events));
    assert!(!scheduler.next_plan(&mut plan, &mut events));
    assert_eq!(plan.rows().collect::<Vec<Row>>(), []);
    assert_eq!(scheduler.in_flight(), 2);
    assert!(!scheduler.abort(2));
    assert!(scheduler.abort(1) && !scheduler.abort(1));
    assert_eq!(scheduler.check_integrity(), Ok(()));
}

#[test]
fn a_prompt_to_be_pooled_is_chunked_shares_blocks_and_leaves_its_pages_with_its_vector() {
    let mut harness = Harness::new(SchedulerConfig { token_budget: 8, ..config() }, 2);
    harness.submit(pooled(1, text(12), 0));
    assert!(harness.plan() && harness.plan());
    assert_eq!(rows(&harness), [(8, 4, false)]);
    assert!(harness.plan.rows().all(|row| row.want == Want::Vector));
    assert_eq!(harness.scheduler.stats().pages_held, 3, "no page is held for a next token");
    assert!(!harness.plan(), "a pooled prompt is not decoded");
    assert!(harness.apply() && harness.apply());
    assert_eq!(harness.ended(1).1, Some(Some(Finish::Length)));
    assert_eq!(harness.scheduler.stats().pages_held, 0);
    harness.submit(pooled(2, text(12), 0));
    assert!(harness.plan());
    assert_eq!(
        rows(&harness),
        [(8, 4, false)],
        "two blocks are cached, the last one is computed again"
    );
    harness.drain();
}

#[test]
fn without_pages_prompts_are_packed_and_never_cut() {
    let encoder = SchedulerConfig { pages: 0, token_budget: 10, max_running: 5, ..config() };
    let mut harness = Harness::new(encoder, 2);
    for (id, length) in [(1, 4), (2, 5), (3, 2), (4, 30), (5, 3)] {
        harness.submit(pooled(id, text(length), 0));
    }
    assert!(harness.plan());
    assert_eq!(
        rows(&harness),
        [(0, 4, false), (0, 5, false)],
        "one token of the budget of ten is left"
    );
    assert!(harness.plan());
    assert_eq!(rows(&harness), [(0, 2, false)], "the long prompt waits for a step of its own");
    assert!(harness.apply() && harness.plan());
    assert_eq!(rows(&harness), [(0, 30, false)]);
    harness.drain();
    let stats = harness.scheduler.stats();
    assert_eq!((stats.prompt_tokens, stats.generated_tokens, stats.prefix_queries), (44, 0, 0));
}

#[test]
fn vectors_that_do_not_fit_their_rows_are_refused() {
    let mut scheduler = Scheduler::new(SchedulerConfig { pages: 0, ..config() });
    let (mut plan, mut events) = (StepPlan::default(), Vec::new());
    scheduler.submit(pooled(1, text(3), 0));
    scheduler.submit(pooled(2, text(4), 2));
    assert!(scheduler.next_plan(&mut plan, &mut events));
    events.clear();
    let good = StepResult { step: 1, row_errors: vec![0, 1], ..Default::default() };
    for pooled in [vec![], vec![1.0], vec![1.0; 3]] {
        let refused = scheduler.apply(&StepResult { pooled, ..good.clone() }, &mut events);
        assert!(matches!(refused, Err(ApplyError::Column { column: "pooled", .. })), "{refused:?}");
    }
    let pooled = vec![0.5, -1.0, f32::NAN, 2.0];
    scheduler.apply(&StepResult { pooled, ..good }, &mut events).unwrap();
    let expected = [
        Event::Prefilled { id: 1, tokens: 3 },
        Event::Pooled { id: 1, vector: [0.5, -1.0].into() },
        Event::Finished { id: 1, reason: Finish::Length },
        Event::Finished { id: 2, reason: Finish::NotFinite },
    ];
    assert_eq!(events, expected);
}

fn wants(harness: &Harness) -> Vec<(u32, u32)> {
    harness.plan.prompt_logprobs().map(|want| (want.first, want.count)).collect()
}

#[test]
fn a_chunk_gives_the_token_behind_it_and_nothing_follows_the_last() {
    let mut harness = Harness::new(SchedulerConfig { token_budget: 8, ..config() }, 2);
    harness.submit(telling(1, text(20), 1, 0));
    assert!(harness.plan());
    assert_eq!((rows(&harness), wants(&harness)), (vec![(0, 8, false)], vec![(1, 8)]));
    assert!(harness.plan() && harness.apply());
    assert_eq!((rows(&harness), wants(&harness)), (vec![(8, 8, false)], vec![(9, 8)]));
    assert!(harness.plan());
    assert_eq!((rows(&harness), wants(&harness)), (vec![(16, 3, false)], vec![(17, 3)]));
    harness.drain();
    assert_eq!(harness.clients[&1].parts, 3);
    assert_eq!(harness.ended(1), (&[][..], Some(Some(Finish::Length))));
    assert_eq!(harness.scheduler.stats().generated_tokens, 0);
}

#[test]
fn who_wants_to_hear_of_the_prompt_computes_it_and_others_share_it() {
    let mut harness = Harness::new(config(), 1);
    harness.submit(request(1, text(16), 2));
    while harness.plan() || harness.apply() {}
    harness.submit(telling(2, text(16), 1, 2));
    harness.submit(telling(3, text(16), 9, 2));
    harness.submit(telling(4, text(16), 16, 2));
    harness.drain();
    let cached = [2, 3, 4].map(|id| harness.clients[&id].cached_tokens);
    assert_eq!(cached, [0, 8, 12], "cached blocks end before the first reported token");

    let mut harness = Harness::new(config(), 1);
    harness.submit(telling(1, text(16), 1, 2));
    while harness.plan() || harness.apply() {}
    harness.submit(request(2, text(16), 2));
    harness.drain();
    assert_eq!(harness.clients[&2].cached_tokens, 12, "other requests share the blocks");
}

#[test]
fn what_was_told_is_not_told_again_when_the_prompt_is_computed_again() {
    let mut harness = Harness::new(SchedulerConfig { token_budget: 8, ..config() }, 2);
    harness.submit(telling(1, text(20), 1, 3));
    assert!(harness.plan() && harness.plan() && harness.apply());
    harness.reset();
    assert!(harness.plan());
    assert_eq!((rows(&harness), wants(&harness)), (vec![(0, 8, false)], vec![]));
    assert!(harness.apply() && harness.plan());
    assert_eq!((rows(&harness), wants(&harness)), (vec![(8, 8, false)], vec![(9, 8)]));
    harness.drain();
    assert_eq!(harness.clients[&1].parts, 3, "each part is reported once");
}

#[test]
fn a_result_has_room_for_what_its_rows_give() {
    // Each reported token takes seven words of the result.
    let small = SchedulerConfig { token_budget: 16, step_words: 30, ..config() };
    let mut harness = Harness::new(small, 1);
    harness.submit(telling(1, text(12), 1, 1));
    assert!(harness.plan());
    assert_eq!((rows(&harness), wants(&harness)), (vec![(0, 4, false)], vec![(1, 4)]));
    harness.drain();
    assert_eq!(harness.clients[&1].parts, 3);
}
