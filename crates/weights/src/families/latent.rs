//! Latent attention and its indexers, read from a `config.json`.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::config::Config;
use super::experts::Routed;
use super::rope::{query_scale, rope};
use super::shape::{FeedShape, Mixer, QueryScale, Rope, Shape};
use crate::error::ModelError;
use crate::sizes::{MOST, MOST_HEADS};

/// Multi-head latent attention (DeepSeek-V2, 2024). Keys and values are computed from one short
/// cached row per position.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Latent {
    /// The number of heads.
    pub heads: usize,
    /// The rank of queries; `None`: queries have a single projection.
    pub query_rank: Option<usize>,
    /// Elements of the latent part of a cached row.
    pub rank: usize,
    /// Elements of a query or key head that are not rotated.
    pub nope_dim: usize,
    /// Elements of a query or key head that are rotated. All heads share this part of a key.
    pub rotary_dim: usize,
    /// Elements of a value head.
    pub value_dim: usize,
    /// True if the down projections and the output projection have biases.
    pub bias: bool,
    /// The factor on attention scores before the softmax.
    pub scale: f64,
    /// The factor on queries that grows with position; `None`: there is none.
    pub query_scale: Option<QueryScale>,
    /// Which positions a query attends to.
    pub chosen: KeyChoice,
}

/// Which positions a query attends to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum KeyChoice {
    /// All positions.
    All,
    /// The positions that the layer's indexer scores highest.
    Indexed(Indexer),
    /// The positions that the nearest earlier layer with an indexer has chosen.
    Shared,
}

/// An indexer, which chooses the positions that a query attends to (DeepSeek Sparse Attention,
/// 2025).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Indexer {
    /// The number of query heads, which share one key.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// True if RoPE rotates neighbouring elements.
    pub interleaved: bool,
    /// The largest number of positions that are chosen for a query.
    pub top_k: usize,
}

/// The default of `index_skip_topk_offset`: this many first layers all have an indexer.
const USUAL_OFFSET: u64 = 2;

/// Reads a decoder with latent attention in all layers, and experts in all but the first layers.
pub(super) fn decoder(
    config: &Config<'_>,
    query_rank: u64,
    routed: &Routed,
    experts: impl FnOnce(&Config<'_>) -> Result<super::experts::Experts, ModelError>,
    indexer: Option<Indexer>,
) -> Result<Shape, ModelError> {
    let (latent, rope) = latent(config, query_rank)?;
    if config.windows(super::config::WindowRule::All)?.iter().any(Option::is_some) {
        return Err(ModelError::unserved_part("a sliding window with latent attention"));
    }
    let count = config.layer_count()?;
    let sparse = match (&indexer, config.get("mlp_layer_types").filter(|it| !it.is_null())) {
        (Some(_), Some(kinds)) => sparse_kinds(kinds, count)?,
        _ => routed.layers(config)?,
    };
    let feeds: Vec<FeedShape> = config.feeds(&sparse, || experts(config))?;
    let mixers = match indexer {
        None => vec![Mixer::Latent(latent); count],
        Some(indexer) => {
            if latent.query_rank.is_none() {
                return Err(ModelError::unserved_part(
                    "an indexer without a low-rank query (q_lora_rank)",
                ));
            }
            if indexer.head_dim < latent.rotary_dim {
                return Err(ModelError::broken(format!(
                    "index keys of {} elements (index_head_dim) have no {} to rotate (qk_rope_head_dim)",
                    indexer.head_dim, latent.rotary_dim
                )));
            }
            let chosen = |indexed| match indexed {
                true => KeyChoice::Indexed(indexer.clone()),
                false => KeyChoice::Shared,
            };
            let of_layer =
                |indexed| Mixer::Latent(Latent { chosen: chosen(indexed), ..latent.clone() });
            indexed_layers(config, count)?.into_iter().map(of_layer).collect()
        }
    };
    config.decoder(mixers, vec![Some(rope); count], feeds)
}

/// Reads latent attention and its rotary embedding. `query_rank` is the default of `q_lora_rank`.
pub(super) fn latent(config: &Config<'_>, query_rank: u64) -> Result<(Latent, Rope), ModelError> {
    let nope_dim = config.size("qk_nope_head_dim", MOST_HEADS)?;
    let rotary_dim = config.size("qk_rope_head_dim", MOST_HEADS)?;
    let mut rope = rope(config, rotary_dim)?;
    rope.interleaved = config.flag("rope_interleave", true);
    let mut scale = ((nope_dim + rotary_dim) as f64).powf(-0.5);
    let number = |key: &str| rope.scaling.as_ref()?.get(key)?.as_f64().filter(|&it| it != 0.0);
    if let (Some(weight), Some(factor)) = (number("mscale_all_dim"), number("factor")) {
        // YaRN (Peng et al. 2023) scales the softmax of extended contexts. Here attention scores
        // get this factor, in addition to the factor on cosines and sines.
        scale *= if factor > 1.0 { (0.1 * weight * factor.ln() + 1.0).powi(2) } else { 1.0 };
    }
    let query_rank = match config.get("q_lora_rank") {
        Some(Value::Null) => None,
        Some(_) => Some(config.size("q_lora_rank", MOST)?),
        None => Some(query_rank as usize),
    };
    let latent = Latent {
        heads: config.size("num_attention_heads", MOST_HEADS)?,
        query_rank,
        rank: config.size("kv_lora_rank", MOST)?,
        nope_dim,
        rotary_dim,
        value_dim: config.size("v_head_dim", MOST_HEADS)?,
        bias: config.flag("attention_bias", false),
        scale,
        query_scale: query_scale(config)?,
        chosen: KeyChoice::All,
    };
    Ok((latent, rope))
}

/// Reads the indexer of a config. `heads` and `interleaved` are the family's defaults.
pub(super) fn indexer(
    config: &Config<'_>,
    heads: u64,
    interleaved: bool,
) -> Result<Indexer, ModelError> {
    for key in ["index_init_tokens", "index_local_tokens"] {
        if config.flag(key, false) {
            return Err(ModelError::unserved_part(&format!(
                "positions that are always kept ({key})"
            )));
        }
    }
    let size = |key: &str, usual: u64, most: u64| match config.contains_key(key) {
        true => config.size(key, most),
        false => Ok(usual as usize),
    };
    Ok(Indexer {
        heads: size("index_n_heads", heads, MOST_HEADS)?,
        head_dim: size("index_head_dim", 128, MOST_HEADS)?,
        // transformers decides by the family alone. Other engines read this key, which GLM's
        // configs contain.
        interleaved: config.flag("indexer_rope_interleave", interleaved),
        top_k: size("index_topk", 2048, MOST)?,
    })
}

/// Returns true for each layer with an indexer: from a list of kinds, a pattern of letters, or an
/// interval.
fn indexed_layers(config: &Config<'_>, count: usize) -> Result<Vec<bool>, ModelError> {
    let there = |key: &str| config.get(key).filter(|value| !value.is_null());
    let kinds: Option<Vec<String>> = match (there("indexer_types"), there("index_topk_pattern")) {
        (Some(kinds), _) => Some(texts(kinds)),
        (None, Some(pattern)) => {
            let letters = pattern.as_str().unwrap_or_default().chars();
            let letters = letters.take(count).map(|letter| match letter {
                'F' => "full".to_owned(),
                'S' => "shared".to_owned(),
                other => other.to_string(),
            });
            Some(letters.collect())
        }
        (None, None) => None,
    };
    let Some(mut kinds) = kinds else {
        let every = config.optional("index_topk_freq", MOST)?.unwrap_or(1) as usize;
        let first = match there("index_skip_topk_offset") {
            None => USUAL_OFFSET,
            Some(_) => config.optional("index_skip_topk_offset", MOST)?.unwrap_or(0),
        } as usize;
        let indexed = |layer: usize| (layer + 1).saturating_sub(first).is_multiple_of(every);
        return first_is_indexed((0..count).map(indexed).collect());
    };
    // The list may continue with layers for multi-token prediction.
    kinds.truncate(count);
    let known = |kind: &String| matches!(kind.as_str(), "full" | "shared");
    if kinds.len() < count || !kinds.iter().all(known) {
        return Err(ModelError::broken(format!(
            "indexer_types (index_topk_pattern) wants `full` or `shared` for each of {count} layers: it has {kinds:?}"
        )));
    }
    first_is_indexed(kinds.iter().map(|kind| kind == "full").collect())
}

fn first_is_indexed(layers: Vec<bool>) -> Result<Vec<bool>, ModelError> {
    if layers.first() == Some(&false) {
        return Err(ModelError::broken(
            "the first layer shares its indexer (indexer_types), and none is before it",
        ));
    }
    Ok(layers)
}

fn texts(list: &Value) -> Vec<String> {
    let items = list.as_array().into_iter().flatten();
    items.map(|item| item.as_str().unwrap_or_default().to_owned()).collect()
}

fn sparse_kinds(kinds: &Value, count: usize) -> Result<Vec<bool>, ModelError> {
    let found = texts(kinds);
    let known = |kind: &String| matches!(kind.as_str(), "dense" | "sparse");
    if found.len() < count || !found[..count].iter().all(known) {
        return Err(ModelError::broken(format!(
            "mlp_layer_types wants `dense` or `sparse` for each layer: it has {found:?}"
        )));
    }
    Ok(found[..count].iter().map(|kind| kind == "sparse").collect())
}
