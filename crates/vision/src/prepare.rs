//! Prepares images, one after another, from files to patches.

use crate::decode;
use crate::error::{ImageError, contained};
use crate::header::{Header, Source};
use crate::orientation::Orientation;
use crate::patches;
use crate::processing::Processing;
use crate::resize::{Scaler, room};

/// The largest buffer, in bytes, that is kept for the next image. A larger buffer is freed, so that
/// one very large image does not hold memory.
const KEPT: usize = 32 << 20;

/// Converts files to patches, one at a time. Each thread has a preparer, whose buffers are reused.
#[derive(Debug, Default)]
pub struct Preparer {
    raw: Vec<u8>,
    stored: Vec<u8>,
    upright: Vec<u8>,
    scaler: Scaler,
}

impl Preparer {
    /// Creates a preparer with empty buffers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Decodes `file`, whose header is `header`, and writes its patches as bytes of the shape
    /// `[patches, 3, patch, patch]`. Positions are row by row, and the `merge` x `merge` patches of
    /// a position are together. `patches` has to have [`Processing::bytes`] bytes, for the grid of
    /// [`Header::size`].
    ///
    /// # Errors
    /// The file is damaged, or needs more memory than its pixels explain. The content of `patches`
    /// is then unspecified.
    ///
    /// # Panics
    /// `patches` has another size.
    pub fn prepare(
        &mut self,
        file: &[u8],
        header: &Header,
        processing: &Processing,
        patches: &mut [u8],
    ) -> Result<(), ImageError> {
        let result = self.write(file, header, processing, patches);
        self.trim();
        result
    }

    fn write(
        &mut self,
        file: &[u8],
        header: &Header,
        processing: &Processing,
        patches: &mut [u8],
    ) -> Result<(), ImageError> {
        let size = header.size();
        let grid = processing.grid(size.0, size.1);
        assert_eq!(patches.len(), processing.bytes(grid), "room for the patches of the image");
        let stored = room(&mut self.stored, header.rgb_bytes());
        contained(header.format(), || match header.source {
            Source::Jpeg(frame) => frame.decode(file, stored),
            Source::Other(format) => decode::decode(header, format, file, &mut self.raw, stored),
        })?;
        let upright = if header.orientation == Orientation::UPRIGHT {
            &*stored
        } else {
            let upright = room(&mut self.upright, stored.len());
            let (width, height) = (header.width as usize, header.height as usize);
            header.orientation.turn(stored, width, height, upright);
            upright
        };
        let resized =
            self.scaler.resize(upright, size, processing.resized(grid), processing.filter());
        patches::write(resized, grid, processing, patches);
        Ok(())
    }

    fn trim(&mut self) {
        for buffer in [&mut self.raw, &mut self.stored, &mut self.upright] {
            if buffer.capacity() > KEPT {
                *buffer = Vec::new();
            }
        }
        self.scaler.trim(KEPT);
    }
}
