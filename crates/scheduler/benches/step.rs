//! The CPU time that the scheduler takes for a step with 64 to 4096 running requests.
//! `cargo bench -p forebay-scheduler`.
//!
//! A decode step has one row per running request, so its cost grows with their number. The cost of
//! one row must not grow. Nor may the cost of one change: a request that ends or arrives, or a
//! block that is found. So times are given per row.
//!
//! Compare a group with changes with the group `decode` of the same size, which has none. Use the
//! variant `evicting` of `decode`. There, every page comes from a cached block, as in a replica
//! that has served requests for a while.

use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput};
use forebay_protocol::{ROW_OK, SlotSpec, StepPlan, StepResult};
use forebay_scheduler::{
    DecodeGap, Event, Namer, Policy, Request, STEP_WORDS, Scheduler, SchedulerConfig,
};

const RUNNING: [u32; 4] = [64, 256, 1024, 4096];
const PAGE_SIZE: u32 = 16;
/// The sampled token, which ends no request.
const TOKEN: i32 = 7;
const STOP_ID: i32 = 2;

/// The number of steps after which the replica is rebuilt, so that its requests stay of similar
/// age.
const STEPS: u32 = 512;
/// The number of tokens that a steady request may generate: more than it reaches.
const STEADY_TOKENS: u32 = 4 * STEPS;
/// Pages of a steady request at its longest. It also grows while others are still admitted.
const STEADY_PAGES: u32 = 48;
const SHORT_PROMPT: u32 = 32;
/// Prompt tokens of the requests that fill the cache.
const LONG_PROMPT: i32 = 4096;

/// The number of requests that end, and that arrive, in each step of `churn`.
const CHANGES: u32 = 8;

/// Prompt tokens that an arriving request shares with earlier ones (`SHARED`), and those that it
/// does not share (`OWN`).
const SHARED: u32 = 2048;
const OWN: u32 = 1024;
/// Prompt tokens per step.
const CHUNK: u32 = 512;

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(30)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
        .configure_from_args();
    decode(&mut criterion);
    churn(&mut criterion);
    prefill(&mut criterion);
    criterion.final_summary();
}

/// A scheduler, and a simulated device that is always done at once.
struct Replica {
    scheduler: Scheduler,
    plan: StepPlan,
    result: StepResult,
    events: Vec<Event>,
    submitted: u64,
}

impl Replica {
    /// A replica with room for `running` requests of `pages` pages each, and for requests that
    /// arrive or are retired.
    fn new(running: u32, pages: u32) -> Self {
        let room = running + 4 * CHANGES;
        Self {
            scheduler: Scheduler::new(SchedulerConfig {
                slots: room,
                max_running: room,
                pages: room * pages,
                page_size: PAGE_SIZE,
                token_budget: running + CHUNK,
                prefix_cache: true,
                namer: Namer::open(),
                block_events: false,
                policy: Policy::Fcfs,
                fair: true,
                step_shares: true,
                background_share: 5,
                decode_gap: DecodeGap::Auto,
                step_words: STEP_WORDS,
                vector_size: 0,
                tokens_a_row: 1,
                drafts: None,
                host: None,
                sparse: None,
                tower: None,
                states: None,
                windows: None,
                places: 0,
            }),
            plan: StepPlan::default(),
            result: StepResult::default(),
            events: Vec::new(),
            submitted: 0,
        }
    }

    fn submit(&mut self, prompt: Vec<i32>, max_tokens: u32) {
        self.submitted += 1;
        self.scheduler.submit(Request {
            id: self.submitted,
            prompt: prompt.into(),
            max_tokens,
            spec: SlotSpec { stop_ids: [STOP_ID].into(), ..SlotSpec::default() },
            ..Request::default()
        });
    }

    fn plan(&mut self) {
        self.events.clear();
        assert!(self.scheduler.next_plan(&mut self.plan, &mut self.events), "there is work");
    }

    /// Simulates the device's result of the latest plan. This is not part of the measured time.
    fn compute(&mut self) {
        self.result.step = self.plan.step();
        self.result.row_errors.clear();
        self.result.tokens.clear();
        for row in self.plan.rows() {
            self.result.row_errors.push(ROW_OK);
            self.result.tokens.extend(row.want.samples().then_some(TOKEN));
        }
    }

    fn apply(&mut self) {
        let applied = self.scheduler.apply(&self.result, &mut self.events);
        assert_eq!(applied, Ok(()), "the result fits the plan");
    }

    /// Runs one step of the serial loop; returns the times that planning and applying took.
    fn step(&mut self) -> StepTime {
        let start = Instant::now();
        self.plan();
        let plan = start.elapsed();
        self.compute();
        let start = Instant::now();
        self.apply();
        StepTime { plan, apply: start.elapsed() }
    }
}

#[derive(Clone, Copy)]
struct StepTime {
    plan: Duration,
    apply: Duration,
}

impl StepTime {
    fn both(self) -> Duration {
        self.plan + self.apply
    }
}

/// A prompt that shares no beginning with another. Lengths differ, so that in each step another
/// sixteenth of the requests needs a page.
fn short_prompt(number: u64) -> Vec<i32> {
    let number = number as i32;
    (0..SHORT_PROMPT as i32 + number % PAGE_SIZE as i32).map(|at| (number << 8) + at).collect()
}

/// A replica with `running` requests in decode, none of which ends within `STEPS` steps.
fn decoding(mut replica: Replica, running: u32) -> Replica {
    let before = replica.scheduler.stats().generated_tokens;
    for number in 0..running {
        replica.submit(short_prompt(u64::from(number)), STEADY_TOKENS);
    }
    let settled = before + u64::from(running) * u64::from(PAGE_SIZE);
    while replica.scheduler.stats().generated_tokens < settled {
        replica.step();
    }
    replica
}

/// The same as [`decoding`], with a pool that has no free page.
fn evicting(running: u32) -> Replica {
    let mut replica = Replica::new(running, STEADY_PAGES);
    let mut first = -1;
    while replica.scheduler.stats().pages_free > LONG_PROMPT as usize / PAGE_SIZE as usize {
        replica.submit((0..LONG_PROMPT).map(|at| first - at).collect(), 1);
        first -= LONG_PROMPT;
        while replica.scheduler.stats().waiting + replica.scheduler.stats().running > 0 {
            replica.step();
        }
    }
    decoding(replica, running)
}

/// Calls `step` as often as criterion requests, and returns the total time. Each call runs
/// `steps_a_call` steps. The replica is rebuilt every `STEPS` steps.
fn time_steps(
    calls: u64,
    steps_a_call: u32,
    make: impl Fn() -> Replica,
    mut step: impl FnMut(&mut Replica) -> Duration,
) -> Duration {
    let mut time = Duration::ZERO;
    let mut replica = make();
    let mut left = STEPS;
    for _ in 0..calls {
        if left < steps_a_call {
            replica = make();
            left = STEPS;
        }
        left -= steps_a_call;
        time += step(&mut replica);
        assert_eq!(replica.scheduler.stats().preemptions, 0, "no request lacked pages");
    }
    time
}

/// Measures steps in which no request arrives and none ends. Criterion's throughput counts rows.
fn decode(criterion: &mut Criterion) {
    type Part = fn(StepTime) -> Duration;
    let parts: [(&str, Part); 3] =
        [("plan", |time| time.plan), ("apply", |time| time.apply), ("step", StepTime::both)];
    let mut group = criterion.benchmark_group("decode");
    for running in RUNNING {
        group.throughput(Throughput::Elements(u64::from(running)));
        for (name, part) in parts {
            group.bench_function(BenchmarkId::new(name, running), |bencher| {
                bencher.iter_custom(|steps| {
                    let steady = || decoding(Replica::new(running, STEADY_PAGES), running);
                    time_steps(steps, 1, steady, |replica| part(replica.step()))
                });
            });
        }
        group.bench_function(BenchmarkId::new("evicting", running), |bencher| {
            bencher.iter_custom(|steps| {
                time_steps(steps, 1, || evicting(running), |replica| replica.step().both())
            });
        });
    }
    group.finish();
}

/// In each step `CHANGES` requests arrive and as many end. Each ends after generating
/// `running / CHANGES` tokens. Criterion's throughput counts rows.
fn churn(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("churn");
    for running in RUNNING {
        let lifetime = running / CHANGES;
        let steady = || {
            let pages = (SHORT_PROMPT + lifetime).div_ceil(PAGE_SIZE) + 1;
            let mut replica = Replica::new(running, pages);
            for _ in 0..2 * lifetime {
                arrive(&mut replica, lifetime);
                replica.step();
            }
            replica
        };
        group.throughput(Throughput::Elements(u64::from(running)));
        group.bench_function(BenchmarkId::new("step", running), |bencher| {
            bencher.iter_custom(|steps| {
                time_steps(steps, 1, steady, |replica| {
                    let submit = arrive(replica, lifetime);
                    submit + replica.step().both()
                })
            });
        });
    }
    group.finish();
}

/// Lets `CHANGES` requests arrive; returns the time to submit them.
fn arrive(replica: &mut Replica, lifetime: u32) -> Duration {
    let first = replica.submitted;
    let prompts: Vec<_> = (first..first + u64::from(CHANGES)).map(short_prompt).collect();
    let start = Instant::now();
    for prompt in prompts {
        replica.submit(prompt, lifetime);
    }
    start.elapsed()
}

/// Measures a request that arrives beside the decoding requests, and whose first `SHARED` tokens
/// are cached. The request is prefilled in chunks and ends with its first token. A call runs all
/// `OWN / CHUNK` steps of the request. Criterion's throughput counts the request's blocks, found or
/// computed.
fn prefill(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("prefill");
    let shared: Vec<i32> = (0..SHARED as i32).map(|at| at.reverse_bits()).collect();
    for running in RUNNING {
        let with_shared = || {
            let mut replica = evicting(running);
            replica.submit([shared.as_slice(), &[0]].concat(), 1);
            while replica.scheduler.stats().running > running as usize
                || replica.scheduler.stats().waiting > 0
            {
                replica.step();
            }
            replica
        };
        group.throughput(Throughput::Elements(u64::from((SHARED + OWN) / PAGE_SIZE)));
        group.bench_function(BenchmarkId::new("request", running), |bencher| {
            bencher.iter_custom(|requests| {
                time_steps(requests, OWN / CHUNK, with_shared, |replica| {
                    let number = replica.submitted as i32;
                    let mut prompt = shared.clone();
                    prompt.extend((0..OWN as i32).map(|at| (number << 12) + at));
                    let start = Instant::now();
                    replica.submit(prompt, 1);
                    let submit = start.elapsed();
                    (0..OWN / CHUNK).map(|_| replica.step().both()).sum::<Duration>() + submit
                })
            });
        });
    }
    group.finish();
}
