//! Bytes that images need while they are converted to patches.

use forebay_vision::{Header, Limits, Preparer, Processing};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::json;

use crate::alone;
use crate::counting::{mark, peak};
use crate::fake::{IMAGE, ModelKind, TestServer};

const SIDE: u32 = 2000;

/// Returns a BMP of 24 bits per pixel.
fn bmp() -> Vec<u8> {
    let bytes = 3 * SIDE * SIDE;
    let mut file = b"BM".to_vec();
    for number in [54 + bytes, 0, 54, 40, SIDE, SIDE] {
        file.extend(number.to_le_bytes());
    }
    file.extend([1, 0, 24, 0]);
    for number in [0, bytes, 0, 0, 0, 0_u32] {
        file.extend(number.to_le_bytes());
    }
    file.resize((54 + bytes) as usize, 77);
    file
}

/// Returns an uncompressed PNG with four channels of 16 bits.
fn png() -> Vec<u8> {
    let chunk = |file: &mut Vec<u8>, name: &[u8; 4], content: &[u8]| {
        file.extend((content.len() as u32).to_be_bytes());
        let from = file.len();
        file.extend(name);
        file.extend(content);
        let mut crc = !0_u32;
        for byte in &file[from..] {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg());
            }
        }
        file.extend((!crc).to_be_bytes());
    };
    let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
    let header = [&SIDE.to_be_bytes()[..], &SIDE.to_be_bytes(), &[16, 6, 0, 0, 0]].concat();
    chunk(&mut file, b"IHDR", &header);
    let mut data = vec![0x78, 1];
    let row = 1 + 8 * SIDE as usize;
    let (mut a, mut b) = (1_u32, 0_u32);
    for number in 0..SIDE {
        data.push(u8::from(number + 1 == SIDE));
        data.extend((row as u16).to_le_bytes());
        data.extend((!(row as u16)).to_le_bytes());
        data.extend(std::iter::repeat_n(0, row));
        for _ in 0..row {
            a %= 65_521;
            b = (b + a) % 65_521;
        }
    }
    data.extend(((b << 16) | a).to_be_bytes());
    chunk(&mut file, b"IDAT", &data);
    chunk(&mut file, b"IEND", b"");
    file
}

/// Returns a lossless WebP of one colour: each of its codes has one symbol, so that a pixel takes
/// no bits.
fn webp(side: u32) -> Vec<u8> {
    let mut bits: Vec<bool> = Vec::new();
    let mut put = |value: u32, count: u32| bits.extend((0..count).map(|at| value >> at & 1 == 1));
    put(side - 1, 14);
    put(side - 1, 14);
    // No alpha, version 0; no transform, no color cache, one group of codes.
    put(0, 1 + 3);
    put(0, 3);
    for symbol in [90, 10, 20, 255, 0] {
        // A simple code of one symbol of 8 bits.
        put(0b101, 3);
        put(symbol, 8);
    }
    let mut content = vec![0x2f];
    content.extend(bits.chunks(8).map(|byte| {
        byte.iter().enumerate().fold(0_u8, |byte, (at, &bit)| byte | u8::from(bit) << at)
    }));
    content.resize(content.len().next_multiple_of(2), 0);
    let mut file = b"RIFF".to_vec();
    file.extend((12 + content.len() as u32).to_le_bytes());
    file.extend(b"WEBPVP8L");
    file.extend((content.len() as u32).to_le_bytes());
    file.extend(content);
    file
}

/// The decoder's memory follows from the header, so that the bytes can be reserved before decoding.
#[tokio::test]
async fn an_image_takes_no_more_bytes_than_its_header_says() {
    let _alone = alone().await;
    let processing = Processing::new(16, 2, 65_536, 16_777_216).unwrap();
    for (name, file) in [("BMP", bmp()), ("PNG", png()), ("WebP", webp(SIDE))] {
        let header = Header::read(&file, &Limits::default()).unwrap();
        assert_eq!(header.size(), (SIDE, SIDE), "{name}");
        let told = header.decoding_bytes(&processing);
        let start = mark();
        let grid = processing.grid(SIDE, SIDE);
        let mut patches = vec![0; processing.bytes(grid)];
        Preparer::new().prepare(&file, &header, &processing, &mut patches).unwrap();
        let taken = peak(start);
        println!("{name}: {} bytes of a file take {taken} of {told} bytes", file.len());
        assert!(taken <= told, "{name}: {taken} bytes, and {told} were reserved");
        assert!(taken > 3 * (SIDE * SIDE) as usize, "{name}: {taken}");
    }
    let most = Limits { max_pixels: u64::from(SIDE * SIDE), ..Limits::default() };
    let largest = most.decoding_bytes(&processing);
    let header = Header::read(&bmp(), &most).unwrap();
    assert!(
        (header.decoding_bytes(&processing)..2 * header.decoding_bytes(&processing) + (32 << 20))
            .contains(&largest)
    );
}

/// A file of a few bytes may be an image that needs more than the whole budget for decoding.
#[tokio::test]
async fn an_image_beyond_what_is_set_aside_is_refused_by_its_header() {
    let _alone = alone().await;
    let mut server = TestServer::of_model(ModelKind::Sees, Some("a"), |_| {}).await;
    let ask = |side| {
        let url = format!("data:image/webp;base64,{}", BASE64_STANDARD.encode(webp(side)));
        json!({"input_ids": [IMAGE], "image_data": url, "sampling_params": {"max_new_tokens": 1}})
    };
    // Threads of the server that still start may allocate meanwhile. Decoding would show each time.
    let mut least = usize::MAX;
    for _ in 0..3 {
        let start = mark();
        let (status, answer) = server.post("/generate", ask(SIDE)).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("image_data")), "{answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains("--max-request-bytes-in-flight"), "{message}");
        least = least.min(peak(start));
    }
    assert!(least < 1 << 20, "the image was decoded");
    // 40 x 40 pixels are a little more than one position.
    let (status, answer) = server.post("/generate", ask(40)).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(server.submitted().await.images.len(), 1);
}
