//! The signals that stop the process: SIGINT, SIGTERM and SIGHUP, which are treated alike.

use std::fs;
use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

/// SIGHUP's bit in the signal masks of `/proc/self/status`.
const HANGUP_BIT: u64 = 1;

/// Starts a task that counts signals, and returns a receiver of the count. The count only grows
/// while the current runtime runs.
pub(crate) fn count() -> io::Result<watch::Receiver<u32>> {
    // A server started with `nohup` has to keep running after the terminal closes.
    let mut hangup = match hangup_is_ignored() {
        true => None,
        false => Some(signal(SignalKind::hangup())?),
    };
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let (seen, told) = watch::channel(0);
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                () = next(&mut hangup) => {}
                () = seen.closed() => return,
            }
            seen.send_modify(|count| *count += 1);
        }
    });
    Ok(told)
}

/// Waits for a signal that arrives after this call.
pub(crate) async fn another(mut told: watch::Receiver<u32>) {
    told.borrow_and_update();
    if told.changed().await.is_err() {
        // The runtime that counts has shut down, so no more signals will be counted.
        std::future::pending::<()>().await;
    }
}

async fn next(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => drop(signal.recv().await),
        None => std::future::pending().await,
    }
}

fn hangup_is_ignored() -> bool {
    fs::read_to_string("/proc/self/status").is_ok_and(|status| ignores_hangup(&status))
}

fn ignores_hangup(status: &str) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & HANGUP_BIT != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_says_what_is_ignored() {
        let status = |mask: &str| format!("SigBlk:\t0000000000000001\nSigIgn:\t{mask}\n");
        assert!(ignores_hangup(&status("0000000000001001")));
        assert!(!ignores_hangup(&status("0000000000001000")));
        assert!(!ignores_hangup(""));
    }

    #[tokio::test]
    async fn what_was_counted_before_is_not_another() {
        let (seen, told) = watch::channel(1);
        let mut waiting = Box::pin(another(told));
        let noop = std::task::Waker::noop();
        let mut context = std::task::Context::from_waker(noop);
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        seen.send_modify(|count| *count += 1);
        waiting.await;
    }
}
