//! An encoder (Devlin et al. 2019): every position of a prompt sees all of it, and each prompt
//! gives one vector. Only the weights are kept from batch to batch.

mod bert;
mod model;
mod pass;
mod weights;

pub use self::bert::{Bert, Texts};
pub use self::weights::{BertActivation, BertLayer, BertLinear, BertNorm, BertSizes, BertWeights};

#[cfg(test)]
mod tests;
