//! Rotary position embedding (Su et al. 2021) and its scalings: linear, llama3, yarn (Peng et al.
//! 2023), longrope (Ding et al. 2024), proportional (Gemma 4, 2026).
//!
//! All values are float32, and the operations are those of PyTorch
//! (`python/forebay/layers/rotary.py`), where a division by a tensor becomes a multiplication by
//! its reciprocal. So both hands compute the same angles.

use std::f32::consts::TAU;

use half::bf16;
use serde_json::{Map, Value};

use crate::error::ModelError;
use crate::families::Rope;
use crate::tensor::TorchNumber;

/// Cosines and sines per position, `[positions, rotary_dim / 2]` each, rounded to the model's data
/// type.
#[derive(Debug, Clone, PartialEq)]
pub struct Angles {
    /// Cosines.
    pub cos: Vec<f32>,
    /// Sines.
    pub sin: Vec<f32>,
}

impl Angles {
    /// Computes the angles of positions below `positions`. The model was trained for `trained`
    /// positions.
    ///
    /// # Errors
    /// A parameter of the scaling is invalid.
    pub fn new(
        rope: &Rope,
        trained: u64,
        positions: usize,
        number: TorchNumber,
    ) -> Result<Self, ModelError> {
        let (inverse, factor) = frequencies(rope, trained, positions)?;
        let round = |value: f32| match number {
            TorchNumber::Float32 => value,
            TorchNumber::Bfloat16 => bf16::from_f32(value).to_f32(),
        };
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for vector in [&mut cos, &mut sin] {
            vector.reserve_exact(positions * inverse.len());
        }
        for position in 0..positions {
            for frequency in &inverse {
                // The angle is rounded to float32, and so are its cosine and sine.
                let angle = f64::from(position as f32 * frequency);
                cos.push(round(angle.cos() as f32 * factor));
                sin.push(round(angle.sin() as f32 * factor));
            }
        }
        Ok(Self { cos, sin })
    }
}

/// `scalar / value`, as PyTorch computes it for a tensor `value`.
fn over(scalar: f64, value: f32) -> f32 {
    (1.0 / value) * scalar as f32
}

/// The parameters of a RoPE scaling.
struct Scaling<'a>(&'a Map<String, Value>);

impl Scaling<'_> {
    /// Returns a parameter that is present and not 0.
    fn get(&self, key: &str) -> Option<f64> {
        self.0.get(key).and_then(Value::as_f64).filter(|&value| value != 0.0)
    }

    fn required(&self, key: &str) -> Result<f64, ModelError> {
        let found = self.0.get(key).and_then(Value::as_f64);
        found.ok_or_else(|| ModelError::broken(format!("rope scaling without a number as {key}")))
    }
}

/// Returns the inverse frequencies, and the factor on cosine and sine, for a context of `positions`
/// positions.
fn frequencies(rope: &Rope, trained: u64, positions: usize) -> Result<(Vec<f32>, f32), ModelError> {
    let dim = rope.dim as f32;
    let half = rope.dim / 2;
    let power = |index: usize| {
        let exponent = (2 * index) as f32 / dim;
        (f64::from(rope.theta as f32)).powf(f64::from(exponent)) as f32
    };
    let powers: Vec<f32> = (0..half).map(power).collect();
    let inverse = powers.iter().map(|&power| 1.0 / power);
    let Some(scaling) = &rope.scaling else { return Ok((inverse.collect(), 1.0)) };
    let kind = scaling.get("rope_type").and_then(Value::as_str).unwrap_or("default");
    let scaling = Scaling(scaling);
    let most = trained as f64;
    let original = scaling.get("original_max_position_embeddings").unwrap_or(most);
    match kind {
        "linear" => {
            let factor = scaling.required("factor")? as f32;
            Ok((inverse.map(|value| value / factor).collect(), 1.0))
        }
        "llama3" => {
            let (factor, low, high) = (
                scaling.required("factor")? as f32,
                scaling.required("low_freq_factor")?,
                scaling.required("high_freq_factor")?,
            );
            let scaled = inverse.map(|inverse| {
                let wavelength = over(f64::from(TAU), inverse);
                let smooth = (over(original, wavelength) - low as f32) / (high - low) as f32;
                if wavelength < (original / high) as f32 {
                    inverse
                } else if wavelength > (original / low) as f32 {
                    inverse / factor
                } else {
                    (1.0 - smooth) * inverse / factor + smooth * inverse
                }
            });
            Ok((scaled.collect(), 1.0))
        }
        "longrope" => {
            // All requests use the same factors, because they may share cached keys of a common
            // prefix.
            let long = positions as f64 > original;
            let key = if long { "long_factor" } else { "short_factor" };
            let factors = scaling.0.get(key).and_then(Value::as_array);
            let factors = factors.into_iter().flatten().filter_map(Value::as_f64);
            let divided = factors.zip(&powers).map(|(factor, power)| 1.0 / (factor as f32 * power));
            Ok((divided.collect(), scaling.required("attention_factor")? as f32))
        }
        "proportional" => {
            let factor = scaling.required("factor")? as f32;
            let turned = scaling.0.get("turned").and_then(Value::as_u64).unwrap_or(0) as usize;
            let turn = |(index, value)| if index < turned { value / factor } else { 0.0 };
            Ok((inverse.enumerate().map(turn).collect(), 1.0))
        }
        "yarn" => Ok(yarn(&powers, rope.theta, &scaling, original, most)),
        other => Err(ModelError::elsewhere(format!("the rope scaling {other:?}"))),
    }
}

/// Interpolates dimensions that make fewer than `beta_slow` rotations in the original context,
/// keeps those with more than `beta_fast`, and blends between the two.
fn yarn(
    powers: &[f32],
    theta: f64,
    scaling: &Scaling<'_>,
    original: f64,
    most: f64,
) -> (Vec<f32>, f32) {
    let half = powers.len() as f64;
    let factor = scaling.get("factor").unwrap_or(most / original);
    let dimension = |turns: f64| {
        2.0 * half * (original / (turns * 2.0 * std::f64::consts::PI)).ln() / (2.0 * theta.ln())
    };
    let mut low = dimension(scaling.get("beta_fast").unwrap_or(32.0));
    let mut high = dimension(scaling.get("beta_slow").unwrap_or(1.0));
    if scaling.0.get("truncate").and_then(Value::as_bool).unwrap_or(true) {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(2.0 * half - 1.0));
    if low == high {
        high += 0.001;
    }
    let inverse = powers.iter().enumerate().map(|(index, &power)| {
        let interpolated = (index as f32 - low as f32) / (high - low) as f32;
        let kept = 1.0 - interpolated.clamp(0.0, 1.0);
        1.0 / (factor as f32 * power) * (1.0 - kept) + 1.0 / power * kept
    });
    let mscale = |weight: f64| if factor > 1.0 { 0.1 * weight * factor.ln() + 1.0 } else { 1.0 };
    let given = scaling.0.get("attention_factor").and_then(Value::as_f64);
    let attention =
        given.unwrap_or_else(|| match (scaling.get("mscale"), scaling.get("mscale_all_dim")) {
            (Some(one), Some(all)) => mscale(one) / mscale(all),
            _ => mscale(1.0),
        });
    (inverse.collect(), attention as f32)
}
