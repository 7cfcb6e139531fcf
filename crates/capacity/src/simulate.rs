//! Simulates traffic against replicas, event by event.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::mpsc::channel;

use anyhow::{Result, bail};
use forebay_scheduler::{BlockEvent, DecodeGap, Event, HostTier, Sparse, StateCache};
use forebay_sim::{Bus, Profile, SparseModel, Timing};

use crate::args::{PlanArgs, Router, WritePolicy};
use crate::groups::{Groups, Waits};
use crate::handing::HandOver;
use crate::images::ImageMeans;
use crate::pd::{Division, PdSplit};
use crate::replica::Replica;
use crate::router::Routing;
use crate::sparse::SparseOutcome;
use crate::traffic::{Arrival, Traffic};

/// The default ratio of host pages to the device's pages, if sparse decoding or disaggregated
/// prefill needs a host tier and no size is given.
const USUAL_RATIO: f64 = 2.0;

/// The settings of every replica, and the routing of requests.
#[derive(Debug, Clone)]
pub(crate) struct Setup {
    pub(crate) timing: Timing,
    pub(crate) pages: u32,
    pub(crate) page_size: u32,
    pub(crate) max_running: u32,
    pub(crate) token_budget: u32,
    pub(crate) prefix_cache: bool,
    pub(crate) step_shares: bool,
    pub(crate) decode_gap: DecodeGap,
    pub(crate) queue_moves: bool,
    pub(crate) lookahead: u32,
    pub(crate) seed: u64,
    pub(crate) router: Router,
    pub(crate) host: Option<HostTier>,
    pub(crate) sparse: Option<Sparse>,
    pub(crate) seeing: Option<ImageMeans>,
    pub(crate) states: Option<StateCache>,
    /// The split of the replicas; `None`: each replica does prefill and decode.
    pub(crate) division: Option<Division>,
}

impl Setup {
    /// Creates the setup from flags. `ranks`: the number of ranks of a replica.
    ///
    /// # Errors
    /// The host tier is given in bytes, but the profile does not have the size of a page, or the
    /// tier is smaller than a page. Sparse decoding is requested for a model without sparse
    /// attention, or for a device that is too small.
    pub(crate) fn new(args: &PlanArgs, profile: &Profile, ranks: u32) -> Result<Self> {
        let sparse = args.sparse.resolve(profile, args.page_size)?;
        let bytes = profile.page_bytes(args.page_size, sparse.is_some());
        let page_bytes = bytes.all();
        let needs_host = sparse.is_some() || args.pd.pd.is_some();
        let usual = (needs_host && args.hicache_size.is_none()).then_some(USUAL_RATIO);
        let ratio = args.hicache_ratio.or(usual);
        let pages = match ratio.filter(|_| sparse.is_some() && args.max_total_tokens.is_none()) {
            Some(ratio) => profile.sparse_page_count(args.page_size, ratio),
            None => profile.page_count(args.page_size, args.max_total_tokens),
        };
        let state_pages = profile.states.pages;
        let ratio = match (ratio, args.hicache_size) {
            (Some(ratio), _) => ratio,
            (None, Some(_)) if page_bytes == 0 => bail!(
                "profile {} does not say what a token's keys and values take (kv.main_bytes_token): use --hicache-ratio",
                profile.name
            ),
            (None, Some(gb)) => {
                profile.host_ratio((gb * 1e9) as u64, [pages, state_pages], args.page_size)
            }
            (None, None) => 0.0,
        };
        let [host_pages, host_state_pages] =
            [pages, state_pages].map(|pages| (ratio * f64::from(pages)) as u32);
        let wanted = args.hicache_ratio.or(args.hicache_size).is_some_and(|size| size > 0.0);
        if wanted && host_pages == 0 {
            bail!("the host tier holds no page");
        }
        if args.pd.pd.is_some() {
            let refused = [
                (sparse.is_some(), "--enable-hisparse has host pages of its own"),
                (profile.states.bytes > 0, "the simulation lends no recurrent states"),
                (host_pages == 0, "it needs a host tier"),
                (
                    args.hicache_write_policy != WritePolicy::WriteThrough,
                    "--hicache-write-policy has to be write_through: what is not saved is not lent",
                ),
            ];
            if let Some((_, why)) = refused.into_iter().find(|(given, _)| *given) {
                bail!("--pd: {why}");
            }
        }
        if host_pages > 0 && args.disable_radix_cache {
            bail!(
                "a host tier keeps blocks of the prefix cache: it goes without --disable-radix-cache"
            );
        }
        let host = (host_pages > 0).then_some(HostTier {
            pages: host_pages,
            policy: args.hicache_write_policy.into(),
            copies_a_step: HostTier::usual_copies(args.chunked_prefill_size, args.page_size),
            prefetch: HostTier::PREFETCH,
            restore_preempted: true,
        });
        if let Some(sparse) = sparse {
            let least = sparse.least_pages();
            if host.is_none() {
                bail!("--enable-hisparse needs a host tier: --hicache-ratio above 0");
            }
            if pages < least {
                bail!("--enable-hisparse: the device has {pages} pages, and needs {least}");
            }
        }
        let miss_rows = args.sparse.miss_rows.map_or(profile.sparse.miss_rows, f64::from);
        let timing = Timing {
            model: profile.time,
            copy: profile.copy,
            bytes,
            sparse: SparseModel { miss_rows, ..profile.sparse },
            states: profile.states,
            save_order: args.sparse.kv_save_order.into(),
            ranks,
        };
        Ok(Self {
            timing,
            host,
            sparse,
            pages,
            page_size: args.page_size,
            max_running: args.max_running_requests,
            token_budget: args.chunked_prefill_size,
            prefix_cache: !args.disable_radix_cache,
            step_shares: !args.shares.disable_step_shares,
            decode_gap: args.shares.decode_gap_ms,
            queue_moves: !args.moves.disable_queue_moves,
            lookahead: args.lookahead,
            seed: args.seed,
            router: args.router,
            seeing: None,
            states: (profile.states.bytes > 0).then_some(StateCache {
                pages: profile.states.pages,
                interval: StateCache::INTERVAL,
                host_pages: host_state_pages,
                weight: StateCache::weight_of(profile.states.bytes, page_bytes),
            }),
            division: None,
        })
    }

    /// True if queued requests move between replicas.
    pub(crate) fn moves(&self) -> bool {
        self.queue_moves && self.division.is_none()
    }

    /// The bus of each of `replicas` replicas. Replicas on one machine share a bus.
    fn buses(&self, replicas: u32) -> Vec<Bus> {
        let Timing { copy, ranks, .. } = self.timing;
        let of_machine = copy.bus_devices.map_or(replicas, |devices| devices / ranks.max(1)).max(1);
        let machines = (0..replicas.div_ceil(of_machine)).map(|_| Bus::default());
        let machines: Vec<Bus> = machines.collect();
        (0..replicas).map(|at| machines[(at / of_machine) as usize].clone()).collect()
    }

    /// Host pages per page of the device.
    pub(crate) fn host_ratio(&self) -> f64 {
        f64::from(self.host.map_or(0, |host| host.pages)) / f64::from(self.pages)
    }

    /// True if a request fits in the KV pool of a replica. With sparse decoding, only the prompt
    /// must fit on the device, and all positions in the host tier.
    pub(crate) fn holds(&self, arrival: &Arrival) -> bool {
        let pages = match (self.sparse, self.host) {
            (Some(_), Some(host)) => host.pages,
            _ => self.pages,
        };
        let room = |pages: u32| u64::from(pages) * u64::from(self.page_size);
        let (input, output) = (u64::from(arrival.input), u64::from(arrival.output));
        input + output <= room(pages) && input < room(self.pages) + u64::from(self.sparse.is_none())
    }
}

/// The course of a request. Times are in microseconds since the first arrival.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Life {
    pub(crate) arrived_us: u64,
    pub(crate) first_us: u64,
    pub(crate) last_us: u64,
    /// The number of generated tokens.
    pub(crate) tokens: u32,
    /// The number of terminal events; 0: the request was refused, because it does not fit in the KV
    /// pool even alone.
    pub(crate) ends: u32,
    /// The time of the second token.
    pub(crate) second_us: u64,
    /// True if the request was handed on to a decode replica.
    pub(crate) handed: bool,
}

/// The totals of disaggregated prefill in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PdRun {
    pub(crate) split: PdSplit,
    pub(crate) handed: u64,
    pub(crate) lent_tokens: u64,
    pub(crate) holds: u64,
    /// Microseconds for which all prefill replicas computed.
    pub(crate) prefill_busy_us: u64,
}

/// The course of all requests, and the totals of a run.
#[derive(Debug, Clone, Default)]
pub(crate) struct Run {
    pub(crate) replicas: u32,
    /// The course of each request, in order of arrival.
    pub(crate) lives: Vec<Life>,
    /// Microseconds from the first arrival to the end of the last request.
    pub(crate) makespan_us: u64,
    pub(crate) busy_us: u64,
    pub(crate) steps: u64,
    pub(crate) prompt_tokens: u64,
    /// Prompt tokens that were found in the cache, on the device or in the host tier.
    pub(crate) cached_tokens: u64,
    /// The number of cached tokens that were found in the host tier.
    pub(crate) host_tokens: u64,
    pub(crate) preemptions: u64,
    /// The number of moves of queued requests between replicas.
    pub(crate) moves: u64,
    /// The largest number of simultaneously waiting requests at one replica.
    pub(crate) queue_peak: usize,
    /// The largest number of simultaneously running requests on one replica.
    pub(crate) running_peak: usize,
    /// Microseconds between consecutive tokens of a request, in ascending order.
    pub(crate) itl_us: Vec<u32>,
    pub(crate) sparse: SparseOutcome,
    /// The prompt tokens that were computed while requests waited.
    pub(crate) waits: Waits,
    pub(crate) pd: Option<PdRun>,
}

/// The kind of a replica's event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Turn {
    /// The oldest step ends.
    Step,
    /// The next image is ready.
    Image,
}

/// The replicas, and the times of their next events.
pub(crate) struct Simulation {
    pub(crate) replicas: Vec<Replica>,
    pub(crate) routing: Routing,
    /// A queue of events, earliest first: ends of the oldest steps, and of the preparation of
    /// images.
    turns: BinaryHeap<Reverse<(u64, usize, Turn)>>,
    pub(crate) lives: Vec<Life>,
    itl_us: Vec<u32>,
    /// A buffer for block events, which is empty between calls. It is kept to reuse its memory.
    blocks: Vec<BlockEvent>,
    waits: Waits,
    queue_moves: bool,
    moves: u64,
    /// The state of disaggregated prefill; `None`: no request leaves its replica.
    pub(crate) handing: Option<HandOver>,
}

/// Runs the traffic against `replicas` replicas. The same arguments always give the same run.
pub(crate) fn run(setup: &Setup, traffic: &Traffic, replicas: u32) -> Run {
    let (sender, returned) = channel();
    let buses = (0..).zip(setup.buses(replicas));
    let replica = |(index, bus)| Replica::new(setup, index, bus, sender.clone());
    let mut simulation = Simulation {
        replicas: buses.map(replica).collect(),
        routing: Routing::new(setup.router, replicas, setup.page_size, setup.division),
        turns: BinaryHeap::new(),
        lives: Vec::with_capacity(traffic.arrivals.len()),
        itl_us: Vec::new(),
        blocks: Vec::new(),
        waits: Waits::new(Groups::new(traffic), replicas),
        queue_moves: setup.moves(),
        moves: 0,
        handing: setup.division.map(|division| HandOver::new(division, replicas, returned)),
    };
    for (id, arrival) in traffic.arrivals.iter().enumerate() {
        simulation.until(arrival.at_us);
        simulation.lives.push(Life { arrived_us: arrival.at_us, ..Life::default() });
        if setup.holds(arrival) {
            let id = id as u64;
            let route = simulation.routing.route(id, arrival);
            let at = route.at;
            simulation.waits.arrived(id, at);
            let loan = simulation.borrow(&route);
            simulation.replicas[at].submit(id, arrival, route, loan);
            simulation.feed(at, arrival.at_us);
            simulation.settle(arrival.at_us);
            simulation.move_queued(arrival.at_us);
        }
    }
    simulation.until(u64::MAX);
    simulation.finish(replicas, setup.page_size)
}

impl Simulation {
    /// Advances time to `to_us`. A step that ends exactly then is completed before a request that
    /// arrives then is handled.
    fn until(&mut self, to_us: u64) {
        while let Some(&Reverse((now_us, at, turn))) = self.turns.peek() {
            if now_us > to_us {
                return;
            }
            self.turns.pop();
            match turn {
                Turn::Step => {
                    self.replicas[at].end_step();
                    self.note_room(at);
                    self.take_events(at, now_us);
                    self.feed_and_wait(at, now_us);
                }
                Turn::Image => {
                    self.replicas[at].image_is_ready();
                    self.feed(at, now_us);
                }
            }
            self.settle(now_us);
            self.move_queued(now_us);
        }
    }

    /// Moves waiting requests while the loads of two replicas differ enough.
    fn move_queued(&mut self, now_us: u64) {
        while self.queue_moves
            && let Some((from, to)) = self.routing.drifted()
        {
            let routing = &mut self.routing;
            let given = self.replicas[from].give(|request| routing.moves(from, to, request));
            let Some(request) = given else { return };
            self.moves += 1;
            self.waits.arrived(request.id, to);
            self.replicas[to].take(request);
            self.feed(to, now_us);
        }
    }

    /// Lets a replica plan, after a request has arrived or an image is ready.
    pub(crate) fn feed(&mut self, at: usize, now_us: u64) {
        if self.replicas[at].ends_us().is_some() {
            // The end of the replica's oldest step is already in the queue of events.
            self.replicas[at].feed(now_us);
            self.take_events(at, now_us);
        } else {
            self.feed_and_wait(at, now_us);
        }
    }

    fn feed_and_wait(&mut self, at: usize, now_us: u64) {
        self.replicas[at].feed(now_us);
        self.take_events(at, now_us);
        if let Some(ends_us) = self.replicas[at].ends_us() {
            self.turns.push(Reverse((ends_us, at, Turn::Step)));
        }
    }

    fn take_events(&mut self, at: usize, now_us: u64) {
        let replica = &mut self.replicas[at];
        let (mut ended, mut wanted) = (0, Vec::new());
        for event in replica.events() {
            match event {
                Event::Token { id, .. } => {
                    let life = &mut self.lives[id as usize];
                    life.tokens += 1;
                    if life.tokens > 1 {
                        let gap = now_us - life.last_us;
                        self.itl_us.push(u32::try_from(gap).unwrap_or(u32::MAX));
                    }
                    life.last_us = now_us;
                    match life.tokens {
                        1 => {
                            life.first_us = now_us;
                            self.routing.first_token(id);
                            self.waits.first_token(id, at);
                        }
                        2 => {
                            life.second_us = now_us;
                            // On its second replica, the request counts as generating from now on.
                            self.routing.first_token(id);
                        }
                        _ => {}
                    }
                }
                Event::Finished { id, .. } => {
                    self.lives[id as usize].ends += 1;
                    self.routing.ended(id);
                    ended += 1;
                }
                Event::ImageWanted { image, .. } => wanted.push(image),
                Event::Prefilled { id, tokens } => self.waits.prefilled(id, at, tokens),
                Event::Left { id } => {
                    self.handing.iter_mut().for_each(|handing| handing.left(at, id));
                }
                Event::Admitted { id, .. } => {
                    self.handing.iter_mut().for_each(|handing| handing.pressure.admitted(id));
                }
                Event::Arrived { .. }
                | Event::Pooled { .. }
                | Event::ImageRead { .. }
                | Event::PromptLogprobs { .. }
                | Event::Predicted { .. }
                | Event::Preempted { .. } => {}
            }
        }
        replica.alive -= ended;
        for image in wanted {
            let ready_us = replica.prepare(image, now_us);
            self.turns.push(Reverse((ready_us, at, Turn::Image)));
        }
        replica.take_block_events(&mut self.blocks);
        self.routing.changed(at, &mut self.blocks);
    }

    fn finish(self, replicas: u32, page_size: u32) -> Run {
        let makespan_us = self.lives.iter().map(|life| life.last_us).max().unwrap_or(0);
        let mut itl_us = self.itl_us;
        itl_us.sort_unstable();
        let (lives, waits, moves) = (self.lives, self.waits, self.moves);
        let mut run = Run { replicas, makespan_us, lives, itl_us, waits, moves, ..Run::default() };
        for replica in &self.replicas {
            debug_assert_eq!(replica.alive, 0, "every request ends");
            let stats = replica.stats();
            run.busy_us += replica.busy_us;
            run.steps += stats.steps;
            run.prompt_tokens += stats.prefix_queries;
            run.cached_tokens += stats.prefix_hits + stats.host_hits;
            run.host_tokens += stats.host_hits;
            run.preemptions += stats.preemptions;
            run.running_peak = run.running_peak.max(replica.running_peak);
            run.sparse.add(&stats.sparse);
            run.queue_peak = run.queue_peak.max(replica.queue_peak);
        }
        run.pd = self.handing.map(|handing| {
            let split = handing.split(replicas);
            let prefill = self.replicas.iter().take(split.prefill as usize);
            PdRun {
                split,
                handed: handing.handed,
                lent_tokens: handing.lent_blocks * u64::from(page_size),
                holds: handing.holds,
                prefill_busy_us: prefill.map(|replica| replica.busy_us).sum(),
            }
        });
        run
    }
}
