//! CPU kernels: computes a batch of a decoder ([`Decoder`]) or an encoder ([`Bert`]) in one call.
//!
//! A call computes embedding, layers and head. It treats prompt chunks and decode rows alike, with
//! paged attention. With hundreds of separate operators, their few microseconds of overhead would
//! dominate a small model's step. Types and checks make the public calls safe.
//!
//! The modules are:
//!
//! - `tile`, `dots` and `vector`: the traits of the innermost loops: for float weights, for
//!   quantised weights, and for all other vector arithmetic;
//! - `isa`: the loops themselves, for each instruction set; `processor`: the instruction levels
//!   that the machine has; `dispatch`: the table of levels with their kernels;
//! - `pack` and `pages`: the memory order of weights, keys and values that the loops read;
//!   `quantise` and `codes`: the same for quantised weights; `packing`: the public interface of
//!   both;
//! - `matmul` and `attention`: matrix products and attention, built from the loops;
//! - `sizes`, `weights` and `rows`: a decoder and a step as callers describe them, and their
//!   checks;
//! - `owned`: a matrix of a decoder; `layer`, `latent`, `experts`, `recurrence`, `rows_of_layers`
//!   and `adapters`: the other components of a decoder;
//! - `step`: the sequence of computations of a step; `model`: a decoder with its buffers;
//!   `any_model`: a decoder of either element type; `decoder`: the public interface of a decoder;
//! - `encoder`: an encoder, in the same structure;
//! - `pool` and `team`: the threads. The threads of a team compute a step together; each is a
//!   member.
//!
//! Each result is computed by one thread, in an order that depends only on the result's row. So
//! tokens do not change with the batch, the chunking or the number of threads.
// A build for some instruction levels (`FOREBAY_LEVELS`) leaves the loops of others unused.
#![cfg_attr(not(all_levels), allow(dead_code, unused_imports, unused_macros))]
#![expect(unsafe_code, reason = "vector instructions, and buffers that threads share")]

mod adapters;
mod any_model;
mod attention;
mod codes;
mod decoder;
mod dispatch;
mod dots;
mod element;
mod encoder;
mod experts;
mod isa;
mod latent;
mod layer;
mod math;
mod matmul;
mod memory;
mod model;
mod owned;
mod pack;
mod packing;
mod pages;
mod pool;
mod processor;
mod quantise;
mod recurrence;
mod rows;
mod rows_of_layers;
mod sizes;
mod step;
mod team;
mod tile;
mod vector;
mod weights;

pub use crate::adapters::{
    AdaptedModule, AdapterMatrices, AdapterSizes, ModuleMatrices, PackError,
};
pub use crate::decoder::{Decoder, Levels, build, level, levels, limit};
pub use crate::encoder::{
    Bert, BertActivation, BertLayer, BertLinear, BertNorm, BertSizes, BertWeights, Texts,
};
pub use crate::math::gelu_of;
pub use crate::memory::{Room, Shared};
pub use crate::packing::{Dtype, Packing, Storage, Unfit};
pub use crate::pool::Threads;
pub use crate::rows::{Given, Rows, Wanted};
pub use crate::sizes::{
    AttentionSizes, ExpertSizes, Factors, GateKind, LatentSizes, LayerInputSizes, RecurrenceSizes,
    Sizes, StateGate,
};
pub use crate::weights::{
    BesideWeights, Bytes, DenseMatrices, ExpertBiases, ExpertMatrices, FeedForward, InputMatrices,
    LatentWeights, Layer, LayerInputWeights, LowRankQuery, Matrix, RecurrenceWeights, StatePart,
    Table, Weights,
};
