//! CPU kernels behind a C interface, which the hand in Python loads, and behind a safe one
//! ([`Decoder`], [`Bert`]), for the hand in Rust.
//!
//! A decoder is described once (`fb_model_new`) and then computed a step a call (`fb_step`; where
//! many tokens want logits, `fb_head` makes them of some at a time): embedding, layers and head,
//! with paged attention for prompt chunks and decode rows alike. One call a step, because what a
//! step costs beside its arithmetic is the crossing of boundaries: a few microseconds for each of
//! hundreds of operators would be most of a small model's step.
//!
//! An encoder (`fb_encoder_new`) is computed likewise, all prompts of a batch a call (`fb_encode`).
//!
//! Inside: `tile` holds the innermost loops, for each kind of processor (`x86`), `pack` and `pages`
//! the order of weights, keys and values that they read; `dots` (`vnni`), `quantise` and `codes`
//! are the same for quantised weights; `matmul` and `attention` what is built of them, `model` the
//! description of a decoder, `step` the list of what is computed, `team` the threads.
//!
//! Every result is computed by one thread in an order that depends on its own row only. So tokens
//! do not change with the batch, the chunking or the number of threads.
#![expect(unsafe_code, reason = "a C interface to vector instructions")]

mod attention;
mod codes;
mod decoder;
mod dots;
mod element;
mod encoder;
mod level;
mod math;
mod matmul;
mod memory;
mod model;
mod pack;
mod pages;
mod pool;
mod quantise;
mod step;
mod team;
mod tile;
mod vector;
#[cfg(target_arch = "x86_64")]
mod vnni;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ffi::{CStr, c_char};

use crate::codes::Format;
use crate::dots::{Dots, Portable};
use crate::element::{Bf16, Element};
use crate::encoder::Pass;
use crate::level::Level;
use crate::model::{Model, StepError};
use crate::step::Step;
use crate::team::{Kind, Member, Team};
use crate::tile::{Kernel, Plain};

pub use crate::decoder::{
    Bytes, Decoder, Dtype, Given, Layer, Matrix, Packing, Rows, Sizes, Storage, Unfit, Wanted,
    Weights, build, level, limit,
};
pub use crate::encoder::{
    AnyEncoder, BatchSpec, Bert, BertActivation, BertLayer, BertLinear, BertNorm, BertSizes,
    BertWeights, EncoderLayerSpec, EncoderSpec, Texts, fb_encode, fb_encoder_free, fb_encoder_new,
};
pub use crate::memory::{Room, Shared};
pub use crate::model::{LayerSpec, ModelSpec, StepSpec};
pub use crate::pool::Threads;
pub use crate::team::TeamSpec;

/// The interface's version: a caller that was made for another one must not call.
const VERSION: u32 = 9;

/// A decoder of either type.
pub struct AnyModel(Typed);

enum Typed {
    Float32(Model<f32>),
    Bfloat16(Model<Bf16>),
}

/// What a team computes together.
enum Job<'a, E> {
    /// Of a decoder.
    Step(&'a Step<'a, E>),
    /// Of an encoder.
    Pass(&'a Pass<'a, E>),
}

impl<E: Element> Job<'_, E> {
    /// One member's share of it.
    ///
    /// # Safety
    /// Called once by each member of the team; the processor can run `K` and `D`.
    #[inline(always)]
    unsafe fn compute<K: Kernel<E>, D: Dots>(self, member: &Member<'_>) {
        // SAFETY: the contract.
        unsafe {
            match self {
                Self::Step(step) => step.compute::<K, D>(member),
                Self::Pass(pass) => pass.compute::<K, D>(member),
            }
        }
    }
}

/// The body of a member, compiled for one kind of processor: everything it calls is inlined into
/// it, so that plain loops become that processor's vectors too.
macro_rules! bodies {
    ($($(#[$attribute:meta])* $name:ident: $element:ty, $kernel:ty, $dots:ty;)*) => {
        $(
            $(#[$attribute])*
            unsafe fn $name(job: Job<'_, $element>, member: &Member<'_>) {
                // SAFETY: the caller detected the features.
                unsafe { job.compute::<$kernel, $dots>(member) }
            }
        )*
    };
}

bodies! {
    baseline_f32: f32, Plain, Portable;
    baseline_bf16: Bf16, Plain, Portable;
}
#[cfg(target_arch = "x86_64")]
bodies! {
    #[target_feature(enable = "avx2,fma,f16c")]
    avx2_f32: f32, tile::Avx2, dots::Avx2Dots;
    #[target_feature(enable = "avx2,fma,f16c")]
    avx2_bf16: Bf16, tile::Avx2, dots::Avx2Dots;
    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
    avxvnni_f32: f32, tile::Avx2, dots::AvxVnni;
    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
    avxvnni_bf16: Bf16, tile::Avx2, dots::AvxVnni;
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    avx512_f32: f32, tile::Avx512, dots::Avx2Dots;
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    avx512_bf16: Bf16, tile::Avx512Wide, dots::Avx2Dots;
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    avx512vnni_f32: f32, tile::Avx512, dots::Vnni;
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    avx512vnni_bf16: Bf16, tile::Avx512Wide, dots::Vnni;
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")]
    avx512bf16_bf16: Bf16, tile::Avx512Bf16, dots::Vnni;
}

/// As [`bodies`], with tiles, which are this member's from here on until it ends.
#[cfg(target_arch = "x86_64")]
macro_rules! tiled_bodies {
    ($($name:ident: $element:ty, $kernel:ty;)*) => {
        $(
            #[target_feature(
                enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16"
            )]
            unsafe fn $name(job: Job<'_, $element>, member: &Member<'_>) {
                x86::Hardware::forget();
                // SAFETY: the caller detected the features.
                unsafe {
                    job.compute::<$kernel, x86::AmxDots>(member);
                    x86::Hardware::release();
                }
            }
        )*
    };
}
#[cfg(target_arch = "x86_64")]
tiled_bodies! {
    amx_f32: f32, tile::Avx512;
    amx_bf16: Bf16, tile::AmxBf16;
}

type Body<E> = unsafe fn(Job<'_, E>, &Member<'_>);

fn body_f32(level: Level) -> Body<f32> {
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Amx => amx_f32,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512Bf16 | Level::Avx512Vnni => avx512vnni_f32,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => avx512_f32,
        #[cfg(target_arch = "x86_64")]
        Level::AvxVnni => avxvnni_f32,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => avx2_f32,
        Level::Baseline => baseline_f32,
    }
}

fn body_bf16(level: Level) -> Body<Bf16> {
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Amx => amx_bf16,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512Bf16 => avx512bf16_bf16,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512Vnni => avx512vnni_bf16,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => avx512_bf16,
        #[cfg(target_arch = "x86_64")]
        Level::AvxVnni => avxvnni_bf16,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => avx2_bf16,
        Level::Baseline => baseline_bf16,
    }
}

unsafe fn compute<E: Element>(
    model: &mut Model<E>,
    step: &StepSpec,
    body: Body<E>,
) -> Result<(), StepError> {
    let run = |team: &Team, view: &Step<'_, E>| {
        // SAFETY: once a member; `body` fits the processor.
        team.run(|member| unsafe { body(Job::Step(view), &member) });
    };
    // SAFETY: the caller's description.
    unsafe { model.step(step, run) }
}

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

/// [`build`], as C has it.
#[unsafe(no_mangle)]
pub extern "C" fn fb_build() -> *const c_char {
    const NAME: &str = concat!(env!("FOREBAY_KERNELS_BUILD"), "\0");
    NAME.as_ptr().cast()
}

/// Uses nothing better than the level of this name from now on, for whoever wants to test or
/// compare; false if there is none. Null: the fastest again.
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
    unsafe fn typed<E: Element, K: Kernel<E>>(
        source: *const u8,
        (outputs, inputs, interleaved): (usize, usize, bool),
        packed: *mut u8,
    ) {
        let length = fb_packed_len(outputs, inputs, interleaved);
        // SAFETY: the caller's description; `K` fits the processor.
        unsafe {
            let source = std::slice::from_raw_parts(source.cast::<E>(), outputs * inputs);
            let packed = std::slice::from_raw_parts_mut(packed.cast::<E>(), length);
            pack::pack::<E, K>(source, outputs, inputs, interleaved, packed);
        }
    }
    let shape = (outputs, inputs, interleaved);
    // SAFETY: the caller's description; kernels fit the processor.
    unsafe {
        match (dtype, Level::current()) {
            #[cfg(target_arch = "x86_64")]
            (0, Level::Avx512 | Level::Avx512Vnni | Level::Avx512Bf16 | Level::Amx) => {
                typed::<f32, tile::Avx512>(source, shape, packed)
            }
            #[cfg(target_arch = "x86_64")]
            (1, Level::Avx512Bf16 | Level::Amx) => {
                typed::<Bf16, tile::Avx512Bf16>(source, shape, packed)
            }
            #[cfg(target_arch = "x86_64")]
            (1, Level::Avx512 | Level::Avx512Vnni) => {
                typed::<Bf16, tile::Avx512Wide>(source, shape, packed)
            }
            #[cfg(target_arch = "x86_64")]
            (0, Level::Avx2 | Level::AvxVnni) => typed::<f32, tile::Avx2>(source, shape, packed),
            #[cfg(target_arch = "x86_64")]
            (_, Level::Avx2 | Level::AvxVnni) => typed::<Bf16, tile::Avx2>(source, shape, packed),
            (0, _) => typed::<f32, Plain>(source, shape, packed),
            _ => typed::<Bf16, Plain>(source, shape, packed),
        }
    }
}

/// Bytes of a packed matrix that is quantised as `format` says (1: int8, 2: `Q8_0`, 3: `Q4_0`, 4:
/// `Q4_1`); 0 if there is no such format, or `inputs` is not a multiple of 32.
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
    let length = quantise::quantised_bytes(Format::Int8, outputs, inputs, interleaved);
    // SAFETY: the caller's description.
    unsafe {
        let packed = std::slice::from_raw_parts_mut(packed, length);
        if dtype == 0 {
            let source = std::slice::from_raw_parts(source.cast::<f32>(), outputs * inputs);
            quantise::quantise(source, outputs, inputs, interleaved, packed);
        } else {
            let source = std::slice::from_raw_parts(source.cast::<Bf16>(), outputs * inputs);
            quantise::quantise(source, outputs, inputs, interleaved, packed);
        }
    }
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

fn team_of(threads: u32, spec: &TeamSpec) -> Team {
    let kind = spec.open_mp().map_or(Kind::Started, Kind::OpenMp);
    Team { threads: threads.max(1) as usize, kind }
}

/// A decoder that computes with `spec.threads` threads; null if an inner dimension is one that the
/// kernels cannot do: odd, or of a quantised matrix and not a multiple of 32.
///
/// # Safety
/// `spec` and `team` describe what is there; everything but the descriptions themselves stays until
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
    let team = team_of(spec.threads, team);
    // SAFETY: the caller's description.
    let model = unsafe {
        match spec.dtype {
            0 => Typed::Float32(Model::new(spec, team)),
            _ => Typed::Bfloat16(Model::new(spec, team)),
        }
    };
    Box::into_raw(Box::new(AnyModel(model)))
}

/// Frees a model; null is nothing.
///
/// # Safety
/// `model` is of [`fb_model_new`] and not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_model_free(model: *mut AnyModel) {
    if !model.is_null() {
        // SAFETY: the caller's word.
        drop(unsafe { Box::from_raw(model) });
    }
}

/// Computes a step. 0, or why not: 1 a page that is not there, 2 a token that is not of the
/// vocabulary.
///
/// # Safety
/// `model` is of [`fb_model_new`] and computes nothing else; `step` describes what is there, with
/// rows inside the tables.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_step(model: *mut AnyModel, step: *const StepSpec) -> i32 {
    let level = Level::current();
    // SAFETY: the caller's description; bodies fit the processor.
    let result = unsafe {
        match &mut (*model).0 {
            Typed::Float32(model) => compute(model, &*step, body_f32(level)),
            Typed::Bfloat16(model) => compute(model, &*step, body_bf16(level)),
        }
    };
    match result {
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
    unsafe fn typed<E: Element>(
        model: &mut Model<E>,
        states: (*const f32, usize),
        logits: *mut f32,
        body: Body<E>,
    ) {
        // SAFETY: the caller's description; `body` fits the processor, and is called once a member.
        unsafe {
            model.head(states, logits, |team, view| {
                team.run(|member| body(Job::Step(view), &member))
            });
        }
    }
    let level = Level::current();
    if count == 0 {
        return;
    }
    // SAFETY: the caller's description; bodies fit the processor.
    unsafe {
        match &mut (*model).0 {
            Typed::Float32(model) => typed(model, (states, count), logits, body_f32(level)),
            Typed::Bfloat16(model) => typed(model, (states, count), logits, body_bf16(level)),
        }
    }
}
