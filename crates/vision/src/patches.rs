//! The order of bytes that a vision tower reads, and the names of images.

use crate::decode::decode;
use crate::error::ImageError;
use crate::file::Picture;
use crate::geometry::Geometry;
use crate::resize::resize;

/// Bytes of a pixel.
const CHANNELS: usize = 3;

/// The name of what `file` becomes for models that cut images like this: the first half of a BLAKE3 hash of both. Everybody who has the file
/// computes the same.
#[must_use]
pub fn identity(file: &[u8], geometry: &Geometry) -> u128 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"forebay image 1");
    for number in [u64::from(geometry.patch), u64::from(geometry.merge)] {
        hasher.update(&number.to_le_bytes());
    }
    for number in [geometry.min_pixels, geometry.max_pixels] {
        hasher.update(&number.to_le_bytes());
    }
    hasher.update(file);
    let hash = hasher.finalize();
    let half = hash.as_bytes().iter().take(16);
    half.rev().fold(0, |number, &byte| number << 8 | u128::from(byte))
}

/// An image that was decoded and resized.
pub struct Prepared {
    pixels: Vec<u8>,
    width: usize,
    geometry: Geometry,
}

/// Decodes and resizes the image of `file`, whose header is `picture`.
///
/// # Errors
/// The file is broken.
pub fn prepare(
    file: &[u8],
    picture: &Picture,
    geometry: &Geometry,
) -> Result<Prepared, ImageError> {
    let shape = &picture.shape;
    let pixels = resize(decode(file, picture)?, shape.width, shape.height)?;
    Ok(Prepared { pixels, width: shape.width as usize, geometry: *geometry })
}

impl Prepared {
    /// Hands out the patches, as many bytes as the shape says: positions row by row, of each its `merge` times `merge` patches row by row, of
    /// each patch its red pixels row by row, then the green, then the blue ones.
    ///
    /// # Errors
    /// That of `put`.
    pub fn write<E>(&self, mut put: impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        let Geometry { patch, merge, .. } = self.geometry;
        // A row of positions is a band of so many rows of pixels, and as many bytes of patches.
        let band_bytes = CHANNELS * self.width * (patch * merge) as usize;
        let mut out = vec![0; band_bytes];
        for band in self.pixels.chunks_exact(band_bytes) {
            cut(band, self.width, &self.geometry, &mut out);
            put(&out)?;
        }
        Ok(())
    }
}

/// Cuts a band of pixels, in rows of `width`, into patches.
fn cut(pixels: &[u8], width: usize, geometry: &Geometry, out: &mut [u8]) {
    let (patch, merge) = (geometry.patch as usize, geometry.merge as usize);
    let (row_bytes, plane) = (CHANNELS * width, patch * patch);
    let patch_bytes = CHANNELS * plane;
    let positions = width / (patch * merge);
    for (y, row) in pixels.chunks_exact(row_bytes).enumerate() {
        let (patch_row, line) = (y / patch, y % patch);
        let pieces = row.chunks_exact(CHANNELS * patch);
        for (number, piece) in pieces.enumerate().take(positions * merge) {
            let (position, patch_column) = (number / merge, number % merge);
            let at = (position * merge + patch_row) * merge + patch_column;
            let start = at * patch_bytes + line * patch;
            let (red, rest) = out[start..].split_at_mut(plane);
            let (green, blue) = rest.split_at_mut(plane);
            let planes = red[..patch].iter_mut().zip(&mut green[..patch]).zip(&mut blue[..patch]);
            for (((red, green), blue), pixel) in planes.zip(piece.chunks_exact(CHANNELS)) {
                (*red, *green, *blue) = (pixel[0], pixel[1], pixel[2]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry { patch: 2, merge: 2, min_pixels: 1, max_pixels: 1 << 20 };

    #[test]
    fn patches_lie_as_a_transpose_of_eight_axes_has_them() {
        let (width, height) = (12_usize, 8_usize);
        let pixels: Vec<u8> = (0..CHANNELS * width * height).map(|at| at as u8).collect();
        let image = Prepared { pixels: pixels.clone(), width, geometry: GEOMETRY };
        let mut out = Vec::new();
        let written: Result<(), ()> = image.write(|band| {
            out.extend_from_slice(band);
            Ok(())
        });
        assert_eq!(written, Ok(()));
        let (rows, columns) = (height / 4, width / 4);
        let mut expected = Vec::new();
        for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |c| (row, c))) {
            for (down, right) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                for channel in 0..CHANNELS {
                    for (y, x) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                        let y = (row * 2 + down) * 2 + y;
                        let x = (column * 2 + right) * 2 + x;
                        expected.push(pixels[(y * width + x) * CHANNELS + channel]);
                    }
                }
            }
        }
        assert_eq!(out, expected);
    }

    #[test]
    fn a_name_depends_on_the_file_and_on_how_it_is_cut() {
        let other = Geometry { min_pixels: 2, ..GEOMETRY };
        let names = [
            identity(b"a", &GEOMETRY),
            identity(b"b", &GEOMETRY),
            identity(b"a", &other),
            identity(b"", &GEOMETRY),
        ];
        assert!((0..4).all(|at| !names[at + 1..].contains(&names[at])));
        assert_eq!(names[0], identity(b"a", &GEOMETRY));
    }
}
