//! An engine on a simulated device, and requests with constraints.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use forebay_engine::{
    Allowed, Broken, Clock, Constraint, Engine, EngineConfig, EngineHandle, EngineRequest,
    EngineThread, Executor, FinishReason, Hooks, Output, OutputSink, Peers, Request, Status,
};
use forebay_sim::{
    DeviceModel, SimClock, SimConfig, SimControl, SimExecutor, SimText, Timing, next_token,
};

pub(crate) const VOCAB: u32 = 1000;
/// Far longer than anything here takes: a test that reaches it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) type Hook = Box<dyn FnMut(&SimControl, &[Output]) + Send>;

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
pub(crate) struct Few {
    pub(crate) said: Vec<i32>,
    /// Breaks when it is asked for the mask after so many tokens.
    pub(crate) breaks_at: Option<usize>,
    /// Masks that were asked for.
    pub(crate) asked: Arc<AtomicU64>,
}

/// What may follow `said`; `None`: everything.
pub(crate) fn allowed(said: &[i32]) -> Option<[i32; 3]> {
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

pub(crate) struct Rig {
    pub(crate) handle: EngineHandle,
    pub(crate) control: SimControl,
    pub(crate) clock: SimClock,
    pub(crate) outputs: Receiver<Vec<Output>>,
    pub(crate) asked: Arc<AtomicU64>,
    _thread: EngineThread,
}

/// What an engine of a test is made of.
pub(crate) struct Parts {
    pub(crate) pages: u32,
    pub(crate) tokens_a_row: u32,
    pub(crate) hook: Hook,
    pub(crate) peers: Option<Box<dyn Peers>>,
    pub(crate) clock: fn(SimClock) -> Arc<dyn Clock>,
    pub(crate) executor: Box<dyn FnOnce(SimExecutor) -> Box<dyn Executor>>,
}

impl Default for Parts {
    fn default() -> Self {
        Self {
            pages: 2000,
            tokens_a_row: 1,
            hook: quiet(),
            peers: None,
            clock: |clock| Arc::new(clock),
            executor: Box::new(|executor| Box::new(executor)),
        }
    }
}

#[derive(Debug, Default, PartialEq)]
pub(crate) struct Story {
    pub(crate) tokens: Vec<i32>,
    pub(crate) end: Option<FinishReason>,
}

pub(crate) fn text() -> SimText {
    SimText::endless((0..VOCAB as i32).collect())
}

pub(crate) fn config(lookahead: u32, mask_threads: usize) -> EngineConfig {
    EngineConfig {
        max_running_requests: 24,
        slots: 36,
        page_size: 4,
        chunked_prefill_size: 48,
        lookahead,
        // The tests count on admission in the order of arrival.
        step_shares: false,
        max_queued_requests: 1000,
        context_length: 256,
        watchdog_timeout: Duration::from_secs(10),
        load_timeout: Duration::ZERO,
        mask_threads,
        ..EngineConfig::default()
    }
}

impl Rig {
    pub(crate) fn start(config: EngineConfig, pages: u32, tokens_a_row: u32, hook: Hook) -> Self {
        let parts = Parts { pages, tokens_a_row, hook, ..Parts::default() };
        Self::of(config, parts)
    }

    pub(crate) fn of(config: EngineConfig, parts: Parts) -> Self {
        let Parts { pages, tokens_a_row, hook, peers, clock: clock_of, executor: around } = parts;
        let clock = SimClock::virtual_time();
        let (executor, control) = SimExecutor::new(SimConfig {
            tokens_a_row,
            clock: clock.clone(),
            timing: Timing {
                model: DeviceModel { step_us: 1000.0, row_us: 10.0, ..DeviceModel::INSTANT },
                ..Timing::default()
            },
            load_us: 1_000_000,
            page_count: pages,
            vocab_size: VOCAB,
            text: text(),
            ..SimConfig::default()
        });
        let (sender, outputs) = channel();
        let sink = ChannelSink { outputs: sender, control: control.clone(), hook };
        let hooks = Hooks { peers, ..Hooks::new(Box::new(sink)) };
        let (handle, thread) =
            Engine::start(config, around(executor), clock_of(clock.clone()), hooks)
                .expect("thread");
        while handle.status() != Status::Ready {
            std::thread::yield_now();
        }
        // Virtual time would run away from the test's submits.
        control.hold();
        Self { handle, control, clock, outputs, asked: Arc::default(), _thread: thread }
    }

    pub(crate) fn submit(&self, id: u64, max_tokens: u32, constraint: Option<Few>) {
        let constraint = constraint.map(|few| Box::new(few) as Box<dyn Constraint>);
        self.submit_of(0, id, max_tokens, constraint);
    }

    pub(crate) fn submit_of(
        &self,
        client: u64,
        id: u64,
        max_tokens: u32,
        constraint: Option<Box<dyn Constraint>>,
    ) {
        let prompt = prompt(id).into();
        let request = Request { id, client, prompt, max_tokens, ..Request::default() };
        let request = EngineRequest { request, constraint, ..EngineRequest::default() };
        self.handle.submit(request).expect("room");
    }

    pub(crate) fn few(&self) -> Few {
        Few { said: Vec::new(), breaks_at: None, asked: Arc::clone(&self.asked) }
    }

    /// Two of three requests have a constraint.
    pub(crate) fn submit_all(&self, count: u64) {
        for id in 0..count {
            self.submit(id, length(id), (id % 3 != 0).then(|| self.few()));
        }
    }

    /// Lets time go on until `count` requests have ended.
    pub(crate) fn follow(&self, count: usize) -> HashMap<u64, Story> {
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

pub(crate) fn quiet() -> Hook {
    Box::new(|_, _| {})
}

pub(crate) fn prompt(id: u64) -> Vec<i32> {
    let own = 1 + (id as i32 * 7) % 60;
    (0..own).map(|i| (id as i32 * 31 + i) % VOCAB as i32).collect()
}

pub(crate) fn length(id: u64) -> u32 {
    1 + (id as u32 * 13) % 90
}

/// All tokens obey their constraints, and free requests say what they would say alone.
pub(crate) fn check(stories: &HashMap<u64, Story>) {
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
