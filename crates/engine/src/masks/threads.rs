//! The threads of jobs, and where their results arrive.

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

/// Cheap jobs that the engine's thread does alone: to wake others takes as long as some masks.
const ALONE: usize = 8;
/// Microseconds of CPU time of a job on the engine's thread after which it takes none of that
/// client's for [`BARRED_US`]: it was expected to be cheap.
const OVERRUN_US: u64 = 2_000;
const BARRED_US: u64 = 10_000_000;
/// Clients that are remembered for that.
const MOST_BARRED: usize = 1 << 10;

/// The threads that fill masks in addition to the engine's, for all members together. They end with
/// it.
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
    /// Clients whose jobs the engine's thread leaves to others until this time.
    barred: HashMap<u64, u64>,
    over: bool,
}

/// A job, and where its result goes.
struct Work {
    job: Job,
    inbox: Arc<Inbox>,
}

impl MaskThreads {
    /// Starts `count` threads. With 0 the engine's thread does all jobs.
    ///
    /// # Errors
    /// The system has no room for a thread.
    pub(crate) fn start(count: usize, clock: Arc<dyn Clock>) -> std::io::Result<Self> {
        let shared = Shared { state: Mutex::default(), work: Condvar::new(), clock };
        let threads = Self { shared: Arc::new(shared), count };
        for _ in 0..count {
            let shared = Arc::clone(&threads.shared);
            Builder::new().name("masks".into()).spawn(move || shared.serve())?;
        }
        Ok(threads)
    }

    /// True if the engine's thread does all jobs.
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Queues jobs. If they are `due`, the engine's thread computes a few cheap ones by itself.
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

    /// Does the next cheap job, or any if there are no threads. False: there is none.
    pub(crate) fn help(&self) -> bool {
        let mut state = self.shared.state.lock();
        let Some(ticket) = state.turns.pop(!self.is_empty()) else { return false };
        drop(state);
        let client = ticket.client;
        let us = self.shared.run(ticket);
        self.took(client, us);
        true
    }

    /// Notes the time that a client's work took on the engine's thread, and that was expected to be
    /// cheap.
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

    /// True if the engine's thread leaves the client's jobs to others.
    pub(crate) fn is_barred(&self, client: u64) -> bool {
        let state = self.shared.state.lock();
        let until = state.barred.get(&client);
        until.is_some_and(|&until| until > self.shared.clock.now_us())
    }

    /// Leaves queued jobs to the threads.
    pub(crate) fn leave(&self) {
        if !self.shared.state.lock().turns.is_empty() {
            self.shared.work.notify_all();
        }
    }

    /// Removes a job that has not begun.
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

    /// Gives the microseconds that it took.
    fn run(&self, ticket: Ticket<Work>) -> u64 {
        let Ticket { client, expected_us, job: Work { job, inbox }, .. } = ticket;
        let made = job.run(&*self.clock);
        let us = made.us;
        self.state.lock().turns.done(client, expected_us, us);
        inbox.put(made);
        us
    }
}

/// The results of a member's jobs, until it takes them.
pub(crate) struct Inbox {
    arrivals: Mutex<Arrivals>,
    arrived: Condvar,
    waker: Arc<dyn Wake>,
}

#[derive(Default)]
struct Arrivals {
    made: Vec<Made>,
    /// Requests whose results wake the engine.
    awaited: HashSet<u64>,
    /// Where the constraints of requests go that are not the member's any more.
    forward: HashMap<u64, Sender<Box<dyn Constraint>>>,
    /// The engine's thread waits here.
    watched: bool,
}

impl Inbox {
    pub(crate) fn new(waker: Arc<dyn Wake>) -> Self {
        Self { arrivals: Mutex::default(), arrived: Condvar::new(), waker }
    }

    fn put(&self, made: Made) {
        let mut arrivals = self.arrivals.lock();
        if let Some(to) = arrivals.forward.remove(&made.request) {
            // The owner of the request may have ended it.
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

    /// Waits for an arrival; false: there is none at the end of the time.
    pub(crate) fn wait(&self, until: Instant) -> bool {
        let mut arrivals = self.arrivals.lock();
        arrivals.watched = true;
        while arrivals.made.is_empty() && !self.arrived.wait_until(&mut arrivals, until).timed_out()
        {
        }
        arrivals.watched = false;
        !arrivals.made.is_empty()
    }

    /// Returns the masks that have arrived. Masks of these requests that are still missing will
    /// wake the engine.
    pub(crate) fn take_and_await(&self, requests: impl Iterator<Item = u64>) -> Vec<Made> {
        let mut arrivals = self.arrivals.lock();
        let made = std::mem::take(&mut arrivals.made);
        arrivals.awaited.extend(requests);
        made.iter().for_each(|made| _ = arrivals.awaited.remove(&made.request));
        made
    }

    /// Makes the constraint of a request go to `to` when its job is done. Returns it if it has
    /// arrived.
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

    /// Forgets an ended request, so that its masks no longer wake the engine.
    pub(crate) fn forget(&self, request: u64) {
        self.arrivals.lock().awaited.remove(&request);
    }
}
