//! The main loop of the hand: handshake, loading, then plans in and results out until the brain
//! closes the socket.

use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use forebay_protocol::{
    AdapterOrder, Fatal, Frame, HandConfig, Hello, Kind, Message, Progress, Ready, ReceivedMasks,
    StepPlan,
};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use crate::connection::{ConnectionError, Incoming, Outgoing};
use crate::descriptors::{Given, ignore_interrupts};
use crate::runner::{Executes, HandError, Loaded, Runner};

const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Serves the brain on descriptor 3. Returns success after an exit order, or when the brain has
/// exited.
#[must_use]
pub fn main() -> ExitCode {
    let parent = getppid();
    // The brain also sets this signal when it starts the process, but another parent may not.
    if set_parent_process_death_signal(Some(Signal::KILL)).is_err() || getppid() != parent {
        return ExitCode::FAILURE;
    }
    ignore_interrupts();
    let given = match Given::take() {
        Ok(given) => given,
        Err(error) => {
            eprintln!("a hand is started by `forebay serve`: no socket at descriptor 3 ({error})");
            return ExitCode::FAILURE;
        }
    };
    let outgoing = match given.socket.try_clone() {
        Ok(socket) => Outgoing::new(socket),
        Err(error) => {
            eprintln!("the socket can't be used: {error}");
            return ExitCode::FAILURE;
        }
    };
    match serve(given, &outgoing) {
        Ok(()) | Err(HandError::Wire(ConnectionError::Gone(_))) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            let line = error.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
            let last_words = Fatal { error: line.clone(), traceback: line };
            // The brain may have exited too, in which case only the line above reports the error.
            let _ = last_words.encode().map(|frame| outgoing.send(&frame));
            ExitCode::FAILURE
        }
    }
}

/// Performs the handshake, then runs the step loop; returns when the socket is closed or on
/// `shutdown`.
fn serve(mut given: Given, outgoing: &Outgoing) -> Result<(), HandError> {
    let frame = |message: Result<Vec<u8>, _>| message.map_err(ConnectionError::from);
    let started = Instant::now();
    outgoing.send(&frame(Hello { pid: std::process::id() }.encode())?)?;
    let mut incoming = Incoming::new(&given.socket)?;
    let Some(first) = incoming.first()? else { return Ok(()) };
    let kind = first.header().kind;
    if kind != Kind::Config {
        let kind = format!("{kind:?}").to_lowercase();
        return Err(HandError::Config(format!("expected config, got {kind}")));
    }
    let config =
        HandConfig::decode(&first).map_err(|error| HandError::Config(error.to_string()))?;
    let bytes = usize::try_from(config.arena_bytes).unwrap_or(usize::MAX);
    let arena = given.arena(bytes)?;
    let host = given.host_files(&config.host_lenders)?;
    let progress = Reporter { outgoing, next: Mutex::new(Instant::now()) };
    let report = |done: usize, total: usize| progress.report(done, total);
    let Loaded { mut runner, keep } = Runner::load(&config, arena, host, &report)?;
    let seconds = (started.elapsed().as_secs_f64() * 1000.0).round() / 1000.0;
    let ready = Ready { load_seconds: seconds, ..runner.facts().clone() };
    outgoing.send(&frame(ready.encode())?)?;
    keep();
    let mut out = Vec::new();
    let mut orders = Vec::new();
    while let Some(next) = next_frame(&mut incoming, &mut orders)? {
        follow(&mut *runner, &mut orders)?;
        let plan = StepPlan::decode(&next).map_err(ConnectionError::from)?;
        // Masks follow their plan; only adapter orders and the end of the stream may come in
        // between.
        let mut masks = || {
            let Some(frame) = next_frame(&mut incoming, &mut orders)? else { return Ok(None) };
            let masks = ReceivedMasks::decode(&frame).map_err(ConnectionError::from)?;
            Ok(Some(masks))
        };
        let Some(mut result) = runner.step(&plan, &mut masks)? else { return Ok(()) };
        follow(&mut *runner, &mut orders)?;
        runner.end_copies(&plan, incoming.socket(), &mut result);
        result.encode(&mut out).map_err(ConnectionError::from)?;
        outgoing.send(&out)?;
    }
    Ok(())
}

/// Returns the next frame that is not an adapter order. Orders are added to `orders`.
fn next_frame(
    incoming: &mut Incoming,
    orders: &mut Vec<AdapterOrder>,
) -> Result<Option<Frame>, HandError> {
    while let Some(frame) = incoming.next()? {
        if frame.header().kind != Kind::Adapter {
            return Ok(Some(frame));
        }
        orders.push(AdapterOrder::decode(&frame).map_err(ConnectionError::from)?);
    }
    Ok(None)
}

fn follow(runner: &mut dyn Executes, orders: &mut Vec<AdapterOrder>) -> Result<(), HandError> {
    orders.drain(..).try_for_each(|order| runner.follow(order))
}

/// Sends `progress` frames: the first, the last, and in between at most one per
/// [`PROGRESS_INTERVAL`].
struct Reporter<'a> {
    outgoing: &'a Outgoing,
    next: Mutex<Instant>,
}

impl Reporter<'_> {
    fn report(&self, done: usize, total: usize) {
        let now = Instant::now();
        // If another thread is reporting, this thread has no newer values.
        let Ok(mut next) = self.next.try_lock() else { return };
        if now < *next && done < total {
            return;
        }
        *next = now + PROGRESS_INTERVAL;
        let (done, total) = (done as u64, total as u64);
        let message = Progress { stage: "weights".into(), done, total };
        // Errors are ignored: if the brain has exited, reading the next frame fails too.
        let _ = message.encode().map(|frame| self.outgoing.send(&frame));
    }
}
