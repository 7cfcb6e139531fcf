//! Image files for the tests, and a function that prepares them.

use forebay_vision::{Header, ImageError, Limits, Preparer, Processing};
use image::{ExtendedColorType, ImageEncoder};

/// Small files, written by Pillow: every format, and every variant with separate decoding code.
pub(crate) const FILES: [(&str, &[&[u8]]); 5] = [
    (
        "png",
        &[
            include_bytes!("data/grey.png"),
            include_bytes!("data/turned.png"),
            include_bytes!("data/animated.png"),
        ],
    ),
    (
        "jpeg",
        &[
            include_bytes!("data/restarts.jpg"),
            include_bytes!("data/progressive.jpg"),
            include_bytes!("data/wide.jpg"),
            include_bytes!("data/inks.jpg"),
            include_bytes!("data/inks_uneven.jpg"),
        ],
    ),
    (
        "webp",
        &[
            include_bytes!("data/lossy.webp"),
            include_bytes!("data/lossy_alpha.webp"),
            include_bytes!("data/animated.webp"),
        ],
    ),
    ("gif", &[include_bytes!("data/palette.gif")]),
    ("bmp", &[include_bytes!("data/palette.bmp")]),
];

/// Returns a PNG of this size in a single colour.
pub(crate) fn png(width: u32, height: u32) -> Vec<u8> {
    let mut file = Vec::new();
    let pixels = vec![7; (width * height * 3) as usize];
    image::codecs::png::PngEncoder::new(&mut file)
        .write_image(&pixels, width, height, ExtendedColorType::Rgb8)
        .expect("a PNG");
    file
}

/// Returns the patches of a file, with Qwen3-VL's processing.
pub(crate) fn prepare(
    preparer: &mut Preparer,
    file: &[u8],
    limits: &Limits,
) -> Result<Vec<u8>, ImageError> {
    let header = Header::read(file, limits)?;
    let (width, height) = header.size();
    let processing = Processing::new(16, 2, 4096, 65_536).expect("sensible numbers");
    let mut patches = vec![0; processing.bytes(processing.grid(width, height))];
    preparer.prepare(file, &header, &processing, &mut patches)?;
    Ok(patches)
}

/// Returns the checksum of a PNG chunk.
pub(crate) fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |sum: u32, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
            (sum >> 1) ^ (0xedb8_8320 & (sum & 1).wrapping_neg())
        })
    })
}
