//! The sizes of latent attention.

use super::AttentionSizes;
use crate::packing::{Unfit, unfit};

/// The smallest number of heads in a group of heads that are computed together, unless the model
/// has fewer heads. The heads of a group share the values that are computed from a block of cached
/// rows.
const HEADS: usize = 32;

/// The sizes of latent attention (DeepSeek-V2, 2024), in addition to the common sizes. The keys and
/// values of all heads are projections of one short row per position. The kernels do not compute
/// these projections. They map queries to the latent part of the rows instead, so attention has a
/// single key head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentSizes {
    /// Elements of the low rank of queries. `None` if queries have a single projection.
    pub query_rank: Option<usize>,
    /// Elements of the latent part of a row.
    pub rank: usize,
    /// Elements of a query head that are not rotated.
    pub nope_dim: usize,
    /// Elements of a value head.
    pub value_dim: usize,
    /// True if the two elements of a rotated pair are adjacent; false if they are half of the
    /// rotated part apart.
    pub interleaved: bool,
}

impl AttentionSizes {
    /// The outputs of the first projection of latent attention, and the inputs of its last one.
    /// `None` if heads have their own keys and values.
    pub(crate) fn latent_widths(&self) -> Option<(usize, usize)> {
        let LatentSizes { query_rank, value_dim, .. } = self.latent?;
        let first = query_rank.unwrap_or_else(|| self.latent_queries());
        Some((first + self.head_dim, self.heads * value_dim))
    }

    /// Elements of all heads' queries before they are mapped to the latent part.
    pub(crate) fn latent_queries(&self) -> usize {
        let of_head = |latent: LatentSizes| latent.nope_dim + self.head_dim - latent.rank;
        self.heads * self.latent.map_or(0, of_head)
    }

    /// Elements of the largest input of the per-head products for one position, over all heads; 0
    /// if attention is not latent.
    pub(crate) fn latent_inputs(&self) -> usize {
        self.heads * self.latent.map_or(0, |latent| latent.rank.max(latent.nope_dim))
    }

    /// Elements of the attention's result for one position. The inputs of the last projection are
    /// computed from them.
    pub(crate) fn attended(&self) -> usize {
        let of_head = |latent: LatentSizes| latent.rank.max(latent.value_dim);
        self.heads * self.latent.map_or(self.head_dim, of_head)
    }

    /// The number of key heads by which the work of attention is divided among threads. Heads of
    /// latent attention share one key head. They are split into groups, so that several threads can
    /// compute one position.
    pub(crate) fn key_heads(&self) -> usize {
        if self.latent.is_none() {
            return self.kv_heads;
        }
        let mut groups = (1..=self.heads / HEADS).rev();
        groups.find(|&groups| self.heads.is_multiple_of(groups)).unwrap_or(1)
    }

    pub(super) fn check_latent(&self) -> Result<(), Unfit> {
        let Some(LatentSizes { query_rank, rank, nope_dim, value_dim, .. }) = self.latent else {
            return Ok(());
        };
        let numbers = [query_rank.unwrap_or(2), rank, nope_dim, value_dim];
        let possible =
            |&number: &usize| number > 0 && number <= i32::MAX as usize && number.is_multiple_of(2);
        let alone = self.kv_heads == 1
            && self.window.is_none()
            && self.chunk.is_none()
            && !(self.norm_rows || self.gate || self.keys_are_values)
            && !(self.value_norm || self.both_ways);
        let rotated = [0, self.head_dim.saturating_sub(rank)].contains(&self.rotary_dim);
        if !numbers.iter().all(possible) || rank >= self.head_dim || !alone || !rotated {
            return unfit(format!("no kernel computes latent attention of {self:?}"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latent_attention_has_one_row_for_all_heads() {
        let latent = LatentSizes {
            query_rank: None,
            rank: 32,
            nope_dim: 16,
            value_dim: 12,
            interleaved: true,
        };
        let sizes = AttentionSizes {
            heads: 4,
            kv_heads: 1,
            head_dim: 40,
            rotary_dim: 8,
            angles: Some(0),
            window: None,
            in_window_part: false,
            chunk: None,
            norm_rows: false,
            scale: 0.25,
            cap: None,
            gate: false,
            keys_are_values: false,
            value_norm: false,
            scaled_queries: false,
            both_ways: false,
            latent: Some(latent),
        };
        assert_eq!(sizes.check_latent(), Ok(()));
        assert_eq!(sizes.latent_widths(), Some((4 * 24 + 40, 48)));
        assert_eq!(sizes.attended(), 128);
        for (heads, groups) in
            [(4, 1), (16, 1), (32, 1), (40, 1), (64, 2), (67, 1), (96, 3), (128, 4)]
        {
            assert_eq!(AttentionSizes { heads, ..sizes }.key_heads(), groups, "{heads}");
        }
        assert_eq!(AttentionSizes { kv_heads: 2, latent: None, ..sizes }.key_heads(), 2);
        let low = Some(LatentSizes { query_rank: Some(20), ..latent });
        assert_eq!(AttentionSizes { latent: low, ..sizes }.latent_widths(), Some((60, 48)));
        let without = AttentionSizes { rotary_dim: 0, angles: None, ..sizes };
        assert_eq!(without.check_latent(), Ok(()));
        let with = |latent| AttentionSizes { latent: Some(latent), ..sizes };
        for wrong in [
            AttentionSizes { kv_heads: 4, ..sizes },
            AttentionSizes { rotary_dim: 6, ..sizes },
            AttentionSizes { window: Some(7), ..sizes },
            AttentionSizes { both_ways: true, ..sizes },
            with(LatentSizes { rank: 40, ..latent }),
            with(LatentSizes { nope_dim: 0, ..latent }),
            with(LatentSizes { value_dim: 13, ..latent }),
            with(LatentSizes { query_rank: Some(0), ..latent }),
        ] {
            assert!(wrong.check_latent().is_err(), "{wrong:?}");
        }
    }
}
