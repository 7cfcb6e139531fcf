//! The sizes of a decoder, and the kinds of its parts.

mod experts;
mod recurrence;

use crate::codes::SHARED;
use crate::packing::{Dtype, Unfit, unfit};
use crate::pages::{group_bytes, takes_codes};
use crate::tile::GROUP;

pub use self::experts::ExpertSizes;
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
    /// The number of first elements of a head that positions rotate; 0: none.
    pub rotary_dim: usize,
    /// The number of its angles in [`crate::Weights::angles`]; `None`: positions rotate nothing.
    pub angles: Option<usize>,
    /// The last positions that a query sees, its own among them; `None`: all.
    pub window: Option<usize>,
    /// True if its layers have pages of the window part. Then there is a window.
    pub in_window_part: bool,
    /// Positions of a chunk, of which a query sees those of its own; `None`: there are no chunks.
    pub chunk: Option<usize>,
    /// True if norms of queries and of keys are over all heads of a position.
    pub norm_rows: bool,
    /// The factor of scores.
    pub scale: f32,
    /// The bound that scores approach; `None`: there is none.
    pub cap: Option<f32>,
    /// True if the output is multiplied by the sigmoid of a gate.
    pub gate: bool,
}

/// Factors of states and logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Factors {
    /// The factor of the embedding's rows.
    pub embeddings: f32,
    /// The factor of inputs that the caller gives in place of embeddings.
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
    /// The type of weights, activations and pages without codes.
    pub dtype: Dtype,
    /// True if pages have 8-bit codes of keys and values.
    pub kv_codes: bool,
    /// Elements of the residual stream.
    pub hidden: usize,
    /// The kinds of attention.
    pub attentions: Vec<AttentionSizes>,
    /// The function of gates.
    pub gate: GateKind,
    /// Factors of states and logits.
    pub factors: Factors,
    /// True if norms subtract the mean.
    pub mean_norms: bool,
    /// True if norms are float32, and not of the model's type.
    pub wide_norms: bool,
    /// Elements between the two products of a dense feed-forward part; 0: no layer has one.
    pub intermediate: usize,
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
    /// The number of pages of the window part; 0: all layers share one pool. Behind them there is
    /// the *null page*, which has the positions that no query sees, and stays as it is.
    pub window_page_count: usize,
    /// The epsilon of the norms.
    pub eps: f32,
}

impl Sizes {
    /// Bytes of the keys, or of the values, of a layer with this kind of attention, on all pages.
    #[must_use]
    pub fn pool_bytes(&self, attention: usize) -> usize {
        let AttentionSizes { kv_heads, head_dim, in_window_part, .. } = self.attentions[attention];
        let pages = if in_window_part { self.window_page_count + 1 } else { self.page_count };
        let heads = pages * self.page_size * kv_heads;
        match self.kv_codes {
            true => heads / GROUP * group_bytes(head_dim),
            false => heads * head_dim * self.dtype.bytes(),
        }
    }

    /// A layer's widths in [`crate::AdapterSizes::new`], of a kind of attention (`None`: the layer
    /// is recurrent) and with a dense feed-forward part or without.
    #[must_use]
    pub fn adapted_widths(&self, attention: Option<usize>, dense: bool) -> [usize; 3] {
        let (queries, keys) = attention.map_or((0, 0), |kind| self.attentions[kind].elements());
        [queries, keys, if dense { self.intermediate } else { 0 }]
    }

    pub(crate) fn norm_bytes(&self) -> usize {
        if self.wide_norms { size_of::<f32>() } else { self.dtype.bytes() }
    }

    /// True if pages of so many positions can have 8-bit codes of heads of this size.
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
        self.attentions.iter().try_for_each(|attention| attention.check(self))?;
        self.experts.iter().try_for_each(ExpertSizes::check)
    }
}

impl AttentionSizes {
    /// Elements of the queries, and of the keys, of one position.
    pub(crate) fn elements(&self) -> (usize, usize) {
        (self.heads * self.head_dim, self.kv_heads * self.head_dim)
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
        if sizes.kv_codes && !Sizes::takes_codes(sizes.page_size, head_dim) {
            return unfit(format!(
                "8-bit keys and values need pages of a multiple of {GROUP} positions and heads of a multiple of {SHARED} elements: there are {} and {head_dim}",
                sizes.page_size
            ));
        }
        Ok(())
    }
}
