//! Latent attention (DeepSeek-V2, 2024) of a layer, always in its absorbed form.
//!
//! The KV cache holds a row `[c | r]` per position: a latent part, and a part that RoPE rotates and
//! that all heads share. A head's key is `[U c | r]` and its value is `V c`. The score of a query
//! `[q | p]` is `(U^T q) . c + p . r`. So queries are mapped to the latent space, and attention
//! reads only the rows. The result of attention is multiplied by `V`. Prompt chunks and decode rows
//! use the same form, and so get the same bits.

use crate::element::Element;
use crate::experts::Stack;
use crate::math;
use crate::memory::grow;
use crate::owned::Owned;
use crate::sizes::{AttentionSizes, LatentSizes, Sizes};
use crate::team::FEW;
use crate::tile::MAX_ROWS;
use crate::vector::Vector;
use crate::weights::LatentWeights;

/// The epsilon of the norms of low ranks. transformers uses it regardless of `rms_norm_eps`.
pub(crate) const NORM_EPS: f32 = 1e-6;

/// The latent attention of a layer.
pub(crate) struct Latent {
    pub(crate) sizes: LatentSizes,
    pub(crate) heads: usize,
    /// Elements of the part of a key that all heads share.
    pub(crate) shared: usize,
    /// The norm of the queries' low rank, and their up projection. `None`: the layer's first
    /// product computes the queries directly.
    pub(crate) query: Option<(Vec<f32>, Owned)>,
    pub(crate) row_norm: Vec<f32>,
    /// `U^T` of each head.
    pub(crate) keys: Stack,
    /// `V` of each head.
    pub(crate) values: Stack,
}

impl Latent {
    /// Creates latent attention from checked weights; `kind` is the index of the attention's sizes.
    /// `None` if attention of this kind is not latent.
    pub(crate) fn new<E: Element>(of: &LatentWeights, kind: usize, all: &Sizes) -> Option<Self> {
        let attention = &all.attentions[kind];
        let (heads, sizes) = (attention.heads, attention.latent?);
        let LatentSizes { query_rank, rank, nope_dim, value_dim, .. } = sizes;
        let query = of.query.as_ref().map(|query| {
            let shape = (attention.latent_queries(), query_rank.unwrap_or(0));
            (all.read_norm::<E>(&query.norm), Owned::new::<E>(&query.product, shape, None))
        });
        Some(Self {
            sizes,
            heads,
            shared: attention.head_dim - rank,
            query,
            row_norm: all.read_norm::<E>(&of.row_norm),
            keys: Stack::new::<E>((&of.keys, heads), (rank, nope_dim), None),
            values: Stack::new::<E>((&of.values, heads), (value_dim, rank), None),
        })
    }

    /// The up projection from the low rank to queries.
    pub(crate) fn query_matrix(&self) -> Option<&Owned> {
        self.query.as_ref().map(|(_, matrix)| matrix)
    }
}

/// Copies the shared part of a key or a query into `to` and rotates it by the cosines and sines of
/// its position, if there are any. If `interleaved`, a pair that is rotated together is adjacent in
/// `from`, and half the length apart in `to`. This reordering is the same for queries and keys, so
/// their products stay the same.
#[inline(always)]
pub(crate) fn turn<V: Vector>(
    from: &[f32],
    interleaved: bool,
    (cos, sin): (&[f32], &[f32]),
    to: &mut [f32],
) {
    if interleaved {
        let (first, second) = to.split_at_mut(from.len() / 2);
        let to = first.iter_mut().zip(second);
        for ((first, second), pair) in to.zip(from.as_chunks::<2>().0) {
            [*first, *second] = *pair;
        }
    } else {
        to.copy_from_slice(from);
    }
    if !cos.is_empty() {
        math::rotate::<V>(to, cos, sin);
    }
}

/// Buffers of a step, reused from step to step.
#[derive(Default)]
pub(crate) struct Work<E> {
    /// Low ranks of queries `[tokens, query_rank]`. For few tokens, each member has its own copy.
    low: Vec<E>,
    /// Queries `[tokens, heads, nope_dim + shared]`.
    queries: Vec<f32>,
    /// Results of the per-head products: queries `[heads, tokens, rank]`, then values `[heads,
    /// rows, value_dim]`.
    made: Vec<f32>,
    /// The rows of one tile, per member.
    gathered: Vec<E>,
}

/// Pointers to the buffers of [`Work`] while a step is computed.
#[derive(Clone, Copy)]
pub(crate) struct Buffers<E> {
    pub(crate) low: *mut E,
    pub(crate) queries: *mut f32,
    pub(crate) made: *mut f32,
    pub(crate) gathered: *mut E,
}

impl<E: Element> Work<E> {
    /// Reserves memory for a step of this many tokens, with attention of these sizes.
    pub(crate) fn make_room(
        &mut self,
        attention: &AttentionSizes,
        (tokens, members): (usize, usize),
    ) {
        let Some(LatentSizes { query_rank, rank, nope_dim, .. }) = attention.latent else { return };
        if let Some(query_rank) = query_rank {
            grow(&mut self.low, tokens.max(members * FEW) * query_rank, E::default());
            grow(&mut self.queries, tokens * attention.latent_queries(), 0.0);
        }
        grow(&mut self.made, tokens * attention.attended(), 0.0);
        grow(&mut self.gathered, members * MAX_ROWS * rank.max(nope_dim), E::default());
    }

    pub(crate) fn buffers(&mut self) -> Buffers<E> {
        Buffers {
            low: self.low.as_mut_ptr(),
            queries: self.queries.as_mut_ptr(),
            made: self.made.as_mut_ptr(),
            gathered: self.gathered.as_mut_ptr(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::plain::Array;

    #[test]
    fn neighbours_turn_as_pairs_that_are_half_a_part_apart() {
        let turned = |interleaved, from: [f32; 4]| {
            let mut to = [0.0; 4];
            turn::<Array>(&from, interleaved, (&[0.5, 1.0], &[2.0, 0.0]), &mut to);
            to
        };
        let halves = turned(false, [1.0, 3.0, 2.0, 4.0]);
        assert_eq!(halves, [0.5 - 4.0, 3.0, 1.0 + 2.0, 4.0]);
        assert_eq!(turned(true, [1.0, 2.0, 3.0, 4.0]), halves);
    }
}
