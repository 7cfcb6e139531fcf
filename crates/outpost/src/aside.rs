//! A separate thread for bulk data. No step waits for this thread.

use std::io;
use std::thread;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

/// The niceness of the thread. The threads that prepare large requests have the same niceness. If
/// CPU time is short, payloads are delayed and steps are not.
const NICENESS: i32 = 10;

/// A thread for tasks that would delay the relaying of frames: encrypting and copying a payload
/// takes as long as many steps. Dropping this aborts all tasks on the thread.
pub(crate) struct Aside {
    handle: Handle,
    _stop: oneshot::Sender<()>,
}

impl Aside {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system can't start a thread.
    pub(crate) fn start() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        thread::Builder::new().name("bulk".into()).spawn(move || {
            // The lower priority is optional: if the system refuses it, the thread runs with the
            // usual one.
            let _ = rustix::process::nice(NICENESS);
            // Nothing is ever sent: dropping the sender stops the thread.
            let _ = runtime.block_on(stopped);
        })?;
        Ok(Self { handle, _stop: stop })
    }

    pub(crate) fn run(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.handle.spawn(task);
    }
}
