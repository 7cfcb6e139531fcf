//! `--parent`: a process that exits when its parent does.

use std::num::NonZeroI32;

use anyhow::{Result, bail};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// Makes the kernel terminate this process when its parent exits.
///
/// # Errors
/// `parent` is not this process's parent, or has exited already.
pub(crate) fn end_with(parent: i32) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::TERM))?;
    if getppid().map(Pid::as_raw_nonzero).map(NonZeroI32::get) != Some(parent) {
        bail!("--parent {parent}: it is not the parent, or has ended");
    }
    Ok(())
}
