//! The sizes of a decoder, and the kinds of its parts.

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

/// A kind of attention that some layers have.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionSizes {
    /// The number of query heads.
    pub heads: usize,
    /// The number of heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// The number of first elements of a head that are rotated; 0: none.
    pub rotary_dim: usize,
    /// The index of its angles in [`crate::Weights::angles`]; `None`: no rotation.
    pub angles: Option<usize>,
    /// The number of positions that a query sees, its own included; `None`: all earlier ones.
    pub window: Option<usize>,
    /// True if its layers keep their pages in the window part. Then there is a window.
    pub in_window_part: bool,
    /// The chunk length, if a query sees only positions of its own chunk; `None`: there are no
    /// chunks.
    pub chunk: Option<usize>,
    /// True if the norms of queries and keys span all heads of a position.
    pub norm_rows: bool,
    /// The factor of scores.
    pub scale: f32,
    /// The bound that scores approach; `None`: no bound.
    pub cap: Option<f32>,
    /// True if the output is multiplied by the sigmoid of a gate.
    pub gate: bool,
    /// True if the values are the same product as the keys.
    pub keys_are_values: bool,
    /// True if each head of values is normalised, without weights.
    pub value_norm: bool,
    /// True if queries are multiplied by [`crate::Weights::query_scales`].
    pub scaled_queries: bool,
    /// True if a query also sees the positions after it, with a window that reaches equally far on
    /// both sides. Rows are then whole prompts, and pages keep nothing from step to step.
    pub both_ways: bool,
    /// The sizes of latent attention; `None`: heads have their own keys and values. With latent
    /// attention, pages have one row per position for all heads. A row has `head_dim` elements: the
    /// latent part, and then the shared, rotated part of the keys.
    pub latent: Option<LatentSizes>,
}

/// Inputs of each layer beside the residual stream (Gemma 3n, 2025): rows that the token's id
/// selects, and a product with its input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerInputSizes {
    /// The number of tokens that have rows.
    pub vocabulary: usize,
    /// Elements of a layer's input.
    pub size: usize,
}

/// Factors of states and logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Factors {
    /// The factor of the embedding's rows.
    pub embeddings: f32,
    /// The factor of inputs that the caller provides in place of embeddings.
    pub inputs: f32,
    /// The factor of a part's output before it is added.
    pub residuals: f32,
    /// The factor of logits.
    pub logits: f32,
    /// The bound that logits then approach; `None`: there is none.
    pub logit_cap: Option<f32>,
}

impl Factors {
    /// No factor and no cap.
    pub const NONE: Self =
        Self { embeddings: 1.0, inputs: 1.0, residuals: 1.0, logits: 1.0, logit_cap: None };
}

/// The sizes of a decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct Sizes {
    /// The type of weights and activations, and of pages without codes.
    pub dtype: Dtype,
    /// True if pages have 8-bit codes of keys and values.
    pub kv_codes: bool,
    /// Elements of the residual stream.
    pub hidden: usize,
    /// The kinds of attention.
    pub attentions: Vec<AttentionSizes>,
    /// The function between the products of feed-forward parts.
    pub gate: GateKind,
    /// True if the activation is of gates, whose result multiplies the values. False: it is of all
    /// outputs of the first product.
    pub gated: bool,
    /// Factors of states and logits.
    pub factors: Factors,
    /// True if norms subtract the mean.
    pub mean_norms: bool,
    /// True if norms are in float32 instead of the model's type.
    pub wide_norms: bool,
    /// Elements between the two products of the widest dense feed-forward part; 0: no layer has
    /// one.
    pub intermediate: usize,
    /// The sizes of layers' own inputs; `None`: layers have none.
    pub layer_inputs: Option<LayerInputSizes>,
    /// The sizes of the experts; `None`: no layer has any.
    pub experts: Option<ExpertSizes>,
    /// The number of tokens in the vocabulary.
    pub vocabulary: usize,
    /// The largest number of positions of a request.
    pub positions: usize,
    /// Positions of a page.
    pub page_size: usize,
    /// The number of pages, of the main part if there is a window part too.
    pub page_count: usize,
    /// The number of pages of the window part; 0: all layers share one pool. After them comes the
    /// *null page*, for positions that no query sees. It is never written.
    pub window_page_count: usize,
    /// The epsilon of the norms.
    pub eps: f32,
}

impl Sizes {
    /// Bytes of the keys and of the values of a layer with this kind of attention, on all pages.
    /// Latent rows are stored as keys, and there are no values.
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

    /// A layer's widths in [`crate::AdapterSizes::new`]. `attention`: its kind; `None`: adapters
    /// change neither its mixing of positions nor latent attention. The layer has its own keys or
    /// reads those of another layer. Its dense part has `inner` elements between the products.
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

    /// Outputs of the first product of a feed-forward part with this many elements between its
    /// products. With gates they are interleaved.
    pub(crate) fn fed(&self, inner: usize) -> usize {
        if self.gated { 2 * inner } else { inner }
    }

    /// True if any query sees positions behind it.
    pub(crate) fn both_ways(&self) -> bool {
        self.attentions.iter().any(|attention| attention.both_ways)
    }

    /// The numbers of a norm, in the model's type `E` or in float32.
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

    /// Elements of the queries of one position, and of its keys and values in the product. The
    /// layer has its own keys, or none.
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
