//! Threads that run the jobs of requests, such as parsing a body or decoding an image.
//!
//! Jobs of requests that have begun run first. Clients take turns with the other jobs, weighted by
//! estimated cost. So a client with much work does not delay a client with little work.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use forebay_api::ApiError;
use forebay_egress::Engine;
use forebay_engine::FairQueue;
use forebay_fair::{Holdings, Shares};
use forebay_http::{ClientId, Guard};
use forebay_machine::stand_back;
use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;

use super::IntakeMode;

type Work = Box<dyn FnOnce() + Send>;

/// The estimated cost of a job.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cost {
    /// The estimated time, in units that are only comparable within one pool, such as bytes to
    /// read.
    pub(crate) time: u64,
    /// Bytes of memory while the work runs, if the pool has a memory bound.
    pub(crate) memory: usize,
}

struct Job {
    work: Work,
    memory: usize,
}

/// A pool of threads that run the jobs of requests.
pub(crate) struct Workers {
    lanes: Lanes,
    threads: Vec<JoinHandle<()>>,
    /// The requests that wait to begin. The arena's size bounds the number of requests that have
    /// begun.
    waiting: Arc<Mutex<Holdings>>,
    /// The maximum number of requests that wait to begin.
    queue: usize,
}

enum Lanes {
    Threads(Arc<Lane>),
    Engine(Arc<dyn Engine>),
}

/// The jobs that wait for a thread.
#[derive(Default)]
struct Lane {
    jobs: Mutex<Jobs>,
    /// Signalled when a job can be started, or when no more jobs will come.
    news: Condvar,
}

#[derive(Default)]
struct Jobs {
    /// Jobs of requests that have room in the arena. They run first, because other requests wait
    /// for that room.
    begun: VecDeque<Job>,
    new: FairQueue<Job>,
    arrivals: i64,
    /// `most`: the bytes that all running jobs together may use. `memory`: how many of these are
    /// free.
    most: usize,
    memory: usize,
    closed: bool,
}

impl Jobs {
    fn new(memory: usize) -> Self {
        Self { most: memory, memory, ..Self::default() }
    }

    /// Returns the next job, if there is memory for it. A job that does not fit yet keeps its turn.
    fn next(&mut self) -> Option<Job> {
        let next = self.begun.front().or_else(|| self.new.first())?;
        self.memory = self.memory.checked_sub(next.memory)?;
        self.begun.pop_front().or_else(|| self.new.pop(|_| true).map(|(_, job)| job))
    }

    fn is_empty(&self) -> bool {
        self.begun.is_empty() && self.new.is_empty()
    }
}

/// The entry of a request among those that wait to begin. Dropping it removes the entry.
struct Place {
    waiting: Arc<Mutex<Holdings>>,
    client: ClientId,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.waiting.lock().give_back(self.client.0, 1);
    }
}

impl Workers {
    /// Starts threads whose names begin with `name`. The declared memory of all running jobs is at
    /// most `memory` bytes.
    pub(crate) fn start(
        mode: IntakeMode,
        name: &str,
        queue: usize,
        memory: usize,
        guard: &Guard,
    ) -> io::Result<Self> {
        let mut threads = Vec::new();
        let lanes = match mode {
            IntakeMode::Engine(engine) => Lanes::Engine(engine),
            IntakeMode::Threads(count) => {
                let lane =
                    Arc::new(Lane { jobs: Mutex::new(Jobs::new(memory)), ..Lane::default() });
                for index in 0..count.max(1) {
                    let worker = Worker(Arc::clone(&lane));
                    let name = format!("{name}-{index}");
                    threads.push(guard.spawn(name, move || work(&worker.0))?);
                }
                Lanes::Threads(lane)
            }
        };
        Ok(Self { lanes, threads, waiting: Arc::default(), queue })
    }

    /// Returns the number of requests that have not begun.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.lock().all()
    }

    /// Returns the number of jobs that wait for a thread.
    #[cfg(test)]
    pub(super) fn queued(&self) -> usize {
        let Lanes::Threads(lane) = &self.lanes else { return 0 };
        let jobs = lane.jobs.lock();
        jobs.begun.len() + jobs.new.upcoming().count()
    }

    /// Runs the first job of a request of `client`. Fails if the queue is full.
    pub(crate) async fn begin<T: Send + 'static>(
        &self,
        client: ClientId,
        cost: Cost,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if !self.waiting.lock().take(client.0, 1, Shares::of_places(self.queue)) {
            let reason = format!(
                "{} large requests wait to be read; at most {} may wait, half of them for one client",
                self.waiting(),
                self.queue
            );
            return Err(ApiError::Overloaded { reason });
        }
        let place = Place { waiting: Arc::clone(&self.waiting), client };
        let work = move || {
            drop(place);
            work()
        };
        self.run(Some(client), cost, work).await
    }

    /// Runs another job of a request that has room in the arena.
    pub(crate) async fn go_on<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.run(None, Cost::default(), work).await
    }

    /// Runs `work` in its client's turn, or before all clients' jobs if `client` is `None`.
    /// Dropping the future cancels work that has not started.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        client: Option<ClientId>,
        cost: Cost,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (reply, answer) = oneshot::channel();
        let work: Work = Box::new(move || {
            if reply.is_closed() {
                return;
            }
            let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
                let reason = "the request could not be read".to_owned();
                Err(ApiError::Internal { reason, code: Some("intake") })
            });
            // The client may have disconnected by now.
            let _ = reply.send(result);
        });
        match &self.lanes {
            Lanes::Threads(lane) => lane.push(client, cost, work),
            Lanes::Engine(engine) => engine.run(work),
        }
        answer.await.unwrap_or(Err(ApiError::Draining))
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        if let Lanes::Threads(lane) = &self.lanes {
            lane.jobs.lock().closed = true;
            lane.news.notify_all();
        }
        for thread in self.threads.drain(..) {
            // Jobs catch their own panics, so the thread's result has no information.
            let _ = thread.join();
        }
    }
}

impl Lane {
    fn push(&self, client: Option<ClientId>, cost: Cost, work: Work) {
        let mut jobs = self.jobs.lock();
        if jobs.closed {
            return;
        }
        // A job that needs more than the whole budget runs alone.
        let job = Job { work, memory: cost.memory.min(jobs.most) };
        match client {
            None => jobs.begun.push_back(job),
            Some(client) => {
                jobs.arrivals += 1;
                let arrival = jobs.arrivals;
                jobs.new.insert(client.0, arrival, cost.time, job);
            }
        }
        self.news.notify_one();
    }

    /// Waits for a job. Returns `None` if there is no job and no more will come.
    fn next(&self) -> Option<Job> {
        let mut jobs = self.jobs.lock();
        loop {
            if let Some(job) = jobs.next() {
                return Some(job);
            }
            if jobs.closed && jobs.is_empty() {
                return None;
            }
            self.news.wait(&mut jobs);
        }
    }

    fn done(&self, memory: usize) {
        if memory > 0 {
            self.jobs.lock().memory += memory;
            // The next job may need the memory that several jobs free.
            self.news.notify_all();
        }
    }
}

/// A thread's handle to its queue. Dropping it closes the queue and drops the waiting jobs, so that
/// the tasks that wait for them are woken.
struct Worker(Arc<Lane>);

impl Drop for Worker {
    fn drop(&mut self) {
        let mut jobs = self.0.jobs.lock();
        jobs.closed = true;
        // Drop the jobs without holding the lock.
        let left = (std::mem::take(&mut jobs.begun), std::mem::take(&mut jobs.new));
        drop(jobs);
        drop(left);
    }
}

fn work(lane: &Lane) {
    stand_back();
    while let Some(Job { work, memory }) = lane.next() {
        work();
        lane.done(memory);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const NO_COST: Cost = Cost { time: 1, memory: 0 };

    #[tokio::test]
    async fn a_thread_that_panics_leaves_nobody_waiting_and_the_server_knows() {
        let guard = Guard::default();
        let workers =
            Workers::start(IntakeMode::Threads(1), "intake", 4, usize::MAX, &guard).unwrap();
        let client = ClientId(1);
        let contained = workers.begin::<()>(client, NO_COST, || panic!("on this input")).await;
        assert!(matches!(contained, Err(ApiError::Internal { .. })));
        assert_eq!(guard.cause(), None, "one request's panic is its own");
        let Lanes::Threads(lane) = &workers.lanes else { panic!("the workers have threads") };
        lane.push(None, NO_COST, Box::new(|| panic!("not on an input")));
        let late = workers.begin(client, NO_COST, || Ok(())).await;
        assert_eq!(late, Err(ApiError::Draining));
        let cause = guard.cause().expect("the cause is known");
        assert!(cause.starts_with("the thread intake-0 panicked"), "{cause}");
    }

    /// Blocks the only thread with a job until `release` is used. `done` receives the names of
    /// later jobs in the order in which they ran.
    struct Held {
        workers: Arc<Workers>,
        release: mpsc::Sender<()>,
        done: mpsc::Receiver<&'static str>,
        note: mpsc::Sender<&'static str>,
    }

    impl Held {
        fn new(queue: usize) -> Self {
            let guard = Guard::default();
            let mode = IntakeMode::Threads(1);
            let workers = Workers::start(mode, "held", queue, usize::MAX, &guard).unwrap();
            let (release, held) = mpsc::channel();
            let Lanes::Threads(lane) = &workers.lanes else { panic!("the workers have threads") };
            lane.push(None, NO_COST, Box::new(move || held.recv().unwrap()));
            let (note, done) = mpsc::channel();
            Self { workers: Arc::new(workers), release, done, note }
        }

        fn push(&self, client: u64, time: u64, name: &'static str) {
            let Lanes::Threads(lane) = &self.workers.lanes else {
                panic!("the workers have threads")
            };
            let note = self.note.clone();
            let work = Box::new(move || note.send(name).unwrap());
            lane.push(Some(ClientId(client)), Cost { time, memory: 0 }, work);
        }
    }

    #[test]
    fn clients_take_turns_by_what_their_work_costs() {
        let held = Held::new(100);
        for _ in 0..24 {
            held.push(1, 50_000_000, "large");
        }
        for _ in 0..10 {
            held.push(2, 4_000, "small");
        }
        held.release.send(()).unwrap();
        let order: Vec<_> = held.done.iter().take(34).collect();
        let last = order.iter().rposition(|&name| name == "small").unwrap();
        assert!(last <= 11, "after one large and ten small jobs: {order:?}");
    }

    #[tokio::test]
    async fn one_client_does_not_fill_the_queue_of_another() {
        let held = Held::new(16);
        let begin = |client| {
            let workers = Arc::clone(&held.workers);
            tokio::spawn(async move { workers.begin(ClientId(client), NO_COST, || Ok(())).await })
        };
        let first: Vec<_> = (0..30).map(|_| begin(1)).collect();
        while held.workers.waiting() < 16 {
            tokio::task::yield_now().await;
        }
        let other = begin(2);
        while held.workers.waiting() < 17 {
            tokio::task::yield_now().await;
        }
        held.release.send(()).unwrap();
        other.await.unwrap().expect("there was a place for it");
        let mut served = 0;
        for one in first {
            served += usize::from(one.await.unwrap().is_ok());
        }
        assert_eq!((served, held.workers.waiting()), (16, 0));
    }

    /// Two threads, and memory for only one job at a time.
    #[test]
    fn running_work_takes_no_more_memory_than_there_is() {
        let guard = Guard::default();
        let mode = IntakeMode::Threads(2);
        let workers = Workers::start(mode, "image", 100, 1000, &guard).unwrap();
        let Lanes::Threads(lane) = &workers.lanes else { panic!("the workers have threads") };
        let running = Arc::new(Mutex::new((0, 0)));
        let (note, done) = mpsc::channel();
        for at in 0..200_u64 {
            let (running, note) = (Arc::clone(&running), note.clone());
            let memory = if at % 3 == 0 { 900 } else { 400 };
            let work = Box::new(move || {
                let mut now = running.lock();
                now.0 += memory;
                now.1 = now.1.max(now.0);
                drop(now);
                std::thread::yield_now();
                running.lock().0 -= memory;
                note.send(()).unwrap();
            });
            lane.push(Some(ClientId(at % 5)), Cost { time: 1, memory }, work);
        }
        assert_eq!(done.iter().take(200).count(), 200, "a job waits for ever");
        let most = running.lock().1;
        assert!(most <= 1000, "{most} bytes at a time");
    }
}
