//! Sends requests by a schedule (open loop), at a fixed concurrency (closed loop), or both, and
//! collects the replies.
//!
//! A separate thread wakes at each intended arrival, because the runtime's timers are no finer than
//! a millisecond. With a concurrency limit of N, N tasks take arrived requests in order, one at a
//! time; a task that waits means that another request may be sent. Without a limit, each arrival
//! gets its own task.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bytes::Bytes;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::Mutex;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;

use crate::client::{self, Client, Clock, Live, Reply};
use crate::cpu;

/// The largest number of chunks for which a reply allocates memory in advance; longer replies
/// reallocate.
const ROOM_FOR_CHUNKS: u32 = 1024;

/// A request to send.
#[derive(Debug, Clone)]
pub(crate) struct Work {
    /// Body of the request.
    pub(crate) body: Bytes,
    /// The requested number of tokens.
    pub(crate) output_tokens: u32,
    /// The time to send the request, from the start of the run.
    pub(crate) arrival: Duration,
}

/// The outcome of a request.
#[derive(Debug)]
pub(crate) struct Sent {
    /// The index of the request in the list of work.
    pub(crate) index: usize,
    /// The planned time of sending: the arrival time, or in a closed loop the time at which the
    /// limit allowed it.
    pub(crate) intended_us: u64,
    /// The delay of the send after the request had arrived and the concurrency limit allowed it.
    pub(crate) late_us: u64,
    /// The reply to the request.
    pub(crate) reply: Reply,
}

/// The outcomes of the requests of a run.
#[derive(Debug)]
pub(crate) struct Driven {
    /// The requests that finished, in the order of the work.
    pub(crate) sent: Vec<Sent>,
    /// True if the user stopped the run before its end.
    pub(crate) interrupted: bool,
    /// CPU time of this process from the start of the run to its end.
    pub(crate) client_cpu: Duration,
}

/// Creates a runtime with `threads` threads. A single thread gets a runtime without work stealing.
/// Unless the run has to be `precise`, a thread under load sleeps briefly before it waits, so that
/// it finds more data per wake-up.
///
/// # Errors
/// The system has no threads or file descriptors left.
pub(crate) fn runtime(threads: usize, precise: bool) -> Result<tokio::runtime::Runtime> {
    let mut builder = if threads == 1 {
        tokio::runtime::Builder::new_current_thread()
    } else {
        tokio::runtime::Builder::new_multi_thread()
    };
    if threads > 1 {
        builder.worker_threads(threads);
    }
    if !precise {
        builder.on_thread_park(client::rest);
    }
    builder.enable_all().build().context("cannot start the client")
}

/// Raises the limit on open files as far as allowed, because each request in flight has its own
/// connection.
pub(crate) fn raise_file_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum {
        // Not fatal: too few files will show as failed connections.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    }
}

/// Sends all of `work`, at most `max_concurrency` requests at a time, until all replies have
/// arrived or the user presses Ctrl-C.
///
/// `live` counts requests that are sent later than `late_after` after their planned time.
pub(crate) async fn drive(
    client: Arc<Client>,
    work: Vec<Work>,
    max_concurrency: Option<usize>,
    late_after: Duration,
    live: Arc<Live>,
) -> Driven {
    let total = work.len();
    let arrivals: Vec<Duration> = work.iter().map(|work| work.arrival).collect();
    let at_once = arrivals.iter().all(Duration::is_zero);
    let (arrive, mut arrived) = unbounded_channel();
    let (replies, mut replied) = unbounded_channel();
    let cpu_before = cpu::own();
    let clock = Clock::start();
    let run = Arc::new(Run { client, work, at_once, late_after, clock, live, replies });
    let _pacer = Pacer::start(arrivals, clock, arrive);
    // Dropping the set aborts the tasks that are still running.
    let mut tasks = JoinSet::new();
    if let Some(places) = max_concurrency {
        let (_, nothing) = unbounded_channel();
        let queue = Arc::new(Mutex::new(std::mem::replace(&mut arrived, nothing)));
        for _ in 0..places.min(total) {
            tasks.spawn(Arc::clone(&run).place(Arc::clone(&queue)));
        }
    }
    let mut sent = Vec::with_capacity(total);
    let mut interrupted = false;
    let mut interrupt = std::pin::pin!(tokio::signal::ctrl_c());
    while sent.len() < total && !interrupted {
        tokio::select! {
            Some(index) = arrived.recv() => {
                let run = Arc::clone(&run);
                tasks.spawn(async move { run.send(index, None).await; });
            }
            Some(reply) = replied.recv() => sent.push(reply),
            _ = &mut interrupt => interrupted = true,
        }
    }
    let client_cpu = cpu::own().saturating_sub(cpu_before);
    sent.sort_unstable_by_key(|sent: &Sent| sent.index);
    Driven { sent, interrupted, client_cpu }
}

/// The state that the tasks of a run share.
struct Run {
    client: Arc<Client>,
    work: Vec<Work>,
    /// True if there are no arrival times, so that all requests arrive at once.
    at_once: bool,
    late_after: Duration,
    clock: Clock,
    live: Arc<Live>,
    replies: UnboundedSender<Sent>,
}

impl Run {
    /// Takes arrived requests and sends them, one at a time.
    async fn place(self: Arc<Self>, queue: Arc<Mutex<UnboundedReceiver<usize>>>) {
        let mut free_us = 0;
        loop {
            // The lock is fair, so the task that has waited longest takes the next request.
            let next = queue.lock().await.recv().await;
            let Some(index) = next else { return };
            free_us = self.send(index, Some(free_us)).await;
        }
    }

    /// Sends a request and waits for its reply. `free_us`: the time since which the concurrency
    /// limit allows it; `None`: there is no limit. Returns the time at which the reply ended.
    async fn send(&self, index: usize, free_us: Option<u64>) -> u64 {
        let work = &self.work[index];
        let chunks = work.output_tokens.min(ROOM_FOR_CHUNKS) as usize;
        let reply = self.client.send(work.body.clone(), chunks, self.clock, &self.live).await;
        let arrival_us = u64::try_from(work.arrival.as_micros()).unwrap_or(u64::MAX);
        let due_us = arrival_us.max(free_us.unwrap_or(0));
        let late_us = reply.sent_us.saturating_sub(due_us);
        if Duration::from_micros(late_us) > self.late_after {
            self.live.late.fetch_add(1, Ordering::Relaxed);
        }
        let intended_us = if self.at_once { due_us } else { arrival_us };
        let end_us = reply.end_us;
        // After an interrupt there is no receiver.
        let _ = self.replies.send(Sent { index, intended_us, late_us, reply });
        end_us
    }
}

/// A handle of the thread that wakes at each arrival. The thread stops when the handle is dropped.
struct Pacer {
    _stop: Sender<()>,
}

impl Pacer {
    fn start(arrivals: Vec<Duration>, clock: Clock, arrive: UnboundedSender<usize>) -> Self {
        let (stop, stopped) = channel::<()>();
        std::thread::spawn(move || {
            for (index, arrival) in arrivals.into_iter().enumerate() {
                let wait = clock.at(arrival).saturating_duration_since(Instant::now());
                let stop =
                    !wait.is_zero() && stopped.recv_timeout(wait) != Err(RecvTimeoutError::Timeout);
                if stop || arrive.send(index).is_err() {
                    return;
                }
            }
        });
        Self { _stop: stop }
    }
}
