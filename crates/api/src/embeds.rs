//! Prompts given as embeddings: safetensors files in base64. Each holds a matrix with one row per
//! position.

use std::fmt;
use std::ops::Range;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use forebay_protocol::Dtype;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};
use safetensors::{Dtype as Stored, SafeTensors};
use serde::de::{Deserialize, Deserializer, Error, IntoDeserializer, SeqAccess, Visitor};

use crate::error::ApiError;

/// The number of elements to convert at a time, so that they stay in the L1 cache.
const BATCH: usize = 16384;

/// The `prompt_embeds` parameter: the content of one or more safetensors files.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PromptEmbeds(Vec<EmbeddedPrompt>);

impl PromptEmbeds {
    /// Checks that each matrix has rows of `hidden_size` elements.
    ///
    /// # Errors
    /// [`ApiError::Invalid`] names the parameter at fault, `param` or one of its elements.
    pub fn check(mut self, param: &str, hidden_size: u32) -> Result<Vec<EmbeddedPrompt>, ApiError> {
        let is_one = self.0.len() == 1;
        for (index, prompt) in self.0.iter_mut().enumerate() {
            let path = if is_one { param.to_owned() } else { format!("{param}[{index}]") };
            let width = prompt.width;
            if width != hidden_size as usize {
                let reason =
                    format!("`{path}`: rows of {width} elements, and the model has {hidden_size}");
                return Err(ApiError::invalid(path, reason));
            }
            prompt.param = path;
        }
        Ok(self.0)
    }

    /// The number of prompts.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True if there are no prompts. Clients send empty values for parameters that they do not use.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// A prompt given as embeddings: a matrix with one row per position, and at least one row.
#[derive(Debug, Clone, PartialEq)]
pub struct EmbeddedPrompt {
    file: Vec<u8>,
    /// The bytes of the matrix within the file.
    data: Range<usize>,
    stored: Stored,
    rows: u32,
    width: usize,
    /// The name of the parameter with the prompt, for errors.
    param: String,
}

impl EmbeddedPrompt {
    /// Reads the header of a safetensors file.
    fn new(file: Vec<u8>) -> Result<Self, String> {
        let (header, metadata) = SafeTensors::read_metadata(&file)
            .map_err(|error| format!("not the bytes of safetensors: {error}"))?;
        let tensors = metadata.tensors();
        let Some(info) = tensors.values().next().filter(|_| tensors.len() == 1) else {
            return Err(format!("{} tensors, and one is wanted", tensors.len()));
        };
        let stored = info.dtype;
        if !matches!(stored, Stored::F32 | Stored::F16 | Stored::BF16) {
            return Err(format!("elements of type {stored:?}: F32, F16 and BF16 are taken"));
        }
        let &[rows, width] = info.shape.as_slice() else {
            let shape = &info.shape;
            return Err(format!("the shape is {shape:?}, and [positions, hidden size] is wanted"));
        };
        let Some(rows) = u32::try_from(rows).ok().filter(|&rows| rows > 0) else {
            return Err(format!("{rows} positions"));
        };
        // The file begins with 8 bytes that hold the length of the JSON header, then the header.
        let start = 8 + header;
        let data = start + info.data_offsets.0..start + info.data_offsets.1;
        Ok(Self { data, stored, rows, width, file, param: String::new() })
    }

    /// The number of rows, which are the positions of the prompt.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// The size of the matrix in bytes after conversion to the model's data type.
    pub fn bytes(&self, dtype: Dtype) -> usize {
        self.rows as usize * self.width * dtype.bytes()
    }

    /// Converts the matrix to the model's data type and passes it to `write` chunk by chunk.
    ///
    /// # Errors
    /// [`ApiError::Invalid`] if an element is not finite, or not representable in the model's data
    /// type. Also returns the errors of `write`.
    pub fn convert(
        &self,
        dtype: Dtype,
        mut write: impl FnMut(&[u8]) -> Result<(), ApiError>,
    ) -> Result<(), ApiError> {
        let mut buffers = Buffers::default();
        let mut done = 0;
        for bytes in self.data().chunks(BATCH * self.element_bytes()) {
            let converted = match (self.stored, dtype) {
                (Stored::F32, Dtype::Float32) | (Stored::BF16, Dtype::Bfloat16) => bytes,
                _ => buffers.convert(self.stored, bytes, dtype),
            };
            // Checked after conversion: a single-precision value may overflow half precision.
            if let Some(at) = first_not_finite(converted, dtype) {
                return Err(self.not_finite(done + at));
            }
            write(converted)?;
            done += bytes.len() / self.element_bytes();
        }
        Ok(())
    }

    fn data(&self) -> &[u8] {
        &self.file[self.data.clone()]
    }

    fn element_bytes(&self) -> usize {
        if self.stored == Stored::F32 { 4 } else { 2 }
    }

    fn not_finite(&self, at: usize) -> ApiError {
        let param = &self.param;
        let (row, column) = (at / self.width, at % self.width);
        let reason = format!("`{param}`: element {column} of position {row} is not finite");
        ApiError::invalid(param, reason)
    }
}

/// Buffers for converting a chunk of a matrix to another data type.
#[derive(Default)]
struct Buffers {
    wide: Vec<f32>,
    narrow: Vec<bf16>,
}

impl Buffers {
    /// Converts little-endian elements, which need not be aligned, to another data type.
    fn convert(&mut self, stored: Stored, bytes: &[u8], dtype: Dtype) -> &[u8] {
        self.wide.clear();
        match stored {
            Stored::F32 => self.wide.extend(bytes.chunks_exact(4).map(|element| {
                f32::from_le_bytes([element[0], element[1], element[2], element[3]])
            })),
            Stored::F16 => {
                let bits: Vec<u16> = halves(bytes).collect();
                self.wide.resize(bits.len(), 0.0);
                bits.reinterpret_cast::<f16>().convert_to_f32_slice(&mut self.wide);
            }
            // The header was checked, so the only other type is bfloat16.
            _ => self.wide.extend(halves(bytes).map(|bits| bf16::from_bits(bits).to_f32())),
        }
        match dtype {
            Dtype::Float32 => bytemuck::cast_slice(&self.wide),
            Dtype::Bfloat16 => {
                self.narrow.resize(self.wide.len(), bf16::ZERO);
                self.narrow.convert_from_f32_slice(&self.wide);
                let bits: &[u16] = self.narrow.reinterpret_cast();
                bytemuck::cast_slice(bits)
            }
        }
    }
}

fn halves(bytes: &[u8]) -> impl Iterator<Item = u16> {
    bytes.chunks_exact(2).map(|half| u16::from_le_bytes([half[0], half[1]]))
}

/// The index of the first element that is infinite or NaN. All exponent bits of such an element are
/// set. Float32 and bfloat16 both have these bits in the upper two bytes.
fn first_not_finite(elements: &[u8], dtype: Dtype) -> Option<usize> {
    const EXPONENT: u16 = 0x7f80;
    let size = dtype.bytes();
    let upper = |element: &[u8]| u16::from_le_bytes([element[size - 2], element[size - 1]]);
    // A pass without branches, after which nearly all inputs are known to be finite.
    let worst = match dtype {
        Dtype::Float32 => {
            elements.chunks_exact(4).fold(0, |worst, element| worst.max(upper(element) & EXPONENT))
        }
        Dtype::Bfloat16 => {
            elements.chunks_exact(2).fold(0, |worst, element| worst.max(upper(element) & EXPONENT))
        }
    };
    if worst < EXPONENT {
        return None;
    }
    elements.chunks_exact(size).position(|element| upper(element) & EXPONENT == EXPONENT)
}

impl<'de> Deserialize<'de> for EmbeddedPrompt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FileVisitor;
        impl Visitor<'_> for FileVisitor {
            type Value = EmbeddedPrompt;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("safetensors bytes in base64")
            }
            /// Decodes directly from the body, without a copy of the text.
            fn visit_str<E: Error>(self, text: &str) -> Result<EmbeddedPrompt, E> {
                // This decoder is several times as fast as the fallback, but reports no details of
                // an error.
                let file = base64_simd::STANDARD.decode_to_vec(text).or_else(|_| {
                    let not_base64 = |error| E::custom(format_args!("not base64: {error}"));
                    BASE64_STANDARD.decode(text).map_err(not_base64)
                })?;
                EmbeddedPrompt::new(file).map_err(E::custom)
            }
        }
        deserializer.deserialize_str(FileVisitor)
    }
}

impl<'de> Deserialize<'de> for PromptEmbeds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FilesVisitor;
        impl<'de> Visitor<'de> for FilesVisitor {
            type Value = PromptEmbeds;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("safetensors bytes in base64, or a list of them")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<PromptEmbeds, E> {
                if text.is_empty() {
                    return Ok(PromptEmbeds::default());
                }
                EmbeddedPrompt::deserialize(text.into_deserializer())
                    .map(|one| PromptEmbeds(vec![one]))
            }
            fn visit_unit<E>(self) -> Result<PromptEmbeds, E> {
                Ok(PromptEmbeds::default())
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<PromptEmbeds, A::Error> {
                let mut prompts = Vec::new();
                while let Some(prompt) = seq.next_element()? {
                    prompts.push(prompt);
                }
                Ok(PromptEmbeds(prompts))
            }
        }
        deserializer.deserialize_any(FilesVisitor)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use safetensors::tensor::TensorView;

    use super::*;
    use crate::limits::Bound;
    use crate::parameter::{Line, own, tabled};

    fn file(stored: Stored, shape: &[usize], data: &[u8]) -> Vec<u8> {
        let view = TensorView::new(stored, shape.to_vec(), data).unwrap();
        safetensors::serialize([("any", view)], None).unwrap()
    }

    /// A request whose prompts are embeddings.
    #[derive(Debug, Default)]
    struct Body {
        e: PromptEmbeds,
    }

    const LINES: &[Line<Body>] = &[own("e", Bound::Embeds(9), "", |r, v| v.put(&mut r.e))];

    tabled!(Body, "", [LINES]);

    fn parsed(files: &[&[u8]]) -> Result<PromptEmbeds, ApiError> {
        let texts: Vec<String> = files.iter().map(|file| BASE64_STANDARD.encode(file)).collect();
        let body = match texts.as_slice() {
            [one] => serde_json::json!({"e": one}),
            many => serde_json::json!({"e": many}),
        };
        Ok(crate::trial::request::<Body>(&body)?.e)
    }

    fn converted(prompt: &EmbeddedPrompt, dtype: Dtype) -> Result<Vec<u8>, ApiError> {
        let mut out = Vec::new();
        prompt.convert(dtype, |piece| {
            out.extend_from_slice(piece);
            Ok(())
        })?;
        Ok(out)
    }

    fn one(stored: Stored, shape: &[usize], data: &[u8]) -> EmbeddedPrompt {
        let embeds = parsed(&[&file(stored, shape, data)]).unwrap();
        embeds.check("e", shape[1] as u32).unwrap().remove(0)
    }

    fn refused(files: &[&[u8]]) -> (String, String) {
        match parsed(files).and_then(|embeds| embeds.check("e", 2)) {
            Err(ApiError::Invalid { param, reason }) => (param, reason),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_no_matrix_of_the_model_is_named() {
        let fine = file(Stored::F32, &[1, 2], &[0; 8]);
        let cases = [
            (b"no safetensors".to_vec(), "not the bytes of safetensors"),
            (fine[..fine.len() - 1].to_vec(), "not the bytes of safetensors"),
            (file(Stored::I32, &[1, 2], &[0; 8]), "type I32"),
            (file(Stored::F32, &[2], &[0; 8]), "the shape is [2], and [positions, hidden size]"),
            (file(Stored::F32, &[1, 1, 2], &[0; 8]), "the shape is [1, 1, 2]"),
            (file(Stored::F32, &[1, 3], &[0; 12]), "rows of 3 elements, and the model has 2"),
            (file(Stored::F32, &[0, 2], &[]), "0 positions"),
        ];
        for (bad, expected) in cases {
            let (param, reason) = refused(&[&bad]);
            assert_eq!(param, "e");
            assert!(reason.contains(expected), "{reason}");
            assert_eq!(refused(&[&fine, &bad]).0, "e[1]");
        }
        let view = || TensorView::new(Stored::F32, vec![1, 2], &[0; 8]).unwrap();
        let two = safetensors::serialize([("a", view()), ("b", view())], None).unwrap();
        assert!(refused(&[&two]).1.contains("2 tensors"));
        assert_eq!(refused(&[&fine, b""]).0, "e[1]");
    }

    #[test]
    fn wrong_types_and_texts_point_at_the_place() {
        for (body, expected) in [
            (r#"{"e":"*"}"#, "e"),
            (r#"{"e":["*"]}"#, "e[0]"),
            (r#"{"e":[1]}"#, "e[0]"),
            (r#"{"e":7}"#, "e"),
        ] {
            match crate::parse_request::<Body>(body.as_bytes(), |_| Ok(())) {
                Err(ApiError::Invalid { param, .. }) => assert_eq!(param, expected, "{body}"),
                other => panic!("{body}: {other:?}"),
            }
        }
    }

    #[test]
    fn empty_values_ask_for_nothing() {
        for json in ["null", "\"\"", "[]"] {
            assert!(serde_json::from_str::<PromptEmbeds>(json).unwrap().is_empty(), "{json}");
        }
    }

    #[test]
    fn the_first_element_that_is_not_finite_is_named() {
        let mut values = vec![1.0_f32; 3 * 5000];
        values[5000 + 7] = f32::NAN;
        let prompt = one(Stored::F32, &[3, 5000], bytemuck::cast_slice(&values));
        let error = converted(&prompt, Dtype::Float32).unwrap_err();
        assert_eq!(error.to_string(), "`e`: element 7 of position 1 is not finite");
        let large = one(Stored::F32, &[1, 1], &f32::MAX.to_le_bytes());
        assert!(converted(&large, Dtype::Float32).is_ok());
        assert!(
            converted(&large, Dtype::Bfloat16).is_err(),
            "the value becomes infinite in bfloat16"
        );
        let infinite = one(Stored::F16, &[1, 1], &f16::INFINITY.to_le_bytes());
        assert!(converted(&infinite, Dtype::Float32).is_err());
    }

    proptest! {
        /// Compares with converting one element at a time, for all six pairs of types and any
        /// length.
        #[test]
        fn elements_are_converted_one_by_one(
            values in proptest::collection::vec(-60000.0_f32..60000.0, 1..9000),
            stored in prop::sample::select(vec![Stored::F32, Stored::F16, Stored::BF16]),
        ) {
            let shape = [values.len(), 1];
            let (data, exact): (Vec<u8>, Vec<f32>) = match stored {
                Stored::F32 => (bytemuck::cast_slice(&values).to_vec(), values.clone()),
                Stored::F16 => {
                    let halves: Vec<f16> = values.iter().map(|&v| f16::from_f32(v)).collect();
                    let bytes = halves.iter().flat_map(|half| half.to_le_bytes()).collect();
                    (bytes, halves.iter().map(|half| half.to_f32()).collect())
                }
                _ => {
                    let halves: Vec<bf16> = values.iter().map(|&v| bf16::from_f32(v)).collect();
                    let bytes = halves.iter().flat_map(|half| half.to_le_bytes()).collect();
                    (bytes, halves.iter().map(|half| half.to_f32()).collect())
                }
            };
            let prompt = one(stored, &shape, &data);
            prop_assert_eq!(prompt.rows() as usize, values.len());
            let wide = converted(&prompt, Dtype::Float32).unwrap();
            prop_assert_eq!(wide.len(), prompt.bytes(Dtype::Float32));
            let expected: Vec<u8> = exact.iter().flat_map(|value| value.to_le_bytes()).collect();
            prop_assert!(wide == expected);
            let narrow = converted(&prompt, Dtype::Bfloat16).unwrap();
            prop_assert_eq!(narrow.len(), prompt.bytes(Dtype::Bfloat16));
            let round = |&value: &f32| bf16::from_f32(value).to_le_bytes();
            let expected: Vec<u8> = exact.iter().flat_map(round).collect();
            prop_assert!(narrow == expected);
        }
    }
}
