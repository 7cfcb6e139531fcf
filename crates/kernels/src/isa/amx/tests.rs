//! Compares this processor's tiles, and the vectors that replace them, with an emulation that
//! follows Intel's manual.

use proptest::prelude::*;

use super::unit::Emulated;
use super::*;
use crate::processor;
use crate::tile::tests::{arranged, numbers};

/// Operands of products and of attention.
struct Operands {
    rows: usize,
    queries: usize,
    k: usize,
    /// `k`, rounded up to whole vectors.
    dim: usize,
    a: Vec<Bf16>,
    panel: Vec<Bf16>,
    keys: Vec<Bf16>,
    weights: Vec<Bf16>,
    before: Vec<f32>,
}

impl Operands {
    /// Every seventh number is multiplied by `small`; with a tiny `small`, products are denormal.
    fn new(k: usize, rows: usize, seed: u32, small: f32) -> Self {
        let scaled = |count: usize, seed: u32| -> Vec<Bf16> {
            let numbers = numbers::<f32>(count, seed).into_iter().enumerate();
            numbers.map(|(i, x)| Bf16::from_f32(if i % 7 == 0 { x * small } else { x })).collect()
        };
        let (queries, dim) = (rows.min(HIGH), k.next_multiple_of(LANES));
        Self {
            rows,
            queries,
            k,
            dim,
            a: scaled(rows * k, seed),
            panel: scaled(NR * k, !seed),
            keys: scaled(GROUPS * GROUP * dim, seed ^ 1),
            weights: scaled(MAX_ROWS * BLOCK, seed ^ 5),
            before: numbers(queries * dim, seed ^ 2),
        }
    }

    fn groups(&self) -> [*const Bf16; GROUPS] {
        std::array::from_fn(|group| self.keys[group * GROUP * self.dim..].as_ptr())
    }

    /// # Safety
    /// The processor must have the features that the tiles require, here and below.
    unsafe fn product<U: Tiles>(&self) -> Vec<u32> {
        let mut out = [[0.0; NR]; MAX_ROWS];
        let numbers = arranged::<Bf16, AmxBf16<U>>(&self.a, self.rows, self.k);
        let (numbers, panel, none) = (numbers.as_ptr(), self.panel.as_ptr(), Ahead::Nothing);
        // SAFETY: all operands have the sizes that the contracts require.
        unsafe {
            AmxBf16::<U>::tile(numbers, self.rows, panel, self.k, none, false, out.as_mut_ptr());
        }
        bits(out.as_flattened())
    }

    unsafe fn attention<U: Tiles>(&self, tiles: bool) -> Vec<u32> {
        let (rows, groups, mut mixed) = (self.queries, self.groups(), self.before.clone());
        let mut scores: Scores = [[0.0; BLOCK]; MAX_ROWS];
        let queries = arranged::<Bf16, AmxBf16<U>>(&self.a[..rows * self.k], rows, self.k);
        let (queries, weights, to) = (queries.as_ptr(), self.weights.as_ptr(), mixed.as_mut_ptr());
        let one = [1.0; MAX_ROWS];
        // SAFETY: all operands have the sizes that the contracts require.
        unsafe {
            if tiles {
                tiled_scores::<U>((queries, rows), (&groups, &groups), self.k, &mut scores);
                tiled_mix::<U>((weights, rows), (&groups, &groups), self.dim, to);
            } else {
                AmxBf16::<U>::scores(queries, rows, &groups, &groups, self.k, &mut scores);
                AmxBf16::<U>::mix(weights, rows, &groups, &groups, self.dim, &one, to);
            }
        }
        let mut found = bits(scores[..rows].as_flattened());
        found.extend(bits(&mixed));
        found
    }
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

proptest! {
    #[test]
    fn tiles_are_as_the_manual_says(
        k in 1usize..160,
        rows in 1usize..=2 * HIGH,
        seed: u32,
        small in prop::sample::select(vec![1.0, 1e-20]),
    ) {
        if processor::has_amx() {
            let operands = Operands::new(2 * k, rows, seed, small);
            // SAFETY: the features were detected.
            unsafe {
                prop_assert_eq!(operands.product::<Hardware>(), operands.product::<Emulated>());
                let found = operands.attention::<Hardware>(true);
                prop_assert_eq!(found, operands.attention::<Emulated>(true));
            }
        }
    }

    #[test]
    fn few_queries_have_the_bits_of_tiles(
        k in 1usize..160,
        rows in 1usize..=few::MOST,
        seed: u32,
    ) {
        if processor::has_avx512_bf16() {
            let operands = Operands::new(2 * k, rows, seed, 1.0);
            // SAFETY: the features were detected.
            unsafe {
                let found = operands.attention::<Emulated>(false);
                prop_assert_eq!(found, operands.attention::<Emulated>(true));
            }
        }
    }
}
