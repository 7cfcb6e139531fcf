//! Tests the brain's reader with damaged frames, because a hand on another machine is trusted less
//! than a child process. Each frame is either accepted or refused, without a panic and with bounded
//! memory.

use std::io::Write;
use std::os::unix::net::UnixStream;

use forebay_protocol::{
    Fatal, Frame, Hello, Kind, Message, Progress, Ready, Row, StepPlan, StepResult, StoreOp,
    StoreRequest, Want, encode_json,
};

use crate::damage::{Damage, Peak, messages};
use crate::frames::FrameReader;

/// The number of frames in an ordinary run. `make test-fuzz-outposts` sets another number.
const FRAMES: u64 = 20_000;

/// Decodes a frame completely, as the executor does. Returns true if the frame is accepted.
fn decode(frame: &Frame) -> bool {
    match frame.header().kind {
        Kind::Hello => Hello::decode(frame).is_ok(),
        Kind::Progress => Progress::decode(frame).is_ok(),
        Kind::Ready => Ready::decode(frame).is_ok(),
        Kind::Store => StoreRequest::decode(frame).is_ok(),
        Kind::Result => StepResult::decode(frame).is_ok(),
        Kind::Fatal => Fatal::decode(frame).is_ok(),
        _ => false,
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let progress = Progress { stage: "weights".into(), done: 1, total: 2 };
    let fatal = r#"{"error": "no such model", "traceback": "é"}"#;
    let mut seeds = vec![
        encode_json(Kind::Hello, r#"{"pid": 7}"#).expect("a frame"),
        progress.encode().expect("a frame"),
        encode_json(Kind::Fatal, fatal).expect("a frame"),
        encode_json(Kind::Ready, r#"{"page_count": 100, "vocab_size": 9}"#).expect("a frame"),
    ];
    let op = StoreOp::Get { key: "word".into() };
    seeds.push(StoreRequest { id: 3, op }.encode().expect("a frame"));
    let mut plan = StepPlan::default();
    plan.begin(5);
    plan.push_row(Row { slot: 0, start: 3, length: 1, want: Want::TOKEN });
    let mut bytes = Vec::new();
    plan.encode(&mut bytes).expect("a frame");
    seeds.push(bytes);
    for rows in [1, 40] {
        let result = StepResult {
            step: 5,
            tokens: (0..rows).collect(),
            row_errors: vec![0; rows as usize],
            ..StepResult::default()
        };
        let mut bytes = Vec::new();
        result.encode(&mut bytes).expect("a frame");
        seeds.push(bytes);
    }
    seeds
}

#[test]
fn damaged_frames_are_refused() {
    let (seeds, mut damage, before) = (seeds(), Damage::new(), Peak::now());
    let (mut taken, mut refused) = (0_u64, 0_u64);
    for number in 0..messages(FRAMES) {
        let mut bytes = seeds[number as usize % seeds.len()].clone();
        damage.apply(&mut bytes);
        let (mut near, mut far) = UnixStream::pair().expect("a socket");
        near.write_all(&bytes).expect("it fits into the socket");
        drop(near);
        let mut reader = FrameReader::default();
        // After the last frame, reading returns an error, because the peer has closed the
        // connection.
        while let Ok(Some(frame)) = reader.read(&mut far) {
            if decode(&frame) {
                taken += 1;
            } else {
                refused += 1;
            }
        }
    }
    println!("{taken} frames taken, {refused} refused");
    assert!(taken > 0 && refused > 0, "both happen, else nothing was tried");
    before.check();
}
