//! GGUF metadata as a Hugging Face `config.json`.

use serde_json::{Map, Value, json};

use super::file::{GgufFiles, GgufValue};
use crate::error::ModelError;

const DEFAULT_FREQ_BASE: f64 = 10000.0;
/// The control tokens that end a turn if a file names none (llama.cpp goes by the same texts).
const END_OF_TURN: [&str; 4] = ["<|eot_id|>", "<|im_end|>", "<|end|>", "<|end_of_turn|>"];
const CONTROL: i64 = 3;
/// Keys of families that share the names of those with experts, and compute something else.
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
/// Scores and numbers of experts, and their groups, of which some are kept.
const GROUPS: [(&str, i64, (i64, i64)); 2] = [("softmax", 160, (8, 3)), ("sigmoid", 256, (8, 4))];

/// The `config.json` that the model would have.
pub(crate) fn hf_config(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    let (name, kind) = match files.architecture() {
        "llama" if files.get("attention.sliding_window").is_some_and(GgufValue::truthy) => {
            ("MistralForCausalLM", "mistral")
        }
        "llama" => ("LlamaForCausalLM", "llama"),
        "qwen2" => ("Qwen2ForCausalLM", "qwen2"),
        "qwen3" => ("Qwen3ForCausalLM", "qwen3"),
        "qwen3moe" => ("Qwen3MoeForCausalLM", "qwen3_moe"),
        "glm4moe" => ("Glm4MoeForCausalLM", "glm4_moe"),
        other => return Err(ModelError::elsewhere(format!("the GGUF architecture '{other}'"))),
    };
    let experts = if matches!(kind, "qwen3_moe" | "glm4_moe") {
        Some(experts(files, kind)?)
    } else if whole(files, "expert_count")?.unwrap_or(0) > 0 {
        return Err(ModelError::elsewhere("experts of this family"));
    } else {
        None
    };
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
    let eps = files.get("attention.layer_norm_rms_epsilon").and_then(GgufValue::as_f64);
    let eps = eps.ok_or_else(|| missing(files, "attention.layer_norm_rms_epsilon"))?;
    let special = |name: &str| {
        let id = files.metadata.get(&format!("tokenizer.ggml.{name}_token_id"));
        id.and_then(GgufValue::as_i64).map_or(Value::Null, |id| json!(id))
    };
    let hidden = required(files, "embedding_length")?;
    let heads = Heads::of(files, hidden)?;
    let turned = (kind == "glm4_moe").then(|| heads.turned_part());
    if turned.is_none() && heads.rotated != heads.dim {
        return Err(ModelError::elsewhere("heads that are rotated in part"));
    }
    let has = |name: &str| files.tensor(name).is_some();
    let config = json!({
        "vocab_size": embedding.shape.first().copied().unwrap_or(0),
        "hidden_size": hidden,
        "intermediate_size": required(files, "feed_forward_length")?,
        "num_hidden_layers": layer_count(files)?,
        "hidden_act": "silu",
        "rms_norm_eps": shortest(eps),
        "rope_theta": theta,
        "rope_scaling": rope_scaling(files, theta, heads.dim, context)?,
        "max_position_embeddings": context,
        "sliding_window": window,
        "tie_word_embeddings": !has("output.weight"),
        "bos_token_id": special("bos"),
        "eos_token_id": eos,
        "pad_token_id": special("padding"),
        "num_attention_heads": heads.queries,
        "num_key_value_heads": heads.keys,
        "head_dim": heads.dim,
        "qkv_bias": has("blk.0.attn_q.bias"),
        "attention_bias": has("blk.0.attn_output.bias"),
        "mlp_bias": has("blk.0.ffn_up.bias"),
        "architectures": [name],
        "model_type": kind,
    });
    let Value::Object(mut config) = config else { unreachable!("an object") };
    config.extend(turned.map(|part| ("partial_rotary_factor".to_owned(), json!(part))));
    config.extend(experts.into_iter().flatten());
    Ok(config)
}

/// Layers that are computed: those behind them predict further tokens, and nothing else.
fn layer_count(files: &GgufFiles) -> Result<i64, ModelError> {
    Ok(required(files, "block_count")? - whole(files, "nextn_predict_layers")?.unwrap_or(0))
}

/// The metadata of experts. Metadata of other kinds of files under the same name is refused.
fn experts(files: &GgufFiles, kind: &str) -> Result<Map<String, Value>, ModelError> {
    let changes = CHANGES.iter().find(|key| files.get(key).is_some_and(changes));
    if let Some(key) = changes {
        return Err(ModelError::elsewhere(format!("'{}.{key}'", files.architecture())));
    }
    let keys = if kind == "qwen3_moe" { of_qwen(files)? } else { of_glm(files)? };
    if let Value::Object(keys) = keys { Ok(keys) } else { unreachable!("an object") }
}

fn of_qwen(files: &GgufFiles) -> Result<Value, ModelError> {
    if files.get("expert_weights_scale").is_some_and(changes) {
        return Err(ModelError::elsewhere("weights of experts with a scale"));
    }
    // No file says it, and llama.cpp does it for all of them.
    let normalise = files.get("expert_weights_norm").is_none_or(GgufValue::truthy);
    Ok(json!({
        "num_experts": required(files, "expert_count")?,
        "num_experts_per_tok": required(files, "expert_used_count")?,
        "moe_intermediate_size": required(files, "expert_feed_forward_length")?,
        "norm_topk_prob": normalise,
        "scoring_func": scores(files, "softmax")?,
    }))
}

/// Every key is there: none has its default. The groups that older converters left out of files are
/// those of DeepSeek V3, by the number of experts.
fn of_glm(files: &GgufFiles) -> Result<Value, ModelError> {
    let positive = |key: &str| -> Result<Option<i64>, ModelError> {
        Ok(whole(files, key)?.filter(|&number| number > 0))
    };
    let scores = scores(files, "sigmoid")?;
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
    let norms = files.tensor("blk.0.attn_q_norm.weight").is_some();
    let mut keys = json!({
        "use_qk_norm": norms,
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
    Ok(keys)
}

/// The function of experts' scores (`gguf.ExpertGatingFuncType`).
fn scores(files: &GgufFiles, usual: &'static str) -> Result<&'static str, ModelError> {
    match whole(files, "expert_gating_func")? {
        None | Some(0) => Ok(usual),
        Some(1) => Ok("softmax"),
        Some(2) => Ok("sigmoid"),
        Some(other) => {
            Err(ModelError::elsewhere(format!("experts with scores of the kind {other}")))
        }
    }
}

/// True if a value changes the computation.
fn changes(value: &GgufValue) -> bool {
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

/// A whole number of a size that something may have.
fn whole(files: &GgufFiles, key: &str) -> Result<Option<i64>, ModelError> {
    let Some(value) = files.get(key) else { return Ok(None) };
    if value.as_list().is_some() {
        return Err(ModelError::elsewhere(format!("a {key} that differs between layers")));
    }
    let number = value.as_i64().filter(|number| (0..=HUGE).contains(number));
    number.map(Some).ok_or_else(|| {
        ModelError::broken(format!("the GGUF file has metadata that makes no sense: {key}"))
    })
}

fn required(files: &GgufFiles, key: &str) -> Result<i64, ModelError> {
    whole(files, key)?.ok_or_else(|| missing(files, key))
}

/// The shortest decimal that is this 32-bit number: 1e-05 and not 9.999999747378752e-06.
fn shortest(value: f64) -> f64 {
    format!("{}", value as f32).parse().unwrap_or(value)
}

struct Heads {
    queries: i64,
    keys: i64,
    dim: i64,
    /// Elements that positions rotate.
    rotated: i64,
}

impl Heads {
    fn of(files: &GgufFiles, hidden: i64) -> Result<Self, ModelError> {
        let queries = required(files, "attention.head_count")?;
        if queries == 0 {
            return Err(missing(files, "attention.head_count"));
        }
        let keys = whole(files, "attention.head_count_kv")?.unwrap_or(queries);
        let given = whole(files, "attention.key_length")?.filter(|&length| length > 0);
        let dim = given.unwrap_or(hidden / queries);
        let values = whole(files, "attention.value_length")?.filter(|&length| length > 0);
        if values.is_some_and(|length| length != dim) {
            return Err(ModelError::elsewhere("keys and values of different lengths"));
        }
        let rotated = whole(files, "rope.dimension_count")?.filter(|&length| length > 0);
        let rotated = rotated.unwrap_or(dim);
        if rotated > dim {
            return Err(ModelError::elsewhere(format!("heads of {dim} with {rotated} to rotate")));
        }
        Ok(Self { queries, keys, dim, rotated })
    }

    /// The factor by which `dim` is multiplied, and rounded down, to get `rotated`.
    fn turned_part(&self) -> f64 {
        let factor = self.rotated as f64 / self.dim as f64;
        let again = (self.dim as f64 * factor) as i64;
        if again == self.rotated { factor } else { factor.next_up() }
    }
}

/// The tokens that end a generation: of a sequence, of a turn and of a message.
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
        let ends = tokens.filter(|((_, token), kind)| {
            kind.as_i64() == Some(CONTROL)
                && token.as_text().is_some_and(|text| END_OF_TURN.contains(&text))
        });
        found.extend(ends.map(|((index, _), _)| index));
    }
    let mut each = Vec::new();
    for id in found {
        if !each.contains(&id) {
            each.push(id);
        }
    }
    each
}

fn rope_scaling(
    files: &GgufFiles,
    theta: f64,
    head_dim: i64,
    context: i64,
) -> Result<Value, ModelError> {
    if let Some(tensor) = files.tensor("rope_freqs.weight") {
        let wanted = (head_dim / 2) as usize;
        if tensor.shape != [wanted] || tensor.row_bytes != 4 * wanted {
            let found: usize = tensor.shape.iter().product();
            return Err(ModelError::broken(format!(
                "rope_freqs.weight has {found} elements, not {wanted}"
            )));
        }
        let mut bytes = vec![0; tensor.row_bytes];
        tensor.read(0, &mut bytes)?;
        let (numbers, _) = bytes.as_chunks::<4>();
        let factors: Vec<f64> = numbers.iter().map(|&n| f32::from_le_bytes(n).into()).collect();
        return llama3_scaling(&factors, theta, head_dim as f64);
    }
    let number =
        |key: &str| files.get(key).and_then(GgufValue::as_f64).filter(|&value| value != 0.0);
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
            let multiplier = number("rope.scaling.attn_factor")
                .or_else(|| number("rope.scaling.yarn_attn_factor"));
            if let Some(multiplier) = multiplier.filter(|&multiplier| multiplier != 1.0) {
                // GGUF's factor multiplies YaRN's own, Hugging Face's replaces it.
                scaling["attention_factor"] = json!(multiplier * (0.1 * factor.ln() + 1.0));
            }
            Ok(scaling)
        }
        Some(other) => Err(ModelError::elsewhere(format!("the rope scaling '{other}'"))),
    }
}

/// The parameters of Llama 3's scaling that give these divisors of the frequencies, `[head_dim /
/// 2]`.
///
/// Between its two bounds the scaling is linear in `1 / wavelength`, so the parameters can be
/// solved for. They are only known up to a common scale, which is fixed by `low_freq_factor` 1, the
/// value of every published model.
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
    Err(ModelError::elsewhere(
        "frequency factors in rope_freqs.weight that are not those of Llama 3's rope scaling",
    ))
}
