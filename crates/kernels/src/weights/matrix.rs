//! Packed matrices, and feed-forward networks of two matrices.

use std::sync::Arc;

use crate::memory::Room;
use crate::packing::{Dtype, Packing, Storage, Unfit, unfit};
use crate::sizes::Sizes;

/// Memory with weights, which may have several owners.
pub type Bytes = Arc<Room>;

/// A matrix, packed in the order that the kernels read.
#[derive(Clone)]
pub struct Matrix {
    /// The number format of the packed matrix.
    pub storage: Storage,
    /// The output of [`Packing::pack`].
    pub packed: Bytes,
}

/// A dense feed-forward network.
#[derive(Clone)]
pub struct DenseMatrices {
    /// Elements of the inner state, called `intermediate` below.
    pub inner: usize,
    /// The gate and up projections, `[2 * intermediate, hidden]`, interleaved. In a model without
    /// gates, the up projection `[intermediate, hidden]`, not interleaved.
    pub gate_up: Matrix,
    /// The bias of `gate_up`, one value per output.
    pub gate_up_bias: Option<Bytes>,
    /// The down projection, `[hidden, intermediate]`.
    pub down: Matrix,
    /// The bias of `down`, `[hidden]`.
    pub down_bias: Option<Bytes>,
}

impl DenseMatrices {
    pub(super) fn check(&self, sizes: &Sizes) -> Result<(), Unfit> {
        let (&Sizes { hidden, dtype, .. }, intermediate) = (sizes, self.inner);
        if !intermediate.is_multiple_of(2) {
            return unfit(format!("{intermediate} elements between products are odd"));
        }
        let first = sizes.fed(intermediate);
        self.gate_up.check(dtype, (first, hidden), sizes.gated)?;
        self.down.check(dtype, (hidden, intermediate), false)?;
        let biases = [(&self.gate_up_bias, first), (&self.down_bias, hidden)];
        biases
            .into_iter()
            .filter_map(|(bias, size)| Some((bias.as_ref()?, size)))
            .try_for_each(|(bias, size)| of_size(bias, size * dtype.bytes()))
    }
}

impl Matrix {
    pub(crate) fn check(
        &self,
        dtype: Dtype,
        (outputs, inputs): (usize, usize),
        interleaved: bool,
    ) -> Result<(), Unfit> {
        let packing = Packing { outputs, inputs, interleaved, dtype, storage: self.storage };
        of_size(&self.packed, packing.bytes()?)
    }
}

pub(crate) fn of_size(bytes: &Bytes, wanted: usize) -> Result<(), Unfit> {
    match bytes.len() {
        found if found == wanted => Ok(()),
        found => unfit(format!("a weight of {found} bytes in place of {wanted}")),
    }
}
