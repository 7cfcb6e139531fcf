//! The process itself: its logs, and supervision of its threads.

use anyhow::Result;
use forebay_server::Guard;

use crate::flags::ServeFlags;
use crate::logs::{self, Logs};
use crate::parent;

/// The logs of the process, and supervision of its threads.
pub(super) struct Process {
    pub(super) guard: Guard,
    pub(super) logs: Logs,
}

impl Process {
    /// Starts the logs. With `--parent`, also makes this process exit when its parent does.
    pub(super) fn start(flags: &ServeFlags) -> Result<Self> {
        let guard = Guard::default();
        let logs = logs::init(&flags.log.lines, flags.log.otlp_traces_endpoint.as_deref(), &guard)?;
        logs::warn_of_visible_keys();
        if let Some(parent) = flags.run.parent {
            parent::end_with(parent)?;
        }
        Ok(Self { guard, logs })
    }
}
