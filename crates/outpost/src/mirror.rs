//! The brain's side of an outpost's mirror of the arena: tracks which payloads have arrived there,
//! and which are in transit.
//!
//! Space is allocated only in the brain's arena. The brain keeps a payload until the outpost has
//! written it, so its region is not reused before. Bytes for a later payload in the same region are
//! sent after it.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io;
use std::mem::take;
use std::sync::{Arc, Weak};
use std::time::Duration;

use forebay_engine::{Payload, There};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, split};
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::{Instant, sleep, timeout};
use tracing::warn;

use crate::bulk::send;
use crate::relay::said;

/// The largest time between the order for a mirror and the outpost's bulk connection.
const OPENING: Duration = Duration::from_secs(30);
/// How long an outpost may go without acknowledging writes.
const STALLED: Duration = Duration::from_secs(30);
/// The smallest number of entries at which the entries of dropped payloads are removed.
const SWEEP_AT: usize = 64;

/// The mirror on an outpost. It exists as long as the outpost is joined.
#[derive(Default)]
pub(crate) struct Mirror {
    state: Mutex<State>,
    /// Notified when a payload is queued.
    queued: Notify,
    closed: watch::Sender<bool>,
}

#[derive(Default)]
struct State {
    ordered: bool,
    closed: bool,
    /// Payloads by their memory address, which is unique while the payload exists.
    payloads: HashMap<usize, Known>,
    sweep_at: usize,
    queue: VecDeque<(usize, Arc<dyn Payload>)>,
    /// Payloads that were sent but are not written yet, oldest first. Each entry has the total
    /// number of bytes sent up to the payload's end, the payload's memory address, and the payload.
    sent: VecDeque<(u64, usize, Arc<dyn Payload>)>,
    /// The total numbers of bytes sent, and of bytes that the outpost has written.
    bytes: Counts,
}

#[derive(Default, Clone, Copy)]
struct Counts {
    sent: u64,
    written: u64,
}

struct Known {
    payload: Weak<dyn Payload>,
    way: Way,
}

enum Way {
    There,
    /// The payload is queued or in transit. These callbacks are called when it has arrived.
    Coming(Vec<There>),
}

impl fmt::Debug for Mirror {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mirror").finish_non_exhaustive()
    }
}

impl Mirror {
    /// Returns true at the first call only. The caller then has to order the outpost to mirror the
    /// arena.
    pub(crate) fn is_to_be_ordered(&self) -> bool {
        !std::mem::replace(&mut self.state.lock().ordered, true)
    }

    /// Queues a payload to be sent, unless it was queued before. Calls `there` when the payload has
    /// arrived. If the outpost is lost first, `there` is dropped without being called.
    pub(crate) fn carry(&self, payload: &Arc<dyn Payload>, there: There) {
        let mut state = self.state.lock();
        if state.closed {
            return;
        }
        let address = Arc::as_ptr(payload).cast::<()>().addr();
        match state.payloads.get_mut(&address).map(|known| &mut known.way) {
            Some(Way::There) => {
                drop(state);
                there();
            }
            Some(Way::Coming(waiting)) => waiting.push(there),
            None => {
                state.sweep();
                let known =
                    Known { payload: Arc::downgrade(payload), way: Way::Coming(vec![there]) };
                state.payloads.insert(address, known);
                state.queue.push_back((address, Arc::clone(payload)));
                drop(state);
                self.queued.notify_one();
            }
        }
    }

    /// Waits until the mirror is closed.
    pub(crate) async fn closed(&self) {
        let _ = self.closed.subscribe().wait_for(|closed| *closed).await;
    }

    /// Closes the mirror: nothing more is sent to the outpost, and no callback is called.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let left = (take(&mut state.payloads), take(&mut state.queue), take(&mut state.sent));
        drop(state);
        // Dropping payloads and callbacks may run code that takes locks.
        drop(left);
        self.closed.send_replace(true);
    }

    /// Sends queued payloads over the connection, as soon as it is open, until either side closes
    /// it.
    pub(crate) async fn run<S>(self: Arc<Self>, connection: oneshot::Receiver<S>)
    where
        S: AsyncRead + AsyncWrite + Send,
    {
        let closing = MirrorGuard(self);
        let mirror = &*closing.0;
        let working = async {
            let opened = timeout(OPENING, connection).await;
            let stream = opened.ok().and_then(Result::ok);
            let stream = stream.ok_or_else(|| io::Error::other("it did not come"))?;
            let (reading, writing) = split(stream);
            tokio::select! {
                over = mirror.write(writing) => over,
                over = mirror.read(reading) => over,
            }
        };
        tokio::select! {
            over = working => {
                if let Err(error) = over {
                    warn!("a bulk connection is lost: {}", said(&error));
                }
            }
            () = mirror.closed() => {}
        }
    }

    async fn write(&self, mut writing: impl AsyncWrite + Unpin) -> io::Result<()> {
        let (mut buffer, mut before) = (Vec::new(), 0);
        loop {
            let next = self.state.lock().queue.pop_front();
            let Some((address, payload)) = next else {
                self.queued.notified().await;
                continue;
            };
            let sent = |bytes: u64| self.state.lock().bytes.sent = before + bytes;
            before += send(&*payload, &mut buffer, &mut writing, sent).await?;
            let mut state = self.state.lock();
            state.sent.push_back((before, address, payload));
            // The outpost may have acknowledged the payload already.
            let arrived = state.arrived();
            drop(state);
            arrived.tell();
        }
    }

    async fn read(&self, mut reading: impl AsyncRead + Unpin) -> io::Result<()> {
        loop {
            let mut waits_since = None;
            let count = {
                let reading = reading.read_u64_le();
                tokio::pin!(reading);
                loop {
                    tokio::select! {
                        count = &mut reading => break count?,
                        () = sleep(STALLED / 4) => {}
                    }
                    let Counts { sent, written } = self.state.lock().bytes;
                    if sent == written {
                        waits_since = None;
                    } else if waits_since.get_or_insert_with(Instant::now).elapsed() > STALLED {
                        return Err(io::Error::other("it writes nothing"));
                    }
                }
            };
            let mut state = self.state.lock();
            state.bytes.check(count)?;
            let arrived = state.arrived();
            drop(state);
            arrived.tell();
        }
    }
}

impl Counts {
    /// Checks and stores a count of written bytes.
    ///
    /// # Errors
    /// The count is smaller than the previous one, or larger than the number of bytes sent.
    fn check(&mut self, written: u64) -> io::Result<()> {
        if !(self.written..=self.sent).contains(&written) {
            return Err(io::Error::other(format!("{written} bytes, of {} sent", self.sent)));
        }
        self.written = written;
        Ok(())
    }
}

impl State {
    /// Removes the payloads that the outpost has written, and returns them with their callbacks.
    fn arrived(&mut self) -> WrittenBytes {
        let mut arrived = WrittenBytes::default();
        while self.sent.front().is_some_and(|(end, ..)| *end <= self.bytes.written)
            && let Some((_, address, payload)) = self.sent.pop_front()
        {
            if let Some(known) = self.payloads.get_mut(&address)
                && let Way::Coming(waiting) = std::mem::replace(&mut known.way, Way::There)
            {
                arrived.waiting.extend(waiting);
            }
            arrived.payloads.push(payload);
        }
        arrived
    }

    /// Occasionally removes the entries of dropped payloads, because their addresses may be reused.
    fn sweep(&mut self) {
        if self.payloads.len() < self.sweep_at.max(SWEEP_AT) {
            return;
        }
        self.payloads.retain(|_, known| known.payload.strong_count() > 0);
        self.sweep_at = 2 * self.payloads.len();
    }
}

/// Payloads that have just arrived at the outpost, and their callbacks.
#[derive(Default)]
struct WrittenBytes {
    waiting: Vec<There>,
    payloads: Vec<Arc<dyn Payload>>,
}

impl WrittenBytes {
    /// Calls the callbacks. The lock must not be held, because they run code of their owners.
    fn tell(self) {
        drop(self.payloads);
        self.waiting.into_iter().for_each(|there| there());
    }
}

/// Closes the mirror when its task ends, for whatever reason.
struct MirrorGuard(Arc<Mirror>);

impl Drop for MirrorGuard {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[cfg(test)]
mod tests {
    use forebay_engine::Payloads;
    use forebay_hand::Arena;
    use parking_lot::Mutex;
    use proptest::prelude::*;
    use tokio::io::duplex;
    use tokio::task::JoinHandle;

    use super::*;
    use crate::bulk::{PIECE_BYTES, receive};

    fn wait<T>(work: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        runtime.unwrap().block_on(work)
    }

    /// An arena, the mirror of it, and the task of the outpost that writes to the mirror. The
    /// connection between them accepts only a few bytes at a time.
    struct Pair {
        near: Arena,
        far: Arena,
        mirror: Arc<Mirror>,
        outpost: JoinHandle<io::Result<()>>,
    }

    impl Pair {
        fn start(bytes: u32, room: usize) -> Self {
            let (near, far) = (Arena::new(bytes).unwrap(), Arena::new(bytes).unwrap());
            let mirror = Arc::new(Mirror::default());
            let (here, there) = duplex(room);
            let (sender, connection) = oneshot::channel();
            assert!(sender.send(here).is_ok());
            tokio::spawn(Arc::clone(&mirror).run(connection));
            let arena = far.clone();
            let outpost = tokio::spawn(async move {
                let (reading, writing) = split(there);
                receive(reading, writing, &arena).await
            });
            Self { near, far, mirror, outpost }
        }

        fn payload(&self, bytes: &[u8]) -> Option<Arc<dyn Payload>> {
            let payload: Arc<dyn Payload> = self.near.reserve(bytes.len())?.into();
            payload.write(0, bytes).unwrap();
            Some(payload)
        }

        /// Reads a payload's bytes in the outpost's arena.
        fn far(&self, payload: &Arc<dyn Payload>, length: usize) -> Vec<u8> {
            self.far.look(payload.offset(), length).unwrap()
        }

        fn carry(&self, payload: &Arc<dyn Payload>) -> oneshot::Receiver<()> {
            let (sender, arrived) = oneshot::channel();
            // The test may have dropped the receiver.
            self.mirror.carry(payload, Box::new(move || _ = sender.send(())));
            arrived
        }
    }

    #[test]
    fn a_payload_is_sent_once_for_all_who_wait_for_it() {
        wait(async {
            let pair = Pair::start(4 << 20, 1000);
            let bytes: Vec<u8> = (0..(2 * PIECE_BYTES + 77)).map(|at| (at % 251) as u8).collect();
            let payload = pair.payload(&bytes).unwrap();
            let waiting = [pair.carry(&payload), pair.carry(&payload)];
            assert_eq!(pair.mirror.state.lock().queue.len(), 1);
            for arrived in waiting {
                arrived.await.unwrap();
            }
            assert!(pair.far(&payload, bytes.len()) == bytes);
            let sent = pair.mirror.state.lock().bytes.sent;
            // A later request for the same payload, as for a replay after the hand's death.
            pair.carry(&payload).await.unwrap();
            assert_eq!(pair.mirror.state.lock().bytes.sent, sent, "the payload was sent again");
            assert_eq!(sent, bytes.len() as u64);
        });
    }

    #[test]
    fn what_nobody_has_any_more_keeps_its_room_until_it_was_written() {
        wait(async {
            let pair = Pair::start(64 << 10, 64);
            let payload = pair.payload(&[7; 40_000]).unwrap();
            let arrived = pair.carry(&payload);
            drop(payload);
            assert!(pair.near.used() >= 40_000, "the payload's bytes are still to be sent");
            arrived.await.unwrap();
            while pair.near.used() > 0 {
                tokio::task::yield_now().await;
            }
        });
    }

    #[test]
    fn an_outpost_that_is_lost_tells_nobody_and_gives_everything_back() {
        wait(async {
            let pair = Pair::start(1 << 20, 64);
            let payloads = [&[1; 9000], &[2; 9000]].map(|bytes| pair.payload(bytes).unwrap());
            let waiting = payloads.each_ref().map(|payload| pair.carry(payload));
            tokio::task::yield_now().await;
            pair.outpost.abort();
            for arrived in waiting {
                assert!(arrived.await.is_err());
            }
            pair.mirror.closed().await;
            assert!(pair.carry(&payloads[0]).await.is_err(), "a broken mirror stays broken");
            drop(payloads);
            assert_eq!(pair.near.used(), 0);
        });
    }

    #[test]
    fn an_outpost_that_counts_wrongly_is_lost() {
        let mut counts = Counts { sent: 10, written: 4 };
        assert!(counts.check(3).is_err());
        assert!(counts.check(11).is_err());
        assert!(counts.check(10).is_ok());
    }

    #[derive(Debug, Clone)]
    enum Op {
        Carry(usize),
        Drop(usize),
        /// Lets other tasks run.
        Yield(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => (1..3000_usize).prop_map(Op::Carry),
            3 => any::<usize>().prop_map(Op::Drop),
            3 => (1..8_usize).prop_map(Op::Yield),
        ]
    }

    proptest! {
        /// The region of one payload is reused by another payload while bytes are in transit.
        #[test]
        fn what_has_arrived_stays_right_until_it_is_given_back(
            room in 1..5000_usize, ops in prop::collection::vec(op(), 1..80),
        ) {
            wait(async {
                let pair = Pair::start(8192, room);
                let there = Arc::new(Mutex::new(Vec::new()));
                let mut held: Vec<(usize, Vec<u8>, Arc<dyn Payload>)> = Vec::new();
                for (number, op) in ops.into_iter().enumerate() {
                    match op {
                        Op::Carry(length) => {
                            let bytes = vec![number as u8; length];
                            let Some(payload) = pair.payload(&bytes) else { continue };
                            let told = Arc::clone(&there);
                            pair.mirror.carry(&payload, Box::new(move || told.lock().push(number)));
                            held.push((number, bytes, payload));
                        }
                        Op::Drop(at) if !held.is_empty() => _ = held.swap_remove(at % held.len()),
                        Op::Drop(_) => {}
                        Op::Yield(count) => {
                            for _ in 0..count {
                                tokio::task::yield_now().await;
                            }
                        }
                    }
                    for (number, bytes, payload) in &held {
                        if there.lock().contains(number) {
                            assert_eq!(&pair.far(payload, bytes.len()), bytes, "payload {number}");
                        }
                    }
                }
                for (_, _, payload) in &held {
                    pair.carry(payload).await.unwrap();
                }
                for (_, bytes, payload) in &held {
                    assert_eq!(&pair.far(payload, bytes.len()), bytes);
                }
            });
        }
    }
}
