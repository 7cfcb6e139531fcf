//! The number and data type of a model's parameters, read from the headers of its files.

use std::collections::HashMap;
use std::path::PathBuf;

use safetensors::Dtype;

use crate::error::ModelError;
use crate::gguf::{GgufFiles, GgufValue};
use crate::safe::SafeFile;

/// The names of llama.cpp's file types that mix several tensor types.
const MIXED: [(i64, &str); 23] = [
    (10, "Q2_K"),
    (11, "Q3_K_S"),
    (12, "Q3_K_M"),
    (13, "Q3_K_L"),
    (14, "Q4_K_S"),
    (15, "Q4_K_M"),
    (16, "Q5_K_S"),
    (17, "Q5_K_M"),
    (18, "Q6_K"),
    (19, "IQ2_XXS"),
    (20, "IQ2_XS"),
    (21, "Q2_K_S"),
    (22, "IQ3_XS"),
    (23, "IQ3_XXS"),
    (24, "IQ1_S"),
    (26, "IQ3_S"),
    (27, "IQ3_M"),
    (28, "IQ2_S"),
    (29, "IQ2_M"),
    (30, "IQ4_XS"),
    (31, "IQ1_M"),
    (36, "TQ1_0"),
    (38, "MXFP4_MOE"),
];

/// How a model's weights are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredWeights {
    /// The number of parameters; `None`: some values are packed, several per stored number.
    pub parameters: Option<u64>,
    /// The data type of most parameters, such as `BF16` or `Q4_K_M`.
    pub weight_type: String,
}

/// Reads the headers of a model's files. The file names show whether these are GGUF or safetensors.
///
/// # Errors
/// A file is missing or damaged.
pub fn stored_weights(files: &[PathBuf]) -> Result<StoredWeights, ModelError> {
    let mut counts: HashMap<String, u64> = HashMap::new();
    let mut packed = false;
    let mut mixed = None;
    let mut count = |name: String, shape: &[usize]| {
        let elements: u64 = shape.iter().map(|&size| size as u64).product();
        *counts.entry(name).or_default() += elements;
    };
    if files.iter().any(|file| file.extension().is_some_and(|end| end == "gguf")) {
        let opened = GgufFiles::open(files)?;
        let kind = opened.metadata.get("general.file_type").and_then(GgufValue::as_i64);
        mixed = MIXED.iter().find(|(number, _)| Some(*number) == kind).map(|(_, name)| *name);
        for tensor in &opened.tensors {
            count(tensor.kind.name().into(), &tensor.shape);
        }
    } else {
        for file in files {
            for tensor in SafeFile::open(file)?.tensors.values() {
                packed |= is_packed(tensor.dtype);
                // Tensors of 64-bit integers, such as position ids, are not weights.
                if tensor.dtype != Dtype::I64 {
                    count(tensor.dtype.to_string(), &tensor.shape);
                }
            }
        }
    }
    let parameters = (!packed).then(|| counts.values().sum());
    // Of equally frequent types, the one whose name sorts last wins.
    let most = counts.into_iter().max_by(|one, other| (one.1, &one.0).cmp(&(other.1, &other.0)));
    let weight_type =
        mixed.map_or_else(|| most.map_or_else(String::new, |(name, _)| name), Into::into);
    Ok(StoredWeights { parameters, weight_type })
}

/// True for the data types in which quantised checkpoints pack several values.
fn is_packed(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::I32 | Dtype::U32 | Dtype::U8)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use safetensors::tensor::TensorView;

    use super::*;
    use crate::gguf::gguf_bytes;

    fn read(folder: &Path, name: &str, bytes: &[u8]) -> StoredWeights {
        let path = folder.join(name);
        std::fs::write(&path, bytes).expect("written");
        stored_weights(&[path]).expect("a good file")
    }

    #[test]
    fn parameters_are_counted_and_the_most_frequent_type_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let bytes = [0; 4096];
        let view = |dtype: Dtype, shape: &[usize]| {
            let length = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            TensorView::new(dtype, shape.to_vec(), &bytes[..length]).expect("a tensor")
        };
        let safe = |tensors: Vec<(&str, TensorView<'_>)>| {
            let bytes = safetensors::serialize(tensors, None).expect("a file");
            read(folder.path(), "model.safetensors", &bytes)
        };
        let matrix = ("a", view(Dtype::BF16, &[30, 20]));
        let scales = ("b", view(Dtype::F32, &[400]));
        let buffer = ("c", view(Dtype::I64, &[1, 512]));
        let expected = |parameters, weight_type: &str| StoredWeights {
            parameters,
            weight_type: weight_type.into(),
        };
        assert_eq!(safe(vec![matrix.clone(), scales, buffer]), expected(Some(1000), "BF16"));
        let packed = ("c", view(Dtype::I32, &[10, 20]));
        assert_eq!(safe(vec![matrix, packed]), expected(None, "BF16"));

        let gguf = |kind: Option<i128>| {
            let field = kind.map(|kind| ("general.file_type", GgufValue::Whole(kind)));
            let fields: Vec<_> = field.into_iter().collect();
            let tensors: [(&str, &[u64]); 2] = [("one", &[2, 3]), ("two", &[4])];
            read(folder.path(), "model.gguf", &gguf_bytes(&fields, &tensors))
        };
        assert_eq!(gguf(None), expected(Some(10), "F32"));
        assert_eq!(gguf(Some(15)), expected(Some(10), "Q4_K_M"));
        assert_eq!(gguf(Some(0)), expected(Some(10), "F32"));
    }
}
