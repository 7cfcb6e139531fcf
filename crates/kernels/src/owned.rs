//! A packed matrix that a decoder owns.

use crate::codes::Format;
use crate::element::{Element, widened};
use crate::matmul::Matrix;
use crate::weights::{self, Bytes};

/// A packed matrix, and its bias.
pub(crate) struct Owned {
    packed: Bytes,
    format: Option<Format>,
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
    bias: Vec<f32>,
}

impl Owned {
    /// Creates a matrix. The caller must have checked that `matrix` has these outputs and inputs.
    /// The elements of `bias` are of the type `E`.
    pub(crate) fn new<E: Element>(
        matrix: &weights::Matrix,
        (outputs, inputs): (usize, usize),
        bias: Option<&Bytes>,
    ) -> Self {
        let bias = bias.map(|bias| widened::<E>(bias)).unwrap_or_default();
        let format = matrix.storage.format();
        Self { packed: matrix.packed.clone(), format, outputs, inputs, bias }
    }

    pub(crate) fn is_quantised(&self) -> bool {
        self.format.is_some()
    }

    #[inline]
    pub(crate) fn matrix<E>(&self) -> Matrix<'_, E> {
        let Self { packed, format, outputs, inputs, bias } = self;
        let panels = packed.as_ptr().cast();
        Matrix { panels, format: *format, outputs: *outputs, inputs: *inputs, bias }
    }
}
