//! Step groups: one thread that owns several schedulers, against simulated ranks in virtual time.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use forebay_engine::{
    Allowed, Constraint, ConstraintError, EngineConfig, EngineHandle, EngineRequest, Executor,
    FinishReason, HostConfig, Output, RequestError, RequestId, Signal, Status, Wake,
};
use forebay_protocol::{StepMasks, StepPlan};
use forebay_sim::testing::{self, PATIENCE, RigParts, Story, VOCAB, alone, request, text};
use forebay_sim::{
    CopyModel, DeviceModel, PageBytes, SimClock, SimConfig, SimControl, SimExecutor, Timing,
};
use parking_lot::Mutex;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

const PAGES: u32 = 60;
const PAGE_SIZE: u32 = 4;
/// Pages of each member's host tier, if it has one.
const HOST_PAGES: u32 = 150;

/// For each start of the group, and each rank: the numbers of its steps.
type Lives = Arc<Mutex<Vec<Vec<Vec<u64>>>>>;

/// Records the plans and results of each rank.
struct Watched {
    inner: SimExecutor,
    ranks: usize,
    given: Lives,
    /// The number of the last step that returned a result since the group was started.
    answered: u64,
}

impl Executor for Watched {
    fn start(&mut self) {
        self.given.lock().push(vec![Vec::new(); self.ranks]);
        self.inner.start();
    }

    fn submit(&mut self, plans: &[StepPlan]) {
        assert_eq!(plans.len(), self.ranks, "each rank gets a plan");
        let computes = plans.iter().any(|plan| plan.rows().len() > 0);
        let waits = plans.iter().any(|plan| plan.wait_us() > 0);
        assert!(!(computes && waits), "a step with rows waits for copies");
        let works = |plan: &StepPlan| plan.writes_tables() || plan.copies().len() > 0;
        let works = computes || waits || plans.iter().any(works);
        assert!(works, "a step without work for any rank");
        let tokens = |plan: &StepPlan| plan.rows().map(|row| row.length as i32).sum::<i32>();
        let tokens: Vec<i32> = plans.iter().map(tokens).collect();
        let mut lives = self.given.lock();
        for (rank, plan) in plans.iter().enumerate() {
            assert_eq!(plan.group(), tokens, "rank {rank} has wrong token counts of the group");
            lives.last_mut().expect("the group was started")[rank].push(plan.step());
        }
        drop(lives);
        self.inner.submit(plans);
    }

    fn masks(&mut self, member: usize, masks: &StepMasks) {
        self.inner.masks(member, masks);
    }

    fn wait(&mut self, timeout_us: Option<u64>) -> Signal {
        let signal = self.inner.wait(timeout_us);
        if let Signal::Result(results) = &signal {
            let step = results[0].step;
            assert_eq!(results.len(), self.ranks);
            assert!(results.iter().all(|result| result.step == step));
            let lives = self.given.lock();
            let given =
                lives.last().and_then(|ranks| ranks[0].iter().find(|&&s| s > self.answered));
            assert_eq!(given, Some(&step), "results are out of order");
            drop(lives);
            self.answered = step;
        }
        signal
    }

    fn stop(&mut self) {
        self.inner.stop();
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.inner.waker()
    }
}

/// The counts of outputs and of finished requests so far.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    outputs: u64,
    ends: u64,
}

/// A function that runs on the engine thread after each batch of outputs.
type Hook = Box<dyn FnMut(&Rig, Seen) + Send>;
/// The hook of all members, the counts passed to it, and the member that generated each request's
/// tokens.
#[derive(Default)]
struct Watch {
    seen: Seen,
    hook: Option<(Rig, Hook)>,
    givers: HashMap<u64, usize>,
}

impl Watch {
    fn see(&mut self, member: usize, outputs: &[Output]) {
        self.seen.outputs += outputs.len() as u64;
        self.seen.ends += outputs.iter().filter(|output| output.finish.is_some()).count() as u64;
        self.givers.extend(outputs.iter().map(|output| (output.id.0, member)));
        if let Some((rig, hook)) = &mut self.hook {
            hook(rig, self.seen);
        }
    }
}

/// The handles of the members, for hooks.
#[derive(Clone)]
struct Rig {
    handles: Vec<EngineHandle>,
    control: SimControl,
}

struct Group {
    whole: testing::Rig,
    rig: Rig,
    given: Lives,
    watch: Arc<Mutex<Watch>>,
}

fn config() -> EngineConfig {
    EngineConfig {
        max_running_requests: 6,
        slots: 9,
        page_size: PAGE_SIZE,
        chunked_prefill_size: 16,
        max_queued_requests: 100_000,
        context_length: 200,
        watchdog_timeout: Duration::from_secs(10),
        load_timeout: Duration::ZERO,
        mask_threads: 0,
        ..EngineConfig::default()
    }
}

impl Group {
    fn start(members: u32, config: EngineConfig, seed: u64, hook: Option<Hook>) -> Self {
        let clock = SimClock::virtual_time();
        let model = DeviceModel {
            step_us: 1000.0,
            row_us: 10.0,
            token_us: 5.0,
            jitter_sigma: 0.2,
            ..DeviceModel::INSTANT
        };
        let sim = SimConfig {
            clock: clock.clone(),
            timing: Timing {
                model,
                // A page takes 50 us to save, and 10 us to restore. Computing it takes twice as
                // long as restoring it.
                copy: CopyModel {
                    save_gbps: Some(0.02),
                    restore_gbps: Some(0.1),
                    ..CopyModel::default()
                },
                bytes: PageBytes { main: 1000, ..PageBytes::default() },
                ..Timing::default()
            },
            host_pages: if config.host_tier.is_some() { HOST_PAGES } else { 0 },
            seed,
            load_us: 1_000_000,
            page_count: PAGES,
            vocab_size: VOCAB,
            text: text(),
            ..SimConfig::default()
        };
        let given = Lives::default();
        let (ranks, noted) = (members as usize, Arc::clone(&given));
        let executor = Box::new(move |inner| -> Box<dyn Executor> {
            Box::new(Watched { inner, ranks, given: noted, answered: 0 })
        });
        let watch = Arc::new(Mutex::new(Watch::default()));
        let hooks = (0..ranks).map(|member| -> testing::Hook {
            let watch = Arc::clone(&watch);
            Box::new(move |_, outputs| watch.lock().see(member, outputs))
        });
        let parts = RigParts { hooks: hooks.collect(), executor, ..RigParts::default() };
        let whole = testing::Rig::start(config, sim, parts);
        let rig = Rig { handles: whole.handles.clone(), control: whole.control.clone() };
        watch.lock().hook = hook.map(|hook| (rig.clone(), hook));
        Self { whole: whole.held(), rig, given, watch }
    }

    /// Runs virtual time until `count` requests have ended.
    fn follow(&self, count: usize) -> HashMap<u64, Story> {
        self.whole.follow(count)
    }

    /// Checks that all ranks got the same steps without gaps, and that no request holds a page any
    /// more.
    fn check(&self) {
        self.rig.control.release();
        for (member, handle) in self.rig.handles.iter().enumerate() {
            // Wait until the steps in flight have returned and the copies have finished.
            let is_busy = || {
                let stats = handle.stats().scheduler;
                stats.pages_held > 0 || stats.host.copies_outstanding > 0
            };
            while is_busy() {
                assert!(!matches!(handle.status(), Status::Failed(_)), "{:?}", handle.status());
                std::thread::yield_now();
            }
            let before = handle.now_us();
            self.flush(member);
            let stats = handle.stats().scheduler;
            assert_eq!((stats.running, stats.waiting), (0, 0), "member {member}");
            // An idle engine checks its integrity after a while, and fails if there is an error.
            while handle.now_us() < before + 100_000 {
                assert!(!matches!(handle.status(), Status::Failed(_)), "{:?}", handle.status());
                std::thread::yield_now();
            }
            self.flush(member);
        }
        let lives = self.given.lock();
        let mut last = 0;
        for ranks in lives.iter() {
            let first = &ranks[0];
            assert!(ranks.iter().all(|steps| steps == first), "ranks differ");
            for &step in first {
                assert_eq!(step, last + 1, "a step number is missing");
                last = step;
            }
        }
    }

    /// Flushes a member's prefix cache. No request may be using its blocks.
    fn flush(&self, member: usize) {
        let (sender, flushed) = channel();
        self.rig.handles[member].flush_cache(Box::new(move |done| {
            let _ = sender.send(done);
        }));
        assert!(flushed.recv_timeout(PATIENCE).expect("reply"), "member {member}");
    }

    fn lives(&self) -> usize {
        self.given.lock().len()
    }
}

impl Rig {
    fn submit(&self, id: u64, member: usize, max_tokens: u32) {
        self.handles[member].submit(request(id, prompt(id), max_tokens)).expect("room");
    }
}

/// Returns prompts of different lengths, some with a common prefix.
fn prompt(id: u64) -> Vec<i32> {
    testing::prompt(id, 20)
}

fn length(id: u64) -> u32 {
    1 + (id as u32 * 13) % 50
}

#[test]
fn every_member_s_requests_get_what_they_would_get_alone() {
    for members in [2, 5] {
        let group = Group::start(members, config(), 1, None);
        // The last member has no requests at first, and gets one later.
        for id in 0..40 {
            group.rig.submit(id, id as usize % (members as usize - 1), length(id));
        }
        let stories = group.follow(40);
        for (&id, story) in &stories {
            assert_eq!(story.tokens, alone(prompt(id), length(id)), "request {id}");
            assert_eq!(story.end, Some(FinishReason::Length));
        }
        group.rig.submit(40, members as usize - 1, 5);
        assert_eq!(group.follow(1)[&40].tokens, alone(prompt(40), 5));
        group.check();
        assert_eq!(group.lives(), 1);
    }
}

#[test]
fn a_rank_s_death_is_that_of_all_and_nobody_notices() {
    type Fault = fn(&SimControl, usize);
    let (kill, hang, lie): (Fault, Fault, Fault) =
        (SimControl::kill_rank, |control, _| control.hang(), SimControl::lie);
    for (fault, lookahead) in [(kill, 1), (hang, 1), (lie, 1), (kill, 0), (lie, 0)] {
        let mut due = [30, 200, 400].into_iter().peekable();
        let hook: Hook = Box::new(move |rig, seen| {
            if let Some(at) = due.next_if(|&at| seen.outputs >= at) {
                fault(&rig.control, at as usize / 10 % 3);
            }
        });
        let group = Group::start(3, EngineConfig { lookahead, ..config() }, 2, Some(hook));
        for id in 0..30 {
            group.rig.submit(id, id as usize % 3, length(id));
        }
        let stories = group.follow(30);
        for (&id, story) in &stories {
            assert_eq!(story.tokens, alone(prompt(id), length(id)), "request {id}");
        }
        for handle in &group.rig.handles {
            assert_eq!(handle.stats().hand.deaths, 3, "all members count the same deaths");
        }
        group.check();
    }
}

#[test]
fn who_kills_a_rank_is_found_and_the_others_of_all_members_live() {
    /// A token that no request generates.
    const POISON: i32 = 5000;
    let group = Group::start(4, config(), 3, None);
    group.rig.control.poison(POISON);
    for id in 0..40 {
        // Two members have one poisonous request each.
        let tokens = if id == 6 || id == 15 { vec![1, POISON] } else { prompt(id % 20) };
        let member = id as usize % 4;
        group.rig.handles[member].submit(request(id, tokens, length(id))).expect("room");
    }
    let stories = group.follow(40);
    for (&id, story) in &stories {
        if id == 6 || id == 15 {
            let poisoned = FinishReason::Error(RequestError::Poisoned);
            assert_eq!(story.end, Some(poisoned), "request {id}");
        } else {
            assert_eq!(story.end, Some(FinishReason::Length), "request {id} is innocent");
            assert_eq!(story.tokens, alone(prompt(id % 20), length(id)), "request {id}");
        }
    }
    group.check();
}

fn tiered(lookahead: u32) -> EngineConfig {
    EngineConfig { host_tier: Some(HostConfig::default()), lookahead, ..config() }
}

#[test]
fn each_member_has_a_host_tier_of_its_own() {
    for lookahead in [0, 1] {
        let group = Group::start(3, tiered(lookahead), 6, None);
        // Nine prompts per member, of 11 blocks each: the device holds four prompts, the host holds
        // all.
        let long = |id: u64| -> Vec<i32> {
            (0..46).map(|at| (at * 7 + id as i32 * 131) % VOCAB as i32).collect()
        };
        for turn in 0..2 {
            for id in 0..27 {
                let (id, member) = (turn * 27 + id, id as usize % 3);
                group.rig.handles[member].submit(request(id, long(id % 27), 5)).expect("room");
                // One request per member at a time.
                if id % 3 == 2 {
                    let stories = group.follow(3);
                    for (&id, story) in &stories {
                        assert_eq!(story.tokens, alone(long(id % 27), 5), "request {id}");
                    }
                }
            }
        }
        for handle in &group.rig.handles {
            let host = handle.stats().scheduler.host;
            assert!(host.blocks_restored > 50, "{host:?}");
            assert_eq!(host.copies_failed, 0);
        }
        group.check();
    }
}

#[test]
fn copies_of_one_member_that_never_end_cost_all_only_time() {
    let mut due = [30, 90].into_iter().peekable();
    let hook: Hook = Box::new(move |rig, seen| {
        if due.next_if(|&at| seen.outputs >= at).is_some() {
            rig.control.hang_copies();
        }
    });
    let group = Group::start(3, tiered(1), 7, Some(hook));
    for id in 0..30 {
        group.rig.submit(id, id as usize % 3, length(id));
    }
    for (&id, story) in &group.follow(30) {
        assert_eq!(story.tokens, alone(prompt(id), length(id)), "request {id}");
    }
    group.check();
    assert!(group.lives() > 1, "the watchdog has ended the group");
}

/// A constraint that allows only even tokens.
#[derive(Debug)]
struct Even;

impl Constraint for Even {
    fn accept(&mut self, token: i32) -> Result<(), ConstraintError> {
        if token % 2 == 0 { Ok(()) } else { Err(ConstraintError(format!("{token} is odd"))) }
    }

    fn walk(
        &mut self,
        drafts: &[i32],
        masks: &mut [&mut [u32]],
    ) -> Result<Vec<Allowed>, ConstraintError> {
        masks.iter_mut().for_each(|words| words.fill(0x5555_5555));
        Ok(vec![Allowed::Some; 1 + drafts.iter().take_while(|&draft| draft % 2 == 0).count()])
    }
}

#[test]
fn members_have_masks_of_their_own() {
    let group = Group::start(3, config(), 4, None);
    for id in 0..24 {
        let constraint: Option<Box<dyn Constraint>> =
            if id % 4 == 0 { Some(Box::new(Even)) } else { None };
        let one = EngineRequest { constraint, ..request(id, prompt(id), length(id)) };
        group.rig.handles[id as usize % 3].submit(one).expect("room");
    }
    let stories = group.follow(24);
    for (&id, story) in &stories {
        assert_eq!(story.end, Some(FinishReason::Length), "request {id}");
        if id % 4 == 0 {
            assert!(story.tokens.iter().all(|token| token % 2 == 0), "request {id}");
        } else {
            assert_eq!(story.tokens, alone(prompt(id), length(id)), "request {id}");
        }
    }
    group.check();
}

#[test]
fn a_stop_at_one_member_ends_all() {
    let group = Group::start(3, config(), 5, None);
    for id in 0..12 {
        group.rig.submit(id, id as usize % 3, 100);
    }
    group.rig.handles[1].stop();
    let stories = group.follow(12);
    assert!(stories.values().all(|story| story.end == Some(FinishReason::Abort)));
}

/// An event that happens after a given number of outputs.
#[derive(Debug, Clone)]
enum Event {
    Arrive { member: usize, max_tokens: u32 },
    Abort { which: u64 },
    Kill { rank: usize },
    Lie { rank: usize },
    Hang,
}

impl Event {
    fn is_death(&self) -> bool {
        matches!(self, Self::Kill { .. } | Self::Lie { .. } | Self::Hang)
    }
}

fn events(members: usize) -> impl Strategy<Value = Vec<(u64, Event)>> {
    let event = prop_oneof![
        30 => (0..members, 1_u32..60)
            .prop_map(|(member, max_tokens)| Event::Arrive { member, max_tokens }),
        // A request for the first member, while the other members are idle.
        10 => (1_u32..60).prop_map(|max_tokens| Event::Arrive { member: 0, max_tokens }),
        8 => (0_u64..200).prop_map(|which| Event::Abort { which }),
        1 => (0..members).prop_map(|rank| Event::Kill { rank }),
        1 => (0..members).prop_map(|rank| Event::Lie { rank }),
        1 => Just(Event::Hang),
    ];
    proptest::collection::vec((0_u64..60, event), 20..200)
}

fn members() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 2_usize..5, 4 => Just(4_usize), 3 => Just(16_usize), 1 => 17_usize..65]
}

/// Runs the events, and returns the number of steps.
fn run(members: usize, config: EngineConfig, seed: u64, events: Vec<(u64, Event)>) -> u64 {
    let arrival = |(_, event): &(u64, Event)| match event {
        Event::Arrive { member, max_tokens } => Some((*member, *max_tokens)),
        _ => None,
    };
    let arrivals: Vec<(usize, u32)> = events.iter().filter_map(arrival).collect();
    let deaths = events.iter().filter(|(_, event)| event.is_death()).count();
    let (mut next, mut due_at) = (0_usize, 0_u64);
    let (mut queue, homes) = (VecDeque::from(events), arrivals.clone());
    let hook: Hook = Box::new(move |rig, seen| {
        // When all requests have ended, no outputs follow that would trigger the next event, so it
        // happens at once.
        while let Some((after, _)) = queue.front()
            && (seen.outputs >= due_at + after || seen.ends == next as u64 + 1)
        {
            let Some((_, event)) = queue.pop_front() else { return };
            due_at = seen.outputs;
            match event {
                Event::Arrive { member, max_tokens } => {
                    rig.submit(next as u64, member, max_tokens);
                    next += 1;
                }
                Event::Abort { which } if next > 0 => {
                    let which = which as usize % next;
                    rig.handles[homes[which].0].abort(RequestId(which as u64));
                }
                Event::Abort { .. } => {}
                Event::Kill { rank } => rig.control.kill_rank(rank),
                Event::Lie { rank } => rig.control.lie(rank),
                Event::Hang => rig.control.hang(),
            }
        }
    });
    let config = EngineConfig { hand_restarts: 1000, ..config };
    let group = Group::start(members as u32, config, seed, Some(hook));
    // The output of this request triggers the first events.
    group.rig.handles[0].submit(request(u64::MAX, vec![1], 1)).expect("room");
    let stories = group.follow(arrivals.len() + 1);
    for (id, &(member, max_tokens)) in (0..).zip(&arrivals) {
        let story = &stories[&id];
        let whole = alone(prompt(id), max_tokens);
        match &story.end {
            Some(FinishReason::Length) => assert_eq!(story.tokens, whole, "request {id}"),
            Some(FinishReason::Abort) => {}
            // A request that did not kill the hand may be given up too, if the hand is killed again
            // while it computes that request alone.
            Some(FinishReason::Error(RequestError::Poisoned)) if deaths > 1 => {}
            other => panic!("request {id} ended with {other:?}"),
        }
        assert!(whole.starts_with(&story.tokens), "request {id}");
        assert!(
            story.tokens.is_empty() || group.watch.lock().givers[&id] == member,
            "request {id}"
        );
    }
    group.check();
    let lives = group.given.lock();
    lives.iter().map(|ranks| ranks[0].len() as u64).sum()
}

/// The environment variable `FOREBAY_GROUP_CASES` sets the number of random cases.
#[test]
fn ranks_execute_the_same_steps_whatever_happens() {
    let cases = std::env::var("FOREBAY_GROUP_CASES").map_or(24, |count| count.parse().unwrap());
    let mut runner = TestRunner::new(ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let steps = AtomicU64::new(0);
    let scenario = members().prop_flat_map(|members| {
        (Just(members), 0_u32..2, any::<bool>(), any::<u64>(), events(members))
    });
    let ran = runner.run(&scenario, |(members, lookahead, tier, seed, events)| {
        let config = EngineConfig {
            host_tier: tiered(lookahead).host_tier.filter(|_| tier),
            lookahead,
            ..config()
        };
        steps.fetch_add(run(members, config, seed, events), Ordering::Relaxed);
        Ok(())
    });
    ran.unwrap();
    println!("{} steps in {cases} cases", steps.into_inner());
}
