//! Quantised matrices of a checkpoint: how they are stored, and how they are dequantised.

mod codes;
mod matrices;
mod rows;
mod scheme;
#[cfg(test)]
mod tests;

pub(crate) use matrices::{Headers, QuantisedParts};
pub(crate) use rows::StoredMatrix;
pub use scheme::{CodePacking, Int4Storage, Quantisation, Scheme};
