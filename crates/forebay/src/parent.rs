//! `--parent`: a process that ends with its parent.

use std::num::NonZeroI32;

use anyhow::{Result, bail};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// Makes the system end this process when its parent ends.
///
/// # Errors
/// The process is not the parent, or has ended before.
pub(crate) fn end_with(parent: i32) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::TERM))?;
    if getppid().map(Pid::as_raw_nonzero).map(NonZeroI32::get) != Some(parent) {
        bail!("--parent {parent}: it is not the parent, or has ended");
    }
    Ok(())
}
