//! DeepSeek V3.2: DeepSeek V3 with an indexer in each layer.

use super::Family;
use super::deepseek_v3::{QUERY_RANK, ROUTED};
use super::latent::{decoder, indexer};

const INDEX_HEADS: u64 = 64;

pub(super) const FAMILY: Family = Family {
    title: "DeepSeek V3.2",
    architecture: "DeepseekV32ForCausalLM",
    model_type: "deepseek_v32",
    attention: "latent, sparse",
    layers: "experts, some dense",
    compiled: false,
    shape: |config| {
        let indexer = Some(indexer(config, INDEX_HEADS, false)?);
        decoder(config, QUERY_RANK, &ROUTED, |config| ROUTED.corrected(config), indexer)
    },
    gguf: None,
    rules: &[],
};
