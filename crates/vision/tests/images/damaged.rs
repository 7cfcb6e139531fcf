//! Damaged files: preparing any file returns patches or an error, in bounded memory.

use std::time::{Duration, Instant};

use forebay_vision::{Limits, Preparer};
use proptest::test_runner::{RngAlgorithm, TestRng};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::files::{FILES, crc32, prepare};

/// The limit on the address space of the whole test. A file may take a little more than 16 bytes
/// per pixel. An allocation beyond this limit would abort the process.
const MEMORY: u64 = 2 << 30;
const LIMITS: Limits = Limits { max_pixels: 4_000_000, max_ratio: 200 };

/// Byte values that have a meaning in one of the formats: JPEG markers, sizes, ends of ranges.
const TELLING: [u8; 16] =
    [0, 1, 2, 4, 8, 16, 0x11, 0x22, 0x7f, 0x80, 0xc0, 0xc2, 0xc4, 0xda, 0xdd, 0xff];

struct Damage(TestRng);

impl Damage {
    fn below(&mut self, end: usize) -> usize {
        use proptest::prelude::Rng;
        (self.0.next_u64() % end.max(1) as u64) as usize
    }

    fn place(&mut self, file: &[u8]) -> usize {
        // Half of the damage is in the headers and tables.
        let end = if self.below(2) == 0 { file.len() } else { file.len().min(300) };
        self.below(end)
    }

    fn file(&mut self, whole: &[u8]) -> Vec<u8> {
        let mut file = whole.to_vec();
        for _ in 0..=self.below(6) {
            let place = self.place(&file);
            let end = (place + 1 + self.below(40)).min(file.len());
            match self.below(8) {
                0 => file.truncate(place),
                1 => file.insert(place, self.below(256) as u8),
                2 => drop(file.drain(place..end)),
                3 => {
                    let piece = file[place..end].to_vec();
                    let to = self.below(file.len() + 1);
                    drop(file.splice(to..to, piece));
                }
                kind => {
                    let byte = match kind {
                        4 => self.below(256) as u8,
                        5 => file.get(place).copied().unwrap_or_default() ^ (1 << self.below(8)),
                        _ => TELLING[self.below(TELLING.len())],
                    };
                    if let Some(at) = file.get_mut(place) {
                        *at = byte;
                    }
                }
            }
        }
        if self.below(4) > 0 {
            mend(&mut file);
        }
        file
    }
}

/// Corrects the checksums of a PNG's chunks. Otherwise a decoder stops at the first wrong checksum.
fn mend(file: &mut [u8]) {
    let mut rest = match file.strip_prefix(b"\x89PNG\r\n\x1a\n") {
        Some(rest) => rest.len(),
        None => return,
    };
    while rest >= 12 {
        let chunk = file.len() - rest;
        let length = file[chunk..].first_chunk().map_or(0, |length| u32::from_be_bytes(*length));
        let length = length as usize;
        if length > rest - 12 {
            return;
        }
        let sum = crc32(&file[chunk + 4..chunk + 8 + length]);
        file[chunk + 8 + length..chunk + 12 + length].copy_from_slice(&sum.to_be_bytes());
        rest -= 12 + length;
    }
}

/// `make test-fuzz-images` damages ten thousand files of each format.
#[test]
fn damaged_files_end_with_patches_or_a_sentence() {
    let count = std::env::var("FOREBAY_FUZZED_IMAGES").map_or(300, |count| count.parse().unwrap());
    let before = getrlimit(Resource::As);
    setrlimit(Resource::As, Rlimit { current: Some(MEMORY), ..before }).unwrap();
    let mut preparer = Preparer::new();
    for (format, files) in FILES {
        let mut damage = Damage(TestRng::deterministic_rng(RngAlgorithm::ChaCha));
        let (mut prepared, mut slowest) = (0, Duration::ZERO);
        for number in 0..count {
            let file = damage.file(files[number % files.len()]);
            let start = Instant::now();
            match prepare(&mut preparer, &file, &LIMITS) {
                Ok(_) => prepared += 1,
                Err(error) => {
                    let told = error.to_string();
                    assert!(told.len() < 400, "{told}");
                    assert!(!told.contains("gave up"), "a decoder panicked: {format} {number}");
                }
            }
            slowest = slowest.max(start.elapsed());
        }
        println!("{format}: {prepared} of {count} prepared, the slowest took {slowest:?}");
        // Otherwise only the headers would have been tested.
        assert!(prepared > count / 100, "{format}: {prepared}");
        assert!(prepared < count);
    }
    setrlimit(Resource::As, before).unwrap();
}

#[test]
fn a_file_cut_anywhere_does_not_panic() {
    let mut preparer = Preparer::new();
    for (_, files) in FILES {
        for file in files {
            for length in (0..file.len()).step_by(7) {
                let _ = prepare(&mut preparer, &file[..length], &LIMITS);
            }
        }
    }
}
