//! Packs matrices into the order that the kernels read.

use std::fmt;

use crate::codes::Format;
use crate::dispatch::{Number, Work};
use crate::dots::Dots;
use crate::element::{Bf16, Element};
use crate::pack::{pack, packed_len, padded_outputs};
use crate::processor::Level;
use crate::quantise::{self, quantised_bytes, stored_len};
use crate::tile::Kernel;

/// The element type of weights, activations and KV pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// 32 bits.
    Float32,
    /// The upper 16 bits of float32.
    Bfloat16,
}

impl Dtype {
    /// Bytes per element.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Float32 => 4,
            Self::Bfloat16 => 2,
        }
    }
}

/// The number format of a packed matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Storage {
    /// Elements of the model's type.
    Plain,
    /// 8 bits and a scale per output, quantised from the model's type.
    Int8,
    /// GGUF's blocks of 8 bits with a scale.
    Q8_0,
    /// GGUF's blocks of 4 bits with a scale.
    Q4_0,
    /// GGUF's blocks of 4 bits with a scale and a minimum.
    Q4_1,
    /// GGUF's blocks of 4-bit floats with a power of 2.
    Mxfp4,
    /// GGUF's blocks of 4 bits that index a table of integers, with a scale.
    Iq4Nl,
}

impl Storage {
    pub(crate) fn format(self) -> Option<Format> {
        match self {
            Self::Plain => None,
            Self::Int8 => Some(Format::Int8),
            Self::Q8_0 => Some(Format::Q8_0),
            Self::Q4_0 => Some(Format::Q4_0),
            Self::Q4_1 => Some(Format::Q4_1),
            Self::Mxfp4 => Some(Format::Mxfp4),
            Self::Iq4Nl => Some(Format::Iq4Nl),
        }
    }
}

/// The shape and format of a matrix to be packed, without its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packing {
    /// The number of rows.
    pub outputs: usize,
    /// The number of columns.
    pub inputs: usize,
    /// True if the first half of the outputs gates the second half.
    pub interleaved: bool,
    /// The model's type.
    pub dtype: Dtype,
    /// The number format of the packed matrix.
    pub storage: Storage,
}

/// The reason why a model can't be packed or computed, in one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfit(pub(crate) String);

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unfit {}

pub(crate) fn unfit<T>(what: impl Into<String>) -> Result<T, Unfit> {
    Err(Unfit(what.into()))
}

/// True if the memory is aligned for elements of this type.
pub(crate) fn aligned(bytes: &[u8], dtype: Dtype) -> bool {
    bytes.as_ptr().addr().is_multiple_of(dtype.bytes())
}

impl Packing {
    /// Bytes of the packed matrix.
    ///
    /// # Errors
    /// If the kernels do not support such a matrix.
    pub fn bytes(&self) -> Result<usize, Unfit> {
        let &Self { outputs, inputs, interleaved, dtype, storage } = self;
        let bytes = match storage.format() {
            None if inputs.is_multiple_of(2) && inputs > 0 => {
                packed_len(padded_outputs(outputs, interleaved), inputs) * dtype.bytes()
            }
            None => 0,
            Some(format) => quantised_bytes(format, outputs, inputs, interleaved),
        };
        match bytes {
            0 => unfit(format!("no kernel multiplies by {outputs} x {inputs} as {storage:?}")),
            bytes => Ok(bytes),
        }
    }

    /// Bytes of the matrix that [`Self::pack`] reads: elements of the model's type, or GGUF's
    /// blocks.
    #[must_use]
    pub fn source_bytes(&self) -> usize {
        match (self.storage, self.storage.format()) {
            (Storage::Plain | Storage::Int8, _) | (_, None) => {
                self.outputs * self.inputs * self.dtype.bytes()
            }
            (_, Some(format)) => stored_len(format, self.outputs, self.inputs),
        }
    }

    /// Packs the row-major `source`.
    ///
    /// # Errors
    /// If `source` does not have [`Self::source_bytes`], `packed` does not have [`Self::bytes`], or
    /// one of them is not aligned.
    pub fn pack(&self, source: &[u8], packed: &mut [u8]) -> Result<(), Unfit> {
        let &Self { outputs, inputs, interleaved, dtype, storage } = self;
        if source.len() != self.source_bytes() || packed.len() != self.bytes()? {
            return unfit(format!("{} bytes are no matrix of {outputs} x {inputs}", source.len()));
        }
        if !aligned(source, dtype) || !aligned(packed, dtype) {
            return unfit("a matrix at an odd address");
        }
        let shape = (outputs, inputs, interleaved);
        let whole = Whole { source: source.as_ptr(), shape, packed: packed.as_mut_ptr() };
        match (storage, storage.format()) {
            // SAFETY: both lengths and alignments were checked.
            (Storage::Plain, _) | (_, None) => unsafe { whole.pack(dtype) },
            // SAFETY: as above.
            (Storage::Int8, _) => unsafe { whole.quantise(dtype) },
            (_, Some(format)) => {
                quantise::pack_blocks(format, source, outputs, inputs, interleaved, packed);
            }
        }
        Ok(())
    }
}

/// A whole matrix of floats, and room for the packed matrix.
struct Whole {
    source: *const u8,
    /// The outputs, the inputs, and whether the matrix is interleaved.
    shape: (usize, usize, bool),
    packed: *mut u8,
}

impl Whole {
    /// Packs the matrix.
    ///
    /// # Safety
    /// `source` must be a whole matrix, and `packed` must have room for [`packed_len`] elements.
    unsafe fn pack(self, dtype: Dtype) {
        let level = Level::current();
        // SAFETY: the caller upholds the contract; the processor has the level.
        unsafe {
            match dtype {
                Dtype::Float32 => f32::compute(level, self),
                Dtype::Bfloat16 => Bf16::compute(level, self),
            }
        }
    }

    /// Quantises the matrix to int8 with one scale per output, and packs it.
    ///
    /// # Safety
    /// `source` must be a whole matrix, and `packed` must have room for [`quantised_bytes`], which
    /// must not be 0.
    unsafe fn quantise(self, dtype: Dtype) {
        unsafe fn typed<E: Element>(whole: &Whole) {
            let (outputs, inputs, interleaved) = whole.shape;
            let length = quantised_bytes(Format::Int8, outputs, inputs, interleaved);
            // SAFETY: the caller upholds the contract.
            unsafe {
                let packed = std::slice::from_raw_parts_mut(whole.packed, length);
                let source = std::slice::from_raw_parts(whole.source.cast::<E>(), outputs * inputs);
                quantise::quantise(source, outputs, inputs, interleaved, packed);
            }
        }
        // SAFETY: the caller upholds the contract.
        unsafe {
            match dtype {
                Dtype::Float32 => typed::<f32>(&self),
                Dtype::Bfloat16 => typed::<Bf16>(&self),
            }
        }
    }
}

impl<E: Element> Work<E> for Whole {
    unsafe fn compute<K: Kernel<E>, D: Dots>(self) {
        let (outputs, inputs, interleaved) = self.shape;
        let length = packed_len(padded_outputs(outputs, interleaved), inputs);
        // SAFETY: the contract of [`Whole::pack`] holds; the processor supports `K`.
        unsafe {
            let source = std::slice::from_raw_parts(self.source.cast::<E>(), outputs * inputs);
            let packed = std::slice::from_raw_parts_mut(self.packed.cast::<E>(), length);
            pack::<E, K>(source, outputs, inputs, interleaved, packed);
        }
    }
}
