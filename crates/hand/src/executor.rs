//! An [`Executor`] that runs a group of ranks.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_engine::{Executor, Payload, Signal, There, Wake};
use forebay_protocol::{
    AdapterOrder, Fatal, Frame, FrameError, HEADER_BYTES, HandConfig, Header, Hello, Kind, Message,
    Progress, Ready, StepMasks, StepPlan, StepResult, StoreRequest, encode_json, encode_place,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;
use tracing::debug;

use crate::arena::{Arena, Region};
use crate::counts;
use crate::frames::{FrameReader, FrameWriter, StreamError};
use crate::memory::{self, HOST_FD, HostMemories};
use crate::merger::{ResultMerger, same_step};
use crate::process::RankProcess;
use crate::site::{Process, RankOrder, Site, last_of};
use crate::store::Store;
use crate::waker::EventWaker;

/// Prompts with at least this many tokens are sent through the arena.
const SPILL_TOKENS: usize = 2048;
/// If there are several ranks, frames of at least this many bytes are sent through the arena. There
/// they are written once and read by all ranks.
const SHARED_BYTES: usize = 8192;

/// The description of a rank group and of its processes. If `step_group` is set in the
/// configuration, each rank is a member of a step group, with separate plans.
#[derive(Clone)]
pub struct HandSpec {
    /// The program to run, such as the Python interpreter.
    pub program: PathBuf,
    /// The program's arguments, including the module to run.
    pub args: Vec<OsString>,
    /// Environment variables, in addition to the brain's.
    pub env: Vec<(OsString, OsString)>,
    /// The configuration of each rank. The executor sets `rank`, `world_size` and `arena_bytes`.
    /// `host_bytes` is for the whole replica, and is divided equally among the ranks.
    pub config: HandConfig,
    /// The shared memory for payloads that are too large for the socket.
    pub arena: Arena,
    /// The memory of host tiers that is shared with other groups.
    pub memories: HostMemories,
    /// The ranks. There has to be at least one.
    pub ranks: Vec<RankSpec>,
    /// Where the ranks run; `None`: as child processes of this process. At a site, plans, tokens
    /// and masks are sent through the socket, and payloads are copied there before a plan refers to
    /// them.
    pub site: Option<Arc<dyn Site>>,
}

impl HandSpec {
    /// The number of ranks with a separate host tier.
    fn tiers(&self) -> usize {
        self.config.host_tiers(self.ranks.len())
    }
}

/// The settings of a single rank.
#[derive(Debug, Clone, Default)]
pub struct RankSpec {
    /// Environment variables, in addition to the group's.
    pub env: Vec<(OsString, OsString)>,
    /// The numbers of the CPUs on which the rank may run; empty: all CPUs.
    pub cpus: Vec<usize>,
}

struct Rank {
    process: Process,
    socket: UnixStream,
    reader: FrameReader,
    writer: FrameWriter,
    /// The rank's facts; `None`: the rank is not ready yet.
    facts: Option<Ready>,
    /// Results of this rank for steps whose results from other ranks have not arrived yet.
    results: VecDeque<StepResult>,
    last_words: Option<String>,
}

impl Rank {
    fn new(process: Process, socket: UnixStream) -> Self {
        Self {
            process,
            socket,
            reader: FrameReader::default(),
            writer: FrameWriter::default(),
            facts: None,
            results: VecDeque::new(),
            last_words: None,
        }
    }
}

/// Spawns, supervises and communicates with the processes of a rank group.
pub struct HandExecutor {
    spec: HandSpec,
    waker: Arc<EventWaker>,
    ranks: Vec<Rank>,
    signals: VecDeque<Signal>,
    /// The key-value store with which ranks connect to each other; `None`: they are connected, or
    /// there is only one rank.
    store: Option<Store>,
    /// The memory of each rank's host tier, or of the common tier; empty: there is no tier. These
    /// are anonymous files, so the next hand of a rank finds the content that the last hand left.
    host: Vec<OwnedFd>,
    /// Copies and adapter loads that some ranks have finished but others have not.
    merger: ResultMerger,
    /// The arena regions of the plans in flight, oldest plan first.
    regions: VecDeque<Vec<Region>>,
    buffer: Vec<u8>,
    /// The short frame that is sent after the frame in `buffer` was copied to the arena.
    place: Vec<u8>,
}

impl HandExecutor {
    /// Prepares a rank group. No process runs before [`Executor::start`].
    ///
    /// # Errors
    /// The operating system refuses the waker, or memory for the host tier.
    pub fn new(mut spec: HandSpec) -> std::io::Result<Self> {
        let world = spec.ranks.len();
        spec.config.world_size = u32::try_from(world).unwrap_or(u32::MAX);
        let wanted = spec.config.host_bytes.is_some() || spec.config.host_ratio.is_some();
        let host = match spec.memories.own()? {
            own if !own.is_empty() => own,
            _ if wanted => memory::of_ranks(spec.tiers())?,
            _ => Vec::new(),
        };
        spec.config.host_lenders = spec.memories.descriptors();
        if !spec.config.step_group {
            // Each rank stores a part of every page.
            let tiers = spec.tiers().max(1) as u64;
            spec.config.host_bytes = spec.config.host_bytes.map(|all| all / tiers);
        }
        Ok(Self {
            host,
            merger: ResultMerger::new(world),
            spec,
            waker: Arc::new(EventWaker::new()?),
            ranks: Vec::new(),
            signals: VecDeque::new(),
            store: None,
            regions: VecDeque::new(),
            buffer: Vec::new(),
            place: Vec::new(),
        })
    }

    /// Starts all ranks, on this machine or at the site.
    fn spawn(&self) -> std::io::Result<Vec<Rank>> {
        let env = |rank: &RankSpec| [&self.spec.env[..], &rank.env[..]].concat();
        let Some(site) = &self.spec.site else {
            let ranks = self.spec.ranks.iter().enumerate().map(|(index, rank)| {
                let mut command = Command::new(&self.spec.program);
                command.args(&self.spec.args).envs(env(rank));
                let tier = index % self.spec.tiers().max(1);
                let host = self.host.get(tier).map(|host| (HOST_FD, host.as_fd()));
                let memories: Vec<_> =
                    host.into_iter().chain(self.spec.memories.borrowed(tier)).collect();
                let (process, socket) =
                    RankProcess::spawn(command, &self.spec.arena, &memories, &rank.cpus)?;
                Ok(Rank::new(Process::Here(process), socket))
            });
            return ranks.collect();
        };
        let text = |text: OsString| text.to_string_lossy().into_owned();
        let orders = self.spec.ranks.iter().map(|rank| RankOrder {
            env: env(rank).into_iter().map(|(name, value)| (text(name), text(value))).collect(),
            arena_bytes: self.spec.arena.bytes(),
        });
        let started = site.spawn(orders.collect())?.into_iter();
        Ok(started.map(|(socket, distant)| Rank::new(Process::There(distant), socket)).collect())
    }

    fn config_frame(&self, rank: usize) -> Result<Vec<u8>, FrameError> {
        let arena_bytes = self.spec.arena.bytes() as u64;
        HandConfig { rank: rank as u32, arena_bytes, ..self.spec.config.clone() }.encode()
    }

    /// Ends the whole group, because the connection to `rank` failed with `error`, as in a crash.
    fn group_died(&mut self, rank: usize, error: &StreamError) {
        let mut ranks: Vec<Rank> = self.ranks.drain(..).collect();
        // If the kernel killed a rank because memory ran out, other ranks fail too, and their
        // errors may arrive first.
        let starved = ranks.iter().position(|rank| rank.process.starved());
        let rank = starved.unwrap_or(rank);
        let Rank { process, last_words, socket: _socket, .. } = ranks.swap_remove(rank);
        // Send the signal to all processes before waiting for the first one.
        ranks.iter().for_each(|other| other.process.doom());
        let mut out_of_memory = false;
        let reason = if let StreamError::Disagreement { .. } | StreamError::Pools(_) = error {
            // Each of the ranks may be the faulty one, so no rank is named.
            process.doom();
            error.to_string()
        } else {
            let exit = process.bury();
            out_of_memory = exit.out_of_memory;
            let reason = last_words.unwrap_or_else(|| match error {
                StreamError::Closed => exit.text,
                _ if out_of_memory => exit.text,
                other => format!("{other}; {}", exit.text),
            });
            if ranks.is_empty() { reason } else { format!("rank {rank}: {reason}") }
        };
        drop(ranks);
        self.regions.clear();
        // Without a host tier, a GPU's pages are not in host memory, so a lower page count would
        // not help.
        let pages_on_host = self.spec.config.device != "cuda" || !self.host.is_empty();
        self.signals.push_back(match out_of_memory && pages_on_host {
            true => Signal::OutOfMemory(reason),
            false => Signal::Died(reason),
        });
    }

    /// Reads from and writes to the socket of rank `index` without blocking.
    fn serve_rank(&mut self, index: usize, writable: bool) -> Result<(), StreamError> {
        let flushed = if writable {
            let rank = &mut self.ranks[index];
            rank.writer.flush(&mut rank.socket)
        } else {
            Ok(())
        };
        // Read even if the hand accepts no more data: it may have sent last words.
        loop {
            let rank = &mut self.ranks[index];
            let Some(frame) = rank.reader.read(&mut rank.socket)? else { return flushed };
            self.take_frame(index, &frame)?;
        }
    }

    fn take_frame(&mut self, index: usize, frame: &Frame) -> Result<(), StreamError> {
        match frame.header().kind {
            Kind::Hello => {
                let Hello { pid } = Hello::decode(frame)?;
                debug!(rank = index, pid, "a hand has connected");
                let config = self.config_frame(index)?;
                let rank = &mut self.ranks[index];
                rank.writer.send(&mut rank.socket, &config)?;
                // The hand is alive, so its time limit starts again.
                self.signals.push_back(Signal::Progress("handshake".into()));
            }
            Kind::Progress => {
                let Progress { stage, done, total } = Progress::decode(frame)?;
                self.signals.push_back(Signal::Progress(format!("{stage} {done}/{total}")));
            }
            Kind::Ready => {
                self.ranks[index].facts = Some(Ready::decode(frame)?);
                self.group_ready()?;
            }
            Kind::Store => {
                let store = self.store.as_mut().ok_or(FrameError::Malformed(
                    "a question to the store, which is for ranks that begin",
                ))?;
                for (rank, reply) in store.ask(index, StoreRequest::decode(frame)?)? {
                    let rank = &mut self.ranks[rank];
                    rank.writer.send(&mut rank.socket, &reply.encode()?)?;
                }
            }
            Kind::Result => {
                // Each plan in flight has an entry in `regions`, and gets one result.
                if self.ranks[index].results.len() >= self.regions.len() {
                    return Err(FrameError::Malformed("a result of no plan").into());
                }
                self.ranks[index].results.push_back(StepResult::decode(frame)?);
                if self.ranks.iter().all(|rank| !rank.results.is_empty()) {
                    self.step_done()?;
                }
            }
            Kind::Fatal => {
                let Fatal { error, .. } = Fatal::decode(frame)?;
                self.ranks[index].last_words = Some(error);
            }
            Kind::Config
            | Kind::Plan
            | Kind::Masks
            | Kind::Shutdown
            | Kind::StoreReply
            | Kind::PlanAt
            | Kind::Adapter => {
                return Err(FrameError::Malformed("a kind for hands only").into());
            }
        }
        Ok(())
    }

    /// Reports the group's facts once every rank has sent its own. The group's facts are those of
    /// the first rank, but `tokens_a_row` is the smallest of all ranks, and sizes in bytes are sums
    /// over the ranks. Except in a step group, the size of a page is the sum over the ranks with
    /// separate host tiers, which store different parts of a page.
    fn group_ready(&mut self) -> Result<(), StreamError> {
        let all: Option<Vec<&Ready>> = self.ranks.iter().map(|rank| rank.facts.as_ref()).collect();
        let Some(all) = all else { return Ok(()) };
        let [first, ..] = all[..] else { return Ok(()) };
        let shape = |facts: &Ready| {
            let Ready { page_count, host_page_count, vocab_size, hidden_size, dtype, .. } = *facts;
            (page_count, host_page_count, vocab_size, hidden_size, dtype)
        };
        if !all.iter().all(|facts| shape(facts) == shape(first)) {
            return Err(StreamError::Pools(all.iter().map(|facts| facts.page_count).collect()));
        }
        let facts = Ready {
            tokens_a_row: all.iter().map(|facts| facts.tokens_a_row).min().unwrap_or(1),
            weight_bytes: all.iter().map(|facts| facts.weight_bytes).sum(),
            kv_bytes: all.iter().map(|facts| facts.kv_bytes).sum(),
            lora_bytes: all.iter().map(|facts| facts.lora_bytes).sum(),
            page_bytes: match self.spec.config.step_group {
                true => first.page_bytes,
                false => all.iter().take(self.spec.tiers()).map(|facts| facts.page_bytes).sum(),
            },
            ..first.clone()
        };
        counts::keep(&mut self.spec.config, &facts);
        self.store = None;
        self.signals.push_back(Signal::Ready(facts.into()));
        Ok(())
    }

    /// Reports a step for which all ranks have sent their results.
    fn step_done(&mut self) -> Result<(), StreamError> {
        self.regions.pop_front();
        let results = self.ranks.iter_mut().filter_map(|rank| rank.results.pop_front());
        let mut results: Vec<StepResult> = results.collect();
        if self.spec.config.step_group {
            same_step(&results)?;
        } else {
            results = self.merger.merge(results)?;
        }
        self.signals.push_back(Signal::Result(results));
        Ok(())
    }

    /// If there are several local `readers` and the frame in the buffer is long, writes the frame
    /// to the arena, in a region of the current step. Returns a short frame that contains the
    /// offset; `None`: send the frame in the buffer through the sockets.
    fn share(&mut self, readers: usize) -> Option<&[u8]> {
        let apart = self.spec.site.is_some();
        if apart || readers < 2 || self.buffer.len() < SHARED_BYTES {
            return None;
        }
        let regions = self.regions.back_mut()?;
        // Without room in the arena, the frame goes to each rank through its socket.
        let region = self.spec.arena.place(&self.buffer)?;
        let header = self.buffer.first_chunk::<HEADER_BYTES>()?;
        let step = Header::decode(header).ok()?.step;
        let words = u32::try_from(self.buffer.len() / 4).ok()?;
        encode_place(step, region.offset(), words, &mut self.place).ok()?;
        regions.push(region);
        Some(&self.place)
    }

    /// Returns the ranks to which a member's messages are sent.
    fn ranks_of(&self, member: usize) -> Range<usize> {
        if self.spec.config.step_group { member..member + 1 } else { 0..self.ranks.len() }
    }

    /// Encodes a member's plan into the buffer. Long token lists go into the arena.
    fn encode(&mut self, plan: &StepPlan) -> Result<(), FrameError> {
        let near = self.spec.site.is_none();
        let (arena, regions) = (&self.spec.arena, self.regions.back_mut());
        let mut regions = regions.filter(|_| near);
        plan.encode_spilling(&mut self.buffer, SPILL_TOKENS, |tokens| {
            let regions = regions.as_mut()?;
            let region = arena.place(bytemuck::cast_slice(tokens))?;
            let offset = region.offset();
            regions.push(region);
            Some(offset)
        })
    }

    /// Sends the frame in the buffer to these ranks, or reports the error of encoding it.
    fn send(&mut self, to: Range<usize>, encoded: Result<(), FrameError>) {
        if let Err(error) = encoded {
            // The scheduler bounds the words of a step, so this is a bug in the brain. No frame may
            // be lost, so the group has to end.
            self.stop();
            self.signals.push_back(Signal::Died(format!("the plan cannot be sent: {error}")));
            return;
        }
        let shared = self.share(to.len()).is_some();
        self.write(to, shared);
    }

    /// Writes the frame in the buffer to the sockets of these ranks. If `shared`, writes the frame
    /// with its arena offset instead.
    fn write(&mut self, to: Range<usize>, shared: bool) {
        let frame = if shared { &self.place } else { &self.buffer };
        for (index, rank) in self.ranks.iter_mut().enumerate().take(to.end).skip(to.start) {
            // This fails only if the socket is closed or broken. The next wait then reads last
            // words and reports the error.
            if rank.writer.send(&mut rank.socket, frame).is_err() {
                debug!(rank = index, "the plan could not be sent");
            }
        }
    }

    /// Waits for the sockets and the waker, and handles those that are ready.
    fn poll_once(&mut self, timeout: Option<Duration>) {
        let timeout = timeout.map(|t| Timespec {
            tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: t.subsec_nanos().into(),
        });
        let mut fds = Vec::with_capacity(1 + self.ranks.len());
        fds.push(PollFd::from_borrowed_fd(self.waker.fd(), PollFlags::IN));
        for rank in &self.ranks {
            let writing = if rank.writer.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
            fds.push(PollFd::new(&rank.socket, PollFlags::IN | writing));
        }
        if poll(&mut fds, timeout.as_ref()).is_err() {
            // The call was interrupted: the caller checks its deadline and polls again.
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

impl Executor for HandExecutor {
    fn start(&mut self) {
        debug_assert!(self.ranks.is_empty(), "the last group is still there");
        self.signals.clear();
        self.merger = ResultMerger::new(self.spec.ranks.len());
        self.store = (self.spec.ranks.len() > 1).then(Store::default);
        match self.spawn() {
            Ok(ranks) => self.ranks = ranks,
            Err(error) => {
                let program = self.spec.program.display();
                self.signals.push_back(Signal::Died(format!("cannot run {program}: {error}")));
                return;
            }
        }
        debug!(ranks = self.ranks.len(), "hand spawned");
    }

    fn limit_pages(&mut self, pages: u32, host_pages: u32) {
        let config = &mut self.spec.config;
        let before = config.host_pages;
        counts::lower(config, pages, host_pages);
        let lends = self.spec.memories.lends();
        if host_pages > 0 && (lends || before != Some(host_pages)) {
            // Replace the last hand's memory, so that it is freed. If there is no new memory, the
            // next hand uses a part of the old memory. If others read the old memory, new memory is
            // required.
            match memory::of_ranks(self.spec.tiers()) {
                Ok(memories) => self.host = memories,
                Err(_) if lends => self.host.clear(),
                Err(_) => {}
            }
        }
    }

    fn replace_model(&mut self, model: Value) -> Value {
        std::mem::replace(&mut self.spec.config.model, model)
    }

    fn submit(&mut self, plans: &[StepPlan]) {
        self.regions.push_back(Vec::new());
        for (member, plan) in plans.iter().enumerate() {
            let encoded = self.encode(plan);
            self.send(self.ranks_of(member), encoded);
        }
    }

    fn masks(&mut self, member: usize, masks: &StepMasks) {
        // If there are no regions, the group has ended, and no plan is in flight.
        let Some(regions) = self.regions.back_mut() else { return };
        let near = self.spec.site.is_none();
        let encoded = masks.encode_spilling(&mut self.buffer, |mask| {
            if !near {
                return None;
            }
            let region = self.spec.arena.place(bytemuck::cast_slice(mask))?;
            let offset = region.offset();
            regions.push(region);
            Some(offset)
        });
        self.send(self.ranks_of(member), encoded);
    }

    fn adapter(&mut self, member: usize, order: &AdapterOrder) {
        if self.ranks.is_empty() {
            return;
        }
        let ranks = self.ranks_of(member);
        match order.encode() {
            Ok(frame) => {
                // The frame belongs to no step, so no result would tell when a region in the arena
                // may be freed.
                self.buffer = frame;
                self.write(ranks, false);
            }
            Err(error) => self.send(ranks, Err(error)),
        }
    }

    fn is_near(&self) -> bool {
        self.spec.site.is_none()
    }

    fn carry(&mut self, member: usize, payload: &Arc<dyn Payload>, there: There) {
        // If the group has ended, there are no ranks that need the payload.
        let ranks = self.ranks.get(self.ranks_of(member)).unwrap_or_default();
        for (rank, there) in ranks.iter().zip(last_of(ranks.len(), there)) {
            match &rank.process {
                Process::Here(_) => there(),
                Process::There(distant) => distant.carry(payload, there),
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
                // A rank with a broken socket is killed below in any case.
                let _ = rank.writer.send(&mut rank.socket, &order);
            }
        }
        // Keep the sockets open until the ranks have exited: the order may still be in a socket's
        // buffer.
        let (processes, _sockets): (Vec<_>, Vec<_>) =
            self.ranks.drain(..).map(|rank| (rank.process, rank.socket)).unzip();
        Process::end(processes);
        self.signals.clear();
        self.regions.clear();
    }

    fn kill(&mut self) {
        // A process stopped by a signal would not read the order, and would delay the others.
        self.ranks.iter().for_each(|rank| rank.process.doom());
        self.stop();
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
