//! The computation of layers' own inputs: a row that the token's id selects, plus a product with
//! its input (Gemma 3n, 2025; Gemma 4, 2026).

use crate::element::Element;
use crate::math;
use crate::owned::Owned;
use crate::sizes::Sizes;
use crate::vector::Vector;
use crate::weights::{LayerInputWeights, Table};

/// The factor that keeps a sum of two equally large terms as large as one of them.
const MEAN_OF_TWO: f32 = std::f32::consts::FRAC_1_SQRT_2;

/// What layers' own inputs are made of.
pub(crate) struct RowsOfLayers {
    table: Table,
    /// The number of tokens that have rows. Other ids use the row of padding.
    tokens: usize,
    pub(crate) projection: Owned,
    norm: Vec<f32>,
    /// Elements of a layer's input.
    pub(crate) size: usize,
    /// The factor of the product: the root of 1 / hidden.
    scale: f32,
}

impl RowsOfLayers {
    /// Inputs of layers, whose weights were checked. The model's type is `E`.
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

    /// Computes the inputs `[layers, size]` of a token from the product with its input.
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
