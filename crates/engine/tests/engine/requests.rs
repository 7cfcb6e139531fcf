//! Requests during which the hand dies, fails or is slow.

use std::collections::HashSet;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use forebay_engine::{
    BlockEvent, BlockHash, BlockObserver, EngineConfig, FinishReason, Pooling, RequestError,
    RequestId, Status, SubmitError,
};
use forebay_sim::testing::{Hook, PATIENCE, Story, alone, once, request};
use forebay_sim::{SimControl, vector};

use crate::rig::{assert_exact, config, hooked, observed, prompt, start, text};

fn lengths(id: u64) -> u32 {
    1 + (id as u32 * 13) % 90
}

#[test]
fn the_tokens_do_not_depend_on_lookahead_or_memory() {
    for lookahead in [0, 1] {
        for pages in [64, 2000] {
            let rig = start(EngineConfig { lookahead, ..config() }, pages);
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
            let rig = observed(config, pages, 4, hook, None);
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
    let rig = start(config(), 500);
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
        assert_eq!(stories[&id].end, Some(FinishReason::Length));
        assert_eq!(stories[&id].admissions, 1, "this server has not admitted the request before");
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
        let rig = hooked(EngineConfig { lookahead, ..config() }, 500, hook);
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
    let rig = start(config(), 500);
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
            assert_eq!(story.end, Some(FinishReason::Error(RequestError::Poisoned)));
        } else {
            assert_eq!(story.end, Some(FinishReason::Length), "request {id}");
            assert_eq!(story.tokens.len(), 10);
        }
    }
    rig.settled(|status| *status == Status::Ready);
    assert_eq!(rig.handle.stats().hand.deaths, 2);
}

/// The names of the blocks in the prefix cache, reconstructed from the cache's events.
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
    let rig = observed(config(), 64, 1, hook, Some(blocks));
    for id in 0..30 {
        rig.handle.submit(request(id, prompt(id), 40)).expect("room");
    }
    let _ = rig.follow(30);
    let known = mirror.0.lock().expect("no panic").len();
    assert!(known > 0);
    assert_eq!(
        rig.handle.stats().scheduler.pages_cached,
        known,
        "the events give another number of blocks"
    );
}

#[test]
fn a_hung_hand_is_respawned() {
    let rig = hooked(config(), 500, once(SimControl::hang));
    rig.handle.submit(request(0, prompt(0), 80)).expect("room");
    let stories = rig.follow(1);
    assert_exact(&stories, 1, |_| 80);
    assert_eq!(rig.handle.stats().hand.deaths, 1);
}

#[test]
fn an_abort_frees_everything_and_ends_once() {
    let rig = start(config(), 500);
    for id in 0..40 {
        rig.handle.submit(request(id, prompt(id), 150)).expect("room");
    }
    for id in 0..40 {
        rig.handle.abort(RequestId(id));
        rig.handle.abort(RequestId(id));
    }
    let stories = rig.follow(40);
    assert!(stories.values().all(|story| story.end == Some(FinishReason::Abort)));
    rig.handle.submit(request(100, prompt(1), 5)).expect("room");
    let _ = rig.follow(1);
    let (sender, flushed) = channel();
    rig.handle.flush_cache(Box::new(move |done| {
        let _ = sender.send(done);
    }));
    assert!(flushed.recv_timeout(PATIENCE).expect("reply"));
}

#[test]
fn the_queue_is_bounded_and_drains() {
    let config = EngineConfig { max_queued_requests: 5, max_running_requests: 1, ..config() };
    let rig = start(config, 500);
    let mut taken = 0;
    let refused = loop {
        match rig.handle.submit(request(taken, vec![1, 2, 3], 200)) {
            Ok(()) => taken += 1,
            Err(error) => break error,
        }
        assert!(taken < 1000, "no request was refused");
    };
    assert!(matches!(refused, SubmitError::QueueFull { limit: 5, .. }), "{refused:?}");
    rig.handle.drain();
    assert_eq!(rig.handle.submit(request(9999, vec![1], 1)), Err(SubmitError::Draining));
    assert_eq!(rig.handle.status(), Status::Draining);
    let stories = rig.follow(taken as usize);
    assert!(stories.values().all(|story| story.end == Some(FinishReason::Length)));
}

#[test]
fn stopping_ends_what_is_alive() {
    let rig = start(config(), 500);
    for id in 0..30 {
        rig.handle.submit(request(id, prompt(id), 150)).expect("room");
    }
    rig.handle.stop();
    let stories = rig.follow(30);
    let ended = |story: &Story| story.end.is_some();
    assert!(stories.values().all(ended));
}

#[test]
fn a_stop_id_ends_a_request_but_not_before_min_tokens() {
    let rig = start(config(), 500);
    let free = alone(prompt(1), 50);
    let stop = free[20];
    let first = free.iter().position(|&t| t == stop).expect("the answer has the stop token");
    for (id, min_tokens) in [(0, 0), (1, first as u32 + 1)] {
        let mut one = request(id, prompt(1), 50);
        one.request.spec.stop_ids = [stop].into();
        one.request.spec.sampling.min_tokens = min_tokens;
        rig.handle.submit(one).expect("room");
    }
    let stories = rig.follow(2);
    assert_eq!(stories[&0].tokens, free[..=first]);
    assert_eq!(stories[&0].end, Some(FinishReason::Stop { token: stop }));
    assert!(stories[&1].tokens.len() > first + 1);
}

/// The simulated model's embeddings are right for prompts that share steps, are chunked, or are
/// computed again after the hand was killed.
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
        let rig = hooked(config(), pages, hook);
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

#[test]
fn the_engine_s_thread_does_what_it_is_told() {
    let rig = start(config(), 500);
    let (sender, done) = channel();
    rig.handle.run(Box::new(move || {
        let name = std::thread::current().name().map(str::to_owned);
        sender.send(name).expect("the test waits");
    }));
    assert_eq!(done.recv_timeout(PATIENCE).expect("done").as_deref(), Some("engine"));
}
