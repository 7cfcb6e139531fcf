//! Engines with simulated hands, in real time. Whatever dies, every request ends once and generates
//! the same tokens as when it runs alone.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use forebay_engine::{
    BlockEvent, BlockObserver, EngineConfig, EngineRequest, EngineThread, FinishReason, Output,
    Payload, Preference, RequestError, RequestId, Stats, Status, SubmitError,
};
use forebay_replicas::{Listeners, Member, Method, Replicas, ReplicasConfig};
use forebay_sim::testing::{self, ChannelSink, PATIENCE, Story, VOCAB, alone, request, tell, text};
use forebay_sim::{DeviceModel, SimClock, SimConfig, SimControl, SimExecutor, Timing};

const METHODS: [Method; 4] =
    [Method::RoundRobin, Method::ShortestQueue, Method::TotalTokens, Method::PrefixAware];

/// Counts the blocks that the replicas store.
#[derive(Clone, Default)]
struct Stored(Arc<AtomicUsize>);

impl BlockObserver for Stored {
    fn changed(&mut self, events: Vec<BlockEvent>) {
        let stored = events.iter().filter(|event| matches!(event, BlockEvent::Stored(..)));
        self.0.fetch_add(stored.count(), Ordering::SeqCst);
    }
}

struct Rig {
    replicas: Replicas,
    controls: Vec<SimControl>,
    outputs: Receiver<Vec<Output>>,
    stories: HashMap<u64, Story>,
    threads: Vec<EngineThread>,
    stored: Stored,
}

fn config() -> EngineConfig {
    EngineConfig {
        max_running_requests: 16,
        slots: 24,
        page_size: 4,
        chunked_prefill_size: 64,
        max_queued_requests: 1000,
        context_length: 400,
        watchdog_timeout: Duration::from_secs(60),
        load_timeout: Duration::ZERO,
        mask_threads: 0,
        ..EngineConfig::default()
    }
}

impl Rig {
    /// Starts replicas whose queued requests do not move, because a moved request would be counted
    /// at both replicas.
    fn start(count: usize, method: Method) -> Self {
        let how = ReplicasConfig {
            load_balance_method: method,
            queue_moves: false,
            ..ReplicasConfig::default()
        };
        Self::with(count, how, config())
    }

    fn with(count: usize, how: ReplicasConfig, config: EngineConfig) -> Self {
        let clock = SimClock::real();
        let (sender, outputs) = channel();
        let (mut members, mut controls) = (Vec::new(), Vec::new());
        let stored = Stored::default();
        for _ in 0..count {
            let (executor, control) = SimExecutor::new(SimConfig {
                clock: clock.clone(),
                timing: Timing {
                    model: DeviceModel { step_us: 100.0, ..DeviceModel::INSTANT },
                    ..Timing::default()
                },
                load_us: 1000,
                page_count: 1000,
                vocab_size: VOCAB,
                text: text(),
                ..SimConfig::default()
            });
            controls.push(control);
            let sink = Box::new(ChannelSink::new(sender.clone()));
            let config = config.clone();
            let blocks: Option<Box<dyn BlockObserver>> = Some(Box::new(stored.clone()));
            let replicas = vec![Listeners { sink, blocks }];
            members.push(Member { config, executor: Box::new(executor), replicas });
        }
        let (replicas, threads) =
            Replicas::start(how, members, Arc::new(clock), || {}).expect("threads");
        let rig = Self { replicas, controls, outputs, stories: HashMap::new(), threads, stored };
        rig.settled(|states| states.iter().all(|status| *status == Status::Ready));
        rig
    }

    fn states(&self) -> Vec<Status> {
        self.replicas.reports().into_iter().map(|report| report.status).collect()
    }

    /// Polls until the states satisfy `wanted`, because no event announces a new state.
    fn settled(&self, wanted: impl Fn(&[Status]) -> bool) {
        let began = Instant::now();
        while !wanted(&self.states()) {
            assert!(began.elapsed() < PATIENCE, "{:?}", self.states());
            std::thread::yield_now();
        }
    }

    fn wait_for(&self, wanted: impl Fn(&Stats) -> bool) {
        let began = Instant::now();
        while !wanted(&self.replicas.stats()) {
            assert!(began.elapsed() < PATIENCE, "{:?}", self.replicas.stats());
            std::thread::yield_now();
        }
    }

    /// Waits for the next outputs. Returns the ids of requests that have ended with them.
    fn next(&mut self) -> Vec<u64> {
        let outputs = self.outputs.recv_timeout(PATIENCE).expect("outputs");
        self.take(outputs)
    }

    /// Takes the outputs that have already arrived.
    fn catch_up(&mut self) -> Vec<u64> {
        let outputs = self.outputs.try_iter().flatten().collect();
        self.take(outputs)
    }

    fn take(&mut self, outputs: Vec<Output>) -> Vec<u64> {
        tell(&mut self.stories, outputs)
    }

    fn follow(&mut self, mut count: usize) {
        while count > 0 {
            count -= self.next().len();
        }
    }

    fn assert_exact(&self, id: u64, max_tokens: u32) {
        let story = &self.stories[&id];
        assert_eq!(story.tokens, alone(prompt(id), max_tokens), "request {id}");
        assert_eq!(story.end, Some(FinishReason::Length), "request {id}");
    }

    /// Checks that all replicas report that they have no requests.
    fn assert_idle(&self) {
        for report in self.replicas.reports() {
            let load = report.load;
            assert_eq!((load.requests, load.in_prefill, load.work.tokens()), (0, 0, 0));
        }
    }

    fn dispatched(&self) -> Vec<u64> {
        self.replicas.reports().iter().map(|report| report.load.dispatched).collect()
    }
}

/// Returns the prompt of request `id`. Lengths differ, and some prompts have a common prefix.
fn prompt(id: u64) -> Vec<i32> {
    testing::prompt(id, 40)
}

fn lengths(id: u64) -> u32 {
    1 + (id as u32 * 13) % 90
}

#[test]
fn the_tokens_do_not_depend_on_the_replicas_or_the_policy() {
    let cases = METHODS.map(|method| (4, method)).into_iter().chain([(1, METHODS[3])]);
    for ((count, method), queue_moves) in cases.flat_map(|case| [(case, false), (case, true)]) {
        let how = ReplicasConfig {
            load_balance_method: method,
            queue_moves,
            ..ReplicasConfig::default()
        };
        let mut rig = Rig::with(count, how, config());
        for id in 0..100 {
            rig.replicas.submit(request(id, prompt(id), lengths(id))).expect("room");
        }
        rig.follow(100);
        (0..100).for_each(|id| rig.assert_exact(id, lengths(id)));
        rig.assert_idle();
        let dispatched = rig.dispatched().iter().sum::<u64>();
        if queue_moves {
            assert!(
                (100..=300).contains(&dispatched),
                "{dispatched}: each request moves twice at most"
            );
            continue;
        }
        assert_eq!(dispatched, 100);
        if method == Method::RoundRobin {
            assert_eq!(rig.dispatched(), [25; 4]);
        }
    }
}

#[test]
fn a_hundred_clients_of_four_replicas_are_never_more_than_25_at_one() {
    for method in [Method::ShortestQueue, Method::PrefixAware] {
        let mut rig = Rig::start(4, method);
        let equal = |id: u64| request(id, (0..16).map(|i| (id as i32 + i) % 1000).collect(), 12);
        for id in 0..100 {
            rig.replicas.submit(equal(id)).expect("room");
        }
        let (mut next, mut ended) = (100, 0);
        while ended < 500 {
            for _ in rig.next() {
                ended += 1;
                if next < 500 {
                    rig.replicas.submit(equal(next)).expect("room");
                    next += 1;
                }
            }
        }
        let peaks: Vec<u64> = rig.replicas.reports().iter().map(|r| r.load.peak).collect();
        assert_eq!(peaks, [25; 4], "{method:?}");
        rig.assert_idle();
    }
}

#[test]
fn streams_survive_twenty_kills_and_the_hands_come_back() {
    for method in METHODS {
        let how = ReplicasConfig { load_balance_method: method, ..ReplicasConfig::default() };
        // A hand that is killed before its first step counts as one that did not start.
        let mut rig = Rig::with(4, how, EngineConfig { hand_restarts: 1000, ..config() });
        let (mut next, mut ended, mut kills) = (0, 0, 0);
        // A replica whose hand dies twice while it tries the same suspect alone has to blame that
        // suspect. So kill again only when all requests have made progress.
        let mut before: HashMap<u64, usize> = HashMap::new();
        while next < 60 {
            rig.replicas.submit(request(next, prompt(next), 150)).expect("room");
            next += 1;
        }
        while ended < next {
            ended += rig.next().len() as u64;
            before.retain(|id, tokens| {
                let story = rig.stories.get(id);
                story.is_none_or(|story| story.end.is_none() && story.tokens.len() < *tokens + 2)
            });
            let ready = rig.states().iter().all(|status| *status == Status::Ready);
            if kills < 20 && ready && before.is_empty() {
                rig.controls[kills % 4].kill();
                kills += 1;
                rig.wait_for(|stats| stats.hand.deaths == kills as u64);
                // The outputs of the dead hand may still arrive; they do not count as progress.
                ended += rig.catch_up().len() as u64;
                let tokens = |id: &u64| rig.stories.get(id).map_or(0, |story| story.tokens.len());
                let over = |id: &u64| rig.stories.get(id).is_some_and(|s| s.end.is_some());
                before = (0..next).filter(|id| !over(id)).map(|id| (id, tokens(&id))).collect();
            }
            if kills < 20 && next - ended < 40 {
                rig.replicas.submit(request(next, prompt(next), 150)).expect("room");
                next += 1;
            }
        }
        assert_eq!(kills, 20, "{method:?}");
        (0..next).for_each(|id| rig.assert_exact(id, 150));
        rig.settled(|states| states.iter().all(|status| *status == Status::Ready));
        rig.assert_idle();
        assert!(rig.replicas.stats().hand.replayed > 0);
    }
}

#[test]
fn a_dead_replicas_requests_do_not_wait_for_it() {
    let mut rig = Rig::start(3, Method::RoundRobin);
    for id in 0..30 {
        rig.replicas.submit(request(id, prompt(id), 60)).expect("room");
    }
    rig.controls[1].fail_starts(1000);
    rig.controls[1].kill();
    rig.follow(30);
    (0..30).for_each(|id| rig.assert_exact(id, 60));
    rig.settled(|states| matches!(states[1], Status::Failed(_)));
    assert_eq!(rig.replicas.status(), Status::Ready);
    let before = rig.dispatched()[1];
    for id in 30..60 {
        rig.replicas.submit(request(id, prompt(id), 5)).expect("room");
    }
    rig.follow(30);
    assert_eq!(rig.dispatched()[1], before, "a failed replica gets no requests");
    for other in [0, 2] {
        rig.controls[other].fail_starts(1000);
        rig.controls[other].kill();
    }
    rig.settled(|states| states.iter().all(|status| matches!(status, Status::Failed(_))));
    assert!(matches!(rig.replicas.status(), Status::Failed(_)));
    let refused = rig.replicas.submit(request(99, vec![1], 1));
    assert_eq!(refused, Err(SubmitError::Unavailable("start refused".into())));
    rig.assert_idle();
}

#[test]
fn when_all_hands_are_gone_requests_wait_for_the_first_to_come_back() {
    let mut rig = Rig::start(3, Method::ShortestQueue);
    for id in 0..30 {
        rig.replicas.submit(request(id, prompt(id), 300)).expect("room");
    }
    // Kill only when every replica has its own requests in flight. A replica whose hand died while
    // it tried the suspect of another replica alone would have to blame that request.
    while rig.replicas.reports().iter().any(|report| report.stats.scheduler.steps == 0) {
        std::thread::yield_now();
    }
    rig.controls.iter().for_each(SimControl::hold);
    rig.controls.iter().for_each(SimControl::kill);
    for id in 30..40 {
        rig.replicas.submit(request(id, prompt(id), 300)).expect("room");
    }
    rig.controls.iter().for_each(SimControl::release);
    rig.follow(40);
    (0..40).for_each(|id| rig.assert_exact(id, 300));
    rig.assert_idle();
}

#[test]
fn a_poisonous_request_takes_two_hands_with_it_and_nobody_else() {
    let mut rig = Rig::start(4, Method::RoundRobin);
    rig.controls.iter().for_each(|control| control.poison(777));
    for id in 0..24 {
        let mut prompt: Vec<i32> = prompt(id).into_iter().map(|token| token % 500).collect();
        if id == 5 {
            prompt.push(777);
        }
        rig.replicas.submit(request(id, prompt, 20)).expect("room");
    }
    rig.follow(24);
    for id in 0..24 {
        let story = &rig.stories[&id];
        if id == 5 {
            assert_eq!(story.end, Some(FinishReason::Error(RequestError::Poisoned)));
        } else {
            assert_eq!((story.end.as_ref(), story.tokens.len()), (Some(&FinishReason::Length), 20));
        }
    }
    assert_eq!(rig.replicas.stats().hand.deaths, 2);
    rig.assert_idle();
}

#[test]
fn aborts_find_requests_on_their_way() {
    let mut rig = Rig::start(3, Method::ShortestQueue);
    let mut open: HashSet<u64> = (0..120).collect();
    for id in 0..120 {
        rig.replicas.submit(request(id, prompt(id), 200)).expect("room");
    }
    for turn in 0..120_u64 {
        if turn.is_multiple_of(20) {
            rig.controls[turn as usize / 20 % 3].kill();
        }
        rig.replicas.abort(RequestId(turn));
        rig.replicas.abort(RequestId(turn));
    }
    while !open.is_empty() {
        for id in rig.next() {
            assert!(open.remove(&id));
        }
    }
    // Short requests may have finished before the abort.
    let fine = |end: &FinishReason| matches!(end, FinishReason::Abort | FinishReason::Length);
    assert!(rig.stories.values().all(|story| story.end.as_ref().is_some_and(fine)));
    rig.assert_idle();
}

#[test]
fn clients_choose_a_replica_or_stay_at_one() {
    let mut rig = Rig::start(4, Method::ShortestQueue);
    for id in 0..12 {
        let preference = Preference { key: None, replica: Some(2) };
        let request = EngineRequest { preference, ..request(id, prompt(id), 3) };
        rig.replicas.submit(request).expect("room");
    }
    rig.follow(12);
    assert_eq!(rig.dispatched(), [0, 0, 12, 0]);
    for id in 12..32 {
        let preference = Preference { key: Some("one session".into()), replica: None };
        let request = EngineRequest { preference, ..request(id, prompt(id), 3) };
        rig.replicas.submit(request).expect("room");
    }
    rig.follow(20);
    let sent = rig.dispatched();
    assert!(
        sent.iter().any(|&count| count % 12 == 20 % 12),
        "all requests went to one replica: {sent:?}"
    );
    assert!(rig.replicas.drain_replica(2, true));
    assert!(!rig.replicas.drain_replica(4, true));
    let before = rig.dispatched()[2];
    for id in 32..52 {
        rig.replicas.submit(request(id, prompt(id), 3)).expect("room");
    }
    rig.follow(20);
    assert_eq!(rig.dispatched()[2], before, "a drained replica gets no requests");
    rig.replicas.drain_replica(2, false);
    rig.replicas.submit(request(52, prompt(52), 3)).expect("room");
    rig.follow(1);
    rig.assert_idle();
}

#[test]
fn prompts_with_the_same_beginning_find_it() {
    let mut rig = Rig::start(4, Method::PrefixAware);
    let of = |family: u64, turn: i32| -> Vec<i32> {
        (0..80).map(|i| (family as i32 * 97 + i) % 1000).chain([turn, turn + 1]).collect()
    };
    for turn in 0..6 {
        for family in 0..4 {
            let id = turn * 4 + family;
            rig.replicas.submit(request(id, of(family, turn as i32), 4)).expect("room");
        }
        rig.follow(4);
    }
    let stats = rig.replicas.stats();
    assert_eq!(
        stats.scheduler.prefix_hits,
        5 * 4 * 80,
        "each common beginning is computed once: {stats:?}"
    );
    // The 20 blocks of each common prefix, and one block that each turn's answer fills.
    assert_eq!(
        rig.stored.0.load(Ordering::SeqCst),
        4 * 20 + 6 * 4,
        "the block observer misses blocks"
    );
    assert!(rig.dispatched().iter().all(|&count| count == 6));
}

#[test]
fn requests_with_different_salts_share_nothing_at_any_replica() {
    for count in [1, 3] {
        let mut rig = Rig::start(count, Method::PrefixAware);
        let long = |id: u64, salt| {
            let mut request = request(id, (0..80).collect(), 5);
            request.request.cache_salt = salt;
            request
        };
        let mut id = 0;
        let mut hits = |salt| {
            id += 1;
            let before = rig.replicas.stats().scheduler.prefix_hits;
            rig.replicas.submit(long(id, salt)).expect("room");
            rig.follow(1);
            rig.replicas.stats().scheduler.prefix_hits - before
        };
        // Two requests without a salt, two with salt 7, and two with salt 8.
        assert_eq!([0, 7, 8, 0, 7, 8].map(&mut hits), [0, 0, 0, 76, 76, 76], "{count} replicas");
        let names = |salt| rig.replicas.block_names(salt, &(0..80).collect::<Vec<_>>());
        assert!(names(7).iter().all(|name| !names(8).contains(name) && !names(0).contains(name)));
    }
}

#[test]
fn polled_loads_are_not_looked_at_in_between() {
    let polled = ReplicasConfig {
        load_balance_method: Method::ShortestQueue,
        load_watch_interval: Duration::from_micros(u64::MAX / 2),
        queue_moves: false,
        ..ReplicasConfig::default()
    };
    let mut rig = Rig::with(3, polled, config());
    // Loads are polled only once, when all replicas are idle. So requests go to the replicas in
    // turn, whatever their length.
    for id in 0..30 {
        let long = if id % 3 == 0 { 300 } else { 1 };
        rig.replicas.submit(request(id, prompt(id), long)).expect("room");
    }
    assert_eq!(rig.dispatched(), [10; 3]);
    rig.follow(30);
    rig.assert_idle();
}

#[test]
fn the_queues_limit_holds_for_all_together() {
    let mut rig = Rig::start(2, Method::RoundRobin);
    rig.controls.iter().for_each(SimControl::hold);
    let mut taken = 0;
    let refused = loop {
        match rig.replicas.submit(request(taken, prompt(taken), 1)) {
            Ok(()) => taken += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, SubmitError::QueueFull { limit: 1000, .. }), "{refused:?}");
    assert!((1000..=1000 + 2 * 16).contains(&taken), "{taken}");
    rig.controls.iter().for_each(SimControl::release);
    rig.follow(taken as usize);
    rig.assert_idle();
}

/// A payload that counts its drops.
#[derive(Debug)]
struct Room(Arc<AtomicUsize>);

impl Payload for Room {
    fn offset(&self) -> u32 {
        0
    }

    fn write(&self, _: usize, _: &[u8]) -> std::io::Result<()> {
        Ok(())
    }

    fn read(&self, _: usize, _: &mut [u8]) -> std::io::Result<usize> {
        Ok(0)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn what_lies_in_the_arena_moves_with_its_request_and_is_given_back_once() {
    let mut rig = Rig::start(3, Method::RoundRobin);
    let back = Arc::new(AtomicUsize::new(0));
    for id in 0..30 {
        let payload = Arc::new(Room(Arc::clone(&back)));
        let mut request = request(id, vec![0; 30], 100);
        request.request.spec.embeds = Some(0);
        request.payloads.push(payload);
        rig.replicas.submit(request).expect("room");
    }
    rig.wait_for(|stats| stats.scheduler.generated_tokens > 0);
    let before = back.load(Ordering::SeqCst);
    assert!(before < 30, "running requests still have their room");
    rig.controls[0].kill();
    rig.follow(30);
    assert!(rig.stories.values().all(|story| story.tokens.len() == 100));
    rig.replicas.stop();
    rig.threads.drain(..).for_each(EngineThread::join);
    assert_eq!(back.load(Ordering::SeqCst), 30);
}
