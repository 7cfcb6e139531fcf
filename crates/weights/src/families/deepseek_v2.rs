//! DeepSeek V2 and V2-Lite.

use super::Family;
use super::config::Config;
use super::deepseek_v3::{RENAMED, gguf_keys, gguf_scores};
use super::experts::{ExpertScores, Experts, Routed, Routing};
use super::gguf::GgufNames;
use super::latent::decoder;
use crate::error::ModelError;
use crate::sizes::MOST;

const ROUTED: Routed =
    Routed { first_dense: 0, shared: 2, normalise: false, groups: 1, kept: 1, scaling: 1.0 };
const QUERY_RANK: u64 = 1536;
const IN_GROUPS: &str = "group_limited_greedy";

pub(super) const FAMILY: Family = Family {
    title: "DeepSeek V2, V2-Lite",
    architecture: "DeepseekV2ForCausalLM",
    model_type: "deepseek_v2",
    attention: "latent",
    layers: "experts, some dense",
    compiled: true,
    shape: |config| decoder(config, QUERY_RANK, &ROUTED, experts, None),
    gguf: Some(GgufNames {
        architecture: "deepseek2",
        fits: |files| Ok(gguf_scores(files)? == "softmax"),
        keys: gguf_keys,
        rules: RENAMED,
    }),
    rules: &[],
};

fn experts(config: &Config<'_>) -> Result<Experts, ModelError> {
    config.only("scoring_func", &["softmax"])?;
    config.only("topk_method", &["greedy", IN_GROUPS])?;
    if config.flag("norm_topk_prob", false) {
        return Err(ModelError::unserved_part(
            "norm_topk_prob in DeepSeek V2: no such model is known",
        ));
    }
    let method = config.get("topk_method").and_then(serde_json::Value::as_str);
    let (groups, kept_groups) = match method {
        Some(IN_GROUPS) => {
            let number = |key| config.number_or(key, 1, MOST);
            (number("n_group")?.max(1) as usize, number("topk_group")?.max(1) as usize)
        }
        _ => (1, 1),
    };
    let routing = Routing {
        scores: ExpertScores::Softmax,
        in_float32: true,
        groups,
        kept_groups,
        ..Routing::SOFTMAX
    };
    ROUTED.experts(config, routing)
}
