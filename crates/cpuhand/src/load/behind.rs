//! The layers after pooling: `Dense` modules of sentence-transformers, and classifier heads.

use forebay_kernels::gelu_of;
use forebay_weights::{ModelError, Norm, Shape, TorchNumber, VectorActivation, VectorLayer};

use super::{Loaded, Plan, number_of_norms};

/// A layer that is applied to a pooled vector: a product, an activation and a norm.
pub(crate) struct LayerBehind {
    of: VectorLayer,
    /// The weight matrix `[outputs, inputs]`.
    weight: Vec<f32>,
    /// The bias; empty if there is none.
    bias: Vec<f32>,
    /// The weights of the norm; empty if there is none.
    norm: Vec<f32>,
    kind: Norm,
    eps: f32,
}

impl Plan {
    /// Adds the weights of the layers after a model's pooling.
    pub(crate) fn layers_behind(&mut self, shape: &Shape, layers: &[VectorLayer]) {
        for layer in layers {
            self.vector(&[(weight(layer), vec![layer.outputs, layer.inputs])]);
            if layer.bias {
                self.vector(&[(bias(layer), vec![layer.outputs])]);
            }
            if let Some(norm) = &layer.norm {
                let number = number_of_norms(shape, self.number);
                self.norm_of_size(format!("{norm}.weight"), layer.outputs, number);
            }
        }
    }

    /// Creates a layer after pooling from loaded weights.
    pub(crate) fn layer_behind(
        &self,
        shape: &Shape,
        of: &VectorLayer,
        loaded: &Loaded,
    ) -> Result<LayerBehind, ModelError> {
        let numbers = |name: &str, number: TorchNumber| -> Result<Vec<f32>, ModelError> {
            let found = loaded.get(name);
            let bytes = found.ok_or_else(|| ModelError::Broken(format!("{name} is not loaded")))?;
            Ok(match number {
                TorchNumber::Float32 => {
                    bytes.as_chunks::<4>().0.iter().map(|&it| f32::from_le_bytes(it)).collect()
                }
                // A bfloat16 number is the upper half of a float.
                TorchNumber::Bfloat16 => {
                    let wide = |&[low, high]: &[u8; 2]| f32::from_le_bytes([0, 0, low, high]);
                    bytes.as_chunks::<2>().0.iter().map(wide).collect()
                }
            })
        };
        let norm = of
            .norm
            .as_ref()
            .map(|norm| numbers(&format!("{norm}.weight"), number_of_norms(shape, self.number)));
        let bias = of.bias.then(|| numbers(&bias(of), self.number));
        Ok(LayerBehind {
            weight: numbers(&weight(of), self.number)?,
            bias: bias.transpose()?.unwrap_or_default(),
            norm: norm.transpose()?.unwrap_or_default(),
            of: of.clone(),
            kind: shape.norm,
            eps: shape.norm_eps as f32,
        })
    }
}

fn weight(layer: &VectorLayer) -> String {
    format!("{}.weight", layer.name)
}

fn bias(layer: &VectorLayer) -> String {
    format!("{}.bias", layer.name)
}

impl LayerBehind {
    /// The layer's output for a vector.
    pub(crate) fn of(&self, x: &[f32]) -> Vec<f32> {
        let rows = self.weight.chunks_exact(self.of.inputs.max(1)).enumerate();
        let product = |(output, row): (usize, &[f32])| {
            let bias = self.bias.get(output).copied().unwrap_or(0.0);
            let sum = row.iter().zip(x).map(|(a, b)| a * b).sum::<f32>() + bias;
            match self.of.activation {
                VectorActivation::Identity => sum,
                VectorActivation::Tanh => sum.tanh(),
                VectorActivation::Gelu => gelu_of(sum),
                VectorActivation::Relu => sum.max(0.0),
            }
        };
        let mut y: Vec<f32> = rows.map(product).collect();
        if !self.norm.is_empty() {
            let count = y.len() as f32;
            let mean = match self.kind {
                Norm::Mean => y.iter().sum::<f32>() / count,
                Norm::Rms | Norm::RmsBesideOne => 0.0,
            };
            let squares: f32 = y.iter().map(|y| (y - mean) * (y - mean)).sum();
            let factor = 1.0 / (squares / count + self.eps).sqrt();
            for (y, weight) in y.iter_mut().zip(&self.norm) {
                *y = (*y - mean) * factor * weight;
            }
        }
        y
    }
}
