//! Invalid files that clients may send, and their errors.

use forebay_vision::{Format, ImageError, Limits, Preparer};

use crate::files::{FILES, crc32, png, prepare};

fn refusal(file: &[u8]) -> ImageError {
    prepare(&mut Preparer::new(), file, &Limits::default()).expect_err("a refusal")
}

/// Writes a size into a PNG's header, and corrects the header's checksum.
fn with_png_size(file: &[u8], width: u32, height: u32) -> Vec<u8> {
    let mut file = file.to_vec();
    file[16..20].copy_from_slice(&width.to_be_bytes());
    file[20..24].copy_from_slice(&height.to_be_bytes());
    let sum = crc32(&file[12..29]);
    file[29..33].copy_from_slice(&sum.to_be_bytes());
    file
}

#[test]
fn good_files_are_prepared() {
    let mut preparer = Preparer::new();
    for (format, files) in FILES {
        for file in files {
            let patches = prepare(&mut preparer, file, &Limits::default()).expect(format);
            let first = patches[0];
            assert!(patches.iter().any(|value| *value != first), "{format} has a single color");
        }
    }
}

#[test]
fn buffers_of_earlier_images_change_nothing() {
    let mut preparer = Preparer::new();
    let all = || {
        FILES
            .iter()
            .flat_map(|(_, files)| files.iter())
            .chain(FILES.iter().flat_map(|(_, files)| files.iter().rev()))
    };
    for file in all() {
        let alone = prepare(&mut Preparer::new(), file, &Limits::default());
        assert_eq!(prepare(&mut preparer, file, &Limits::default()), alone);
    }
}

#[test]
fn files_without_pixels() {
    assert!(matches!(
        refusal(&with_png_size(&png(8, 8), 0, 8)),
        ImageError::Damaged { .. } | ImageError::Empty { .. }
    ));
    let (_, jpegs) = FILES[1];
    let mut file = jpegs[0].to_vec();
    let frame = file.windows(2).position(|pair| pair == [0xff, 0xc0]).unwrap();
    file[frame + 5..frame + 7].fill(0);
    assert_eq!(refusal(&file), ImageError::Empty { width: 52, height: 0 });
    let (_, gifs) = FILES[3];
    let mut file = gifs[0].to_vec();
    file[6..8].fill(0);
    assert_eq!(refusal(&file), ImageError::Empty { width: 0, height: 40 });
}

#[test]
fn too_many_pixels_and_too_long() {
    let error = refusal(&with_png_size(&png(8, 8), 10_000, 10_000));
    assert_eq!(
        error.to_string(),
        "the image has 10000 x 10000 pixels, and 50000000 are the limit (--max-image-pixels)"
    );
    let error = refusal(&png(401, 2));
    assert_eq!(
        error.to_string(),
        "the image has 401 x 2 pixels: one side is more than 200 times the other"
    );
    assert!(prepare(&mut Preparer::new(), &png(400, 2), &Limits::default()).is_ok());
}

#[test]
fn a_header_that_promises_more_than_there_is() {
    let error = refusal(&with_png_size(&png(8, 8), 4000, 4000));
    assert!(matches!(error, ImageError::Damaged { format: Format::Png, .. }), "{error}");
}

#[test]
fn a_header_that_promises_less_than_there_is() {
    // All decoders skip rows beyond the height in the header, and decode the other rows.
    let small = with_png_size(&png(8, 8), 8, 4);
    assert_eq!(prepare(&mut Preparer::new(), &small, &Limits::default()).unwrap()[0], 7);
    // A GIF frame that is larger than its screen is refused, or decoded with no more memory than
    // the screen needs.
    let (_, gifs) = FILES[3];
    let mut file = gifs[0].to_vec();
    let frame = file.windows(2).position(|pair| pair == [0x2c, 0]).unwrap();
    file[frame + 5..frame + 9].fill(0xff);
    assert!(matches!(
        refusal(&file),
        ImageError::TooMuchMemory(Format::Gif) | ImageError::Damaged { .. }
    ));
}

#[test]
fn a_wrong_checksum_is_damage() {
    let mut file = png(8, 8);
    let data = file.windows(4).position(|name| name == b"IDAT").unwrap();
    file[data + 6] ^= 1;
    assert!(matches!(refusal(&file), ImageError::Damaged { format: Format::Png, .. }));
}

#[test]
fn half_a_file_is_damage() {
    for (format, files) in FILES {
        for file in files {
            // The first frame of an animation may be complete in the first half of the file, so
            // keep only a third.
            let error = prepare(&mut Preparer::new(), &file[..file.len() / 3], &Limits::default());
            assert!(matches!(error, Err(ImageError::Damaged { .. })), "{format}: {error:?}");
        }
    }
}

#[test]
fn other_files() {
    assert_eq!(refusal(b"%PDF-1.7"), ImageError::UnreadFormat("PDF"));
    assert_eq!(refusal(b"hello"), ImageError::UnknownFormat);
    assert_eq!(refusal(b""), ImageError::UnknownFormat);
    assert_eq!(
        refusal(b"hello").to_string(),
        "the data is no image: PNG, JPEG, WebP, GIF and BMP are read"
    );
}
