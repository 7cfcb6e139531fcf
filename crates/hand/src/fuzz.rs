//! Damaged frames for the brain's reader. A hand on another machine is trusted less than a child.
//! Each of its frames is taken or refused, without a panic and with bounded memory.

use std::io::Write;
use std::os::unix::net::UnixStream;

use forebay_protocol::{
    Fatal, Frame, Hello, Kind, Message, Progress, Ready, Row, StepPlan, StepResult, StoreOp,
    StoreRequest, Want, encode_json,
};

use crate::frames::FrameReader;

/// Frames in the ordinary test; `make test-fuzz-outposts` has a million.
const FRAMES: u64 = 20_000;
/// The largest growth of memory by reads. A frame that announces 256 MiB takes none before they
/// come.
const MOST_GROWTH_KIB: u64 = 64 << 10;
/// The values of damaged words.
const EXTREMES: [u32; 8] = [0, 1, 2, 1 << 16, 1 << 26, (1 << 26) + 1, 1 << 31, u32::MAX];

/// SplitMix64 (Steele, Lea and Flood 2014).
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, most: usize) -> usize {
        (self.next() % most.max(1) as u64) as usize
    }

    fn damage(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len());
            match self.below(5) {
                0 if !bytes.is_empty() => bytes[at] ^= 1 << self.below(8),
                1 => bytes.truncate(at),
                2 if bytes.len() >= 8 => {
                    let word = self.below(bytes.len() / 4);
                    let value = EXTREMES[self.below(EXTREMES.len())].to_le_bytes();
                    bytes[4 * word..4 * word + 4].copy_from_slice(&value);
                }
                3 if bytes.len() >= 8 => {
                    let (one, other) = (self.below(bytes.len() / 4), self.below(bytes.len() / 4));
                    let part = bytes[4 * one.min(other)..4 * one.max(other)].to_vec();
                    bytes.splice(4 * one..4 * one, part);
                }
                _ if !bytes.is_empty() => bytes[at] = self.next() as u8,
                _ => {}
            }
        }
    }
}

/// The executor's checks of a frame, in full.
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

/// The most memory that this process had at a time, in KiB.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("it is there");
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).expect("it is told");
    line.split_whitespace().nth(1).expect("a number").parse().expect("a number")
}

#[test]
fn damaged_frames_are_refused() {
    let told = std::env::var("FOREBAY_FUZZED_MESSAGES").ok();
    let frames = told.map_or(FRAMES, |text| text.parse().expect("a number of frames"));
    let (seeds, mut dice, before) = (seeds(), Dice(1), peak());
    let (mut taken, mut refused) = (0_u64, 0_u64);
    for number in 0..frames {
        let mut bytes = seeds[number as usize % seeds.len()].clone();
        dice.damage(&mut bytes);
        let (mut near, mut far) = UnixStream::pair().expect("a socket");
        near.write_all(&bytes).expect("it fits into the socket");
        drop(near);
        let mut reader = FrameReader::default();
        // The last answer is an error: the other end has closed.
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
    let grown = peak().saturating_sub(before);
    assert!(grown < MOST_GROWTH_KIB, "{grown} KiB more than before");
}
