//! Measures the round trip of a step to a local hand, and to the same hand on an outpost, for
//! `benchmarks/outposts.py`. Its command line is `round_trip PYTHON FAKE_HAND ROWS STEPS`.
//!
//! The hand computes nothing, and the outpost is on the loopback interface. Prints one line for
//! each hand: the median and the 99th percentile in microseconds, from submitting the plan to its
//! result.

use std::net::TcpListener;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use forebay_engine::{Executor, Signal};
use forebay_hand::{
    Arena, HandConfig, HandExecutor, HandSpec, HostMemories, RankProcess, RankSpec, Site,
};
use forebay_outpost::{Credentials, HandOrder, Outposts, WorkSettings, work};
use forebay_protocol::{Row, StepPlan, Want};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The number of steps before the first measured step.
const WARM_UP: usize = 200;

/// A step in which `rows` requests decode.
fn plan(step: u64, rows: u32) -> StepPlan {
    let mut plan = StepPlan::default();
    plan.begin(step);
    for slot in 0..rows {
        plan.push_row(Row { slot, start: 1000 + slot, length: 1, want: Want::TOKEN });
    }
    plan
}

/// Waits for the next signal that is not a progress report.
fn next(executor: &mut HandExecutor) -> Result<Signal, Failure> {
    loop {
        match executor.wait(None) {
            Signal::Progress(_) | Signal::Woken | Signal::TimedOut => {}
            Signal::Died(reason) => return Err(reason.into()),
            signal => return Ok(signal),
        }
    }
}

/// Measures steps, and returns their times in microseconds, sorted.
fn measure(mut executor: HandExecutor, rows: u32, steps: usize) -> Result<Vec<f64>, Failure> {
    executor.start();
    next(&mut executor)?;
    let mut found = Vec::with_capacity(steps);
    for (number, step) in (1..).enumerate().take(WARM_UP + steps) {
        let plans = [plan(step, rows)];
        let begun = Instant::now();
        executor.submit(&plans);
        next(&mut executor)?;
        if number >= WARM_UP {
            found.push(begun.elapsed().as_secs_f64() * 1e6);
        }
    }
    executor.stop();
    found.sort_by(f64::total_cmp);
    Ok(found)
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

fn main() -> Result<(), Failure> {
    let mut words = std::env::args().skip(1);
    let mut word = || words.next().ok_or("round_trip PYTHON FAKE_HAND ROWS STEPS");
    let (python, hand) = (word()?, word()?);
    let (rows, steps): (u32, usize) = (word()?.parse()?, word()?.parse()?);

    let credentials = Credentials::make()?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let brain = listener.local_addr()?.to_string();
    let (outposts, serving) = Outposts::listen(listener, &credentials)?;
    std::thread::spawn(move || runtime().and_then(|runtime| runtime.block_on(serving)));
    let token = credentials.token().clone();
    let settings = WorkSettings { brain, token, name: "here".into(), hands: 1 };
    let (program, script) = (python.clone(), hand.clone());
    let spawn = Arc::new(move |_: &HandOrder, arena: &Arena| {
        let mut command = Command::new(&program);
        command.arg(&script).env("FAKE_BEHAVIOUR", "good");
        RankProcess::spawn(command, arena, &[], &[])
    });
    std::thread::spawn(move || {
        runtime().map(|runtime| runtime.block_on(work(settings, spawn, std::future::pending())))
    });

    for (name, site) in [("here", None), ("outpost", Some(outposts.site("fake", None)))] {
        let site: Option<Arc<dyn Site>> = site;
        let executor = HandExecutor::new(HandSpec {
            program: python.clone().into(),
            args: vec![hand.clone().into()],
            env: vec![("FAKE_BEHAVIOUR".into(), "good".into())],
            config: HandConfig { page_size: 16, ..HandConfig::default() },
            arena: Arena::new(1 << 20)?,
            ranks: vec![RankSpec::default()],
            memories: HostMemories::default(),
            site,
        })?;
        let times = measure(executor, rows, steps)?;
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
        println!("{name} {:.1} {:.1}", at(0.5), at(0.99));
    }
    Ok(())
}
