//! Vision towers, and how images are processed for them.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::error::ModelError;
use crate::json::{read_object, token_text};
use crate::sizes::{MOST, MOST_HEADS, MOST_LAYERS, checked, optional, real, size_of, truthy};

/// The key of the tower's config in the model's config.
pub(crate) const TOWER_CONFIG: &str = "vision_config";
/// Colour channels per pixel.
const CHANNELS: u64 = 3;
/// The largest number of pixels or patches along a side, and of temporal repetitions.
const MOST_SIDE: u64 = 1 << 10;
const MOST_PIXELS: u64 = 1 << 31;
const ROPE_THETA: f64 = 10000.0;
const NORM_EPS: f64 = 1e-6;
/// Files with the settings of image processing. transformers 5 writes the second one.
const PROCESSORS: [&str; 2] = ["preprocessor_config.json", "processor_config.json"];
const IMAGE_TOKENS: [&str; 3] = ["image_token_id", "vision_start_token_id", "vision_end_token_id"];

/// A vision tower (Qwen2.5-VL, Qwen3-VL and Gemma 3, 2025). Sizes are in elements, patches or
/// pixels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VisionTower {
    /// The kind of the tower.
    pub kind: TowerKind,
    /// The number of layers.
    pub layers: usize,
    /// Elements of a hidden state.
    pub hidden_size: usize,
    /// The inner size of the feed-forward part of a layer.
    pub intermediate_size: usize,
    /// The number of heads.
    pub heads: usize,
    /// The side of a patch in pixels.
    pub patch: usize,
    /// How often a patch of a still image is repeated along the time axis.
    pub temporal: usize,
    /// The side, in patches, of the square that becomes one position of the decoder.
    pub merge: usize,
    /// Elements of the tower's output per position, equal to the decoder's hidden size.
    pub out_size: usize,
    /// The base of the rotary embedding; `None`: the tower has no rotary embedding.
    pub theta: Option<f64>,
    /// The epsilon of the norms.
    pub norm_eps: f64,
    /// True if the decoder's attention within an image is bidirectional.
    pub both_ways: bool,
    /// Layers whose outputs are also added to the outputs of the decoder's first layers
    /// (`DeepStack`, 2024).
    pub deepstack: Vec<usize>,
    /// The side of the learned table of position embeddings; `None`: there is no table.
    pub table_side: Option<usize>,
    /// The side of a window in positions of the decoder; `None`: every layer attends to the whole
    /// image.
    pub window: Option<usize>,
    /// The layers that attend to the whole image. The other layers attend within windows.
    pub whole: Vec<usize>,
}

/// A kind of tower.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TowerKind {
    /// Qwen2.5-VL: attention within windows.
    Windows,
    /// Qwen3-VL and Qwen3.5: a table of position embeddings, interpolated to the image's size, and
    /// optional deepstack outputs.
    Table,
    /// The `SigLIP` (Zhai et al. 2023) of Gemma 3: images of one size, with a table entry per
    /// patch. Its outputs are averaged over squares of patches.
    Siglip,
}

impl TowerKind {
    fn activation(self) -> &'static str {
        match self {
            Self::Windows => "silu",
            Self::Table | Self::Siglip => "gelu_pytorch_tanh",
        }
    }
}

/// True if a config has a vision tower. A text-only repository may keep the architecture name of
/// the model with a tower.
pub(crate) fn has_tower(config: &Map<String, Value>) -> bool {
    config.get(TOWER_CONFIG).is_some_and(|tower| !tower.is_null())
}

/// Returns the config of the model's tower.
fn tower_config(config: &Map<String, Value>) -> Result<&Map<String, Value>, ModelError> {
    let tower = config.get(TOWER_CONFIG).and_then(Value::as_object);
    tower.ok_or_else(|| ModelError::broken("the model's config has a vision_config of no keys"))
}

impl VisionTower {
    /// Reads the tower of a Qwen model. The model's decoder has `layers` layers and hidden states
    /// of `hidden` elements.
    ///
    /// # Errors
    /// The tower is not supported, or its config lacks a value.
    pub(crate) fn from_config(
        config: &Map<String, Value>,
        kind: TowerKind,
        hidden: usize,
        layers: usize,
    ) -> Result<Self, ModelError> {
        let vision = tower_config(config)?;
        let out_size = size_of(vision, &["out_hidden_size"], MOST)?;
        let rope = vision.get("rope_parameters").and_then(Value::as_object);
        let theta = rope.map_or(Ok(ROPE_THETA), |rope| real(rope, "rope_theta", ROPE_THETA))?;
        let tower = Self {
            temporal: size_of(vision, &["temporal_patch_size"], MOST_SIDE)?,
            merge: size_of(vision, &["spatial_merge_size"], MOST_SIDE)?,
            theta: Some(theta),
            ..Self::plain(vision, kind, out_size)?
        };
        if !tower.hidden_size.is_multiple_of(4 * tower.heads) {
            return Err(ModelError::unserved_part(&format!(
                "a tower of {} heads (num_heads), because {} elements (hidden_size) are not a multiple of 4 times the heads",
                tower.heads, tower.hidden_size
            )));
        }
        if out_size != hidden {
            return Err(ModelError::broken(format!(
                "the tower gives {out_size} elements (out_hidden_size), and the decoder takes {hidden}"
            )));
        }
        match kind {
            TowerKind::Windows => tower.with_windows(vision),
            TowerKind::Table | TowerKind::Siglip => tower.with_deepstack(vision, layers),
        }
    }

    /// Reads the tower of a Gemma 3 model. The model's decoder has hidden states of `hidden`
    /// elements.
    ///
    /// # Errors
    /// The tower is not supported, or its config lacks a value.
    pub(crate) fn siglip(config: &Map<String, Value>, hidden: usize) -> Result<Self, ModelError> {
        const POSITIONS: u64 = 256;
        let vision = tower_config(config)?;
        let tower = Self::plain(vision, TowerKind::Siglip, hidden)?;
        known(vision, "num_channels", &[json!(CHANNELS)])?;
        let pixels = size_of(vision, &["image_size"], MOST)?;
        let positions = optional(config, "mm_tokens_per_image", MOST)?.unwrap_or(POSITIONS);
        let (patches, side) = (pixels / tower.patch, positions.isqrt() as usize);
        let fits = patches * tower.patch == pixels
            && (side * side) as u64 == positions
            && patches.is_multiple_of(side);
        if !fits {
            return Err(ModelError::unserved_part(&format!(
                "images of {pixels} pixels a side (image_size), whose patches of {} pixels can't be pooled to {positions} \
                 positions (mm_tokens_per_image)",
                tower.patch
            )));
        }
        if !tower.hidden_size.is_multiple_of(tower.heads) {
            return Err(ModelError::broken(format!(
                "a tower of {} heads (num_attention_heads) can't share {} elements (hidden_size) equally",
                tower.heads, tower.hidden_size
            )));
        }
        Ok(Self {
            merge: patches / side,
            norm_eps: real(vision, "layer_norm_eps", NORM_EPS)?,
            table_side: Some(patches),
            both_ways: true,
            ..tower
        })
    }

    /// Reads the values that all kinds of towers have.
    fn plain(
        vision: &Map<String, Value>,
        kind: TowerKind,
        out_size: usize,
    ) -> Result<Self, ModelError> {
        let size = |keys: &[&str], most: u64| size_of(vision, keys, most);
        known(vision, "hidden_act", &[json!(kind.activation())])?;
        known(vision, "in_channels", &[json!(CHANNELS)])?;
        known(vision, "in_chans", &[json!(CHANNELS)])?;
        Ok(Self {
            kind,
            layers: size(&["depth", "num_hidden_layers"], MOST_LAYERS)?,
            hidden_size: size(&["hidden_size"], MOST)?,
            intermediate_size: size(&["intermediate_size"], MOST)?,
            heads: size(&["num_heads", "num_attention_heads"], MOST_HEADS)?,
            patch: size(&["patch_size"], MOST_SIDE)?,
            temporal: 1,
            merge: 1,
            out_size,
            theta: None,
            norm_eps: NORM_EPS,
            both_ways: false,
            deepstack: Vec::new(),
            table_side: None,
            window: None,
            whole: Vec::new(),
        })
    }

    /// The side of every image in positions of the decoder; `None`: it depends on the image's size.
    fn fixed_side(&self) -> Option<usize> {
        let side = self.table_side.filter(|_| self.kind == TowerKind::Siglip)?;
        Some(side / self.merge)
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

/// Reads a list of layer indices. The default is that of transformers.
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

/// Checks that a value is missing, or is one of the supported values.
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

/// Returns the settings of image processing and the tokens for images, for the brain. For Gemma 3,
/// `tokenizer_config` names these tokens.
///
/// # Errors
/// Files are missing, or need a feature that is not supported.
pub(crate) fn read_images(
    folder: &Path,
    config: &Map<String, Value>,
    tokenizer_config: &Map<String, Value>,
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
    let Some(values) = found else {
        return Err(ModelError::broken(format!(
            "{} has no {}, which says how images become patches: --limit-images 0 serves the text \
             alone",
            folder.display(),
            PROCESSORS[0]
        )));
    };
    let processor = Processor { folder, values: &values };
    if let Some(side) = tower.fixed_side() {
        let mut images = processor.of_one_size(tower, side)?;
        images.extend(gemma_tokens(config, tokenizer_config)?);
        return Ok(images.into());
    }
    let mut images = processor.of_any_size(tower)?;
    for key in IMAGE_TOKENS {
        let token = config.get(key).filter(|value| !value.is_null());
        let token = token
            .ok_or_else(|| ModelError::broken(format!("the model's config has no '{key}'")))?;
        images.insert(key.into(), json!(checked(token, key, 0, MOST)?));
    }
    Ok(images.into())
}

/// Returns the token for an image position, and the mark for an image in chat templates. The mark
/// is replaced by the same text as in transformers' `Gemma3Processor`.
fn gemma_tokens(
    config: &Map<String, Value>,
    tokenizer_config: &Map<String, Value>,
) -> Result<Map<String, Value>, ModelError> {
    const TOKEN: u64 = 262_144;
    let key =
        if config.contains_key("image_token_id") { "image_token_id" } else { "image_token_index" };
    let there = config.get(key).filter(|value| !value.is_null());
    let token = there.map_or(Ok(TOKEN), |token| checked(token, key, 0, MOST))?;
    let more = tokenizer_config.get("extra_special_tokens").and_then(Value::as_object);
    let text = |key: &str, usual: &str| {
        let found = token_text(tokenizer_config, key);
        let found = found.or_else(|| more.and_then(|more| token_text(more, key)));
        found.unwrap_or_else(|| usual.to_owned())
    };
    let begin = text("boi_token", "<start_of_image>");
    let end = text("eoi_token", "<end_of_image>");
    let position = text("image_token", "<image_soft_token>");
    let shown = json!({
        "image_token_id": token,
        "mark": {"written": begin, "becomes": format!("\n\n{begin}{position}{end}\n\n")},
    });
    Ok(shown.as_object().cloned().unwrap_or_default())
}

/// The image processing settings of a repository.
struct Processor<'a> {
    folder: &'a Path,
    values: &'a Map<String, Value>,
}

impl Processor<'_> {
    /// Reads settings with which an image keeps its aspect ratio (`Qwen2VLImageProcessor`).
    fn of_any_size(&self, tower: &VisionTower) -> Result<Map<String, Value>, ModelError> {
        const BICUBIC: u64 = 3;
        self.known([json!("Qwen2VLImageProcessor"), json!("Qwen2VLImageProcessorFast")], BICUBIC)?;
        let edges = self.values.get("size").and_then(Value::as_object);
        let pixels = |key: &str, edge: &str| {
            positive(self.values.get(key))
                .or_else(|| positive(edges?.get(edge)))
                .or_else(|| positive(edges?.get(key)))
                .ok_or_else(|| self.unreadable(key))
        };
        let (smallest, largest) =
            (pixels("min_pixels", "shortest_edge")?, pixels("max_pixels", "longest_edge")?);
        if !(1..=MOST_PIXELS).contains(&largest) || smallest > largest {
            return Err(ModelError::broken(format!(
                "{} has images of {smallest} to {largest} pixels (size, min_pixels, max_pixels)",
                self.folder.display()
            )));
        }
        let side = |key: &str| positive(self.values.get(key)).ok_or_else(|| self.unreadable(key));
        let sides = [side("patch_size")?, side("merge_size")?, side("temporal_patch_size")?];
        let wanted = [tower.patch, tower.merge, tower.temporal].map(|side| side as u64);
        if sides != wanted {
            return Err(ModelError::broken(format!(
                "{} makes patches of {} pixels, {} a side and {} times, and the tower wants {}",
                self.folder.display(),
                sides[0],
                sides[1],
                sides[2],
                wanted.map(|side| side.to_string()).join(", ")
            )));
        }
        self.read(tower, json!({"min_pixels": smallest, "max_pixels": largest}))
    }

    /// Reads settings with which every image has `side` times `side` positions
    /// (`Gemma3ImageProcessor`).
    fn of_one_size(
        &self,
        tower: &VisionTower,
        side: usize,
    ) -> Result<Map<String, Value>, ModelError> {
        const BILINEAR: u64 = 2;
        self.known([json!("Gemma3ImageProcessor"), json!("Gemma3ImageProcessorFast")], BILINEAR)?;
        known(self.values, "do_pan_and_scan", &[json!(false)])?;
        let size = self.values.get("size").and_then(Value::as_object);
        let edge = |key: &str| {
            positive(size.and_then(|size| size.get(key))).ok_or_else(|| self.unreadable("size"))
        };
        let (sides, wanted) =
            ([edge("height")?, edge("width")?], (side * tower.merge * tower.patch) as u64);
        if sides != [wanted; 2] {
            return Err(ModelError::broken(format!(
                "{} makes images of {} x {} pixels, and the tower wants {wanted} x {wanted}",
                self.folder.display(),
                sides[0],
                sides[1]
            )));
        }
        let pixels = wanted * wanted;
        self.read(tower, json!({"min_pixels": pixels, "max_pixels": pixels, "fixed": [side, side]}))
    }

    /// Checks that the kind of processing and its steps are supported.
    fn known(&self, names: [Value; 2], resample: u64) -> Result<(), ModelError> {
        known(self.values, "image_processor_type", &names)?;
        known(self.values, "resample", &[json!(resample)])?;
        for key in ["do_resize", "do_rescale", "do_normalize", "do_convert_rgb"] {
            known(self.values, key, &[json!(true)])?;
        }
        Ok(())
    }

    /// Reads the remaining settings. `sizes` contains the settings of image sizes.
    fn read(&self, tower: &VisionTower, sizes: Value) -> Result<Map<String, Value>, ModelError> {
        let colours = |key: &str| {
            let items = self.values.get(key).and_then(Value::as_array);
            let items = items.filter(|items| items.len() == 3);
            let items = items.and_then(|items| items.iter().map(Value::as_f64).collect());
            items.ok_or_else(|| self.unreadable(key))
        };
        let (mean, std): (Vec<f64>, Vec<f64>) = (colours("image_mean")?, colours("image_std")?);
        if let Some(divisor) = std.iter().find(|&&divisor| divisor <= 0.0) {
            let folder = self.folder.display();
            return Err(ModelError::broken(format!(
                "{folder} divides colours by {divisor} (image_std)"
            )));
        }
        let rescale = match self.values.get("rescale_factor") {
            None => 1.0 / 255.0,
            Some(factor) => factor.as_f64().ok_or_else(|| self.unreadable("rescale_factor"))?,
        };
        let (patch, merge, temporal) = (tower.patch, tower.merge, tower.temporal);
        let read = json!({
            "patch": patch, "merge": merge, "temporal": temporal, "mean": mean, "std": std, "rescale": rescale,
        });
        let mut read = read.as_object().cloned().unwrap_or_default();
        read.extend(sizes.as_object().cloned().unwrap_or_default());
        Ok(read)
    }

    fn unreadable(&self, what: &str) -> ModelError {
        let folder = self.folder.display();
        ModelError::broken(format!("{folder} says about images what can't be read: {what}"))
    }
}

/// Returns a number above 0; `None`: the value is anything else.
fn positive(value: Option<&Value>) -> Option<u64> {
    value.and_then(Value::as_u64).filter(|&it| it > 0)
}
