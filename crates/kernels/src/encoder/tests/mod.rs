//! Compares an encoder with a reference computation, at every instruction level, with different
//! other prompts in the batch.

mod bert;

use std::fmt::Debug;
use std::sync::Arc;

use proptest::prelude::*;

use super::model::{Encoder, Refused};
use super::*;
use crate::element::Element;
use crate::isa::plain::{Plain, Portable};
use crate::isa::tests::{Check, kernels};
use crate::memory::tests::room;
use crate::pack::{pack, packed_len};
use crate::packing::{Dtype, Storage};
use crate::team::tests::team;
use crate::tile::Kernel;
use crate::tile::tests::numbers;
use crate::weights::Matrix;

const VOCABULARY: usize = 50;
const POSITIONS: usize = 150;
const EPS: f32 = 1e-5;

/// An encoder's sizes, and the seed of its weights.
#[derive(Clone, Copy, Debug)]
struct Model {
    sizes: BertSizes,
    seed: u32,
}

struct Dense<E> {
    weight: Vec<E>,
    packed: Vec<E>,
    bias: Vec<E>,
    inputs: usize,
}

impl<E: Element> Dense<E> {
    fn new(outputs: usize, inputs: usize, seed: u32) -> Self {
        let weight: Vec<E> = numbers(outputs * inputs, seed);
        let mut packed = vec![E::default(); packed_len(outputs, inputs)];
        // SAFETY: `Plain` runs on every processor.
        unsafe { pack::<E, Plain>(&weight, outputs, inputs, false, &mut packed) };
        Self { weight, packed, bias: numbers(outputs, !seed), inputs }
    }

    fn linear(&self) -> BertLinear {
        let matrix = Matrix { storage: Storage::Plain, packed: room(&self.packed) };
        BertLinear { matrix, bias: room(&self.bias) }
    }

    fn of(&self, x: &[f64]) -> Vec<f64> {
        let rows = self.weight.chunks_exact(self.inputs).zip(&self.bias);
        let dot = |(row, bias): (&[E], &E)| {
            let products = row.iter().zip(x).map(|(w, x)| f64::from(w.to_f32()) * x);
            products.sum::<f64>() + f64::from(bias.to_f32())
        };
        rows.map(dot).collect()
    }
}

struct Scales<E> {
    weight: Vec<E>,
    bias: Vec<E>,
}

impl<E: Element> Scales<E> {
    fn new(size: usize, seed: u32) -> Self {
        let weight = numbers::<E>(size, seed);
        let weight = weight.iter().map(|x| E::from_f32(1.0 + 0.3 * x.to_f32())).collect();
        Self { weight, bias: numbers(size, seed ^ 77) }
    }

    fn norm(&self) -> BertNorm {
        BertNorm { weight: room(&self.weight), bias: room(&self.bias) }
    }

    fn of(&self, x: &mut [f64]) {
        let size = x.len() as f64;
        let mean = x.iter().sum::<f64>() / size;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / size;
        for (x, (weight, bias)) in x.iter_mut().zip(self.weight.iter().zip(&self.bias)) {
            let normed = (*x - mean) / (variance + f64::from(EPS)).sqrt();
            *x = normed * f64::from(weight.to_f32()) + f64::from(bias.to_f32());
        }
    }
}

struct Block<E> {
    qkv: Dense<E>,
    output: Dense<E>,
    attention_norm: Scales<E>,
    up: Dense<E>,
    down: Dense<E>,
    output_norm: Scales<E>,
}

/// A reference model, computed by the formula in `f64`.
struct Naive<E> {
    sizes: BertSizes,
    tables: [Vec<E>; 3],
    norm: Scales<E>,
    blocks: Vec<Block<E>>,
    pooler: Dense<E>,
    classifier: Dense<E>,
}

impl<E: Element> Naive<E> {
    fn new(Model { sizes, seed }: Model) -> Self {
        let BertSizes { hidden, intermediate, .. } = sizes;
        let block = |index: u32| {
            let seed = seed.wrapping_add(100 * index);
            Block {
                qkv: Dense::new(3 * hidden, hidden, seed ^ 1),
                output: Dense::new(hidden, hidden, seed ^ 2),
                attention_norm: Scales::new(hidden, seed ^ 3),
                up: Dense::new(intermediate, hidden, seed ^ 4),
                down: Dense::new(hidden, intermediate, seed ^ 5),
                output_norm: Scales::new(hidden, seed ^ 6),
            }
        };
        Self {
            sizes,
            tables: [(VOCABULARY, 7), (POSITIONS, 8), (2, 9)]
                .map(|(rows, at)| numbers(rows * hidden, seed ^ at)),
            norm: Scales::new(hidden, seed ^ 10),
            blocks: (1..3).map(block).collect(),
            pooler: Dense::new(hidden, hidden, seed ^ 11),
            classifier: Dense::new(sizes.scores.max(1), hidden, seed ^ 12),
        }
    }

    fn weights(&self) -> BertWeights {
        let layer = |block: &Block<E>| BertLayer {
            qkv: block.qkv.linear(),
            output: block.output.linear(),
            attention_norm: block.attention_norm.norm(),
            up: block.up.linear(),
            down: block.down.linear(),
            output_norm: block.output_norm.norm(),
        };
        let [words, places, texts] = &self.tables;
        let scores = self.sizes.scores > 0;
        BertWeights {
            words: room(words),
            places: room(places),
            texts: room(texts),
            norm: self.norm.norm(),
            layers: self.blocks.iter().map(layer).collect(),
            score: scores.then(|| (self.pooler.linear(), self.classifier.linear())),
        }
    }

    fn encoder(&self, threads: usize) -> Encoder<E> {
        Encoder::new(&self.sizes, &self.weights(), Arc::new(team(threads)))
    }

    fn vector(&self, prompt: &Prompt) -> Vec<f64> {
        let hidden = self.sizes.hidden;
        let embed = |(position, &id): (usize, &i32)| {
            let second = prompt.segment > 0 && position >= prompt.segment;
            let rows = [id as usize, position, usize::from(second)];
            let rows: [_; 3] =
                std::array::from_fn(|of| &self.tables[of][rows[of] * hidden..][..hidden]);
            let sum = |at: usize| rows.iter().map(|row| f64::from(row[at].to_f32())).sum();
            let mut x: Vec<f64> = (0..hidden).map(sum).collect();
            self.norm.of(&mut x);
            x
        };
        let mut states: Vec<Vec<f64>> = prompt.tokens.iter().enumerate().map(embed).collect();
        for block in &self.blocks {
            self.layer(block, &mut states);
        }
        let mean = |at: usize| states.iter().map(|x| x[at]).sum::<f64>() / states.len() as f64;
        let vector = match self.sizes.first {
            true => states.swap_remove(0),
            false => (0..hidden).map(mean).collect(),
        };
        if self.sizes.scores == 0 {
            return vector;
        }
        let pooled: Vec<f64> = self.pooler.of(&vector).into_iter().map(f64::tanh).collect();
        self.classifier.of(&pooled)
    }

    fn layer(&self, block: &Block<E>, states: &mut [Vec<f64>]) {
        let BertSizes { hidden, heads, .. } = self.sizes;
        let dim = hidden / heads;
        let qkv: Vec<Vec<f64>> = states.iter().map(|x| block.qkv.of(x)).collect();
        for (x, of) in states.iter_mut().zip(&qkv) {
            let mut attended = Vec::new();
            for head in 0..heads {
                let at = |part: usize| part * hidden + head * dim..part * hidden + (head + 1) * dim;
                let weight = |other: &Vec<f64>| -> f64 {
                    let dot = of[at(0)].iter().zip(&other[at(1)]).map(|(q, k)| q * k);
                    (dot.sum::<f64>() / (dim as f64).sqrt()).exp()
                };
                let weights: Vec<f64> = qkv.iter().map(weight).collect();
                let total: f64 = weights.iter().sum();
                attended.extend(at(2).map(|v| {
                    qkv.iter().zip(&weights).map(|(other, w)| w * other[v]).sum::<f64>() / total
                }));
            }
            add(x, &block.output.of(&attended));
            block.attention_norm.of(x);
            let up = block.up.of(x).into_iter().map(|x| self.activate(x)).collect::<Vec<_>>();
            add(x, &block.down.of(&up));
            block.output_norm.of(x);
        }
    }

    fn activate(&self, x: f64) -> f64 {
        match self.sizes.activation {
            BertActivation::Gelu => x * crate::math::tests::below(x),
            BertActivation::GeluTanh => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
                0.5 * x * (1.0 + inner.tanh())
            }
            BertActivation::Relu => x.max(0.0),
        }
    }
}

fn add(x: &mut [f64], y: &[f64]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

#[derive(Clone)]
struct Prompt {
    tokens: Vec<i32>,
    segment: usize,
}

fn prompts(lengths: &[usize], seed: u32) -> Vec<Prompt> {
    let id = |at: usize| {
        ((at as u32).wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) as i32 % VOCABULARY as i32
    };
    let prompt = |(at, &length): (usize, &usize)| Prompt {
        tokens: (0..length).map(|token| id(at * 1000 + token)).collect(),
        segment: if at % 2 == 0 { 0 } else { 1 + length / 3 },
    };
    lengths.iter().enumerate().map(prompt).collect()
}

/// Computes a batch `[prompts, size]`, or returns the reason why it can't.
fn encode<E: Element, K: Kernel<E>>(
    encoder: &mut Encoder<E>,
    prompts: &[Prompt],
    size: usize,
) -> Result<Vec<f32>, Refused> {
    let stride = POSITIONS + 3;
    // The slots are in reverse order of the prompts.
    let mut table = vec![-1; prompts.len() * stride];
    let slot: Vec<i64> = (0..prompts.len() as i64).rev().collect();
    for (prompt, &slot) in prompts.iter().zip(&slot) {
        table[slot as usize * stride..][..prompt.tokens.len()].copy_from_slice(&prompt.tokens);
    }
    let column = |of: fn(&Prompt) -> usize| -> Vec<i64> {
        prompts.iter().map(|prompt| of(prompt) as i64).collect()
    };
    let (length, segment) = (column(|it| it.tokens.len()), column(|it| it.segment));
    let mut vectors = vec![f32::NAN; prompts.len() * size];
    let texts = Texts {
        slot: &slot,
        length: &length,
        segment: &segment,
        tokens: &table,
        token_stride: stride,
    };
    // SAFETY: the batch is valid; the caller detected the features of `K`.
    unsafe {
        encoder.encode(&texts, &mut vectors, |threads, pass| {
            threads.compute(|member| pass.compute::<K, Portable>(&member));
        })?;
    }
    Ok(vectors)
}

fn check<E: Element, K: Kernel<E>>(model: Model, lengths: &[usize], bound: f64) {
    let naive = Naive::<E>::new(model);
    let sizes = model.sizes;
    let size = if sizes.scores > 0 { sizes.scores } else { sizes.hidden };
    let prompts = prompts(lengths, model.seed);
    let mut encoder = naive.encoder(2);
    let together = encode::<E, K>(&mut encoder, &prompts, size).expect("in order");
    let mut apart = Vec::new();
    let mut alone = naive.encoder(1);
    for prompt in &prompts {
        apart.extend(
            encode::<E, K>(&mut alone, std::slice::from_ref(prompt), size).expect("in order"),
        );
    }
    assert!(together == apart, "the same bits alone and in company");
    for (found, prompt) in together.chunks_exact(size).zip(&prompts) {
        for (&found, exact) in found.iter().zip(naive.vector(prompt)) {
            assert!((f64::from(found) - exact).abs() < bound, "{found} {exact} {sizes:?}");
        }
    }
}

/// An encoder's model, and the lengths of its prompts.
struct Batch<'a>(Model, &'a [usize]);

impl Check for Batch<'_> {
    fn kernel<E: Element + Debug + PartialEq, K: Kernel<E>>(&self) {
        check::<E, K>(self.0, self.1, if E::PAIR == 1 { 1e-4 } else { 0.3 });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn an_encoder_is_the_formula(
        (heads, dim) in (1usize..4, prop::sample::select(vec![2usize, 16, 24, 32])),
        intermediate in prop::sample::select(vec![18usize, 64]),
        (activation, first, scores) in (prop::sample::select(ACTIVATIONS.to_vec()), any::<bool>(), 0usize..3),
        lengths in prop::collection::vec(1usize..40, 1..6),
        seed: u32,
    ) {
        let hidden = heads * dim;
        let sizes = BertSizes { hidden, heads, intermediate, activation, first, scores, ..SMALL };
        kernels(&Batch(Model { sizes, seed }, &lengths));
    }
}

const ACTIVATIONS: [BertActivation; 3] =
    [BertActivation::Gelu, BertActivation::GeluTanh, BertActivation::Relu];
const SMALL: BertSizes = BertSizes {
    dtype: Dtype::Float32,
    hidden: 32,
    heads: 2,
    intermediate: 64,
    vocabulary: VOCABULARY,
    positions: POSITIONS,
    kinds: 2,
    activation: BertActivation::Gelu,
    first: false,
    scores: 0,
    eps: EPS,
};

#[test]
fn long_prompts_lie_beside_short_ones() {
    for first in [false, true] {
        let model = Model { sizes: BertSizes { first, ..SMALL }, seed: 3 };
        kernels(&Batch(model, &[POSITIONS, 1, 97, 2]));
    }
}

#[test]
fn what_cannot_be_computed_is_refused() {
    let naive = |sizes| Naive::<f32>::new(Model { sizes, seed: 3 });
    let mut encoder = naive(SMALL).encoder(2);
    let batch = |encoder: &mut Encoder<f32>, prompts: &[Prompt]| {
        encode::<f32, Plain>(encoder, prompts, SMALL.hidden)
    };
    let mut encode = |tokens: Vec<i32>, segment| batch(&mut encoder, &[Prompt { tokens, segment }]);
    assert_eq!(encode(vec![], 0), Err(Refused::Length));
    assert_eq!(encode(vec![0; POSITIONS + 1], 0), Err(Refused::Length));
    assert_eq!(encode(vec![1, VOCABULARY as i32], 0), Err(Refused::Token));
    assert_eq!(encode(vec![1, -1], 0), Err(Refused::Token));
    assert!(encode(vec![1, 2], 1).is_ok());
    let mut encoder = naive(BertSizes { kinds: 1, ..SMALL }).encoder(1);
    let pair = Prompt { tokens: vec![1, 2], segment: 1 };
    assert_eq!(batch(&mut encoder, &[pair]), Err(Refused::Pair));
    assert_eq!(batch(&mut encoder, &[]), Ok(vec![]));
}
