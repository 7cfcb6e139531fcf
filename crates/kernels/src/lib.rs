//! CPU kernels behind a C interface, which the hand in Python loads, and behind a safe one
//! ([`Decoder`], [`Bert`]), for the hand in Rust.
//!
//! A decoder is described once (`fb_model_new`) and then computed a step a call (`fb_step`). A call
//! does embedding, layers and head, with paged attention for prompt chunks and decode rows alike.
//! If many tokens want logits, `fb_head` makes them of some tokens at a time. One call a step saves
//! the crossing of boundaries. A few microseconds for each of hundreds of operators would be most
//! of a small model's step.
//!
//! An encoder (`fb_encoder_new`) is computed in the same way, with all prompts of a batch in one
//! call (`fb_encode`).
//!
//! The modules are:
//!
//! - `tile`, `dots` and `vector`: the traits of the innermost loops, of weights in floats, of
//!   quantised ones, and of everything else;
//! - `isa`: the loops themselves, for each set of instructions; `dispatch`: the table of levels
//!   with their kernels;
//! - `pack` and `pages`: the order of the weights, keys and values that the loops read;
//!   `quantise` and `codes`: the same for quantised weights; `packing`: both for callers;
//! - `matmul` and `attention`: products and attention, built of the loops;
//! - `layer`, `experts`, `recurrence` and `adapters`: the parts of a decoder; `step`: the list of
//!   the parts of a step; `model`: a decoder with its buffers; `any_model`: one of either type;
//! - `team`: the threads.
//!
//! Every result is computed by one thread in an order that depends on its own row only. So tokens
//! do not change with the batch, the chunking or the number of threads.
#![expect(unsafe_code, reason = "a C interface to vector instructions")]

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
mod layer;
mod math;
mod matmul;
mod memory;
mod model;
mod pack;
mod packing;
mod pages;
mod pool;
mod quantise;
mod recurrence;
mod step;
mod team;
mod tile;
mod vector;

use std::ffi::{CStr, c_char};

use crate::codes::Format;
use crate::dispatch::Level;
use crate::packing::Whole;
use crate::team::Team;

pub use crate::adapters::{
    AdaptedModule, AdapterMatrices, AdapterSizes, ModuleMatrices, PackError,
};
pub use crate::any_model::AnyModel;
pub use crate::decoder::{
    AttentionSizes, Bytes, Decoder, ExpertBiases, ExpertMatrices, ExpertSizes, Factors,
    FeedForward, GateKind, Gated, Given, Layer, Matrix, RecurrenceSizes, RecurrenceWeights, Rows,
    Sizes, StateGate, Wanted, Weights, build, level, limit,
};
pub use crate::encoder::{
    AnyEncoder, BatchSpec, Bert, BertActivation, BertLayer, BertLinear, BertNorm, BertSizes,
    BertWeights, EncoderLayerSpec, EncoderSpec, Texts, fb_encode, fb_encoder_free, fb_encoder_new,
};
pub use crate::experts::{ExpertsSpec, RoutingSpec};
pub use crate::layer::{AttentionSpec, LayerSpec};
pub use crate::memory::{Room, Shared};
pub use crate::model::{ModelSpec, StepSpec};
pub use crate::packing::{Dtype, Packing, Storage, Unfit};
pub use crate::pool::Threads;
pub use crate::recurrence::RecurrenceSpec;
pub use crate::team::TeamSpec;

/// The interface's version: a caller that was made for another one must not call.
const VERSION: u32 = 15;

/// [`VERSION`].
#[unsafe(no_mangle)]
pub extern "C" fn fb_version() -> u32 {
    VERSION
}

/// The instructions in use: amx, avx512bf16, avx512vnni, avx512, avxvnni, avx2 or baseline.
#[unsafe(no_mangle)]
pub extern "C" fn fb_level() -> *const c_char {
    Level::current().name().as_ptr()
}

/// [`build`] for C.
#[unsafe(no_mangle)]
pub extern "C" fn fb_build() -> *const c_char {
    const NAME: &str = concat!(env!("FOREBAY_KERNELS_BUILD"), "\0");
    NAME.as_ptr().cast()
}

/// Uses nothing better than the level of this name from now on, for tests and comparisons; false if
/// there is none. Null: the fastest again.
///
/// # Safety
/// `name` is a string or null; nothing else of the library runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_limit(name: *const c_char) -> bool {
    if name.is_null() {
        return Level::limit(None);
    }
    // SAFETY: the caller's word.
    Level::limit(Some(unsafe { CStr::from_ptr(name) }))
}

/// Elements of a packed matrix of `outputs` and `inputs`. `interleaved` as in [`fb_pack`].
#[unsafe(no_mangle)]
pub extern "C" fn fb_packed_len(outputs: usize, inputs: usize, interleaved: bool) -> usize {
    pack::packed_len(pack::padded_outputs(outputs, interleaved), inputs)
}

/// Packs `source` `[outputs, inputs]`, `inputs` even; `dtype` as in [`ModelSpec`]. `interleaved`:
/// the first half of the outputs gate the second.
///
/// # Safety
/// `source` is a whole matrix, `packed` has room for [`fb_packed_len`] elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_pack(
    dtype: u32,
    source: *const u8,
    outputs: usize,
    inputs: usize,
    interleaved: bool,
    packed: *mut u8,
) {
    let matrix = Whole { source, shape: (outputs, inputs, interleaved), packed };
    // SAFETY: the caller's description.
    unsafe { matrix.pack(dtype) }
}

/// Bytes of a packed matrix that is quantised as `format` says: 1 int8, 2 `Q8_0`, 3 `Q4_0`, 4
/// `Q4_1`, 5 `MXFP4`, 6 `IQ4_NL`. Returns 0 if there is no such format, or `inputs` is not a
/// multiple of 32.
#[unsafe(no_mangle)]
pub extern "C" fn fb_quantised_bytes(
    format: u32,
    outputs: usize,
    inputs: usize,
    interleaved: bool,
) -> usize {
    Format::of(format)
        .map_or(0, |format| quantise::quantised_bytes(format, outputs, inputs, interleaved))
}

/// Quantises `source` `[outputs, inputs]` to int8 with one scale an output, and packs it; otherwise
/// as [`fb_pack`].
///
/// # Safety
/// `source` is a whole matrix, `packed` has room for [`fb_quantised_bytes`], which are not 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_quantise(
    dtype: u32,
    source: *const u8,
    outputs: usize,
    inputs: usize,
    interleaved: bool,
    packed: *mut u8,
) {
    let matrix = Whole { source, shape: (outputs, inputs, interleaved), packed };
    // SAFETY: the caller's description.
    unsafe { matrix.quantise(dtype) }
}

/// Packs the rows of a GGUF tensor of a format, as they are stored, `source_bytes` in all;
/// otherwise as [`fb_pack`]. False, and nothing done, if it is not such a tensor.
///
/// # Safety
/// `source` can be read, `packed` has room for [`fb_quantised_bytes`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_pack_blocks(
    format: u32,
    source: *const u8,
    source_bytes: usize,
    outputs: usize,
    inputs: usize,
    interleaved: bool,
    packed: *mut u8,
) -> bool {
    let Some(format) = Format::of(format) else { return false };
    let length = quantise::quantised_bytes(format, outputs, inputs, interleaved);
    if length == 0
        || source_bytes == 0
        || source_bytes != quantise::stored_len(format, outputs, inputs)
    {
        return false;
    }
    // SAFETY: the caller's description.
    let (source, packed) = unsafe {
        (
            std::slice::from_raw_parts(source, source_bytes),
            std::slice::from_raw_parts_mut(packed, length),
        )
    };
    quantise::pack_blocks(format, source, outputs, inputs, interleaved, packed);
    true
}

/// A decoder that computes with `spec.threads` threads. Null if the kernels cannot do an inner
/// dimension: an odd one, or one of a quantised matrix that is not a multiple of 32.
///
/// # Safety
/// `spec` and `team` describe valid memory; everything but the descriptions themselves stays until
/// [`fb_model_free`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_model_new(
    spec: *const ModelSpec,
    team: *const TeamSpec,
) -> *mut AnyModel {
    // SAFETY: the caller's descriptions.
    let (spec, team) = unsafe { (&*spec, &*team) };
    // SAFETY: the caller's description.
    if unsafe { !spec.is_possible() } {
        return std::ptr::null_mut();
    }
    // SAFETY: the caller's description.
    let model = unsafe { AnyModel::new(spec, Team::of(spec.threads, team)) };
    Box::into_raw(Box::new(model))
}

/// Frees a model, or does nothing if `model` is null.
///
/// # Safety
/// `model` came from [`fb_model_new`] and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_model_free(model: *mut AnyModel) {
    if !model.is_null() {
        // SAFETY: the caller's word.
        drop(unsafe { Box::from_raw(model) });
    }
}

/// Computes a step. Returns 0, or the reason for a refusal. 1 is a page that is not there, and 2 a
/// token outside of the vocabulary.
///
/// # Safety
/// `model` is of [`fb_model_new`] and computes nothing else. `step` describes valid memory, with
/// rows inside the tables.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_step(model: *mut AnyModel, step: *const StepSpec) -> i32 {
    // SAFETY: the caller's description.
    let (model, step) = unsafe { (&mut *model, &*step) };
    // SAFETY: as above.
    match unsafe { model.step(step, None) } {
        Ok(()) => 0,
        Err(error) => error as i32,
    }
}

/// Computes logits of states that a step has given.
///
/// # Safety
/// `model` is of [`fb_model_new`] and computes nothing else; `states` is float32 `[count, hidden]`,
/// and `logits` has room for `[count, vocabulary]`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_head(
    model: *mut AnyModel,
    states: *const f32,
    count: usize,
    logits: *mut f32,
) {
    // SAFETY: the caller's description.
    let model = unsafe { &mut *model };
    // SAFETY: as above.
    unsafe { model.head((states, count), logits) }
}
