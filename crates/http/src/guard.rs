//! Detects panics in all threads, and in tasks that run as long as the server.
//!
//! A panic ends one thread, but the others continue as if nothing had happened. So threads are
//! started through a [`Guard`]. After a panic /health reports it, and new requests are rejected.
//! The caller of [`Guard::failed`] shuts the process down cleanly: requests that can finish do so,
//! the other requests get an error, and a supervisor restarts the process.
//!
//! Work for a single request (tokenising, parsing, handling) catches its panics and fails only that
//! request. So no client can bring the server down with an unexpected input.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::thread::{Builder, JoinHandle};

use tokio::sync::watch;

/// Records the first panic; see the module. Clones share the record.
#[derive(Debug, Clone)]
pub struct Guard(Arc<watch::Sender<Option<String>>>);

impl Default for Guard {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(None)))
    }
}

impl Guard {
    /// Starts the thread `name`. Values that `work` owns are dropped only after a panic was
    /// reported. So a thread that notices the drop finds the server failed already.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn spawn(
        &self,
        name: impl Into<String>,
        work: impl FnMut() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        self.start(Builder::new().name(name.into()), work)
    }

    /// Starts a thread like [`Guard::spawn`], from a builder with its name and stack size.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn start(
        &self,
        thread: Builder,
        mut work: impl FnMut() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        let guard = self.clone();
        thread.spawn(move || {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(&mut work)) {
                let name = std::thread::current().name().unwrap_or("unnamed").to_owned();
                guard.report(&format!("the thread {name}"), panic.as_ref());
            }
        })
    }

    /// Runs a task and reports its panic. Returns `None` if it has panicked.
    pub async fn task<T>(self, name: &str, work: impl Future<Output = T>) -> Option<T> {
        match contained(work).await {
            Ok(result) => Some(result),
            Err(panic) => {
                self.report(name, panic.as_ref());
                None
            }
        }
    }

    /// Returns the reason why the server cannot continue; `None`: it can.
    #[must_use]
    pub fn cause(&self) -> Option<String> {
        self.0.borrow().clone()
    }

    /// Waits until the server cannot continue.
    pub async fn failed(&self) {
        // The sender lives in self, so waiting cannot fail.
        let _ = self.0.subscribe().wait_for(Option::is_some).await;
    }

    fn report(&self, who: &str, panic: &(dyn Any + Send)) {
        let cause = format!("{who} panicked: {}", panic_message(panic));
        tracing::error!("{cause}");
        // Later failures are consequences of the first one.
        self.0.send_if_modified(|first| {
            let is_first = first.is_none();
            first.get_or_insert(cause);
            is_first
        });
    }
}

/// Runs `work` until it completes or panics.
///
/// # Errors
/// The payload of the panic.
pub async fn contained<T>(work: impl Future<Output = T>) -> Result<T, Box<dyn Any + Send>> {
    let mut work = pin!(work);
    std::future::poll_fn(|context| {
        match catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(context))) {
            Ok(polled) => polled.map(Ok),
            Err(panic) => Poll::Ready(Err(panic)),
        }
    })
    .await
}

/// Returns the message of a panic.
#[must_use]
pub fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    struct OnDrop<F: FnMut()>(F);
    impl<F: FnMut()> Drop for OnDrop<F> {
        fn drop(&mut self) {
            (self.0)();
        }
    }

    #[test]
    fn a_panic_is_known_before_what_the_thread_owned_is_gone() {
        let guard = Guard::default();
        let (told, hear) = std::sync::mpsc::channel();
        let seen = guard.clone();
        let owned = OnDrop(move || told.send(seen.cause()).unwrap());
        let thread = guard.spawn("worker", move || {
            let _owned = &owned;
            panic!("number {}", 7);
        });
        thread.unwrap().join().unwrap();
        let cause = Some("the thread worker panicked: number 7".to_owned());
        assert_eq!(hear.recv().unwrap(), cause);
        guard.spawn("other", || panic!("later")).unwrap().join().unwrap();
        assert_eq!(guard.cause(), cause, "the first panic is the cause");
    }

    #[tokio::test]
    async fn a_task_that_panics_is_known_and_one_that_ends_is_not() {
        let guard = Guard::default();
        assert_eq!(guard.clone().task("fine", async { 7 }).await, Some(7));
        assert_eq!(guard.cause(), None);
        let panics = async {
            tokio::task::yield_now().await;
            panic!("oh");
        };
        assert_eq!(guard.clone().task::<()>("the step log", panics).await, None);
        guard.failed().await;
        assert_eq!(guard.cause().as_deref(), Some("the step log panicked: oh"));
    }
}
