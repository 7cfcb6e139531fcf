//! Damages messages, for tests of the code that reads them, in this crate and in `outpost`.
//!
//! A message is either a list of little-endian words, of which the first may be a length, or a word
//! with a length and then JSON.

use proptest::prelude::Rng as _;
use proptest::test_runner::{RngAlgorithm, TestRng};

/// The largest amount of memory that reading may allocate. For a message that announces 256 MiB,
/// the memory must not be allocated before the data arrives.
const MOST_GROWTH_KIB: u64 = 64 << 10;
/// Values for damaged words, in addition to the message's length.
const EXTREMES: [u32; 9] = [0, 1, 2, 1 << 16, 1 << 20, 1 << 26, (1 << 26) + 1, 1 << 31, u32::MAX];
/// Bytes that have a meaning in JSON, or are not valid text.
const TELLING: &[u8] = b"{}[]\",:0-e\\u\xff";

/// The number of messages in a test: `ordinary`, unless `make test-fuzz-outposts` sets another
/// number.
pub(crate) fn messages(ordinary: u64) -> u64 {
    let told = std::env::var("FOREBAY_FUZZED_MESSAGES").ok();
    told.map_or(ordinary, |text| text.parse().expect("a number of messages"))
}

/// The peak memory of this process, in KiB.
pub(crate) struct Peak(u64);

impl Peak {
    pub(crate) fn now() -> Self {
        let status = std::fs::read_to_string("/proc/self/status").expect("it is there");
        let line = status.lines().find(|line| line.starts_with("VmHWM:")).expect("it is told");
        let word = line.split_whitespace().nth(1).expect("a number");
        Self(word.parse().expect("a number"))
    }

    /// Fails if the peak has grown by more than readers may allocate.
    pub(crate) fn check(self) {
        let grown = Self::now().0.saturating_sub(self.0);
        assert!(grown < MOST_GROWTH_KIB, "{grown} KiB more than before");
    }
}

/// A random generator of damage, with the same sequence in every run.
pub(crate) struct Damage(TestRng);

impl Damage {
    pub(crate) fn new() -> Self {
        Self(TestRng::deterministic_rng(RngAlgorithm::ChaCha))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Returns a number below `end`; 0 if `end` is 0.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    /// Damages a message at up to four positions.
    pub(crate) fn apply(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(4) {
            let (at, other) = (self.below(bytes.len()), self.below(bytes.len()));
            match self.below(7) {
                0 if !bytes.is_empty() => bytes[at] ^= 1 << self.below(8),
                1 if !bytes.is_empty() => bytes[at] = self.next() as u8,
                2 => bytes.truncate(at),
                3 => bytes.insert(at, TELLING[self.below(TELLING.len())]),
                4 => {
                    let part = bytes[at.min(other)..at.max(other)].to_vec();
                    bytes.splice(at..at, part);
                }
                5 if bytes.len() >= 8 => {
                    // Copies whole words, so that later words stay aligned.
                    let (one, end) = (at.min(other) & !3, at.max(other) & !3);
                    let part = bytes[one..end].to_vec();
                    bytes.splice(one..one, part);
                }
                6 if bytes.len() >= 4 => {
                    let word = [0, at & !3][self.below(2)].min(bytes.len() - 4);
                    let own = bytes.len() as u32;
                    let value = *EXTREMES.get(self.below(EXTREMES.len() + 1)).unwrap_or(&own);
                    bytes[word..word + 4].copy_from_slice(&value.to_le_bytes());
                }
                _ => {}
            }
        }
    }
}
