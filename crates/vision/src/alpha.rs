//! Converts pixels of any type to three bytes: grey to RGB, 16 bits to 8, and transparent pixels to
//! pixels blended with white.

use image::ColorType;

/// Writes pixels of type `color` as three bytes each. Returns false if the type is unknown.
///
/// The upper eight of 16 bits are kept, and alpha is blended as in Pillow's `paste`.
pub(crate) fn to_rgb(color: ColorType, raw: &[u8], rgb: &mut [u8]) -> bool {
    let out = rgb.as_chunks_mut::<3>().0.iter_mut();
    match color {
        ColorType::Rgb8 => rgb.copy_from_slice(raw),
        ColorType::L8 => out.zip(raw).for_each(|(to, grey)| *to = [*grey; 3]),
        ColorType::La8 => out.zip(raw.as_chunks().0).for_each(|(to, [grey, alpha])| {
            *to = [on_white(*grey, *alpha); 3];
        }),
        ColorType::Rgba8 => {
            out.zip(raw.as_chunks().0).for_each(|(to, [red, green, blue, alpha])| {
                *to = [red, green, blue].map(|value| on_white(*value, *alpha));
            })
        }
        ColorType::L16 => {
            out.zip(raw.as_chunks().0).for_each(|(to, grey)| *to = [high(*grey); 3]);
        }
        ColorType::La16 => wide::<2>(raw).zip(out).for_each(|([grey, alpha], to)| {
            *to = [on_white(grey, alpha); 3];
        }),
        ColorType::Rgb16 => wide::<3>(raw).zip(out).for_each(|(pixel, to)| *to = pixel),
        ColorType::Rgba16 => wide::<4>(raw).zip(out).for_each(|([red, green, blue, alpha], to)| {
            *to = [red, green, blue].map(|value| on_white(value, alpha));
        }),
        _ => return false,
    }
    true
}

/// Returns pixels of `N` 16-bit values, reduced to their upper eight bits.
fn wide<const N: usize>(raw: &[u8]) -> impl Iterator<Item = [u8; N]> {
    raw.chunks_exact(2 * N).map(|pixel| {
        let mut values = [0; N];
        values.iter_mut().zip(pixel.as_chunks().0).for_each(|(to, from)| *to = high(*from));
        values
    })
}

fn high(value: [u8; 2]) -> u8 {
    (u16::from_ne_bytes(value) >> 8) as u8
}

/// Blends a value with white. Shifts replace the division by 255, and give the same rounded result
/// for all bytes.
fn on_white(value: u8, alpha: u8) -> u8 {
    let sum = u32::from(value) * u32::from(alpha) + 255 * u32::from(255 - alpha) + 128;
    ((sum + (sum >> 8)) >> 8) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blending_rounds_to_the_nearest() {
        for value in 0..=255u8 {
            for alpha in 0..=255u8 {
                let share = f64::from(alpha) / 255.0;
                let exact = f64::from(value) * share + 255.0 * (1.0 - share);
                assert_eq!(on_white(value, alpha), exact.round() as u8, "{value} {alpha}");
            }
        }
    }

    #[test]
    fn kinds_of_pixels() {
        let rgb = |color, raw: &[u8]| {
            let mut out = [7; 3];
            assert!(to_rgb(color, raw, &mut out));
            out
        };
        let words = |values: &[u16]| -> Vec<u8> {
            values.iter().flat_map(|value| value.to_ne_bytes()).collect()
        };
        assert_eq!(rgb(ColorType::L8, &[9]), [9; 3]);
        assert_eq!(rgb(ColorType::La8, &[9, 0]), [255; 3]);
        assert_eq!(rgb(ColorType::Rgba8, &[1, 2, 3, 255]), [1, 2, 3]);
        assert_eq!(rgb(ColorType::L16, &words(&[0x12ff])), [0x12; 3]);
        assert_eq!(rgb(ColorType::La16, &words(&[0x1234, 0xffff])), [0x12; 3]);
        assert_eq!(rgb(ColorType::Rgb16, &words(&[0x0100, 0x02ff, 0x0380])), [1, 2, 3]);
        assert_eq!(rgb(ColorType::Rgba16, &words(&[0, 0, 0, 0x00ff])), [255; 3]);
        assert!(!to_rgb(ColorType::Rgb32F, &[0; 12], &mut [0; 3]));
    }
}
