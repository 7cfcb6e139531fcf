//! GGUF metadata as a Hugging Face `config.json`.

use serde_json::{Map, Value, json};

use super::rules::{Rule, Take};
use super::{ALL, Family};
use crate::error::ModelError;
use crate::gguf::{GgufFiles, GgufTensor, GgufValue};

/// The GGUF names of a family. Several families may share an architecture name.
pub(crate) struct GgufNames {
    /// The name in `general.architecture`.
    pub(super) architecture: &'static str,
    /// True if a file of this architecture belongs to the family.
    pub(super) fits: fn(&GgufFiles) -> Result<bool, ModelError>,
    /// Returns the keys that a `config.json` would have for attention and experts.
    pub(super) keys: fn(&GgufFiles) -> Result<Map<String, Value>, ModelError>,
    /// Rules that precede [`COMMON`].
    pub(crate) rules: &'static [Rule],
}

/// Rules for all families (`gguf.constants.TENSOR_NAMES`).
pub(crate) const COMMON: &[Rule] = &[
    // Tables for the rotary embedding are part of the config here, not weights.
    Rule::spare("rope_freqs.*"),
    Rule::renamed("token_embd.*", "model.embed_tokens.*"),
    Rule::renamed("output_norm.*", "model.norm.*"),
    Rule::renamed("output.*", "lm_head.*"),
    Rule::renamed("blk.#.attn_norm.*", "model.layers.#.input_layernorm.*"),
    Rule::renamed("blk.#.attn_q.*", "model.layers.#.self_attn.q_proj.*"),
    Rule::renamed("blk.#.attn_k.*", "model.layers.#.self_attn.k_proj.*"),
    Rule::renamed("blk.#.attn_v.*", "model.layers.#.self_attn.v_proj.*"),
    Rule::renamed("blk.#.attn_output.*", "model.layers.#.self_attn.o_proj.*"),
    Rule::renamed("blk.#.attn_q_norm.*", "model.layers.#.self_attn.q_norm.*"),
    Rule::renamed("blk.#.attn_k_norm.*", "model.layers.#.self_attn.k_norm.*"),
    Rule::renamed("blk.#.ffn_norm.*", "model.layers.#.post_attention_layernorm.*"),
    Rule::renamed("blk.#.ffn_gate.*", "model.layers.#.mlp.gate_proj.*"),
    Rule::renamed("blk.#.ffn_up.*", "model.layers.#.mlp.up_proj.*"),
    Rule::renamed("blk.#.ffn_down.*", "model.layers.#.mlp.down_proj.*"),
    Rule::renamed("blk.#.ffn_gate_inp.*", "model.layers.#.mlp.gate.*"),
    Rule::renamed("blk.#.ffn_gate_shexp.*", "model.layers.#.mlp.shared_experts.gate_proj.*"),
    Rule::renamed("blk.#.ffn_up_shexp.*", "model.layers.#.mlp.shared_experts.up_proj.*"),
    Rule::renamed("blk.#.ffn_down_shexp.*", "model.layers.#.mlp.shared_experts.down_proj.*"),
    // This tensor has the suffix `bias` but does not belong to a projection.
    Rule::renamed("blk.#.exp_probs_b.bias", "model.layers.#.mlp.gate.e_score_correction_bias"),
    Rule::new("blk.#.ffn_gate_exps.weight", GATE, Take::EACH_EXPERT),
    Rule::new("blk.#.ffn_up_exps.weight", UP, Take::EACH_EXPERT),
    Rule::new("blk.#.ffn_down_exps.weight", DOWN, Take::EACH_EXPERT),
    Rule::new("blk.#.ffn_gate_up_exps.weight", GATE, Take::EACH_EXPERT.share(0, 2)),
    Rule::new("blk.#.ffn_gate_up_exps.weight", UP, Take::EACH_EXPERT.share(1, 2)),
];
const GATE: &str = "model.layers.#.mlp.experts.@.gate_proj.weight";
const UP: &str = "model.layers.#.mlp.experts.@.up_proj.weight";
const DOWN: &str = "model.layers.#.mlp.experts.@.down_proj.weight";

const DEFAULT_FREQ_BASE: f64 = 10000.0;
/// Control tokens that end a turn, if the file does not name one (llama.cpp has the same list).
const END_OF_TURN: [&str; 4] = ["<|eot_id|>", "<|im_end|>", "<|end|>", "<|end_of_turn|>"];
/// Control tokens that end a turn of gpt-oss. Its `<|end|>` only ends one of the turn's messages.
const END_OF_HARMONY: [&str; 2] = ["<|return|>", "<|call|>"];
const CONTROL: i64 = 3;
/// Keys that change the computation. `refuse_changes` rejects files with such a key.
const CHANGES: [&str; 15] = [
    "attention.clamp_kqv",
    "attention.scale",
    "attention.temperature_scale",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_group_scale",
    "final_logit_softcapping",
    "interleave_moe_layer_step",
    "logit_scale",
    "moe_every_n_layers",
    "moe_latent_size",
    "residual_scale",
    "router_logit_softcapping",
    "swiglu_clamp_exp",
    "swiglu_clamp_shexp",
];
const HUGE: i64 = i32::MAX as i64;
/// The number of groups and of kept groups, by score function and number of experts.
const GROUPS: [(&str, i64, (i64, i64)); 2] = [("softmax", 160, (8, 3)), ("sigmoid", 256, (8, 4))];

/// Finds the family of the files.
fn family(files: &GgufFiles) -> Result<(&'static Family, &'static GgufNames), ModelError> {
    let name = files.architecture();
    for family in ALL {
        // The architecture name of files with experts may have the suffix `_moe`.
        let is_of = |names: &&GgufNames| {
            names.architecture == name || name.strip_suffix("_moe") == Some(names.architecture)
        };
        if let Some(names) = family.gguf.as_ref().filter(is_of)
            && (names.fits)(files)?
        {
            return Ok((family, names));
        }
    }
    Err(ModelError::unserved_gguf(name))
}

/// Returns the `config.json` that the model would have.
pub(crate) fn hf_config(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    let (family, names) = family(files)?;
    let keys = (names.keys)(files)?;
    let sees_all = keys.get("use_bidirectional_attention") == Some(&Value::Bool(true));
    if !sees_all && files.get("attention.causal").is_some_and(|causal| !causal.truthy()) {
        return Err(ModelError::unserved_part(
            "bidirectional attention (attention.causal is false)",
        ));
    }
    let embedding = files.tensor("token_embd.weight").ok_or_else(|| {
        ModelError::broken("the GGUF file has no token embedding: it isn't a whole model")
    })?;
    let context = required(files, "context_length")?;
    let theta = files.get("rope.freq_base").and_then(GgufValue::as_f64);
    let theta = theta.unwrap_or(DEFAULT_FREQ_BASE);
    let window = whole(files, "attention.sliding_window")?.filter(|&window| window > 0);
    let eos = eos_token_ids(files);
    let eos = match eos[..] {
        [] => Value::Null,
        [one] => json!(one),
        _ => json!(eos),
    };
    // The second key is used for norms that subtract the mean.
    let eps = files.get("attention.layer_norm_rms_epsilon");
    let eps = eps.or_else(|| files.get("attention.layer_norm_epsilon")).and_then(GgufValue::as_f64);
    let eps = eps.ok_or_else(|| missing(files, "attention.layer_norm_rms_epsilon"))?;
    let special = |name: &str| {
        let id = files.metadata.get(&format!("tokenizer.ggml.{name}_token_id"));
        id.and_then(GgufValue::as_i64).map_or(Value::Null, |id| json!(id))
    };
    let number = |key: &str| keys.get(key).and_then(Value::as_i64);
    let rotated = match (number("qk_rope_head_dim"), number("head_dim")) {
        (Some(rotated), _) => (rotated, true),
        (None, dim) => {
            let part = keys.get("partial_rotary_factor").and_then(Value::as_f64).unwrap_or(1.0);
            ((dim.unwrap_or(0) as f64 * part) as i64, false)
        }
    };
    let config = json!({
        "vocab_size": embedding.shape.first().copied().unwrap_or(0),
        "hidden_size": required(files, "embedding_length")?,
        // Files in which all layers have experts may lack this key.
        "intermediate_size": match whole(files, "expert_count")? {
            _ if keys.contains_key("intermediate_size") => None,
            None | Some(0) => Some(required(files, "feed_forward_length")?),
            Some(_) => whole(files, "feed_forward_length")?,
        },
        "num_hidden_layers": layer_count(files)?,
        "hidden_act": "silu",
        "rms_norm_eps": shortest(eps),
        "rope_theta": theta,
        "rope_scaling": match keys.contains_key("rope_parameters") {
            true => Value::Null,
            false => rope_scaling(files, theta, rotated, context)?,
        },
        "max_position_embeddings": context,
        "sliding_window": window,
        "tie_word_embeddings": files.tensor("output.weight").is_none(),
        "bos_token_id": special("bos"),
        "eos_token_id": eos,
        "pad_token_id": special("padding"),
        "architectures": [family.architecture],
        "model_type": family.model_type,
    });
    let Value::Object(mut config) = config else { unreachable!("an object") };
    let beta = keys.get("llama_4_scaling_beta").filter(|beta| !beta.is_null()).cloned();
    let truncate = keys.get("truncate").cloned();
    config.extend(keys);
    let scaling = config.get_mut("rope_scaling").and_then(Value::as_object_mut);
    match (scaling, beta, truncate) {
        (Some(scaling), beta, truncate) => {
            // As in other engines, the temperature factor is part of the RoPE scaling, which also
            // contains the factor's step length.
            scaling.extend(beta.map(|beta| ("llama_4_scaling_beta".to_owned(), beta)));
            scaling.extend(truncate.map(|truncate| ("truncate".to_owned(), truncate)));
        }
        (None, Some(_), _) => {
            return Err(ModelError::unserved_part("a temperature_scale without yarn"));
        }
        (None, None, _) => {}
    }
    config.extend(pooling_type(files)?.map(|kind| ("pooling_type".to_owned(), json!(kind))));
    Ok(config)
}

/// Returns the pooling type that the file states (`gguf.PoolingType`).
fn pooling_type(files: &GgufFiles) -> Result<Option<&'static str>, ModelError> {
    match whole(files, "pooling_type")? {
        None | Some(0) => Ok(None),
        Some(1) => Ok(Some("mean")),
        Some(2) => Ok(Some("cls")),
        Some(3) => Ok(Some("last")),
        Some(4) => Ok(Some("rank")),
        Some(other) => Err(ModelError::unserved_part(&format!("pooling_type {other}"))),
    }
}

/// The number of computed layers. Later layers are only for multi-token prediction.
fn layer_count(files: &GgufFiles) -> Result<i64, ModelError> {
    Ok(required(files, "block_count")? - whole(files, "nextn_predict_layers")?.unwrap_or(0))
}

/// Returns the config keys of dense families with grouped-query attention.
pub(super) fn dense_keys(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    if whole(files, "expert_count")?.unwrap_or(0) > 0 {
        let architecture = files.architecture();
        return Err(ModelError::unserved_part(&format!(
            "experts in a file of the GGUF architecture '{architecture}'"
        )));
    }
    grouped_keys(files, false)
}

/// Returns the config keys of grouped-query attention. `partial` is true if RoPE may rotate only a
/// part of a head.
pub(super) fn grouped_keys(
    files: &GgufFiles,
    partial: bool,
) -> Result<Map<String, Value>, ModelError> {
    let heads = Heads::read(files)?;
    if !partial && heads.rotated != heads.dim {
        return Err(ModelError::unserved_part("heads that are rotated in part"));
    }
    let has = |name: &str| files.tensor(name).is_some();
    let keys = json!({
        "num_attention_heads": heads.queries,
        "num_key_value_heads": heads.keys,
        "head_dim": heads.dim,
        "qkv_bias": has("blk.0.attn_q.bias"),
        "attention_bias": has("blk.0.attn_output.bias"),
        "mlp_bias": has("blk.0.ffn_up.bias"),
    });
    let mut keys = keys.as_object().cloned().unwrap_or_default();
    if partial {
        keys.insert("partial_rotary_factor".into(), json!(heads.turned_part()));
    }
    Ok(keys)
}

/// Refuses files with keys that change the computation.
pub(super) fn refuse_changes(files: &GgufFiles) -> Result<(), ModelError> {
    match CHANGES.iter().find(|key| files.get(key).is_some_and(changes)) {
        None => Ok(()),
        Some(key) => Err(ModelError::unserved_part(&format!("'{}.{key}'", files.architecture()))),
    }
}

/// Returns the config keys of experts and their routing, under DeepSeek's names. Every key is set.
/// Group counts that older converters omitted are looked up by the number of experts of DeepSeek's
/// models.
pub(super) fn routed_keys(
    files: &GgufFiles,
    scores: &str,
) -> Result<Map<String, Value>, ModelError> {
    let positive = |key: &str| -> Result<Option<i64>, ModelError> {
        Ok(whole(files, key)?.filter(|&number| number > 0))
    };
    let count = whole(files, "expert_count")?.unwrap_or(0);
    let (groups, kept) = GROUPS
        .into_iter()
        .find_map(|(kind, of, groups)| (kind == scores && of == count).then_some(groups))
        .unwrap_or((1, 1));
    let groups = positive("expert_group_count")?.unwrap_or(groups);
    let kept = positive("expert_group_used_count")?.unwrap_or(kept.min(groups));
    let (per_token, first) = match count {
        0 => (0, layer_count(files)?),
        _ => (
            required(files, "expert_used_count")?,
            whole(files, "leading_dense_block_count")?.unwrap_or(0),
        ),
    };
    let scaling = files.get("expert_weights_scale").and_then(GgufValue::as_f64);
    let mut keys = json!({
        "n_routed_experts": count,
        "n_shared_experts": whole(files, "expert_shared_count")?.unwrap_or(0),
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": required(files, "expert_feed_forward_length")?,
        "first_k_dense_replace": first,
        "n_group": groups,
        "topk_group": kept,
        "scoring_func": scores,
        "norm_topk_prob": files.get("expert_weights_norm").is_some_and(GgufValue::truthy),
        "routed_scaling_factor": shortest(scaling.filter(|&it| it != 0.0).unwrap_or(1.0)),
    });
    if scores == "softmax" {
        keys["topk_method"] = json!(if groups > 1 { "group_limited_greedy" } else { "greedy" });
    }
    Ok(keys.as_object().cloned().unwrap_or_default())
}

/// Returns the score function of experts (`gguf.ExpertGatingFuncType`).
pub(super) fn scores(files: &GgufFiles, usual: &'static str) -> Result<&'static str, ModelError> {
    match whole(files, "expert_gating_func")? {
        None | Some(0) => Ok(usual),
        Some(1) => Ok("softmax"),
        Some(2) => Ok("sigmoid"),
        Some(other) => {
            let what = format!("experts with scores of the kind {other} (expert_gating_func)");
            Err(ModelError::unserved_part(&what))
        }
    }
}

/// True if a value changes the computation.
pub(super) fn changes(value: &GgufValue) -> bool {
    match value {
        GgufValue::List(items) => items.iter().any(changes),
        value => value
            .as_f64()
            .or(value.as_i64().map(|it| it as f64))
            .is_none_or(|it| it != 0.0 && it != 1.0),
    }
}

fn missing(files: &GgufFiles, key: &str) -> ModelError {
    ModelError::broken(format!("the GGUF file has no '{}.{key}'", files.architecture()))
}

/// Reads a whole number between 0 and `HUGE`; `None` if the key is missing.
pub(super) fn whole(files: &GgufFiles, key: &str) -> Result<Option<i64>, ModelError> {
    let Some(value) = files.get(key) else { return Ok(None) };
    if value.as_list().is_some() {
        return Err(ModelError::unserved_part(&format!("a {key} that differs between layers")));
    }
    let number = value.as_i64().filter(|number| (0..=HUGE).contains(number));
    number.map(Some).ok_or_else(|| {
        ModelError::broken(format!("the GGUF file has metadata that makes no sense: {key}"))
    })
}

pub(super) fn required(files: &GgufFiles, key: &str) -> Result<i64, ModelError> {
    whole(files, key)?.ok_or_else(|| missing(files, key))
}

/// Returns the shortest decimal for this 32-bit number: 1e-05, not 9.999999747378752e-06.
pub(super) fn shortest(value: f64) -> f64 {
    format!("{}", value as f32).parse().unwrap_or(value)
}

/// Reads a whole number per layer. A file may state one number for all layers.
pub(super) fn of_layers(files: &GgufFiles, key: &str) -> Result<Vec<i64>, ModelError> {
    let layers = required(files, "block_count")? as usize;
    let Some(list) = files.get(key).and_then(GgufValue::as_list) else {
        return Ok(vec![required(files, key)?; layers]);
    };
    let numbers = list.iter().map(GgufValue::as_i64);
    let numbers = numbers.map(|number| number.filter(|number| (0..=HUGE).contains(number)));
    let numbers: Option<Vec<i64>> = numbers.collect();
    numbers.filter(|numbers| numbers.len() == layers).ok_or_else(|| {
        ModelError::broken(format!("the GGUF file has metadata that makes no sense: {key}"))
    })
}

/// Returns the number of query heads, and the number of heads of keys and values.
pub(super) fn head_counts(files: &GgufFiles) -> Result<(i64, i64), ModelError> {
    let queries = required(files, "attention.head_count")?;
    if queries == 0 {
        return Err(missing(files, "attention.head_count"));
    }
    Ok((queries, whole(files, "attention.head_count_kv")?.unwrap_or(queries)))
}

/// Returns each layer's kind, and the number of heads of keys and values in layers that have any.
/// The kind of layers without keys and values is `other`.
pub(super) fn kinds_of_layers(
    files: &GgufFiles,
    other: &'static str,
) -> Result<(Vec<&'static str>, i64), ModelError> {
    let layers = required(files, "block_count")? as usize;
    let of_layers: Vec<i64> =
        match files.get("attention.head_count_kv").and_then(GgufValue::as_list) {
            Some(list) => list.iter().map(|count| count.as_i64().unwrap_or(-1)).collect(),
            None => vec![required(files, "attention.head_count_kv")?; layers],
        };
    let most = of_layers.iter().copied().max().unwrap_or(0);
    let alike = of_layers.iter().all(|&count| count == 0 || count == most);
    if !alike || of_layers.len() != layers {
        return Err(ModelError::unserved_part("an attention.head_count_kv of several kinds"));
    }
    let kind = |&count: &i64| if count > 0 { "full_attention" } else { other };
    Ok((of_layers.iter().map(kind).collect(), most))
}

struct Heads {
    queries: i64,
    keys: i64,
    dim: i64,
    /// Elements of a head that RoPE rotates.
    rotated: i64,
}

impl Heads {
    fn read(files: &GgufFiles) -> Result<Self, ModelError> {
        let (queries, keys) = head_counts(files)?;
        let hidden = required(files, "embedding_length")?;
        let given = whole(files, "attention.key_length")?.filter(|&length| length > 0);
        let dim = given.unwrap_or(hidden / queries);
        let values = whole(files, "attention.value_length")?.filter(|&length| length > 0);
        if values.is_some_and(|length| length != dim) {
            return Err(ModelError::unserved_part("keys and values of different lengths"));
        }
        let rotated = whole(files, "rope.dimension_count")?.filter(|&length| length > 0);
        let rotated = rotated.unwrap_or(dim);
        if rotated > dim {
            return Err(ModelError::unserved_part(&format!(
                "heads of {dim} with {rotated} to rotate"
            )));
        }
        Ok(Self { queries, keys, dim, rotated })
    }

    /// Returns the factor whose product with `dim` is `rotated` after rounding down.
    fn turned_part(&self) -> f64 {
        let factor = self.rotated as f64 / self.dim as f64;
        let again = (self.dim as f64 * factor) as i64;
        if again == self.rotated { factor } else { factor.next_up() }
    }
}

/// Returns the tokens that end a generation: the end of a sequence, of a turn or of a message.
fn eos_token_ids(files: &GgufFiles) -> Vec<i64> {
    let id = |key: &str| {
        files.metadata.get(&format!("tokenizer.ggml.{key}")).and_then(GgufValue::as_i64)
    };
    let mut found: Vec<i64> =
        ["eos_token_id", "eot_token_id", "eom_token_id"].into_iter().filter_map(id).collect();
    if id("eot_token_id").is_none() {
        let list = |key: &str| {
            let list = files.metadata.get(&format!("tokenizer.ggml.{key}"));
            list.and_then(GgufValue::as_list).unwrap_or_default()
        };
        let tokens = (0..).zip(list("tokens")).zip(list("token_type"));
        let control: Vec<(i64, &str)> = tokens
            .filter(|(_, kind)| kind.as_i64() == Some(CONTROL))
            .filter_map(|((index, token), _)| Some((index, token.as_text()?)))
            .collect();
        let has = |wanted: &&str| control.iter().any(|(_, text)| text == wanted);
        let ends = match END_OF_HARMONY.iter().all(has) {
            true => &END_OF_HARMONY[..],
            false => &END_OF_TURN[..],
        };
        found.extend(control.iter().filter(|(_, text)| ends.contains(text)).map(|(at, _)| *at));
    }
    let mut each = Vec::new();
    for id in found {
        if !each.contains(&id) {
            each.push(id);
        }
    }
    each
}

/// Returns the RoPE scaling of `rotated` elements. For latent attention, the scaling also applies
/// to the softmax.
fn rope_scaling(
    files: &GgufFiles,
    theta: f64,
    (rotated, latent): (i64, bool),
    context: i64,
) -> Result<Value, ModelError> {
    if let Some(tensor) = files.tensor("rope_freqs.weight") {
        let factors = frequency_factors(tensor, rotated)?;
        return llama3_scaling(&factors, theta, rotated as f64);
    }
    let number =
        |key: &str| files.get(key).and_then(GgufValue::as_f64).filter(|&value| value != 0.0);
    if let Some(long) = files.tensor("rope_factors_long.weight") {
        let short = files.tensor("rope_factors_short.weight").ok_or_else(|| {
            ModelError::broken("the GGUF file has rope_factors_long.weight alone")
        })?;
        return Ok(json!({
            "rope_type": "longrope",
            "short_factor": frequency_factors(short, rotated)?,
            "long_factor": frequency_factors(long, rotated)?,
            "original_max_position_embeddings": whole(files, "rope.scaling.original_context_length")?,
            "attention_factor": number("rope.scaling.attn_factor").map_or(1.0, shortest),
        }));
    }
    let factor =
        number("rope.scaling.factor").or_else(|| number("rope.scale_linear")).unwrap_or(1.0);
    let kind = files.get("rope.scaling.type").map(|kind| kind.as_text().unwrap_or_default());
    match kind {
        None | Some("linear") if factor != 1.0 => {
            Ok(json!({"rope_type": "linear", "factor": factor}))
        }
        None | Some("linear" | "none") => Ok(Value::Null),
        Some("yarn") => {
            let original = number("rope.scaling.original_context_length");
            let original = original.unwrap_or(context as f64 / factor) as i64;
            let mut scaling = json!({
                "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
            });
            for key in ["beta_fast", "beta_slow"] {
                let value = files.get(&format!("rope.scaling.yarn_{key}"));
                if let Some(value) = value.and_then(GgufValue::as_f64) {
                    scaling[key] = json!(value);
                }
            }
            if let Some(weight) = number("rope.scaling.yarn_log_multiplier") {
                // The file stores a tenth of `mscale`. `mscale_all_dim` gets the same value,
                // because the two are equal in every known model.
                let weight = json!(shortest(10.0 * shortest(weight)));
                (scaling["mscale"], scaling["mscale_all_dim"]) = (weight.clone(), weight);
            }
            let multiplier = number("rope.scaling.attn_factor")
                .or_else(|| number("rope.scaling.yarn_attn_factor"));
            if let Some(multiplier) = multiplier.filter(|&multiplier| multiplier != 1.0) {
                if latent {
                    return Err(ModelError::unserved_part(
                        "a yarn attn_factor beside latent attention",
                    ));
                }
                // GGUF's factor is multiplied by YaRN's own factor, while Hugging Face's factor
                // replaces YaRN's.
                scaling["attention_factor"] = json!(multiplier * (0.1 * factor.ln() + 1.0));
            }
            Ok(scaling)
        }
        Some(other) => Err(ModelError::unserved_part(&format!("the rope scaling '{other}'"))),
    }
}

/// Reads the frequency divisors of a rotary embedding of `rotated` elements.
pub(super) fn frequency_factors(tensor: &GgufTensor, rotated: i64) -> Result<Vec<f64>, ModelError> {
    let wanted = (rotated / 2) as usize;
    if tensor.shape != [wanted] || tensor.row_bytes != 4 * wanted {
        let found: usize = tensor.shape.iter().product();
        return Err(ModelError::broken(format!(
            "{} has {found} elements, not {wanted}",
            tensor.name
        )));
    }
    let mut bytes = vec![0; tensor.row_bytes];
    tensor.read(0, &mut bytes)?;
    let (numbers, _) = bytes.as_chunks::<4>();
    Ok(numbers.iter().map(|&number| f32::from_le_bytes(number).into()).collect())
}

/// The parameters of Llama 3's scaling that produce these frequency divisors, `[head_dim / 2]`.
fn llama3_scaling(factors: &[f64], theta: f64, head_dim: f64) -> Result<Value, ModelError> {
    if factors.iter().all(|&factor| factor == 1.0) {
        return Ok(Value::Null);
    }
    let tau = 2.0 * std::f64::consts::PI;
    let wavelengths: Vec<f64> =
        (0..factors.len()).map(|at| tau * theta.powf(2.0 * at as f64 / head_dim)).collect();
    let factor = factors.iter().copied().fold(f64::MIN, f64::max);
    let mut candidates = vec![(8192.0, 4.0)];
    let middle: Vec<(f64, f64)> = factors
        .iter()
        .zip(&wavelengths)
        .filter(|&(&divisor, _)| divisor > 1.0 && divisor < factor)
        .map(|(divisor, wave)| (1.0 / wave, (1.0 / divisor - 1.0 / factor) / (1.0 - 1.0 / factor)))
        .collect();
    if middle.len() >= 2 {
        let count = middle.len() as f64;
        let mean = |of: fn(&(f64, f64)) -> f64| middle.iter().map(of).sum::<f64>() / count;
        let (x, y) = (mean(|point| point.0), mean(|point| point.1));
        let above: f64 = middle.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
        let below: f64 = middle.iter().map(|point| (point.0 - x).powi(2)).sum();
        let slope = above / below;
        let intercept = y - slope * x;
        let high = ((1.0 - 1.0 / intercept) * 1e4).round() / 1e4;
        candidates.push(((slope / -intercept).round(), high));
    }
    for (original, high) in candidates {
        let fits = factors.iter().zip(&wavelengths).all(|(divisor, wave)| {
            let smooth = ((original / wave - 1.0) / (high - 1.0)).clamp(0.0, 1.0);
            let made = 1.0 / ((1.0 - smooth) / factor + smooth);
            (made - divisor).abs() <= 1e-5 * divisor.abs()
        });
        if fits {
            return Ok(json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": original as i64,
            }));
        }
    }
    Err(ModelError::unserved_part(
        "frequency factors in rope_freqs.weight that are not those of Llama 3's rope scaling",
    ))
}
