//! Requests with constraints: masks that follow their plans, whatever happens in between.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use forebay_engine::{
    Allowed, Broken, Constraint, Engine, EngineConfig, EngineHandle, EngineRequest, EngineThread,
    FinishReason, Hooks, Namer, Output, OutputSink, Policy, Request, RequestError, RequestId,
    Status,
};
use forebay_sim::{
    DeviceModel, SimClock, SimConfig, SimControl, SimExecutor, SimText, Timing, next_token,
};

const VOCAB: u32 = 1000;
/// Far longer than anything here takes: a test that reaches it hangs.
const PATIENCE: Duration = Duration::from_secs(60);

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

/// Allows a few tokens that all tokens before decide, and sometimes everything.
#[derive(Debug)]
struct Few {
    said: Vec<i32>,
    /// Breaks when it is asked for the mask after so many tokens.
    breaks_at: Option<usize>,
    /// Masks that were asked for.
    asked: Arc<AtomicU64>,
}

/// What may follow `said`; `None`: everything.
fn allowed(said: &[i32]) -> Option<[i32; 3]> {
    let mix =
        said.iter().fold(7_u64, |mix, &token| mix.wrapping_mul(31).wrapping_add(token as u64 + 1));
    (mix % 5 != 0).then(|| [mix % 1000, mix / 7 % 1000, mix / 49 % 1000].map(|id| id as i32))
}

impl Constraint for Few {
    fn accept(&mut self, token: i32) -> Result<(), Broken> {
        if allowed(&self.said).is_some_and(|ids| !ids.contains(&token)) {
            return Err(Broken(format!("{token} after {:?}", self.said)));
        }
        self.said.push(token);
        Ok(())
    }

    fn mask(&mut self, words: &mut [u32]) -> Result<Allowed, Broken> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        if self.breaks_at == Some(self.said.len()) {
            return Err(Broken("it breaks here".into()));
        }
        assert_eq!(words.len(), 32);
        let Some(ids) = allowed(&self.said) else { return Ok(Allowed::Everything) };
        words.fill(0);
        for id in ids {
            words[id as usize / 32] |= 1 << (id % 32);
        }
        Ok(Allowed::Some)
    }
}

struct Rig {
    handle: EngineHandle,
    control: SimControl,
    outputs: Receiver<Vec<Output>>,
    asked: Arc<AtomicU64>,
    _thread: EngineThread,
}

#[derive(Debug, Default, PartialEq)]
struct Story {
    tokens: Vec<i32>,
    end: Option<FinishReason>,
}

fn text() -> SimText {
    SimText::endless((0..VOCAB as i32).collect())
}

fn config(lookahead: u32, mask_threads: usize) -> EngineConfig {
    EngineConfig {
        max_running: 24,
        slots: 36,
        page_size: 4,
        token_budget: 48,
        prefix_cache: true,
        namer: Namer::open(),
        policy: Policy::Fcfs,
        fair: true,
        lookahead,
        max_queued: 1000,
        queue_timeout_us: 0,
        context_length: 256,
        watchdog_us: 10_000_000,
        load_timeout_us: 0,
        restart_limit: 3,
        mask_threads,
        mask_share: 10,
        image_budget: 1000,
        host: None,
    }
}

impl Rig {
    fn start(config: EngineConfig, pages: u32, tokens_a_row: u32, hook: Hook) -> Self {
        let clock = SimClock::virtual_time();
        let (executor, control) = SimExecutor::new(SimConfig {
            tokens_a_row,
            host_pages: 0,
            hot_row_tokens: 0,
            clock: clock.clone(),
            timing: Timing {
                model: DeviceModel { step_us: 1000.0, row_us: 10.0, ..DeviceModel::INSTANT },
                ..Timing::default()
            },
            seed: 0,
            load_us: 1_000_000,
            page_count: pages,
            vocab_size: VOCAB,
            hidden_size: 4,
            text: text(),
            device: "sim".into(),
            tower: None,
        });
        let (sender, outputs) = channel();
        let sink = ChannelSink { outputs: sender, control: control.clone(), hook };
        let (executor, clock) = (Box::new(executor), Arc::new(clock));
        let (handle, thread) =
            Engine::start(config, executor, clock, Hooks::new(Box::new(sink))).expect("thread");
        while handle.status() != Status::Ready {
            std::thread::yield_now();
        }
        // Virtual time would run away from the test's submits.
        control.hold();
        Self { handle, control, outputs, asked: Arc::default(), _thread: thread }
    }

    fn submit(&self, id: u64, max_tokens: u32, constraint: Option<Few>) {
        let request = Request { id, prompt: prompt(id).into(), max_tokens, ..Request::default() };
        let constraint = constraint.map(|few| Box::new(few) as Box<dyn Constraint>);
        let request = EngineRequest { request, constraint, ..EngineRequest::default() };
        self.handle.submit(request).expect("room");
    }

    fn few(&self) -> Few {
        Few { said: Vec::new(), breaks_at: None, asked: Arc::clone(&self.asked) }
    }

    /// Two of three requests have a constraint.
    fn submit_all(&self, count: u64) {
        for id in 0..count {
            self.submit(id, length(id), (id % 3 != 0).then(|| self.few()));
        }
    }

    /// Lets time go on until `count` requests have ended.
    fn follow(&self, count: usize) -> HashMap<u64, Story> {
        self.control.release();
        let mut stories: HashMap<u64, Story> = HashMap::new();
        let mut ended = 0;
        while ended < count {
            for output in self.outputs.recv_timeout(PATIENCE).expect("outputs") {
                let story = stories.entry(output.id.0).or_default();
                assert!(story.end.is_none(), "something after the end: {output:?}");
                story.tokens.extend(output.token.map(|token| token.id));
                ended += usize::from(output.finish.is_some());
                story.end = output.finish;
            }
        }
        stories
    }
}

fn quiet() -> Hook {
    Box::new(|_, _| {})
}

fn prompt(id: u64) -> Vec<i32> {
    let own = 1 + (id as i32 * 7) % 60;
    (0..own).map(|i| (id as i32 * 31 + i) % VOCAB as i32).collect()
}

fn length(id: u64) -> u32 {
    1 + (id as u32 * 13) % 90
}

/// All tokens obey their constraints, and free requests say what they would say alone.
fn check(stories: &HashMap<u64, Story>) {
    for (&id, story) in stories {
        assert_eq!(story.end, Some(FinishReason::Length), "request {id}");
        assert_eq!(story.tokens.len(), length(id) as usize, "request {id}");
        let mut all = prompt(id);
        let start = all.len();
        for (at, &token) in story.tokens.iter().enumerate() {
            if id % 3 == 0 {
                assert_eq!(token, next_token(&text(), &all, start), "request {id}");
            } else if let Some(ids) = allowed(&story.tokens[..at]) {
                assert!(ids.contains(&token), "request {id}: {token} at {at}");
            }
            all.push(token);
        }
    }
}

#[test]
fn the_tokens_are_the_same_whatever_runs_ahead_or_is_short_or_dies() {
    let reference = Rig::start(config(0, 0), 2000, 1, quiet());
    reference.submit_all(60);
    let expected = reference.follow(60);
    check(&expected);
    let masks = reference.handle.stats().hand.masks;
    let constrained: u64 = (0..60).filter(|id| id % 3 != 0).map(|id| u64::from(length(id))).sum();
    assert_eq!(masks, constrained, "one a token");
    for (lookahead, pages, mask_threads, tokens_a_row, dies) in [
        (1, 2000, 0, 1, false),
        (1, 2000, 2, 1, false),
        (1, 70, 2, 1, false),
        (0, 70, 0, 1, true),
        (1, 2000, 2, 1, true),
        (1, 70, 0, 1, true),
        (1, 2000, 2, 4, true),
    ] {
        let (mut kills, mut seen) = (0, 0);
        let hook: Hook = Box::new(move |control, outputs| {
            seen += outputs.len();
            if dies && kills < 10 && seen > 150 {
                (kills, seen) = (kills + 1, 0);
                control.kill();
            }
        });
        let rig = Rig::start(config(lookahead, mask_threads), pages, tokens_a_row, hook);
        rig.submit_all(60);
        let stories = rig.follow(60);
        assert!(
            stories == expected,
            "lookahead {lookahead}, {pages} pages, {mask_threads} threads"
        );
        let stats = rig.handle.stats();
        assert_eq!(stats.scheduler.preemptions > 0, pages == 70, "{stats:?}");
        assert_eq!(stats.hand.deaths >= 10, dies, "{stats:?}");
    }
}

#[test]
fn a_constraint_that_breaks_ends_its_request_alone() {
    for lookahead in [0, 1] {
        let rig = Rig::start(config(lookahead, 0), 2000, 1, quiet());
        rig.submit_all(12);
        for id in 100..110 {
            let few = Few { breaks_at: Some(id as usize - 100), ..rig.few() };
            rig.submit(id, 50, Some(few));
        }
        let mut stories = rig.follow(22);
        for id in 100..110 {
            let story = stories.remove(&id).expect("it was told");
            let why = RequestError::Constraint("it breaks here".into());
            assert_eq!(story.end, Some(FinishReason::Error(why)));
            assert_eq!(story.tokens.len(), id as usize - 100);
        }
        check(&stories);
    }
}

#[test]
fn a_request_that_goes_away_between_its_plan_and_its_mask_leaves_the_others_alone() {
    for lookahead in [0, 1] {
        let (mut seen, mut aborted) = (0, 100);
        let (sender, aborts) = channel();
        let hook: Hook = Box::new(move |_, outputs| {
            seen += outputs.len();
            while aborted < 110 && seen > 20 * (aborted - 99) {
                sender.send(RequestId(aborted as u64)).expect("the test listens");
                aborted += 1;
            }
        });
        let rig = Rig::start(config(lookahead, 0), 2000, 1, hook);
        rig.submit_all(12);
        for id in 100..110 {
            rig.submit(id, 150, Some(rig.few()));
        }
        let handle = rig.handle.clone();
        let aborting =
            std::thread::spawn(move || aborts.iter().take(10).for_each(|id| handle.abort(id)));
        let mut stories = rig.follow(22);
        aborting.join().expect("ten were told");
        stories.retain(|id, _| *id < 100);
        check(&stories);
    }
}
