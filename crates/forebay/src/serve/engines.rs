//! The engines, with their hands or simulated devices.

use std::ffi::OsString;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use forebay_engine::{Clock, EngineThread, Executor, SystemClock, TierMemory};
use forebay_hand::{Arena, HandExecutor, HandSpec, HostMemories, HostMemory, RankSpec, Site};
use forebay_outpost::Collectives;
use forebay_replicas::{Member, Replicas};
use forebay_server::{Disaggregation, Guard};
use forebay_sim::{Bus, Recorder, SimClock, SimConfig, SimExecutor};
use forebay_text::Tokenizer;
use tokio::sync::oneshot;

use super::outputs::Sinks;
use crate::flags::ServeFlags;
use crate::model::Model;
use crate::placement::Placed;
use crate::resolve::{DeviceSettings, Resolved};
use crate::{collectives, gpus, hands, outposts, python, simulate};

/// The running engines, with the values that have to live as long as the engines.
pub(super) struct Engines {
    pub(super) replicas: Replicas,
    threads: Vec<EngineThread>,
    /// The placer of outposts, which has to outlive the hands.
    _placed: Option<Placed>,
    pub(super) arena: Arena,
    /// Memory that this process uses for transfers between servers: host tiers from which it sends
    /// blocks to other servers, or memory for the blocks that it receives.
    pub(super) tiers: Vec<Arc<dyn TierMemory>>,
}

/// Receives a value when the first engine ends.
pub(super) type EngineEnd = oneshot::Receiver<()>;

impl Engines {
    /// Starts an engine for each rank group. Each engine starts its hands.
    pub(super) fn start(
        flags: &ServeFlags,
        interpreter: &Path,
        model: &Model,
        resolved: &Resolved,
        tokenizer: &Arc<Tokenizer>,
        sinks: &Sinks,
        guard: &Guard,
    ) -> Result<(Self, EngineEnd)> {
        let arena = Arena::new(flags.run.arena_bytes).context("no arena")?;
        let (site, placed) = outposts::open(&flags.replicas, interpreter, resolved, guard)?;
        let (memories, tiers) = memories(resolved)?;
        let (mut executors, clock) = match resolved.device.simulated {
            Some(_) => simulations(flags, resolved, model, tokenizer)?,
            None => hand_processes(interpreter, resolved, &arena, memories, site.as_ref())?,
        };
        // The checks of the flags allow `--record-steps` with a single replica only.
        if let Some(file) = &flags.run.record_steps
            && let Some(executor) = executors.pop()
        {
            let steps =
                File::create(file).with_context(|| format!("--record-steps {}", file.display()))?;
            executors.push(Box::new(Recorder::new(executor, steps)?));
        }
        let (on_exit, ended) = oneshot::channel();
        let on_exit = move || {
            // If the server ends first, there is no receiver.
            let _ = on_exit.send(());
        };
        let member = |executor| Member {
            config: resolved.engine.clone(),
            executor,
            replicas: (0..resolved.device.arrangement.members()).map(|_| sinks.replica()).collect(),
        };
        let members = executors.into_iter().map(member).collect();
        let (replicas, threads) = Replicas::start(resolved.replicas, members, clock, on_exit)?;
        Ok((Self { replicas, threads, _placed: placed, arena, tiers }, ended))
    }

    /// Stops the engines and waits until they have ended.
    pub(super) fn stop(self) {
        self.replicas.stop();
        self.threads.into_iter().for_each(EngineThread::join);
    }
}

/// The executors of the rank groups, and the clock that they share.
type Executors = (Vec<Box<dyn Executor>>, Arc<dyn Clock>);

/// Creates the simulated rank groups.
fn simulations(
    flags: &ServeFlags,
    resolved: &Resolved,
    model: &Model,
    tokenizer: &Arc<Tokenizer>,
) -> Result<Executors> {
    let (clock, bus) = (SimClock::real(), Bus::default());
    let members = resolved.device.arrangement.members();
    let save_order = flags.sparse.kv_save_order.unwrap_or_default().into();
    let mut executors: Vec<Box<dyn Executor>> = Vec::new();
    for (group, simulated) in (0..).zip(&resolved.device.simulated_groups) {
        let clock = clock.clone();
        let sim =
            simulate::config(resolved, simulated, model, tokenizer, clock, group, save_order)?;
        let sim = SimConfig { bus: bus.clone(), ..sim };
        executors.push(Box::new(SimExecutor::group(sim, members).0));
    }
    Ok((executors, Arc::new(clock)))
}

/// The memories of the host tiers, one entry per group, and the memories that the server itself
/// reads or writes.
type Memories = (Vec<HostMemories>, Vec<Arc<dyn TierMemory>>);

fn memories(resolved: &Resolved) -> Result<Memories> {
    let arrangement = resolved.device.arrangement;
    let groups = arrangement.groups as usize;
    let tiers = resolved.hand.host_tiers(arrangement.ranks as usize);
    let shared = |memory: HostMemory| -> Arc<dyn TierMemory> { Arc::new(memory) };
    match (resolved.replicas.pd, &resolved.disaggregation) {
        (None, None) => Ok((vec![HostMemories::default(); groups], Vec::new())),
        (Some(_), _) => Ok((HostMemories::lent(groups, tiers)?, Vec::new())),
        (None, Some(Disaggregation::Prefill)) => {
            let memories = HostMemories::lent(groups, tiers)?;
            let tiers = memories.iter().filter_map(HostMemories::tier).map(shared).collect();
            Ok((memories, tiers))
        }
        (None, Some(Disaggregation::Decode(_))) => {
            let received = HostMemory::new()?;
            let memories = HostMemories::lent(groups, tiers)?.into_iter();
            let memories = memories.map(|memories| memories.with_received(&received)).collect();
            Ok((memories, vec![shared(received)]))
        }
    }
}

/// Creates the rank groups of hands, on this machine or at `site`.
fn hand_processes(
    interpreter: &Path,
    resolved: &Resolved,
    arena: &Arena,
    memories: Vec<HostMemories>,
    site: Option<&Arc<dyn Site>>,
) -> Result<Executors> {
    let (program, args) = resolved.choice.program(interpreter);
    if resolved.choice.hand == "torch" && site.is_none() {
        python::check(interpreter)?;
    }
    let mut executors: Vec<Box<dyn Executor>> = Vec::new();
    for (group, memories) in memories.into_iter().enumerate() {
        executors.push(Box::new(HandExecutor::new(HandSpec {
            program: program.clone(),
            args: args.clone(),
            // These variables turn on huge pages on this machine. Another machine sets its own
            // variables.
            env: if site.is_some() { Vec::new() } else { hands::environment() },
            config: resolved.hand.clone(),
            arena: arena.clone(),
            memories,
            ranks: ranks(&resolved.device, group),
            site: site.cloned(),
        })?));
    }
    Ok((executors, Arc::new(SystemClock::default())))
}

/// The ranks of a group. Only its own GPU is visible to a rank, so each rank uses the first visible
/// GPU.
fn ranks(device: &DeviceSettings, group: usize) -> Vec<RankSpec> {
    let count = device.arrangement.ranks as usize;
    let hands = (0..count).map(|rank| group * count + rank);
    // Outposts choose how the ranks of their own hands communicate.
    let together = count > 1 && !device.apart;
    let collectives = if together { Collectives::Machine } else { Collectives::None };
    let is_set = |name: &str| std::env::var_os(name).is_some();
    let interfaces = collectives::environment(&collectives, None, is_set).into_iter();
    let interfaces = interfaces.map(|(name, value)| (name.into(), value.into()));
    let interfaces: Vec<(OsString, OsString)> = interfaces.collect();
    let gpu = |hand: usize| device.gpus.get(hand).map(|gpu| (gpus::VISIBLE.into(), gpu.into()));
    let rank = |hand: usize| RankSpec {
        env: gpu(hand).into_iter().chain(interfaces.iter().cloned()).collect(),
        cpus: device.cpu_affinity.hands.get(hand).cloned().unwrap_or_default(),
    };
    hands.map(rank).collect()
}
