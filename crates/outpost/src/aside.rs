//! A thread for bytes that no step waits for.

use std::io;
use std::thread;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

/// The thread's niceness, like that of threads that prepare large requests. If processors are
/// short, payloads wait and steps do not.
const NICENESS: i32 = 10;

/// A thread for tasks that would delay the relaying of frames, since encrypting and copying a
/// payload takes as long as many steps. Dropping it ends all its tasks.
pub(crate) struct Aside {
    handle: Handle,
    _stop: oneshot::Sender<()>,
}

impl Aside {
    /// # Errors
    /// The system refuses a thread.
    pub(crate) fn start() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        thread::Builder::new().name("bulk".into()).spawn(move || {
            // The lower priority is optional: if the system refuses, the thread works anyway.
            let _ = rustix::process::nice(NICENESS);
            // Nothing is ever sent: dropping the sender ends the thread.
            let _ = runtime.block_on(stopped);
        })?;
        Ok(Self { handle, _stop: stop })
    }

    pub(crate) fn run(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.handle.spawn(task);
    }
}
