//! The image inputs of the served model.

use forebay_vision::Processing;

/// The images that the served model accepts, and their limits.
#[derive(Debug, Clone, Copy)]
pub struct ImageModel {
    /// How images are resized and cut into patches.
    pub processing: Processing,
    /// The token id at the positions of an image.
    pub token: i32,
    /// The maximum number of images per request.
    pub most: u32,
    /// The limits of one image.
    pub limits: forebay_vision::Limits,
}

impl ImageModel {
    /// Returns the bytes to reserve for `threads` decoding threads, out of the budget of all
    /// requests. Enough for images of the maximum size, but at most half of the budget.
    #[must_use]
    pub fn decoding_bytes(&self, threads: usize, of_requests: usize) -> usize {
        let largest = self.limits.decoding_bytes(&self.processing);
        largest.saturating_mul(threads.max(1)).min(of_requests / 2)
    }
}
