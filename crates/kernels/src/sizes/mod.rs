//! The sizes of a decoder, and the variants of its components.

mod experts;
mod latent;
mod recurrence;

use crate::codes::SHARED;
use crate::element::{Element, widened};
use crate::packing::{Dtype, Unfit, unfit};
use crate::pages::{group_bytes, takes_codes};
use crate::tile::GROUP;

pub use self::experts::ExpertSizes;
pub use self::latent::LatentSizes;
pub use self::recurrence::{RecurrenceSizes, StateGate};
pub use crate::matmul::GateKind;

/// The sizes of a kind of attention. Several layers may have the same kind.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionSizes {
    /// The number of query heads.
    pub heads: usize,
    /// The number of heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// The number of leading elements of a head that are rotated; 0 if none are.
    pub rotary_dim: usize,
    /// The index of the rotation angles in [`crate::Weights::angles`]; `None` if nothing is
    /// rotated.
    pub angles: Option<usize>,
    /// The number of positions that a query sees, including its own; `None` if it sees all earlier
    /// ones.
    pub window: Option<usize>,
    /// True if the pages of the layers of this kind are in the window part. Then `window` must be
    /// set.
    pub in_window_part: bool,
    /// The chunk length if a query sees only positions of its own chunk; `None` if there are no
    /// chunks.
    pub chunk: Option<usize>,
    /// True if a norm of queries or keys spans all heads of a position.
    pub norm_rows: bool,
    /// The factor of attention scores.
    pub scale: f32,
    /// The bound that scores approach; `None` if there is none.
    pub cap: Option<f32>,
    /// True if the output is multiplied by the sigmoid of a gate.
    pub gate: bool,
    /// True if one projection computes both keys and values.
    pub keys_are_values: bool,
    /// True if each head of values is normalised, without weights.
    pub value_norm: bool,
    /// True if queries are multiplied by [`crate::Weights::query_scales`].
    pub scaled_queries: bool,
    /// True if a query also sees the positions after it; a window then reaches equally far on both
    /// sides. Rows are then whole prompts, and pages are not kept from step to step.
    pub both_ways: bool,
    /// The sizes of latent attention; `None` if heads have their own keys and values. With latent
    /// attention, pages have one row of `head_dim` elements per position for all heads: the latent
    /// part, and then the shared part of the keys, which is rotated.
    pub latent: Option<LatentSizes>,
}

/// Sizes of the per-layer inputs of Gemma 3n and Gemma 4. Each layer has this input in addition to
/// the residual stream: a per-layer embedding of the token, plus a projection of the first layer's
/// input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerInputSizes {
    /// The number of tokens with a per-layer embedding.
    pub vocabulary: usize,
    /// Elements of the per-layer input of one layer.
    pub size: usize,
}

/// The factors of states and logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Factors {
    /// The factor of the embedding's rows.
    pub embeddings: f32,
    /// The factor of inputs that the caller provides in place of embeddings.
    pub inputs: f32,
    /// The factor of the output of attention or of a feed-forward network before it is added.
    pub residuals: f32,
    /// The factor of logits.
    pub logits: f32,
    /// The bound that logits approach after scaling; `None` if there is none.
    pub logit_cap: Option<f32>,
}

impl Factors {
    /// All factors are 1, and there is no bound.
    pub const NONE: Self =
        Self { embeddings: 1.0, inputs: 1.0, residuals: 1.0, logits: 1.0, logit_cap: None };
}

/// The sizes of a decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct Sizes {
    /// The type of weights and activations, and of pages without codes.
    pub dtype: Dtype,
    /// True if pages hold keys and values as 8-bit codes.
    pub kv_codes: bool,
    /// Elements of the residual stream.
    pub hidden: usize,
    /// The kinds of attention.
    pub attentions: Vec<AttentionSizes>,
    /// The activation of feed-forward networks.
    pub gate: GateKind,
    /// True if the activation applies to gates, whose result multiplies the up projection. False if
    /// it applies to all outputs of the first projection.
    pub gated: bool,
    /// Factors of states and logits.
    pub factors: Factors,
    /// True if norms subtract the mean.
    pub mean_norms: bool,
    /// True if the weights of norms are in float32 instead of the model's type.
    pub wide_norms: bool,
    /// Elements of the inner state of the widest dense feed-forward network; 0 if no layer has one.
    pub intermediate: usize,
    /// The sizes of per-layer inputs; `None` if layers have none.
    pub layer_inputs: Option<LayerInputSizes>,
    /// The sizes of the experts; `None` if no layer has experts.
    pub experts: Option<ExpertSizes>,
    /// The number of tokens in the vocabulary.
    pub vocabulary: usize,
    /// The largest number of positions of a request.
    pub positions: usize,
    /// The number of positions per page.
    pub page_size: usize,
    /// The number of pages; if there is a window part, of the main part.
    pub page_count: usize,
    /// The number of pages of the window part; 0 if all layers share one pool. The *null page*
    /// follows them: it is for positions that no query sees, and is never written.
    pub window_page_count: usize,
    /// The epsilon of the norms.
    pub eps: f32,
}

impl Sizes {
    /// Bytes of the keys and of the values of a layer with this kind of attention, over all pages.
    /// Latent rows are stored as keys, and have no values.
    #[must_use]
    pub fn pool_bytes(&self, attention: usize) -> [usize; 2] {
        let AttentionSizes { kv_heads, head_dim, in_window_part, latent, .. } =
            self.attentions[attention];
        let pages = if in_window_part { self.window_page_count + 1 } else { self.page_count };
        let heads = pages * self.page_size * kv_heads;
        let bytes = match self.kv_codes {
            true => heads / GROUP * group_bytes(head_dim),
            false => heads * head_dim * self.dtype.bytes(),
        };
        [bytes, if latent.is_some() { 0 } else { bytes }]
    }

    /// Returns a layer's output sizes for [`crate::AdapterSizes::new`]. `attention` is the index of
    /// its kind of attention. If it is `None`, or the attention is latent, adapters change only the
    /// dense network. `own_keys` is false if the layer reads the keys of another layer. `inner` is
    /// the inner size of the dense network.
    #[must_use]
    pub fn adapted_widths(
        &self,
        attention: Option<usize>,
        own_keys: bool,
        inner: usize,
    ) -> [usize; 5] {
        let gates = if self.gated { inner } else { 0 };
        let kind = attention.map(|kind| &self.attentions[kind]);
        let Some(kind) = kind.filter(|kind| kind.latent.is_none()) else {
            return [0, 0, 0, gates, inner];
        };
        let (queries, [keys, values]) = kind.products(own_keys);
        [queries, keys, values, gates, inner]
    }

    /// The number of outputs of the first projection of a feed-forward network with this inner
    /// size. With gates, the projection interleaves gates and values.
    pub(crate) fn fed(&self, inner: usize) -> usize {
        if self.gated { 2 * inner } else { inner }
    }

    /// True if any query sees positions after its own.
    pub(crate) fn both_ways(&self) -> bool {
        self.attentions.iter().any(|attention| attention.both_ways)
    }

    /// Converts the weights of a norm from the model's type `E`, or from float32.
    pub(crate) fn read_norm<E: Element>(&self, norm: &[u8]) -> Vec<f32> {
        if self.wide_norms { widened::<f32>(norm) } else { widened::<E>(norm) }
    }

    pub(crate) fn norm_bytes(&self) -> usize {
        if self.wide_norms { size_of::<f32>() } else { self.dtype.bytes() }
    }

    /// True if pages with this many positions can store 8-bit codes for heads of this size.
    #[must_use]
    pub fn takes_codes(page_size: usize, head_dim: usize) -> bool {
        takes_codes(page_size, head_dim)
    }

    pub(crate) fn check(&self) -> Result<(), Unfit> {
        let numbers = [
            self.hidden,
            self.intermediate.max(usize::from(self.experts.is_some())),
            self.vocabulary,
            self.positions,
            self.page_size,
            self.page_count,
        ];
        if numbers.iter().any(|&number| number == 0 || number > i32::MAX as usize) {
            return unfit(format!("no kernel computes a model of {self:?}"));
        }
        if [self.hidden, self.intermediate].iter().any(|size| size % 2 > 0) {
            return unfit(format!(
                "the compiled kernels take inner dimensions two by two, and the model has {} and {}",
                self.hidden, self.intermediate
            ));
        }
        if !self.gated && (self.gate == GateKind::ClampedSwiglu || self.layer_inputs.is_some()) {
            return unfit(format!("{:?}, or layers' own inputs, without gates", self.gate));
        }
        if let Some(LayerInputSizes { vocabulary, size }) = self.layer_inputs {
            let fits = (1..=i32::MAX as usize).contains(&size) && size.is_multiple_of(2);
            if !fits || vocabulary == 0 {
                return unfit(format!("no kernel computes {:?}", self.layer_inputs));
            }
        }
        self.attentions.iter().try_for_each(|attention| attention.check(self))?;
        self.experts.iter().try_for_each(ExpertSizes::check)
    }
}

impl AttentionSizes {
    /// Elements of the queries, and of the keys, of one position.
    pub(crate) fn elements(&self) -> (usize, usize) {
        (self.heads * self.head_dim, self.kv_heads * self.head_dim)
    }

    /// The number of outputs per position of the projection: of queries, and of keys and values.
    /// Without `own_keys`, keys and values have no outputs. With
    /// [`AttentionSizes::keys_are_values`], values have none.
    pub(crate) fn products(&self, own_keys: bool) -> (usize, [usize; 2]) {
        let (queries, keys) = self.elements();
        match (own_keys, self.keys_are_values) {
            (false, _) => (queries, [0, 0]),
            (true, true) => (queries, [keys, 0]),
            (true, false) => (queries, [keys, keys]),
        }
    }

    fn check(&self, sizes: &Sizes) -> Result<(), Unfit> {
        let &Self { heads, kv_heads, head_dim, rotary_dim, angles, .. } = self;
        let numbers =
            [heads, kv_heads, head_dim, self.window.unwrap_or(1), self.chunk.unwrap_or(1)];
        if numbers.iter().any(|&number| number == 0 || number > i32::MAX as usize) {
            return unfit(format!("no kernel computes attention of {self:?}"));
        }
        let has_pages = sizes.window_page_count > 0 && self.window.is_some();
        if self.in_window_part && !has_pages || sizes.window_page_count > i32::MAX as usize {
            return unfit("layers without a window in the window part, or no pages for it");
        }
        if !heads.is_multiple_of(kv_heads) {
            return unfit(format!("{heads} heads can't share {kv_heads}"));
        }
        if [head_dim, rotary_dim].iter().any(|size| size % 2 > 0) {
            return unfit(format!(
                "the compiled kernels take inner dimensions two by two, and the model has heads of {head_dim}, of which {rotary_dim} are rotated"
            ));
        }
        if rotary_dim > head_dim || (rotary_dim > 0) != angles.is_some() {
            return unfit(format!("heads of {head_dim} have no {rotary_dim} to rotate"));
        }
        self.check_latent()?;
        if sizes.kv_codes && !Sizes::takes_codes(sizes.page_size, head_dim) {
            return unfit(format!(
                "8-bit keys and values need pages of a multiple of {GROUP} positions and heads of a multiple of {SHARED} elements: there are {} and {head_dim}",
                sizes.page_size
            ));
        }
        Ok(())
    }
}
