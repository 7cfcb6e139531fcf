//! An encoder compared with the formula, at every level, with any other prompts in the batch.

mod front;

use std::fmt::Debug;

use proptest::prelude::*;

use super::*;
use crate::isa::plain::{Plain, Portable};
use crate::isa::tests::{Check, kernels};
use crate::pack::{pack, packed_len};
use crate::team::Kind;
use crate::tile::Kernel;
use crate::tile::tests::numbers;

const VOCABULARY: usize = 50;
const POSITIONS: usize = 150;
const EPS: f32 = 1e-5;

#[derive(Clone, Copy, Debug)]
struct Sizes {
    hidden: usize,
    heads: usize,
    intermediate: usize,
    activation: u32,
    first: bool,
    scores: usize,
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
        // SAFETY: plain loops.
        unsafe { pack::<E, Plain>(&weight, outputs, inputs, false, &mut packed) };
        Self { weight, packed, bias: numbers(outputs, !seed), inputs }
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

/// A model by the formula.
struct Naive<E> {
    sizes: Sizes,
    tables: [Vec<E>; 3],
    norm: Scales<E>,
    blocks: Vec<Block<E>>,
    pooler: Dense<E>,
    classifier: Dense<E>,
}

impl<E: Element> Naive<E> {
    fn new(sizes: Sizes) -> Self {
        let Sizes { hidden, intermediate, seed, .. } = sizes;
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

    /// With packed matrices.
    fn encoder(&self, threads: usize) -> Encoder<E> {
        fn at<E>(values: &[E]) -> *const c_void {
            values.as_ptr().cast()
        }
        let Sizes { hidden, heads, intermediate, activation, first, scores, .. } = self.sizes;
        let layer = |block: &Block<E>| EncoderLayerSpec {
            qkv: at(&block.qkv.packed),
            qkv_bias: at(&block.qkv.bias),
            output: at(&block.output.packed),
            output_bias: at(&block.output.bias),
            attention_norm: at(&block.attention_norm.weight),
            attention_norm_bias: at(&block.attention_norm.bias),
            up: at(&block.up.packed),
            up_bias: at(&block.up.bias),
            down: at(&block.down.packed),
            down_bias: at(&block.down.bias),
            output_norm: at(&block.output_norm.weight),
            output_norm_bias: at(&block.output_norm.bias),
            formats: [0; 4],
        };
        let layers: Vec<EncoderLayerSpec> = self.blocks.iter().map(layer).collect();
        let spec = EncoderSpec {
            dtype: 0,
            layers: layers.len() as u32,
            hidden: hidden as u32,
            heads: heads as u32,
            intermediate: intermediate as u32,
            vocabulary: VOCABULARY as u32,
            positions: POSITIONS as u32,
            kinds: 2,
            activation,
            pooling: u32::from(first),
            scores: scores as u32,
            threads: threads as u32,
            eps: EPS,
            words: at(&self.tables[0]),
            places: at(&self.tables[1]),
            texts: at(&self.tables[2]),
            norm: at(&self.norm.weight),
            norm_bias: at(&self.norm.bias),
            pooler: at(&self.pooler.packed),
            pooler_bias: at(&self.pooler.bias),
            classifier: at(&self.classifier.packed),
            classifier_bias: at(&self.classifier.bias),
            layer: layers.as_ptr(),
        };
        // SAFETY: what it points to is in the model, which outlives the encoder.
        unsafe { Encoder::new(&spec, Team { threads, kind: Kind::Started }) }.expect("possible")
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
        let Sizes { hidden, heads, .. } = self.sizes;
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
            0 => x * crate::math::tests::below(x),
            1 => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
                0.5 * x * (1.0 + inner.tanh())
            }
            _ => x.max(0.0),
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

/// Computes a batch `[prompts, size]`, or tells why it can't.
fn encode<E: Element, K: Kernel<E>>(
    encoder: &mut Encoder<E>,
    prompts: &[Prompt],
    size: usize,
) -> Result<Vec<f32>, Refused> {
    let stride = POSITIONS + 3;
    // The slots lie the other way round.
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
    let batch = BatchSpec {
        rows: prompts.len() as u64,
        slot: slot.as_ptr(),
        length: length.as_ptr(),
        segment: segment.as_ptr(),
        tokens: table.as_ptr(),
        token_stride: stride as u64,
        vectors: vectors.as_mut_ptr(),
    };
    // SAFETY: the batch is there; the caller detected what `K` needs.
    unsafe {
        encoder
            .encode(&batch, |team, pass| team.run(|member| pass.compute::<K, Portable>(&member)))?;
    }
    Ok(vectors)
}

fn check<E: Element, K: Kernel<E>>(sizes: Sizes, lengths: &[usize], bound: f64) {
    let naive = Naive::<E>::new(sizes);
    let size = if sizes.scores > 0 { sizes.scores } else { sizes.hidden };
    let prompts = prompts(lengths, sizes.seed);
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

/// Sizes of an encoder, and lengths of its prompts.
struct Batch<'a>(Sizes, &'a [usize]);

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
        (activation, first, scores) in (0u32..3, any::<bool>(), 0usize..3),
        lengths in prop::collection::vec(1usize..40, 1..6),
        seed: u32,
    ) {
        let hidden = heads * dim;
        let sizes = Sizes { hidden, heads, intermediate, activation, first, scores, seed };
        kernels(&Batch(sizes, &lengths));
    }
}

const SMALL: Sizes = Sizes {
    hidden: 32,
    heads: 2,
    intermediate: 64,
    activation: 0,
    first: false,
    scores: 0,
    seed: 3,
};

#[test]
fn long_prompts_lie_beside_short_ones() {
    for first in [false, true] {
        kernels(&Batch(Sizes { first, ..SMALL }, &[POSITIONS, 1, 97, 2]));
    }
}

#[test]
fn what_cannot_be_computed_is_refused() {
    let naive = Naive::<f32>::new(SMALL);
    let mut encoder = naive.encoder(2);
    let batch = |encoder: &mut Encoder<f32>, prompts: &[Prompt]| {
        encode::<f32, Plain>(encoder, prompts, SMALL.hidden)
    };
    let mut encode = |tokens: Vec<i32>, segment| batch(&mut encoder, &[Prompt { tokens, segment }]);
    assert_eq!(encode(vec![], 0), Err(Refused::Length));
    assert_eq!(encode(vec![0; POSITIONS + 1], 0), Err(Refused::Length));
    assert_eq!(encode(vec![1, VOCABULARY as i32], 0), Err(Refused::Token));
    assert_eq!(encode(vec![1, -1], 0), Err(Refused::Token));
    assert!(encode(vec![1, 2], 1).is_ok());
    let mut encoder = naive.encoder(1);
    encoder.kinds = 1;
    let pair = Prompt { tokens: vec![1, 2], segment: 1 };
    assert_eq!(batch(&mut encoder, &[pair]), Err(Refused::Pair));
    assert_eq!(batch(&mut encoder, &[]), Ok(vec![]));
}
