//! The public interface of an encoder.

use std::sync::Arc;

use super::model::{Encoder, Refused};
use super::weights::{BertSizes, BertWeights};
use crate::dispatch::Number;
use crate::element::Bf16;
use crate::packing::{Dtype, Unfit, unfit};
use crate::pool::Threads;
use crate::processor::Level;

/// The prompts of a batch, and the table of their tokens.
#[derive(Clone, Copy)]
pub struct Texts<'a> {
    /// The slot of each prompt.
    pub slot: &'a [i64],
    /// The number of tokens of each prompt.
    pub length: &'a [i64],
    /// The position in each prompt at which the second text of a pair begins; 0 if there is one
    /// text.
    pub segment: &'a [i64],
    /// The tokens of slots, `[slots, token_stride]`.
    pub tokens: &'a [i32],
    /// The number of token positions per slot.
    pub token_stride: usize,
}

/// An encoder that is ready to compute.
pub struct Bert {
    encoder: Typed,
    sizes: BertSizes,
}

enum Typed {
    Float32(Encoder<f32>),
    Bfloat16(Encoder<Bf16>),
}

// SAFETY: an encoder has pointers to its own buffers, which any one thread at a time may read and
// write.
unsafe impl Send for Bert {}

impl Bert {
    /// Creates an encoder that computes with `threads`.
    ///
    /// # Errors
    /// If a weight has a wrong size, or the kernels do not support such an encoder.
    pub fn new(
        sizes: BertSizes,
        weights: BertWeights,
        threads: &Arc<Threads>,
    ) -> Result<Self, Unfit> {
        sizes.check()?;
        weights.check(&sizes)?;
        let threads = threads.clone();
        let encoder = match sizes.dtype {
            Dtype::Float32 => Typed::Float32(Encoder::new(&sizes, &weights, threads)),
            Dtype::Bfloat16 => Typed::Bfloat16(Encoder::new(&sizes, &weights, threads)),
        };
        Ok(Self { encoder, sizes })
    }

    /// The number of values that a prompt yields.
    #[must_use]
    pub fn width(&self) -> usize {
        if self.sizes.scores > 0 { self.sizes.scores } else { self.sizes.hidden }
    }

    /// Computes the embeddings, or the scores, of whole prompts: `[prompts, width]`.
    ///
    /// # Errors
    /// If a prompt lies outside of the table, or has a length, a token or a second text that the
    /// encoder does not support. Nothing is written then.
    pub fn encode(&mut self, texts: &Texts<'_>, vectors: &mut [f32]) -> Result<(), Unfit> {
        let count = texts.slot.len();
        if texts.length.len() != count || texts.segment.len() != count || texts.token_stride == 0 {
            return unfit("columns of prompts that are not equally long");
        }
        if vectors.len() != count * self.width() {
            return unfit("too little room for vectors");
        }
        let slots = (texts.tokens.len() / texts.token_stride) as i64;
        for (&slot, &length) in texts.slot.iter().zip(texts.length) {
            if !(0..slots).contains(&slot) || !(0..=texts.token_stride as i64).contains(&length) {
                return unfit(format!("a prompt of {length} tokens in slot {slot} of {slots}"));
            }
        }
        let done = match &mut self.encoder {
            Typed::Float32(encoder) => compute(encoder, texts, vectors),
            Typed::Bfloat16(encoder) => compute(encoder, texts, vectors),
        };
        done.map_err(|refused| Unfit(refused.to_string()))
    }
}

fn compute<E: Number>(
    encoder: &mut Encoder<E>,
    texts: &Texts<'_>,
    vectors: &mut [f32],
) -> Result<(), Refused> {
    let level = Level::current();
    // SAFETY: the batch was checked, each member calls `compute` once, and the processor supports
    // the instruction level.
    unsafe {
        encoder.encode(texts, vectors, |threads, pass| {
            threads.compute(|member| E::compute(level, (pass, &member)));
        })
    }
}
