//! The quantised matrices of a checkpoint, and their tensors, which may be in different files.

use std::collections::BTreeMap;

use super::codes::PER_WORD;
use super::scheme::{CodePacking, Int4Storage, Quantisation, Scheme};
use crate::error::ModelError;

/// The data types of 8-bit floats, by their names in safetensors.
const EIGHT_BITS: [&str; 2] = ["F8_E4M3", "F8_E5M2"];
/// The suffixes of the names of scales of 8-bit floats.
const SCALES: [&str; 2] = ["weight_scale_inv", "weight_scale"];
/// Scales of activations, keys and values. They are not used: activations are measured at each
/// step, and keys and values have the model's data type.
const NOT_READ: [&str; 6] =
    ["input_scale", "output_scale", "k_scale", "v_scale", "q_scale", "kv_scale"];
/// The accepted data types of scales.
const FLOATS: &[&str] = &["F32", "F16", "BF16", "F64"];
/// The accepted data types of group indices, and of a stored shape.
const INTEGERS: &[&str] = &["I32", "I64"];
/// The data type of words of codes or zero points.
const WORDS: &[&str] = &["I32"];

/// The data types and shapes of tensors, by name.
pub(crate) type Headers = BTreeMap<String, (String, Vec<usize>)>;

/// How the codes of a matrix are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CodeStorage {
    /// 8-bit floats, as in [`Scheme::Fp8`].
    Fp8 { block: Option<[usize; 2]> },
    /// 4-bit integers.
    Int4(Int4Storage),
}

/// A quantised matrix in the files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct QuantisedMatrix {
    /// The name of the weight: the module's name plus `.weight`.
    pub(crate) name: String,
    /// The number of rows, and the number of inputs.
    pub(crate) shape: [usize; 2],
    /// The data type of the codes.
    pub(crate) kind: String,
    pub(crate) storage: CodeStorage,
    /// The name suffixes of its tensors after the module's name. The codes come first.
    pub(crate) ends: Vec<&'static str>,
}

/// The quantised matrices of a checkpoint.
#[derive(Debug, Default)]
pub(crate) struct QuantisedParts {
    pub(crate) matrices: Vec<QuantisedMatrix>,
    /// Tensors that belong to quantised matrices but are not read.
    pub(crate) not_read: Vec<String>,
    /// Biases of quantised matrices. GPTQ's tools write biases of zeros for models without biases.
    pub(crate) biases: Vec<String>,
}

impl QuantisedParts {
    /// Finds the quantised matrices in the tensors' headers. If `stored` is `None`, the checkpoint
    /// must not contain 8-bit floats.
    ///
    /// # Errors
    /// Tensors of a matrix are missing, or do not match.
    pub(crate) fn find(
        headers: &Headers,
        stored: Option<&Quantisation>,
    ) -> Result<Self, ModelError> {
        let Some(stored) = stored else {
            let eight = headers.iter().find(|(_, (kind, _))| EIGHT_BITS.contains(&kind.as_str()));
            return match eight {
                None => Ok(Self::default()),
                Some((name, _)) => Err(ModelError::broken(format!(
                    "{name} has 8-bit floats, and the checkpoint has no quantization_config"
                ))),
            };
        };
        let matrices = match stored.scheme {
            Scheme::Fp8 { block } => floats(headers, block)?,
            Scheme::Int4(scheme) => integers(headers, scheme)?,
            // Experts in MXFP4 are stacks, without separate tensors per matrix.
            Scheme::Mxfp4 => Vec::new(),
        };
        let not_read = headers.keys().filter(|name| NOT_READ.contains(&split(name).1));
        let biases = matrices.iter().filter(|_| stored.method == "gptq");
        let biases = biases.map(|matrix| format!("{}.bias", split(&matrix.name).0));
        Ok(Self {
            not_read: not_read.cloned().collect(),
            biases: biases.filter(|name| headers.contains_key(name)).collect(),
            matrices,
        })
    }
}

/// Splits a tensor's name into the module and the suffix.
fn split(name: &str) -> (&str, &str) {
    name.rsplit_once('.').unwrap_or(("", name))
}

fn floats(
    headers: &Headers,
    block: Option<[usize; 2]>,
) -> Result<Vec<QuantisedMatrix>, ModelError> {
    let mut found = Vec::new();
    for (name, (kind, shape)) in headers {
        if !EIGHT_BITS.contains(&kind.as_str()) {
            continue;
        }
        let (module, end) = split(name);
        let scale = SCALES.into_iter().find(|end| headers.contains_key(&format!("{module}.{end}")));
        let Some(scale) = scale.filter(|_| end == "weight") else {
            let wanted = SCALES[usize::from(block.is_none())];
            return Err(ModelError::broken(format!(
                "{name} has 8-bit floats, and the checkpoint has no {module}.{wanted} for it"
            )));
        };
        let (scale_kind, has) = &headers[&format!("{module}.{scale}")];
        let fitting: Vec<Vec<usize>> = match (block, &shape[..]) {
            (Some([rows, columns]), &[all_rows, all_columns]) => {
                vec![vec![all_rows.div_ceil(rows), all_columns.div_ceil(columns)]]
            }
            (None, &[rows, _]) => vec![vec![rows, 1], vec![rows], vec![1], vec![], vec![1, 1]],
            _ => Vec::new(),
        };
        let (&[rows, inputs], true) = (&shape[..], fitting.contains(has)) else {
            let wanted = fitting.first().cloned().unwrap_or_default();
            return Err(ModelError::broken(format!(
                "{module}.{scale} is {has:?}, and {name} of {shape:?} wants {wanted:?}"
            )));
        };
        check_type(module, scale, scale_kind, FLOATS)?;
        found.push(QuantisedMatrix {
            name: name.clone(),
            shape: [rows, inputs],
            kind: kind.clone(),
            storage: CodeStorage::Fp8 { block },
            ends: vec!["weight", scale],
        });
    }
    Ok(found)
}

fn check_type(module: &str, end: &str, has: &str, read: &[&str]) -> Result<(), ModelError> {
    if read.contains(&has) {
        return Ok(());
    }
    Err(ModelError::broken(format!(
        "{module}.{end} is of the type {has}, and {} is read",
        read.join(", ")
    )))
}

fn integers(headers: &Headers, scheme: Int4Storage) -> Result<Vec<QuantisedMatrix>, ModelError> {
    let codes = match scheme.packing {
        CodePacking::CompressedTensors => "weight_packed",
        CodePacking::Gptq | CodePacking::Awq => "qweight",
    };
    let modules = headers.keys().map(|name| split(name)).filter(|&(_, end)| end == codes);
    modules.map(|(module, _)| Module { headers, module, codes }.matrix(scheme)).collect()
}

/// A tensor that a matrix needs: the suffix of its name, its shape, and the accepted data types.
type WantedTensor = (&'static str, Vec<usize>, &'static [&'static str]);

/// A module with a quantised matrix.
struct Module<'a> {
    headers: &'a Headers,
    module: &'a str,
    codes: &'static str,
}

impl Module<'_> {
    fn tensor(&self, end: &str) -> Option<&(String, Vec<usize>)> {
        self.headers.get(&format!("{}.{end}", self.module))
    }

    fn matrix(&self, scheme: Int4Storage) -> Result<QuantisedMatrix, ModelError> {
        let (module, codes) = (self.module, self.codes);
        let required: &[&str] = match scheme.packing {
            CodePacking::CompressedTensors => &["weight_packed", "weight_scale", "weight_shape"],
            CodePacking::Gptq | CodePacking::Awq => &["qweight", "qzeros", "scales"],
        };
        if let Some(end) = required.iter().find(|end| self.tensor(end).is_none()) {
            return Err(ModelError::broken(format!(
                "{module}.{codes} is quantised, and the checkpoint has no {module}.{end} for it"
            )));
        }
        let (kind, shape) = self.tensor(codes).cloned().unwrap_or_default();
        let &[first, second] = &shape[..] else {
            return Err(ModelError::broken(format!(
                "{module}.{codes} is {shape:?}, and codes of a matrix are wanted"
            )));
        };
        let groups = |inputs: usize| inputs.div_ceil(scheme.group.unwrap_or(inputs).max(1));
        let words = |count: usize| {
            count.checked_mul(PER_WORD).ok_or_else(|| {
                ModelError::broken(format!("{module}.{codes} is {shape:?}, larger than any memory"))
            })
        };
        let (matrix, wanted): ([usize; 2], Vec<WantedTensor>) = match scheme.packing {
            CodePacking::Gptq => {
                let (inputs, rows) = (words(first)?, second);
                let groups = groups(inputs);
                if !rows.is_multiple_of(PER_WORD) {
                    return Err(ModelError::broken(format!(
                        "{module}.{codes} has {rows} outputs, and zero points are words of {PER_WORD}"
                    )));
                }
                let wanted = vec![
                    ("qweight", vec![first, rows], WORDS),
                    ("qzeros", vec![groups, rows / PER_WORD], WORDS),
                    ("scales", vec![groups, rows], FLOATS),
                    ("g_idx", vec![inputs], INTEGERS),
                ];
                ([rows, inputs], wanted)
            }
            CodePacking::Awq => {
                let (inputs, rows) = (first, words(second)?);
                let groups = groups(inputs);
                let wanted = vec![
                    ("qweight", vec![inputs, second], WORDS),
                    ("qzeros", vec![groups, second], WORDS),
                    ("scales", vec![groups, rows], FLOATS),
                ];
                ([rows, inputs], wanted)
            }
            CodePacking::CompressedTensors => {
                let (rows, inputs) = (first, words(second)?);
                let groups = groups(inputs);
                let wanted = vec![
                    ("weight_packed", vec![rows, second], WORDS),
                    ("weight_scale", vec![rows, groups], FLOATS),
                    ("weight_shape", vec![2], INTEGERS),
                    ("weight_zero_point", vec![rows.div_ceil(PER_WORD), groups], WORDS),
                    ("weight_g_idx", vec![inputs], INTEGERS),
                ];
                ([rows, inputs], wanted)
            }
        };
        let mut ends = Vec::new();
        for (end, size, types) in wanted {
            // Missing required tensors were reported before, so a missing tensor is optional.
            let Some((of_tensor, has)) = self.tensor(end) else { continue };
            if *has != size {
                return Err(ModelError::broken(format!(
                    "{module}.{end} is {has:?}, and a matrix of {matrix:?} in such groups wants {size:?}"
                )));
            }
            if end == codes && of_tensor != "I32" {
                return Err(ModelError::broken(format!(
                    "{module}.{codes} is of the type {kind}, and 4-bit codes are read of words (I32)"
                )));
            }
            check_type(module, end, of_tensor, types)?;
            ends.push(end);
        }
        let (name, storage) = (format!("{module}.weight"), CodeStorage::Int4(scheme));
        Ok(QuantisedMatrix { name, shape: matrix, kind, storage, ends })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The name, data type and shape of each tensor.
    type Tensors<'a> = &'a [(&'a str, &'a str, &'a [usize])];

    fn headers(tensors: Tensors<'_>) -> Headers {
        let entry = |&(name, kind, shape): &(&str, &str, &[usize])| {
            (name.to_owned(), (kind.to_owned(), shape.to_vec()))
        };
        tensors.iter().map(entry).collect()
    }

    fn stored(method: &str, scheme: Scheme) -> Quantisation {
        Quantisation { method: method.into(), scheme, left_out: Vec::new() }
    }

    fn int4(packing: CodePacking) -> Scheme {
        Scheme::Int4(Int4Storage { packing, group: Some(16), ordered: false, less_one: false })
    }

    #[test]
    fn parts_of_matrices_are_found() {
        let blocks = stored("fp8", Scheme::Fp8 { block: Some([2, 16]) });
        let tensors = headers(&[
            ("a.weight", "F8_E4M3", &[3, 32]),
            ("a.weight_scale_inv", "F32", &[2, 2]),
            ("a.input_scale", "F32", &[]),
            ("norm.weight", "BF16", &[32]),
        ]);
        let found = QuantisedParts::find(&tensors, Some(&blocks)).expect("a checkpoint");
        assert_eq!(found.matrices[0].ends, ["weight", "weight_scale_inv"]);
        assert_eq!((found.matrices.len(), found.not_read), (1, vec!["a.input_scale".to_owned()]));
        let gptq = headers(&[
            ("a.qweight", "I32", &[4, 8]),
            ("a.qzeros", "I32", &[2, 1]),
            ("a.scales", "F16", &[2, 8]),
            ("a.g_idx", "I32", &[32]),
            ("a.bias", "F16", &[8]),
        ]);
        let wanted = stored("gptq", int4(CodePacking::Gptq));
        let found = QuantisedParts::find(&gptq, Some(&wanted)).expect("a checkpoint");
        assert_eq!((&found.matrices[0].name[..], found.matrices[0].shape), ("a.weight", [8, 32]));
        assert_eq!(found.matrices[0].ends, ["qweight", "qzeros", "scales", "g_idx"]);
        assert_eq!(found.biases, ["a.bias"]);
        let packed = headers(&[
            ("a.weight_packed", "I32", &[8, 4]),
            ("a.weight_scale", "F16", &[8, 2]),
            ("a.weight_shape", "I64", &[2]),
        ]);
        let wanted = stored("compressed-tensors", int4(CodePacking::CompressedTensors));
        let found = QuantisedParts::find(&packed, Some(&wanted)).expect("a checkpoint");
        assert_eq!(found.matrices[0].shape, [8, 32]);
    }

    #[test]
    fn parts_that_are_missing_or_do_not_fit_are_named() {
        let fp8 = stored("fp8", Scheme::Fp8 { block: None });
        let awq = stored("awq", int4(CodePacking::Awq));
        let alone: &[_] = &[("a.weight", "F8_E4M3", &[4, 32][..])];
        let cases: [(Tensors<'_>, Option<&Quantisation>, &str); 6] = [
            (alone, None, "no quantization_config"),
            (alone, Some(&fp8), "no a.weight_scale for it"),
            (
                &[("a.weight", "F8_E4M3", &[4, 32]), ("a.weight_scale", "F32", &[3])],
                Some(&fp8),
                "a.weight_scale is [3]",
            ),
            (
                &[("a.qweight", "I32", &[32, 1]), ("a.scales", "F16", &[2, 8])],
                Some(&awq),
                "no a.qzeros",
            ),
            (
                &[
                    ("a.qweight", "I32", &[32, 1]),
                    ("a.qzeros", "I32", &[2, 1]),
                    ("a.scales", "F16", &[1, 8]),
                ],
                Some(&awq),
                "a.scales is [1, 8]",
            ),
            (
                &[
                    ("a.qweight", "I64", &[32, 1]),
                    ("a.qzeros", "I32", &[2, 1]),
                    ("a.scales", "F16", &[2, 8]),
                ],
                Some(&awq),
                "type I64",
            ),
        ];
        for (tensors, stored, why) in cases {
            let found = QuantisedParts::find(&headers(tensors), stored).map(|it| it.matrices);
            assert!(found.as_ref().is_err_and(|it| it.to_string().contains(why)), "{found:?}");
        }
    }
}
