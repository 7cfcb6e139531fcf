//! Resizes images with exactly the same results as torchvision.
//!
//! Both torchvision (for bytes, with antialiasing) and `fast_image_resize` compute in integers,
//! with equal coefficients, and round to bytes between the two axes. They differ in the order of
//! the axes. torchvision starts with rows, so here each axis is resized by a separate call.

use fast_image_resize::images::{Image, ImageRef};
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer};

use crate::processing::Filter;

/// The number of pixels per row, and the number of rows.
type Size = (u32, u32);

/// The buffers for resizing, which are reused for all images.
#[derive(Debug, Default)]
pub(crate) struct Scaler {
    resizer: Resizer,
    narrowed: Vec<u8>,
    resized: Vec<u8>,
}

impl Scaler {
    /// Resizes the image `rgb` from size `from` to size `to`.
    pub(crate) fn resize<'a>(
        &'a mut self,
        rgb: &'a [u8],
        from: Size,
        to: Size,
        filter: Filter,
    ) -> &'a [u8] {
        let Self { resizer, narrowed, resized } = self;
        let between = (to.0, from.1);
        let rows = if from == between {
            rgb
        } else {
            one_axis(resizer, filter, rgb, from, narrowed, between)
        };
        if between == to { rows } else { one_axis(resizer, filter, rows, between, resized, to) }
    }

    /// Frees buffers that only an unusually large image needed.
    pub(crate) fn trim(&mut self, bytes: usize) {
        for buffer in [&mut self.narrowed, &mut self.resized] {
            if buffer.len() > bytes {
                *buffer = Vec::new();
            }
        }
        self.resizer.reset_internal_buffers();
    }
}

/// Resizes an image along one axis.
fn one_axis<'a>(
    resizer: &mut Resizer,
    filter: Filter,
    rgb: &[u8],
    from: Size,
    buffer: &'a mut Vec<u8>,
    to: Size,
) -> &'a [u8] {
    let kernel = match filter {
        Filter::Bilinear => FilterType::Bilinear,
        Filter::Bicubic => FilterType::CatmullRom,
    };
    let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(kernel));
    let out = room(buffer, to.0 as usize * to.1 as usize * 3);
    let source = ImageRef::new(from.0, from.1, rgb, PixelType::U8x3);
    let target = Image::from_slice_u8(to.0, to.1, &mut *out, PixelType::U8x3);
    let (source, mut target) =
        source.ok().zip(target.ok()).expect("buffers of their images' sizes");
    resizer.resize(&source, &mut target, &options).expect("two images of one kind");
    out
}

/// Returns `bytes` bytes of `buffer`, with undefined content.
pub(crate) fn room(buffer: &mut Vec<u8>, bytes: usize) -> &mut [u8] {
    if buffer.len() < bytes {
        // The kernel zeroes new memory, and the old content is not copied.
        *buffer = vec![0; bytes];
    }
    &mut buffer[..bytes]
}

#[cfg(test)]
mod tests {
    use super::*;

    const CUBIC: Filter = Filter::Bicubic;

    /// The expected values are those of torchvision 0.29.2. `tests/vision` compares a thousand
    /// sizes with torchvision.
    #[test]
    fn rows_come_first() {
        let rgb: Vec<u8> = (0..48u32).map(|place| (place * place * 37 % 256) as u8).collect();
        let mut scaler = Scaler::default();
        let both = scaler.resize(&rgb, (4, 4), (3, 6), CUBIC).to_vec();
        let mut second = Scaler::default();
        let rows = second.resize(&rgb, (4, 4), (3, 4), CUBIC).to_vec();
        let mut third = Scaler::default();
        assert_eq!(both, third.resize(&rows, (3, 4), (3, 6), CUBIC));
        let mut fourth = Scaler::default();
        let columns = fourth.resize(&rgb, (4, 4), (4, 6), CUBIC).to_vec();
        let mut fifth = Scaler::default();
        assert_ne!(both, fifth.resize(&columns, (4, 6), (3, 6), CUBIC));
    }

    #[test]
    fn an_image_of_its_size_stays_where_it_is() {
        let rgb = [1; 12];
        let mut scaler = Scaler::default();
        assert_eq!(scaler.resize(&rgb, (2, 2), (2, 2), CUBIC).as_ptr(), rgb.as_ptr());
    }
}
