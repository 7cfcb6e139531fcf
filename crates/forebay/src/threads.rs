//! Scheduling priorities of the brain's threads.

use std::fs;

use anyhow::{Context, Result};
use forebay_hand::take_short_turns;
use rustix::thread::Pid;

/// The name prefixes of threads that a step or a token waits for. They work for microseconds at a
/// time.
const FIRST: [&str; 2] = ["engine", "egress"];

/// Lets these threads preempt others in the middle of long work, such as reading bodies,
/// tokenising, or a model's arithmetic on the CPU. Otherwise they wait up to 3 ms on a machine with
/// few processors.
pub(crate) fn shorten_turns() -> Result<()> {
    for task in fs::read_dir("/proc/self/task").context("/proc/self/task")? {
        let task = task?;
        // Threads come and go.
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
