//! Compares the simulation with manual calculations and with the real engine, and checks properties
//! that hold for any traffic.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use clap::Parser;
use forebay_engine::{
    Clock, Engine, EngineConfig, EngineRequest, Hooks, Output, OutputSink, Request, Status,
};
use forebay_protocol::Grid;
use forebay_scheduler::{DecodeGap, HostTier, ImageId, PromptImage, SavePolicy, Sparse, Tower};
use forebay_sim::{
    CopyModel, DeviceModel, PageBytes, Profile, SaveOrder, SimClock, SimConfig, SimExecutor,
    SimText, SparseModel, Timing,
};
use proptest::prelude::*;

use crate::args::Router;
use crate::images::{ImageArgs, ImageMeans};
use crate::simulate::{Life, Run, Setup, run};
use crate::traffic::{Arrival, Traffic};

pub(crate) const MODEL: DeviceModel = DeviceModel {
    step_us: 1000.0,
    row_us: 10.0,
    token_us: 5.0,
    context_us: 0.1,
    ..DeviceModel::INSTANT
};

pub(crate) fn setup(model: DeviceModel) -> Setup {
    Setup {
        timing: Timing { model, ..Timing::default() },
        pages: 400,
        page_size: 16,
        max_running: 8,
        token_budget: 256,
        prefix_cache: true,
        step_shares: true,
        decode_gap: DecodeGap::Off,
        queue_moves: true,
        lookahead: 1,
        seed: 3,
        router: Router::RoundRobin,
        host: None,
        sparse: None,
        seeing: None,
        states: None,
        division: None,
    }
}

pub(crate) fn arrival(at_us: u64, input: u32, output: u32, blocks: &[u32]) -> Arrival {
    Arrival { at_us, input, output, blocks: blocks.to_vec(), images: Arc::default(), client: 0 }
}

#[test]
fn two_requests_take_what_they_take_by_hand() {
    let model = DeviceModel { step_us: 1000.0, token_us: 10.0, ..DeviceModel::INSTANT };
    let arrivals = vec![arrival(0, 100, 3, &[0]), arrival(500, 60, 2, &[1])];
    let traffic = Traffic { arrivals };
    for (lookahead, expected) in [
        // Without lookahead: prefill of 100 tokens until 2000. Then a step of 61 tokens until 3610:
        // one decode row, and the prefill of 60 tokens of the other request. Then two decode rows
        // until 4630. The first request then has three tokens, the second two.
        (0, [(2000, 4630), (3610, 4630)]),
        // The second step is planned before the second request arrives: it has one row, and takes
        // until 3010. A step of 61 tokens follows, and completes the first request at 4620. The
        // second request's last row is computed by 5630.
        (1, [(2000, 4620), (4620, 5630)]),
    ] {
        let setup = Setup { lookahead, ..setup(model) };
        let run = run(&setup, &traffic, 1);
        let times: Vec<(u64, u64)> = run.lives.iter().map(|l| (l.first_us, l.last_us)).collect();
        assert_eq!(times, expected, "lookahead {lookahead}");
        assert_eq!(run.busy_us, run.makespan_us, "the device never waits");
    }
}

#[test]
fn equal_beginnings_are_computed_once() {
    let arrivals = vec![arrival(0, 600, 2, &[0, 1]), arrival(1_000_000, 700, 2, &[0, 2])];
    let traffic = Traffic { arrivals };
    let shared = run(&setup(MODEL), &traffic, 1);
    assert_eq!((shared.prompt_tokens, shared.cached_tokens), (1300, 512));
    let apart = run(&setup(MODEL), &traffic, 2);
    assert_eq!(apart.cached_tokens, 0, "each replica has a cache of its own");
    let aware = Setup { router: Router::PrefixAware, ..setup(MODEL) };
    assert_eq!(run(&aware, &traffic, 2).cached_tokens, 512);
    let off = Setup { prefix_cache: false, ..setup(MODEL) };
    assert_eq!(run(&off, &traffic, 1).cached_tokens, 0);
}

/// A request whose prompt has an image of 2x2 positions after its first two tokens.
fn seeing(at_us: u64, blocks: &[u32], image: u128) -> Arrival {
    let grid = Grid { rows: 2, columns: 2 };
    let images = PromptImage::place([(ImageId(image), 2, grid)]);
    Arrival { images, ..arrival(at_us, 20, 1, blocks) }
}

#[test]
fn images_are_prepared_and_read_before_the_rows_behind_them() {
    let model = DeviceModel { step_us: 1000.0, tower_us: 10.0, ..DeviceModel::INSTANT };
    // A step computes two of the tower's four layers.
    let tower = Tower { layers: 4, pages: 8, page_tokens: 64, budget: 8, whole: false };
    let setup = |threads| Setup {
        seeing: Some(ImageMeans { tower, prepare_us: 5000, threads }),
        lookahead: 0,
        ..setup(model)
    };
    let firsts = |threads, arrivals: &[Arrival]| -> Vec<u64> {
        let run = run(&setup(threads), &Traffic { arrivals: arrivals.to_vec() }, 1);
        assert!(run.lives.iter().all(|life| (life.tokens, life.ends) == (1, 1)));
        run.lives.iter().map(|life| life.first_us).collect()
    };
    // The two tokens before the image take one step. The image is ready at 5000. Two steps of 1000
    // + 10 * 4 * 2 encode it, and the second step also computes the prompt's rows.
    assert_eq!(firsts(1, &[seeing(0, &[0], 7)]), [7160]);
    // A later request with the same image needs neither preparation nor the vision tower, even if
    // other text precedes the image.
    assert_eq!(firsts(1, &[seeing(0, &[0], 7), seeing(20_000, &[1], 7)]), [7160, 21_000]);
    // Two images take twice as long on one thread; on two threads they take as long as one image.
    let two = [seeing(0, &[0], 7), seeing(0, &[1], 8)];
    assert_eq!(firsts(1, &two), [7160, 12_160]);
    assert_eq!(firsts(2, &two), [7160, 9320]);
}

#[test]
fn images_need_a_tower_and_room() {
    let args = |line: &str| -> ImageArgs { Shell::parse_from(line.split(' ')).images };
    let traffic = Traffic { arrivals: vec![seeing(0, &[0], 7)] };
    let without = Traffic { arrivals: vec![arrival(0, 20, 1, &[0])] };
    let mut profile = Profile::find("h100-llama-3.1-8b").expect("a profile");
    let told = |args: &ImageArgs, profile: &Profile| {
        args.resolve(profile, &traffic).err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert!(args("plan").resolve(&profile, &without).expect("none").is_none());
    assert!(told(&args("plan"), &profile).contains("time.tower_us"));
    profile.time.tower_us = 0.5;
    let seeing = args("plan --intake-threads 3").resolve(&profile, &traffic).expect("fine");
    let ImageMeans { tower, prepare_us, threads } = seeing.expect("images");
    assert_eq!((tower.pages, tower.budget, prepare_us, threads), (128, 10_000, 20_000, 3));
    assert_eq!(told(&args("plan --image-pool-tokens 3"), &profile), "");
    let large =
        Traffic { arrivals: vec![Arrival { images: large_image(), ..arrival(0, 200, 1, &[0]) }] };
    let error =
        args("plan --image-pool-tokens 64").resolve(&profile, &large).expect_err("too large");
    assert!(error.to_string().contains("--image-pool-tokens"), "{error}");
}

fn large_image() -> Arc<[PromptImage]> {
    PromptImage::place([(ImageId(1), 0, Grid { rows: 10, columns: 10 })])
}

/// A command line with only the image flags.
#[derive(Parser)]
struct Shell {
    #[command(flatten)]
    images: ImageArgs,
}

#[test]
fn a_host_tier_gives_back_what_the_device_gave_up() {
    // Two conversations of 2048 tokens each alternate on a device that has room for only one.
    let blocks = |who: u32| (0..4).map(|at| who * 100 + at).collect::<Vec<u32>>();
    let turns = (0..8).map(|turn| arrival(u64::from(turn) * 3_000_000, 2048, 4, &blocks(turn % 2)));
    let traffic = Traffic { arrivals: turns.collect() };
    let device = Setup { pages: 150, ..setup(MODEL) };
    let cached = |pages: u32, gbps: f64| {
        let host = HostTier {
            pages,
            policy: SavePolicy::WriteThrough,
            copies_a_step: 64,
            prefetch: 0,
            restore_preempted: true,
        };
        let copy = CopyModel { restore_gbps: Some(gbps), ..CopyModel::default() };
        let bytes = PageBytes { main: 1_000_000, ..PageBytes::default() };
        let timing = Timing { copy, bytes, ..device.timing };
        let setup = Setup { host: Some(host), timing, ..device.clone() };
        run(&setup, &traffic, 1)
    };
    let without = run(&device, &traffic, 1);
    assert!(without.cached_tokens < 6 * 30 * 16, "each conversation evicts most of the other");
    let with = cached(300, 10.0);
    assert_eq!(with.cached_tokens, 6 * 127 * 16, "all turns but the first find everything");
    assert_eq!(with.cached_tokens - with.host_tokens, without.cached_tokens);
    assert!(with.lives[7].first_us < without.lives[7].first_us);
    let slow = cached(300, 0.001);
    assert!(
        slow.host_tokens < with.host_tokens,
        "restores that are slower than computing are declined"
    );
    assert!(cached(100, 10.0).host_tokens < with.host_tokens, "a small tier keeps less");
}

/// Long prompts and answers, on a device that has room for five dense or many sparse requests.
fn sparse_setup() -> (Setup, Traffic) {
    let host = HostTier {
        pages: 2000,
        policy: SavePolicy::WriteThrough,
        copies_a_step: 64,
        prefetch: 0,
        restore_preempted: true,
    };
    let sparse = SparseModel { top_k: 32, miss_rows: 4.0, layers: 2, ..SparseModel::default() };
    let timing = Timing { sparse, ..setup(MODEL).timing };
    let setup = Setup { pages: 250, max_running: 64, host: Some(host), timing, ..setup(MODEL) };
    let arrivals = (0..40).map(|who| arrival(0, 512, 288, &[who])).collect();
    (setup, Traffic { arrivals })
}

#[test]
fn sparse_requests_run_beside_many_others() {
    let (dense, traffic) = sparse_setup();
    let sparse = Some(Sparse { row_pages: 4, save_rows: false });
    let without = run(&dense, &traffic, 1);
    let with = run(&Setup { sparse, ..dense.clone() }, &traffic, 1);
    for run in [&without, &with] {
        assert!(run.lives.iter().all(|life| (life.ends, life.tokens) == (1, 288)));
    }
    // 250 pages are enough for five dense requests, which grow from 33 to 50 pages. They are enough
    // for 35 sparse requests of 7 pages: 4 for hot rows, and the last 3 pages.
    assert!(without.running_peak <= 7, "{}", without.running_peak);
    assert!(with.running_peak >= 3 * without.running_peak, "{}", with.running_peak);
    assert_eq!(with.preemptions, 0, "the formula says that they fit");
    assert!(with.sparse.conversions > 20 && with.sparse.waited_s == 0.0);
    assert!(with.sparse.missed > 0);
    assert!(with.makespan_us < without.makespan_us);
}

#[test]
fn nothing_waits_for_pages_that_are_saved_behind_the_steps() {
    let (dense, traffic) = sparse_setup();
    let arm = |save_rows, save_order| {
        let copy = CopyModel { latency_us: 50.0, ..CopyModel::default() };
        let timing = Timing { copy, save_order, ..dense.timing };
        let sparse = Some(Sparse { row_pages: 4, save_rows });
        let run = run(&Setup { sparse, timing, ..dense.clone() }, &traffic, 1);
        assert!(run.lives.iter().all(|life| life.ends == 1));
        run.sparse.waited_s
    };
    assert_eq!(arm(false, SaveOrder::Behind), 0.0);
    assert_eq!(arm(true, SaveOrder::Behind), 0.0);
    let (fence, inline) = (arm(true, SaveOrder::Fence), arm(true, SaveOrder::Inline));
    assert!(fence > 0.0 && inline >= fence, "{fence} {inline}");
    assert!(arm(false, SaveOrder::Fence) < fence, "with fewer copies, rows wait less");
}

#[test]
fn what_is_larger_than_the_pool_is_refused() {
    let blocks: Vec<u32> = (0..13).collect();
    let arrivals = vec![arrival(0, 6399, 2, &blocks), arrival(0, 6399, 1, &blocks)];
    let run = run(&setup(MODEL), &Traffic { arrivals }, 1);
    let ends: Vec<u32> = run.lives.iter().map(|life| life.ends).collect();
    assert_eq!(ends, [0, 1]);
}

/// One request every 20 ms, in conversations whose turns share their beginnings.
fn steady(requests: u32) -> Traffic {
    let arrivals = (0..requests).map(|i| {
        let (conversation, turn) = (i % 7, i / 7 % 5);
        let blocks: Vec<u32> = (0..=turn).map(|t| conversation * 5 + t).collect();
        arrival(u64::from(i) * 20_000, turn * 512 + 300, 20 + i % 30, &blocks)
    });
    Traffic { arrivals: arrivals.collect() }
}

#[test]
fn more_replicas_make_it_faster() {
    let traffic = steady(600);
    for router in [Router::RoundRobin, Router::LeastLoaded, Router::PrefixAware] {
        let setup = Setup { router, ..setup(MODEL) };
        let mean_ms = |replicas| {
            let lives = run(&setup, &traffic, replicas).lives;
            let sum: u64 = lives.iter().map(|life| life.last_us - life.arrived_us).sum();
            sum as f64 / lives.len() as f64 / 1000.0
        };
        let means: Vec<f64> = [1, 2, 4, 8].map(mean_ms).to_vec();
        for pair in means.windows(2) {
            assert!(pair[1] < pair[0] * 1.05, "{router:?}: {means:?}");
        }
        assert!(means[0] > 2.0 * means[3], "a single replica is overloaded: {means:?}");
    }
}

pub(crate) fn check(run: &Run, traffic: &Traffic, pool: u64) {
    assert_eq!(run.lives.len(), traffic.arrivals.len());
    for (life, arrival) in run.lives.iter().zip(&traffic.arrivals) {
        if u64::from(arrival.input) + u64::from(arrival.output) > pool {
            assert_eq!(*life, Life { arrived_us: arrival.at_us, ..Life::default() });
            continue;
        }
        assert_eq!(life.ends, 1, "every request ends once");
        assert_eq!(life.tokens, arrival.output);
        assert!(arrival.at_us < life.first_us && life.first_us <= life.last_us);
    }
    assert!(run.busy_us <= run.makespan_us * u64::from(run.replicas));
    assert!(run.cached_tokens <= run.prompt_tokens);
}

pub(crate) fn any_traffic() -> impl Strategy<Value = Traffic> {
    let request = (0..200_000_u64, 1..1500_u32, 1..40_u32, 0..6_u32);
    prop::collection::vec(request, 1..40).prop_map(|mut requests| {
        requests.sort_unstable();
        let arrivals = requests.iter().map(|&(at_us, input, output, family)| {
            let blocks: Vec<u32> = (0..input.div_ceil(512)).map(|b| family * 3 + b).collect();
            arrival(at_us, input, output, &blocks)
        });
        Traffic { arrivals: arrivals.collect() }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_request_ends_once_and_the_same_way_each_time(
        traffic in any_traffic(),
        replicas in 1..5_u32,
        pages in 10..120_u32,
        lookahead in 0..2_u32,
        router in prop::sample::select(vec![
            Router::RoundRobin, Router::LeastLoaded, Router::PrefixAware,
        ]),
    ) {
        let model = DeviceModel { jitter_sigma: 0.1, ..MODEL };
        let setup = Setup { pages, lookahead, router, ..setup(model) };
        let first = run(&setup, &traffic, replicas);
        let pool = u64::from(setup.pages) * u64::from(setup.page_size);
        check(&first, &traffic, pool);
        let second = run(&setup, &traffic, replicas);
        prop_assert_eq!(first.lives, second.lives);
    }
}

/// The TTFT at a percentile of the requests for which `are` holds, in milliseconds.
fn ttft_ms(run: &Run, traffic: &Traffic, percent: usize, are: impl Fn(&Arrival) -> bool) -> u64 {
    let lives = run.lives.iter().zip(&traffic.arrivals).filter(|(_, arrival)| are(arrival));
    let mut all: Vec<u64> = lives.map(|(life, _)| life.first_us - life.arrived_us).collect();
    all.sort_unstable();
    all[(all.len() * percent).div_ceil(100) - 1] / 1000
}

/// Short prompts at 20 per second, and one prompt of 100 000 tokens, on an H100 that is modelled
/// from its data sheet.
#[test]
fn short_prompts_wait_for_no_long_one() {
    let profile = Profile::find("h100-llama-3.1-8b").expect("a profile");
    let traffic = |shorts: u32| {
        let mut next = 0;
        let mut blocks = |input: u32| {
            let first = next;
            next += input.div_ceil(512);
            (first..next).collect::<Vec<u32>>()
        };
        let short = (0..shorts).map(|at| (u64::from(at) * 50_000, 200));
        let mut arrivals: Vec<Arrival> = short
            .chain([(1_010_000, 100_000)])
            .map(|(at_us, input)| arrival(at_us, input, 32, &blocks(input)))
            .collect();
        arrivals.sort_by_key(|arrival| arrival.at_us);
        Traffic { arrivals }
    };
    let run = |step_shares, decode_gap, traffic: &Traffic| {
        let setup = Setup {
            timing: Timing { model: profile.time, ..Timing::default() },
            pages: 26_000,
            max_running: 256,
            token_budget: 1024,
            step_shares,
            decode_gap,
            ..setup(MODEL)
        };
        run(&setup, traffic, 1)
    };
    let (alone, beside) = (traffic(0), traffic(180));
    let short = |arrival: &Arrival| arrival.input == 200;
    let long = |arrival: &Arrival| !short(arrival);
    let unshared = run(false, DecodeGap::Off, &beside);
    assert!(ttft_ms(&unshared, &beside, 50, short) > 2000);
    let before = ttft_ms(&run(true, DecodeGap::Auto, &alone), &alone, 50, long);
    let shared = run(true, DecodeGap::Auto, &beside);
    assert!(ttft_ms(&shared, &beside, 50, short) <= 150);
    assert!(ttft_ms(&shared, &beside, 90, short) <= 300);
    let after = ttft_ms(&shared, &beside, 50, long);
    assert!(10 * after <= 13 * before, "{after} ms, and {before} alone");
}

#[test]
fn queued_requests_move_to_replicas_with_less_to_do() {
    // With round robin, one of the four replicas gets all long prompts.
    let arrivals = (0..200_u32).map(|i| {
        let input = if i % 4 == 0 { 2000 } else { 100 };
        arrival(u64::from(i) * 2000, input, 4, &(i * 4..i * 4 + 4).collect::<Vec<u32>>())
    });
    let traffic = Traffic { arrivals: arrivals.collect() };
    let p99 = |queue_moves| {
        let run = run(&Setup { queue_moves, ..setup(MODEL) }, &traffic, 4);
        assert!(run.lives.iter().all(|life| (life.tokens, life.ends) == (4, 1)));
        assert_eq!(run.moves > 0, queue_moves);
        assert!(run.moves <= 2 * traffic.arrivals.len() as u64);
        ttft_ms(&run, &traffic, 99, |_| true)
    };
    let (moving, staying) = (p99(true), p99(false));
    assert!(13 * moving <= 10 * staying, "{moving} ms, and {staying} without moves");
}

/// A sink that sends each output together with the time.
struct TimedSink {
    clock: SimClock,
    outputs: Sender<(u64, Output)>,
}

impl OutputSink for TimedSink {
    fn deliver(&mut self, outputs: Vec<Output>) {
        for output in outputs {
            // The test may have ended and dropped the receiver.
            let _ = self.outputs.send((self.clock.now_us(), output));
        }
    }
}

/// The times of each request's first and last token in the real engine. Request 0 is planned before
/// the other requests arrive.
fn in_the_engine(setup: &Setup, traffic: &Traffic) -> HashMap<u64, (u64, u64)> {
    let clock = SimClock::virtual_time();
    let (executor, control) = SimExecutor::new(SimConfig {
        clock: clock.clone(),
        timing: setup.timing,
        seed: setup.seed,
        load_us: 0,
        page_count: setup.pages,
        vocab_size: 1 << 30,
        text: SimText::endless(vec![1 << 29]),
        ..SimConfig::default()
    });
    let (sender, outputs) = channel();
    let (handle, _thread) = Engine::start(
        EngineConfig {
            max_running_requests: setup.max_running,
            slots: setup.max_running + setup.max_running.div_ceil(2),
            page_size: setup.page_size,
            mask_threads: 0,
            chunked_prefill_size: setup.token_budget,
            prefix_cache: setup.prefix_cache,
            lookahead: setup.lookahead,
            step_shares: setup.step_shares,
            decode_gap_ms: setup.decode_gap,
            max_queued_requests: 1000,
            context_length: 6000,
            watchdog_timeout: Duration::from_micros(1 << 40),
            load_timeout: Duration::ZERO,
            hand_restarts: 0,
            ..EngineConfig::default()
        },
        Box::new(executor),
        Arc::new(clock.clone()),
        Hooks::new(Box::new(TimedSink { clock, outputs: sender })),
    )
    .expect("thread");
    while handle.status() != Status::Ready {
        std::thread::yield_now();
    }
    control.hold();
    for (id, arrival) in (0..).zip(&traffic.arrivals) {
        let prompt = arrival.prompt().into();
        let request = Request { id, prompt, max_tokens: arrival.output, ..Request::default() };
        let request = EngineRequest { request, ..EngineRequest::default() };
        handle.submit(request).expect("accepted");
        while id == 0 && handle.stats().scheduler.running == 0 {
            std::thread::yield_now();
        }
    }
    control.release();
    let mut times: HashMap<u64, (u64, u64)> = HashMap::new();
    let mut alive = traffic.arrivals.len();
    while alive > 0 {
        let (at_us, output) = outputs.recv_timeout(Duration::from_secs(60)).expect("output");
        if output.token.is_some() {
            let (_, last) = times.entry(output.id.0).or_insert((at_us, at_us));
            *last = at_us;
        }
        alive -= usize::from(output.finish.is_some());
    }
    times
}

#[test]
fn the_real_engine_takes_the_same_time_for_everything() {
    // All requests except the first arrive while the first step is computed, so their exact arrival
    // times do not matter.
    let arrivals = (0..40_u32).map(|i| {
        let blocks: Vec<u32> = (0..=i % 3).map(|b| i % 4 * 3 + b).collect();
        arrival(u64::from(i.min(1)), i % 3 * 512 + 200 + i, 1 + i * 7 % 60, &blocks)
    });
    let traffic = Traffic { arrivals: arrivals.collect() };
    for lookahead in [0, 1] {
        for pages in [130, 400] {
            let model = DeviceModel { jitter_sigma: 0.2, ..MODEL };
            // With lookahead, shares would make the second step depend on which prompts are already
            // waiting when it is planned.
            let step_shares = lookahead == 0;
            let setup = Setup { pages, lookahead, step_shares, ..setup(model) };
            let planned = run(&setup, &traffic, 1);
            let real = in_the_engine(&setup, &traffic);
            for (id, life) in (0..).zip(&planned.lives) {
                let planned = (life.first_us, life.last_us);
                assert_eq!(real[&id], planned, "request {id}, lookahead {lookahead}");
            }
        }
    }
}
