//! How families of models write: reasoning, text and calls of tools.

mod parts;

pub use parts::{Part, Parts};
