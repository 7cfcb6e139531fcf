//! GLM-5.

use super::Family;
use super::deepseek_v3;
use super::experts::Routed;
use super::latent::{decoder, indexer};

const ROUTED: Routed = Routed { groups: 1, kept: 1, ..deepseek_v3::ROUTED };
const QUERY_RANK: u64 = 2048;
const INDEX_HEADS: u64 = 32;

pub(super) const FAMILY: Family = Family {
    title: "GLM-5",
    architecture: "GlmMoeDsaForCausalLM",
    model_type: "glm_moe_dsa",
    attention: "latent, sparse; indexers in all layers or some",
    layers: "experts, some dense",
    compiled: false,
    shape: |config| {
        let indexer = Some(indexer(config, INDEX_HEADS, true)?);
        decoder(config, QUERY_RANK, &ROUTED, |config| ROUTED.corrected(config), indexer)
    },
    gguf: None,
    rules: &[],
};
