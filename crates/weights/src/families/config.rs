//! A family's `config.json`, and the fields that most families read in the same way.

use std::collections::BTreeMap;
use std::ops::Deref;

use serde_json::{Map, Value};

use super::Family;
use super::experts::{Experts, check_count};
use super::shape::{
    Activation, Attention, DenseFeed, FeedShape, LayerShape, Mixer, Norm, NormPlacement, QkNorm,
    Rope, Scales, Shape,
};
use crate::error::ModelError;
use crate::quantised::Quantisation;
use crate::sizes::{MOST, MOST_HEADS, MOST_LAYERS, MOST_POSITIONS, optional, real, size, truthy};

/// The default of Qwen's `max_window_layers`: layers below this index have no window.
const USUAL_WINDOW_LAYERS: u64 = 28;
/// The largest number of positions, if the config does not state it.
const USUAL_POSITIONS: u64 = 2048;

/// A `config.json` of a known family.
#[derive(Clone, Copy)]
pub(crate) struct Config<'a> {
    pub(super) family: &'static Family,
    pub(super) values: &'a Map<String, Value>,
}

/// Which layers have the config's window, if the config has no `layer_types`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum WindowRule {
    /// All layers.
    All,
    /// The layers from `max_window_layers` on, if `use_sliding_window` is set.
    Upper,
}

impl Deref for Config<'_> {
    type Target = Map<String, Value>;

    fn deref(&self) -> &Self::Target {
        self.values
    }
}

impl Config<'_> {
    /// Returns the config's values, and copies of some values under other keys. Each pair is the
    /// config's key and the key of the copy.
    pub(super) fn renamed(&self, names: &[(&str, &str)]) -> Map<String, Value> {
        let mut values = self.values.clone();
        for (from, to) in names {
            if let Some(value) = self.get(*from) {
                values.insert((*to).to_owned(), value.clone());
            }
        }
        values
    }

    pub(super) fn flag(&self, key: &str, default: bool) -> bool {
        self.get(key).map_or(default, |value| truthy(Some(value)))
    }

    pub(super) fn size(&self, key: &str, most: u64) -> Result<usize, ModelError> {
        size(self.values, key, most)
    }

    pub(super) fn optional(&self, key: &str, most: u64) -> Result<Option<u64>, ModelError> {
        optional(self.values, key, most)
    }

    pub(super) fn real(&self, key: &str, usual: f64) -> Result<f64, ModelError> {
        real(self.values, key, usual)
    }

    /// Reads a number that may be null or 0; `usual` if the key is missing.
    pub(super) fn number_or(&self, key: &str, usual: u64, most: u64) -> Result<u64, ModelError> {
        match self.contains_key(key) {
            true => Ok(self.optional(key, most)?.unwrap_or(0)),
            false => Ok(usual),
        }
    }

    /// Checks that a value is missing, or is one that the family supports.
    pub(super) fn only(&self, key: &str, known: &[&str]) -> Result<(), ModelError> {
        let found = self.get(key).filter(|value| !value.is_null());
        match found.filter(|value| !value.as_str().is_some_and(|text| known.contains(&text))) {
            None => Ok(()),
            Some(other) => Err(ModelError::unserved_part(&format!(
                "{key} {other} in {} ({} is served)",
                self.family.architecture,
                known.join(", ")
            ))),
        }
    }

    pub(super) fn layer_count(&self) -> Result<usize, ModelError> {
        self.size("num_hidden_layers", MOST_LAYERS)
    }

    pub(super) fn activation(&self) -> Result<Activation, ModelError> {
        let name = self.get("hidden_act").filter(|value| truthy(Some(value)));
        let name = name.map_or("silu", |value| value.as_str().unwrap_or_default());
        Activation::from_name(name).ok_or_else(|| {
            ModelError::unserved_part(&format!("the activation hidden_act {name:?}"))
        })
    }

    /// Reads grouped-query attention, which has biases on all four projections or on none.
    /// `usual_dim` is the head size if the config does not state it.
    pub(super) fn attention(&self, usual_dim: Option<u64>) -> Result<Attention, ModelError> {
        let heads = self.size("num_attention_heads", MOST_HEADS)?;
        let kv_heads = self.optional("num_key_value_heads", MOST_HEADS)?;
        let kv_heads = kv_heads.unwrap_or(heads as u64) as usize;
        if !heads.is_multiple_of(kv_heads) {
            return Err(ModelError::broken(format!(
                "{heads} query heads (num_attention_heads) can't share {kv_heads} heads of keys and values \
                 (num_key_value_heads) equally"
            )));
        }
        let hidden_size = self.size("hidden_size", MOST)?;
        let usual = usual_dim.unwrap_or((hidden_size / heads) as u64);
        let head_dim = self.optional("head_dim", MOST_HEADS)?.unwrap_or(usual) as usize;
        if head_dim == 0 {
            return Err(ModelError::broken(format!(
                "{hidden_size} elements (hidden_size) can't be shared by {heads} heads (num_attention_heads), \
                 and the model's config has no 'head_dim'"
            )));
        }
        let all_biases = self.flag("attention_bias", false);
        Ok(Attention {
            heads,
            kv_heads,
            head_dim,
            value_dim: head_dim,
            scale: None,
            window: None,
            chunk: None,
            sinks: false,
            cap: None,
            qk_norm: QkNorm::None,
            value_norm: false,
            keys_are_values: false,
            gate: false,
            // In a config rebuilt from a GGUF, `qkv_bias` is set from the tensors, since the format
            // has no key for it.
            qkv_bias: self.flag("qkv_bias", all_biases),
            output_bias: all_biases,
            query_scale: None,
            both_ways: false,
        })
    }

    /// Reads the gated feed-forward part of a dense layer.
    pub(super) fn dense(&self) -> Result<FeedShape, ModelError> {
        Ok(FeedShape::Dense(DenseFeed {
            intermediate_size: self.size("intermediate_size", MOST)?,
            activation: self.activation()?,
            gated: true,
            bias: self.flag("mlp_bias", false),
        }))
    }

    /// Returns the feed-forward part of each layer. `sparse` is true for layers with experts. If
    /// all have experts, the size of a dense layer is not needed.
    pub(super) fn feeds(
        &self,
        sparse: &[bool],
        experts: impl FnOnce() -> Result<Experts, ModelError>,
    ) -> Result<Vec<FeedShape>, ModelError> {
        let count = sparse.iter().filter(|&&sparse| sparse).count();
        let experts = if count > 0 { Some(experts()?) } else { None };
        if let Some(experts) = &experts {
            check_count(experts, count)?;
        }
        let dense = if count < sparse.len() { Some(self.dense()?) } else { None };
        let experts = experts.map(FeedShape::Experts);
        let feed = |&sparse: &bool| if sparse { experts } else { dense };
        Ok(sparse.iter().filter_map(feed).collect())
    }

    /// Returns the window of each layer; `None` if the layer has no window, or if the window is
    /// longer than any prompt.
    pub(super) fn windows(&self, rule: WindowRule) -> Result<Vec<Option<u64>>, ModelError> {
        let layers = self.layer_count()?;
        let none = vec![None; layers];
        let there = self.get("sliding_window").is_some_and(|window| !window.is_null());
        let used = rule == WindowRule::All || self.flag("use_sliding_window", false);
        if !there || !used {
            return Ok(none);
        }
        let window = self.size("sliding_window", MOST_POSITIONS)? as u64;
        let longest = self.optional("max_position_embeddings", MOST_POSITIONS)?.unwrap_or(window);
        if window >= longest {
            return Ok(none);
        }
        let kinds = self.get("layer_types").and_then(Value::as_array);
        // Qwen's `max_window_layers` counts the layers without a window, which come first.
        let first = match rule {
            WindowRule::All => 0,
            WindowRule::Upper => {
                let below = self.get("max_window_layers").and_then(Value::as_u64);
                below.unwrap_or(USUAL_WINDOW_LAYERS)
            }
        };
        let has_window = |layer: usize| match kinds {
            Some(kinds) => kinds.get(layer).and_then(Value::as_str) == Some("sliding_attention"),
            None => layer as u64 >= first,
        };
        Ok((0..layers).map(|layer| has_window(layer).then_some(window)).collect())
    }

    /// Returns the window of each layer, and whether the layer is of the windowed kind. Without
    /// `layer_types`, every `cycle`-th layer is of the other kind.
    pub(super) fn cycle_of_windows(
        &self,
        cycle: u64,
    ) -> Result<(Vec<Option<u64>>, Vec<bool>), ModelError> {
        let layers = self.layer_count()?;
        let kinds = self.get("layer_types").and_then(Value::as_array);
        let is_local: Vec<bool> = match kinds {
            None => {
                let local = |layer: usize| !(layer as u64 + 1).is_multiple_of(cycle.max(1));
                (0..layers).map(local).collect()
            }
            Some(kinds) => self.kinds_of_layers(kinds, "sliding_attention", "full_attention")?,
        };
        let window = self.optional("sliding_window", MOST_POSITIONS)?;
        let longest = self.optional("max_position_embeddings", MOST_POSITIONS)?;
        let window = window.filter(|&window| longest.is_none_or(|longest| window < longest));
        let windows = is_local.iter().map(|&local| window.filter(|_| local)).collect();
        Ok((windows, is_local))
    }

    /// Returns, for each layer, whether its kind is `first`. Kinds other than `first` and `second`
    /// are refused.
    pub(super) fn kinds_of_layers(
        &self,
        kinds: &[Value],
        first: &str,
        second: &str,
    ) -> Result<Vec<bool>, ModelError> {
        let is_first = |layer: usize| match kinds.get(layer).and_then(Value::as_str) {
            Some(kind) if kind == first => Ok(true),
            Some(kind) if kind == second => Ok(false),
            other => Err(ModelError::unserved_part(&format!(
                "layer_types {:?} in {}",
                other.unwrap_or("that end too early"),
                self.family.architecture
            ))),
        };
        (0..self.layer_count()?).map(is_first).collect()
    }

    /// Builds a decoder whose layers differ only in their windows and feed-forward parts.
    pub(super) fn grouped(
        &self,
        attention: Attention,
        rope: Rope,
        windows: Vec<Option<u64>>,
        feeds: Vec<FeedShape>,
    ) -> Result<Shape, ModelError> {
        let mixer = |window| Mixer::Attention(Attention { window, ..attention });
        let mixers: Vec<Mixer> = windows.into_iter().map(mixer).collect();
        let ropes = vec![Some(rope); mixers.len()];
        self.decoder(mixers, ropes, feeds)
    }

    /// Builds a decoder from the mixer, rotary embedding and feed-forward part of each layer.
    pub(super) fn decoder(
        &self,
        mixers: Vec<Mixer>,
        ropes: Vec<Option<Rope>>,
        feeds: Vec<FeedShape>,
    ) -> Result<Shape, ModelError> {
        let (mixers, mixer_of) = distinct(mixers);
        let (ropes, rope_of) = distinct(ropes);
        let (feeds, feed_of) = distinct(feeds);
        // For each element of `ropes`, its index after the element without a rotary embedding has
        // been removed; `None` for that element.
        let there: Vec<Option<u16>> = ropes
            .iter()
            .scan(0, |next, rope| {
                let number = rope.is_some().then_some(*next);
                *next += u16::from(rope.is_some());
                Some(number)
            })
            .collect();
        let layers = mixer_of.iter().zip(&rope_of).zip(&feed_of);
        let layers = layers.map(|((&mixer, &rope), &feed)| LayerShape {
            mixer,
            rope: there[usize::from(rope)],
            feed,
            norms: NormPlacement::Before,
            keys_of: None,
            scaled: false,
        });
        Ok(Shape {
            family: self.family,
            vocab_size: self.size("vocab_size", MOST)?,
            hidden_size: self.size("hidden_size", MOST)?,
            norm: Norm::Rms,
            norm_eps: self.real("rms_norm_eps", 1e-6)?,
            embedding_norm: false,
            scales: Scales::NONE,
            factors: BTreeMap::new(),
            layers: layers.collect(),
            ropes: ropes.into_iter().flatten().collect(),
            mixers,
            feeds,
            layer_inputs: None,
            tower: None,
            quantised: Quantisation::from_config(self.values)?,
            max_positions: self
                .optional("max_position_embeddings", MOST_POSITIONS)?
                .unwrap_or(USUAL_POSITIONS),
            tied: self.flag("tie_word_embeddings", false),
            headless: false,
            eos_token_ids: token_ids(self.get("eos_token_id")),
        })
    }
}

/// Returns the distinct values, and for each layer the index of its value among them.
fn distinct<T: PartialEq>(values: Vec<T>) -> (Vec<T>, Vec<u16>) {
    let mut found: Vec<T> = Vec::new();
    let mut numbers = Vec::with_capacity(values.len());
    for value in values {
        let at = found.iter().position(|known| *known == value).unwrap_or_else(|| {
            found.push(value);
            found.len() - 1
        });
        numbers.push(at as u16);
    }
    (found, numbers)
}

/// Reads a token id, a list of ids or nothing, as in `eos_token_id` of both config files.
pub(crate) fn token_ids(value: Option<&Value>) -> Vec<i32> {
    let id = |value: &Value| value.as_i64().and_then(|id| i32::try_from(id).ok());
    match value {
        Some(Value::Array(items)) => items.iter().filter_map(id).collect(),
        Some(value) => id(value).into_iter().collect(),
        None => Vec::new(),
    }
}
