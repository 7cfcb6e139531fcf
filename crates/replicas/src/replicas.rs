//! N engines behind the interface of one.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use forebay_balance::{MOST_MOVES, Method, Role};
use forebay_engine::{
    AdapterOrder, BlockHash, BlockObserver, Clock, Engine, EngineConfig, EngineHandle,
    EngineRequest, EngineThread, Executor, Facts, Hooks, Namer, Orphan, OutputSink, Peers,
    Preference, PromptImage, QueuedRequest, Request, RequestId, Stats, Status, SubmitError,
    WaitingPlaces, as_seconds,
};
use parking_lot::Mutex;
use serde::Serialize;

use crate::blocks::{Blocks, News};
use crate::dispatch::{Dispatch, ExpectedBlocks, RequestProfile};
use crate::hooks::{CountingSink, Observer, Observers, OtherReplicas};
use crate::roles::{self, PdConfig};
use crate::status::{ReplicaReport, combined_facts, combined_stats, combined_status};

/// Settings for the distribution of requests over replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ReplicasConfig {
    /// The policy that chooses replicas.
    pub load_balance_method: Method,
    /// 0: loads are exact. Otherwise, for comparison, the loads of replicas are polled at this
    /// interval, and the policy is that of [`forebay_balance::Budget`].
    #[serde(serialize_with = "as_seconds")]
    pub load_watch_interval: Duration,
    /// True if queued requests move to a replica with less work. Ignored if replicas have roles.
    pub queue_moves: bool,
    /// The roles of the replicas; `None`: each replica computes whole requests.
    #[serde(flatten)]
    pub pd: Option<PdConfig>,
    /// True if cached blocks are indexed even if the policy does not need this, for
    /// [`Replicas::cached`].
    #[serde(skip)]
    pub tells_cached: bool,
}

impl Default for ReplicasConfig {
    /// The defaults of the flags.
    fn default() -> Self {
        let (load_balance_method, load_watch_interval) = (Method::default(), Duration::ZERO);
        let (queue_moves, pd, tells_cached) = (true, None, false);
        Self { load_balance_method, load_watch_interval, queue_moves, pd, tells_cached }
    }
}

/// A rank group, and the listeners of the replicas whose plans it executes.
pub struct Member {
    /// The settings of each replica. The limit on queued requests holds for all replicas together.
    /// All replicas share one namer.
    pub config: EngineConfig,
    /// The rank group.
    pub executor: Box<dyn Executor>,
    /// The listeners of each replica: one, or one per rank of a step group.
    pub replicas: Vec<Listeners>,
}

/// The listeners of a replica.
pub struct Listeners {
    /// Receives the replica's outputs.
    pub sink: Box<dyn OutputSink>,
    /// Another observer of the replica's prefix cache, besides the dispatcher.
    pub blocks: Option<Box<dyn BlockObserver>>,
}

pub(crate) struct Shared {
    pub(crate) dispatch: Mutex<Dispatch>,
    /// The index of cached blocks; `None`: it is not needed.
    blocks: Option<Blocks>,
    clock: Arc<dyn Clock>,
    engines: OnceLock<Vec<EngineHandle>>,
    draining: AtomicBool,
    /// Computes the names of blocks, with the number of tokens per block. `None`: requests share no
    /// blocks.
    naming: Option<(Namer, usize)>,
    /// The number of times that a queued request may move.
    most_moves: u8,
    pub(crate) pd: Option<PdConfig>,
    /// Whether each replica holds back prompts that are to be handed on.
    pub(crate) holding: Vec<AtomicBool>,
}

/// The replicas of one brain. Cheap to clone. Its methods never block.
#[derive(Clone)]
pub struct Replicas(Arc<Shared>);

impl Replicas {
    /// Starts an engine thread per member. Replicas are numbered in the order of `members`.
    /// `on_exit` is called when the first engine ends.
    ///
    /// # Errors
    /// A thread could not be created.
    pub fn start(
        config: ReplicasConfig,
        members: Vec<Member>,
        clock: Arc<dyn Clock>,
        on_exit: impl FnOnce() + Send + 'static,
    ) -> io::Result<(Self, Vec<EngineThread>)> {
        let count: usize = members.iter().map(|member| member.replicas.len()).sum();
        let caching = members.iter().all(|member| member.config.prefix_cache);
        let page_size = members.first().map(|member| member.config.page_size);
        let namer = members.first().map(|member| member.config.namer.clone());
        let page_size = page_size.filter(|_| caching);
        let method = config.load_balance_method;
        // With roles, the cached blocks of decode replicas decide where a request goes.
        let looks = matches!(method, Method::TotalTokens | Method::PrefixAware);
        let informed = count > 1 && (looks || config.pd.is_some()) || config.tells_cached;
        let roles = roles::at_start(config.pd, count);
        let mut dispatch = Dispatch::new(roles, method, config.load_watch_interval);
        // With one replica there is no choice, so the only replica always counts as up.
        dispatch.up = vec![count == 1; count];
        let shared = Arc::new(Shared {
            dispatch: Mutex::new(dispatch),
            blocks: page_size.filter(|_| informed).map(|size| Blocks::new(count, size)),
            clock: Arc::clone(&clock),
            engines: OnceLock::new(),
            draining: AtomicBool::new(false),
            naming: namer.zip(page_size.map(|size| size as usize)),
            most_moves: if config.queue_moves && config.pd.is_none() && count > 1 {
                MOST_MOVES
            } else {
                0
            },
            pd: config.pd,
            holding: (0..count).map(|_| AtomicBool::new(false)).collect(),
        });
        let queued = Arc::new(WaitingPlaces::default());
        let on_exit = Arc::new(Mutex::new(Some(on_exit)));
        let (mut engines, mut threads) = (Vec::new(), Vec::new());
        let mut numbers = 0..count;
        for Member { config, executor, replicas } in members {
            let hooks = replicas.into_iter().zip(numbers.by_ref()).map(
                |(Listeners { sink, blocks }, at)| {
                    let observers: Vec<Box<dyn BlockObserver>> = shared
                        .blocks
                        .as_ref()
                        .map(|index| Observer { lane: index.lane.clone(), at })
                        .into_iter()
                        .map(|observer| -> Box<dyn BlockObserver> { Box::new(observer) })
                        .chain(blocks)
                        .collect();
                    let peers = || -> Box<dyn Peers> {
                        Box::new(OtherReplicas { shared: Arc::clone(&shared), at })
                    };
                    let on_exit = Arc::clone(&on_exit);
                    Hooks {
                        sink: Box::new(CountingSink {
                            shared: Arc::clone(&shared),
                            at,
                            inner: sink,
                        }),
                        blocks: Observers::join(observers),
                        peers: (count > 1).then(peers),
                        queued: Arc::clone(&queued),
                        on_exit: Box::new(move || {
                            if let Some(on_exit) = on_exit.lock().take() {
                                on_exit();
                            }
                        }),
                    }
                },
            );
            let hooks = hooks.collect();
            match Engine::start_group(config, executor, Arc::clone(&clock), hooks) {
                Ok((started, thread)) => {
                    engines.extend(started);
                    threads.push(thread);
                }
                Err(error) => {
                    // Engines that are already running may be waiting for the full list.
                    let _ = shared.engines.set(engines);
                    return Err(error);
                }
            }
        }
        // `set` can't fail, because this is the only call.
        let _ = shared.engines.set(engines);
        Ok((Self(shared), threads))
    }

    /// Submits a request to a replica. If this returns `Ok`, exactly one output with `finish`
    /// follows.
    ///
    /// # Errors
    ///
    /// The queue is full, the server is draining, or no replica will ever take the request.
    pub fn submit(&self, mut request: EngineRequest) -> Result<(), SubmitError> {
        let shared = &self.0;
        if shared.draining.load(Ordering::Acquire) {
            return Err(SubmitError::Draining);
        }
        let named = &mut request.request;
        if named.names.is_empty() && named.spec.embeds.is_none() {
            named.names = shared.names_of(named).into();
        }
        let placed = request.preference != Preference::default();
        request.request.past.moves_left = if placed { 0 } else { shared.most_moves };
        let id = request.id();
        let engines = shared.engines();
        let waiting =
            |at: usize| matches!(engines[at].status(), Status::Ready | Status::Recovering(_));
        let preference = request.preference.clone();
        let mut asked = shared.ask(&request.request, &preference);
        asked.borrows = shared.pd.is_some() && request.request.spec.embeds.is_none();
        let fits: Vec<bool> = engines.iter().map(|engine| engine.fits(&request)).collect();
        let mut dispatch = shared.dispatch.lock();
        let ready = |at: usize| dispatch.open(at) && fits[at];
        let anybody = (0..engines.len()).any(ready);
        let later = |at: usize| !dispatch.drained[at] && waiting(at) && fits[at];
        let mut open: Vec<bool> =
            (0..engines.len()).map(|at| if anybody { ready(at) } else { later(at) }).collect();
        let reason = shared.pd.and_then(|pd| {
            roles::narrow(&dispatch.rule(pd.local_tokens), &asked, &request.request, &mut open)
        });
        let Some(at) = shared.send(&mut dispatch, &asked, &open) else {
            drop(dispatch);
            let reason = match self.status() {
                Status::Failed(reason) | Status::Starting(reason) => reason,
                _ => "no replica takes requests".into(),
            };
            return Err(SubmitError::Unavailable(reason));
        };
        if let Some(pd) = shared.pd {
            let reason = dispatch.rule(pd.local_tokens).stays(at, reason);
            request.request.leaves = reason.is_none();
            reason.into_iter().for_each(|reason| dispatch.local[at].count(reason));
        }
        drop(dispatch);
        let lender = shared.lender(&asked, at);
        let entered = engines[at].enter(request);
        entered.and_then(|entrant| shared.enter(at, lender, entrant)).inspect_err(|_| {
            let coming = shared.dispatch.lock().ended(id.0);
            shared.settled(coming);
        })
    }

    /// Aborts a request at whichever replica has it. Its last output has
    /// [`forebay_engine::FinishReason::Abort`], unless the request ended earlier.
    pub fn abort(&self, id: RequestId) {
        // Under the lock, so that a request that moves between replicas is found at one of them.
        let mut dispatch = self.0.dispatch.lock();
        if let Some(aborted) = dispatch.borrowing.get_mut(&id.0) {
            *aborted = true;
        } else if let Some(at) = dispatch.ledger.target(id.0) {
            self.0.engines()[at].abort(id);
        }
    }

    /// Empties the prefix caches of all replicas, except for blocks that requests use. `reply` gets
    /// false if running requests still use some.
    pub fn flush_cache(&self, reply: Box<dyn FnOnce(bool) + Send>) {
        let engines = self.0.engines();
        let waiting = Arc::new(Mutex::new((engines.len(), true, Some(reply))));
        for engine in engines {
            let waiting = Arc::clone(&waiting);
            engine.flush_cache(Box::new(move |flushed| {
                let mut waiting = waiting.lock();
                waiting.0 -= 1;
                waiting.1 &= flushed;
                if waiting.0 == 0 {
                    let all = waiting.1;
                    waiting.2.take().into_iter().for_each(|reply| reply(all));
                }
            }));
        }
    }

    /// Allows later requests at all replicas to use an adapter, or announces that no request will
    /// use it any more.
    pub fn adapter(&self, order: &AdapterOrder) {
        self.0.engines().iter().for_each(|engine| engine.adapter(order.clone()));
    }

    /// Runs `work` on the first replica's engine thread between two steps.
    pub fn run(&self, work: Box<dyn FnOnce() + Send>) {
        if let Some(engine) = self.0.engines().first() {
            engine.run(work);
        }
    }

    /// Refuses new requests from now on.
    pub fn drain(&self) {
        self.0.draining.store(true, Ordering::Release);
        self.0.engines().iter().for_each(EngineHandle::drain);
    }

    /// Stops or resumes sending new requests to a replica. Returns false if no replica has this
    /// number.
    pub fn drain_replica(&self, at: usize, drained: bool) -> bool {
        let mut dispatch = self.0.dispatch.lock();
        let found = dispatch.drained.get_mut(at).map(|place| *place = drained);
        self.0.press(&mut dispatch);
        found.is_some()
    }

    /// Gives a replica another role. Requests already there finish there, or are handed on as
    /// planned. Returns false if no replica has this number, or replicas have no roles.
    pub fn set_role(&self, at: usize, role: Role) -> bool {
        if self.0.pd.is_none() {
            return false;
        }
        let mut dispatch = self.0.dispatch.lock();
        let found = dispatch.roles.get_mut(at).map(|place| *place = role);
        self.0.press(&mut dispatch);
        found.is_some()
    }

    /// True if replicas have roles.
    #[must_use]
    pub fn has_roles(&self) -> bool {
        self.0.pd.is_some()
    }

    /// True if every replica is drained, so that none takes new requests.
    #[must_use]
    pub fn drained(&self) -> bool {
        self.0.dispatch.lock().drained.iter().all(|&drained| drained)
    }

    /// Aborts all requests, stops the hands and ends the threads.
    pub fn stop(&self) {
        self.0.draining.store(true, Ordering::Release);
        self.0.engines().iter().for_each(EngineHandle::stop);
    }

    /// The number of replicas.
    #[must_use]
    pub fn count(&self) -> u32 {
        // The cast is lossless, because the number of replicas was given as a `u32`.
        self.0.engines().len() as u32
    }

    /// The combined state of all replicas. A drained replica counts only if all are drained.
    #[must_use]
    pub fn status(&self) -> Status {
        let drained = self.0.dispatch.lock().drained.clone();
        let all = self.0.engines().iter().map(EngineHandle::status);
        combined_status(all.collect(), &drained)
    }

    /// The statistics of all replicas, added up.
    #[must_use]
    pub fn stats(&self) -> Stats {
        combined_stats(self.0.engines().iter().map(EngineHandle::stats))
    }

    /// Facts that hold for every replica that has been ready; `None` until one has. A replica that
    /// becomes ready later may have less memory; requests that do not fit there go to others.
    #[must_use]
    pub fn facts(&self) -> Option<Facts> {
        combined_facts(self.0.engines().iter().filter_map(EngineHandle::facts))
    }

    /// Returns a report of each replica.
    #[must_use]
    pub fn reports(&self) -> Vec<ReplicaReport> {
        let dispatch = self.0.dispatch.lock();
        let report = |(at, engine): (usize, &EngineHandle)| ReplicaReport {
            status: engine.status(),
            stats: engine.stats(),
            load: dispatch.ledger.loads()[at],
            drained: dispatch.drained[at],
            local: dispatch.local[at],
            role: dispatch.roles[at],
            ahead_tokens: dispatch.pressure.ahead(at),
            holding: self.0.holding[at].load(Ordering::Acquire),
            holds: dispatch.holds[at],
        };
        self.0.engines().iter().enumerate().map(report).collect()
    }

    /// The present time of the engines' clock, in microseconds.
    #[must_use]
    pub fn now_us(&self) -> u64 {
        self.0.clock.now_us()
    }

    /// Returns a handle of each engine.
    #[must_use]
    pub fn handles(&self) -> Vec<EngineHandle> {
        self.0.engines().to_vec()
    }

    /// The largest number of tokens in these leading blocks that one replica has cached; 0 if
    /// cached blocks are not indexed ([`ReplicasConfig::tells_cached`]).
    #[must_use]
    pub fn cached(&self, names: &[BlockHash]) -> u64 {
        let blocks = self.0.blocks.as_ref();
        blocks.and_then(|blocks| blocks.cached(names).into_iter().max()).unwrap_or(0)
    }

    /// Returns the names of a prompt's full blocks for requests with this salt. Empty if requests
    /// share no blocks.
    #[must_use]
    pub fn block_names(&self, salt: u64, prompt: &[i32]) -> Vec<BlockHash> {
        self.0.names(salt, prompt, &[])
    }
}

impl Shared {
    /// True if a replica other than `at` has not failed. Waits until all engines have been started.
    pub(crate) fn others_live(&self, at: usize) -> bool {
        let engines = self.engines.wait().iter().enumerate();
        let mut others = engines.filter(|&(other, _)| other != at);
        others.any(|(_, engine)| !matches!(engine.status(), Status::Failed(_)))
    }

    /// True if queued requests move.
    pub(crate) fn moves(&self) -> bool {
        self.most_moves > 0
    }

    /// Returns the engines; empty until all have been started.
    pub(crate) fn engines(&self) -> &[EngineHandle] {
        self.engines.get().map_or(&[], Vec::as_slice)
    }

    /// Returns the number of full blocks in this many tokens.
    pub(crate) fn blocks_in(&self, tokens: u64) -> usize {
        self.naming.as_ref().map_or(0, |(_, size)| tokens as usize / size)
    }

    fn names(&self, salt: u64, prompt: &[i32], generated: &[i32]) -> Vec<BlockHash> {
        match &self.naming {
            None => Vec::new(),
            Some((namer, size)) if generated.is_empty() => namer.chain(salt, prompt, *size),
            Some((namer, size)) => namer.chain(salt, &[prompt, generated].concat(), *size),
        }
    }

    fn names_of(&self, request: &Request) -> Vec<BlockHash> {
        let Request { cache_salt, prompt, generated, images, .. } = request;
        if images.is_empty() {
            return self.names(*cache_salt, prompt, generated);
        }
        self.naming.as_ref().map_or_else(Vec::new, |(namer, size)| {
            let tokens = [&prompt[..], generated].concat();
            PromptImage::chain(namer, *cache_salt, &tokens, images, *size)
        })
    }

    /// Collects the properties of a request for the choice of a replica, without the dispatch lock.
    fn ask<'a>(&self, request: &Request, preference: &'a Preference) -> RequestProfile<'a> {
        let known = (request.prompt.len() + request.generated.len()) as u64;
        let names = &request.names;
        let mut cached: Vec<u64> = match &self.blocks {
            // Even if all tokens are cached, the last one has to be computed.
            Some(blocks) => blocks.cached(names).into_iter().map(|n| n.min(known - 1)).collect(),
            None => Vec::new(),
        };
        if let (Some(loan), Some((_, size))) = (&request.loan, &self.naming) {
            cached.resize(self.engines().len(), 0);
            for cached in &mut cached {
                let own = self.blocks_in(*cached);
                let rest = names.get(own..).unwrap_or_default();
                let lent = rest.iter().take_while(|&&name| loan.page(name).is_some()).count();
                *cached = (((own + lent) * size) as u64).max(*cached).min(known - 1);
            }
        }
        RequestProfile {
            id: request.id,
            preference,
            tokens: known,
            room: u64::from(request.max_tokens).saturating_sub(request.generated.len() as u64),
            names: if self.blocks.is_some() { Arc::clone(names) } else { Arc::default() },
            cached,
            borrows: false,
        }
    }

    fn send(
        &self,
        dispatch: &mut Dispatch,
        asked: &RequestProfile<'_>,
        open: &[bool],
    ) -> Option<usize> {
        let names = Arc::clone(&asked.names);
        let reported = || {
            let stats = self.engines().iter().map(EngineHandle::stats);
            stats
                .map(|stats| stats.scheduler)
                .map(|stats| (stats.running + stats.waiting) as u64)
                .collect()
        };
        let at = dispatch.send(asked, |at| open[at], self.clock.now_us(), reported)?;
        if let Some(blocks) = self.blocks.as_ref().filter(|_| !names.is_empty()) {
            blocks.tell(News::Sent(at, names));
        }
        Some(at)
    }

    /// Removes the expected blocks of these requests from the index.
    pub(crate) fn settled(&self, coming: impl IntoIterator<Item = ExpectedBlocks>) {
        if let Some(blocks) = &self.blocks {
            for ExpectedBlocks { target, names } in coming {
                blocks.tell(News::Settled(target, names));
            }
        }
    }

    /// True if a request that waits at replica `from` would get its first token sooner at replica
    /// `to`.
    pub(crate) fn move_pays(&self, from: usize, to: usize, request: &QueuedRequest<'_>) -> bool {
        let cached = self.blocks.as_ref().map(|blocks| blocks.cached(request.names));
        let cached = cached.and_then(|cached| cached.get(to).copied()).unwrap_or(0);
        let uncached = u64::from(request.tokens).saturating_sub(cached).max(1);
        self.dispatch.lock().move_pays(from, to, uncached)
    }

    /// Moves a waiting request to replica `to`. Returns the request if `to` takes none now.
    pub(crate) fn take(&self, to: usize, orphan: Orphan) -> Option<Orphan> {
        let fits = self.engines().get(to).is_some_and(|engine| engine.fits(&orphan.request));
        self.hand_to(orphan, false, |at, dispatch| at == to && dispatch.open(at) && fits)
    }

    /// Sends a request that replica `from` has lost to another replica. Returns the request if no
    /// replica takes it.
    pub(crate) fn adopt(&self, from: usize, orphan: Orphan) -> Option<Orphan> {
        let fits: Vec<bool> =
            self.engines().iter().map(|engine| engine.fits(&orphan.request)).collect();
        self.hand_to(orphan, true, |at, dispatch| at != from && dispatch.open(at) && fits[at])
    }

    /// Sends a request to one of the replicas for which `may` is true. Returns the request if no
    /// replica gets it. `routed`: roles also restrict the choice.
    pub(crate) fn hand_to(
        &self,
        mut orphan: Orphan,
        routed: bool,
        may: impl Fn(usize, &Dispatch) -> bool,
    ) -> Option<Orphan> {
        let preference = Preference::default();
        let asked = self.ask(&orphan.request.request, &preference);
        let id = orphan.request.id().0;
        let mut dispatch = self.dispatch.lock();
        let mut open: Vec<bool> = (0..dispatch.up.len()).map(|at| may(at, &dispatch)).collect();
        if !open.contains(&true) {
            return Some(orphan);
        }
        let by_roles = self.pd.filter(|_| routed);
        let reason = by_roles.and_then(|pd| {
            let rule = dispatch.rule(pd.local_tokens);
            roles::narrow(&rule, &asked, &orphan.request.request, &mut open)
        });
        let before = dispatch.moved(id);
        self.settled(before);
        let Some(at) = self.send(&mut dispatch, &asked, &open) else { return Some(orphan) };
        let request = &mut orphan.request.request;
        if let Some(pd) = by_roles {
            request.leaves = dispatch.rule(pd.local_tokens).stays(at, reason).is_none();
        }
        if request.past.handed && !request.leaves {
            dispatch.pressure.handed(id, at, asked.tokens);
            self.note_room(&mut dispatch, at);
        }
        self.press(&mut dispatch);
        // A loan from the chosen replica is useless, because it has the blocks in its own tiers.
        request.loan.take_if(|loan| loan.lender() as usize == at);
        // Under the lock, so that an abort reaches the engine that has the request.
        self.engines()[at].adopt(orphan);
        None
    }
}
