//! An encoder for callers in Rust. Types and checks keep the promises of the C interface.

use std::ffi::c_void;
use std::sync::Arc;

use super::{
    Activation, AnyEncoder, BatchSpec, Encoder, EncoderLayerSpec, EncoderSpec, Refused, Typed,
    fb_encode,
};
use crate::decoder::{Bytes, Matrix, of_size};
use crate::packing::{Dtype, Storage, Unfit, unfit};
use crate::pool::Threads;
use crate::team::{Kind, Team};

/// The sizes of an encoder, and its way to make a vector of a prompt's states.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BertSizes {
    /// The type of weights, and of the inputs of products.
    pub dtype: Dtype,
    /// Elements of a state.
    pub hidden: usize,
    /// The number of heads. Each has keys and values of its own.
    pub heads: usize,
    /// Elements between the two products of a layer's second part.
    pub intermediate: usize,
    /// The number of tokens in the vocabulary.
    pub vocabulary: usize,
    /// The largest number of positions of a prompt.
    pub positions: usize,
    /// The number of kinds of texts.
    pub kinds: usize,
    /// The function between those two products.
    pub activation: BertActivation,
    /// True if a prompt's first state is its vector, and not the mean.
    pub first: bool,
    /// The number of scores of a prompt; 0: it has a vector.
    pub scores: usize,
    /// The epsilon of the norms.
    pub eps: f32,
}

/// A function between two products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BertActivation {
    /// With the error function (Hendrycks & Gimpel 2016).
    Gelu,
    /// With a hyperbolic tangent in place of it.
    GeluTanh,
    /// The maximum of a number and 0.
    Relu,
}

/// A matrix, and the bias that is added to its product.
#[derive(Clone)]
pub struct BertLinear {
    /// The matrix, `[outputs, inputs]`.
    pub matrix: Matrix,
    /// The bias, `[outputs]`.
    pub bias: Bytes,
}

/// The factors and the terms of a normalisation.
#[derive(Clone)]
pub struct BertNorm {
    /// The factors, `[hidden]`.
    pub weight: Bytes,
    /// The terms, `[hidden]`.
    pub bias: Bytes,
}

/// One layer.
#[derive(Clone)]
pub struct BertLayer {
    /// Queries, keys and values, `[3 * hidden, hidden]`.
    pub qkv: BertLinear,
    /// The attention's output, `[hidden, hidden]`.
    pub output: BertLinear,
    /// The normalisation behind the attention.
    pub attention_norm: BertNorm,
    /// The first product of the second part, `[intermediate, hidden]`.
    pub up: BertLinear,
    /// The second product of the second part, `[hidden, intermediate]`.
    pub down: BertLinear,
    /// The normalisation behind the second part.
    pub output_norm: BertNorm,
}

/// All weights of an encoder. Vectors and embeddings are of the model's type.
pub struct BertWeights {
    /// The embedding of tokens, `[vocabulary, hidden]`.
    pub words: Bytes,
    /// The embedding of positions, `[positions, hidden]`.
    pub places: Bytes,
    /// The embedding of kinds of texts, `[kinds, hidden]`.
    pub texts: Bytes,
    /// The normalisation of the sum of all three.
    pub norm: BertNorm,
    /// The layers, in order.
    pub layers: Vec<BertLayer>,
    /// The pooler `[hidden, hidden]` and the classifier `[scores, hidden]` of an encoder with
    /// scores. Neither is quantised.
    pub score: Option<(BertLinear, BertLinear)>,
}

/// Prompts, and the table of their tokens.
#[derive(Clone, Copy)]
pub struct Texts<'a> {
    /// The slot of each prompt.
    pub slot: &'a [i64],
    /// The number of tokens of each prompt.
    pub length: &'a [i64],
    /// The position in each prompt at which the second text of a pair begins; 0: there is one text.
    pub segment: &'a [i64],
    /// The tokens of slots, `[slots, token_stride]`.
    pub tokens: &'a [i32],
    /// The number of positions of a slot.
    pub token_stride: usize,
}

/// An encoder that is ready to compute.
pub struct Bert {
    encoder: AnyEncoder,
    sizes: BertSizes,
    /// The weights that the encoder points to.
    _weights: BertWeights,
}

// SAFETY: an encoder has pointers to what it owns through `_weights`, which any thread may read.
unsafe impl Send for Bert {}

impl Bert {
    /// An encoder that computes with `threads`.
    ///
    /// # Errors
    /// A weight has a wrong size, or the kernels can't compute such an encoder.
    pub fn new(
        sizes: BertSizes,
        weights: BertWeights,
        threads: &Arc<Threads>,
    ) -> Result<Self, Unfit> {
        sizes.check()?;
        weights.check(&sizes)?;
        let address = |bytes: &Bytes| bytes.as_ptr().cast::<c_void>();
        let layer = |layer: &BertLayer| EncoderLayerSpec {
            qkv: address(&layer.qkv.matrix.packed),
            qkv_bias: address(&layer.qkv.bias),
            output: address(&layer.output.matrix.packed),
            output_bias: address(&layer.output.bias),
            attention_norm: address(&layer.attention_norm.weight),
            attention_norm_bias: address(&layer.attention_norm.bias),
            up: address(&layer.up.matrix.packed),
            up_bias: address(&layer.up.bias),
            down: address(&layer.down.matrix.packed),
            down_bias: address(&layer.down.bias),
            output_norm: address(&layer.output_norm.weight),
            output_norm_bias: address(&layer.output_norm.bias),
            formats: layer.linears().map(|linear| linear.matrix.storage.number()),
        };
        let layers: Vec<EncoderLayerSpec> = weights.layers.iter().map(layer).collect();
        let of_score = |part: fn(&(BertLinear, BertLinear)) -> &Bytes| {
            weights.score.as_ref().map_or(std::ptr::null(), |score| address(part(score)))
        };
        let spec = EncoderSpec {
            dtype: sizes.dtype.number(),
            layers: layers.len() as u32,
            hidden: sizes.hidden as u32,
            heads: sizes.heads as u32,
            intermediate: sizes.intermediate as u32,
            vocabulary: sizes.vocabulary as u32,
            positions: sizes.positions as u32,
            kinds: sizes.kinds as u32,
            activation: match sizes.activation {
                BertActivation::Gelu => Activation::Gelu as u32,
                BertActivation::GeluTanh => Activation::GeluTanh as u32,
                BertActivation::Relu => Activation::Relu as u32,
            },
            pooling: u32::from(sizes.first),
            scores: sizes.scores as u32,
            threads: threads.count() as u32,
            eps: sizes.eps,
            words: address(&weights.words),
            places: address(&weights.places),
            texts: address(&weights.texts),
            norm: address(&weights.norm.weight),
            norm_bias: address(&weights.norm.bias),
            pooler: of_score(|(pooler, _)| &pooler.matrix.packed),
            pooler_bias: of_score(|(pooler, _)| &pooler.bias),
            classifier: of_score(|(_, classifier)| &classifier.matrix.packed),
            classifier_bias: of_score(|(_, classifier)| &classifier.bias),
            layer: layers.as_ptr(),
        };
        let team = Team { threads: threads.count(), kind: Kind::Kept(threads.clone()) };
        // SAFETY: the description was checked, and what it points to lives in the encoder.
        let typed = unsafe {
            match sizes.dtype {
                Dtype::Float32 => Encoder::new(&spec, team).map(Typed::Float32),
                Dtype::Bfloat16 => Encoder::new(&spec, team).map(Typed::Bfloat16),
            }
        };
        match typed {
            Some(typed) => Ok(Self { encoder: AnyEncoder(typed), sizes, _weights: weights }),
            None => unfit(format!("no kernel computes an encoder of {sizes:?}")),
        }
    }

    /// The number of results of a prompt.
    #[must_use]
    pub fn width(&self) -> usize {
        if self.sizes.scores > 0 { self.sizes.scores } else { self.sizes.hidden }
    }

    /// Computes the vectors, or the scores, of whole prompts: `[prompts, width]`.
    ///
    /// # Errors
    /// A prompt is outside of the table, or has a length, a token or a second text that the encoder
    /// does not support. Nothing was written then.
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
        let batch = BatchSpec {
            rows: count as u64,
            slot: texts.slot.as_ptr(),
            length: texts.length.as_ptr(),
            segment: texts.segment.as_ptr(),
            tokens: texts.tokens.as_ptr(),
            token_stride: texts.token_stride as u64,
            vectors: vectors.as_mut_ptr(),
        };
        // SAFETY: rows lie within the table, and all results have room.
        let refused = unsafe { fb_encode(&raw mut self.encoder, &raw const batch) };
        let why = [
            (Refused::Token, "a row has a token that is not of the vocabulary"),
            (Refused::Length, "a row is empty, or longer than the model"),
            (Refused::Pair, "a row has a second text, and the model knows one"),
        ];
        match why.into_iter().find(|&(why, _)| why as i32 == refused) {
            Some((_, why)) => unfit(why),
            None => Ok(()),
        }
    }
}

impl BertSizes {
    fn check(&self) -> Result<(), Unfit> {
        let numbers = [
            self.hidden,
            self.heads,
            self.intermediate,
            self.vocabulary,
            self.positions,
            self.kinds,
            self.scores + 1,
        ];
        if numbers.iter().any(|&number| number == 0 || number > i32::MAX as usize / 4) {
            return unfit(format!("no kernel computes an encoder of {self:?}"));
        }
        Ok(())
    }
}

impl BertLayer {
    fn linears(&self) -> [&BertLinear; 4] {
        [&self.qkv, &self.output, &self.up, &self.down]
    }

    fn check(&self, sizes: &BertSizes) -> Result<(), Unfit> {
        let &BertSizes { hidden, intermediate, .. } = sizes;
        let shapes = [
            (3 * hidden, hidden),
            (hidden, hidden),
            (intermediate, hidden),
            (hidden, intermediate),
        ];
        for (linear, shape) in self.linears().into_iter().zip(shapes) {
            linear.check(sizes, shape)?;
        }
        self.attention_norm.check(sizes)?;
        self.output_norm.check(sizes)
    }
}

impl BertLinear {
    fn check(&self, sizes: &BertSizes, (outputs, inputs): (usize, usize)) -> Result<(), Unfit> {
        self.matrix.check(sizes.dtype, (outputs, inputs), false)?;
        of_size(&self.bias, outputs * sizes.dtype.bytes())
    }

    fn check_plain(&self, sizes: &BertSizes, outputs: usize) -> Result<(), Unfit> {
        if self.matrix.storage != Storage::Plain {
            return unfit("the pooler and the classifier are not quantised");
        }
        self.check(sizes, (outputs, sizes.hidden))
    }
}

impl BertNorm {
    fn check(&self, sizes: &BertSizes) -> Result<(), Unfit> {
        let bytes = sizes.hidden * sizes.dtype.bytes();
        of_size(&self.weight, bytes)?;
        of_size(&self.bias, bytes)
    }
}

impl BertWeights {
    fn check(&self, sizes: &BertSizes) -> Result<(), Unfit> {
        let row = sizes.hidden * sizes.dtype.bytes();
        of_size(&self.words, sizes.vocabulary * row)?;
        of_size(&self.places, sizes.positions * row)?;
        of_size(&self.texts, sizes.kinds * row)?;
        self.norm.check(sizes)?;
        if self.score.is_some() != (sizes.scores > 0) || self.layers.is_empty() {
            return unfit("the weights are not of this encoder");
        }
        if let Some((pooler, classifier)) = &self.score {
            pooler.check_plain(sizes, sizes.hidden)?;
            classifier.check_plain(sizes, sizes.scores)?;
        }
        self.layers.iter().try_for_each(|layer| layer.check(sizes))
    }
}
