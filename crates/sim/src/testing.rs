//! Helpers for tests of engines: an engine on a simulated hand, and the outcomes of its requests.
//!
//! ```
//! use forebay_sim::testing::{VOCAB, alone, text};
//!
//! assert_eq!(alone(vec![1, 2, 3], 5), alone(vec![1, 2, 3], 9)[..5]);
//! assert!(alone(vec![1], 9).iter().all(|&token| (token as u32) < VOCAB));
//! ```

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use forebay_engine::{
    BlockObserver, Clock, Engine, EngineConfig, EngineHandle, EngineRequest, EngineThread,
    Executor, FinishReason, Hooks, Output, OutputSink, Peers, Request, Status,
};

use crate::{SimClock, SimConfig, SimControl, SimExecutor, SimText, next_token};

/// The size of the vocabulary of [`text`].
pub const VOCAB: u32 = 1000;
/// How long tests wait before they fail: far longer than any correct step of a test takes.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A hook that is called with every batch of outputs on the engine thread, so that faults can be
/// injected at an exact step.
pub type Hook = Box<dyn FnMut(&SimControl, &[Output]) + Send>;

/// Returns a hook that does nothing.
#[must_use]
pub fn quiet() -> Hook {
    Box::new(|_, _| {})
}

/// Returns a hook that injects a fault at the first step with outputs.
#[must_use]
pub fn once(mut breaking: impl FnMut(&SimControl) + Send + 'static) -> Hook {
    let mut done = false;
    Box::new(move |control, _| {
        if !std::mem::replace(&mut done, true) {
            breaking(control);
        }
    })
}

/// A sink that sends outputs to the test.
pub struct ChannelSink {
    outputs: Sender<Vec<Output>>,
    look: Option<(SimControl, Hook)>,
}

impl ChannelSink {
    /// Creates a sink without a hook.
    #[must_use]
    pub fn new(outputs: Sender<Vec<Output>>) -> Self {
        Self { outputs, look: None }
    }

    /// Creates a sink whose hook gets the outputs before the test does.
    #[must_use]
    pub fn hooked(outputs: Sender<Vec<Output>>, control: SimControl, hook: Hook) -> Self {
        Self { outputs, look: Some((control, hook)) }
    }
}

impl OutputSink for ChannelSink {
    fn deliver(&mut self, outputs: Vec<Output>) {
        if let Some((control, hook)) = &mut self.look {
            hook(control, &outputs);
        }
        // The test may have ended.
        let _ = self.outputs.send(outputs);
    }
}

/// The events of a request: its admission, tokens and end.
#[derive(Debug, Default, PartialEq)]
pub struct Story {
    /// The number of admissions, at most one.
    pub admissions: usize,
    /// The number of prompt tokens that were found in the cache.
    pub cached_tokens: u32,
    /// The generated tokens.
    pub tokens: Vec<i32>,
    /// The reason for the end; `None` before the end.
    pub end: Option<FinishReason>,
}

impl Story {
    /// Adds an output. True if it ends the request.
    ///
    /// # Panics
    /// The request has already ended, or is admitted twice.
    pub fn push(&mut self, output: Output) -> bool {
        assert_eq!(self.end, None, "something after the end: {output:?}");
        if let Some(admission) = output.admission {
            self.admissions += 1;
            self.cached_tokens += admission.cached_tokens;
        }
        if let Some(token) = output.token {
            // There may be no admission: a request that another engine admitted continues here.
            assert!(self.admissions <= 1, "admitted twice");
            self.tokens.push(token.id);
        }
        self.end = output.finish;
        self.end.is_some()
    }

    /// Returns the tokens and the reason for the end.
    ///
    /// # Panics
    /// The request has not ended.
    #[must_use]
    pub fn whole(self) -> (Vec<i32>, FinishReason) {
        (self.tokens, self.end.expect("it has ended"))
    }
}

/// Adds outputs to the stories of their requests. Returns the requests that ended.
pub fn tell(stories: &mut HashMap<u64, Story>, outputs: Vec<Output>) -> Vec<u64> {
    let mut ended = Vec::new();
    for output in outputs {
        let id = output.id.0;
        if stories.entry(id).or_default().push(output) {
            ended.push(id);
        }
    }
    ended
}

/// Returns the tokens and the reason for the end of each story.
#[must_use]
pub fn wholes<K: Eq + Hash>(stories: HashMap<K, Story>) -> HashMap<K, (Vec<i32>, FinishReason)> {
    stories.into_iter().map(|(id, story)| (id, story.whole())).collect()
}

/// The parts of a [`Rig`], except its settings.
pub struct RigParts {
    /// The hook of each member. Only a step group has more than one member.
    pub hooks: Vec<Hook>,
    /// Receives the changes of the first member's prefix cache.
    pub blocks: Option<Box<dyn BlockObserver>>,
    /// The first member's access to other engines.
    pub peers: Option<Box<dyn Peers>>,
    /// Injects faults before the hand starts.
    pub breaking: Box<dyn FnOnce(&SimControl)>,
    /// Creates the engine's clock from the clock of the simulation.
    pub clock: fn(SimClock) -> Arc<dyn Clock>,
    /// Creates the engine's executor from the simulated one.
    pub executor: Box<dyn FnOnce(SimExecutor) -> Box<dyn Executor>>,
}

impl Default for RigParts {
    fn default() -> Self {
        Self {
            hooks: vec![quiet()],
            blocks: None,
            peers: None,
            breaking: Box::new(|_| {}),
            clock: |clock| Arc::new(clock),
            executor: Box::new(|executor| Box::new(executor)),
        }
    }
}

/// An engine on a simulated hand. Dropping the rig stops the engine.
pub struct Rig {
    /// The handle of the first member.
    pub handle: EngineHandle,
    /// The handles of all members.
    pub handles: Vec<EngineHandle>,
    /// The clock of the simulation.
    pub clock: SimClock,
    /// Injects faults into the hand, and stops and releases the time.
    pub control: SimControl,
    /// The outputs of all members.
    pub outputs: Receiver<Vec<Output>>,
    /// Receives a value when the engine's thread has ended.
    pub exit: Receiver<()>,
    thread: EngineThread,
}

impl Rig {
    /// Starts the engine.
    ///
    /// # Panics
    /// The system cannot start a thread.
    #[must_use]
    pub fn start(config: EngineConfig, sim: SimConfig, parts: RigParts) -> Self {
        let RigParts { hooks, mut blocks, mut peers, breaking, clock: clock_of, executor: around } =
            parts;
        let clock = sim.clock.clone();
        let members = u32::try_from(hooks.len()).expect("a few members");
        let (executor, control) = SimExecutor::group(sim, members);
        breaking(&control);
        let (sender, outputs) = channel();
        let (ended, exit) = channel();
        let hooks = hooks.into_iter().map(|hook| {
            let ended = ended.clone();
            let on_exit = Box::new(move || {
                // The test may have ended.
                let _ = ended.send(());
            });
            let sink = Box::new(ChannelSink::hooked(sender.clone(), control.clone(), hook));
            let (blocks, peers) = (blocks.take(), peers.take());
            Hooks { blocks, peers, on_exit, ..Hooks::new(sink) }
        });
        let clock_of_engine = clock_of(clock.clone());
        let (handles, thread) =
            Engine::start_group(config, around(executor), clock_of_engine, hooks.collect())
                .expect("thread");
        Self { handle: handles[0].clone(), handles, clock, control, outputs, exit, thread }
    }

    /// Waits until no member is starting, and stops the time. Otherwise virtual time would run
    /// ahead of the requests that the test submits.
    #[must_use]
    pub fn held(self) -> Self {
        for handle in &self.handles {
            settled(handle, |status| !matches!(status, Status::Starting(_)));
        }
        self.control.hold();
        self
    }

    /// Waits until the first member has a status that `wanted` accepts, and returns it.
    pub fn settled(&self, wanted: impl Fn(&Status) -> bool) -> Status {
        settled(&self.handle, wanted)
    }

    /// Releases the time, and collects the outputs until `count` requests have ended.
    #[must_use]
    pub fn follow(&self, count: usize) -> HashMap<u64, Story> {
        self.control.release();
        self.collect(count)
    }

    /// Collects the outputs until `count` requests have ended.
    ///
    /// # Panics
    /// The outputs stop before that.
    #[must_use]
    pub fn collect(&self, mut count: usize) -> HashMap<u64, Story> {
        let mut stories = HashMap::new();
        while count > 0 {
            let outputs = self.outputs.recv_timeout(PATIENCE).expect("outputs");
            count -= tell(&mut stories, outputs).len();
        }
        stories
    }

    /// Stops the engine and waits until its thread has ended.
    pub fn end(self) {
        self.handle.stop();
        self.thread.join();
    }
}

/// Waits for a status that `wanted` accepts, and returns it. It polls, because there is no event to
/// wait for. No assertion depends on how long this takes.
pub fn settled(handle: &EngineHandle, wanted: impl Fn(&Status) -> bool) -> Status {
    loop {
        let status = handle.status();
        if wanted(&status) {
            return status;
        }
        std::thread::yield_now();
    }
}

/// Returns the rule for text in which any token may follow any other, without an end token.
#[must_use]
pub fn text() -> SimText {
    SimText::endless((0..VOCAB as i32).collect())
}

/// Creates a generation request with default values of all other parameters.
#[must_use]
pub fn request(id: u64, prompt: Vec<i32>, max_tokens: u32) -> EngineRequest {
    let request = Request { id, prompt: prompt.into(), max_tokens, ..Request::default() };
    EngineRequest { request, ..EngineRequest::default() }
}

/// Returns prompts of many lengths. Every third prompt starts with the same `common` tokens.
#[must_use]
pub fn prompt(id: u64, common: i32) -> Vec<i32> {
    let common = if id.is_multiple_of(3) { common } else { 0 };
    let own = 1 + (id as i32 * 7) % 60;
    (0..common).chain((0..own).map(|i| (id as i32 * 31 + i) % VOCAB as i32)).collect()
}

/// Returns the tokens that a request with this prompt gets when it runs alone.
#[must_use]
pub fn alone(mut tokens: Vec<i32>, count: u32) -> Vec<i32> {
    let (text, start) = (text(), tokens.len());
    for _ in 0..count {
        tokens.push(next_token(&text, &tokens, start));
    }
    tokens.split_off(start)
}
