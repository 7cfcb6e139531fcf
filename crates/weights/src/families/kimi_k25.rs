//! Kimi K2.5: the text part, which is a DeepSeek V3. The weights of its vision tower are not read.

use super::Family;
use super::config::Config;
use super::deepseek_v3::{QUERY_RANK, ROUTED};
use super::latent::decoder;
use super::shape::Shape;
use super::text::{RULES, text_config};
use crate::error::ModelError;

pub(super) const FAMILY: Family = Family {
    title: "Kimi K2.5, K2.6 (text)",
    architecture: "KimiK25ForConditionalGeneration",
    model_type: "kimi_k25",
    attention: "latent",
    layers: "experts, some dense",
    compiled: true,
    shape,
    gguf: None,
    rules: RULES,
};

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let values = text_config(config);
    let config = &Config { values: &values, ..*config };
    decoder(config, QUERY_RANK, &ROUTED, |config| ROUTED.corrected(config), None)
}
