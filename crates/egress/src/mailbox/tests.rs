//! Tests of readers of any speed, with lines that open and shut.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Wake as _;

use forebay_http::{ByteBudget, ClientId, LineIo, Socket};
use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;

/// Creates a line and the client's socket.
async fn line() -> (Arc<Line>, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let socket = listener.accept().await.unwrap().0;
    // The runtime has to register first that the socket is writable.
    socket.writable().await.unwrap();
    (Line::new(Socket::Tcp(socket)), client)
}

/// A limit in bytes that these tests do not reach.
const LIMIT: usize = 1 << 20;

fn bounds(limit: usize) -> MailboxBounds {
    let budget = ByteBudget::new(1 << 30);
    MailboxBounds { limit, repeated: 0, charge: Arc::new(budget.open(ClientId(1))) }
}

#[derive(Default)]
struct Count(AtomicUsize);
impl std::task::Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn tally(choices: u32) -> Tally {
    Tally::new([(1, choices)].into_iter())
}

impl Sender {
    fn send_delta(&mut self, mut delta: Delta) {
        self.send(&mut delta, &mut Chunk::default());
        assert_eq!(delta, Delta::default());
    }
}

fn token(id: i32) -> Delta {
    let mut delta = Delta { tokens: vec![id], ..Delta::default() };
    delta.parts.content(&format!("{id} "));
    delta
}
fn end(end: End) -> Delta {
    Delta { end: Some(end), ..Delta::default() }
}

fn take(receiver: &mut Receiver, count: &Arc<Count>) -> Option<Vec<(u32, Delta)>> {
    let waker = Waker::from(Arc::clone(count));
    let mut out = Vec::new();
    match receiver.poll(&mut Context::from_waker(&waker), &mut out) {
        Poll::Ready(()) => Some(out),
        Poll::Pending => None,
    }
}

#[test]
fn a_slow_reader_gets_merged_deltas_and_one_wake() {
    let (mut senders, mut receiver) = mailbox(tally(1), WakeRule::Pending, bounds(LIMIT));
    let count = Arc::new(Count::default());
    assert_eq!(take(&mut receiver, &count), None);
    for id in 0..3 {
        senders[0].send_delta(token(id));
    }
    assert_eq!(count.0.load(Ordering::Relaxed), 1);
    senders[0].send_delta(end(End::Length));
    let mut merged = Delta { tokens: vec![0, 1, 2], end: Some(End::Length), ..Delta::default() };
    merged.parts.content("0 1 2 ");
    assert_eq!(take(&mut receiver, &count), Some(vec![(0, merged)]));
    assert_eq!(take(&mut receiver, &count), Some(vec![]));
}

#[test]
fn a_reader_of_the_whole_is_woken_once() {
    let (mut senders, mut receiver) = mailbox(tally(2), WakeRule::AtEnd, bounds(LIMIT));
    let count = Arc::new(Count::default());
    senders[0].send_delta(token(1));
    assert_eq!(take(&mut receiver, &count), None);
    senders[0].send_delta(end(End::Length));
    senders[1].send_delta(token(2));
    assert_eq!(count.0.load(Ordering::Relaxed), 0);
    senders[1].send_delta(end(End::Eos(2)));
    assert_eq!(count.0.load(Ordering::Relaxed), 1);
    assert_eq!(take(&mut receiver, &count).unwrap().len(), 2);
}

#[test]
fn a_lost_sender_ends_its_choice() {
    for wake in [WakeRule::Pending, WakeRule::AtEnd] {
        let (senders, mut receiver) = mailbox(tally(2), wake, bounds(LIMIT));
        let count = Arc::new(Count::default());
        assert_eq!(take(&mut receiver, &count), None);
        drop(senders);
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        let error = || end(End::Error(ApiError::Aborted));
        assert_eq!(take(&mut receiver, &count), Some(vec![(0, error()), (1, error())]));
    }
    Arc::new(Count::default()).wake();
}

#[test]
fn what_nobody_reads_is_bounded_and_ends_in_an_error() {
    for wake in [WakeRule::Pending, WakeRule::EveryDelta, WakeRule::AtEnd] {
        let (mut senders, mut receiver) = mailbox(tally(2), wake, bounds(1000));
        let count = Arc::new(Count::default());
        assert_eq!(take(&mut receiver, &count), None);
        senders[0].send_delta(token(7));
        let mut sent = 0;
        let mut most = 0;
        while senders[1].send(&mut token(8), &mut Chunk::default()) == Sent::Taken {
            sent += token(8).weight();
            most = most.max(receiver.inner.lock().pending.unread);
            assert!(sent < 2000, "{wake:?} is not bounded");
        }
        assert!((900..=1000).contains(&most), "{wake:?}: {most}");
        assert_eq!(receiver.inner.lock().pending.unread, 0, "its pending bytes are freed");
        // The overflow also ends the other choice, at its next delta. An ended stream stays ended.
        assert_eq!(senders[0].send(&mut token(9), &mut Chunk::default()), Sent::Ended);
        drop(senders);
        let mut got = take(&mut receiver, &count).unwrap();
        got.extend(take(&mut receiver, &count).unwrap());
        let error = end(End::Error(ApiError::AnswerTooLarge { limit: 1000 }));
        assert_eq!(got, [(1, error.clone()), (0, error)]);
    }
}

#[test]
fn what_repeats_the_prompt_takes_room_and_the_charge_grows_with_the_rest() {
    let budget = ByteBudget::new(1 << 20);
    let charge = Arc::new(budget.open(ClientId(1)));
    let bounds = MailboxBounds { limit: 1 << 20, repeated: 600_000, charge };
    let (mut senders, mut receiver) = mailbox(tally(1), WakeRule::AtEnd, bounds);
    let mut sent = 0;
    while senders[0].send(&mut token(8), &mut Chunk::default()) == Sent::Taken {
        sent += token(8).weight();
        assert!(budget.used() >= 600_000 + sent, "{} for {sent}", budget.used());
    }
    assert!(600_000 + sent <= 1 << 20, "{sent}");
    let got = take(&mut receiver, &Arc::default()).unwrap();
    assert!(matches!(got[0].1.end, Some(End::Error(ApiError::RequestTooLarge { .. }))));
}

#[test]
fn what_is_read_makes_room() {
    let (mut senders, mut receiver) = mailbox(tally(1), WakeRule::Pending, bounds(100));
    for id in 0..1000 {
        assert_eq!(senders[0].send(&mut token(id), &mut Chunk::default()), Sent::Taken);
        assert_eq!(take(&mut receiver, &Arc::default()), Some(vec![(0, token(id))]));
    }
    drop(receiver);
    for id in 0..1000 {
        assert_eq!(senders[0].send(&mut token(id), &mut Chunk::default()), Sent::Taken);
    }
    let inner = Arc::clone(&senders[0].inner);
    assert!(inner.lock().pending.is_empty(), "nothing is kept without a reader");
}

/// An encoder that writes each text in brackets.
struct Brackets;
impl EventEncoder for Brackets {
    fn resumable(&self) -> bool {
        false
    }
    fn resume(&mut self, _: &Delta) {}
    fn delta(
        &mut self,
        _: u32,
        delta: &mut Delta,
        tally: &Tally,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()> {
        let text = delta.parts.as_content().unwrap_or_default();
        if !text.is_empty() {
            let text = format!("[{text}{}]", tally.generated_tokens());
            out.extend_from_slice(text.as_bytes());
        }
        Ok(())
    }
    fn end(&mut self, _: &Tally, _: &mut Vec<u8>) -> serde_json::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn an_open_line_takes_deltas_past_the_reader() {
    let (line, mut client) = line().await;
    let mut io = LineIo(Arc::clone(&line));
    let (mut senders, mut receiver) = mailbox(tally(1), WakeRule::Pending, bounds(LIMIT));
    receiver.lend(Outlet { encoder: Box::new(Brackets), line: Some(Arc::clone(&line)) });
    let count = Arc::new(Count::default());
    let wakes = || count.0.load(Ordering::Relaxed);
    // The response has not requested the line yet.
    io.flush().await.unwrap();
    senders[0].send_delta(token(1));
    assert_eq!(take(&mut receiver, &count), Some(vec![(0, token(1))]));
    assert_eq!(take(&mut receiver, &count), None);
    // The line is requested, but hyper still has unwritten data.
    senders[0].send_delta(token(2));
    assert_eq!(wakes(), 1);
    assert_eq!(take(&mut receiver, &count), Some(vec![(0, token(2))]));
    assert_eq!(take(&mut receiver, &count), None);
    io.flush().await.unwrap();
    senders[0].send_delta(token(3));
    senders[0].send_delta(Delta { tokens: vec![4], ..Delta::default() });
    senders[0].send_delta(token(5));
    let mut got = [0; 20];
    client.read_exact(&mut got).await.unwrap();
    assert_eq!(std::str::from_utf8(&got), Ok("5\r\n[3 3]\r\n5\r\n[5 5]\r\n"));
    assert_eq!(wakes(), 1);
    // Only the reader gets the end. Its reads shut the line.
    senders[0].send_delta(end(End::Length));
    assert_eq!(wakes(), 2);
    assert_eq!(take(&mut receiver, &count), Some(vec![(0, end(End::Length))]));
    assert!(!line.is_open());
    assert_eq!(receiver.tally().generated_tokens(), 5);
}

#[tokio::test]
async fn a_reader_that_has_gone_shuts_the_line() {
    let (line, _client) = line().await;
    let mut io = LineIo(Arc::clone(&line));
    let (mut senders, mut receiver) = mailbox(tally(1), WakeRule::Pending, bounds(LIMIT));
    receiver.lend(Outlet { encoder: Box::new(Brackets), line: Some(Arc::clone(&line)) });
    assert_eq!(take(&mut receiver, &Arc::default()), None);
    io.flush().await.unwrap();
    assert!(line.is_open());
    drop(receiver);
    assert!(!line.is_open());
    senders[0].send_delta(token(1));
    senders[0].send_delta(end(End::Length));
}

proptest! {
    /// The deltas of a choice add up to the output that was sent, in order, with exactly one end at
    /// the end. This holds for every interleaving of sends and reads.
    #[test]
    fn nothing_is_lost_or_reordered(
        moves in proptest::collection::vec((0u32..3, any::<bool>()), 0..60),
        wake in prop_oneof![Just(WakeRule::Pending), Just(WakeRule::EveryDelta)],
    ) {
        let (mut senders, mut receiver) = mailbox(tally(3), wake, bounds(LIMIT));
        let count = Arc::new(Count::default());
        let mut sent = vec![Vec::new(); 3];
        let mut got: Vec<Delta> = vec![Delta::default(); 3];
        let mut collect = |batch: Vec<(u32, Delta)>| {
            for (choice, mut delta) in batch {
                assert_eq!(got[choice as usize].end, None);
                got[choice as usize].merge(&mut delta);
            }
        };
        for (next, (choice, read)) in moves.into_iter().enumerate() {
            if read {
                if let Some(batch) = take(&mut receiver, &count) {
                    collect(batch);
                }
            } else {
                sent[choice as usize].push(next as i32);
                senders[choice as usize].send_delta(token(next as i32));
            }
        }
        for sender in &mut senders {
            sender.send_delta(end(End::Length));
        }
        while let Some(batch) = take(&mut receiver, &count).filter(|batch| !batch.is_empty()) {
            collect(batch);
        }
        for (sent, got) in sent.into_iter().zip(got) {
            prop_assert_eq!(got.tokens, sent);
            prop_assert_eq!(got.end, Some(End::Length));
        }
    }
}
