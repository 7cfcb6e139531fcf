//! A hand for CPUs, in Rust: one process with its memory and the compiled kernels.
//!
//! It implements the step protocol like `python -m forebay.worker` (`docs/protocol.md`). [`serves`]
//! lists the features that it lacks. The Python hand is the reference and serves all other
//! features.

mod adapters;
mod blocks;
mod columns;
mod connection;
mod copier;
mod descriptors;
mod drafts;
mod draw;
mod encoder;
mod exponential;
mod footprint;
mod host;
mod kept;
mod latent;
mod load;
mod parts;
mod pooled;
mod process;
mod prompts;
mod random;
mod runner;
mod sampler;
mod serves;
mod states;
mod step;
mod tables;
mod whole;
mod windows;

pub use footprint::{Footprint, footprint};
pub use forebay_kernels::{Levels, levels};
pub use process::main;
pub use serves::{Asked, serves, why_no_codes, why_not_stored};
