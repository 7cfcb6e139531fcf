//! Rotary embeddings, read from a `config.json`.

use serde_json::{Map, Value, json};

use super::config::Config;
use super::shape::{QueryScale, Rope};
use crate::error::ModelError;
use crate::sizes::{MOST_POSITIONS, optional, real, truthy};

const DEFAULT_THETA: f64 = 10000.0;
const PART: &str = "partial_rotary_factor";
/// The keys of a RoPE scaling whose values are used as divisors, so must not be 0.
const FACTORS: [&str; 6] = [
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "original_max_position_embeddings",
];

/// Reads the rotary embedding of a family that rotates whole heads of `dim` elements.
pub(super) fn rope(config: &Config<'_>, dim: usize) -> Result<Rope, ModelError> {
    whole_heads(read(config, dim)?)
}

/// Reads the rotary embedding of a family that rotates a part of each head. `usual` is the rotated
/// fraction if the config does not state it.
pub(super) fn partial_rope(
    config: &Config<'_>,
    head_dim: usize,
    usual: f64,
) -> Result<Rope, ModelError> {
    let usual = config.real(PART, usual)?;
    let nested = config.get("rope_parameters").and_then(Value::as_object);
    let factor = nested.map_or(Ok(usual), |rope| real(rope, PART, usual))?;
    let dim = (head_dim as f64 * factor) as usize;
    if !(1..=head_dim).contains(&dim) {
        return Err(ModelError::broken(format!(
            "heads of {head_dim} elements have no {dim} to rotate ({PART})"
        )));
    }
    Ok(read(config, dim)?.0)
}

/// The config keys of the rotary embedding of one kind of layers.
pub(super) struct RopeKind {
    /// The layer kind, which is the key in `rope_parameters`.
    pub(super) layer: &'static str,
    /// The key of this kind's base in transformers 4's configs. `usual` is the default base.
    pub(super) theta: &'static str,
    pub(super) usual: f64,
    /// True if `rope_scaling` in transformers 4's configs applies to these layers.
    pub(super) scaled: bool,
}

/// Reads the rotary embedding of one kind of layers, which rotates whole heads of `dim` elements.
pub(super) fn rope_of_kind(
    config: &Config<'_>,
    kind: &RopeKind,
    dim: usize,
) -> Result<Rope, ModelError> {
    let object = |key| config.get(key).and_then(Value::as_object);
    let nested = object("rope_parameters").and_then(|all| all.get(kind.layer));
    let parameters = match nested {
        Some(own) => own.as_object().cloned().unwrap_or_default(),
        None if kind.scaled => object("rope_scaling").cloned().unwrap_or_default(),
        None => Map::new(),
    };
    whole_heads(parsed(config, parameters, config.real(kind.theta, kind.usual)?, dim)?)
}

fn whole_heads((rope, part): (Rope, Option<f64>)) -> Result<Rope, ModelError> {
    match part {
        Some(part) if part != 1.0 => {
            Err(ModelError::unserved_part("heads that are rotated in part"))
        }
        _ => Ok(rope),
    }
}

/// Reads a rotary embedding and the rotated fraction of a head. transformers 4 has the scaling in
/// `rope_scaling`; transformers 5 has all of this in `rope_parameters`.
fn read(config: &Config<'_>, dim: usize) -> Result<(Rope, Option<f64>), ModelError> {
    let object = |key| config.get(key).filter(|value| truthy(Some(value)))?.as_object();
    let parameters = object("rope_parameters").or_else(|| object("rope_scaling"));
    let theta = config.real("rope_theta", DEFAULT_THETA)?;
    parsed(config, parameters.cloned().unwrap_or_default(), theta, dim)
}

/// Parses a rotary embedding from its parameters. `theta` is the default base.
fn parsed(
    config: &Config<'_>,
    mut parameters: Map<String, Value>,
    theta: f64,
    dim: usize,
) -> Result<(Rope, Option<f64>), ModelError> {
    let theta = real(&parameters, "rope_theta", theta)?;
    parameters.shift_remove("rope_theta");
    let text = |value: Option<Value>| value.and_then(|value| value.as_str().map(str::to_owned));
    let legacy = text(parameters.shift_remove("type"));
    let kind = text(parameters.shift_remove("rope_type")).or(legacy);
    let kind = kind.unwrap_or_else(|| "default".into());
    let part = parameters.shift_remove(PART).and_then(|value| value.as_f64());
    let plain = Rope { dim, theta, scaling: None, interleaved: false, sections: None };
    if kind == "default" {
        if parameters.values().any(Value::is_object) {
            return Err(ModelError::unserved_part("rotary embeddings that differ between layers"));
        }
        return Ok((plain, part));
    }
    if ["longrope", "su"].contains(&kind.as_str()) {
        let scaling = longrope(config, &parameters, dim)?;
        return Ok((Rope { scaling: Some(scaling), ..plain }, part));
    }
    if kind == "proportional" {
        let scaling = proportional(&parameters, part, dim)?;
        return Ok((Rope { scaling: Some(scaling), ..plain }, None));
    }
    if !["linear", "llama3", "yarn"].contains(&kind.as_str()) {
        return Err(ModelError::unserved_part(&format!("the rope scaling '{kind}'")));
    }
    if parameters.get("factor").is_none_or(Value::is_null) {
        return Err(ModelError::broken(format!("rope scaling '{kind}' without a factor")));
    }
    for key in FACTORS {
        let there = parameters.get(key).is_some_and(|value| !value.is_null());
        if there && real(&parameters, key, 0.0)? == 0.0 {
            return Err(ModelError::broken(format!("rope scaling '{kind}' with a {key} of 0")));
        }
    }
    let [low, high] = ["low_freq_factor", "high_freq_factor"].map(|key| parameters.get(key));
    if kind == "llama3" && low == high {
        return Err(ModelError::broken(
            "rope scaling 'llama3' with a low_freq_factor that is the high_freq_factor",
        ));
    }
    parameters.insert("rope_type".into(), kind.into());
    Ok((Rope { scaling: Some(parameters), ..plain }, part))
}

/// Reads Gemma 4's scaling. Only the first pairs of a head are rotated, with the frequencies that
/// they would have if the whole head were rotated.
fn proportional(
    parameters: &Map<String, Value>,
    part: Option<f64>,
    dim: usize,
) -> Result<Map<String, Value>, ModelError> {
    let part = part.unwrap_or(1.0);
    if !(0.0..=1.0).contains(&part) {
        return Err(ModelError::broken(format!("heads of which {part} is rotated ({PART})")));
    }
    let factor = real(parameters, "factor", 1.0)?;
    if factor == 0.0 {
        return Err(ModelError::broken("rope scaling 'proportional' with a factor of 0"));
    }
    // As in transformers, the number of pairs is rounded down.
    let turned = (dim as f64 * part / 2.0).floor() as usize;
    let scaling = json!({"rope_type": "proportional", "turned": turned, "factor": factor});
    Ok(scaling.as_object().cloned().unwrap_or_default())
}

/// Reads the scaling of LongRoPE (Ding et al. 2024): a divisor per frequency. The short divisors
/// are for contexts up to the original length, the long divisors for longer contexts.
fn longrope(
    config: &Config<'_>,
    parameters: &Map<String, Value>,
    dim: usize,
) -> Result<Map<String, Value>, ModelError> {
    const ORIGINAL: &str = "original_max_position_embeddings";
    let original = match optional(parameters, ORIGINAL, MOST_POSITIONS)? {
        Some(original) => Some(original),
        None => config.optional(ORIGINAL, MOST_POSITIONS)?,
    };
    let longest = config.optional("max_position_embeddings", MOST_POSITIONS)?;
    let (Some(original @ 2..), Some(longest)) = (original, longest) else {
        return Err(ModelError::broken(format!(
            "rope scaling 'longrope' without {ORIGINAL} above 1"
        )));
    };
    for key in ["short_factor", "long_factor"] {
        let factors = parameters.get(key).and_then(Value::as_array);
        let fits = |factors: &Vec<Value>| {
            let above_0 = |it: &Value| it.as_f64().is_some_and(|it| it > 0.0 && it.is_finite());
            factors.len() == dim / 2 && factors.iter().all(above_0)
        };
        if !factors.is_some_and(fits) {
            return Err(ModelError::broken(format!(
                "rope scaling 'longrope' whose {key} is not {} numbers above 0",
                dim / 2
            )));
        }
    }
    let factor = real(parameters, "factor", longest as f64 / original as f64)?;
    let usual = match factor > 1.0 {
        true => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
        false => 1.0,
    };
    let scaling = json!({
        "rope_type": "longrope",
        "short_factor": parameters["short_factor"],
        "long_factor": parameters["long_factor"],
        ORIGINAL: original,
        "attention_factor": real(parameters, "attention_factor", usual)?,
    });
    Ok(scaling.as_object().cloned().unwrap_or_default())
}

/// Reads the factor on queries from a config's RoPE parameters; `None`: there is no factor.
pub(super) fn query_scale(config: &Config<'_>) -> Result<Option<QueryScale>, ModelError> {
    let object = |key| config.get(key).filter(|value| truthy(Some(value)))?.as_object();
    let Some(rope) = object("rope_parameters").or_else(|| object("rope_scaling")) else {
        return Ok(None);
    };
    if !truthy(rope.get("llama_4_scaling_beta")) {
        return Ok(None);
    }
    let beta = real(rope, "llama_4_scaling_beta", 0.0)?;
    match optional(rope, "original_max_position_embeddings", MOST_POSITIONS)? {
        Some(every) => Ok(Some(QueryScale { beta, every, first: 0 })),
        None => {
            Err(ModelError::broken("llama_4_scaling_beta without original_max_position_embeddings"))
        }
    }
}
