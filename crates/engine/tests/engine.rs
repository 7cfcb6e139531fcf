//! The owner thread against a simulated hand in virtual time.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use forebay_engine::{
    BlockEvent, BlockHash, BlockObserver, Engine, EngineConfig, EngineHandle, EngineRequest,
    EngineThread, FinishReason, Hooks, Namer, Output, OutputSink, Payload, Policy, Pooling,
    Request, RequestError, RequestId, Status, SubmitError,
};
use forebay_sim::{
    DeviceModel, SimClock, SimConfig, SimControl, SimExecutor, SimText, Timing, next_token, vector,
};

const VOCAB: u32 = 1000;
/// Far longer than anything here takes: a test that reaches it hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Sees every batch on the engine thread: what it breaks is broken at that very step.
type Hook = Box<dyn FnMut(&SimControl, &[Output]) + Send>;

struct ChannelSink {
    outputs: Sender<Vec<Output>>,
    control: SimControl,
    hook: Hook,
}

impl OutputSink for ChannelSink {
    fn deliver(&mut self, outputs: Vec<Output>) {
        (self.hook)(&self.control, &outputs);
        // The test may be over.
        let _ = self.outputs.send(outputs);
    }
}

struct Rig {
    handle: EngineHandle,
    control: SimControl,
    outputs: Receiver<Vec<Output>>,
    _thread: EngineThread,
}

/// All that a request gave.
#[derive(Debug, Default)]
struct Story {
    tokens: Vec<i32>,
    admissions: usize,
    ends: Vec<FinishReason>,
}

fn config() -> EngineConfig {
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
        image_budget: 1000,
        host: None,
    }
}

impl Rig {
    fn start(config: EngineConfig, pages: u32) -> Self {
        Self::broken(config, pages, |_| {}, Box::new(|_, _| {}))
    }

    fn hooked(config: EngineConfig, hook: Hook) -> Self {
        Self::broken(config, 500, |_| {}, hook)
    }

    fn broken(
        config: EngineConfig,
        pages: u32,
        breaking: impl FnOnce(&SimControl),
        hook: Hook,
    ) -> Self {
        Self::observed(config, pages, 1, breaking, hook, None)
    }

    fn observed(
        config: EngineConfig,
        pages: u32,
        tokens_a_row: u32,
        breaking: impl FnOnce(&SimControl),
        hook: Hook,
        blocks: Option<Box<dyn BlockObserver>>,
    ) -> Self {
        let clock = SimClock::virtual_time();
        let (executor, control) = SimExecutor::new(SimConfig {
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
        });
        breaking(&control);
        let (sender, outputs) = channel();
        let sink = ChannelSink { outputs: sender, control: control.clone(), hook };
        let (handle, thread) = Engine::start(
            config,
            Box::new(executor),
            Arc::new(clock),
            Hooks { blocks, ..Hooks::new(Box::new(sink)) },
        )
        .expect("thread");
        let rig = Self { handle, control, outputs, _thread: thread };
        rig.settled(|status| !matches!(status, Status::Starting(_)));
        // Virtual time would run away from the test's submits.
        rig.control.hold();
        rig
    }

    /// Waits for a status; there is no event to wait for, and no assertion hangs on how long it
    /// takes.
    fn settled(&self, wanted: impl Fn(&Status) -> bool) -> Status {
        loop {
            let status = self.handle.status();
            if wanted(&status) {
                return status;
            }
            std::thread::yield_now();
        }
    }

    /// Lets time go on and follows the outputs until `count` requests have ended.
    fn follow(&self, count: usize) -> HashMap<u64, Story> {
        self.control.release();
        let mut stories: HashMap<u64, Story> = HashMap::new();
        let mut ended = 0;
        while ended < count {
            let outputs = self.outputs.recv_timeout(PATIENCE).expect("outputs");
            for output in outputs {
                let story = stories.entry(output.id.0).or_default();
                assert!(story.ends.is_empty(), "something after the end: {output:?}");
                story.admissions += usize::from(output.admission.is_some());
                if let Some(token) = output.token {
                    assert_eq!(story.admissions, 1, "the admission comes with the first token");
                    story.tokens.push(token.id);
                }
                if let Some(finish) = output.finish {
                    story.ends.push(finish);
                    ended += 1;
                }
            }
        }
        stories
    }
}

/// Any token may follow any other, and none is an end.
fn text() -> SimText {
    SimText::endless((0..VOCAB as i32).collect()).with_vectors(8)
}

fn request(id: u64, prompt: Vec<i32>, max_tokens: u32) -> EngineRequest {
    let request = Request { id, prompt: prompt.into(), max_tokens, ..Request::default() };
    EngineRequest { request, ..EngineRequest::default() }
}

/// Prompts of many lengths, some with a common beginning.
fn prompt(id: u64) -> Vec<i32> {
    let common = if id.is_multiple_of(3) { 20 } else { 0 };
    let own = 1 + (id as i32 * 7) % 60;
    (0..common).chain((0..own).map(|i| (id as i32 * 31 + i) % VOCAB as i32)).collect()
}

/// What the simulated model gives a request that runs alone.
fn alone(mut tokens: Vec<i32>, count: u32) -> Vec<i32> {
    let (text, start) = (text(), tokens.len());
    for _ in 0..count {
        tokens.push(next_token(&text, &tokens, start));
    }
    tokens.split_off(start)
}

fn assert_exact(stories: &HashMap<u64, Story>, count: u64, max_tokens: impl Fn(u64) -> u32) {
    assert_eq!(stories.len() as u64, count);
    for id in 0..count {
        let story = &stories[&id];
        assert_eq!(story.tokens, alone(prompt(id), max_tokens(id)), "request {id}");
        assert_eq!(story.ends, [FinishReason::Length], "request {id}");
    }
}

fn lengths(id: u64) -> u32 {
    1 + (id as u32 * 13) % 90
}

#[test]
fn the_tokens_do_not_depend_on_lookahead_or_memory() {
    for lookahead in [0, 1] {
        for pages in [64, 2000] {
            let rig = Rig::start(EngineConfig { lookahead, ..config() }, pages);
            for id in 0..64 {
                rig.handle.submit(request(id, prompt(id), lengths(id))).expect("room");
            }
            let stories = rig.follow(64);
            assert_exact(&stories, 64, lengths);
            let stats = rig.handle.stats();
            assert_eq!(
                stats.scheduler.pages_held
                    + stats.scheduler.pages_cached
                    + stats.scheduler.pages_free,
                pages as usize
            );
            assert_eq!(stats.scheduler.preemptions > 0, pages == 64, "{stats:?}");
        }
    }
}

#[test]
fn the_tokens_do_not_depend_on_how_many_come_at_a_time() {
    for lookahead in [0, 1] {
        for pages in [64, 2000] {
            let config = EngineConfig { lookahead, ..config() };
            let mut seen = 0;
            let hook: Hook = Box::new(move |control, outputs| {
                seen += outputs.len();
                if seen > 700 {
                    seen = 0;
                    control.kill();
                }
            });
            let rig = Rig::observed(config, pages, 4, |_| {}, hook, None);
            for id in 0..64 {
                rig.handle.submit(request(id, prompt(id), lengths(id))).expect("room");
            }
            assert_exact(&rig.follow(64), 64, lengths);
            let stats = rig.handle.stats();
            assert!(stats.hand.deaths > 0, "{stats:?}");
        }
    }
}

#[test]
fn a_request_goes_on_after_tokens_that_it_was_given_elsewhere() {
    let rig = Rig::start(config(), 500);
    for id in 0..20 {
        let mut given = alone(prompt(id), 40);
        given.truncate(2 * id as usize);
        let mut request = request(id, prompt(id), 40);
        request.request.generated = given;
        rig.handle.submit(request).expect("room");
    }
    let stories = rig.follow(20);
    for id in 0..20 {
        let rest = alone(prompt(id), 40).split_off(2 * id as usize);
        assert_eq!(stories[&id].tokens, rest, "request {id}");
        assert_eq!(stories[&id].ends, [FinishReason::Length]);
        assert_eq!(stories[&id].admissions, 1, "to this brain it is new");
    }
}

#[test]
fn streams_survive_twenty_kills() {
    for lookahead in [0, 1] {
        let (mut kills, mut tokens, mut next) = (0, 0, 20);
        let hook: Hook = Box::new(move |control, outputs| {
            tokens += outputs.len();
            if tokens >= next && kills < 20 {
                kills += 1;
                next = tokens + 150;
                control.kill();
            }
        });
        let rig = Rig::hooked(EngineConfig { lookahead, ..config() }, hook);
        for id in 0..48 {
            rig.handle.submit(request(id, prompt(id), 100)).expect("room");
        }
        let stories = rig.follow(48);
        assert_exact(&stories, 48, |_| 100);
        let stats = rig.handle.stats();
        assert_eq!(stats.hand.deaths, 20, "{stats:?}");
        assert!(stats.hand.replayed > 0, "{stats:?}");
    }
}

#[test]
fn a_poisonous_request_is_given_up_and_its_neighbours_are_not() {
    let rig = Rig::start(config(), 500);
    rig.control.poison(777);
    for id in 0..12 {
        let mut prompt: Vec<i32> = prompt(id).into_iter().map(|t| t % 500).collect();
        if id == 5 {
            prompt.push(777);
        }
        rig.handle.submit(request(id, prompt, 10)).expect("room");
    }
    let stories = rig.follow(12);
    for (id, story) in &stories {
        if *id == 5 {
            assert_eq!(story.ends, [FinishReason::Error(RequestError::Poisoned)]);
        } else {
            assert_eq!(story.ends, [FinishReason::Length], "request {id}");
            assert_eq!(story.tokens.len(), 10);
        }
    }
    rig.settled(|status| *status == Status::Ready);
    assert_eq!(rig.handle.stats().hand.deaths, 2);
}

/// Knows a prefix cache by its events.
#[derive(Clone, Default)]
struct Mirror(Arc<Mutex<HashSet<BlockHash>>>);

impl BlockObserver for Mirror {
    fn changed(&mut self, events: Vec<BlockEvent>) {
        let mut blocks = self.0.lock().expect("no panic");
        for event in events {
            match event {
                BlockEvent::Stored(name, _) => _ = blocks.insert(name),
                BlockEvent::Dropped(name) => _ = blocks.remove(&name),
                BlockEvent::Cleared => blocks.clear(),
            }
        }
    }
}

#[test]
fn an_observer_knows_the_prefix_cache_whatever_happens_to_the_hand() {
    let mirror = Mirror::default();
    let (mut tokens, mut killed) = (0, false);
    let hook: Hook = Box::new(move |control, outputs| {
        tokens += outputs.len();
        if tokens > 200 && !std::mem::replace(&mut killed, true) {
            control.kill();
        }
    });
    let blocks: Box<dyn BlockObserver> = Box::new(mirror.clone());
    let rig = Rig::observed(config(), 64, 1, |_| {}, hook, Some(blocks));
    for id in 0..30 {
        rig.handle.submit(request(id, prompt(id), 40)).expect("room");
    }
    rig.follow(30);
    let known = mirror.0.lock().expect("no panic").len();
    assert!(known > 0);
    assert_eq!(rig.handle.stats().scheduler.pages_cached, known, "nobody holds any more");
}

/// A hook that breaks something at the first step that gave outputs.
fn once(mut breaking: impl FnMut(&SimControl) + Send + 'static) -> Hook {
    let mut done = false;
    Box::new(move |control, _| {
        if !std::mem::replace(&mut done, true) {
            breaking(control);
        }
    })
}

#[test]
fn a_hung_hand_is_respawned() {
    let rig = Rig::hooked(config(), once(SimControl::hang));
    rig.handle.submit(request(0, prompt(0), 80)).expect("room");
    let stories = rig.follow(1);
    assert_exact(&stories, 1, |_| 80);
    assert_eq!(rig.handle.stats().hand.deaths, 1);
}

#[test]
fn an_abort_frees_everything_and_ends_once() {
    let rig = Rig::start(config(), 500);
    for id in 0..40 {
        rig.handle.submit(request(id, prompt(id), 150)).expect("room");
    }
    for id in 0..40 {
        rig.handle.abort(RequestId(id));
        rig.handle.abort(RequestId(id));
    }
    let stories = rig.follow(40);
    assert!(stories.values().all(|story| story.ends == [FinishReason::Abort]));
    rig.handle.submit(request(100, prompt(1), 5)).expect("room");
    rig.follow(1);
    let (sender, flushed) = channel();
    rig.handle.flush_cache(Box::new(move |done| {
        let _ = sender.send(done);
    }));
    assert!(flushed.recv_timeout(PATIENCE).expect("reply"));
}

#[test]
fn the_queue_is_bounded_and_drains() {
    let rig = Rig::start(EngineConfig { max_queued: 5, max_running: 1, ..config() }, 500);
    let mut taken = 0;
    let refused = loop {
        match rig.handle.submit(request(taken, vec![1, 2, 3], 200)) {
            Ok(()) => taken += 1,
            Err(error) => break error,
        }
        assert!(taken < 1000, "nobody was refused");
    };
    assert!(matches!(refused, SubmitError::QueueFull { limit: 5, .. }), "{refused:?}");
    rig.handle.drain();
    assert_eq!(rig.handle.submit(request(9999, vec![1], 1)), Err(SubmitError::Draining));
    assert_eq!(rig.handle.status(), Status::Draining);
    let stories = rig.follow(taken as usize);
    assert!(stories.values().all(|story| story.ends == [FinishReason::Length]));
}

#[test]
fn stopping_ends_what_is_alive() {
    let rig = Rig::start(config(), 500);
    for id in 0..30 {
        rig.handle.submit(request(id, prompt(id), 150)).expect("room");
    }
    rig.handle.stop();
    let stories = rig.follow(30);
    let ended = |story: &Story| story.ends.len() == 1;
    assert!(stories.values().all(ended));
}

#[test]
fn a_stop_id_ends_a_request_but_not_before_min_tokens() {
    let rig = Rig::start(config(), 500);
    let free = alone(prompt(1), 50);
    let stop = free[20];
    let first = free.iter().position(|&t| t == stop).expect("it is there");
    for (id, min_tokens) in [(0, 0), (1, first as u32 + 1)] {
        let mut one = request(id, prompt(1), 50);
        one.request.spec.stop_ids = [stop].into();
        one.request.spec.sampling.min_tokens = min_tokens;
        rig.handle.submit(one).expect("room");
    }
    let stories = rig.follow(2);
    assert_eq!(stories[&0].tokens, free[..=first]);
    assert_eq!(stories[&0].ends, [FinishReason::Stop { token: stop }]);
    assert!(stories[&1].tokens.len() > first + 1);
}

/// The simulated model's vectors of prompts that are packed into steps, chunked, or computed again
/// after the hand was killed.
#[test]
fn vectors_do_not_depend_on_the_batch_the_pages_or_a_death() {
    for (pages, kills) in [(0, false), (500, false), (40, false), (0, true), (500, true)] {
        let mut seen = 0;
        let hook: Hook = Box::new(move |control, outputs| {
            seen += outputs.len();
            if kills && seen >= 20 {
                seen = 0;
                control.kill();
            }
        });
        let rig = Rig::broken(config(), pages, |_| {}, hook);
        let facts = rig.handle.facts().expect("ready");
        assert_eq!(facts.context_length, if pages == 40 { 160 } else { 256 });
        for id in 0..100 {
            let mut request = request(id, prompt(id), 0);
            request.request.spec.pooling = Some(Pooling { segment: 0 });
            rig.handle.submit(request).expect("taken");
        }
        rig.control.release();
        let mut ended = 0;
        while ended < 100 {
            for output in rig.outputs.recv_timeout(PATIENCE).expect("outputs") {
                assert_eq!((output.token, output.finish), (None, Some(FinishReason::Length)));
                assert!(output.admission.is_some());
                let expected = vector(&text(), &prompt(output.id.0));
                assert_eq!(output.pooled.as_deref(), Some(&expected[..]));
                ended += 1;
            }
        }
        let stats = rig.handle.stats();
        assert_eq!((stats.scheduler.generated_tokens, stats.scheduler.pages_held), (0, 0));
        assert_eq!(stats.hand.deaths > 0, kills);
    }
}

/// What lies in the arena, and tells when it is given back.
#[derive(Debug)]
struct Lent {
    returned: Sender<()>,
    is_there: Arc<AtomicBool>,
}

impl Payload for Lent {
    fn offset(&self) -> u32 {
        64
    }
    fn write(&self, _: usize, _: &[u8]) -> std::io::Result<()> {
        Ok(())
    }
    fn read(&self, _: usize, _: &mut [u8]) -> std::io::Result<usize> {
        Ok(0)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.is_there.store(false, Ordering::SeqCst);
        // The test may be over.
        let _ = self.returned.send(());
    }
}

/// A request with embeddings, what comes when they are given back, and whether they are there.
fn embedded(id: u64, max_tokens: u32) -> (EngineRequest, Receiver<()>, Arc<AtomicBool>) {
    let (returned, back) = channel();
    let is_there = Arc::new(AtomicBool::new(true));
    let payload = Arc::new(Lent { returned, is_there: is_there.clone() });
    let mut request = request(id, vec![0; 40], max_tokens);
    request.request.spec.embeds = Some(64);
    request.payloads.push(payload);
    (request, back, is_there)
}

#[test]
fn a_payload_is_there_for_every_replay_and_given_back_at_the_end() {
    let (request, back, is_there) = embedded(0, 60);
    let mut seen = 0;
    let hook: Hook = Box::new(move |control, outputs| {
        seen += outputs.len();
        if outputs.iter().all(|output| output.finish.is_none()) {
            assert!(is_there.load(Ordering::SeqCst), "a replay could not read it");
        }
        if seen % 20 == 10 {
            control.kill();
        }
    });
    let rig = Rig::hooked(config(), hook);
    rig.handle.submit(request).expect("room");
    let stories = rig.follow(1);
    assert_eq!(stories[&0].tokens, alone(vec![0; 40], 60));
    assert!(rig.handle.stats().hand.replayed >= 2);
    back.recv_timeout(PATIENCE).expect("given back");
}

/// Ends a request while a step that reads its embeddings is in flight, lets `then` happen, and
/// waits for them.
fn ended_in_flight(then: impl FnOnce(&SimControl)) {
    let rig = Rig::hooked(config(), once(SimControl::hold));
    let (request, back, _) = embedded(0, 60);
    rig.handle.submit(request).expect("room");
    rig.control.release();
    let first = rig.outputs.recv_timeout(PATIENCE).expect("outputs");
    assert_eq!(first[0].finish, None);
    rig.handle.abort(RequestId(0));
    let last = rig.outputs.recv_timeout(PATIENCE).expect("outputs");
    assert_eq!(last[0].finish, Some(FinishReason::Abort));
    assert_eq!(back.try_recv(), Err(TryRecvError::Empty), "a step in flight may still read it");
    then(&rig.control);
    rig.control.release();
    back.recv_timeout(PATIENCE).expect("given back");
}

#[test]
fn a_payload_outlives_its_request_until_the_step_in_flight_is_answered() {
    ended_in_flight(|_| {});
}

#[test]
fn a_payload_outlives_its_request_until_the_hand_is_dead() {
    ended_in_flight(SimControl::kill);
}

#[test]
fn a_payload_of_a_request_that_is_not_served_is_given_back() {
    let rig = Rig::start(config(), 500);
    let (waiting, back, _) = embedded(0, 60);
    rig.handle.submit(waiting).expect("room");
    rig.handle.abort(RequestId(0));
    rig.control.release();
    back.recv_timeout(PATIENCE).expect("given back");
    let (alive, back, _) = embedded(1, 200);
    rig.handle.submit(alive).expect("room");
    rig.handle.stop();
    back.recv_timeout(PATIENCE).expect("given back");
}

#[test]
fn the_engine_s_thread_does_what_it_is_told() {
    let rig = Rig::start(config(), 500);
    let (sender, done) = channel();
    rig.handle.run(Box::new(move || {
        let name = std::thread::current().name().map(str::to_owned);
        sender.send(name).expect("the test waits");
    }));
    assert_eq!(done.recv_timeout(PATIENCE).expect("done").as_deref(), Some("engine"));
}
