//! Files that are broken on purpose: none makes a panic, and none takes much more memory than the size that its header says.

#[path = "../../server/tests/resources/counting.rs"]
#[allow(dead_code, reason = "the server's tests use the rest")]
mod counting;

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use forebay_vision::{Format, Geometry, ImageError, Limits, inspect, prepare};

const GEOMETRY: Geometry = Geometry { patch: 4, merge: 2, min_pixels: 64, max_pixels: 1 << 16 };
/// Most pixels of a file here.
const LIMITS: Limits = Limits { pixels: 1 << 20 };
/// Bytes that a file's work may take for each pixel of its header, and besides.
const PIXEL_BYTES: usize = 64;
const SLACK: usize = 40 << 20;

/// Held by the test that measures: the allocator counts the whole process.
static ALONE: Mutex<()> = Mutex::new(());

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

fn files() -> Vec<(String, Vec<u8>)> {
    let entries =
        std::fs::read_dir(folder()).expect("the folder").map(|entry| entry.expect("fine"));
    let mut files: Vec<(String, Vec<u8>)> = entries
        .map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path()))
        .filter(|(name, _)| !name.ends_with(".json"))
        .map(|(name, path)| (name, std::fs::read(path).expect("the file")))
        .collect();
    files.sort();
    files
}

/// SplitMix64 (Steele, Lea, Flood 2014).
fn next(state: &mut u64) -> usize {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 8) as usize
}

fn mutated(file: &[u8], state: &mut u64) -> Vec<u8> {
    let mut file = file.to_vec();
    for _ in 0..1 + next(state) % 4 {
        let at = next(state) % file.len().max(1);
        let front = at % file.len().clamp(1, 64);
        match next(state) % 6 {
            0 => file.truncate(at),
            1 if !file.is_empty() => file[at] = next(state) as u8,
            2 if !file.is_empty() => file[at] ^= 1 << (next(state) % 8),
            // Headers are at the front.
            3 if !file.is_empty() => file[front] = next(state) as u8,
            4 => {
                let piece: Vec<u8> = (0..next(state) % 40).map(|_| next(state) as u8).collect();
                file.splice(at..at, piece);
            }
            _ => {
                let end = (at + next(state) % 200).min(file.len());
                let copy = file[at.min(end)..end].to_vec();
                file.extend(copy);
            }
        }
    }
    file
}

/// Reads a file as a server does; gives whether it is an image.
fn read(file: &[u8]) -> Result<(), ImageError> {
    let start = counting::mark();
    let picture = inspect(file, &GEOMETRY, LIMITS)?;
    let prepared = prepare(file, &picture, &GEOMETRY);
    let mut written = 0;
    if let Ok(prepared) = &prepared {
        let _: Result<(), ()> = prepared.write(|band| {
            written += band.len();
            Ok(())
        });
    }
    let pixels = picture.width as usize * picture.height as usize;
    let most = PIXEL_BYTES * pixels + SLACK;
    let took = counting::peak(start);
    assert!(took <= most, "{took} bytes for {}x{}", picture.width, picture.height);
    assert!(prepared.is_err() || written == picture.shape.bytes());
    prepared.map(drop)
}

#[test]
fn no_file_makes_a_panic() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let rounds: usize =
        std::env::var("FOREBAY_FUZZ").map_or(150, |count| count.parse().expect("a number"));
    let (mut state, mut images, mut refused) = (1, 0_usize, 0_usize);
    for (name, file) in files() {
        read(&file).unwrap_or_else(|error| panic!("{name}: {error}"));
        for _ in 0..rounds {
            match read(&mutated(&file, &mut state)) {
                Ok(()) => images += 1,
                Err(_) => refused += 1,
            }
        }
    }
    assert!(images > rounds && refused > rounds, "{images} images, {refused} refused");
}

#[test]
fn every_beginning_of_a_file_is_refused() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // Of an animation the first frame is enough.
    for (name, file) in files().into_iter().filter(|(name, _)| name != "frames.gif") {
        // Bytes behind the last pixel may be missing: JPEG's end marker, GIF's trailer, padding.
        for end in (0..file.len() * 3 / 4).step_by(5) {
            let read = read(&file[..end]);
            assert!(read.is_err(), "{name}, cut to {end} of {}", file.len());
        }
    }
}

#[test]
fn headers_that_say_too_much_are_refused_before_anything_is_decoded() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let png = std::fs::read(folder().join("plain.png")).expect("the file");
    let start = counting::mark();
    for (width, height) in [(1_u32 << 30, 1_u32 << 30), (1 << 20, 2), (0, 5)] {
        let mut file = png.clone();
        file[16..20].copy_from_slice(&width.to_be_bytes());
        file[20..24].copy_from_slice(&height.to_be_bytes());
        let crc = crc32fast::hash(&file[12..29]);
        file[29..33].copy_from_slice(&crc.to_be_bytes());
        assert!(inspect(&file, &GEOMETRY, LIMITS).is_err(), "{width}x{height}");
    }
    assert!(counting::peak(start) < 1 << 20);
    let strip = {
        let mut file = png.clone();
        file[16..20].copy_from_slice(&201_u32.to_be_bytes());
        file[20..24].copy_from_slice(&1_u32.to_be_bytes());
        let crc = crc32fast::hash(&file[12..29]);
        file[29..33].copy_from_slice(&crc.to_be_bytes());
        inspect(&file, &GEOMETRY, LIMITS)
    };
    assert_eq!(strip, Err(ImageError::TooLong { width: 201, height: 1 }));
    for other in [&b""[..], b"<svg></svg>", b"%PDF-1.7", b"II*\0", b"\0\0\0\x20ftypavif"] {
        assert_eq!(Format::of(other), None);
        assert_eq!(inspect(other, &GEOMETRY, LIMITS), Err(ImageError::Format));
    }
}
