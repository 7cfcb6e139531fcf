//! The experts of a decoder for callers in Rust.

use crate::decoder::{Bytes, Matrix, Packing, Sizes, Unfit, of_size, unfit};
use crate::experts::{ExpertsSpec, RoutingSpec};

/// The sizes of a decoder's experts, and the rule of their choice.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertSizes {
    /// The number of experts of a layer.
    pub count: usize,
    /// The number of experts of a token.
    pub per_token: usize,
    /// Elements between the two products of an expert.
    pub intermediate: usize,
    /// True if a token's weights are divided by their sum.
    pub normalise: bool,
}

impl ExpertSizes {
    /// A softmax over all experts, and the choice of the best.
    pub(crate) fn spec(&self) -> RoutingSpec {
        RoutingSpec {
            count: self.count as u32,
            per_token: self.per_token as u32,
            intermediate: self.intermediate as u32,
            shared: 0,
            scores: 0,
            in_float32: 0,
            groups: 1,
            kept_groups: 1,
            best_of_group: 1,
            normalise: self.normalise.into(),
            scaling: 1.0,
        }
    }

    pub(crate) fn check(&self) -> Result<(), Unfit> {
        let numbers = [self.count, self.per_token, self.intermediate];
        let small = numbers.iter().all(|number| (1..=i32::MAX as usize).contains(number));
        if !small || self.per_token > self.count || !self.intermediate.is_multiple_of(2) {
            return unfit(format!("no kernel computes experts of {self:?}"));
        }
        Ok(())
    }
}

/// The experts of a layer.
#[derive(Clone)]
pub struct ExpertMatrices {
    /// The router, `[count, hidden]`, of the model's type and not packed.
    pub router: Bytes,
    /// The first product of each expert: gates, then their values, `[2 * intermediate, hidden]`,
    /// interleaved. Experts are packed one behind the other.
    pub gate_up: Matrix,
    /// The second product of each expert, `[hidden, intermediate]`.
    pub down: Matrix,
}

impl ExpertMatrices {
    pub(crate) fn spec(&self) -> ExpertsSpec {
        ExpertsSpec {
            router: self.router.as_ptr().cast(),
            correction: std::ptr::null(),
            gate_up: self.gate_up.packed.as_ptr().cast(),
            down: self.down.packed.as_ptr().cast(),
            formats: [self.gate_up.storage.number(), self.down.storage.number()],
        }
    }

    pub(crate) fn check(&self, sizes: &Sizes) -> Result<(), Unfit> {
        let Some(of) = &sizes.experts else {
            return unfit("experts of a model that has none");
        };
        let (dtype, hidden) = (sizes.dtype, sizes.hidden);
        of_size(&self.router, of.count * hidden * dtype.bytes())?;
        let shapes = [
            (&self.gate_up, 2 * of.intermediate, hidden, true),
            (&self.down, hidden, of.intermediate, false),
        ];
        for (matrix, outputs, inputs, interleaved) in shapes {
            let packing = Packing { outputs, inputs, interleaved, dtype, storage: matrix.storage };
            of_size(&matrix.packed, of.count * packing.bytes()?)?;
        }
        Ok(())
    }
}
