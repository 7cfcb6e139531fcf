//! GLM-4.7-Flash: DeepSeek V3's attention with GLM's routing. GGUF files of this model have
//! DeepSeek's architecture name.

use super::Family;
use super::config::Config;
use super::experts::{Routed, with_first_dense};
use super::latent::decoder;
use super::shape::Shape;
use crate::error::ModelError;

const ROUTED: Routed =
    Routed { first_dense: 1, shared: 1, normalise: true, groups: 1, kept: 1, scaling: 1.8 };
const QUERY_RANK: u64 = 768;

pub(super) const FAMILY: Family = Family {
    title: "GLM-4.7-Flash",
    architecture: "Glm4MoeLiteForCausalLM",
    model_type: "glm4_moe_lite",
    attention: "latent",
    layers: "experts, some dense",
    compiled: true,
    shape,
    gguf: None,
    rules: &[],
};

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let values = with_first_dense(config)?;
    let config = &Config { values: &values, ..*config };
    decoder(config, QUERY_RANK, &ROUTED, |config| ROUTED.corrected(config), None)
}
