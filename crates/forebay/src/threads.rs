//! Scheduling priorities of the brain's threads.

use std::fs;

use anyhow::{Context, Result};
use forebay_hand::take_short_turns;
use rustix::thread::Pid;

/// Name prefixes of the threads that delay a step or a token if they wait. Such a thread runs for
/// microseconds at a time.
const FIRST: [&str; 2] = ["engine", "egress"];

/// Lets the engine and egress threads preempt other threads during long work, such as reading
/// bodies, tokenising, or computing a model on the CPU. Without this, an engine or egress thread
/// waits up to 3 ms for a processor if a machine has few.
pub(crate) fn shorten_turns() -> Result<()> {
    for task in fs::read_dir("/proc/self/task").context("/proc/self/task")? {
        let task = task?;
        // The thread may have ended since it was listed.
        let Ok(name) = fs::read_to_string(task.path().join("comm")) else { continue };
        let number = task.file_name().to_str().and_then(|name| name.parse().ok());
        let Some(thread) = number.and_then(Pid::from_raw) else { continue };
        if FIRST.iter().any(|first| name.starts_with(first))
            && let Err(error) = take_short_turns(thread)
        {
            tracing::debug!(name = name.trim_end(), %error, "no short turns");
        }
    }
    Ok(())
}
