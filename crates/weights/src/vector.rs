//! The layers after pooling: `Dense` modules of sentence-transformers, and classifier heads.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::ModelError;
use crate::json::read_object;
use crate::sizes::{MOST, size};

/// In a config rebuilt from a GGUF file: the key for the shapes of the matrices after pooling.
/// These matrices are in the model's file.
pub(crate) const DENSE_SHAPES: &str = "dense_shapes";
/// The files of a `Dense` module.
const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";

/// A layer on a pooled vector: a linear projection, an activation and a norm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VectorLayer {
    /// The name of the projection's weights, without the suffix.
    pub name: String,
    /// Elements of the input vector.
    pub inputs: usize,
    /// Elements of the output vector.
    pub outputs: usize,
    /// True if the projection has a bias.
    pub bias: bool,
    /// The activation after the projection.
    pub activation: VectorActivation,
    /// The name of the norm after the activation; `None`: there is no norm. It is of the same kind
    /// as the model's norms.
    pub norm: Option<String>,
    /// The safetensors file with the weights, as `linear.weight` and `linear.bias`; `None`: the
    /// weights are in the model's files.
    pub file: Option<PathBuf>,
}

/// The activation after a vector's projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VectorActivation {
    /// No activation.
    Identity,
    /// The hyperbolic tangent.
    Tanh,
    /// `x * Phi(x)`, exactly.
    Gelu,
    /// The positive part.
    Relu,
}

impl VectorActivation {
    /// Returns the activation with this name in transformers.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        match name {
            "gelu" => Some(Self::Gelu),
            "relu" => Some(Self::Relu),
            "tanh" => Some(Self::Tanh),
            _ => None,
        }
    }

    /// Returns the activation with this PyTorch class name.
    fn from_class(name: &str) -> Option<Self> {
        match name.rsplit('.').next().unwrap_or_default() {
            "Identity" => Some(Self::Identity),
            "Tanh" => Some(Self::Tanh),
            "GELU" => Some(Self::Gelu),
            "ReLU" => Some(Self::Relu),
            _ => None,
        }
    }
}

impl VectorLayer {
    /// Reads the configuration of the `Dense` module in a folder. `number` is the module's index
    /// among the model's `Dense` modules.
    pub(crate) fn of_dense(folder: &Path, number: usize) -> Result<Self, ModelError> {
        let path = folder.join(CONFIG);
        let config = read_object(&path, false)?;
        let inputs = size(&config, "in_features", MOST)?;
        let outputs = size(&config, "out_features", MOST)?;
        let class = config.get("activation_function").and_then(Value::as_str).unwrap_or("Tanh");
        let activation = VectorActivation::from_class(class).ok_or_else(|| {
            let what = format!("the activation {class} of a Dense module is not supported");
            ModelError::broken(what)
        })?;
        refuse_others(&config, &path)?;
        Ok(Self {
            name: format!("dense.{number}"),
            inputs,
            outputs,
            bias: config.get("bias").is_none_or(|bias| bias.as_bool() == Some(true)),
            activation,
            norm: None,
            file: Some(folder.join(WEIGHTS)),
        })
    }
}

/// Reads the matrices after pooling from a rebuilt config. They have no activation.
pub(crate) fn of_config(config: &Map<String, Value>) -> Result<Vec<VectorLayer>, ModelError> {
    let shapes = config.get(DENSE_SHAPES).cloned().unwrap_or_default();
    if shapes.is_null() {
        return Ok(Vec::new());
    }
    let shapes: Vec<[usize; 2]> = serde_json::from_value(shapes).map_err(|_| {
        ModelError::broken("the model's file has matrices behind pooling that are no matrices")
    })?;
    let layer = |(number, [outputs, inputs]): (usize, [usize; 2])| VectorLayer {
        name: format!("dense.{number}"),
        inputs,
        outputs,
        bias: false,
        activation: VectorActivation::Identity,
        norm: None,
        file: None,
    };
    Ok(shapes.into_iter().enumerate().map(layer).collect())
}

/// Refuses a module that reads or writes anything but the pooled vector.
fn refuse_others(config: &Map<String, Value>, path: &Path) -> Result<(), ModelError> {
    const VECTOR: &str = "sentence_embedding";
    for key in ["module_input_name", "module_output_name"] {
        let name = config.get(key).and_then(Value::as_str).unwrap_or(VECTOR);
        if name != VECTOR {
            return Err(ModelError::broken(format!(
                "{} has a Dense module of {name} ({key}): only {VECTOR} is supported",
                path.display()
            )));
        }
    }
    Ok(())
}

/// Checks that a vector of `size` elements fits the first layer, and that each layer's output fits
/// the next layer. Returns the size of the result.
pub(crate) fn size_behind(size: usize, layers: &[VectorLayer]) -> Result<usize, ModelError> {
    layers.iter().try_fold(size, |size, layer| {
        if layer.inputs == size {
            return Ok(layer.outputs);
        }
        Err(ModelError::broken(format!(
            "{} takes vectors of {} elements, and gets {size}",
            layer.name, layer.inputs
        )))
    })
}

/// Returns the files of a model's weights, then those of its layers after pooling. A manifest
/// numbers files in this order.
#[must_use]
pub fn weight_files(files: &[PathBuf], layers: &[VectorLayer]) -> Vec<PathBuf> {
    files.iter().chain(layers.iter().filter_map(|layer| layer.file.as_ref())).cloned().collect()
}

/// Refuses `Dense` modules without weights in safetensors.
pub(crate) fn check_files(layers: &[VectorLayer]) -> Result<(), ModelError> {
    let missing = |path: &&PathBuf| !path.is_file();
    match layers.iter().filter_map(|layer| layer.file.as_ref()).find(missing) {
        None => Ok(()),
        Some(path) => Err(ModelError::broken(format!(
            "{} is not there: a Dense module's weights are read from safetensors only",
            path.display()
        ))),
    }
}
