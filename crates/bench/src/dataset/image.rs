//! Images as `data:` URLs.

use std::io::Cursor;
use std::str::FromStr;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use clap::ValueEnum;
use image::RgbImage;
use rand::Rng as _;
use rand::rngs::ChaCha12Rng;

use super::args::ImageArgs;

/// Width and height in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resolution {
    /// Pixels from left to right.
    pub width: u32,
    /// Pixels from top to bottom.
    pub height: u32,
}

impl FromStr for Resolution {
    type Err = String;

    /// Parses `360p`, `720p`, `1080p`, `4k`, or `HEIGHTxWIDTH` in pixels.
    fn from_str(text: &str) -> Result<Self, String> {
        let (height, width) = match text.to_ascii_lowercase().as_str() {
            "360p" => (360, 640),
            "720p" => (720, 1280),
            "1080p" => (1080, 1920),
            "4k" => (2160, 3840),
            other => other
                .split_once('x')
                .and_then(|(height, width)| Some((height.parse().ok()?, width.parse().ok()?)))
                .ok_or("a resolution is 360p, 720p, 1080p, 4k, or HEIGHTxWIDTH")?,
        };
        // JPEG's limit on the size of a side.
        let possible = 1..=65_535;
        if !possible.contains(&height) || !possible.contains(&width) {
            return Err("a side of an image is 1 to 65535 pixels".to_owned());
        }
        Ok(Self { width, height })
    }
}

/// The compression of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ImageFormat {
    /// JPEG at quality 75.
    #[value(alias = "jpg")]
    Jpeg,
    /// PNG.
    Png,
}

/// The content of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ImageContent {
    /// Random pixels: large, and different in every request.
    Random,
    /// White: small, and the same in every request.
    Blank,
}

/// Creates an image as a `data:` URL.
///
/// # Errors
/// If the image can't be compressed.
pub(crate) fn address(args: &ImageArgs, generator: &mut ChaCha12Rng) -> anyhow::Result<String> {
    let Resolution { width, height } = args.image_resolution;
    let mut pixels = RgbImage::from_pixel(width, height, image::Rgb([255; 3]));
    if args.image_content == ImageContent::Random {
        generator.fill_bytes(&mut pixels);
    }
    let (format, mime) = match args.image_format {
        ImageFormat::Jpeg => (image::ImageFormat::Jpeg, "image/jpeg"),
        ImageFormat::Png => (image::ImageFormat::Png, "image/png"),
    };
    let mut file = Cursor::new(Vec::new());
    pixels.write_to(&mut file, format)?;
    let mut address = format!("data:{mime};base64,");
    BASE64_STANDARD.encode_string(file.into_inner(), &mut address);
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::seed::{Purpose, generator};

    fn made(format: ImageFormat, content: ImageContent, size: &str, index: u64) -> RgbImage {
        let args = ImageArgs {
            image_count: 1,
            image_resolution: size.parse().expect("a resolution"),
            image_format: format,
            image_content: content,
        };
        let mut pixels = generator(1, Purpose::Pixels, index);
        let address = address(&args, &mut pixels).expect("an image");
        let (mime, kind) = match format {
            ImageFormat::Jpeg => ("data:image/jpeg;base64,", image::ImageFormat::Jpeg),
            ImageFormat::Png => ("data:image/png;base64,", image::ImageFormat::Png),
        };
        let data = address.strip_prefix(mime).expect("the right type");
        let file = BASE64_STANDARD.decode(data).expect("base64");
        image::load_from_memory_with_format(&file, kind).expect("an image").into_rgb8()
    }

    #[test]
    fn images_decode_to_their_resolution() {
        for format in [ImageFormat::Jpeg, ImageFormat::Png] {
            for content in [ImageContent::Random, ImageContent::Blank] {
                let image = made(format, content, "30x50", 0);
                assert_eq!((image.width(), image.height()), (50, 30));
                let white = image.pixels().all(|pixel| pixel.0 == [255; 3]);
                assert_eq!(white, content == ImageContent::Blank);
            }
        }
        let image = made(ImageFormat::Jpeg, ImageContent::Blank, "360p", 0);
        assert_eq!((image.width(), image.height()), (640, 360));
    }

    #[test]
    fn random_images_differ_and_come_back_with_the_seed() {
        let image = |index| made(ImageFormat::Png, ImageContent::Random, "8x8", index);
        assert_eq!(image(0), image(0));
        assert_ne!(image(0), image(1));
    }

    #[test]
    fn resolutions_are_read_as_height_times_width() {
        let read = |text: &str| text.parse::<Resolution>().map(|size| (size.width, size.height));
        assert_eq!(read("1080p"), Ok((1920, 1080)));
        assert_eq!(read("4K"), Ok((3840, 2160)));
        assert_eq!(read("720p"), Ok((1280, 720)));
        assert_eq!(read("100x200"), Ok((200, 100)));
        for wrong in ["", "5p", "x", "0x10", "10x70000", "-1x5", "1x2x3"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
