//! The experts of a decoder, read from a `config.json`.

use serde_json::{Map, Value};

use crate::config::{Family, flag};
use crate::error::ModelError;
use crate::sizes::{MOST, optional, real, size};

/// Experts of all layers together. The bound is far beyond every known model: names of weights are
/// made for each, before a file is asked for them.
const MOST_EXPERTS: usize = 1 << 18;
/// The largest number of shared experts.
const MOST_SHARED: u64 = 1 << 10;

/// A mixture of experts (Shazeer et al. 2017). It has many gated feed-forward parts, and each token
/// uses some.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experts {
    /// The number of experts of a layer.
    pub count: usize,
    /// The number of experts of a token.
    pub per_token: usize,
    /// Elements between the two products of one expert.
    pub intermediate_size: usize,
    /// Elements between the two products of the shared expert, which every token has; 0: there is
    /// none.
    pub shared_size: usize,
    /// The rule for the choice of a token's experts.
    pub routing: Routing,
    /// True if a token's weights are divided by their sum.
    pub normalise: bool,
    /// The factor of a token's weights, applied last.
    pub scaling: f64,
}

/// The rule for the choice of a token's experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Routing {
    /// The largest of the softmax over all experts.
    Softmax,
    /// The largest of sigmoids, of routers in 32 bits (DeepSeek-V3, 2024). A bias is added only for
    /// the choice.
    Corrected {
        /// The number of groups of experts, which have neighbouring ids; 1: there are none.
        groups: usize,
        /// The number of kept groups, which have the best sums of their two best scores.
        kept: usize,
    },
}

impl Routing {
    /// The number of best scores whose sum is a group's score.
    pub const BEST_OF_GROUP: usize = 2;

    /// The numbers of all groups and of kept ones.
    #[must_use]
    pub fn groups(self) -> (usize, usize) {
        match self {
            Self::Softmax => (1, 1),
            Self::Corrected { groups, kept } => (groups, kept),
        }
    }
}

/// The number under a key that may be null or 0; `usual` if the key is not there.
fn number_or(
    config: &Map<String, Value>,
    key: &str,
    usual: u64,
    most: u64,
) -> Result<u64, ModelError> {
    match config.contains_key(key) {
        true => Ok(optional(config, key, most)?.unwrap_or(0)),
        false => Ok(usual),
    }
}

/// True if a layer has experts.
pub(crate) fn is_sparse(
    config: &Map<String, Value>,
    family: Family,
    layer: u64,
) -> Result<bool, ModelError> {
    match family {
        Family::Qwen3Moe => {
            let dense = config.get("mlp_only_layers").and_then(Value::as_array);
            let is_dense =
                dense.is_some_and(|layers| layers.iter().any(|it| it.as_u64() == Some(layer)));
            if is_dense || expert_count(config, family)? == 0 {
                return Ok(false);
            }
            let step = optional(config, "decoder_sparse_step", MOST)?.unwrap_or(1);
            Ok((layer + 1).is_multiple_of(step))
        }
        Family::Glm4Moe => {
            let every = config.get("moe_layer_freq").filter(|value| !value.is_null());
            if let Some(every) = every.filter(|every| every.as_u64() != Some(1)) {
                let what = format!("experts in one of {every} layers (moe_layer_freq)");
                return Err(ModelError::elsewhere(what));
            }
            Ok(layer >= number_or(config, "first_k_dense_replace", 1, MOST)?)
        }
        _ => Ok(false),
    }
}

fn expert_count(config: &Map<String, Value>, family: Family) -> Result<u64, ModelError> {
    let keys: &[&str] = match family {
        Family::Glm4Moe => &["n_routed_experts", "num_experts", "num_local_experts"],
        _ => &["num_experts", "num_local_experts"],
    };
    let there = |key: &&&str| config.get(**key).is_some_and(|value| !value.is_null());
    let key = keys.iter().find(there);
    let key =
        key.ok_or_else(|| ModelError::broken(format!("the model's config has no '{}'", keys[0])))?;
    Ok(optional(config, key, MOST)?.unwrap_or(0))
}

/// The experts of a model with so many layers of them.
pub(crate) fn experts(
    config: &Map<String, Value>,
    family: Family,
    layers: usize,
) -> Result<Experts, ModelError> {
    if flag(config, "mlp_bias", false) {
        return Err(ModelError::elsewhere("experts with biases"));
    }
    let routing = routing(config, family)?;
    let count = expert_count(config, family)? as usize;
    let per_token = size(config, "num_experts_per_tok", MOST)?;
    if per_token > count {
        return Err(ModelError::broken(format!(
            "a token has {per_token} experts (num_experts_per_tok), and there are {count}"
        )));
    }
    check_groups(routing, count, per_token)?;
    if count * layers > MOST_EXPERTS {
        return Err(ModelError::broken(format!(
            "{count} experts in each of {layers} layers are not supported: at most {MOST_EXPERTS} in all"
        )));
    }
    let intermediate_size = size(config, "moe_intermediate_size", MOST)?;
    let glm = family == Family::Glm4Moe;
    let shared =
        if glm { number_or(config, "n_shared_experts", 1, MOST_SHARED)? as usize } else { 0 };
    let scaling = if glm { real(config, "routed_scaling_factor", 1.0)? } else { 1.0 };
    Ok(Experts {
        count,
        per_token,
        intermediate_size,
        shared_size: shared * intermediate_size,
        routing,
        normalise: flag(config, "norm_topk_prob", glm),
        scaling,
    })
}

/// The rule of a family, and what of it the config can change.
fn routing(config: &Map<String, Value>, family: Family) -> Result<Routing, ModelError> {
    let said = |key: &str| config.get(key).filter(|value| !value.is_null());
    let glm = family == Family::Glm4Moe;
    let scores = if glm { "sigmoid" } else { "softmax" };
    if let Some(other) = said("scoring_func").filter(|value| value.as_str() != Some(scores)) {
        return Err(ModelError::elsewhere(format!("experts scored by {other}")));
    }
    if !glm {
        return Ok(Routing::Softmax);
    }
    if let Some(other) = said("topk_method").filter(|value| value.as_str() != Some("noaux_tc")) {
        return Err(ModelError::elsewhere(format!("experts chosen by {other} (topk_method)")));
    }
    let groups = optional(config, "n_group", MOST)?.unwrap_or(1) as usize;
    let kept = optional(config, "topk_group", MOST)?.unwrap_or(1) as usize;
    Ok(Routing::Corrected { groups, kept })
}

fn check_groups(routing: Routing, count: usize, per_token: usize) -> Result<(), ModelError> {
    let Routing::Corrected { groups, kept } = routing else { return Ok(()) };
    if !count.is_multiple_of(groups) {
        return Err(ModelError::broken(format!(
            "{count} experts can't be split into {groups} groups (n_group)"
        )));
    }
    let of_group = count / groups;
    if kept > groups || of_group < Routing::BEST_OF_GROUP {
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::Shape;

    fn of(name: &str, changes: &[Value]) -> Result<Shape, ModelError> {
        let mut config = json!({
            "architectures": [name], "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 128, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        });
        for (key, value) in changes.iter().filter_map(Value::as_object).flatten() {
            config[key] = value.clone();
        }
        Shape::of(config.as_object().expect("an object"))
    }

    fn qwen(changes: Value) -> Result<Shape, ModelError> {
        let own = json!({"num_experts": 8, "norm_topk_prob": true});
        of("Qwen3MoeForCausalLM", &[own, changes])
    }

    fn glm(changes: Value) -> Result<Shape, ModelError> {
        let own = json!({"n_routed_experts": 8, "n_group": 2, "topk_group": 1});
        of("Glm4MoeForCausalLM", &[own, changes])
    }

    #[test]
    fn layers_have_experts_as_the_config_says() {
        let all = qwen(json!({"intermediate_size": null})).expect("a model");
        let experts = Experts {
            count: 8,
            per_token: 2,
            intermediate_size: 24,
            shared_size: 0,
            routing: Routing::Softmax,
            normalise: true,
            scaling: 1.0,
        };
        assert_eq!((all.experts, all.intermediate_size), (Some(experts), 0));
        assert!(all.head_norms && all.head_dim == 16 && all.rotary_dim == 16);
        assert!(all.sparse == [true; 6] && all.has_place_for(5) && !all.has_place_for(6));
        let some =
            qwen(json!({"decoder_sparse_step": 2, "mlp_only_layers": [3]})).expect("a model");
        assert_eq!(some.sparse, [false, true, false, false, false, true]);
        assert_eq!(some.intermediate_size, 96);
        let none = qwen(json!({"num_experts": 0})).expect("a model");
        assert_eq!((none.experts, none.sparse), (None, vec![false; 6]));
        for elsewhere in [json!({"mlp_bias": true}), json!({"scoring_func": "sigmoid"})] {
            assert!(matches!(qwen(elsewhere), Err(ModelError::Elsewhere(_))));
        }
        for broken in [
            json!({"num_experts_per_tok": 9}),
            json!({"num_experts": null}),
            json!({"moe_intermediate_size": null}),
            json!({"num_experts": 1 << 20}),
        ] {
            assert!(matches!(qwen(broken), Err(ModelError::Broken(_))));
        }
    }

    #[test]
    fn glm_has_groups_a_shared_part_and_half_turned_heads() {
        let usual = glm(json!({"attention_bias": true})).expect("a model");
        assert_eq!(usual.sparse, [false, true, true, true, true, true]);
        assert!(usual.qkv_bias && !usual.output_bias && !usual.head_norms);
        assert_eq!((usual.head_dim, usual.rotary_dim), (16, 8));
        let experts = usual.experts.expect("experts");
        assert_eq!(experts.routing, Routing::Corrected { groups: 2, kept: 1 });
        assert_eq!((experts.shared_size, experts.normalise, experts.scaling), (24, true, 1.0));
        let other = glm(json!({
            "first_k_dense_replace": 0, "n_shared_experts": 2, "norm_topk_prob": false, "use_qk_norm": true,
            "routed_scaling_factor": 2.5, "rope_parameters": {"partial_rotary_factor": 0.25}, "n_group": 1,
            "topk_group": 1,
        }))
        .expect("a model");
        assert!(other.head_norms && other.rotary_dim == 4 && other.sparse == [true; 6]);
        let experts = other.experts.expect("experts");
        assert_eq!(experts.routing.groups(), (1, 1));
        assert_eq!((experts.shared_size, experts.normalise, experts.scaling), (48, false, 2.5));
        let alone = glm(json!({"n_shared_experts": null})).expect("a model");
        assert_eq!(alone.experts.map(|experts| experts.shared_size), Some(0));
    }

    #[test]
    fn groups_that_make_no_sense_are_refused() {
        for (changes, reason) in [
            (json!({"n_group": 3}), "n_group"),
            (json!({"topk_group": 3}), "topk_group"),
            (json!({"n_group": 8}), "topk_group"),
            (json!({"num_experts_per_tok": 5}), "its groups have 4"),
            (json!({"n_routed_experts": null}), "n_routed_experts"),
            (json!({"partial_rotary_factor": 1.5}), "partial_rotary_factor"),
        ] {
            let error = glm(changes).expect_err("broken");
            assert!(matches!(&error, ModelError::Broken(why) if why.contains(reason)), "{error:?}");
        }
        for (changes, reason) in [
            (json!({"moe_layer_freq": 2}), "moe_layer_freq"),
            (json!({"topk_method": "greedy"}), "topk_method"),
            (json!({"scoring_func": "softmax"}), "softmax"),
        ] {
            let error = glm(changes).expect_err("elsewhere");
            assert!(
                matches!(&error, ModelError::Elsewhere(why) if why.contains(reason)),
                "{error:?}"
            );
        }
    }
}
