//! The weights of latent attention.
//!
//! A checkpoint has one matrix `[heads * (nope_dim + value_dim), rank]` that computes keys and
//! values from rows. The kernels map queries with the transposed key part of each head, and compute
//! values with the other part. Both stay in the model's type, because a file's quantisation blocks
//! run along the wrong dimension of the key part.

use std::sync::Arc;

use forebay_kernels::{Bytes, LatentWeights, LowRankQuery, Matrix, Packing, Room, Storage};
use forebay_weights::{Latent, ModelError, TorchNumber};

use super::read::Source;
use super::{Matrices, Parts, Plan, dtype};

const ROW: &str = "kv_a_proj_with_mqa";
const UP: &str = "kv_b_proj.weight";
/// The name of the value part in memory; the key part keeps the checkpoint's name.
const VALUES: &str = "kv_b_proj.values";

/// The rows of each head that a matrix takes from a tensor with the rows of all heads.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeadRows {
    /// The number of rows per head in the tensor.
    each: usize,
    /// The index within a head of the first row that is taken, and the number of rows.
    first: usize,
    count: usize,
    /// True if the matrix is transposed.
    transposed: bool,
}

/// Returns the name of the projection of the queries, and its number of outputs. These outputs come
/// first in the layer's first product.
fn queries(of: &Latent) -> (&'static str, usize) {
    match of.query_rank {
        None => ("q_proj", of.heads * (of.nope_dim + of.rotary_dim)),
        Some(rank) => ("q_a_proj", rank),
    }
}

impl Plan {
    /// Adds the weights of latent attention whose names begin with `at`.
    pub(super) fn latent(
        &mut self,
        at: &str,
        (hidden, of_norms): (usize, TorchNumber),
        of: &Latent,
    ) -> Result<(), ModelError> {
        let name = |name: &str| format!("{at}.{name}");
        let Latent { heads, rank, nope_dim, rotary_dim, value_dim, .. } = *of;
        let (first, outputs) = queries(of);
        let products = [(name(first), outputs), (name(ROW), rank + rotary_dim)];
        self.linear(&products, hidden, false, false)?;
        if of.bias {
            // The projection of queries has no bias if the queries have no low rank.
            let from = usize::from(of.query_rank.is_none());
            let bias = |(name, rows): &(String, usize)| (format!("{name}.bias"), vec![*rows]);
            self.vector(&products[from..].iter().map(bias).collect::<Vec<_>>());
        }
        if let Some(low) = of.query_rank {
            self.norm_of_size(name("q_a_layernorm.weight"), low, of_norms);
            self.linear(&[(name("q_b_proj"), heads * (nope_dim + rotary_dim))], low, false, false)?;
        }
        self.norm_of_size(name("kv_a_layernorm.weight"), rank, of_norms);
        let each = nope_dim + value_dim;
        let keys = HeadRows { each, first: 0, count: nope_dim, transposed: true };
        let values = HeadRows { each, first: nope_dim, count: value_dim, transposed: false };
        self.of_heads((name(UP), None), (heads, rank), keys)?;
        self.of_heads((name(VALUES), Some(name(UP))), (heads, rank), values)?;
        self.linear(&[(name("o_proj"), hidden)], heads * value_dim, of.bias, false)
    }

    /// Adds the matrices of all heads, each from some rows of its head in a tensor with `rank`
    /// columns.
    fn of_heads(
        &mut self,
        (name, source): (String, Option<String>),
        (heads, rank): (usize, usize),
        rows: HeadRows,
    ) -> Result<(), ModelError> {
        let [outputs, inputs] =
            if rows.transposed { [rank, rows.count] } else { [rows.count, rank] };
        let (dtype, storage) = (dtype(self.number), Storage::Plain);
        let packing = Packing { outputs, inputs, interleaved: false, dtype, storage };
        packing.bytes().map_err(|error| ModelError::Broken(error.to_string()))?;
        let parts = Parts { parts: vec![(name, vec![heads * rows.each, rank])] };
        self.matrices.push(Matrices { parts, packing, count: heads, source, rows: Some(rows) });
        Ok(())
    }
}

impl Matrices {
    /// Reads the tensor of all heads, and packs the selected rows of each head.
    pub(super) fn read_heads(
        &self,
        rows: HeadRows,
        source: Source<'_>,
        number: TorchNumber,
        to: &mut [u8],
    ) -> Result<usize, ModelError> {
        let (name, shape) = &self.parts.parts[0];
        let width = dtype(number).bytes();
        // A buffer of 64-bit words, so that elements of every type are aligned.
        let mut words = vec![0_u64; (shape[0] * shape[1] * width).div_ceil(8)];
        let tensor = &mut bytemuck::cast_slice_mut(&mut words)[..shape[0] * shape[1] * width];
        source.read(self.source.as_ref().unwrap_or(name), number, tensor)?;
        let line = shape[1] * width;
        let mut one = vec![0_u64; (rows.count * line).div_ceil(8)];
        let one = &mut bytemuck::cast_slice_mut(&mut one)[..rows.count * line];
        let packed = to.chunks_exact_mut(to.len() / self.count);
        for (head, to) in tensor.chunks_exact(rows.each * line).zip(packed) {
            let head = &head[rows.first * line..][..rows.count * line];
            if rows.transposed {
                transpose(head, (rows.count, shape[1]), width, one);
            } else {
                one.copy_from_slice(head);
            }
            let fits = self.packing.pack(one, to);
            fits.map_err(|error| ModelError::Broken(error.to_string()))?;
        }
        Ok(usize::from(self.source.is_none()))
    }
}

/// Writes the transpose of a matrix whose elements have `width` bytes.
fn transpose(from: &[u8], (rows, columns): (usize, usize), width: usize, to: &mut [u8]) {
    for (row, line) in from.chunks_exact(columns * width).enumerate() {
        for (column, number) in line.chunks_exact(width).enumerate() {
            to[(column * rows + row) * width..][..width].copy_from_slice(number);
        }
    }
}

/// Assembles the weights of latent attention, except for its first and last product. `matrix` and
/// `get` return a weight by its name.
pub(super) fn weights(
    of: &Latent,
    matrix: impl Fn(&str) -> Result<Matrix, ModelError>,
    get: impl Fn(&str) -> Result<Bytes, ModelError>,
) -> Result<LatentWeights, ModelError> {
    let query = of.query_rank.map(|_| -> Result<_, ModelError> {
        let norm = get("q_a_layernorm.weight")?;
        Ok(LowRankQuery { norm, product: matrix("q_b_proj.weight")? })
    });
    Ok(LatentWeights {
        query: query.transpose()?,
        row_norm: get("kv_a_layernorm.weight")?,
        keys: matrix(UP)?,
        values: matrix(VALUES)?,
    })
}

/// Returns the name of the projection of the queries, and the bias of the first product if there is
/// one.
pub(super) fn first(
    of: &Latent,
    number: TorchNumber,
    get: impl Fn(&str) -> Result<Bytes, ModelError>,
) -> Result<(&'static str, Option<Bytes>), ModelError> {
    let (name, outputs) = queries(of);
    if !of.bias {
        return Ok((name, None));
    }
    if of.query_rank.is_some() {
        return Ok((name, Some(get(&format!("{name}.bias"))?)));
    }
    // Queries have no bias, but a product has one bias vector for all its outputs, so zeros come
    // first.
    let bias = get(&format!("{ROW}.bias"))?;
    let before = outputs * dtype(number).bytes();
    let room = Room::new(before + bias.len());
    let mut room = room.map_err(|error| ModelError::Broken(format!("no memory: {error}")))?;
    room[before..].copy_from_slice(&bias);
    Ok((name, Some(Arc::new(room))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transpose_has_columns_as_rows() {
        let mut to = [0; 12];
        transpose(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], (2, 3), 2, &mut to);
        assert_eq!(to, [1, 2, 7, 8, 3, 4, 9, 10, 5, 6, 11, 12]);
    }
}
