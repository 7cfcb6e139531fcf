//! Compares products of codes with the formulas, at every instruction level that the processor has.

use proptest::prelude::*;

use super::*;
use crate::codes::tests::Encoded;
use crate::isa::plain::{Array, Plain, Portable};
use crate::isa::tests::{self, CheckDots};
use crate::matmul::{Best, GateKind, Matrix, Out, multiply_codes};
use crate::quantise::{pack_blocks, quantise, quantised_bytes, stored_len, unpacked};
use crate::team::Queue;
use crate::team::tests::team;
use crate::tile::MAX_ROWS;
use crate::tile::tests::numbers;

const FORMATS: [Format; 6] =
    [Format::Int8, Format::Q8_0, Format::Q4_0, Format::Q4_1, Format::Mxfp4, Format::Iq4Nl];

/// A quantised matrix, and its dequantised weights.
struct Quantised {
    format: Format,
    inputs: usize,
    outputs: usize,
    packed: Vec<u8>,
    weights: Vec<f32>,
    /// The largest magnitude of the weights.
    largest: f32,
}

/// The bits of a half-precision float that is finite and not large.
fn half(random: u32) -> [u8; 2] {
    let exponent = 8 + random % 8;
    (((random >> 8 & 1) << 15 | exponent << 10 | random >> 9 & 0x3ff) as u16).to_le_bytes()
}

impl Quantised {
    /// Creates a random matrix. `extreme`: each code is the smallest or the largest of the format.
    fn of(
        format: Format,
        (outputs, inputs): (usize, usize),
        interleaved: bool,
        seed: u32,
        extreme: bool,
    ) -> Self {
        let mut packed = vec![77; quantised_bytes(format, outputs, inputs, interleaved)];
        let mut weights = Vec::new();
        if format == Format::Int8 {
            let spread = |x: f32| if extreme { x.signum() * 0.25 } else { x };
            let source: Vec<f32> =
                numbers(outputs * inputs, seed).into_iter().map(spread).collect();
            quantise(&source, outputs, inputs, interleaved, &mut packed);
            for row in source.chunks_exact(inputs) {
                let Encoded { codes, scales, .. } = Encoded::of::<f32, Array>(row, inputs, inputs);
                weights.extend(codes.iter().map(|&code| scales[0] * f32::from(code)));
            }
        } else {
            let random: Vec<f32> = numbers(stored_len(format, outputs, inputs), seed);
            let byte = |&x: &f32| match (extreme, format) {
                (true, Format::Q8_0) if x < 0.0 => 0x80,
                (true, Format::Q8_0) => 0x7f,
                // The smallest float has code 15, the largest has code 7.
                (true, Format::Mxfp4) if x < 0.0 => 0x7f,
                (true, Format::Mxfp4) => 0xf7,
                (true, _) if x < 0.0 => 0x0f,
                (true, _) => 0xf0,
                _ => (x.to_bits() >> 5) as u8,
            };
            let mut stored: Vec<u8> = random.iter().map(byte).collect();
            let length = stored_len(format, 1, SHARED);
            for (block, x) in stored.chunks_exact_mut(length).zip(&random) {
                match format {
                    // The scales are powers of two: some are denormal, the others at least 2^-8.
                    Format::Mxfp4 if x.to_bits() >> 6 & 15 == 0 => {
                        block[0] = (x.to_bits() & 1) as u8
                    }
                    Format::Mxfp4 => block[0] = 119 + (x.to_bits() % 12) as u8,
                    _ => block[..2].copy_from_slice(&half(x.to_bits())),
                }
                if format == Format::Q4_1 {
                    block[2..4].copy_from_slice(&half(!x.to_bits()));
                }
                weights.extend(unpacked(format, block));
            }
            pack_blocks(format, &stored, outputs, inputs, interleaved, &mut packed);
        }
        let largest = weights.iter().fold(0.0f32, |a, b| a.max(b.abs()));
        Self { format, inputs, outputs, packed, weights, largest }
    }

    /// Returns the exact product of a row with an output, and the bound of its rounding errors.
    fn exact(&self, row: &[f32], output: usize) -> (f64, f64) {
        let terms = || {
            row.iter()
                .zip(&self.weights[output * self.inputs..][..self.inputs])
                .map(|(&x, &weight)| f64::from(x) * f64::from(weight))
        };
        // A block's minimum and the rest of a weight may cancel. So the bound is relative to the
        // terms of the sum, not to the result.
        let sum = row.iter().map(|x| f64::from(x.abs())).sum::<f64>() * f64::from(self.largest);
        (terms().sum(), 1e-6 * sum + 1e-12)
    }
}

fn encoded(rows: &[f32], inputs: usize, format: Format) -> (Encoded, Vec<f32>) {
    let shared = format.shared(inputs);
    let made = Encoded::of::<f32, Array>(rows, inputs, shared);
    let meant = made.codes.iter().enumerate();
    let meant = meant.map(|(at, &code)| made.scales[at / shared] * f32::from(code)).collect();
    (made, meant)
}

/// Returns the products of all rows with a matrix of one panel, in tiles of at most `together`
/// rows.
fn products<D: Dots>(
    matrix: &Quantised,
    codes: &Codes,
    together: usize,
    ahead: usize,
) -> Vec<[f32; NR]> {
    let mut found = Vec::new();
    while found.len() < codes.count {
        let count = together.min(D::rows(matrix.format)).min(codes.count - found.len());
        let mut tile = [[f32::NAN; NR]; MAX_ROWS];
        // SAFETY: rows and panel have these sizes; the caller detected the features.
        unsafe {
            let panel = matrix.packed.as_ptr();
            let which = (found.len(), count);
            D::tile(matrix.format, codes, which, panel, matrix.inputs, ahead, &mut tile);
        }
        found.extend_from_slice(&tile[..count]);
    }
    found
}

fn check_tiles<D: Dots>(format: Format, rows: usize, blocks: usize, seed: u32, extreme: bool) {
    let inputs = blocks * SHARED;
    let matrix = Quantised::of(format, (NR, inputs), false, seed, extreme);
    let spread = |x: f32| if extreme { x.signum() } else { x };
    let mut x: Vec<f32> = numbers(rows * inputs, !seed).into_iter().map(spread).collect();
    // Make one row consist of zeros.
    if rows > 2 {
        x[inputs..2 * inputs].fill(0.0);
    }
    let (coded, meant) = encoded(&x, inputs, format);
    let codes = coded.codes(rows);
    let alone = products::<D>(&matrix, &codes, 1, 0);
    for (row, found) in meant.chunks_exact(inputs).zip(&alone) {
        for (output, &found) in found.iter().enumerate() {
            let (exact, bound) = matrix.exact(row, output);
            assert!(
                (f64::from(found) - exact).abs() <= bound,
                "{format:?} {found} {exact} {bound}"
            );
        }
    }
    for (together, ahead) in [(2, 64), (5, 0), (12, 4096), (32, 64)] {
        let bits = |rows: &[[f32; NR]]| -> Vec<u32> {
            rows.as_flattened().iter().map(|x| x.to_bits()).collect()
        };
        assert_eq!(bits(&products::<D>(&matrix, &codes, together, ahead)), bits(&alone));
    }
    if format == Format::Int8 {
        // A result is one integer sum times three factors, so all instruction levels give the same
        // bits.
        assert_eq!(alone, products::<Portable>(&matrix, &codes, 1, 0));
    }
}

/// Checks that two instruction levels give the same bits. Both levels must fuse multiplication and
/// addition; then their floats are rounded in the same way.
fn check_same<D: Dots, Other: Dots>(
    format: Format,
    rows: usize,
    blocks: usize,
    seed: u32,
    extreme: bool,
) {
    let inputs = blocks * SHARED;
    let matrix = Quantised::of(format, (NR, inputs), false, seed, extreme);
    let (coded, _) = encoded(&numbers::<f32>(rows * inputs, !seed), inputs, format);
    let codes = coded.codes(rows);
    let found = products::<D>(&matrix, &codes, MAX_ROWS, 0);
    assert_eq!(found, products::<Other>(&matrix, &codes, MAX_ROWS, 0), "{format:?}");
}

/// Pointers that the threads of a team share.
struct Shared<T>(T);
// SAFETY: the team's threads write to disjoint parts.
unsafe impl<T> Sync for Shared<T> {}

impl<T: Copy> Shared<T> {
    fn get(&self) -> T {
        self.0
    }
}

fn run<D: Dots>(codes: Codes, matrix: &Quantised, bias: &[f32], out: impl Fn(usize) -> Out<f32>) {
    let queue = Queue::default();
    let panels = matrix.packed.as_ptr().cast();
    let Quantised { format, outputs, inputs, .. } = *matrix;
    let described = Matrix { panels, format: Some(format), outputs, inputs, bias };
    let shared = Shared((codes, described));
    let outs = Shared(&out);
    team(2).compute(|member| {
        let (codes, matrix) = shared.get();
        let queue = (&queue, member.members);
        // SAFETY: the caller passes matching sizes.
        unsafe {
            multiply_codes::<f32, Plain, D>(
                queue,
                codes,
                (&matrix, format),
                outs.get()(member.index),
            );
        }
    });
}

fn check_finishes<D: Dots>(format: Format, rows: usize, pairs: usize, seed: u32) {
    let (inputs, outputs) = (2 * SHARED, 2 * pairs);
    let x: Vec<f32> = numbers(rows * inputs, seed);
    let (coded, meant) = encoded(&x, inputs, format);
    let codes = coded.codes(rows);
    let row_of = |row: usize| &meant[row * inputs..][..inputs];
    let bias: Vec<f32> = numbers(outputs, seed ^ 3);
    let plain = Quantised::of(format, (outputs, inputs), false, seed, false);
    let gated = Quantised::of(format, (outputs, inputs), true, seed, false);
    assert_eq!(plain.weights, gated.weights);
    let mut stored = vec![f32::NAN; rows * outputs];
    let to = Out::Store(stored.as_mut_ptr());
    run::<D>(codes, &plain, &bias, |_| to);
    let mut added = vec![1.0; rows * outputs];
    let to = Out::Add(added.as_mut_ptr(), 1.0);
    run::<D>(codes, &plain, &bias, |_| to);
    let mut gates = vec![f32::NAN; rows * pairs];
    let to = Out::Gate(gates.as_mut_ptr(), GateKind::Silu);
    run::<D>(codes, &gated, &bias, |_| to);
    let mut bests = vec![Best::NONE; 2 * rows];
    let to = bests.as_mut_ptr();
    run::<D>(codes, &plain, &[], |member| Out::Best(to.wrapping_add(member * rows)));
    let mut unbiased = vec![f32::NAN; rows * outputs];
    let to = Out::Store(unbiased.as_mut_ptr());
    run::<D>(codes, &plain, &[], |_| to);
    for row in 0..rows {
        for (output, &bias) in bias.iter().enumerate() {
            let at = row * outputs + output;
            let (exact, bound) = plain.exact(row_of(row), output);
            let wanted = exact + f64::from(bias);
            assert!((f64::from(stored[at]) - wanted).abs() <= bound + 1e-6 * wanted.abs());
            assert!((added[at] - stored[at] - 1.0).abs() <= 1e-5 * stored[at].abs().max(1.0));
        }
        for output in 0..pairs {
            let (gate, up) =
                (stored[row * outputs + output], stored[row * outputs + pairs + output]);
            let wanted = gate / (1.0 + (-gate).exp()) * up;
            let found = gates[row * pairs + output];
            assert!((found - wanted).abs() <= 1e-5 * wanted.abs().max(1.0), "{found} {wanted}");
        }
        let mut best = bests[row];
        best.merge(bests[rows + row]);
        let row = &unbiased[row * outputs..][..outputs];
        assert!(best.finite);
        assert_eq!(best.value, row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        assert_eq!(row.iter().position(|&value| value == best.value), Some(best.output as usize));
    }
}

struct Sizes {
    rows: usize,
    size: usize,
    seed: u32,
    extreme: bool,
}

impl CheckDots for Sizes {
    fn dots<D: Dots, Like: Dots>(&self) {
        let &Self { rows, size, seed, extreme } = self;
        for format in FORMATS {
            check_tiles::<D>(format, rows, size, seed, extreme);
            check_finishes::<D>(format, rows, 7 * size, seed);
            check_same::<D, Like>(format, rows, size, seed, extreme);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn quantised_products(
        rows in prop::sample::select(vec![1usize, 2, 3, 7, 13, 16, 29, 40]),
        size in 1usize..10,
        seed: u32,
        extreme in prop::bool::weighted(0.3),
    ) {
        tests::dots(&Sizes { rows, size, seed, extreme });
    }
}

#[test]
fn nothing_saturates() {
    // All codes are extreme, over as many positions as a large model has.
    for seed in [1, 2] {
        tests::dots(&Sizes { rows: 9, size: 28672 / SHARED, seed, extreme: true });
    }
}

#[test]
fn inner_dimensions_that_do_not_fit_have_no_size() {
    for format in FORMATS {
        assert_eq!(quantised_bytes(format, 32, 33, false), 0);
        assert_eq!(quantised_bytes(format, 32, 0, false), 0);
        assert!(quantised_bytes(format, 33, 32, false) > quantised_bytes(format, 32, 32, false));
    }
    // The formats take 8, 8.5, 4.5, 5, 4.5 and 4.5 bits per weight. `Int8` also has a scale per
    // output.
    let bits = FORMATS.map(|format| quantised_bytes(format, NR, 320, false) * 8);
    let of_blocks = [85, 45, 50, 45, 45].map(|bits| NR * 32 * bits);
    assert_eq!((bits[0], &bits[1..]), (NR * (320 * 8 + 32), &of_blocks[..]));
}
