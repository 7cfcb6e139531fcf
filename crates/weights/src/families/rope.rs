//! Rotary embeddings, read from a `config.json`.

use serde_json::Value;

use super::config::Config;
use super::shape::Rope;
use crate::error::ModelError;
use crate::sizes::{real, truthy};

const DEFAULT_THETA: f64 = 10000.0;
/// The share of a head that GLM-4 MoE rotates.
const USUAL_PART: f64 = 0.5;
const PART: &str = "partial_rotary_factor";
/// The numbers of a scaling that are divisors.
const FACTORS: [&str; 6] = [
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "original_max_position_embeddings",
];

/// The embedding of a family that rotates whole heads of `dim`.
pub(super) fn rope(config: &Config<'_>, dim: usize) -> Result<Rope, ModelError> {
    let (rope, part) = read(config, dim)?;
    match part {
        Some(part) if part != 1.0 => {
            Err(ModelError::unserved_part("heads that are rotated in part"))
        }
        _ => Ok(rope),
    }
}

/// The embedding of a family that rotates a part of each head.
pub(super) fn partial_rope(config: &Config<'_>, head_dim: usize) -> Result<Rope, ModelError> {
    let usual = config.real(PART, USUAL_PART)?;
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

/// The embedding with its scaling in the form of transformers 4, and the part of a head that is
/// rotated. transformers 5 keeps all of it in `rope_parameters`.
fn read(config: &Config<'_>, dim: usize) -> Result<(Rope, Option<f64>), ModelError> {
    let object = |key| config.get(key).filter(|value| truthy(Some(value)))?.as_object();
    let mut parameters =
        object("rope_parameters").or_else(|| object("rope_scaling")).cloned().unwrap_or_default();
    let theta = real(&parameters, "rope_theta", config.real("rope_theta", DEFAULT_THETA)?)?;
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
