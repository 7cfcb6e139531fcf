//! Measures the CPU time for sending a step to the ranks of a group and receiving their results,
//! for `benchmarks/fan_out.py`: `fan_out PYTHON FAKE_HAND ROWS STEPS RANKS...`.
//!
//! The hands compute nothing. For each number of ranks, prints a line with the median CPU time, in
//! microseconds per step, of the engine's thread: for submitting the plan, and for taking and
//! comparing the results of all ranks.

use std::path::PathBuf;

use forebay_engine::{Executor, Signal};
use forebay_hand::{Arena, HandConfig, HandExecutor, HandSpec, HostMemories, RankSpec};
use forebay_protocol::{Row, StepPlan, Want};
use rustix::time::{ClockId, clock_gettime};

type Failure = Box<dyn std::error::Error>;

/// The number of steps before the measured ones.
const WARM_UP: usize = 50;

/// The CPU time of this thread in microseconds.
fn now_us() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// A step in which `rows` requests decode.
fn plan(step: u64, rows: u32) -> StepPlan {
    let mut plan = StepPlan::default();
    plan.begin(step);
    for slot in 0..rows {
        plan.push_row(Row { slot, start: 1000 + slot, length: 1, want: Want::TOKEN });
    }
    plan
}

/// Returns the next signal that reports a result or that the group is ready.
fn next(executor: &mut HandExecutor) -> Result<Signal, Failure> {
    loop {
        match executor.wait(None) {
            Signal::Progress(_) | Signal::Woken | Signal::TimedOut => {}
            Signal::Died(reason) => return Err(reason.into()),
            signal => return Ok(signal),
        }
    }
}

fn measure(spec: HandSpec, rows: u32, steps: usize) -> Result<(f64, f64), Failure> {
    let mut executor = HandExecutor::new(spec)?;
    executor.start();
    next(&mut executor)?;
    let (mut sending, mut taking) = (Vec::new(), Vec::new());
    for (number, step) in (1..).enumerate().take(WARM_UP + steps) {
        let plans = [plan(step, rows)];
        let begun = now_us();
        executor.submit(&plans);
        let sent = now_us();
        next(&mut executor)?;
        let taken = now_us();
        if number >= WARM_UP {
            sending.push(sent - begun);
            taking.push(taken - sent);
        }
    }
    executor.stop();
    Ok((median(&mut sending), median(&mut taking)))
}

fn main() -> Result<(), Failure> {
    let mut words = std::env::args().skip(1);
    let mut word = || words.next().ok_or("fan_out PYTHON FAKE_HAND ROWS STEPS RANKS...");
    let (python, hand) = (PathBuf::from(word()?), PathBuf::from(word()?));
    let (rows, steps): (u32, usize) = (word()?.parse()?, word()?.parse()?);
    for ranks in words {
        let spec = HandSpec {
            program: python.clone(),
            args: vec![hand.clone().into()],
            env: vec![("FAKE_BEHAVIOUR".into(), "good".into())],
            config: HandConfig { page_size: 16, ..HandConfig::default() },
            arena: Arena::new(1 << 24)?,
            ranks: vec![RankSpec::default(); ranks.parse()?],
            memories: HostMemories::default(),
            site: None,
        };
        let (sending, taking) = measure(spec, rows, steps)?;
        println!("{ranks} {sending:.2} {taking:.2}");
    }
    Ok(())
}
