//! LoRA adapters (Hu et al. 2021): low-rank matrices for some of a model's weights, in the formats
//! of PEFT and llama.cpp. Hands get a manifest of file ranges, and need no naming rules.
//!
//! An adapter changes a module's product `W x` to `W x + B (A x) * scale`. Every tensor of its
//! files has to match a module: otherwise requests for the adapter could be computed by the base
//! model alone.

mod config;
mod files;
mod gguf;
mod load;
mod modules;
mod peft;

use std::collections::BTreeMap;
use std::path::Path;

use blake2::{Blake2b, Digest, digest::consts::U16};
use serde::Serialize;
use serde_json::{Value, json};

use crate::describe::hex;
use crate::error::ModelError;
use crate::families::{Rule, Shape, TensorPart};
use crate::manifest::{Place, place};
use crate::tensor::Tensor;

pub use files::AdapterFolder;
use files::OpenFile;
pub use load::{AdapterError, AdapterPair, read_adapter};
use modules::parts_of;

/// A checked adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapter {
    /// The largest rank of its matrices.
    pub rank: u32,
    /// A 128-bit hash of its content, as text. Adapters with equal content have equal digests.
    pub digest: String,
    /// The modules that it changes, by the last components of their names.
    pub modules: Vec<String>,
    /// Warnings about fields of its configuration that have no effect.
    pub warnings: Vec<String>,
    /// The file ranges of its matrices, for a hand.
    pub manifest: Value,
}

/// The matrices in an open file, by the names of those weights of the base model that they change.
struct Stored {
    file: OpenFile,
    halves: BTreeMap<String, Halves>,
    /// The rules that map tensor names to weights.
    rules: [&'static [Rule]; 2],
    warnings: Vec<String>,
}

/// The two low-rank matrices for one matrix of the base model.
struct Halves {
    a: Option<Tensor>,
    b: Option<Tensor>,
    scale: f32,
}

/// The manifest entry of one module's matrices.
#[derive(Serialize)]
struct Pair {
    name: String,
    scale: f32,
    a: Place,
    b: Place,
}

impl Adapter {
    /// Reads and checks an adapter of a model: a folder in PEFT's format, or a GGUF file. Refuses a
    /// rank above `most_rank`.
    ///
    /// # Errors
    /// The files can't be read, belong to another model, or need a feature that no hand supports.
    pub fn read(
        folder: &AdapterFolder,
        path: &Path,
        shape: &Shape,
        most_rank: u32,
    ) -> Result<Self, ModelError> {
        let is_gguf = path.extension().is_some_and(|end| end == "gguf");
        let read = if is_gguf { gguf::read } else { peft::read };
        let read = read(folder, path, shape).and_then(|stored| Self::of(stored, shape, most_rank));
        read.map_err(|error| match error {
            ModelError::Broken(what) => {
                ModelError::broken(format!("the adapter {}: {what}", path.display()))
            }
            other => other,
        })
    }

    fn of(stored: Stored, shape: &Shape, most_rank: u32) -> Result<Self, ModelError> {
        let Stored { file, halves, rules, warnings } = stored;
        let path = std::path::absolute(&file.path);
        let path = path.map_err(|error| ModelError::unreadable(&file.path, &error))?;
        let mut pairs = BTreeMap::new();
        for (weight, Halves { a, b, scale }) in halves {
            let (Some(a), Some(b)) = (a, b) else {
                return Err(ModelError::broken(format!(
                    "{weight} has only one of lora_A and lora_B"
                )));
            };
            let (&[rank, inputs], &[outputs, columns]) = (a.shape(), b.shape()) else {
                return Err(ModelError::broken(format!(
                    "lora_A or lora_B of {weight} is not a matrix"
                )));
            };
            if rank == 0 || rank > most_rank as usize || columns != rank {
                return Err(ModelError::broken(format!(
                    "{weight} is of rank {rank} and {columns}: ranks are from 1 to {most_rank}, by --max-lora-rank"
                )));
            }
            if !scale.is_finite() {
                return Err(ModelError::broken(format!("{weight} has the factor {scale}")));
            }
            for (module, part) in parts_of(&weight, [outputs, rank], shape, rules)? {
                let name = module.name();
                let own = [module.outputs, module.inputs];
                if [part.rows, inputs] != own || part.transposed {
                    return Err(ModelError::broken(format!(
                        "{name} has matrices for {:?}, and the model's own is {own:?}",
                        [part.rows, inputs]
                    )));
                }
                let files = std::slice::from_ref(&path);
                let whole = TensorPart::whole(a.shape());
                let pair = Pair {
                    a: place(&name, &a, &whole, vec![rank, inputs], files)?,
                    b: place(&name, &b, &part, vec![part.rows, rank], files)?,
                    name,
                    scale,
                };
                if pairs.insert(module, (pair, rank)).is_some() {
                    return Err(ModelError::broken(format!("{} is changed twice", module.name())));
                }
            }
            // The sizes were compared with the model's above.
            a.check_finite(&weight)?;
            b.check_finite(&weight)?;
        }
        let rank = pairs.values().map(|(_, rank)| *rank).max();
        let rank = rank.ok_or_else(|| ModelError::broken("there is no matrix in its file"))?;
        let digest = digest(&file, pairs.values().map(|(pair, _)| pair))?;
        let mut modules: Vec<String> = pairs.keys().map(|module| module.end.to_owned()).collect();
        modules.sort_unstable();
        modules.dedup();
        let pairs: Vec<Pair> = pairs.into_values().map(|(pair, _)| pair).collect();
        let rank = u32::try_from(rank).unwrap_or(u32::MAX);
        let manifest = json!({"files": [path], "digest": digest, "rank": rank, "modules": pairs});
        Ok(Self { rank, digest, modules, warnings, manifest })
    }
}

/// Hashes an adapter's content. Hands compute the hash again from the bytes that they read
/// ([`read_adapter`], `python/forebay/weights/adapter.py`).
fn digest<'a>(
    file: &OpenFile,
    pairs: impl Iterator<Item = &'a Pair>,
) -> Result<String, ModelError> {
    let mut digest = Blake2b::<U16>::new();
    for Pair { name, scale, a, b } in pairs {
        digest.update(name.as_bytes());
        digest.update(scale.to_le_bytes());
        for place in [a, b] {
            digest.update(load::facts(place));
            file.each(place.offset, place.bytes, |some| digest.update(some))?;
        }
    }
    Ok(hex(&digest.finalize()))
}

/// Stores a matrix under the name of the weight that it changes.
fn insert(
    halves: &mut BTreeMap<String, Halves>,
    weight: String,
    tensor: Tensor,
    is_a: bool,
    scale: f32,
) -> Result<(), ModelError> {
    let of = halves.entry(weight.clone()).or_insert(Halves { a: None, b: None, scale });
    let half = if is_a { &mut of.a } else { &mut of.b };
    match half.replace(tensor) {
        None => Ok(()),
        Some(_) => Err(ModelError::broken(format!("{weight} has a matrix twice"))),
    }
}

#[cfg(test)]
mod tests;
