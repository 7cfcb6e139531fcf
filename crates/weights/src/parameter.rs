//! Reads the first rows of a parameter, for clients that check the weights that are served.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use crate::checkpoint::Index;
use crate::error::ModelError;
use crate::manifest::{Manifest, Place};
use crate::model::ModelShape;
use crate::safe::SafeFile;
use crate::tensor::numbers_of;
use crate::vector::{VectorLayer, weight_files};

/// The data types that can be read, by their names in safetensors and GGUF.
const FLOATS: [&str; 4] = ["F64", "F32", "F16", "BF16"];
/// The largest number of values that are read.
const MOST_VALUES: usize = 1 << 20;

/// The first rows of a parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterRows {
    /// The shape of the result. The first dimension is at most the requested number of rows.
    pub shape: Vec<usize>,
    /// The values, with the last dimension contiguous.
    pub values: Vec<f32>,
}

/// The contiguous range of a file with a parameter's values.
struct Numbers {
    file: PathBuf,
    offset: u64,
    bytes: u64,
    format: String,
    shape: Vec<usize>,
}

/// Reads the first `rows` rows of a parameter, or the first values of a vector. `name` is the
/// parameter's name in the safetensors files, or its name in the model family, as in transformers.
/// `scores` and `layers` are as in [`Manifest::new`].
///
/// # Errors
/// There is no such parameter, it is not stored as plain floats, too many values are requested, or
/// a file can't be read. The message is one line for the client.
pub fn read_parameter(
    (format, files): (&str, &[PathBuf]),
    shape: Option<&ModelShape>,
    (scores, layers): (bool, &[VectorLayer]),
    name: &str,
    rows: usize,
) -> Result<ParameterRows, ModelError> {
    let stored = if format == "safetensors" { in_safetensors(files, name)? } else { None };
    let found = match (stored, shape) {
        (Some(found), _) => Some(found),
        (None, Some(shape)) => in_family((format, files), shape, (scores, layers), name)?,
        (None, None) => None,
    };
    let Numbers { file, offset, bytes, format, shape } =
        found.ok_or_else(|| ModelError::broken(format!("the model has no parameter {name}")))?;
    if !FLOATS.contains(&format.as_str()) {
        return Err(ModelError::broken(format!(
            "{name} is stored as {format}, and only plain floats are read: {}",
            FLOATS.join(", ")
        )));
    }
    let elements: usize = shape.iter().product();
    let all = shape.first().copied().unwrap_or(1);
    let rows = rows.min(all);
    let count = elements.checked_div(all).unwrap_or(0) * rows;
    if count > MOST_VALUES {
        return Err(ModelError::broken(format!(
            "{rows} rows of {name} have {count} values, and {MOST_VALUES} are read at most: ask for fewer"
        )));
    }
    let of_one = bytes.checked_div(elements as u64).unwrap_or(0);
    let mut read = vec![0; count * of_one as usize];
    let unreadable = |error| ModelError::unreadable(&file, &error);
    let opened = File::open(&file).map_err(unreadable)?;
    opened.read_exact_at(&mut read, offset).map_err(unreadable)?;
    let mut shape = shape;
    if let Some(first) = shape.first_mut() {
        *first = rows;
    }
    Ok(ParameterRows { shape, values: numbers_of(&format, &read)? })
}

/// Finds a tensor by its name in the files.
fn in_safetensors(files: &[PathBuf], name: &str) -> Result<Option<Numbers>, ModelError> {
    let index = Index::beside(files)?;
    for path in files {
        if !index.places(name, path) {
            continue;
        }
        let file = SafeFile::open(path)?;
        if let Some(tensor) = file.tensors.get(name) {
            return Ok(Some(Numbers {
                file: path.clone(),
                offset: tensor.offset,
                bytes: tensor.bytes as u64,
                format: format!("{:?}", tensor.dtype),
                shape: tensor.shape.clone(),
            }));
        }
    }
    Ok(None)
}

/// Finds a weight by its name in the family.
fn in_family(
    (format, files): (&str, &[PathBuf]),
    shape: &ModelShape,
    (scores, layers): (bool, &[VectorLayer]),
    name: &str,
) -> Result<Option<Numbers>, ModelError> {
    let manifest = Manifest::new(format, files, shape, scores, layers)?;
    let other = || {
        ModelError::broken(format!(
            "{name} is not stored as one tensor, and only plain floats are read"
        ))
    };
    match manifest.place_of(name) {
        None if manifest.has_matrix(name) => Err(other()),
        None => Ok(None),
        Some(Err(())) => Err(other()),
        Some(Ok(place)) => {
            let Place { file, offset, bytes, format, part, .. } = place;
            let shape = part.shape.clone();
            Ok(Some(Numbers {
                file: weight_files(files, layers)[*file].clone(),
                offset: *offset,
                bytes: *bytes,
                format: format.clone(),
                shape,
            }))
        }
    }
}

#[cfg(test)]
mod tests {
    use safetensors::Dtype;
    use safetensors::tensor::TensorView;

    use super::*;
    use crate::gguf::{GgufValue, gguf_bytes};

    fn read(files: &[PathBuf], name: &str, rows: usize) -> Result<ParameterRows, String> {
        let read = read_parameter(("safetensors", files), None, (false, &[]), name, rows);
        read.map_err(|error| error.to_string())
    }

    #[test]
    fn rows_of_tensors_are_read_by_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.safetensors");
        let floats: Vec<u8> =
            [1.0_f32, 2.0, 3.0, 4.0].iter().flat_map(|it| it.to_le_bytes()).collect();
        let large = vec![0; 4 << 21];
        let views = vec![
            ("matrix", TensorView::new(Dtype::F32, vec![2, 2], &floats).expect("a tensor")),
            ("vector", TensorView::new(Dtype::BF16, vec![2], &[0, 0x3f, 0, 0xbf]).expect("one")),
            ("codes", TensorView::new(Dtype::I32, vec![4], &floats).expect("a tensor")),
            ("large", TensorView::new(Dtype::F32, vec![2, 1 << 20], &large).expect("a tensor")),
        ];
        let bytes = safetensors::serialize(views, None).expect("a file");
        std::fs::write(&path, bytes).expect("written");
        let files = [path];
        let rows = |shape: &[usize], values: &[f32]| {
            Ok(ParameterRows { shape: shape.to_vec(), values: values.to_vec() })
        };
        assert_eq!(read(&files, "matrix", 1), rows(&[1, 2], &[1.0, 2.0]));
        assert_eq!(read(&files, "matrix", 9), rows(&[2, 2], &[1.0, 2.0, 3.0, 4.0]));
        assert_eq!(read(&files, "vector", 100), rows(&[2], &[0.5, -0.5]));
        assert_eq!(read(&files, "matrix", 0), rows(&[0, 2], &[]));
        assert!(read(&files, "large", 1).is_ok());
        let error = |name: &str| read(&files, name, 2).expect_err("no rows");
        assert_eq!(error("none"), "the model has no parameter none");
        assert!(error("codes").contains("codes is stored as I32, and only plain floats are read"));
        assert!(error("large").contains("ask for fewer"));
    }

    #[test]
    fn weights_of_gguf_have_the_names_of_the_family() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.gguf");
        let tensors: [(&str, &[u64]); 2] =
            [("output_norm.weight", &[4]), ("token_embd.weight", &[3, 4])];
        let fields: [(&str, GgufValue); 0] = [];
        std::fs::write(&path, gguf_bytes(&fields, &tensors)).expect("written");
        let config = serde_json::json!({"architectures": ["LlamaForCausalLM"], "vocab_size": 3, "hidden_size": 4,
            "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2});
        let shape = ModelShape::from_config(config.as_object().expect("an object"), false);
        let shape = shape.expect("a model");
        let read = |name| {
            read_parameter(
                ("gguf", std::slice::from_ref(&path)),
                Some(&shape),
                (false, &[]),
                name,
                2,
            )
        };
        assert_eq!(read("model.norm.weight").expect("floats").shape, [2]);
        assert_eq!(read("model.embed_tokens.weight").expect("floats").shape, [2, 4]);
        assert!(read("output_norm.weight").is_err());
    }
}
