//! An engine on a simulated hand, and what its requests give.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use forebay_engine::{
    BlockObserver, Engine, EngineConfig, EngineHandle, EngineRequest, EngineThread, FinishReason,
    Hooks, Output, OutputSink, Request, Status,
};
use forebay_sim::{
    DeviceModel, SimClock, SimConfig, SimControl, SimExecutor, SimText, Timing, next_token,
};

pub(crate) const VOCAB: u32 = 1000;
/// Far longer than anything here takes: a test that reaches it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Sees every batch on the engine thread: what it breaks is broken at that very step.
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

pub(crate) struct Rig {
    pub(crate) handle: EngineHandle,
    pub(crate) control: SimControl,
    pub(crate) outputs: Receiver<Vec<Output>>,
    _thread: EngineThread,
}

/// All that a request gave.
#[derive(Debug, Default)]
pub(crate) struct Story {
    pub(crate) tokens: Vec<i32>,
    pub(crate) admissions: usize,
    pub(crate) ends: Vec<FinishReason>,
}

pub(crate) fn config() -> EngineConfig {
    EngineConfig {
        max_running_requests: 16,
        slots: 24,
        page_size: 4,
        chunked_prefill_size: 32,
        max_queued_requests: 1000,
        context_length: 256,
        watchdog_timeout: Duration::from_secs(10),
        load_timeout: Duration::ZERO,
        mask_threads: 0,
        ..EngineConfig::default()
    }
}

impl Rig {
    pub(crate) fn start(config: EngineConfig, pages: u32) -> Self {
        Self::broken(config, pages, |_| {}, Box::new(|_, _| {}))
    }

    pub(crate) fn hooked(config: EngineConfig, hook: Hook) -> Self {
        Self::broken(config, 500, |_| {}, hook)
    }

    pub(crate) fn broken(
        config: EngineConfig,
        pages: u32,
        breaking: impl FnOnce(&SimControl),
        hook: Hook,
    ) -> Self {
        Self::observed(config, pages, 1, breaking, hook, None)
    }

    pub(crate) fn observed(
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
            load_us: 1_000_000,
            page_count: pages,
            vocab_size: VOCAB,
            text: text(),
            ..SimConfig::default()
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
    pub(crate) fn settled(&self, wanted: impl Fn(&Status) -> bool) -> Status {
        loop {
            let status = self.handle.status();
            if wanted(&status) {
                return status;
            }
            std::thread::yield_now();
        }
    }

    /// Lets time go on and follows the outputs until `count` requests have ended.
    pub(crate) fn follow(&self, count: usize) -> HashMap<u64, Story> {
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
pub(crate) fn text() -> SimText {
    SimText::endless((0..VOCAB as i32).collect()).with_vectors(8)
}

pub(crate) fn request(id: u64, prompt: Vec<i32>, max_tokens: u32) -> EngineRequest {
    let request = Request { id, prompt: prompt.into(), max_tokens, ..Request::default() };
    EngineRequest { request, ..EngineRequest::default() }
}

/// Prompts of many lengths, some with a common beginning.
pub(crate) fn prompt(id: u64) -> Vec<i32> {
    let common = if id.is_multiple_of(3) { 20 } else { 0 };
    let own = 1 + (id as i32 * 7) % 60;
    (0..common).chain((0..own).map(|i| (id as i32 * 31 + i) % VOCAB as i32)).collect()
}

/// What the simulated model gives a request that runs alone.
pub(crate) fn alone(mut tokens: Vec<i32>, count: u32) -> Vec<i32> {
    let (text, start) = (text(), tokens.len());
    for _ in 0..count {
        tokens.push(next_token(&text, &tokens, start));
    }
    tokens.split_off(start)
}

pub(crate) fn assert_exact(
    stories: &HashMap<u64, Story>,
    count: u64,
    max_tokens: impl Fn(u64) -> u32,
) {
    assert_eq!(stories.len() as u64, count);
    for id in 0..count {
        let story = &stories[&id];
        assert_eq!(story.tokens, alone(prompt(id), max_tokens(id)), "request {id}");
        assert_eq!(story.ends, [FinishReason::Length], "request {id}");
    }
}

/// A hook that breaks something at the first step that gave outputs.
pub(crate) fn once(mut breaking: impl FnMut(&SimControl) + Send + 'static) -> Hook {
    let mut done = false;
    Box::new(move |control, _| {
        if !std::mem::replace(&mut done, true) {
            breaking(control);
        }
    })
}
