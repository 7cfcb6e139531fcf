//! Adapters as PEFT saves them: `adapter_config.json` and `adapter_model.safetensors`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::config::Config;
use super::files::AdapterFolder;
use super::{Stored, insert};
use crate::error::ModelError;
use crate::families::Shape;
use crate::safe::SafeFile;
use crate::tensor::Tensor;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// The size limits of the configuration, and of the header of the weights.
const MOST_CONFIG: u64 = 64 << 10;
const MOST_HEADER: u64 = 1 << 20;
/// Suffixes of tensor names, and whether the tensor is the A matrix. The longer form includes
/// `default`, the name under which PEFT had loaded the adapter.
const ENDS: [(&str, bool); 4] = [
    (".lora_A.weight", true),
    (".lora_B.weight", false),
    (".lora_A.default.weight", true),
    (".lora_B.default.weight", false),
];

/// Reads the headers of an adapter.
pub(super) fn read(
    folder: &AdapterFolder,
    path: &Path,
    shape: &Shape,
) -> Result<Stored, ModelError> {
    let config = folder.open(&path.join(CONFIG))?.read(MOST_CONFIG)?;
    let config = Config::read(&config)?;
    let file = folder.open(&path.join(WEIGHTS))?;
    let header = u64::from_le_bytes(file.first()?);
    if header > MOST_HEADER {
        return Err(ModelError::broken(format!(
            "{WEIGHTS} has a header of {header} bytes, and at most {MOST_HEADER} are allowed"
        )));
    }
    let safe = Arc::new(SafeFile::open(&file.own_path())?);
    let (mut halves, mut changed) = (BTreeMap::new(), Vec::new());
    for (name, tensor) in &safe.tensors {
        let end = ENDS.iter().find_map(|&(end, is_a)| Some((name.strip_suffix(end)?, is_a)));
        let (module, is_a) = end.ok_or_else(|| {
            ModelError::broken(format!("it has a tensor {name}, which is no matrix of a low rank"))
        })?;
        let module = module.strip_prefix("base_model.model.").unwrap_or(module);
        // Adapters trained on a base model without a head lack this prefix.
        let root = if module.starts_with("layers.") { "model." } else { "" };
        let weight = format!("{root}{module}.weight");
        let rank = tensor.shape.get(usize::from(!is_a)).copied();
        let scale = config.scale(module, rank.unwrap_or(0))?;
        let tensor = Tensor::Safe(Arc::clone(&safe), tensor.clone());
        insert(&mut halves, weight, tensor, is_a, scale)?;
        changed.push(module.to_owned());
    }
    config.check_targets(&changed)?;
    let rules = [shape.family.rules, &[][..]];
    Ok(Stored { file, halves, rules, warnings: config.warnings })
}
