//! Many requests to pairs whose servers fail at random.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::fake::Span;
use crate::http::Message;

const THREADS: usize = 6;
const REQUESTS: usize = 25;

/// A pseudo-random generator (Marsaglia's xorshift), so that a seed reproduces a run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// Returns a random act for one request: `well` in half of the cases, a failure otherwise.
fn act(dice: &mut Dice, well: Act) -> Act {
    match dice.below(14) {
        0 => Act::DieFirst,
        1 => Act::DieAfter("application/json", b"{\"a\"".to_vec()),
        2 => Act::Answer(500, "{}".into()),
        3 => Act::Answer(503, "{}".into()),
        4 => Act::Answer(400, "{\"error\":{}}".into()),
        5 => Act::DieAfterHead,
        6 => Act::Garbage(b"nothing\r\n\r\n".to_vec()),
        _ => well,
    }
}

/// Sends requests from several clients, some of which disconnect. Checks that the requests of the
/// other clients end exactly once.
fn storm(rig: &Rig, seed: u64) {
    let workers: Vec<_> = (0..THREADS as u64)
        .map(|thread| {
            let (address, mut dice) = (rig.address, Dice(seed + 77 * thread));
            std::thread::spawn(move || {
                for _ in 0..REQUESTS {
                    let mut client = Client::connect(address);
                    client.send("POST", CHAT, &[], b"{\"stream\":true}");
                    if dice.below(8) == 0 {
                        continue;
                    }
                    check(&client.answer());
                }
            })
        })
        .collect();
    workers.into_iter().for_each(|worker| worker.join().unwrap());
}

fn check(answer: &Message) {
    if answer.header("content-type") != Some("text/event-stream") {
        assert!(answer.whole, "{answer:?}");
        return;
    }
    let errors = answer.events().iter().filter(|event| !event["error"].is_null()).count();
    assert!(errors <= 1, "{answer:?}");
    assert_eq!(answer.text().matches("[DONE]").count(), 1, "{answer:?}");
}

/// Waits until all requests have ended, and returns the requests that the servers handled.
fn at_rest(prefill: &[Fake], decode: &[Fake]) -> [Vec<Span>; 2] {
    eventually("no server has requests left", || {
        prefill.iter().chain(decode).all(|fake| fake.alive() == 0)
    });
    [prefill, decode].map(|fakes| fakes.iter().flat_map(Fake::spans).collect())
}

#[test]
fn no_server_of_a_pair_outlives_the_other() {
    for seed in [3, 1 << 20, 977] {
        let (prefill, decode) = sglang(3, 3);
        let rig = rig(&prefill, &decode);
        let mut dice = Dice(seed);
        for _ in 0..200 {
            prefill.iter().for_each(|fake| {
                let well = if dice.below(6) == 0 { Act::Hang } else { fine() };
                fake.will([act(&mut dice, well)]);
            });
            decode.iter().for_each(|fake| {
                fake.will([act(&mut dice, Act::Stream(STREAM.to_vec()))]);
            });
        }
        storm(&rig, seed);
        let spans = at_rest(&prefill, &decode);
        let mut rooms: HashMap<i64, Vec<&Span>> = HashMap::new();
        for span in spans.iter().flatten() {
            let room = span.request.json()["bootstrap_room"].as_i64().unwrap();
            rooms.entry(room).or_default().push(span);
        }
        assert!(rooms.len() >= THREADS * REQUESTS / 2);
        for (room, legs) in rooms {
            assert!(legs.len() <= 2, "room {room} was used again");
            if let [one, other] = legs[..] {
                let apart = one.end.max(other.end) - one.end.min(other.end);
                assert!(apart < OUTLIVED, "{apart:?}: {one:?}, {other:?}");
            }
        }
    }
}

#[test]
fn no_parameters_are_sent_twice() {
    let (prefill, decode) = (vllm(3), vllm(3));
    let rig = rig(&prefill, &decode);
    let (mut dice, block) = (Dice(99), AtomicU32::new(0));
    for _ in 0..200 {
        prefill.iter().for_each(|fake| {
            // One answer in six repeats an earlier request id.
            let name = match dice.below(6) {
                0 => block.load(Ordering::Relaxed) / 2,
                _ => block.fetch_add(1, Ordering::Relaxed),
            };
            let params = json!({"do_remote_prefill": true, "remote_request_id": name});
            let well = Act::Answer(200, json!({"kv_transfer_params": params}).to_string());
            fake.will([act(&mut dice, well)]);
        });
        decode.iter().for_each(|fake| {
            fake.will([act(&mut dice, Act::Stream(STREAM.to_vec()))]);
        });
    }
    storm(&rig, 5);
    let [_, spans] = at_rest(&prefill, &decode);
    let mut sent: Vec<String> = spans
        .iter()
        .map(|span| span.request.json()["kv_transfer_params"].clone())
        .filter(|params| !params.is_null())
        .map(|params| params.to_string())
        .collect();
    let count = sent.len();
    assert!(count > 30, "{count}");
    sent.sort_unstable();
    sent.dedup();
    assert_eq!(sent.len(), count);
}
