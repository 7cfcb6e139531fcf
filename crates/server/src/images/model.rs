//! The image inputs of the served model.

use forebay_vision::Processing;

/// The images that the served model takes, and their limits.
#[derive(Debug, Clone, Copy)]
pub struct ImageModel {
    /// The processing that cuts images.
    pub processing: Processing,
    /// The token id at the positions of an image.
    pub token: i32,
    /// The largest number of images of a request.
    pub most: u32,
    /// The limits of one image.
    pub limits: forebay_vision::Limits,
}

impl ImageModel {
    /// Bytes to reserve for `threads` decoding threads, out of the budget for all requests. Enough
    /// for the largest images, but at most half of the budget.
    #[must_use]
    pub fn decoding_bytes(&self, threads: usize, of_requests: usize) -> usize {
        let largest = self.limits.decoding_bytes(&self.processing);
        largest.saturating_mul(threads.max(1)).min(of_requests / 2)
    }
}
