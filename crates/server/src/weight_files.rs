//! The server's interface to weight files, which it never reads directly.

use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::ser::{Serialize, SerializeSeq, Serializer};
use serde_json::Value;

/// A private folder for the tensors of one update. It is removed when the last clone is dropped.
#[derive(Clone)]
pub struct TensorFolder {
    /// The folder's path.
    pub path: PathBuf,
    /// The maximum total size of the folder's tensor files in bytes.
    pub most_bytes: u64,
    /// Removes the folder when its last clone is dropped.
    pub guard: Arc<dyn Any + Send + Sync>,
}

/// A trainer's process group, and this server's rank in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrainerGroup {
    /// The host of the trainer, to which all ranks connect.
    pub address: String,
    /// The port of the trainer's host.
    pub port: u16,
    /// The rank of this server; the trainer has rank 0.
    pub rank: u32,
    /// The number of ranks.
    pub world_size: u32,
    /// The group's name.
    pub name: String,
}

/// A tensor that a trainer sends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedTensor {
    /// The tensor's name in the served checkpoint.
    pub name: String,
    /// The tensor's type, by its PyTorch name.
    pub dtype: String,
    /// The tensor's sizes.
    pub shape: Vec<u64>,
}

/// A member of a trainer's process group. Dropping it leaves the group.
pub trait TensorReceiver: Send {
    /// Receives these tensors in order, and writes them to a new safetensors file.
    ///
    /// # Errors
    /// The trainer has disconnected, or did not send the tensors in time. The group can't be used
    /// any more.
    fn receive(&mut self, tensors: &[NamedTensor], file: &Path) -> Result<(), String>;
}

/// The first rows of a parameter, as nested lists.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterValues {
    /// The size of each dimension of `values`. The first may be smaller than the parameter's.
    pub shape: Vec<usize>,
    /// All values in row-major order.
    pub values: Vec<f32>,
}

/// Access to the model files that hands load. `served` is the description of the hands' current
/// model. Errors are one-line messages for the client.
pub trait WeightFiles: Send + Sync {
    /// Returns the description, for hands, of the model at `path`: a folder or a file.
    ///
    /// # Errors
    /// The model does not exist, is damaged, or does not have the served model's shapes.
    fn describe(&self, path: &Path) -> Result<Value, String>;

    /// Creates a folder for tensors.
    ///
    /// # Errors
    /// The served model's tensors can't be replaced, or the folder can't be created.
    fn folder(&self, served: &Value) -> Result<TensorFolder, String>;

    /// Describes the served model with some tensors replaced by the tensors of safetensors files in
    /// the folder.
    ///
    /// # Errors
    /// A file is damaged, or has a tensor that the model does not have.
    fn lay(
        &self,
        folder: &TensorFolder,
        changed: &[PathBuf],
        served: &Value,
    ) -> Result<Value, String>;

    /// Joins a trainer's group. Waits for the trainer.
    ///
    /// # Errors
    /// The ranks do not all join.
    fn join(&self, group: &TrainerGroup) -> Result<Box<dyn TensorReceiver>, String>;

    /// Returns the first rows of a parameter.
    ///
    /// # Errors
    /// There is no such parameter, it is not stored as plain floats, or too many values are
    /// requested.
    fn rows(&self, served: &Value, name: &str, rows: usize) -> Result<ParameterValues, String>;
}

impl Serialize for ParameterValues {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Nested { shape: &self.shape, values: &self.values }.serialize(serializer)
    }
}

/// A nested list, or a number at the innermost level.
struct Nested<'a> {
    shape: &'a [usize],
    values: &'a [f32],
}

impl Serialize for Nested<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Some((&count, shape)) = self.shape.split_first() else {
            return self.values.first().serialize(serializer);
        };
        let mut list = serializer.serialize_seq(Some(count))?;
        let of_one = self.values.len().checked_div(count).unwrap_or(0);
        for at in 0..count {
            let values = &self.values[at * of_one..][..of_one];
            list.serialize_element(&Nested { shape, values })?;
        }
        list.end()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_are_lists_in_lists() {
        let of = |shape: &[usize], values: &[f32]| {
            json!(ParameterValues { shape: shape.to_vec(), values: values.to_vec() })
        };
        assert_eq!(of(&[2], &[1.0, 0.5]), json!([1.0, 0.5]));
        assert_eq!(of(&[2, 1], &[1.0, 0.5]), json!([[1.0], [0.5]]));
        assert_eq!(of(&[], &[2.0]), json!(2.0));
        assert_eq!(of(&[0, 3], &[]), json!([]));
        assert_eq!(of(&[2, 0], &[]), json!([[], []]));
    }
}
