//! Computes the per-layer inputs of Gemma 3n (2025) and Gemma 4 (2026). For each layer, this
//! is an embedding row of the token, plus a projection of the model's input at this token.

use crate::element::Element;
use crate::math;
use crate::owned::Owned;
use crate::sizes::Sizes;
use crate::vector::Vector;
use crate::weights::{LayerInputWeights, Table};

/// The factor that keeps the sum of two terms of equal variance at that variance.
const MEAN_OF_TWO: f32 = std::f32::consts::FRAC_1_SQRT_2;

/// The weights from which the per-layer inputs are computed.
pub(crate) struct RowsOfLayers {
    table: Table,
    /// The number of tokens that have rows in `table`. Other ids use row 0, that of the padding
    /// token.
    tokens: usize,
    pub(crate) projection: Owned,
    norm: Vec<f32>,
    /// The number of elements of the additional input of one layer.
    pub(crate) size: usize,
    /// The factor of the projection: the square root of 1 / hidden.
    scale: f32,
}

impl RowsOfLayers {
    /// Creates the computation from checked weights. `E` is the model's type.
    pub(crate) fn new<E: Element>(of: &LayerInputWeights, sizes: &Sizes, layers: usize) -> Self {
        let (tokens, size) = sizes.layer_inputs.map_or((0, 0), |of| (of.vocabulary, of.size));
        Self {
            table: of.table.clone(),
            tokens,
            projection: Owned::new::<E>(&of.projection, (layers * size, sizes.hidden), None),
            norm: sizes.read_norm::<E>(&of.norm),
            size,
            scale: 1.0 / (sizes.hidden as f32).sqrt(),
        }
    }

    /// Computes the per-layer inputs `[layers, size]` of a token. `inputs` contains the projection
    /// of the model's input, and is overwritten with the result.
    #[inline(always)]
    pub(crate) fn finish<E: Element, V: Vector>(&self, token: usize, eps: f32, inputs: &mut [f32]) {
        for part in inputs.chunks_exact_mut(self.size) {
            part.iter_mut().for_each(|x| *x *= self.scale);
            let factor = math::rms_factor::<V>(part, eps);
            for (x, weight) in part.iter_mut().zip(&self.norm) {
                *x = *x * factor * weight;
            }
        }
        let token = if token < self.tokens { token } else { 0 };
        self.table.add_row::<E>(token, (self.size as f32).sqrt(), inputs);
        inputs.iter_mut().for_each(|x| *x *= MEAN_OF_TWO);
    }
}
