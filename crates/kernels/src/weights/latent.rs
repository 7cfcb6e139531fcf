//! The weights of latent attention.

use super::matrix::{Bytes, Matrix, of_size};
use crate::packing::{Packing, Storage, Unfit, unfit};
use crate::sizes::{AttentionSizes, Sizes};

/// The weights of latent attention, except for its first and its last projection.
#[derive(Clone)]
pub struct LatentWeights {
    /// The low rank of the queries; `None` if queries have a single projection.
    pub query: Option<LowRankQuery>,
    /// The norm of the latent part of rows, `[rank]`.
    pub row_norm: Bytes,
    /// The projections that map queries to the latent space, `[rank, nope_dim]` per head, packed
    /// and concatenated, in the model's type.
    pub keys: Matrix,
    /// The projections that compute values from the heads' attention results, `[value_dim, rank]`
    /// per head.
    pub values: Matrix,
}

/// The weights that compute queries from their low rank.
#[derive(Clone)]
pub struct LowRankQuery {
    /// The norm of the low rank, `[query_rank]`.
    pub norm: Bytes,
    /// The up projection, `[heads * (nope_dim + shared part), query_rank]`.
    pub product: Matrix,
}

impl LatentWeights {
    pub(super) fn check(&self, of: &AttentionSizes, sizes: &Sizes) -> Result<(), Unfit> {
        let Some(latent) = of.latent else {
            return unfit("latent attention of a model that has none");
        };
        match (&self.query, latent.query_rank) {
            (None, None) => {}
            (Some(query), Some(rank)) => {
                of_size(&query.norm, rank * sizes.norm_bytes())?;
                query.product.check(sizes.dtype, (of.latent_queries(), rank), false)?;
            }
            _ => return unfit("queries with a low rank that is not used, or without theirs"),
        }
        of_size(&self.row_norm, latent.rank * sizes.norm_bytes())?;
        let shapes = [
            (&self.keys, latent.rank, latent.nope_dim),
            (&self.values, latent.value_dim, latent.rank),
        ];
        for (matrix, outputs, inputs) in shapes {
            if matrix.storage != Storage::Plain {
                return unfit("products of heads that are quantised");
            }
            let (dtype, storage) = (sizes.dtype, matrix.storage);
            let packing = Packing { outputs, inputs, interleaved: false, dtype, storage };
            of_size(&matrix.packed, of.heads * packing.bytes()?)?;
        }
        Ok(())
    }
}
