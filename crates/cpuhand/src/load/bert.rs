//! The weights of a BERT encoder: names and shapes before loading, and the assembled encoder
//! afterwards.

use forebay_kernels::{BertLayer, BertLinear, BertNorm, BertWeights, Matrix, Storage};
use forebay_weights::{BertShape, ModelError, TorchNumber};

use super::{Formats, Loaded, Plan};

const POOLER: &str = "pooler.dense";
const CLASSIFIER: &str = "classifier";
const EMBEDDINGS: [&str; 3] = ["word", "position", "token_type"];

fn embedding(name: &str) -> String {
    format!("embeddings.{name}_embeddings.weight")
}

impl Plan {
    /// Plans the weights of an encoder that computes `scores` scores per vector. The matrices of
    /// its layers have one of `formats`; all other weights have the type `number`.
    pub(crate) fn of_bert(
        shape: &BertShape,
        scores: usize,
        number: TorchNumber,
        formats: Formats,
    ) -> Result<Self, ModelError> {
        let &BertShape { hidden_size: hidden, intermediate_size: inner, layers, .. } = shape;
        let mut plan = Self { vectors: Vec::new(), matrices: Vec::new(), number, formats, layers };
        let rows = [shape.vocab_size, shape.max_positions, shape.kinds];
        for (name, rows) in EMBEDDINGS.into_iter().zip(rows) {
            plan.vector(&[(embedding(name), vec![rows, hidden])]);
        }
        plan.norm("embeddings", hidden);
        for layer in 0..layers {
            let at = |name: &str| format!("encoder.layer.{layer}.{name}");
            let part = |name: &str| (at(&format!("attention.self.{name}")), hidden);
            plan.linear(&["query", "key", "value"].map(part), hidden, true, false)?;
            plan.linear(&[(at("attention.output.dense"), hidden)], hidden, true, false)?;
            plan.norm(&at("attention.output"), hidden);
            plan.linear(&[(at("intermediate.dense"), inner)], hidden, true, false)?;
            plan.linear(&[(at("output.dense"), hidden)], inner, true, false)?;
            plan.norm(&at("output"), hidden);
        }
        if scores > 0 {
            // Quantising the layers that compute scores would save nothing, and the rounding error
            // would directly affect the score.
            let formats = std::mem::take(&mut plan.formats);
            plan.linear(&[(POOLER.into(), hidden)], hidden, true, false)?;
            plan.linear(&[(CLASSIFIER.into(), scores)], hidden, true, false)?;
            plan.formats = formats;
        }
        Ok(plan)
    }

    fn norm(&mut self, prefix: &str, hidden: usize) {
        for name in ["weight", "bias"] {
            self.vector(&[(format!("{prefix}.LayerNorm.{name}"), vec![hidden])]);
        }
    }

    /// Assembles the weights of an encoder from loaded weights.
    pub(crate) fn assemble_bert(
        &self,
        scores: usize,
        loaded: &Loaded,
    ) -> Result<BertWeights, ModelError> {
        let get = |name: &str| {
            let found = loaded.get(name).cloned();
            found.ok_or_else(|| ModelError::Broken(format!("{name} is not loaded")))
        };
        let norm = |prefix: &str| -> Result<BertNorm, ModelError> {
            let part = |name: &str| get(&format!("{prefix}.LayerNorm.{name}"));
            Ok(BertNorm { weight: part("weight")?, bias: part("bias")? })
        };
        let linear = |prefix: &str| -> Result<BertLinear, ModelError> {
            let name = format!("{prefix}.weight");
            let found = self.matrices.iter().find(|matrix| matrix.parts.name() == name);
            let storage = found.map_or(Storage::Plain, |matrix| matrix.packing.storage);
            let matrix = Matrix { storage, packed: get(&name)? };
            Ok(BertLinear { matrix, bias: get(&format!("{prefix}.bias"))? })
        };
        let layer = |layer: usize| -> Result<BertLayer, ModelError> {
            let at = |name: &str| format!("encoder.layer.{layer}.{name}");
            Ok(BertLayer {
                qkv: linear(&at("attention.self.query"))?,
                output: linear(&at("attention.output.dense"))?,
                attention_norm: norm(&at("attention.output"))?,
                up: linear(&at("intermediate.dense"))?,
                down: linear(&at("output.dense"))?,
                output_norm: norm(&at("output"))?,
            })
        };
        let [words, places, texts] = EMBEDDINGS.map(embedding);
        Ok(BertWeights {
            words: get(&words)?,
            places: get(&places)?,
            texts: get(&texts)?,
            norm: norm("embeddings")?,
            layers: (0..self.layers).map(layer).collect::<Result<_, _>>()?,
            score: (scores > 0)
                .then(|| Ok::<_, ModelError>((linear(POOLER)?, linear(CLASSIFIER)?)))
                .transpose()?,
        })
    }
}
