//! The image inputs of the served model.

use forebay_vision::Processing;

/// The images that the served model takes, and their limits.
#[derive(Debug, Clone, Copy)]
pub struct ImageModel {
    /// The processing that cuts images.
    pub processing: Processing,
    /// The token that stands for a position of an image.
    pub token: i32,
    /// The largest number of images of a request.
    pub most: u32,
    /// The limits of one image.
    pub limits: forebay_vision::Limits,
}

impl ImageModel {
    /// Bytes to set aside for `threads` threads that decode images, of all bytes of requests. It is
    /// enough for the largest images, or half of all.
    #[must_use]
    pub fn decoding_bytes(&self, threads: usize, of_requests: usize) -> usize {
        let largest = self.limits.decoding_bytes(&self.processing);
        largest.saturating_mul(threads.max(1)).min(of_requests / 2)
    }
}
