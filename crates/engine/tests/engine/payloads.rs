//! Tests that a payload stays in the arena as long as a step may read it, and is freed afterwards.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};

use forebay_engine::{EngineRequest, FinishReason, Payload, RequestId};
use forebay_sim::SimControl;
use forebay_sim::testing::{Hook, PATIENCE, alone, once, request};

use crate::rig::{config, hooked, start};

/// A payload in the arena that sends a message when it is dropped.
#[derive(Debug)]
struct Lent {
    returned: Sender<()>,
    is_there: Arc<AtomicBool>,
}

impl Payload for Lent {
    fn offset(&self) -> u32 {
        64
    }
    fn write(&self, _: usize, _: &[u8]) -> std::io::Result<()> {
        Ok(())
    }
    fn read(&self, _: usize, _: &mut [u8]) -> std::io::Result<usize> {
        Ok(0)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.is_there.store(false, Ordering::SeqCst);
        // The test may have ended.
        let _ = self.returned.send(());
    }
}

/// Creates a request with embeddings. Also returns a channel that reports when the embeddings are
/// dropped, and a flag that is true while they are in the arena.
fn embedded(id: u64, max_tokens: u32) -> (EngineRequest, Receiver<()>, Arc<AtomicBool>) {
    let (returned, back) = channel();
    let is_there = Arc::new(AtomicBool::new(true));
    let payload = Arc::new(Lent { returned, is_there: is_there.clone() });
    let mut request = request(id, vec![0; 40], max_tokens);
    request.request.spec.embeds = Some(64);
    request.payloads.push(payload);
    (request, back, is_there)
}

#[test]
fn a_payload_is_there_for_every_replay_and_given_back_at_the_end() {
    let (request, back, is_there) = embedded(0, 60);
    let mut seen = 0;
    let hook: Hook = Box::new(move |control, outputs| {
        seen += outputs.len();
        if outputs.iter().all(|output| output.finish.is_none()) {
            assert!(is_there.load(Ordering::SeqCst), "a replay could not read the payload");
        }
        if seen % 20 == 10 {
            control.kill();
        }
    });
    let rig = hooked(config(), 500, hook);
    rig.handle.submit(request).expect("room");
    let stories = rig.follow(1);
    assert_eq!(stories[&0].tokens, alone(vec![0; 40], 60));
    assert!(rig.handle.stats().hand.replayed >= 2);
    back.recv_timeout(PATIENCE).expect("the payload is dropped");
}

/// Aborts a request while a step in flight reads the request's embeddings. Calls `then`, releases
/// the time, and waits until the embeddings are dropped.
fn ended_in_flight(then: impl FnOnce(&SimControl)) {
    let rig = hooked(config(), 500, once(SimControl::hold));
    let (request, back, _) = embedded(0, 60);
    rig.handle.submit(request).expect("room");
    rig.control.release();
    let first = rig.outputs.recv_timeout(PATIENCE).expect("outputs");
    assert_eq!(first[0].finish, None);
    rig.handle.abort(RequestId(0));
    let last = rig.outputs.recv_timeout(PATIENCE).expect("outputs");
    assert_eq!(last[0].finish, Some(FinishReason::Abort));
    assert_eq!(
        back.try_recv(),
        Err(TryRecvError::Empty),
        "a step in flight may still read the payload"
    );
    then(&rig.control);
    rig.control.release();
    back.recv_timeout(PATIENCE).expect("the payload is dropped");
}

#[test]
fn a_payload_outlives_its_request_until_the_step_in_flight_is_answered() {
    ended_in_flight(|_| {});
}

#[test]
fn a_payload_outlives_its_request_until_the_hand_is_dead() {
    ended_in_flight(SimControl::kill);
}

#[test]
fn a_payload_of_a_request_that_is_not_served_is_given_back() {
    let rig = start(config(), 500);
    let (waiting, back, _) = embedded(0, 60);
    rig.handle.submit(waiting).expect("room");
    rig.handle.abort(RequestId(0));
    rig.control.release();
    back.recv_timeout(PATIENCE).expect("the payload is dropped");
    let (alive, back, _) = embedded(1, 200);
    rig.handle.submit(alive).expect("room");
    rig.handle.stop();
    back.recv_timeout(PATIENCE).expect("the payload is dropped");
}
