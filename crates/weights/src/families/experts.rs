//! The experts of a decoder, read from a `config.json`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::config::Config;
use super::shape::Activation;
use crate::error::ModelError;
use crate::sizes::MOST;

/// The largest number of experts over all layers, far beyond every known model. The limit exists
/// because a weight name is made for each expert before any file is read.
const MOST_EXPERTS: usize = 1 << 18;
/// The largest number of shared experts.
const MOST_SHARED: u64 = 1 << 10;

/// A mixture of experts (Shazeer et al. 2017): many feed-forward parts, of which each token uses
/// some.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Experts {
    /// The number of experts per layer.
    pub count: usize,
    /// The number of experts per token.
    pub per_token: usize,
    /// The inner size of one expert.
    pub intermediate_size: usize,
    /// The inner size of the shared expert, which every token uses; 0: there is none.
    pub shared_size: usize,
    /// True if the result of the activation is multiplied by a second projection (`up_proj`).
    pub gated: bool,
    /// The size of the latent states that experts read and return, between two projections shared
    /// by a layer's experts; 0: experts use the layer's hidden states.
    pub latent_size: usize,
    /// True if the shared expert's output is multiplied by a gate.
    pub shared_gate: bool,
    /// True if the shared expert and the routed experts have separate norms before and after, and
    /// the router reads normalised states with learned factors (Gemma 4).
    pub beside: bool,
    /// True if an expert's input, rather than its output, is multiplied by the routing weight.
    pub weighs_inputs: bool,
    /// The activation function between the projections.
    pub activation: Activation,
    /// True if the projections and the router have biases.
    pub bias: bool,
    /// How a token's experts are chosen.
    pub routing: Routing,
    /// True if a token's routing weights are divided by their sum.
    pub normalise: bool,
    /// The factor of a token's routing weights, applied last.
    pub scaling: f64,
}

/// How a token's experts are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Routing {
    /// How the scores of experts are computed.
    pub scores: ExpertScores,
    /// True if the router's logits are computed in float32, whatever the model's data type.
    pub in_float32: bool,
    /// True if a bias is added to the scores when experts are chosen, but not to the routing
    /// weights.
    pub corrected: bool,
    /// The number of groups of experts with consecutive ids; 1: the experts are not grouped.
    pub groups: usize,
    /// The number of groups with the best scores, from which experts are chosen.
    pub kept_groups: usize,
    /// How many of a group's best expert scores are summed for the group's score.
    pub best_of_group: usize,
}

/// How the scores of experts are computed from logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExpertScores {
    /// The softmax over all experts.
    Softmax,
    /// The sigmoid of each logit.
    Sigmoid,
}

impl Routing {
    /// Chooses the experts with the largest softmax over all experts.
    pub const SOFTMAX: Self = Self {
        scores: ExpertScores::Softmax,
        in_float32: false,
        corrected: false,
        groups: 1,
        kept_groups: 1,
        best_of_group: 1,
    };

    /// Chooses the experts with the largest sigmoid plus correction bias (DeepSeek-V3, 2024). A
    /// group's score is the sum of its two best scores.
    #[must_use]
    pub const fn corrected(groups: usize, kept_groups: usize) -> Self {
        Self {
            scores: ExpertScores::Sigmoid,
            in_float32: true,
            corrected: true,
            groups,
            kept_groups,
            best_of_group: 2,
        }
    }
}

/// A family's defaults for missing config keys.
pub(super) struct Routed {
    pub(super) first_dense: u64,
    pub(super) shared: u64,
    pub(super) normalise: bool,
    pub(super) groups: u64,
    pub(super) kept: u64,
    pub(super) scaling: f64,
}

impl Routed {
    /// Reads experts that are routed as in DeepSeek V3 and GLM-4 MoE.
    pub(super) fn corrected(&self, config: &Config<'_>) -> Result<Experts, ModelError> {
        config.only("scoring_func", &["sigmoid"])?;
        config.only("topk_method", &["noaux_tc"])?;
        let groups = config.number_or("n_group", self.groups, MOST)?.max(1) as usize;
        let kept = config.number_or("topk_group", self.kept, MOST)?.max(1) as usize;
        self.experts(config, Routing::corrected(groups, kept))
    }

    /// Reads routed experts and a shared expert, under DeepSeek's names.
    pub(super) fn experts(
        &self,
        config: &Config<'_>,
        routing: Routing,
    ) -> Result<Experts, ModelError> {
        let keys = ["n_routed_experts", "num_experts", "num_local_experts"];
        let experts = experts(config, expert_count(config, &keys)?, routing)?;
        let shared = config.number_or("n_shared_experts", self.shared, MOST_SHARED)? as usize;
        let scaling = if config.contains_key("routed_scaling_factor") { 1.0 } else { self.scaling };
        Ok(Experts {
            shared_size: shared * experts.intermediate_size,
            normalise: config.flag("norm_topk_prob", self.normalise),
            scaling: config.real("routed_scaling_factor", scaling)?,
            ..experts
        })
    }

    /// Returns, for each layer, whether it has experts: all layers have, except some leading ones.
    pub(super) fn layers(&self, config: &Config<'_>) -> Result<Vec<bool>, ModelError> {
        let every = config.get("moe_layer_freq").filter(|value| !value.is_null());
        if let Some(every) = every.filter(|every| every.as_u64() != Some(1)) {
            return Err(ModelError::unserved_part(&format!(
                "experts in one of {every} layers (moe_layer_freq)"
            )));
        }
        let first = config.number_or("first_k_dense_replace", self.first_dense, MOST)?;
        Ok((0..config.layer_count()?).map(|layer| layer as u64 >= first).collect())
    }
}

/// Returns the config's values, with `mlp_layer_types` replaced by the number of leading dense
/// layers.
pub(super) fn with_first_dense(config: &Config<'_>) -> Result<Map<String, Value>, ModelError> {
    let mut values = config.values.clone();
    let kinds = config.get("mlp_layer_types").and_then(Value::as_array);
    let Some(kinds) = kinds else { return Ok(values) };
    let count = config.layer_count()?;
    let dense = kinds.iter().take_while(|kind| kind.as_str() == Some("dense")).count();
    let rest = kinds.iter().take(count).skip(dense);
    if kinds.len() < count || rest.into_iter().any(|kind| kind.as_str() != Some("sparse")) {
        return Err(ModelError::unserved_part(
            "an mlp_layer_types that is not dense layers, then sparse ones: try --model-impl transformers",
        ));
    }
    values.insert("first_k_dense_replace".into(), dense.into());
    Ok(values)
}

/// Reads the number of experts, which may be under any of several keys.
pub(super) fn expert_count(config: &Config<'_>, keys: &[&str]) -> Result<usize, ModelError> {
    let there = |key: &&&str| config.get(**key).is_some_and(|value| !value.is_null());
    let key = keys.iter().find(there);
    let key =
        key.ok_or_else(|| ModelError::broken(format!("the model's config has no '{}'", keys[0])))?;
    Ok(config.optional(key, MOST)?.unwrap_or(0) as usize)
}

/// Reads the routed experts of a config, without a shared one.
pub(super) fn experts(
    config: &Config<'_>,
    count: usize,
    routing: Routing,
) -> Result<Experts, ModelError> {
    let per_token = config.size("num_experts_per_tok", MOST)?;
    if per_token > count {
        return Err(ModelError::broken(format!(
            "a token has {per_token} experts (num_experts_per_tok), and there are {count}"
        )));
    }
    check_groups(routing, count, per_token)?;
    if config.flag("mlp_bias", false) {
        return Err(ModelError::unserved_part("experts with biases (mlp_bias)"));
    }
    Ok(Experts {
        count,
        per_token,
        intermediate_size: config.size("moe_intermediate_size", MOST)?,
        shared_size: 0,
        gated: true,
        latent_size: 0,
        shared_gate: false,
        beside: false,
        weighs_inputs: false,
        activation: config.activation()?,
        bias: false,
        routing,
        normalise: config.flag("norm_topk_prob", false),
        scaling: 1.0,
    })
}

/// Checks the total number of experts over all layers.
pub(super) fn check_count(experts: &Experts, layers: usize) -> Result<(), ModelError> {
    if experts.count.saturating_mul(layers) <= MOST_EXPERTS {
        return Ok(());
    }
    Err(ModelError::broken(format!(
        "{} experts in each of {layers} layers are not supported: at most {MOST_EXPERTS} in all",
        experts.count
    )))
}

fn check_groups(routing: Routing, count: usize, per_token: usize) -> Result<(), ModelError> {
    let (groups, kept) = (routing.groups, routing.kept_groups);
    if !count.is_multiple_of(groups) {
        return Err(ModelError::broken(format!(
            "{count} experts can't be split into {groups} groups (n_group)"
        )));
    }
    let of_group = count / groups;
    if kept > groups || of_group < routing.best_of_group {
        return Err(ModelError::broken(format!(
            "{kept} groups (topk_group) can't be kept of {groups} with {of_group} experts each"
        )));
    }
    if per_token > kept * of_group {
        return Err(ModelError::broken(format!(
            "a token has {per_token} experts (num_experts_per_tok), and its groups have {}",
            kept * of_group
        )));
    }
    Ok(())
}
