//! Latent attention in its absorbed form: attention with one key head, whose key is a position's
//! row.

use forebay_weights::{Attention, Latent, QkNorm};

/// The attention that the kernels compute of rows.
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
