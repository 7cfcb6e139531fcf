//! Checks that in any sequence of events a request generates the same tokens as alone, and ends
//! once.

use forebay_protocol::{Grid, SamplingParams, SlotSpec};
use forebay_scheduler::{
    DecodeGap, Drafts, HostTier, ImageId, Namer, Policy, PromptImage, PromptTail, Request,
    STEP_WORDS, SavePolicy, SchedulerConfig, Sparse, StateCache, Tower,
};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use crate::device::{KILL_TOKEN, NAN_TOKEN, VOCAB};
use crate::drafts::Hostile;
use crate::harness::{Harness, alone, config, pooled, request};

/// The token at each position of an image.
const PAD: i32 = 5;

#[derive(Debug, Clone)]
pub(crate) enum Op {
    Submit(Ask),
    Abort(usize),
    Plan,
    Apply,
    Flush,
    Kill,
    /// Memory runs out. The next worker has the same number of pages.
    Starve,
    /// A copy ends: its index, and whether it succeeded.
    Copied(usize, bool),
    /// The patches of a wanted image are placed in the arena, or cannot be loaded.
    Placed(usize, bool),
    /// The masks of some rows are not ready.
    Late(u8),
    /// A request waits for its mask before the next plan has a row that needs the mask.
    WaitForMask(usize),
    MaskReady(usize),
}

/// A description of a request. Prompts begin with parts of a few shared texts, and end differently.
#[derive(Debug, Clone)]
pub(crate) struct Ask {
    text: i32,
    shared: usize,
    own: Vec<i32>,
    max_tokens: u32,
    /// An upper limit on the number of answer tokens that were generated before the submission.
    resumed: usize,
    stop: Option<i32>,
    priority: i32,
    client: u64,
    /// True for a background request.
    background: bool,
    /// True for a probe.
    probe: bool,
    /// The length of the list of biases, which only makes the request larger.
    lists: usize,
    salt: u64,
    adapter: Option<u32>,
    /// The segment of a pooled request; `None`: it generates. Without pages all requests are
    /// pooled.
    pooled: Option<u32>,
    /// True if masks restrict the sampled tokens.
    masked: bool,
    /// The arena offset of the prompt's embeddings; `None`: the prompt consists of tokens.
    embeds: Option<u32>,
    /// Images: for each the number of tokens before it, its id, its rows and its columns.
    images: Vec<(usize, u128, u32, u32)>,
    /// A request for log-probabilities of the prompt: roughly the first token, the number of likely
    /// tokens with each, and whether the request generates nothing else.
    prompt_logprobs: Option<(u32, u8, bool)>,
}

impl Ask {
    fn request(&self, id: u64, config: &SchedulerConfig) -> Request {
        let encoder = config.pages == 0;
        // A probe is an internal request of the server, and uses the base model.
        let adapter = self.adapter.filter(|_| config.places > 0 && !self.probe);
        // Keys and values of one adapter are not shared with another.
        let cache_salt = self.salt + adapter.map_or(0, |id| u64::from(id + 1) << 8);
        let hot = (config.pages * config.page_size).min(config.most_positions()) as usize;
        let (room, hot) = if encoder { (usize::MAX, usize::MAX) } else { (hot, hot) };
        let all = config.most_positions() as usize;
        let room = if config.sparse.is_some() && self.embeds.is_none() { all } else { room };
        let text = (0..self.shared as i32).map(|at| (at * (self.text + 1) + at / 7) % VOCAB);
        let mut prompt: Vec<i32> = text.chain(self.own.iter().copied()).collect();
        let mut images = vec![];
        if config.tower.is_some() && self.embeds.is_none() && self.pooled.is_none() {
            let mut at = 0;
            for &(before, id, rows, columns) in &self.images {
                at = (at + before).min(prompt.len());
                let grid = Grid { rows, columns };
                let id = ImageId(id << 32 | u128::from(rows << 8 | columns));
                images.push((id, at as u32, grid));
                let pads = std::iter::repeat_n(PAD, grid.positions() as usize);
                prompt.splice(at..at, pads);
                at += grid.positions() as usize;
            }
        }
        if let Some(segment) = self.pooled.or(encoder.then_some(0)) {
            prompt.truncate(hot);
            let (priority, background) = (self.priority, self.background);
            let (client, probe) = (self.client, self.probe);
            let mut pooled = pooled(id, prompt, segment);
            pooled.spec.embeds = self.embeds;
            return Request { priority, background, client, probe, cache_salt, adapter, ..pooled };
        }
        let sees = config.tower.is_some() && self.embeds.is_none() && self.pooled.is_none();
        let tail = self.prompt_logprobs.filter(|_| self.embeds.is_none() && !sees);
        let only = tail.is_some_and(|(first, _, only)| only && prompt.len() > 1 && first > 0);
        prompt.truncate(hot - usize::from(!only || hot < 2));
        images.retain(|&(_, at, grid)| (at + grid.positions()) as usize <= prompt.len());
        let length = prompt.len() as u32;
        let prompt_logprobs = tail.map(|(first, most, _)| {
            // A first token beyond the end of the prompt means that nothing is reported.
            let first =
                if first == 0 || length == 1 { length + first } else { 1 + first % (length - 1) };
            PromptTail { first, most }
        });
        let only = only && length > 1;
        let max_tokens = if only { 0 } else { self.max_tokens.min(room as u32 - length) };
        let spec = SlotSpec {
            stop_ids: self.stop.into_iter().chain([VOCAB + 3, VOCAB + 5]).collect(),
            sampling: SamplingParams {
                // The fake device has no biases: they only make the request larger.
                logit_bias: vec![(0, 0.0); self.lists].into(),
                ..SamplingParams::default()
            },
            embeds: self.embeds,
            pooling: None,
        };
        let whole = Request {
            spec,
            masked: self.masked,
            prompt_logprobs,
            priority: self.priority,
            background: self.background,
            client: self.client,
            probe: self.probe,
            cache_salt,
            adapter,
            images: PromptImage::place(images),
            ..request(id, prompt, max_tokens)
        };
        if only {
            return whole;
        }
        let mut generated = alone(&whole).0;
        generated.truncate(self.resumed.min(generated.len().saturating_sub(1)));
        Request { generated, ..whole }
    }
}

fn ask(special: &'static [i32]) -> impl Strategy<Value = Ask> {
    let own = if special.is_empty() {
        (0..VOCAB).boxed()
    } else {
        prop_oneof![12 => 0..VOCAB, 1 => prop::sample::select(special)].boxed()
    };
    let image = (0..12_usize, 0..4_u128, 1..4_u32, 1..4_u32);
    (
        0..3_i32,
        0..40_usize,
        prop::collection::vec(own, 1..6),
        (1..24_u32, prop_oneof![3 => Just(0), 1 => 1..24_usize]),
        prop::option::weighted(0.3, 0..VOCAB),
        (
            (-1..2_i32, prop::bool::weighted(0.2)),
            0..3_u64,
            (prop::bool::weighted(0.05), prop::bool::weighted(0.3)),
            prop_oneof![3 => Just(0), 1 => 0..80_usize],
        ),
        (prop_oneof![5 => Just(0_u64), 1 => Just(1)], prop::option::weighted(0.7, 0..5_u32)),
        prop::option::weighted(0.3, 0..4_u32),
        (prop::option::weighted(0.3, 0..3_u32), prop::collection::vec(image, 0..4)),
        prop::option::weighted(0.4, (0..60_u32, 0..4_u8, any::<bool>())),
    )
        .prop_map(
            |(text, shared, own, length, stop, place, salt, pooled, given, prompt_logprobs)| {
                let (embeds, images) = given;
                let (salt, adapter) = salt;
                let (max_tokens, resumed) = length;
                let ((priority, background), client, (probe, masked), lists) = place;
                Ask {
                    text,
                    shared,
                    own,
                    max_tokens,
                    resumed,
                    stop,
                    priority,
                    background,
                    client,
                    probe,
                    masked,
                    lists,
                    salt,
                    adapter,
                    pooled,
                    embeds,
                    images,
                    prompt_logprobs,
                }
            },
        )
}

fn op(special: &'static [i32], kill: u32) -> impl Strategy<Value = Op> {
    let late = prop_oneof![
        4 => any::<u8>().prop_map(Op::Late),
        1 => any::<usize>().prop_map(Op::WaitForMask),
        4 => any::<usize>().prop_map(Op::MaskReady),
    ];
    prop_oneof![
        5 => ask(special).prop_map(Op::Submit),
        1 => any::<usize>().prop_map(Op::Abort),
        14 => Just(Op::Plan),
        13 => Just(Op::Apply),
        1 => Just(Op::Flush),
        kill => Just(Op::Kill),
        kill => Just(Op::Starve),
        9 => (any::<usize>(), prop::bool::weighted(0.9)).prop_map(|(at, fine)| Op::Copied(at, fine)),
        9 => (any::<usize>(), prop::bool::weighted(0.93)).prop_map(|(at, fine)| Op::Placed(at, fine)),
        9 => late,
    ]
}

pub(crate) fn ops(special: &'static [i32], kill: u32) -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(op(special, kill), 1..120)
}

pub(crate) fn hosts() -> impl Strategy<Value = HostTier> {
    let policies =
        [SavePolicy::WriteThrough, SavePolicy::WriteThroughSelective, SavePolicy::WriteBack];
    let policy = prop::sample::select(policies.to_vec());
    (1..40_u32, policy, 1..9_u32, 0..4_u32, any::<bool>()).prop_map(
        |(pages, policy, copies_a_step, prefetch, restore_preempted)| HostTier {
            pages,
            policy,
            copies_a_step,
            prefetch,
            restore_preempted,
        },
    )
}

pub(crate) fn states() -> impl Strategy<Value = StateCache> {
    (0..14_u32, 0..20_u32, 0..20_u32, 1..5_u32).prop_map(|(pages, interval, host_pages, weight)| {
        StateCache { pages, interval, host_pages, weight }
    })
}

fn machines() -> impl Strategy<Value = SchedulerConfig> {
    let pages = prop_oneof![4 => 6..30_u32, 1 => Just(0)];
    let tokens_a_row = prop_oneof![2 => Just(1), 1 => 2..6_u32];
    let host = prop::option::weighted(0.6, hosts());
    let sparse = prop::option::weighted(0.5, (1..4_u32, any::<bool>()));
    let tower = (1..5_u32, 3..8_u32, 1..40_u64, any::<bool>());
    let tower = tower.prop_map(|(layers, pages, budget, whole)| Tower {
        layers,
        pages,
        page_tokens: 4,
        budget,
        whole,
    });
    let tower = prop::option::weighted(0.5, tower);
    let states = prop::option::weighted(0.4, states());
    let drafts = (1..9_u32, any::<bool>()).prop_map(|(most, priced)| Drafts { most, priced });
    let several = (tokens_a_row, prop::option::weighted(0.4, drafts));
    let places = prop_oneof![1 => Just(0), 2 => 1..4_u32];
    let tower = (tower, places);
    let switches =
        (any::<bool>(), any::<bool>(), any::<bool>(), several, host, sparse, tower, states);
    let step_words = prop_oneof![2 => Just(STEP_WORDS), 1 => 0..400_usize];
    (1..7_u32, 0..3_u32, pages, 1..6_u32, 0..24_u32, step_words, switches).prop_map(
        |(max_running, spare, pages, page_size, token_budget, step_words, switches)| {
            let (prefix_cache, fcfs, fair, several, host, sparse, tower, states) = switches;
            let (tower, places) = tower;
            let (tokens_a_row, drafts) = several;
            let sparse = sparse.map(|(row_pages, save_rows)| Sparse { row_pages, save_rows });
            let sparse = sparse.filter(|sparse| {
                let enough = host.is_some_and(|host| host.pages >= 2);
                pages >= sparse.least_pages() && prefix_cache && enough
            });
            let states = states.filter(|_| pages > 0 && sparse.is_none());
            let alone = sparse.is_some() || drafts.is_some() || states.is_some();
            let adapted = tower.is_none() && sparse.is_none() && states.is_none();
            SchedulerConfig {
                slots: max_running + spare,
                max_running,
                pages,
                page_size,
                token_budget,
                prefix_cache,
                namer: Namer::open(),
                block_events: true,
                policy: if fcfs { Policy::Fcfs } else { Policy::Priority },
                fair,
                step_shares: true,
                background_share: 100,
                decode_gap: DecodeGap::Off,
                step_words,
                vector_size: 2,
                tokens_a_row: if alone { 1 } else { tokens_a_row },
                drafts,
                host,
                sparse,
                // No model with a tower has sparse attention.
                tower: tower.filter(|_| pages > 0 && sparse.is_none()),
                // Adapters cannot be used with towers, sparse slots or recurrent layers.
                places: if adapted { places } else { 0 },
                states,
                windows: None,
            }
        },
    )
}

/// Configurations with and without `step_shares`.
pub(crate) fn all_machines() -> impl Strategy<Value = SchedulerConfig> {
    (machines(), any::<bool>())
        .prop_map(|(config, step_shares)| SchedulerConfig { step_shares, ..config })
}

pub(crate) fn run(config: SchedulerConfig, depth: usize, ops: Vec<Op>) -> Harness {
    run_on(Harness::new(config.clone(), depth), &config, ops)
}

pub(crate) fn run_on(mut harness: Harness, config: &SchedulerConfig, ops: Vec<Op>) -> Harness {
    for op in ops {
        let submitted = harness.clients.len();
        match op {
            Op::Submit(ask) => {
                let mut request = ask.request(submitted as u64, config);
                request.proposer = config.drafts.map(|_| Hostile::boxed(&request));
                harness.submit(request);
            }
            Op::Abort(_) if submitted == 0 => {}
            Op::Abort(at) => harness.abort((at % submitted) as u64),
            Op::Plan => _ = harness.plan(),
            Op::Apply => _ = harness.apply(),
            Op::Flush => _ = harness.scheduler.flush_cache(),
            Op::Kill => _ = harness.reset(),
            Op::Starve => harness.starve(),
            Op::Copied(at, fine) => {
                harness.copier.end(at, fine);
                harness.device.adapters.end(at, fine);
            }
            Op::Placed(at, fine) => harness.place(at, fine),
            Op::Late(bits) => _ = harness.sit_out(bits),
            Op::WaitForMask(at) => harness.wait_for_mask(at),
            Op::MaskReady(at) => harness.mask_ready(Some(at)),
        }
    }
    harness.drain();
    harness
}

/// An event of two replicas that take over each other's requests.
#[derive(Debug, Clone)]
struct PairOp {
    /// True if the event is at the second replica.
    second: bool,
    op: Op,
    /// `Some`: instead of the event, a request that waits at this replica moves to the other one.
    give: Option<usize>,
}

fn run_pair(config: SchedulerConfig, depth: usize, ops: Vec<PairOp>) -> [Harness; 2] {
    let pair = [Harness::new(config.clone(), depth), Harness::new(config.clone(), depth)];
    run_pair_on(pair, &config, ops)
}

fn run_pair_on(mut pair: [Harness; 2], config: &SchedulerConfig, ops: Vec<PairOp>) -> [Harness; 2] {
    let mut submitted = 0;
    for PairOp { second, op, give } in ops {
        let [first, last] = &mut pair;
        let (here, there) = if second { (last, first) } else { (first, last) };
        if let Some(at) = give {
            here.give_one(there, at);
            continue;
        }
        match op {
            Op::Submit(ask) => {
                let mut request = ask.request(submitted, config);
                request.past.moves_left = 2;
                here.submit(request);
                submitted += 1;
            }
            Op::Abort(at) => {
                let id = here.clients.keys().copied().nth(at % here.clients.len().max(1));
                id.into_iter().for_each(|id| here.abort(id));
            }
            Op::Plan => _ = here.plan(),
            Op::Apply => _ = here.apply(),
            Op::Flush => _ = here.scheduler.flush_cache(),
            Op::Kill => {
                here.reset();
                here.move_to(there);
            }
            Op::Starve => here.starve(),
            Op::Copied(at, fine) => {
                here.copier.end(at, fine);
                here.device.adapters.end(at, fine);
            }
            Op::Placed(at, fine) => here.place(at, fine),
            Op::Late(bits) => _ = here.sit_out(bits),
            Op::WaitForMask(at) => here.wait_for_mask(at),
            Op::MaskReady(at) => here.mask_ready(Some(at)),
        }
    }
    for harness in &mut pair {
        harness.drain();
    }
    pair
}

fn pair_ops() -> impl Strategy<Value = Vec<PairOp>> {
    let op = (any::<bool>(), op(&[NAN_TOKEN, KILL_TOKEN], 1));
    let op = op.prop_map(|(second, op)| PairOp { second, op, give: None });
    prop::collection::vec(op, 1..160)
}

/// The same events as [`ops`], plus moves of waiting requests.
fn moving_ops() -> impl Strategy<Value = Vec<PairOp>> {
    let op = (any::<bool>(), op(&[NAN_TOKEN, KILL_TOKEN], 1));
    let op = (op, prop::option::weighted(0.2, any::<usize>()));
    prop::collection::vec(op.prop_map(|((second, op), give)| PairOp { second, op, give }), 1..160)
}

/// The number of random runs with moves: `FOREBAY_MOVES`, or a few.
fn stories_of_moves() -> ProptestConfig {
    let cases = std::env::var("FOREBAY_MOVES").map(|count| count.parse().expect("a number"));
    ProptestConfig::with_cases(cases.unwrap_or(512))
}

proptest! {
    #![proptest_config(stories_of_moves())]

    /// Two replicas give each other waiting requests while workers die. Every request ends once,
    /// with the tokens of an undisturbed run, and moves at most twice.
    #[test]
    fn everybody_ends_as_if_alone_wherever_they_move(
        config in all_machines(), depth in 1..=2_usize, ops in moving_ops(),
    ) {
        run_pair(config, depth, ops);
    }
}

/// No order depends on hashing or on the time: the same calls give the same plans, events and
/// states. The random runs are the same each time. So the printed digest shows whether a change to
/// the scheduler changes any plan:
/// `STORIES=5000 cargo test -p forebay-scheduler same_digest -- --nocapture`.
#[test]
fn the_same_calls_give_the_same_digest() {
    let stories = std::env::var("STORIES").map_or(100, |count| count.parse().expect("a number"));
    let step_shares = std::env::var("STEP_SHARES").is_ok();
    let mut runner = TestRunner::deterministic();
    let story = (machines(), 1..=2_usize, ops(&[NAN_TOKEN], 1), pair_ops());
    let (mut digest, mut steps) = (0_u64, 0);
    for _ in 0..stories {
        let tree = story.new_tree(&mut runner).expect("nothing is filtered");
        let run = || {
            let (config, depth, ops, pair_ops) = tree.current();
            let config = SchedulerConfig { step_shares, ..config };
            let harness = || Harness::new(config.clone(), depth).record();
            let alone = run_on(harness(), &config, ops);
            let [first, second] = run_pair_on([harness(), harness()], &config, pair_ops);
            let steps = [&alone, &first, &second].map(|harness| harness.plan.step());
            ([alone.digest(), first.digest(), second.digest()], steps.iter().sum::<u64>())
        };
        let (digests, run_steps) = run();
        assert_eq!(run().0, digests, "{:?}", tree.current());
        digest = digests.iter().fold(digest, |sum, one| sum.rotate_left(5).wrapping_add(*one));
        steps += run_steps;
    }
    println!("{stories} stories, {steps} steps: {digest:016x}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn everybody_ends_as_if_alone(
        config in all_machines(), depth in 1..=2_usize, ops in ops(&[NAN_TOKEN], 0),
    ) {
        run(config, depth, ops);
    }

    #[test]
    fn everybody_ends_as_if_alone_on_a_hand_that_is_killed(
        config in all_machines(), depth in 1..=2_usize, ops in ops(&[NAN_TOKEN], 1),
    ) {
        run(config, depth, ops);
    }

    #[test]
    fn everybody_ends_as_if_alone_whoever_takes_them_over(
        config in all_machines(), depth in 1..=2_usize, ops in pair_ops(),
    ) {
        run_pair(config, depth, ops);
    }

    /// Only a killer request can kill the worker, so only killers may be poisoned. All killers are,
    /// except after events that end requests in other ways.
    #[test]
    fn only_killers_are_poisoned(
        config in all_machines(), depth in 1..=2_usize, ops in ops(&[KILL_TOKEN], 0),
    ) {
        let asks = ops.clone();
        let harness = run(config.clone(), depth, ops);
        let aborted = asks.iter().any(|op| matches!(op, Op::Abort(_) | Op::Placed(_, false) | Op::Copied(_, false)));
        let asks = asks.iter().filter_map(|op| if let Op::Submit(ask) = op { Some(ask) } else { None });
        for (id, ask) in asks.enumerate() {
            let request = ask.request(id as u64, &config);
            // A request that generates no tokens does not compute the last token of its prompt.
            let only = request.max_tokens == 0 && request.spec.pooling.is_none();
            let computed = &request.prompt[..request.prompt.len() - usize::from(only)];
            let killer = computed.contains(&KILL_TOKEN);
            let (_, end) = harness.ended(id as u64);
            let poisoned = end == Some(None);
            prop_assert!(poisoned == killer || aborted, "{id}: killer {killer}, ended {end:?}");
            prop_assert!(!killer || poisoned);
        }
    }

    /// The pool is so small that one long request fills it, and all requests are long. So
    /// preemption never stops.
    #[test]
    fn a_crowd_in_a_small_pool_gets_through(
        asks in prop::collection::vec(ask(&[]), 4..12), depth in 1..=2_usize, fcfs in any::<bool>(),
        prefix_cache in any::<bool>(), fair in any::<bool>(),
        host in prop::option::of(hosts()),
    ) {
        let policy = if fcfs { Policy::Fcfs } else { Policy::Priority };
        let config = SchedulerConfig { policy, prefix_cache, fair, host, ..config() };
        let ops = asks.into_iter().map(|ask| Op::Submit(Ask { max_tokens: 64, stop: None, pooled: None, ..ask }));
        let harness = run(config, depth, ops.collect());
        prop_assert_eq!(
            harness.scheduler.stats().preemptions,
            harness.clients.values().map(|client| u64::from(client.preemptions)).sum::<u64>()
        );
    }
}
