//! Latent attention in its absorbed form: attention with a single key head whose keys are the
//! cached rows.

use forebay_kernels::{AttentionSizes, LatentSizes, Sizes};
use forebay_weights::{Attention, Latent, QkNorm};

/// Bytes of the buffers that only latent attention needs, for a step of `tokens` tokens. The
/// kernels keep buffers of the largest step.
pub(crate) fn step_bytes(sizes: &Sizes, tokens: u64) -> u64 {
    let number = sizes.dtype.bytes();
    let of_token = |attention: &AttentionSizes| {
        let Some(LatentSizes { query_rank, rank, nope_dim, value_dim, .. }) = attention.latent
        else {
            return 0;
        };
        let given = rank.max(value_dim);
        // Three buffers: one for queries in the latent space and later for values; one for the
        // rearranged inputs of the per-head products; one for the results of attention.
        let of_head = (given + rank.max(nope_dim)) * size_of::<f32>() + given * number;
        let query = (nope_dim + attention.head_dim - rank) * size_of::<f32>();
        let of_low_rank = |low: usize| low * number + attention.heads * query;
        (attention.heads * of_head + query_rank.map_or(0, of_low_rank)) as u64
    };
    tokens * sizes.attentions.iter().map(of_token).max().unwrap_or(0)
}

/// The attention that the kernels compute on latent rows.
pub(crate) fn as_attention(of: &Latent) -> Attention {
    Attention {
        heads: of.heads,
        kv_heads: 1,
        head_dim: of.rank + of.rotary_dim,
        value_dim: of.rank,
        scale: Some(of.scale),
        window: None,
        chunk: None,
        sinks: false,
        cap: None,
        qk_norm: QkNorm::None,
        value_norm: false,
        keys_are_values: false,
        gate: false,
        qkv_bias: of.bias,
        output_bias: of.bias,
        query_scale: of.query_scale,
        both_ways: false,
    }
}
