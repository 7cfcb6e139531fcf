//! An encoder (Devlin et al. 2019): every position of a prompt attends to the whole prompt, and
//! each prompt yields one vector. No keys, values or states are kept for later batches.

mod bert;
mod model;
mod pass;
mod weights;

pub use self::bert::{Bert, Texts};
pub use self::weights::{BertActivation, BertLayer, BertLinear, BertNorm, BertSizes, BertWeights};

#[cfg(test)]
mod tests;
