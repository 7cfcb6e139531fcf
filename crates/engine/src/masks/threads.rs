//! The threads that run jobs, and the inboxes in which their results arrive.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::thread::Builder;
use std::time::Instant;

use crossbeam_channel::Sender;
use parking_lot::{Condvar, Mutex};

use crate::clock::Clock;
use crate::constraint::Constraint;
use crate::executor::Wake;
use crate::masks::job::{Job, Made, is_cheap};
use crate::masks::turns::{Ticket, Turns};

/// The number of cheap jobs that the engine's thread runs alone, because waking another thread
/// takes as long as some masks.
const ALONE: usize = 8;
/// The longest CPU time, in microseconds, of a job on the engine's thread, where only cheap jobs
/// are expected. After a longer job, the engine's thread runs no jobs of the same client for
/// [`BARRED_US`].
const OVERRUN_US: u64 = 2_000;
const BARRED_US: u64 = 10_000_000;
/// The largest number of barred clients that are remembered.
const MOST_BARRED: usize = 1 << 10;

/// The threads that compute masks in addition to the engine's thread. All members of the engine
/// share them. The threads end when this struct is dropped.
pub(crate) struct MaskThreads {
    shared: Arc<Shared>,
    count: usize,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    clock: Arc<dyn Clock>,
}

#[derive(Default)]
struct State {
    turns: Turns<Work>,
    /// Clients whose jobs the engine's thread leaves to the mask threads, with the time at which
    /// that ends.
    barred: HashMap<u64, u64>,
    over: bool,
}

/// A job, and the inbox for its result.
struct Work {
    job: Job,
    inbox: Arc<Inbox>,
}

impl MaskThreads {
    /// Starts `count` threads. With 0, the engine's thread runs all jobs.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub(crate) fn start(count: usize, clock: Arc<dyn Clock>) -> std::io::Result<Self> {
        let shared = Shared { state: Mutex::default(), work: Condvar::new(), clock };
        let threads = Self { shared: Arc::new(shared), count };
        for _ in 0..count {
            let shared = Arc::clone(&threads.shared);
            Builder::new().name("masks".into()).spawn(move || shared.serve())?;
        }
        Ok(threads)
    }

    /// True if there are no mask threads, so that the engine's thread runs all jobs.
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Queues jobs. `due`: a step waits for them. Then the engine's thread will run a few cheap
    /// ones itself, so no thread is woken for these.
    pub(crate) fn push(&self, jobs: Vec<Job>, inbox: &Arc<Inbox>, due: bool) {
        let (mut cheap, mut others) = (0, 0);
        let mut state = self.shared.state.lock();
        if !state.barred.is_empty() {
            let now = self.shared.clock.now_us();
            state.barred.retain(|_, until| *until > now);
        }
        for job in jobs {
            let client = job.client;
            let expected_us = job.expected_us.unwrap_or(0);
            let is_cheap =
                job.expected_us.is_some_and(is_cheap) && !state.barred.contains_key(&client);
            *(if is_cheap { &mut cheap } else { &mut others }) += 1;
            let work = Work { job, inbox: Arc::clone(inbox) };
            state.turns.push(Ticket { client, cheap: is_cheap, expected_us, job: work });
        }
        drop(state);
        let alone = due && cheap <= ALONE;
        let wanted = others + if alone { 0 } else { cheap };
        (0..wanted.min(self.count)).for_each(|_| _ = self.shared.work.notify_one());
    }

    /// Runs the next cheap job, or the next job of any kind if there are no mask threads. Returns
    /// false if no such job is queued.
    pub(crate) fn help(&self) -> bool {
        let mut state = self.shared.state.lock();
        let Some(ticket) = state.turns.pop(!self.is_empty()) else { return false };
        drop(state);
        let client = ticket.client;
        let us = self.shared.run(ticket);
        self.took(client, us);
        true
    }

    /// Bars the client from the engine's thread for [`BARRED_US`], if its job took more than
    /// [`OVERRUN_US`] there. That thread runs only jobs that are expected to be cheap.
    pub(crate) fn took(&self, client: u64, us: u64) {
        if us <= OVERRUN_US {
            return;
        }
        let now = self.shared.clock.now_us();
        let mut state = self.shared.state.lock();
        if state.barred.len() >= MOST_BARRED {
            state.barred.clear();
        }
        state.barred.insert(client, now + BARRED_US);
    }

    /// True if the engine's thread leaves the client's jobs to the mask threads.
    pub(crate) fn is_barred(&self, client: u64) -> bool {
        let state = self.shared.state.lock();
        let until = state.barred.get(&client);
        until.is_some_and(|&until| until > self.shared.clock.now_us())
    }

    /// Wakes the mask threads for the jobs that are still queued.
    pub(crate) fn leave(&self) {
        if !self.shared.state.lock().turns.is_empty() {
            self.shared.work.notify_all();
        }
    }

    /// Removes and returns a job that has not begun.
    pub(crate) fn cancel(&self, request: u64, inbox: &Arc<Inbox>) -> Option<Job> {
        let own = |work: &Work| work.job.request == request && Arc::ptr_eq(&work.inbox, inbox);
        Some(self.shared.state.lock().turns.remove(own)?.job.job)
    }
}

impl Drop for MaskThreads {
    fn drop(&mut self) {
        self.shared.state.lock().over = true;
        self.shared.work.notify_all();
    }
}

impl Shared {
    fn serve(&self) {
        loop {
            let mut state = self.state.lock();
            let ticket = loop {
                if state.over {
                    return;
                }
                match state.turns.pop(false) {
                    Some(ticket) => break ticket,
                    None => self.work.wait(&mut state),
                }
            };
            drop(state);
            self.run(ticket);
        }
    }

    /// Runs a job. Returns the microseconds that it took.
    fn run(&self, ticket: Ticket<Work>) -> u64 {
        let Ticket { client, expected_us, job: Work { job, inbox }, .. } = ticket;
        let made = job.run(&*self.clock);
        let us = made.us;
        self.state.lock().turns.done(client, expected_us, us);
        inbox.put(made);
        us
    }
}

/// The results of a member's jobs, until the member takes them.
pub(crate) struct Inbox {
    arrivals: Mutex<Arrivals>,
    arrived: Condvar,
    waker: Arc<dyn Wake>,
}

#[derive(Default)]
struct Arrivals {
    made: Vec<Made>,
    /// Requests whose results wake the engine thread.
    awaited: HashSet<u64>,
    /// For requests that have left this member: where to send their constraints.
    forward: HashMap<u64, Sender<Box<dyn Constraint>>>,
    /// True while the engine's thread is blocked in a wait for a result.
    watched: bool,
}

impl Inbox {
    pub(crate) fn new(waker: Arc<dyn Wake>) -> Self {
        Self { arrivals: Mutex::default(), arrived: Condvar::new(), waker }
    }

    fn put(&self, made: Made) {
        let mut arrivals = self.arrivals.lock();
        if let Some(to) = arrivals.forward.remove(&made.request) {
            // The new owner may have ended the request and dropped the receiver.
            let _ = to.send(made.constraint);
            return;
        }
        let wakes = arrivals.awaited.remove(&made.request);
        arrivals.made.push(made);
        if arrivals.watched {
            self.arrived.notify_one();
        }
        drop(arrivals);
        if wakes {
            self.waker.wake();
        }
    }

    /// Returns the masks that have arrived.
    pub(crate) fn take(&self) -> Vec<Made> {
        std::mem::take(&mut self.arrivals.lock().made)
    }

    /// Waits for a result until `until`. Returns false if none has arrived by then.
    pub(crate) fn wait(&self, until: Instant) -> bool {
        let mut arrivals = self.arrivals.lock();
        arrivals.watched = true;
        while arrivals.made.is_empty() && !self.arrived.wait_until(&mut arrivals, until).timed_out()
        {
        }
        arrivals.watched = false;
        !arrivals.made.is_empty()
    }

    /// Returns the masks that have arrived. Masks of `requests` that are still missing will wake
    /// the engine thread when they arrive.
    pub(crate) fn take_and_await(&self, requests: impl Iterator<Item = u64>) -> Vec<Made> {
        let mut arrivals = self.arrivals.lock();
        let made = std::mem::take(&mut arrivals.made);
        arrivals.awaited.extend(requests);
        made.iter().for_each(|made| _ = arrivals.awaited.remove(&made.request));
        made
    }

    /// Returns the result of the request's job, if it has arrived. Otherwise arranges that the
    /// constraint is sent to `to` when the job is done.
    pub(crate) fn forward(&self, request: u64, to: Sender<Box<dyn Constraint>>) -> Option<Made> {
        let mut arrivals = self.arrivals.lock();
        arrivals.awaited.remove(&request);
        let at = arrivals.made.iter().position(|made| made.request == request);
        match at {
            Some(at) => Some(arrivals.made.swap_remove(at)),
            None => {
                arrivals.forward.insert(request, to);
                None
            }
        }
    }

    /// Stops the masks of an ended request from waking the engine thread.
    pub(crate) fn forget(&self, request: u64) {
        self.arrivals.lock().awaited.remove(&request);
    }
}
