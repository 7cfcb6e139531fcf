//! The threads for the work of large requests.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, select_biased, unbounded};
use forebay_api::ApiError;
use tokio::sync::{Semaphore, oneshot};

use super::IntakeMode;
use crate::engine::Engine;
use crate::guard::Guard;

/// The priority of these threads, in steps of `nice`. If processors are short, these threads are
/// the ones that wait.
const NICENESS: i32 = 10;

type Job = Box<dyn FnOnce() + Send>;

/// See the module.
pub(crate) struct Workers {
    lanes: Lanes,
    threads: Vec<JoinHandle<()>>,
    /// The places of requests that begin. Requests that have begun are never more than the arena
    /// has room for.
    places: Arc<Semaphore>,
    queue: usize,
}

#[derive(Clone, Copy)]
enum Lane {
    /// The lane of requests that have room in the arena. They go first, because others wait for
    /// that room.
    Begun,
    New,
}

enum Lanes {
    Threads { begun: Sender<Job>, new: Sender<Job> },
    Engine(Arc<dyn Engine>),
    Closed,
}

impl Workers {
    pub(crate) fn start(mode: IntakeMode, queue: usize, guard: &Guard) -> io::Result<Self> {
        let mut threads = Vec::new();
        let lanes = match mode {
            IntakeMode::Engine(engine) => Lanes::Engine(engine),
            IntakeMode::Threads(count) => {
                let ((begun, first), (new, second)) = (unbounded(), unbounded());
                for index in 0..count.max(1) {
                    let (first, second) = (first.clone(), second.clone());
                    let name = format!("intake-{index}");
                    threads.push(guard.spawn(name, move || work(&first, &second))?);
                }
                Lanes::Threads { begun, new }
            }
        };
        Ok(Self { lanes, threads, places: Arc::new(Semaphore::new(queue)), queue })
    }

    /// The number of requests that have not begun.
    pub(crate) fn waiting(&self) -> usize {
        self.queue - self.places.available_permits()
    }

    /// The first work of a request, if there is a place in the queue.
    pub(crate) async fn begin<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| {
            let reason = format!("{} large requests wait to be read", self.queue);
            ApiError::Overloaded { reason }
        })?;
        let work = move || {
            drop(place);
            work()
        };
        self.run(Lane::New, work).await
    }

    /// More work of a request that has room in the arena.
    pub(crate) async fn go_on<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.run(Lane::Begun, work).await
    }

    /// Dropping the future cancels work that has not been started.
    async fn run<T: Send + 'static>(
        &self,
        lane: Lane,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (reply, answer) = oneshot::channel();
        let job: Job = Box::new(move || {
            if reply.is_closed() {
                return;
            }
            let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
                let reason = "the request could not be read".to_owned();
                Err(ApiError::Internal { reason, code: Some("intake") })
            });
            // The client may have gone by now; then nobody wants the answer.
            let _ = reply.send(result);
        });
        match &self.lanes {
            Lanes::Threads { begun, new } => {
                let to = match lane {
                    Lane::Begun => begun,
                    Lane::New => new,
                };
                // Threads end when the lanes are closed, and they are open.
                let _ = to.send(job);
            }
            Lanes::Engine(engine) => engine.run(job),
            Lanes::Closed => {}
        }
        answer.await.unwrap_or(Err(ApiError::Draining))
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.lanes = Lanes::Closed;
        for thread in self.threads.drain(..) {
            // Jobs catch their panics, so there is nothing to learn from how it ended.
            let _ = thread.join();
        }
    }
}

fn work(begun: &Receiver<Job>, new: &Receiver<Job>) {
    // Everybody may stand back, but where it is refused there is nothing else to be done.
    let _ = rustix::process::nice(NICENESS);
    loop {
        let job = select_biased! {
            recv(begun) -> job => job,
            recv(new) -> job => job,
        };
        match job {
            Ok(job) => job(),
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_thread_that_panics_leaves_nobody_waiting_and_the_server_knows() {
        let guard = Guard::default();
        let workers = Workers::start(IntakeMode::Threads(1), 4, &guard).unwrap();
        let contained = workers.begin::<()>(|| panic!("on this input")).await;
        assert!(matches!(contained, Err(ApiError::Internal { .. })));
        assert_eq!(guard.cause(), None, "one request's panic is its own");
        let Lanes::Threads { new, .. } = &workers.lanes else { panic!("it has threads") };
        new.send(Box::new(|| panic!("not on an input"))).unwrap();
        let late = workers.begin(|| Ok(())).await;
        assert_eq!(late, Err(ApiError::Draining));
        let cause = guard.cause().expect("it is known by then");
        assert!(cause.starts_with("the thread intake-0 panicked"), "{cause}");
    }
}
