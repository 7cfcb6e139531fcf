//! A listener with a separate thread, so that its responses wait for no other thread.

use std::io;
use std::net::TcpListener;
use std::thread::JoinHandle;

use tokio::runtime::Builder;
use tokio::sync::oneshot;

use crate::connections::Connections;
use crate::guard::Guard;
use crate::socket::Listener;

/// A thread that serves the connections of one listener. Dropping this stops the thread.
#[derive(Debug)]
pub struct ListenerThread {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ListenerThread {
    /// Starts the thread `name`, watched by `guard`.
    ///
    /// # Errors
    /// The system can't create a thread, or the listener can't be polled.
    pub fn start(
        name: &str,
        listener: TcpListener,
        mut connections: Connections,
        guard: &Guard,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let listener = {
            let _entered = runtime.enter();
            Listener::from(tokio::net::TcpListener::from_std(listener)?)
        };
        // Nothing is ever sent: dropping the sender is the signal.
        let (stop, stopped) = oneshot::channel();
        let mut work = Some(async move { connections.accept_until(&listener, stopped).await });
        let run = move || {
            if let Some(work) = work.take() {
                runtime.block_on(work);
            }
        };
        let thread = guard.spawn(name, run)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for ListenerThread {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic was reported by the guard.
            let _ = thread.join();
        }
    }
}
