//! Tests of the executor with a process that implements the protocol and misbehaves on demand.

use std::path::Path;
use std::time::{Duration, Instant};

use forebay_engine::{Executor, Payloads, Ready, Signal};
use forebay_hand::{Arena, HandConfig, HandExecutor, HandSpec, HostMemories, RankSpec};
use forebay_protocol::{
    AdapterOrder, COPY_FAILED, COPY_OK, CopyEnd, CopyTiming, Direction, NewSlot, PageCopy, Row,
    SlotSpec, StepPlan, StepResult, StepTiming, Want, tell_group,
};

const MINUTE_US: u64 = 60_000_000;

fn spec(behaviour: &str) -> HandSpec {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_hand.py");
    HandSpec {
        program: "python3".into(),
        args: vec![script.into()],
        env: vec![("FAKE_BEHAVIOUR".into(), behaviour.into())],
        config: HandConfig { page_size: 16, ..HandConfig::default() },
        arena: Arena::new(1 << 20).expect("arena"),
        ranks: vec![RankSpec::default()],
        memories: HostMemories::default(),
        site: None,
    }
}

/// Describes a group of `count` ranks.
fn ranks(behaviour: &str, count: usize) -> HandSpec {
    HandSpec { ranks: vec![RankSpec::default(); count], ..spec(behaviour) }
}

fn executor(spec: HandSpec) -> HandExecutor {
    HandExecutor::new(spec).expect("executor")
}

fn next(executor: &mut HandExecutor) -> Signal {
    match executor.wait(Some(MINUTE_US)) {
        Signal::TimedOut => panic!("nothing happened for a minute"),
        signal => signal,
    }
}

fn ready(executor: &mut HandExecutor) -> Ready {
    executor.start();
    loop {
        match next(executor) {
            Signal::Ready(facts) => return *facts,
            Signal::Progress(text) => assert!(["handshake", "weights 1/2"].contains(&&*text)),
            other => panic!("not ready: {other:?}"),
        }
    }
}

fn death(executor: &mut HandExecutor) -> String {
    loop {
        match next(executor) {
            Signal::Died(reason) => return reason,
            Signal::Progress(_) => {}
            other => panic!("not dead: {other:?}"),
        }
    }
}

fn plan(step: u64, tokens: &[i32]) -> StepPlan {
    let mut plan = StepPlan::default();
    plan.begin(step);
    let prompt_len = tokens.len() as u32;
    plan.write_slot(&NewSlot {
        slot: 0,
        tokens,
        prompt_len,
        spec: &SlotSpec::default(),
        place: None,
    });
    plan.push_row(Row { slot: 0, start: 0, length: prompt_len, want: Want::TOKEN });
    plan
}

fn result(executor: &mut HandExecutor) -> StepResult {
    match next(executor) {
        Signal::Result(mut results) => {
            assert_eq!(results.len(), 1, "one plan, one result");
            results.remove(0)
        }
        other => panic!("no result: {other:?}"),
    }
}

#[test]
fn plans_go_out_two_deep_and_results_come_back_in_order() {
    let mut executor = executor(spec("good"));
    let facts = ready(&mut executor);
    assert_eq!((facts.page_count, facts.vocab_size, facts.device.as_str()), (100, 9, "fake"));
    executor.submit(&[plan(1, &[5; 3])]);
    executor.submit(&[plan(2, &[6; 5])]);
    for step in 1..=20 {
        let result = result(&mut executor);
        let StepTiming { device_us, gap_us } = result.timing;
        assert_eq!((result.step, device_us, gap_us), (step, 11, 22));
        executor.submit(&[plan(step + 2, &[7; 2])]);
    }
}

#[test]
fn long_prompts_travel_through_the_arena() {
    let mut executor = executor(spec("good"));
    ready(&mut executor);
    // The plans together are many times as large as the arena, so its regions have to be freed.
    for step in 1..=40 {
        executor.submit(&[plan(step, &[step as i32; 100_000])]);
        assert_eq!(result(&mut executor).tokens, [step as i32]);
    }
}

#[test]
fn what_requests_have_in_the_arena_outlives_the_hand() {
    let spec = spec("crash");
    let arena = spec.arena.clone();
    let mut executor = executor(spec);
    ready(&mut executor);
    let held = arena.reserve(1000).expect("room");
    held.write(0, &[7; 1000]).expect("memory");
    executor.submit(&[plan(1, &[5; 3000])]);
    assert!(arena.reserve((1 << 20) - 4096).is_none(), "the plan's tokens are in the arena too");
    death(&mut executor);
    assert!(arena.reserve(1 << 20).is_none(), "the request's bytes stay in the arena");
    let rest = arena.reserve((1 << 20) - 1024).expect("the plan's bytes are freed");
    drop((held, rest));
    assert!(arena.reserve(1 << 20).is_some());
}

#[test]
fn a_wake_ends_the_wait_once() {
    let mut executor = executor(spec("good"));
    let waker = executor.waker();
    waker.wake();
    waker.wake();
    assert!(matches!(executor.wait(Some(MINUTE_US)), Signal::Woken));
    assert!(matches!(executor.wait(Some(1000)), Signal::TimedOut));
    let other = std::thread::spawn(move || waker.wake());
    assert!(matches!(executor.wait(Some(MINUTE_US)), Signal::Woken));
    other.join().expect("joined");
}

#[test]
fn last_words_are_the_reason() {
    let mut executor = executor(spec("fatal"));
    executor.start();
    assert_eq!(death(&mut executor), "no such model");
}

#[test]
fn an_exit_status_is_the_reason_when_nothing_was_said() {
    let mut executor = executor(spec("crash"));
    ready(&mut executor);
    executor.submit(&[plan(1, &[1])]);
    assert_eq!(death(&mut executor), "exit status 7");
    let facts = ready(&mut executor);
    assert_eq!(facts.page_count, 100, "a respawned hand offers the same pages");
}

#[test]
fn another_version_and_garbage_are_refused() {
    let mut old = spec("good");
    old.env.push(("FAKE_VERSION".into(), "77".into()));
    let mut old = executor(old);
    old.start();
    let reason = death(&mut old);
    assert!(reason.contains("protocol version 77"), "{reason}");

    let mut garbage = executor(spec("garbage"));
    ready(&mut garbage);
    garbage.submit(&[plan(1, &[1])]);
    let reason = death(&mut garbage);
    assert!(reason.contains("not a Forebay frame"), "{reason}");
}

#[test]
fn a_fact_that_is_missing_is_named() {
    let mut executor = executor(spec("no page count"));
    executor.start();
    let reason = death(&mut executor);
    assert!(reason.contains("Ready frame: missing field `page_count`"), "{reason}");
}

#[test]
fn ranks_that_disagree_end_the_group() {
    for (behaviour, same) in [("good", true), ("own token", false)] {
        let mut executor = executor(ranks(behaviour, 2));
        ready(&mut executor);
        executor.submit(&[plan(1, &[5; 3])]);
        if same {
            assert_eq!(result(&mut executor).step, 1);
            continue;
        }
        let reason = death(&mut executor);
        assert!(reason.contains("ranks 0 and 1 disagree in step 1: token 0: 0, 1"), "{reason}");
    }
}

#[test]
fn ranks_meet_through_the_brain() {
    let mut group = executor(ranks("meet", 3));
    let facts = ready(&mut group);
    assert_eq!(
        (facts.weight_bytes, facts.kv_bytes, facts.page_count),
        (3, 6, 100),
        "memory is the sum over three ranks"
    );
    group.submit(&[plan(1, &[5; 3])]);
    assert_eq!(result(&mut group).step, 1);

    for (behaviour, reason) in [
        ("dies while others wait", "rank 0: exit status 3"),
        ("asks too much", "the store has at most"),
        ("other pages", "ranks have different models, or pools: [100, 101] pages"),
    ] {
        let mut group = executor(ranks(behaviour, 2));
        group.start();
        let found = death(&mut group);
        assert!(found.contains(reason), "{found}");
    }
    let mut late = executor(ranks("asks late", 2));
    ready(&mut late);
    late.submit(&[plan(1, &[5; 3])]);
    let reason = death(&mut late);
    assert!(reason.contains("for ranks that begin"), "{reason}");
}

#[test]
fn large_plans_are_written_once_for_all_ranks() {
    // With the behaviour `tells`, each rank's token is the number of its plans that came through
    // the arena.
    for (count, expected) in [(1, [0, 0, 0]), (3, [0, 1, 2])] {
        let spec = ranks("tells", count);
        let arena = spec.arena.clone();
        let mut group = executor(spec);
        ready(&mut group);
        for (step, tokens) in [(1, 10), (2, 2040), (3, 2047)] {
            group.submit(&[plan(step, &vec![5; tokens])]);
            let given = result(&mut group);
            assert_eq!((given.step, given.tokens[0]), (step, expected[step as usize - 1]));
            assert_eq!(arena.used(), 0, "an answered step keeps nothing in the arena");
        }
    }
    // Without room in the arena, each rank gets its plan through its socket.
    let spec = ranks("tells", 2);
    let taken = spec.arena.reserve(1 << 20).expect("the arena is empty");
    let mut group = executor(spec);
    ready(&mut group);
    group.submit(&[plan(1, &[5; 2040])]);
    assert_eq!(result(&mut group).tokens, [0]);
    drop(taken);
}

#[test]
fn large_orders_about_adapters_come_whole_to_all_ranks() {
    let mut group = executor(ranks("is told", 2));
    ready(&mut group);
    group.submit(&[plan(1, &[5; 3])]);
    // The order belongs to no step. So it is not sent through the arena, whose regions are in use
    // only while a step is in flight.
    let manifest = serde_json::json!({ "files": ["x".repeat(100_000)] });
    group.adapter(0, &AdapterOrder::Know { id: 1, manifest });
    assert_eq!(result(&mut group).tokens, [0]);
    group.submit(&[plan(2, &[5; 3])]);
    assert_eq!(result(&mut group).tokens, [10], "one order came, and not through the arena");
}

/// Creates a plan without rows that saves pages with these tickets.
fn saves(step: u64, tickets: &[u32]) -> StepPlan {
    let mut plan = StepPlan::default();
    plan.begin(step);
    for &ticket in tickets {
        let (hot, host) = (Some(ticket), ticket);
        let direction = Direction::Save;
        plan.push_copy(PageCopy { ticket, direction, hot, host, span: None, lender: None });
    }
    plan
}

fn tier(spec: HandSpec) -> HandSpec {
    HandSpec { config: HandConfig { host_bytes: Some(1000), ..spec.config.clone() }, ..spec }
}

#[test]
fn a_copy_of_ranks_has_ended_when_all_have_ended_it() {
    let mut group = executor(tier(ranks("copies", 2)));
    let facts = ready(&mut group);
    assert_eq!((facts.host_page_count, facts.page_bytes), (50, 2), "halves of 1000 bytes");
    group.submit(&[saves(1, &[5, 7])]);
    let first = result(&mut group);
    assert_eq!(
        (first.copied, first.copy_timing),
        (Vec::new(), None),
        "rank 1 has not ended its copies"
    );
    group.submit(&[saves(2, &[6])]);
    let second = result(&mut group);
    let ends = [CopyEnd { ticket: 5, error: COPY_OK }, CopyEnd { ticket: 7, error: COPY_FAILED }];
    assert_eq!(second.copied, ends, "rank 1 fails at one copy");
    assert_eq!(second.copy_timing, Some(CopyTiming { save_us: 20, restore_us: 0 }));
    group.submit(&[saves(3, &[])]);
    assert_eq!(result(&mut group).copied, [CopyEnd { ticket: 6, error: COPY_OK }]);

    // The next hands have the same host memory, but report no copies of the previous hands.
    group.submit(&[saves(4, &[5])]);
    assert!(result(&mut group).copied.is_empty());
    group.kill();
    let facts = ready(&mut group);
    assert_eq!((facts.host_page_count, facts.page_bytes), (50, 200));
    group.submit(&[saves(5, &[5])]);
    assert!(result(&mut group).copied.is_empty());
    group.submit(&[saves(6, &[])]);
    assert_eq!(result(&mut group).copied.len(), 1);

    // With fewer pages, each hand gets new host memory.
    group.kill();
    group.limit_pages(80, 40);
    let facts = ready(&mut group);
    assert_eq!((facts.page_count, facts.host_page_count, facts.page_bytes), (80, 40, 2));
}

#[test]
fn the_ranks_of_a_step_group_end_copies_of_their_own() {
    let mut group = executor(tier(step_group("copies")));
    let facts = ready(&mut group);
    assert_eq!((facts.host_page_count, facts.page_bytes), (100, 1), "each member has its own tier");
    for (step, expected) in [(1, [vec![5], vec![], vec![]]), (2, [vec![5], vec![7], vec![]])] {
        let mut plans = vec![saves(step, &[5]), saves(step, &[7]), saves(step, &[])];
        tell_group(&mut plans);
        group.submit(&plans);
        let Signal::Result(results) = next(&mut group) else { panic!("no result") };
        let ended = |result: &StepResult| result.copied.iter().map(|end| end.ticket).collect();
        let ended: Vec<Vec<u32>> = results.iter().map(ended).collect();
        assert_eq!(ended, expected);
    }
}

#[test]
fn a_rank_s_end_is_that_of_all() {
    for (behaviour, reason) in [
        ("is killed", "rank 1: killed by signal 9"),
        ("lies", "ranks 0 and 1 disagree in step 2: token 0: 0, 1"),
    ] {
        let mut group = executor(ranks(behaviour, 3));
        ready(&mut group);
        group.submit(&[plan(1, &[5; 3])]);
        assert_eq!(result(&mut group).step, 1);
        let before = Instant::now();
        group.submit(&[plan(2, &[5; 3])]);
        let found = death(&mut group);
        assert!(found.contains(reason), "{found}");
        assert!(
            before.elapsed() < Duration::from_secs(5),
            "the executor must notice it, not a rank's own time limit"
        );
        // The group starts again without any effects of the failure.
        ready(&mut group);
        group.submit(&[plan(3, &[5; 3])]);
        assert_eq!(result(&mut group).step, 3);
    }
    // A rank that hangs is detected by the timeout of the wait.
    let mut group = executor(ranks("is stopped", 2));
    ready(&mut group);
    group.submit(&[plan(2, &[5; 3])]);
    assert!(matches!(group.wait(Some(200_000)), Signal::TimedOut));
    group.stop();
}

/// Creates a step of three ranks: the second rank has nothing to do, and the third has a long
/// prompt.
fn group_step(step: u64) -> Vec<StepPlan> {
    let mut idle = StepPlan::default();
    idle.begin(step);
    let mut plans = vec![plan(step, &[7; 3]), idle, plan(step, &[9; 3000])];
    tell_group(&mut plans);
    plans
}

fn step_group(behaviour: &str) -> HandSpec {
    let spec = ranks(behaviour, 3);
    HandSpec { config: HandConfig { step_group: true, ..spec.config.clone() }, ..spec }
}

#[test]
fn the_ranks_of_a_step_group_get_plans_of_their_own() {
    let spec = step_group("echo");
    let arena = spec.arena.clone();
    let mut group = executor(spec);
    ready(&mut group);
    group.submit(&group_step(1));
    for step in 1..4 {
        group.submit(&group_step(step + 1));
        assert!(arena.used() > 0, "the long prompt is in the arena");
        let Signal::Result(results) = next(&mut group) else { panic!("no result") };
        assert!(results.iter().all(|result| result.step == step));
        let tokens: Vec<&[i32]> = results.iter().map(|result| &result.tokens[..]).collect();
        assert_eq!(tokens, [&[7][..], &[], &[9]], "each rank answers its own plan");
    }
    assert!(matches!(next(&mut group), Signal::Result(_)));
    assert_eq!(arena.used(), 0, "an answered step keeps nothing in the arena");
    group.stop();
}

#[test]
fn a_step_group_dies_whole() {
    for (behaviour, reason) in [
        ("is killed", "rank 1: killed by signal 9"),
        ("skips", "ranks 0 and 1 disagree in step 2: the other rank is in step 3"),
    ] {
        let mut group = executor(step_group(behaviour));
        ready(&mut group);
        group.submit(&group_step(1));
        assert!(matches!(next(&mut group), Signal::Result(results) if results.len() == 3));
        group.submit(&group_step(2));
        let found = death(&mut group);
        assert!(found.contains(reason), "{found}");
        ready(&mut group);
        group.submit(&group_step(3));
        assert!(matches!(next(&mut group), Signal::Result(_)));
    }
}

#[test]
fn a_missing_interpreter_is_said_plainly() {
    let mut executor = executor(HandSpec { program: "/no/such/python".into(), ..spec("good") });
    executor.start();
    let reason = death(&mut executor);
    assert!(reason.starts_with("cannot run /no/such/python"), "{reason}");
}

#[test]
fn the_whole_process_group_goes() {
    let file = std::env::temp_dir().join(format!("forebay-hand-{}", std::process::id()));
    let mut spec = spec("child");
    spec.env.push(("FAKE_PID_FILE".into(), file.clone().into()));
    let mut executor = executor(spec);
    ready(&mut executor);
    let grandchild = std::fs::read_to_string(&file).expect("pid");
    let alive = || {
        std::fs::read_to_string(format!("/proc/{grandchild}/stat"))
            .is_ok_and(|stat| !stat.contains(") Z "))
    };
    assert!(alive());
    executor.stop();
    // The kernel needs a moment to execute the SIGKILL.
    while alive() {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::fs::remove_file(&file).expect("removed");
}

#[test]
fn a_killed_hand_is_not_asked() {
    let file = std::env::temp_dir().join(format!("forebay-told-{}", std::process::id()));
    let mut spec = spec("last words");
    spec.env.push(("FAKE_PID_FILE".into(), file.clone().into()));
    let mut executor = executor(spec);
    ready(&mut executor);
    executor.kill();
    assert!(!file.exists());
    ready(&mut executor);
    executor.stop();
    std::fs::remove_file(&file).expect("a stopped worker gets a stop message");
}

#[test]
fn a_hand_that_ignores_its_orders_is_killed() {
    let mut executor = executor(spec("stubborn"));
    ready(&mut executor);
    executor.stop();
    ready(&mut executor);
}
