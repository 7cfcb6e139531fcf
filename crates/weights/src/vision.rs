//! Vision towers, and the way from an image to their input.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::error::ModelError;
use crate::json::read_object;
use crate::sizes::{MOST, MOST_HEADS, MOST_LAYERS, checked, real, size_of, truthy};

/// Colours of a pixel.
const CHANNELS: u64 = 3;
/// The largest number of pixels, patches or times of a side.
const MOST_SIDE: u64 = 1 << 10;
const MOST_PIXELS: u64 = 1 << 31;
const ROPE_THETA: f64 = 10000.0;
/// Files with the settings of an image's processing. transformers 5 writes the second.
const PROCESSORS: [&str; 2] = ["preprocessor_config.json", "processor_config.json"];
const IMAGE_TOKENS: [&str; 3] = ["image_token_id", "vision_start_token_id", "vision_end_token_id"];

/// A vision tower (Qwen2.5-VL and Qwen3-VL, 2025). Sizes are numbers of elements, patches or
/// pixels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VisionTower {
    /// The number of layers.
    pub layers: usize,
    /// Elements of a state.
    pub hidden_size: usize,
    /// Elements between the products of a layer's second part.
    pub intermediate_size: usize,
    /// The number of heads.
    pub heads: usize,
    /// Pixels of a side of a patch.
    pub patch: usize,
    /// The number of times that a patch of a still image is repeated.
    pub temporal: usize,
    /// Patches of a side of a square, which becomes one position of the decoder.
    pub merge: usize,
    /// Elements of a position for the decoder, as many as its states have.
    pub out_size: usize,
    /// The base of its rotary frequencies.
    pub theta: f64,
    /// Layers whose states the decoder also gets, behind its own first layers (`DeepStack`, 2024).
    pub deepstack: Vec<usize>,
    /// Rows and columns of the learned table of positions; `None`: there is none.
    pub table_side: Option<usize>,
    /// Decoder positions of a side of a window; `None`: every layer attends to the whole image.
    pub window: Option<usize>,
    /// The layers that attend to the whole image; the others attend within windows.
    pub whole: Vec<usize>,
}

/// A kind of tower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TowerKind {
    /// Qwen2.5-VL: windows.
    Windows,
    /// Qwen3-VL: a table of positions, and deepstack outputs.
    Deepstack,
}

impl TowerKind {
    fn activation(self) -> &'static str {
        match self {
            Self::Windows => "silu",
            Self::Deepstack => "gelu_pytorch_tanh",
        }
    }
}

impl VisionTower {
    /// Reads the tower before a decoder of `layers` with states of `hidden` elements.
    ///
    /// # Errors
    /// The tower would be computed wrongly, or its config lacks a value.
    pub(crate) fn from_config(
        config: &Map<String, Value>,
        kind: TowerKind,
        hidden: usize,
        layers: usize,
    ) -> Result<Self, ModelError> {
        let vision = config.get("vision_config").and_then(Value::as_object);
        let vision = vision
            .ok_or_else(|| ModelError::broken("the model's config has no 'vision_config'"))?;
        let size = |keys: &[&str], most: u64| size_of(vision, keys, most);
        let depth = size(&["depth", "num_hidden_layers"], MOST_LAYERS)?;
        let hidden_size = size(&["hidden_size"], MOST)?;
        let heads = size(&["num_heads", "num_attention_heads"], MOST_HEADS)?;
        let patch = size(&["patch_size"], MOST_SIDE)?;
        let merge = size(&["spatial_merge_size"], MOST_SIDE)?;
        let out_size = size(&["out_hidden_size"], MOST)?;
        known(vision, "hidden_act", &[json!(kind.activation())])?;
        known(vision, "in_channels", &[json!(CHANNELS)])?;
        known(vision, "in_chans", &[json!(CHANNELS)])?;
        if !hidden_size.is_multiple_of(4 * heads) {
            return Err(ModelError::unserved_part(&format!(
                "a tower of {heads} heads (num_heads), which can't turn a quarter of each head's share of {hidden_size} elements \
                 (hidden_size) by rows"
            )));
        }
        if out_size != hidden {
            return Err(ModelError::broken(format!(
                "the tower gives {out_size} elements (out_hidden_size), and the decoder takes {hidden}"
            )));
        }
        let rope = vision.get("rope_parameters").and_then(Value::as_object);
        let theta = rope.map_or(Ok(ROPE_THETA), |rope| real(rope, "rope_theta", ROPE_THETA))?;
        let tower = Self {
            layers: depth,
            hidden_size,
            intermediate_size: size(&["intermediate_size"], MOST)?,
            heads,
            patch,
            temporal: size(&["temporal_patch_size"], MOST_SIDE)?,
            merge,
            out_size,
            theta,
            deepstack: Vec::new(),
            table_side: None,
            window: None,
            whole: Vec::new(),
        };
        match kind {
            TowerKind::Deepstack => tower.with_deepstack(vision, layers),
            TowerKind::Windows => tower.with_windows(vision),
        }
    }

    fn with_deepstack(
        mut self,
        vision: &Map<String, Value>,
        layers: usize,
    ) -> Result<Self, ModelError> {
        self.deepstack = layer_numbers(vision, "deepstack_visual_indexes", &[8, 16, 24])?;
        let ascending = self.deepstack.windows(2).all(|pair| pair[0] < pair[1]);
        if !ascending || self.deepstack.iter().any(|&layer| layer >= self.layers) {
            return Err(ModelError::broken(format!(
                "deepstack_visual_indexes {:?} are no layers of {}, ascending",
                self.deepstack, self.layers
            )));
        }
        if self.deepstack.len() > layers {
            return Err(ModelError::broken(format!(
                "a decoder of {layers} layers can't take {} deepstack outputs",
                self.deepstack.len()
            )));
        }
        let positions = size_of(vision, &["num_position_embeddings"], MOST)?;
        let side = positions.isqrt();
        if side * side != positions {
            return Err(ModelError::broken(format!(
                "a table of {positions} positions (num_position_embeddings) is no square"
            )));
        }
        self.table_side = Some(side);
        Ok(self)
    }

    fn with_windows(mut self, vision: &Map<String, Value>) -> Result<Self, ModelError> {
        let pixels = size_of(vision, &["window_size"], MOST)?;
        let window = pixels / self.merge / self.patch;
        if window == 0 {
            return Err(ModelError::broken(format!(
                "a window of {pixels} pixels (window_size) has no position in it"
            )));
        }
        self.window = Some(window);
        self.whole = layer_numbers(vision, "fullatt_block_indexes", &[7, 15, 23, 31])?;
        Ok(self)
    }
}

/// Numbers of layers. Absent ones are transformers' defaults.
fn layer_numbers(
    vision: &Map<String, Value>,
    key: &str,
    usual: &[usize],
) -> Result<Vec<usize>, ModelError> {
    let Some(found) = vision.get(key).filter(|value| !value.is_null()) else {
        return Ok(usual.to_vec());
    };
    let Some(items) = found.as_array() else {
        return Err(ModelError::broken(format!("the model's config has {key} that is no list")));
    };
    items.iter().map(|layer| Ok(checked(layer, key, 0, MOST)? as usize)).collect()
}

/// Checks that a value is one of those that are computed, or not there.
fn known(values: &Map<String, Value>, key: &str, known: &[Value]) -> Result<(), ModelError> {
    let found = values.get(key).filter(|value| !value.is_null());
    match found.filter(|value| !known.contains(value)) {
        None => Ok(()),
        Some(other) => Err(ModelError::unserved_part(&format!(
            "{key} {other} of images ({} is served)",
            known.iter().map(Value::to_string).collect::<Vec<_>>().join(", ")
        ))),
    }
}

/// The way from an image to a tower's input, and the tokens of images, for the brain.
///
/// # Errors
/// The files of a folder are missing, or say something that is not computed.
pub(crate) fn read_images(
    folder: &Path,
    config: &Map<String, Value>,
    tower: &VisionTower,
) -> Result<Value, ModelError> {
    let mut found = None;
    for name in PROCESSORS {
        let values = read_object(&folder.join(name), true)?;
        let nested = values.get("image_processor").filter(|value| truthy(Some(value)));
        let values = nested.and_then(Value::as_object).cloned().unwrap_or(values);
        if values.contains_key("image_mean") {
            found = Some(values);
            break;
        }
    }
    let Some(found) = found else {
        return Err(ModelError::broken(format!(
            "{} has no {}, which says how images become patches",
            folder.display(),
            PROCESSORS[0]
        )));
    };
    let mut images = preprocessing(folder, &found, tower)?;
    for key in IMAGE_TOKENS {
        let token = config.get(key).filter(|value| !value.is_null());
        let token = token
            .ok_or_else(|| ModelError::broken(format!("the model's config has no '{key}'")))?;
        images.insert(key.into(), json!(checked(token, key, 0, MOST)?));
    }
    Ok(images.into())
}

fn preprocessing(
    folder: &Path,
    found: &Map<String, Value>,
    tower: &VisionTower,
) -> Result<Map<String, Value>, ModelError> {
    const BICUBIC: u64 = 3;
    let processors = [json!("Qwen2VLImageProcessor"), json!("Qwen2VLImageProcessorFast")];
    known(found, "image_processor_type", &processors)?;
    known(found, "resample", &[json!(BICUBIC)])?;
    for key in ["do_resize", "do_rescale", "do_normalize", "do_convert_rgb"] {
        known(found, key, &[json!(true)])?;
    }
    let says = |what: &str| {
        let folder = folder.display();
        ModelError::broken(format!("{folder} says about images what can't be read: {what}"))
    };
    let edges = found.get("size").and_then(Value::as_object);
    let positive = |value: Option<&Value>| value.and_then(Value::as_u64).filter(|&it| it > 0);
    let pixels = |key: &str, edge: &str| {
        positive(found.get(key))
            .or_else(|| positive(edges?.get(edge)))
            .or_else(|| positive(edges?.get(key)))
            .ok_or_else(|| says(key))
    };
    let (smallest, largest) =
        (pixels("min_pixels", "shortest_edge")?, pixels("max_pixels", "longest_edge")?);
    if !(1..=MOST_PIXELS).contains(&largest) || smallest > largest {
        return Err(ModelError::broken(format!(
            "{} has images of {smallest} to {largest} pixels (size, min_pixels, max_pixels)",
            folder.display()
        )));
    }
    let colours = |key: &str| {
        let items = found.get(key).and_then(Value::as_array).filter(|items| items.len() == 3);
        let items = items.and_then(|items| items.iter().map(Value::as_f64).collect());
        items.ok_or_else(|| says(key))
    };
    let (mean, std): (Vec<f64>, Vec<f64>) = (colours("image_mean")?, colours("image_std")?);
    if let Some(divisor) = std.iter().find(|&&divisor| divisor <= 0.0) {
        let folder = folder.display();
        return Err(ModelError::broken(format!(
            "{folder} divides colours by {divisor} (image_std)"
        )));
    }
    let side = |key: &str| positive(found.get(key)).ok_or_else(|| says(key));
    let sides = [side("patch_size")?, side("merge_size")?, side("temporal_patch_size")?];
    let wanted = [tower.patch, tower.merge, tower.temporal].map(|side| side as u64);
    if sides != wanted {
        return Err(ModelError::broken(format!(
            "{} makes patches of {} pixels, {} a side and {} times, and the tower wants {}",
            folder.display(),
            sides[0],
            sides[1],
            sides[2],
            wanted.map(|side| side.to_string()).join(", ")
        )));
    }
    let rescale = match found.get("rescale_factor") {
        None => 1.0 / 255.0,
        Some(factor) => factor.as_f64().ok_or_else(|| says("rescale_factor"))?,
    };
    let [patch, merge, temporal] = sides;
    let read = json!({
        "patch": patch, "merge": merge, "temporal": temporal, "min_pixels": smallest, "max_pixels": largest,
        "mean": mean, "std": std, "rescale": rescale,
    });
    Ok(read.as_object().cloned().unwrap_or_default())
}
