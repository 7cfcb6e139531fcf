//! Adapters in GGUF files, as llama.cpp's converter writes them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::files::AdapterFolder;
use super::{Stored, insert};
use crate::error::ModelError;
use crate::families::{COMMON_GGUF_RULES, Shape};
use crate::gguf::{GgufFiles, GgufValue};
use crate::tensor::Tensor;

/// The data types that an adapter's tensors may have.
const TYPES: [&str; 4] = ["F32", "F16", "BF16", "Q8_0"];

/// Reads the header of an adapter.
pub(super) fn read(
    folder: &AdapterFolder,
    path: &Path,
    shape: &Shape,
) -> Result<Stored, ModelError> {
    let file = folder.open(path)?;
    let opened = GgufFiles::open(&[file.own_path()])?;
    for (key, wanted) in [("general.type", "adapter"), ("adapter.type", "lora")] {
        let found = opened.metadata.get(key).and_then(GgufValue::as_text);
        if found != Some(wanted) {
            return Err(ModelError::broken(format!(
                "{key} of the GGUF file is {}, and not {wanted}",
                found.unwrap_or("missing")
            )));
        }
    }
    let alpha = opened.metadata.get("adapter.lora.alpha").and_then(GgufValue::as_f64);
    let own = shape.family.gguf.as_ref();
    let own = own.ok_or_else(|| ModelError::broken("no GGUF file is of the model's family"))?;
    let mut halves = BTreeMap::new();
    for tensor in &opened.tensors {
        let name = &tensor.name;
        let unknown = |what: &str| ModelError::broken(format!("it has a tensor {name}, {what}"));
        let (weight, is_a) = match (name.strip_suffix(".lora_a"), name.strip_suffix(".lora_b")) {
            (Some(weight), _) => (weight, true),
            (_, Some(weight)) => (weight, false),
            (None, None) => return Err(unknown("which is no matrix of a low rank")),
        };
        if !TYPES.contains(&tensor.kind.name()) {
            return Err(unknown("whose type of numbers adapters do not have"));
        }
        let rank = tensor.shape.get(usize::from(!is_a)).copied().unwrap_or(0);
        // Without an alpha, the matrices already include the scale.
        let scale = alpha.filter(|&alpha| alpha != 0.0).map_or(1.0, |alpha| alpha / rank as f64);
        let tensor = Tensor::Gguf(Arc::new(tensor.clone()));
        insert(&mut halves, weight.to_owned(), tensor, is_a, scale as f32)?;
    }
    Ok(Stored { file, halves, rules: [own.rules, COMMON_GGUF_RULES], warnings: Vec::new() })
}
