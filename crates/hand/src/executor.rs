//! A rank group as an [`Executor`].

use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_engine::{Executor, HandFacts, Payload, Signal, Wake};
use forebay_protocol::{Dtype, Frame, FrameError, Kind, StepPlan, StepResult, encode_json};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tracing::debug;

use crate::arena::{Arena, Region};
use crate::frames::{FrameReader, FrameWriter, StreamError};
use crate::process::RankProcess;
use crate::waker::EventWaker;

/// Prompts from this many tokens on travel through the arena.
const SPILL_TOKENS: usize = 2048;

/// How to run a rank group.
#[derive(Clone)]
pub struct HandSpec {
    /// The interpreter.
    pub program: PathBuf,
    /// Its arguments, up to and with the module to run.
    pub args: Vec<OsString>,
    /// Variables set on top of the brain's own environment.
    pub env: Vec<(OsString, OsString)>,
    /// The `config` frame (docs/protocol.md) but for `rank`, `world_size` and `arena_bytes`, which are added here.
    pub config: Map<String, Value>,
    /// Number of ranks.
    pub world_size: u32,
    /// What is too big for the socket goes through here.
    pub arena: Arena,
    /// Processors that the ranks may run on, by number; none: any.
    pub cpus: Vec<usize>,
}

struct Rank {
    process: RankProcess,
    reader: FrameReader,
    writer: FrameWriter,
    /// Facts, once it is ready.
    facts: Option<HandFacts>,
    /// Results that wait for the other ranks' (rank 0's are kept, the others' only counted).
    results: VecDeque<StepResult>,
    last_words: Option<String>,
}

/// Spawns, feeds and watches the processes of one rank group.
pub struct HandExecutor {
    spec: HandSpec,
    waker: Arc<EventWaker>,
    ranks: Vec<Rank>,
    signals: VecDeque<Signal>,
    /// Arena regions of the plans in flight, oldest first.
    regions: VecDeque<Vec<Region>>,
    buffer: Vec<u8>,
}

#[derive(Deserialize)]
struct Ready {
    page_count: u32,
    vocab_size: u32,
    hidden_size: u32,
    dtype: String,
    weight_bytes: u64,
    kv_bytes: u64,
    device: String,
    load_seconds: f64,
}

#[derive(Deserialize)]
struct Progress {
    stage: String,
    done: u64,
    total: u64,
}

#[derive(Deserialize)]
struct Fatal {
    error: String,
}

impl HandExecutor {
    /// Prepares a rank group; nothing runs before [`Executor::start`].
    ///
    /// # Errors
    /// The system refuses the waker.
    pub fn new(spec: HandSpec) -> std::io::Result<Self> {
        Ok(Self {
            spec,
            waker: Arc::new(EventWaker::new()?),
            ranks: Vec::new(),
            signals: VecDeque::new(),
            regions: VecDeque::new(),
            buffer: Vec::new(),
        })
    }

    fn spawn_rank(&self) -> std::io::Result<Rank> {
        let mut command = Command::new(&self.spec.program);
        command.args(&self.spec.args).envs(self.spec.env.iter().map(|(k, v)| (k, v)));
        Ok(Rank {
            process: RankProcess::spawn(command, self.spec.arena.fd(), &self.spec.cpus)?,
            reader: FrameReader::default(),
            writer: FrameWriter::default(),
            facts: None,
            results: VecDeque::new(),
            last_words: None,
        })
    }

    fn config_frame(&self, rank: usize) -> Result<Vec<u8>, FrameError> {
        let mut config = self.spec.config.clone();
        config.insert("rank".into(), json!(rank));
        config.insert("world_size".into(), json!(self.spec.world_size));
        config.insert("arena_bytes".into(), json!(self.spec.arena.bytes()));
        encode_json(Kind::Config, &Value::Object(config).to_string())
    }

    /// Ends the whole group; `why` names the rank whose end caused it.
    fn group_died(&mut self, rank: usize, error: &StreamError) {
        let mut reason = String::new();
        for (index, rank_state) in self.ranks.drain(..).enumerate() {
            let Rank { process, last_words, .. } = rank_state;
            if index == rank {
                let status = process.bury();
                reason = last_words.unwrap_or_else(|| match error {
                    StreamError::Closed => status,
                    other => format!("{other}; {status}"),
                });
            }
        }
        if self.spec.world_size > 1 {
            reason = format!("rank {rank}: {reason}");
        }
        self.regions.clear();
        self.signals.push_back(Signal::Died(reason));
    }

    /// Reads and writes what rank `index` has ready.
    fn serve_rank(&mut self, index: usize, writable: bool) -> Result<(), StreamError> {
        let flushed = if writable {
            let rank = &mut self.ranks[index];
            rank.writer.flush(&mut rank.process.socket)
        } else {
            Ok(())
        };
        // Read even from a hand that takes nothing more: it may have left last words.
        loop {
            let rank = &mut self.ranks[index];
            let Some(frame) = rank.reader.read(&mut rank.process.socket)? else { return flushed };
            self.take_frame(index, &frame)?;
        }
    }

    fn take_frame(&mut self, index: usize, frame: &Frame) -> Result<(), StreamError> {
        match frame.header().kind {
            Kind::Hello => {
                let config = self.config_frame(index)?;
                let rank = &mut self.ranks[index];
                rank.writer.send(&mut rank.process.socket, &config)?;
                // It lives: whoever waits for it may go on waiting.
                self.signals.push_back(Signal::Progress("handshake".into()));
            }
            Kind::Progress => {
                let progress: Progress = parse(frame)?;
                let Progress { stage, done, total } = progress;
                self.signals.push_back(Signal::Progress(format!("{stage} {done}/{total}")));
            }
            Kind::Ready => {
                let ready: Ready = parse(frame)?;
                self.ranks[index].facts = Some(HandFacts {
                    page_count: ready.page_count,
                    vocab_size: ready.vocab_size,
                    hidden_size: ready.hidden_size,
                    dtype: Dtype::named(&ready.dtype).ok_or(FrameError::Malformed("dtype"))?,
                    weight_bytes: ready.weight_bytes,
                    kv_bytes: ready.kv_bytes,
                    device: ready.device,
                    load_seconds: ready.load_seconds,
                });
                self.group_ready();
            }
            Kind::Result => {
                self.ranks[index].results.push_back(StepResult::decode(frame)?);
                if self.ranks.iter().all(|rank| !rank.results.is_empty()) {
                    self.step_done();
                }
            }
            Kind::Fatal => {
                let Fatal { error } = parse(frame)?;
                self.ranks[index].last_words = Some(error);
            }
            Kind::Config | Kind::Plan | Kind::Shutdown => {
                return Err(FrameError::Malformed("a kind for hands only").into());
            }
        }
        Ok(())
    }

    /// Reports the facts once every rank has them: the smallest pool counts.
    fn group_ready(&mut self) {
        let smallest = self.ranks.iter().map(|rank| rank.facts.as_ref()).reduce(|a, b| {
            let (a, b) = (a?, b?);
            Some(if b.page_count < a.page_count { b } else { a })
        });
        let Some(Some(facts)) = smallest else { return };
        // A respawned hand must offer exactly the pages that the scheduler was built on, whatever memory is free by then.
        if let Some(page_size) = self.spec.config.get("page_size").and_then(Value::as_u64) {
            let tokens = u64::from(facts.page_count) * page_size;
            let facts = facts.clone();
            self.spec.config.insert("max_total_tokens".into(), json!(tokens));
            self.signals.push_back(Signal::Ready(facts));
        }
    }

    fn step_done(&mut self) {
        self.regions.pop_front();
        let mut results = self.ranks.iter_mut().map(|rank| rank.results.pop_front());
        let first = results.next().flatten();
        results.for_each(drop);
        if let Some(result) = first {
            self.signals.push_back(Signal::Result(result));
        }
    }

    /// Waits for the sockets and the waker and serves what is ready.
    fn poll_once(&mut self, timeout: Option<Duration>) {
        let timeout = timeout.map(|t| Timespec {
            tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: t.subsec_nanos().into(),
        });
        let mut fds = Vec::with_capacity(1 + self.ranks.len());
        fds.push(PollFd::from_borrowed_fd(self.waker.fd(), PollFlags::IN));
        for rank in &self.ranks {
            let writing = if rank.writer.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
            fds.push(PollFd::new(&rank.process.socket, PollFlags::IN | writing));
        }
        if poll(&mut fds, timeout.as_ref()).is_err() {
            // Interrupted: the caller looks at its clock and polls again.
            return;
        }
        let woken = !fds[0].revents().is_empty();
        let ready: Vec<PollFlags> = fds.iter().skip(1).map(PollFd::revents).collect();
        if woken {
            self.waker.clear();
        }
        for (index, flags) in ready.into_iter().enumerate() {
            if flags.is_empty() || index >= self.ranks.len() {
                continue;
            }
            if let Err(error) = self.serve_rank(index, flags.contains(PollFlags::OUT)) {
                self.group_died(index, &error);
            }
        }
    }
}

fn parse<T: for<'a> Deserialize<'a>>(frame: &Frame) -> Result<T, StreamError> {
    let malformed = |_| FrameError::Malformed("JSON").into();
    serde_json::from_str(frame.json()?).map_err(malformed)
}

impl Executor for HandExecutor {
    fn start(&mut self) {
        debug_assert!(self.ranks.is_empty(), "the last group is still there");
        self.signals.clear();
        for _ in 0..self.spec.world_size {
            match self.spawn_rank() {
                Ok(rank) => self.ranks.push(rank),
                Err(error) => {
                    let program = self.spec.program.display();
                    self.ranks.clear();
                    self.signals.push_back(Signal::Died(format!("cannot run {program}: {error}")));
                    return;
                }
            }
        }
        debug!(ranks = self.ranks.len(), "hand spawned");
    }

    fn submit(&mut self, plan: &mut StepPlan) {
        let mut regions = Vec::new();
        plan.spill_tokens(SPILL_TOKENS, |tokens| {
            let region = self.spec.arena.place(bytemuck::cast_slice(tokens))?;
            let offset = region.offset();
            regions.push(region);
            Some(offset)
        });
        self.regions.push_back(regions);
        if let Err(error) = plan.encode(&mut self.buffer) {
            // The scheduler bounds the words of a step, so this is a fault of the brain. No plan may go missing.
            self.stop();
            self.signals.push_back(Signal::Died(format!("the plan cannot be sent: {error}")));
            return;
        }
        for index in 0..self.ranks.len() {
            let rank = &mut self.ranks[index];
            // Anything else than a closed or broken socket would be kept for later; the next wait reads last words and reports it.
            if rank.writer.send(&mut rank.process.socket, &self.buffer).is_err() {
                debug!(rank = index, "the plan could not be sent");
            }
        }
    }

    fn wait(&mut self, timeout_us: Option<u64>) -> Signal {
        let deadline = timeout_us.map(|us| Instant::now() + Duration::from_micros(us));
        let mut polled = false;
        loop {
            if let Some(signal) = self.signals.pop_front() {
                return signal;
            }
            if self.waker.take() {
                return Signal::Woken;
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if polled && left == Some(Duration::ZERO) {
                return Signal::TimedOut;
            }
            self.poll_once(left);
            polled = true;
        }
    }

    fn stop(&mut self) {
        if let Ok(order) = encode_json(Kind::Shutdown, "") {
            for rank in &mut self.ranks {
                // A rank that can't be told is ended all the same.
                let _ = rank.writer.send(&mut rank.process.socket, &order);
            }
        }
        for rank in self.ranks.drain(..) {
            rank.process.end();
        }
        self.signals.clear();
        self.regions.clear();
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.waker.clone()
    }
}

impl Drop for HandExecutor {
    fn drop(&mut self) {
        self.stop();
    }
}
