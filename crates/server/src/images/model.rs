//! The sight of the served model.

use forebay_vision::Processing;

/// What the served model sees, and what it is given at most.
#[derive(Debug, Clone, Copy)]
pub struct ImageModel {
    /// How it cuts images.
    pub processing: Processing,
    /// The token that stands for a position of an image.
    pub token: i32,
    /// Most images of a request.
    pub most: u32,
    /// What one image may cost.
    pub limits: forebay_vision::Limits,
}
