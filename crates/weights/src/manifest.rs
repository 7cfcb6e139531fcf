//! The locations of a model's weights in its files, for a hand that reads the files. The weights
//! have the family's names, so hands need no naming rules.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::checkpoint::blocks::own_tensors;
use crate::checkpoint::{Checkpoint, JoinedPart, Stored};
use crate::error::ModelError;
use crate::families::{TensorPart, Weight};
use crate::model::ModelShape;
use crate::quantised::StoredMatrix;
use crate::tensor::Tensor;
use crate::vector::{VectorLayer, weight_files};

/// The locations of all weights.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Manifest {
    /// Plain weights and GGUF blocks, by name, in the order of the files.
    weights: Vec<(String, Piece)>,
    /// The quantised matrices of safetensors files.
    matrices: Vec<CodedMatrix>,
    /// Biases of quantised matrices that are all zeros. The model may not have these biases.
    zero_biases: Vec<String>,
}

/// The location of a weight in the files.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
enum Piece {
    One(Place),
    /// Several tensors, each a stack of heads. Their rows are concatenated for each head.
    Joined {
        shape: Vec<usize>,
        joined: Vec<Place>,
    },
}

/// A range of a file, and how its values become a weight.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Place {
    /// The index of the file in the model's list.
    pub(crate) file: usize,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    /// The data type, under its name in safetensors or GGUF.
    pub(crate) format: String,
    /// For `MXFP4`, the range of the exponents; the main range contains the codes.
    #[serde(skip_serializing_if = "Option::is_none")]
    exponents: Option<Range>,
    #[serde(flatten)]
    pub(crate) part: MatrixPart,
}

/// A range of bytes of one file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Range {
    file: usize,
    offset: u64,
    bytes: u64,
}

/// Which part of a matrix is the weight. Fields that have no effect are omitted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct MatrixPart {
    /// The shape of the weight.
    pub(crate) shape: Vec<usize>,
    /// The shape of the whole matrix, if the weight is a selection of its rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    matrix: Option<[usize; 2]>,
    #[serde(default, skip_serializing_if = "is_false")]
    transposed: bool,
    /// The first row, after transposing, and the distance between blocks of rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    rows: Option<[usize; 2]>,
    /// The number of rows per block; omitted: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    width: Option<usize>,
    /// The number of heads whose two halves of rows are interleaved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pairs: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    times: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    plus: Option<f32>,
    /// True if the weight is the logarithm of the values, after `times` and `plus` are applied.
    #[serde(default, skip_serializing_if = "is_false")]
    log: bool,
}

impl MatrixPart {
    /// Describes a weight of this shape. `chooses` is true if the range of the file also contains
    /// rows that do not belong to the weight.
    fn new(part: &TensorPart, shape: Vec<usize>, chooses: bool) -> Self {
        let one = |value: f32, usual: f32| (value != usual).then_some(value);
        Self {
            shape,
            matrix: chooses.then_some(part.matrix),
            transposed: part.transposed,
            rows: chooses.then_some([part.first, part.step]),
            width: (chooses && part.width != 1).then_some(part.width),
            pairs: part.pairs,
            times: one(part.times, 1.0),
            plus: one(part.plus, 0.0),
            log: part.log,
        }
    }

    /// Returns a function that maps the index of a row of the weight to the index of that row in
    /// the range of the file.
    pub(crate) fn chosen_rows(&self) -> impl Fn(usize) -> usize {
        let ([first, step], width) = (self.rows.unwrap_or([0, 1]), self.width.unwrap_or(1));
        move |row| first + row / width * step + row % width
    }
}

impl Place {
    /// True if the weight consists of rows of the range, with unchanged values.
    pub(crate) fn is_of_rows(&self) -> bool {
        let MatrixPart { transposed, times, plus, log, .. } = &self.part;
        self.exponents.is_none() && !transposed && times.or(*plus).is_none() && !log
    }

    /// True if the weight is exactly the range.
    fn is_plain(&self) -> bool {
        self.is_of_rows() && self.part.rows.is_none() && self.part.pairs.is_none()
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_false(value: &bool) -> bool {
    !value
}

/// A quantised matrix, and its tensors by name suffix. The codes come first.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct CodedMatrix {
    /// The name of the weight, or of the matrix if the matrix contains several weights.
    name: String,
    shape: [usize; 2],
    /// How the codes are stored.
    format: String,
    parts: Vec<(&'static str, Place)>,
    /// The weights in the matrix; omitted: the matrix is a single weight.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    weights: Vec<(String, MatrixPart)>,
}

impl Manifest {
    /// Finds the weights of a model in its files, and the weights of layers after pooling that have
    /// separate files. `scores` is true if an encoder has layers that compute scores. Files are
    /// numbered as in [`weight_files`].
    ///
    /// # Errors
    /// A file can't be read, is damaged, or has a tensor that the model does not have.
    pub fn new(
        format: &str,
        files: &[PathBuf],
        shape: &ModelShape,
        scores: bool,
        layers: &[VectorLayer],
    ) -> Result<Self, ModelError> {
        let checkpoint = match shape {
            ModelShape::Decoder(shape) => Checkpoint::open(format, files, shape)?,
            ModelShape::Encoder(shape) if format == "gguf" => {
                return Err(ModelError::broken(format!(
                    "{} is read from safetensors only",
                    shape.architecture
                )));
            }
            ModelShape::Encoder(shape) => Checkpoint::of_bert(files, shape, scores)?,
        };
        let weights = checkpoint.names().iter().map(|name| {
            let piece = match checkpoint.stored_as(name)? {
                Stored::One(tensor, part) => {
                    let shape = checkpoint.shapes()[name].clone();
                    Piece::One(place(name, tensor, part, shape, files)?)
                }
                Stored::Joined(parts) => joined(name, parts, files)?,
            };
            Ok((name.clone(), piece))
        });
        let weights = weights.chain(dense_weights(files, layers)?.into_iter().map(Ok));
        let matrices = checkpoint.quantised().iter().map(|matrix| coded(matrix, files));
        Ok(Self {
            weights: weights.collect::<Result<_, ModelError>>()?,
            matrices: matrices.collect::<Result<_, ModelError>>()?,
            zero_biases: checkpoint.zero_biases()?,
        })
    }

    /// Returns the file range of a weight. `Err`: the values in the file are not contiguous, or are
    /// changed on reading. `None`: there is no such weight, or it belongs to a quantised matrix.
    pub(crate) fn place_of(&self, name: &str) -> Option<Result<&Place, ()>> {
        let (_, piece) = self.weights.iter().find(|(other, _)| other == name)?;
        Some(match piece {
            Piece::One(place) if place.is_plain() => Ok(place),
            Piece::One(_) | Piece::Joined { .. } => Err(()),
        })
    }

    /// True if a quantised matrix has this name or contains a weight of this name.
    pub(crate) fn has_matrix(&self, name: &str) -> bool {
        self.matrices.iter().any(|matrix| {
            matrix.name == name || matrix.weights.iter().any(|(other, _)| other == name)
        })
    }

    /// True if there is a weight of this name, plain or quantised.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.weights.iter().any(|(other, _)| other == name) || self.has_matrix(name)
    }

    /// Keeps only the weights whose names start with `prefix`.
    pub(crate) fn below(mut self, prefix: &str) -> Self {
        self.weights.retain(|(name, _)| name.starts_with(prefix));
        self.matrices.retain(|matrix| {
            let mut names = matrix.weights.iter().map(|(name, _)| name);
            matrix.name.starts_with(prefix) || names.any(|name| name.starts_with(prefix))
        });
        self.zero_biases.retain(|name| name.starts_with(prefix));
        self
    }

    /// True if there are no weights.
    pub(crate) fn is_empty(&self) -> bool {
        self.weights.is_empty() && self.matrices.is_empty()
    }

    /// Converts the manifest to JSON for a hand.
    ///
    /// # Panics
    /// Never: every field can be written as JSON.
    #[must_use]
    pub fn to_json(&self) -> Value {
        serde_json::to_value(self).expect("all of it is JSON")
    }
}

/// Returns the weights of layers that have separate files.
fn dense_weights(
    files: &[PathBuf],
    layers: &[VectorLayer],
) -> Result<Vec<(String, Piece)>, ModelError> {
    let files = weight_files(files, layers);
    let mut found = Vec::new();
    for layer in layers {
        for (name, tensor) in own_tensors(layer)? {
            let (shape, part) = (tensor.shape().to_vec(), TensorPart::whole(tensor.shape()));
            let place = place(&name, &tensor, &part, shape, &files)?;
            found.push((name, Piece::One(place)));
        }
    }
    Ok(found)
}

fn number_of(path: &Path, files: &[PathBuf]) -> usize {
    files.iter().position(|file| file == path).unwrap_or_default()
}

fn joined(name: &str, parts: &[JoinedPart], files: &[PathBuf]) -> Result<Piece, ModelError> {
    let rows = parts.iter().map(|(.., shape)| shape[0] * shape[1]).sum();
    let columns = parts.first().map_or(0, |(.., shape)| shape[2]);
    let places = parts.iter().map(|(tensor, part, shape)| {
        let whole = TensorPart { transposed: false, ..*part };
        let mut found = place(name, tensor, &whole, shape.clone(), files)?;
        found.part.transposed = part.transposed;
        Ok(found)
    });
    let joined = places.collect::<Result<Vec<Place>, ModelError>>()?;
    Ok(Piece::Joined { shape: vec![rows, columns], joined })
}

fn coded(stored: &StoredMatrix, files: &[PathBuf]) -> Result<CodedMatrix, ModelError> {
    let (matrix, weights) = (&stored.matrix, &stored.weights);
    let parts = stored.parts.iter().map(|(end, (file, tensor))| {
        let tensor = Tensor::Safe(file.clone(), tensor.clone());
        let shape = tensor.shape();
        let place = place(&matrix.name, &tensor, &TensorPart::whole(shape), shape.to_vec(), files)?;
        Ok((*end, place))
    });
    let one = match &weights[..] {
        [weight] if weight.part.is_whole(&matrix.shape) => Some(weight.name.clone()),
        _ => None,
    };
    let of_weight = |weight: &Weight| {
        let part = MatrixPart::new(&weight.part, weight.shape.clone(), true);
        (weight.name.clone(), part)
    };
    Ok(CodedMatrix {
        shape: matrix.shape,
        format: matrix.kind.clone(),
        parts: parts.collect::<Result<_, ModelError>>()?,
        weights: if one.is_some() { Vec::new() } else { weights.iter().map(of_weight).collect() },
        name: one.unwrap_or_else(|| matrix.name.clone()),
    })
}

/// Returns the location of a weight with this shape.
pub(crate) fn place(
    name: &str,
    tensor: &Tensor,
    part: &TensorPart,
    shape: Vec<usize>,
    files: &[PathBuf],
) -> Result<Place, ModelError> {
    let (path, offset) = match tensor {
        Tensor::Safe(file, tensor) => (file.path(), tensor.offset),
        Tensor::Gguf(tensor) => (&*tensor.path, tensor.offset),
        Tensor::Mxfp4(stack) => (stack.codes.0.path(), stack.codes.1.offset),
    };
    let [rows, columns] = part.matrix;
    let row_bytes = tensor.bytes_of(name, columns)? as u64;
    let chooses = part.transposed || part.step != 1;
    let (first, read) = if chooses { (0, rows) } else { (part.first, part.rows) };
    let exponents = match tensor {
        Tensor::Mxfp4(stack) => {
            let (file, tensor) = &stack.exponents;
            let of_row = tensor.shape.last().copied().unwrap_or_default() as u64;
            Some(Range {
                file: number_of(file.path(), files),
                offset: tensor.offset + (part.base + first) as u64 * of_row,
                bytes: read as u64 * of_row,
            })
        }
        Tensor::Safe(..) | Tensor::Gguf(_) => None,
    };
    Ok(Place {
        file: number_of(path, files),
        offset: offset + (part.base + first) as u64 * row_bytes,
        bytes: read as u64 * row_bytes,
        format: tensor.type_name(),
        exponents,
        part: MatrixPart::new(part, shape, chooses),
    })
}
