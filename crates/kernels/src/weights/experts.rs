//! The weights of a layer's experts.

use super::matrix::{Bytes, DenseMatrices, Matrix, of_size};
use crate::packing::{Packing, Unfit, unfit};
use crate::sizes::Sizes;

/// The experts of a layer.
#[derive(Clone)]
pub struct ExpertMatrices {
    /// The router, `[count, hidden]`, not packed: elements of the model's type, or float32 if
    /// `in_float32`.
    pub router: Bytes,
    /// The bias that is added to scores for the choice of experts, float32 `[count]`.
    pub correction: Option<Bytes>,
    /// The projections before the experts, `[latent, hidden]`, and after them, `[hidden, latent]`.
    /// `None` if experts read and write states of the hidden size.
    pub latent: Option<[Matrix; 2]>,
    /// The gate and up projections of each expert, `[2 * intermediate, hidden]`, interleaved. In a
    /// model without gates, the up projections `[intermediate, hidden]`, not interleaved. The
    /// packed matrices of all experts are concatenated. With latent states, `latent` takes the
    /// place of `hidden`.
    pub gate_up: Matrix,
    /// The down projection of each expert, `[hidden, intermediate]`.
    pub down: Matrix,
    /// The shared expert, which all tokens use.
    pub shared: Option<DenseMatrices>,
    /// The shared expert's gate, `[hidden]` of the model's type.
    pub shared_gate: Option<Bytes>,
    /// The biases of the router and of the experts.
    pub biases: Option<ExpertBiases>,
    /// The norms and factors of experts beside a dense network; the dense network is `shared`.
    pub beside: Option<BesideWeights>,
}

/// The norms and factors of experts beside a dense network (Gemma 4, 2026). The router reads states
/// that are normalised without weights, and multiplied by `router_factors` and by the square root
/// of 1 / hidden. The sum of both outputs is normalised with the layer's norm.
#[derive(Clone)]
pub struct BesideWeights {
    /// Factors of the router's inputs, `[hidden]` of the model's type.
    pub router_factors: Bytes,
    /// The factor of each expert's weight, applied last, `[count]` of the model's type.
    pub expert_factors: Bytes,
    /// The norm before the experts, `[hidden]`.
    pub before: Bytes,
    /// The norm of the dense network's output, `[hidden]`.
    pub behind_dense: Bytes,
    /// The norm of the experts' output, `[hidden]`.
    pub behind: Bytes,
}

/// The biases of the experts of a layer, of the model's type.
#[derive(Clone)]
pub struct ExpertBiases {
    /// The biases of the router's logits, `[count]`.
    pub router: Bytes,
    /// The biases of the gate and up projections, `[count, 2 * intermediate]`.
    pub gate_up: Bytes,
    /// The biases of the down projection, `[count, hidden]`.
    pub down: Bytes,
}

impl ExpertMatrices {
    pub(super) fn check(&self, sizes: &Sizes) -> Result<(), Unfit> {
        let Some(of) = &sizes.experts else {
            return unfit("experts of a model that has none");
        };
        if self.correction.is_some() != of.corrected
            || self.shared.is_some() != (of.shared > 0)
            || self.latent.is_some() != (of.latent > 0)
            || self.shared_gate.is_some() != of.shared_gate
            || self.biases.is_some() != of.biases
            || self.beside.is_some() != of.beside
        {
            return unfit(format!("a layer whose experts are not {of:?}"));
        }
        let (dtype, hidden) = (sizes.dtype, sizes.hidden);
        let of_router = if of.in_float32 { size_of::<f32>() } else { dtype.bytes() };
        of_size(&self.router, of.count * hidden * of_router)?;
        if let Some(correction) = &self.correction {
            of_size(correction, of.count * size_of::<f32>())?;
        }
        if let Some(gate) = &self.shared_gate {
            of_size(gate, hidden * dtype.bytes())?;
        }
        let (states, first) = (of.states(hidden), sizes.fed(of.intermediate));
        if let Some([before, behind]) = &self.latent {
            before.check(dtype, (states, hidden), false)?;
            behind.check(dtype, (hidden, states), false)?;
        }
        if let Some(biases) = &self.biases {
            let ExpertBiases { router, gate_up, down } = biases;
            for (bias, each) in [(router, 1), (gate_up, first), (down, states)] {
                of_size(bias, of.count * each * dtype.bytes())?;
            }
        }
        if let Some(shared) = &self.shared {
            if shared.inner != of.shared {
                return unfit(format!("a shared expert that is not of {of:?}"));
            }
            shared.check(sizes)?;
        }
        if let Some(beside) = &self.beside {
            of_size(&beside.router_factors, hidden * dtype.bytes())?;
            of_size(&beside.expert_factors, of.count * dtype.bytes())?;
            for norm in [&beside.before, &beside.behind_dense, &beside.behind] {
                of_size(norm, hidden * sizes.norm_bytes())?;
            }
        }
        let shapes = [
            (&self.gate_up, first, states, sizes.gated),
            (&self.down, states, of.intermediate, false),
        ];
        for (matrix, outputs, inputs, interleaved) in shapes {
            let packing = Packing { outputs, inputs, interleaved, dtype, storage: matrix.storage };
            of_size(&matrix.packed, of.count * packing.bytes()?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::memory::Room;
    use crate::packing::{Dtype, Storage};
    use crate::sizes::{AttentionSizes, ExpertSizes, Factors, GateKind};

    const EXPERTS: ExpertSizes = ExpertSizes {
        count: 8,
        per_token: 3,
        intermediate: 24,
        shared: 16,
        latent: 0,
        sigmoid: true,
        corrected: true,
        in_float32: true,
        shared_gate: false,
        biases: false,
        groups: 4,
        kept_groups: 2,
        best_of_group: 2,
        normalise: true,
        scaling: 2.5,
        weighs_inputs: false,
        beside: false,
    };
    const SIZES: Sizes = Sizes {
        kv_codes: false,
        dtype: Dtype::Bfloat16,
        hidden: 32,
        attentions: Vec::new(),
        gate: GateKind::Silu,
        gated: true,
        factors: Factors::NONE,
        mean_norms: false,
        wide_norms: false,
        intermediate: 48,
        layer_inputs: None,
        experts: Some(EXPERTS),
        vocabulary: 50,
        positions: 64,
        page_size: 16,
        page_count: 4,
        window_page_count: 0,
        eps: 1e-5,
    };

    fn room(bytes: usize) -> Bytes {
        Arc::new(Room::new(bytes).expect("room"))
    }

    fn matrix(count: usize, outputs: usize, inputs: usize, interleaved: bool) -> Matrix {
        let (dtype, storage) = (Dtype::Bfloat16, Storage::Plain);
        let packing = Packing { outputs, inputs, interleaved, dtype, storage };
        Matrix { storage, packed: room(count * packing.bytes().expect("a matrix")) }
    }

    fn layer() -> ExpertMatrices {
        ExpertMatrices {
            router: room(8 * 32 * 4),
            correction: Some(room(8 * 4)),
            latent: None,
            gate_up: matrix(8, 48, 32, true),
            down: matrix(8, 32, 24, false),
            shared: Some(DenseMatrices {
                inner: 16,
                gate_up: matrix(1, 32, 32, true),
                gate_up_bias: None,
                down: matrix(1, 32, 16, false),
                down_bias: None,
            }),
            shared_gate: None,
            biases: None,
            beside: None,
        }
    }

    #[test]
    fn experts_have_the_sizes_that_were_told() {
        assert_eq!(layer().check(&SIZES), Ok(()));
        let of = |experts| Sizes { experts, ..SIZES };
        assert!(layer().check(&of(None)).is_err());
        let plain = ExpertSizes {
            sigmoid: false,
            corrected: false,
            in_float32: false,
            groups: 1,
            kept_groups: 1,
            ..EXPERTS
        };
        assert!(layer().check(&of(Some(plain))).is_err());
        assert!(layer().check(&of(Some(ExpertSizes { shared: 0, ..EXPERTS }))).is_err());
        for wrong in [
            ExpertMatrices { router: room(8 * 32 * 2), ..layer() },
            ExpertMatrices { correction: None, ..layer() },
            ExpertMatrices { correction: Some(room(8 * 2)), ..layer() },
            ExpertMatrices { gate_up: matrix(7, 48, 32, true), ..layer() },
            ExpertMatrices { down: matrix(8, 64, 24, false), ..layer() },
            ExpertMatrices { shared: None, ..layer() },
            ExpertMatrices { shared_gate: Some(room(32 * 2)), ..layer() },
            ExpertMatrices {
                shared: layer()
                    .shared
                    .map(|shared| DenseMatrices { down: matrix(1, 64, 16, false), ..shared }),
                ..layer()
            },
        ] {
            assert!(wrong.check(&SIZES).is_err());
        }
        let plain_layer = ExpertMatrices { router: room(8 * 32 * 2), correction: None, ..layer() };
        assert_eq!(plain_layer.check(&of(Some(plain))), Ok(()));
        let gated = Some(ExpertSizes { shared_gate: true, ..EXPERTS });
        assert!(layer().check(&of(gated)).is_err());
        let with = |bytes| ExpertMatrices { shared_gate: Some(room(bytes)), ..layer() };
        assert!(with(32 * 4).check(&of(gated)).is_err());
        assert_eq!(with(32 * 2).check(&of(gated)), Ok(()));
        let beside = of(Some(ExpertSizes { beside: true, ..EXPERTS }));
        assert!(layer().check(&beside).is_err());
        let with = |factors: usize, norm: usize| ExpertMatrices {
            beside: Some(BesideWeights {
                router_factors: room(32 * 2),
                expert_factors: room(factors * 2),
                before: room(32 * 2),
                behind_dense: room(32 * 2),
                behind: room(norm * 2),
            }),
            ..layer()
        };
        assert_eq!(with(8, 32).check(&beside), Ok(()));
        for wrong in
            [with(7, 32).check(&beside), with(8, 8).check(&beside), with(8, 32).check(&SIZES)]
        {
            assert!(wrong.is_err());
        }
        let latent = of(Some(ExpertSizes { latent: 20, ..EXPERTS }));
        assert!(layer().check(&latent).is_err());
        let with = |size: usize, inner: usize| ExpertMatrices {
            latent: Some([matrix(1, size, 32, false), matrix(1, 32, size, false)]),
            gate_up: matrix(8, 48, inner, true),
            down: matrix(8, inner, 24, false),
            ..layer()
        };
        assert_eq!(with(20, 20).check(&latent), Ok(()));
        for wrong in [with(20, 32).check(&latent), with(40, 20).check(&latent)] {
            assert!(wrong.is_err());
        }
        assert!(with(20, 20).check(&SIZES).is_err());
        // Without gates, first projections have half of the rows, and are not interleaved.
        let ungated = Sizes { gated: false, gate: GateKind::SquaredRelu, ..SIZES };
        assert!(layer().check(&ungated).is_err());
        let with = |outputs: usize| ExpertMatrices {
            gate_up: matrix(8, outputs, 32, false),
            shared: layer()
                .shared
                .map(|shared| DenseMatrices { gate_up: matrix(1, 16, 32, false), ..shared }),
            ..layer()
        };
        assert_eq!(with(24).check(&ungated), Ok(()));
        assert!(with(48).check(&ungated).is_err());
        let biased = of(Some(ExpertSizes { biases: true, ..EXPERTS }));
        assert!(layer().check(&biased).is_err());
        let with = |router: usize, gate_up: usize, down: usize| ExpertMatrices {
            biases: Some(ExpertBiases {
                router: room(router * 2),
                gate_up: room(gate_up * 2),
                down: room(down * 2),
            }),
            ..layer()
        };
        assert!(with(8, 8 * 48, 8 * 32).check(&SIZES).is_err());
        assert_eq!(with(8, 8 * 48, 8 * 32).check(&biased), Ok(()));
        for wrong in [(7, 8 * 48, 8 * 32), (8, 8 * 24, 8 * 32), (8, 8 * 48, 32)] {
            assert!(with(wrong.0, wrong.1, wrong.2).check(&biased).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn experts_that_no_kernel_chooses_are_refused() {
        assert_eq!(EXPERTS.check(), Ok(()));
        for wrong in [
            ExpertSizes { count: 0, ..EXPERTS },
            ExpertSizes { per_token: 5, ..EXPERTS },
            ExpertSizes { intermediate: 23, ..EXPERTS },
            ExpertSizes { shared: 15, ..EXPERTS },
            ExpertSizes { shared: 0, shared_gate: true, ..EXPERTS },
            ExpertSizes { shared: 0, beside: true, ..EXPERTS },
            ExpertSizes { latent: 19, ..EXPERTS },
            ExpertSizes { latent: 20, beside: true, ..EXPERTS },
            ExpertSizes { groups: 3, ..EXPERTS },
            ExpertSizes { kept_groups: 5, ..EXPERTS },
            ExpertSizes { best_of_group: 3, ..EXPERTS },
        ] {
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
        let attention = AttentionSizes {
            heads: 2,
            kv_heads: 1,
            head_dim: 16,
            rotary_dim: 8,
            angles: Some(0),
            window: None,
            in_window_part: false,
            chunk: None,
            norm_rows: false,
            scale: 0.25,
            cap: None,
            gate: false,
            keys_are_values: false,
            value_norm: false,
            scaled_queries: false,
            both_ways: false,
            latent: None,
        };
        let with = |attention| Sizes { attentions: vec![attention], ..SIZES }.check();
        assert_eq!(with(attention), Ok(()));
        for wrong in [
            AttentionSizes { rotary_dim: 0, ..attention },
            AttentionSizes { rotary_dim: 7, ..attention },
            AttentionSizes { rotary_dim: 18, ..attention },
            AttentionSizes { angles: None, ..attention },
            AttentionSizes { kv_heads: 3, ..attention },
            AttentionSizes { window: Some(0), ..attention },
        ] {
            assert!(with(wrong).is_err(), "{wrong:?}");
        }
    }
}
