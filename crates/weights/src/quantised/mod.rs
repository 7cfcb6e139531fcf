//! The storage of a checkpoint's quantised matrices.

mod matrices;
mod scheme;

pub(crate) use matrices::{Headers, QuantisedMatrix, QuantisedParts};
pub use scheme::{CodePacking, Int4Storage, Quantisation, Scheme};
