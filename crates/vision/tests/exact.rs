//! Every value as Pillow decodes it, but for JPEG, and as transformers' processor resizes and cuts it. `scripts/image_fixtures.py` wrote
//! what is expected.

use std::collections::BTreeMap;
use std::path::PathBuf;

use forebay_vision::{Geometry, Limits, inspect, prepare};

const MERGE: u32 = 2;

fn data(name: &str) -> Vec<u8> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    std::fs::read(folder.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn geometry(patch: u32) -> Geometry {
    match patch {
        16 => Geometry { patch, merge: MERGE, min_pixels: 65_536, max_pixels: 16_777_216 },
        _ => Geometry { patch, merge: MERGE, min_pixels: 3136, max_pixels: 12_845_056 },
    }
}

/// The image that `drawn` of the script draws.
fn drawn(kind: u64, width: u32, height: u32, seed: u64) -> Vec<u8> {
    let value = |x: u64, y: u64, c: u64| match kind {
        0 => {
            let bits = (y * 2_654_435_761)
                .wrapping_add(x * 2_246_822_519)
                .wrapping_add(c * 3_266_489_917)
                .wrapping_add(seed * 668_265_263)
                & 0xffff_ffff;
            let bits = (bits ^ (bits >> 15)).wrapping_mul(2_246_822_519) & 0xffff_ffff;
            bits >> 24
        }
        1 => (x * (1 + seed % 3) + y * (1 + seed % 5) + c * 40 + seed) >> 2,
        _ => (x * x * (1 + seed % 7) + y * y * 3 + x * y * c + seed) >> 9,
    };
    let pixels = (0..u64::from(height)).flat_map(|y| {
        (0..u64::from(width)).flat_map(move |x| (0..3).map(move |c| value(x, y, c) as u8))
    });
    pixels.collect()
}

/// A BMP file of 24 bits, the simplest there is: rows from the bottom, blue first, in multiples of four bytes.
fn bmp(pixels: &[u8], width: u32, height: u32) -> Vec<u8> {
    let row = (3 * width).next_multiple_of(4) as usize;
    let size = 54 + row * height as usize;
    let mut file = b"BM".to_vec();
    file.extend((size as u32).to_le_bytes());
    file.extend([0; 4]);
    file.extend(54_u32.to_le_bytes());
    file.extend(40_u32.to_le_bytes());
    file.extend(width.to_le_bytes());
    file.extend(height.to_le_bytes());
    file.extend([1, 0, 24, 0]);
    file.extend([0; 24]);
    for line in pixels.chunks_exact(3 * width as usize).rev() {
        let start = file.len();
        file.extend(line.as_chunks::<3>().0.iter().flat_map(|&[r, g, b]| [b, g, r]));
        file.resize(start + row, 0);
    }
    file
}

fn patches(file: &[u8], geometry: &Geometry) -> (u32, u32, Vec<u8>) {
    let picture = inspect(file, geometry, Limits::default()).expect("a picture");
    let prepared = prepare(file, &picture, geometry).expect("patches");
    let mut out = Vec::new();
    let written: Result<(), ()> = prepared.write(|band| {
        out.extend_from_slice(band);
        Ok(())
    });
    assert_eq!((written, out.len()), (Ok(()), picture.shape.bytes()));
    (picture.shape.rows, picture.shape.columns, out)
}

fn check(part: impl Fn(usize) -> bool) {
    let text = data("resized.json");
    let expected: Vec<[u64; 8]> = serde_json::from_slice(&text).expect("JSON");
    assert_eq!(expected.len(), 1000);
    for (_, [patch, width, height, kind, seed, rows, columns, crc]) in
        expected.into_iter().enumerate().filter(|(at, _)| part(*at))
    {
        let (patch, width, height) = (patch as u32, width as u32, height as u32);
        let file = bmp(&drawn(kind, width, height, seed), width, height);
        let (high, wide, out) = patches(&file, &geometry(patch));
        let told = format!("{width}x{height}, kind {kind}, patches of {patch}");
        assert_eq!((u64::from(high), u64::from(wide)), (rows, columns), "{told}");
        assert_eq!(u64::from(crc32fast::hash(&out)), crc, "{told}");
    }
}

#[test]
fn patches_are_those_of_transformers() {
    check(|at| at % 16 == 0);
}

#[test]
#[ignore = "a minute: `make test-images` runs it"]
fn all_patches_are_those_of_transformers() {
    check(|_| true);
}

/// Cuts nothing and resizes nothing: patches are the image's pixels.
const PLAIN: Geometry = Geometry { patch: 1, merge: 1, min_pixels: 1, max_pixels: 1 << 30 };

fn expected() -> BTreeMap<String, [u64; 3]> {
    serde_json::from_slice(&data("files.json")).expect("JSON")
}

#[test]
fn files_are_read_as_pillow_reads_them() {
    let mut exact = expected();
    exact.retain(|name, _| !name.ends_with(".jpg"));
    assert!(exact.len() >= 8);
    for (name, [width, height, crc]) in exact {
        let file = data(&name);
        let picture = inspect(&file, &PLAIN, Limits::default()).expect("a picture");
        let size = (u64::from(picture.width), u64::from(picture.height));
        assert_eq!(size, (width, height), "{name}");
        let (_, _, out) = patches(&file, &PLAIN);
        assert_eq!(u64::from(crc32fast::hash(&out)), crc, "{name}");
    }
}

/// Pillow decodes JPEG with libjpeg-turbo, whose chroma is smoother where it was subsampled ([ADR 38](../../../docs/adr)).
#[test]
fn jpeg_files_are_read_nearly_as_pillow_reads_them() {
    let mut jpeg = expected();
    jpeg.retain(|name, _| name.ends_with(".jpg"));
    assert!(jpeg.len() >= 20);
    let (mut values, mut levels) = (0, 0);
    for (name, [width, height, _]) in jpeg {
        let (rows, columns, ours) = patches(&data(&name), &PLAIN);
        assert_eq!((u64::from(columns), u64::from(rows)), (width, height), "{name}");
        let (_, _, theirs) = patches(&data(&format!("{name}.png")), &PLAIN);
        let apart: u64 = ours.iter().zip(&theirs).map(|(a, b)| u64::from(a.abs_diff(*b))).sum();
        let mean = apart as f64 / ours.len() as f64;
        assert!(mean < 3.0, "{name}: {mean} levels on average");
        values += ours.len() as u64;
        levels += apart;
    }
    let mean = levels as f64 / values as f64;
    assert!(mean < 1.0, "{mean} levels on average");
}
