//! The sizes of an encoder, and its weights as the kernels read them.

use crate::packing::{Dtype, Storage, Unfit, unfit};
use crate::weights::{Bytes, Matrix, of_size};

/// The sizes of an encoder, and how it computes a vector from a prompt's states.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BertSizes {
    /// The type of weights, and of the inputs of matrix products.
    pub dtype: Dtype,
    /// Elements of a state.
    pub hidden: usize,
    /// The number of attention heads, each with its own keys and values.
    pub heads: usize,
    /// Elements of the inner state of the feed-forward network.
    pub intermediate: usize,
    /// The number of tokens in the vocabulary.
    pub vocabulary: usize,
    /// The largest number of positions of a prompt.
    pub positions: usize,
    /// The number of token types.
    pub kinds: usize,
    /// The activation of the feed-forward network.
    pub activation: BertActivation,
    /// True if a prompt's vector is its first state; false if it is the mean of its states.
    pub first: bool,
    /// The number of scores per prompt; 0 if a prompt yields a vector instead.
    pub scores: usize,
    /// The epsilon of the norms.
    pub eps: f32,
}

/// The activation of a feed-forward network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BertActivation {
    /// GELU with the error function (Hendrycks & Gimpel 2016).
    Gelu,
    /// GELU with the hyperbolic tangent in place of the error function.
    GeluTanh,
    /// The maximum of a value and 0.
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

/// The weights and biases of a layer normalisation.
#[derive(Clone)]
pub struct BertNorm {
    /// The weights, `[hidden]`.
    pub weight: Bytes,
    /// The biases, `[hidden]`.
    pub bias: Bytes,
}

/// One layer.
#[derive(Clone)]
pub struct BertLayer {
    /// The projections of queries, keys and values, `[3 * hidden, hidden]`.
    pub qkv: BertLinear,
    /// The output projection of the attention, `[hidden, hidden]`.
    pub output: BertLinear,
    /// The normalisation after the attention.
    pub attention_norm: BertNorm,
    /// The up projection of the feed-forward network, `[intermediate, hidden]`.
    pub up: BertLinear,
    /// The down projection of the feed-forward network, `[hidden, intermediate]`.
    pub down: BertLinear,
    /// The normalisation after the feed-forward network.
    pub output_norm: BertNorm,
}

/// All weights of an encoder. Vectors and embeddings are of the model's type.
pub struct BertWeights {
    /// The embedding of tokens, `[vocabulary, hidden]`.
    pub words: Bytes,
    /// The embedding of positions, `[positions, hidden]`.
    pub places: Bytes,
    /// The embedding of token types, `[kinds, hidden]`.
    pub texts: Bytes,
    /// The normalisation of the sum of all three embeddings.
    pub norm: BertNorm,
    /// The layers, in order.
    pub layers: Vec<BertLayer>,
    /// The pooler `[hidden, hidden]` and the classifier `[scores, hidden]` of an encoder that
    /// yields scores. Neither is quantised.
    pub score: Option<(BertLinear, BertLinear)>,
}

impl BertSizes {
    pub(super) fn check(&self) -> Result<(), Unfit> {
        let numbers = [
            self.hidden,
            self.heads,
            self.intermediate,
            self.vocabulary,
            self.positions,
            self.kinds,
            self.scores + 1,
        ];
        let small = numbers.iter().all(|number| (1..=i32::MAX as usize / 4).contains(number));
        // Kernels take inner positions in pairs.
        let even = |size: usize| size.is_multiple_of(2);
        let fits = small
            && self.hidden.is_multiple_of(self.heads)
            && even(self.hidden / self.heads)
            && even(self.intermediate);
        if !fits {
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
    pub(super) fn check(&self, sizes: &BertSizes) -> Result<(), Unfit> {
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
