//! Damaged messages for the parsers of both ends of an outpost's connections. Each parser takes or
//! refuses them, without a panic, and within its limit of memory.

use std::io::Cursor;

use serde::de::DeserializeOwned;

use crate::bulk::{HEAD_BYTES, Head, PIECE_BYTES};
use crate::messages::{
    Answer, Collectives, FromOutpost, HandOrder, KNOCK_BYTES, Knock, Purpose, ToOutpost, read,
    write,
};

/// Messages in the ordinary test; `make test-fuzz-outposts` has a million.
const MESSAGES: u64 = 20_000;
/// The largest growth of memory by reads: some longest messages, on several threads.
const MOST_GROWTH_KIB: u64 = 64 << 10;

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

    /// Damages some bytes.
    fn damage(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(4) {
            let (at, from) = (self.below(bytes.len()), self.below(bytes.len()));
            match self.below(6) {
                0 if !bytes.is_empty() => bytes[at] ^= 1 << self.below(8),
                1 if !bytes.is_empty() => bytes[at] = self.next() as u8,
                2 => bytes.truncate(at),
                3 => bytes.insert(at, b"{}[]\",:0-e\\u\xff"[self.below(13)]),
                4 => {
                    let part = bytes[from.min(at)..from.max(at)].to_vec();
                    bytes.splice(at..at, part);
                }
                // The length, or an offset.
                _ if bytes.len() >= 4 => {
                    let extremes = [0, 1, bytes.len() as u32, 1 << 20, u32::MAX, 1 << 31];
                    let value = extremes[self.below(extremes.len())];
                    bytes[..4].copy_from_slice(&value.to_le_bytes());
                }
                _ => {}
            }
        }
    }
}

fn messages() -> u64 {
    let told = std::env::var("FOREBAY_FUZZED_MESSAGES").ok();
    told.map_or(MESSAGES, |text| text.parse().expect("a number of messages"))
}

/// The most memory that this process had at a time, in KiB.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("it is there");
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).expect("it is told");
    line.split_whitespace().nth(1).expect("a number").parse().expect("a number")
}

/// Reads messages of one kind to the end. Gives their number.
async fn all<T: DeserializeOwned>(bytes: &[u8]) -> usize {
    let mut stream = Cursor::new(bytes);
    let mut count = 0;
    while read::<T>(&mut stream).await.is_ok() {
        count += 1;
    }
    count
}

async fn seeds() -> Vec<Vec<u8>> {
    let env = vec![("FOREBAY_X".to_owned(), "é\"\\".to_owned()); 3];
    let collectives = Collectives::Machine;
    let order = HandOrder { id: u64::MAX, place: 3, hand: "torch".into(), env, collectives };
    let mut seeds = vec![Vec::new(); 8];
    let (id, status) = (7, "exit status 3".to_owned());
    write(&mut seeds[0], &Answer::Welcome).await.expect("written");
    write(&mut seeds[0], &Answer::Refused("no\n".repeat(50))).await.expect("written");
    write(&mut seeds[1], &Purpose::Join { name: "here".into(), hands: 8 }).await.expect("written");
    write(&mut seeds[2], &Purpose::Rank { id }).await.expect("written");
    write(&mut seeds[2], &Purpose::Bulk { id }).await.expect("written");
    write(&mut seeds[3], &ToOutpost::Ping).await.expect("written");
    write(&mut seeds[3], &ToOutpost::Mirror { id, bytes: 1 << 28 }).await.expect("written");
    write(&mut seeds[4], &ToOutpost::Spawn(order)).await.expect("written");
    write(&mut seeds[5], &FromOutpost::Pong).await.expect("written");
    write(&mut seeds[5], &FromOutpost::Ended { id, status }).await.expect("written");
    let deep = "[".repeat(2000);
    seeds[6] = [&(deep.len() as u32).to_le_bytes(), deep.as_bytes()].concat();
    seeds[7] = Knock::bytes(&[7; 32]).to_vec();
    seeds
}

#[test]
fn damaged_messages_are_refused_by_both_ends() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let seeds = seeds().await;
        let (mut dice, before) = (Dice(1), peak());
        let (mut taken, mut refused) = (0, 0);
        for number in 0..messages() {
            let mut bytes = seeds[number as usize % seeds.len()].clone();
            dice.damage(&mut bytes);
            let of = [
                all::<Purpose>(&bytes).await,
                all::<FromOutpost>(&bytes).await,
                all::<Answer>(&bytes).await,
                all::<ToOutpost>(&bytes).await,
            ];
            let found: usize = of.iter().sum();
            taken += found;
            refused += usize::from(found == 0);
            if let Some(first) = bytes.first_chunk::<KNOCK_BYTES>() {
                let _ = Knock::read(first);
            }
        }
        println!("{taken} messages taken, {refused} refused");
        assert!(taken > 0 && refused > 0, "both happen, else nothing was tried");
        let grown = peak().saturating_sub(before);
        assert!(grown < MOST_GROWTH_KIB, "{grown} KiB more than before");
    });
}

#[test]
fn damaged_heads_never_lead_out_of_the_arena() {
    let (mut dice, mut inside) = (Dice(2), 0);
    for _ in 0..messages() {
        let arena = (dice.next() >> (33 + dice.below(28))) as u32;
        let mut bytes = [0; HEAD_BYTES];
        let shift = dice.below(64);
        bytes.copy_from_slice(&(dice.next() >> shift).to_le_bytes());
        let length = 1 + dice.below(2 * PIECE_BYTES) as u32;
        if dice.below(2) == 0 {
            bytes[4..].copy_from_slice(&length.to_le_bytes());
        }
        if let Ok(Head { offset, length }) = Head::read(bytes, arena) {
            inside += 1;
            assert!(u64::from(offset) + u64::from(length) <= u64::from(arena));
            assert!((1..=PIECE_BYTES).contains(&(length as usize)));
            assert_eq!(Head { offset, length }.bytes(), bytes);
        }
    }
    assert!(inside > 0, "some are right");
}
