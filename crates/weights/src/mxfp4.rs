//! `MXFP4` in safetensors: a stack of matrices of 4-bit floats, and a stack of exponents, one per
//! 32 floats (Open Compute Project 2023), in the layout of OpenAI's gpt-oss.

use std::sync::Arc;

use safetensors::Dtype;

use crate::error::ModelError;
use crate::gguf::TensorType;
use crate::safe::{SafeFile, SafeTensor};

/// The suffixes of the names of both tensors.
pub(crate) const CODES: &str = "_blocks";
pub(crate) const EXPONENTS: &str = "_scales";
/// The number of floats per exponent, and the number of bytes of their codes.
const SHARED: usize = 32;
const CODE_BYTES: usize = SHARED / 2;

/// An open file, and a tensor's location in the file.
pub(crate) type Placed = (Arc<SafeFile>, SafeTensor);

/// The two tensors of a stack.
pub(crate) struct Mxfp4Stack {
    pub(crate) codes: Placed,
    pub(crate) exponents: Placed,
    /// The shape in floats; the columns of each matrix are the last dimension.
    pub(crate) shape: Vec<usize>,
}

impl Mxfp4Stack {
    /// Combines the tensors `name_blocks` and `name_scales`.
    ///
    /// # Errors
    /// The tensors do not match.
    pub(crate) fn new(name: &str, codes: Placed, exponents: Placed) -> Result<Self, ModelError> {
        let (of_codes, of_exponents) = (&codes.1, &exponents.1);
        let fits = of_codes.dtype == Dtype::U8
            && of_exponents.dtype == Dtype::U8
            && of_codes.shape.len() >= 3
            && of_codes.shape.last() == Some(&CODE_BYTES)
            && of_codes.shape[..of_codes.shape.len() - 1] == of_exponents.shape[..];
        if !fits {
            return Err(ModelError::broken(format!(
                "{name}{CODES} of {:?} and {name}{EXPONENTS} of {:?} are no blocks of MXFP4",
                of_codes.shape, of_exponents.shape
            )));
        }
        let mut shape = of_exponents.shape.clone();
        if let Some(columns) = shape.last_mut() {
            *columns *= SHARED;
        }
        Ok(Self { codes, exponents, shape })
    }

    /// Reads whole blocks, converted to GGUF's layout, starting at an element that is the first of
    /// a block.
    pub(crate) fn read(&self, first: usize, to: &mut [u8]) -> Result<(), ModelError> {
        let (_, block) = TensorType::Mxfp4.block();
        let (first, count) = (first / SHARED, to.len() / block);
        let read = |(file, tensor): &Placed, each: usize| {
            let mut bytes = vec![0; count * each];
            file.read(tensor.offset + (first * each) as u64, &mut bytes).map(|()| bytes)
        };
        let (codes, exponents) = (read(&self.codes, CODE_BYTES)?, read(&self.exponents, 1)?);
        let stored = codes.chunks_exact(CODE_BYTES).zip(exponents);
        for (to, (codes, exponent)) in to.chunks_exact_mut(block).zip(stored) {
            to[0] = exponent;
            // In safetensors, a byte holds two neighbours; in GGUF, element `i` of both halves of
            // the block.
            let code = |at: usize| codes[at / 2] >> (at % 2 * 4) & 15;
            for (at, to) in to[1..].iter_mut().enumerate() {
                *to = code(at) | code(at + CODE_BYTES) << 4;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use safetensors::tensor::TensorView;

    use super::*;
    use crate::gguf::dequantise;

    #[test]
    fn neighbours_are_halves_of_a_byte() {
        let folder = tempfile::tempdir().expect("a folder");
        // Two rows of two blocks, with the codes 1, 2, 3, and so on.
        let codes: Vec<u8> = (0..64).map(|at: u8| (at % 8) | ((at / 8) << 4)).collect();
        let exponents = [127, 128, 0, 130];
        let tensors = [
            ("m_blocks", TensorView::new(Dtype::U8, vec![1, 2, 2, 16], &codes)),
            ("m_scales", TensorView::new(Dtype::U8, vec![1, 2, 2], &exponents)),
        ];
        let tensors = tensors.map(|(name, view)| (name, view.expect("a tensor")));
        let path = folder.path().join("m.safetensors");
        std::fs::write(&path, safetensors::serialize(tensors, None).expect("a file"))
            .expect("written");
        let file = Arc::new(SafeFile::open(&path).expect("a file"));
        let placed = |name: &str| (file.clone(), file.tensors[name].clone());
        let stack = Mxfp4Stack::new("m", placed("m_blocks"), placed("m_scales")).expect("a stack");
        assert_eq!(stack.shape, [1, 2, 64]);
        let mut blocks = vec![0; 2 * 17];
        stack.read(64, &mut blocks).expect("the second row");
        let mut found = vec![0.0; 64];
        dequantise(TensorType::Mxfp4, &blocks, &mut found);
        const FLOATS: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for (at, found) in found.into_iter().enumerate() {
            let byte = codes[32 + at / 2];
            let code = usize::from(byte >> (at % 2 * 4) & 15);
            let power = if at < 32 { 2.0_f32.powi(-127) } else { 8.0 };
            let value = FLOATS[code % 8] * power;
            assert_eq!(found, if code < 8 { value } else { -value }, "{at}");
        }
        let other = Mxfp4Stack::new("m", placed("m_scales"), placed("m_blocks"));
        assert!(other.is_err_and(|error| error.to_string().contains("m_blocks of [1, 2, 2]")));
    }
}
