//! Compares products, and the operations on their results, with the formulas.

use std::fmt::Debug;

use proptest::prelude::*;

use super::*;
use crate::isa::tests::{Check, kernels};
use crate::pack::{pack, packed_len};
use crate::team::tests::team;
use crate::tile::tests::numbers;

/// Pointers that members share.
struct Shared<T>(T);
// SAFETY: members write different parts.
unsafe impl<T> Sync for Shared<T> {}

impl<T: Copy> Shared<T> {
    fn get(&self) -> T {
        self.0
    }
}

fn run<E: Element, K: Kernel<E>>(
    rows: Rows<E>,
    matrix: Matrix<'_, E>,
    out: impl Fn(usize) -> Out<E>,
) {
    let queue = Queue::default();
    let mut numbers = vec![f32::NAN; rows.count * matrix.inputs];
    let numbers = Shared((rows, matrix, numbers.as_mut_ptr().cast::<K::Number>()));
    let outs = Shared(&out);
    team(2).compute(|member| {
        let (rows, matrix, numbers) = numbers.get();
        // SAFETY: the caller passes matching sizes.
        unsafe {
            let mine = member.share(rows.tiles::<K>());
            let rows = arrange::<E, K>(rows, matrix.inputs, mine, numbers);
            member.meet();
            multiply::<E, K>((&queue, member.members), rows, &matrix, outs.get()(member.index))
        };
    });
}

fn check<E: Element, K: Kernel<E>>(
    (rows, outputs, inputs): (usize, usize, usize),
    biased: bool,
    seed: u32,
    bound: f64,
) {
    let outputs = outputs * 2;
    // The error of a sum grows with its length.
    let bound = bound * (inputs as f64 / 40.0).sqrt().max(1.0);
    let x: Vec<E> = numbers(rows * inputs, seed);
    let weights: Vec<E> = numbers(outputs * inputs, !seed);
    let bias: Vec<f32> = if biased { numbers(outputs, seed ^ 3) } else { Vec::new() };
    let exact = |row: usize, output: usize| -> f64 {
        let sum: f64 = (0..inputs)
            .map(|i| {
                f64::from(x[row * inputs + i].to_f32())
                    * f64::from(weights[output * inputs + i].to_f32())
            })
            .sum();
        sum + bias.get(output).map_or(0.0, |&bias| f64::from(bias))
    };
    let packed = |interleaved: bool| {
        let padded = padded_outputs(outputs, interleaved);
        let mut packed = vec![E::default(); packed_len(padded, inputs)];
        // SAFETY: the caller detected the features.
        unsafe { pack::<E, K>(&weights, outputs, inputs, interleaved, &mut packed) };
        packed
    };
    let (plain, gated) = (packed(false), packed(true));
    let matrix = |panels: &[E]| Matrix {
        panels: panels.as_ptr(),
        format: None,
        outputs,
        inputs,
        bias: &bias,
    };
    let from = Rows { first: x.as_ptr(), count: rows };
    let close = |found: f32, exact: f64| {
        assert!((f64::from(found) - exact).abs() < bound * exact.abs().max(1.0), "{found} {exact}")
    };

    let mut stored = vec![f32::NAN; rows * outputs];
    let to = Out::Store(stored.as_mut_ptr());
    run::<E, K>(from, matrix(&plain), |_| to);
    let mut added = vec![1.0; rows * outputs];
    let to = Out::Add(added.as_mut_ptr(), 1.0);
    run::<E, K>(from, matrix(&plain), |_| to);
    let mut gates = vec![E::default(); rows * outputs / 2];
    let to = Out::Gate(gates.as_mut_ptr(), GateKind::Silu);
    run::<E, K>(from, matrix(&gated), |_| to);
    let [mut squares, mut narrow] = [(); 2].map(|()| vec![E::default(); rows * outputs]);
    for (to, function) in [(&mut squares, Some(GateKind::SquaredRelu)), (&mut narrow, None)] {
        let to = Out::Activate(to.as_mut_ptr(), function);
        run::<E, K>(from, matrix(&plain), |_| to);
    }
    let mut bests = vec![Best::NONE; 2 * rows];
    let to = bests.as_mut_ptr();
    // The most likely output is only computed for matrices without a bias.
    run::<E, K>(from, Matrix { bias: &[], ..matrix(&plain) }, |member| {
        Out::Best(to.wrapping_add(member * rows))
    });

    for row in 0..rows {
        for output in 0..outputs {
            close(stored[row * outputs + output], exact(row, output));
            close(added[row * outputs + output], exact(row, output) + 1.0);
            let stored = f64::from(stored[row * outputs + output]);
            close(squares[row * outputs + output].to_f32(), stored.max(0.0).powi(2));
            close(narrow[row * outputs + output].to_f32(), stored);
        }
        for output in 0..outputs / 2 {
            let gate = exact(row, output);
            let wanted = gate / (1.0 + (-gate).exp()) * exact(row, outputs / 2 + output);
            close(gates[row * outputs / 2 + output].to_f32(), wanted);
        }
        let mut best = bests[row];
        best.merge(bests[rows + row]);
        assert!(best.finite);
        if !biased {
            let row = &stored[row * outputs..][..outputs];
            assert_eq!(best.value, row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            assert_eq!(
                row.iter().position(|&value| value == best.value),
                Some(best.output as usize)
            );
        }
    }
}

struct Sizes {
    rows: usize,
    outputs: usize,
    inputs: usize,
    biased: bool,
    seed: u32,
}

impl Check for Sizes {
    fn kernel<E: Element + Debug + PartialEq, K: Kernel<E>>(&self) {
        let sizes = (self.rows, self.outputs, self.inputs);
        let bound = if E::PAIR == 1 { 1e-5 } else { 2e-2 };
        check::<E, K>(sizes, self.biased, self.seed, bound);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn results_are_finished(
        rows in prop::sample::select(vec![1usize, 2, 11, 13, 30, 200]),
        outputs in 1usize..70,
        inputs in prop_oneof![4 => 1usize..40, 1 => 200usize..500],
        biased: bool,
        seed: u32,
    ) {
        kernels(&Sizes { rows, outputs, inputs: 2 * inputs, biased, seed });
    }
}
