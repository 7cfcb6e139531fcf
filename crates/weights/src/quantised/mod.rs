//! The storage of a checkpoint's quantised matrices, and their numbers.

mod codes;
mod matrices;
mod rows;
mod scheme;
#[cfg(test)]
mod tests;

pub(crate) use matrices::{Headers, QuantisedParts};
pub(crate) use rows::StoredMatrix;
pub use scheme::{CodePacking, Int4Storage, Quantisation, Scheme};
