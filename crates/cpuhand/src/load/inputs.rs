//! The weights of per-layer inputs (Gemma 3n and 4), and of norms without weights in the
//! checkpoint.

use std::sync::Arc;

use forebay_kernels::{Bytes, InputMatrices, LayerInputWeights, Matrix, Room, Storage, Table};
use forebay_weights::{LayerInputs, ModelError, TorchNumber};

use super::{Parts, Plan, Vectors};

const TABLE: &str = "model.embed_tokens_per_layer.weight";
const PROJECTION: &str = "model.per_layer_model_projection";
const NORM: &str = "model.per_layer_projection_norm.weight";

/// Names in a layer: the gate of its per-layer input, the projection after the gate, and the norm
/// of that projection's output.
const GATE: &str = "per_layer_input_gate";
const OUTPUT: &str = "per_layer_projection";
const OUTPUT_NORM: &str = "post_per_layer_input_norm.weight";

fn at(layer: usize, name: &str) -> String {
    format!("model.layers.{layer}.{name}")
}

impl Plan {
    /// Adds the weights from which the per-layer inputs of `layers` layers are computed.
    pub(super) fn layer_inputs(
        &mut self,
        LayerInputs { vocab_size, size }: LayerInputs,
        (layers, hidden): (usize, usize),
        of_norms: TorchNumber,
    ) -> Result<(), ModelError> {
        let width = layers * size;
        let parts = Parts { parts: vec![(TABLE.into(), vec![vocab_size, width])] };
        // Only single rows of the table are looked up, so 8-bit integers would not be faster.
        let stored = self.formats.stored.contains_key(TABLE);
        let storage = if stored { self.formats.of(&parts.parts, width)? } else { Storage::Plain };
        let storage = if Table::takes(storage) { storage } else { Storage::Plain };
        self.vectors.push(Vectors { parts, number: self.number, storage });
        self.linear(&[(PROJECTION.into(), width)], hidden, false, false)?;
        self.norm_of_size(NORM.into(), size, of_norms);
        Ok(())
    }

    /// Adds the weights with which a layer processes its per-layer input.
    pub(super) fn input_matrices(
        &mut self,
        layer: usize,
        (size, hidden): (usize, usize),
        of_norms: TorchNumber,
    ) -> Result<(), ModelError> {
        self.linear(&[(at(layer, GATE), size)], hidden, false, false)?;
        self.linear(&[(at(layer, OUTPUT), hidden)], size, false, false)?;
        self.norm_of_size(at(layer, OUTPUT_NORM), hidden, of_norms);
        Ok(())
    }

    /// The number format of the table with the per-layer embeddings of tokens.
    pub(super) fn table_storage(&self) -> Storage {
        let table = self.vectors.iter().find(|vectors| vectors.parts.name() == TABLE);
        table.map_or(Storage::Plain, |table| table.storage)
    }
}

/// Assembles the weights from which per-layer inputs are computed.
pub(super) fn weights(
    storage: Storage,
    matrix: &impl Fn(&str) -> Result<Matrix, ModelError>,
    get: &impl Fn(&str) -> Result<Bytes, ModelError>,
) -> Result<LayerInputWeights, ModelError> {
    Ok(LayerInputWeights {
        table: Table { storage, rows: get(TABLE)? },
        projection: matrix(&format!("{PROJECTION}.weight"))?,
        norm: get(NORM)?,
    })
}

/// Assembles the weights with which a layer processes its per-layer input.
pub(super) fn matrices(
    layer: usize,
    matrix: &impl Fn(&str) -> Result<Matrix, ModelError>,
    get: &impl Fn(&str) -> Result<Bytes, ModelError>,
) -> Result<InputMatrices, ModelError> {
    let weight = |name: &str| matrix(&format!("{}.weight", at(layer, name)));
    let norm = get(&at(layer, OUTPUT_NORM))?;
    Ok(InputMatrices { gate: weight(GATE)?, output: weight(OUTPUT)?, norm })
}

/// The weights of a norm without weights in the checkpoint: all ones.
pub(super) fn ones(size: usize, number: TorchNumber) -> Result<Bytes, ModelError> {
    let one: &[u8] = match number {
        TorchNumber::Float32 => &1_f32.to_le_bytes(),
        // A bfloat16 number is the upper half of a float.
        TorchNumber::Bfloat16 => &1_f32.to_le_bytes()[2..],
    };
    let room = Room::new(size * one.len());
    let mut room = room.map_err(|error| ModelError::Broken(format!("no memory: {error}")))?;
    room.chunks_exact_mut(one.len()).for_each(|to| to.copy_from_slice(one));
    Ok(Arc::new(room))
}
