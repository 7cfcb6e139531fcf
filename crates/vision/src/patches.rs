//! Writes an image's pixels in the order in which a tower reads them.

use crate::processing::{Grid, Processing};

/// Writes a resized image, with three bytes per pixel, as patches. The order, from the outermost
/// loop to the innermost: positions, their `merge` x `merge` patches row by row, the three colours,
/// the rows of a patch.
pub(crate) fn write(image: &[u8], grid: Grid, processing: &Processing, patches: &mut [u8]) {
    match processing.patch() {
        // With the patch's side as a compile-time constant, this takes half the time.
        14 => write_side::<14>(image, grid, processing.merge(), 14, patches),
        16 => write_side::<16>(image, grid, processing.merge(), 16, patches),
        patch => write_side::<0>(image, grid, processing.merge(), patch, patches),
    }
}

fn write_side<const SIDE: usize>(
    image: &[u8],
    grid: Grid,
    merge: u32,
    patch: u32,
    patches: &mut [u8],
) {
    let patch = if SIDE == 0 { patch as usize } else { SIDE };
    let (merge, columns) = (merge as usize, grid.width as usize);
    let row_bytes = columns * merge * patch * 3;
    let mut out = patches.chunks_exact_mut(3 * patch * patch);
    for band in image.chunks_exact(row_bytes * patch * merge) {
        for column in 0..columns {
            for strip in band.chunks_exact(row_bytes * patch) {
                for inner in 0..merge {
                    let Some(out) = out.next() else { return };
                    let first = (column * merge + inner) * patch * 3;
                    let (red, rest) = out.split_at_mut(patch * patch);
                    let (green, blue) = rest.split_at_mut(patch * patch);
                    let rows =
                        strip.chunks_exact(row_bytes).map(|row| &row[first..first + 3 * patch]);
                    for (((row, red), green), blue) in rows
                        .zip(red.chunks_exact_mut(patch))
                        .zip(green.chunks_exact_mut(patch))
                        .zip(blue.chunks_exact_mut(patch))
                    {
                        for (((pixel, red), green), blue) in
                            row.as_chunks::<3>().0.iter().zip(red).zip(green).zip(blue)
                        {
                            [*red, *green, *blue] = *pixel;
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The reference: computes the location of each byte of a patch in the image by formula.
        #[test]
        fn every_byte_is_in_its_place(
            height in 1u32..4,
            width in 1u32..4,
            merge in 1u32..4,
            patch in prop::sample::select(vec![1u32, 2, 3, 14, 16]),
        ) {
            let processing = Processing::new(patch, merge, 1, 1 << 20).unwrap();
            let grid = Grid { height, width };
            let (wide, high) = processing.resized(grid);
            let image: Vec<u8> =
                (0..wide * high * 3).map(|place| (place.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
            let mut patches = vec![0; image.len()];
            write(&image, grid, &processing, &mut patches);
            let mut expected = patches.iter();
            for (row, column) in (0..height).flat_map(|row| (0..width).map(move |column| (row, column))) {
                for (inner_row, inner) in (0..merge).flat_map(|row| (0..merge).map(move |column| (row, column))) {
                    for colour in 0..3 {
                        for (y, x) in (0..patch).flat_map(|y| (0..patch).map(move |x| (y, x))) {
                            let y = (row * merge + inner_row) * patch + y;
                            let x = (column * merge + inner) * patch + x;
                            let place = (y * wide + x) * 3 + colour;
                            prop_assert_eq!(expected.next(), Some(&image[place as usize]));
                        }
                    }
                }
            }
        }
    }
}
