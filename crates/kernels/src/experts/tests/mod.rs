//! Compares experts with the formula at every instruction level. Also checks that the bits of a
//! token's result do not depend on the other tokens of the step.

mod matrices;
mod rule;

use std::sync::Arc;

use self::matrices::{Matrices, dtype};
use self::rule::{ROUTINGS, SOFTMAX, rule};
use super::*;
use crate::dispatch::Number;
use crate::element::Bf16;
use crate::isa::plain::Plain;
use crate::math;
use crate::memory::Room;
use crate::memory::tests::room;
use crate::model::Model;
use crate::packing::{Packing, Storage};
use crate::pool::Threads;
use crate::processor::Level;
use crate::rows::{Rows, Wanted};
use crate::sizes::{AttentionSizes, Factors, GateKind, Sizes};
use crate::step::Step;
use crate::team::tests::team;
use crate::tile::tests::numbers;
use crate::weights::{BesideWeights, DenseMatrices, ExpertBiases, FeedForward, Layer, Weights};

const HIDDEN: usize = 64;
const INNER: usize = 32;
const DENSE: usize = 48;
const HEAD_DIM: usize = 16;
const VOCABULARY: usize = 90;
const PAGE: usize = 16;
const POSITIONS: usize = PAGE * VOCABULARY;
const EPS: f32 = 1e-5;
const LAYERS: usize = 3;
/// The layer without experts.
const DENSE_LAYER: usize = 1;
const STORAGES: [Storage; 7] = [
    Storage::Plain,
    Storage::Int8,
    Storage::Q8_0,
    Storage::Q4_0,
    Storage::Q4_1,
    Storage::Mxfp4,
    Storage::Iq4Nl,
];

/// Applies the activation of a feed-forward network: to the gates, or without gates to all outputs.
fn activated<E: Element>(products: &[f64], kind: GateKind) -> Vec<E> {
    if kind == GateKind::SquaredRelu {
        return products.iter().map(|x| E::from_f32(x.max(0.0).powi(2) as f32)).collect();
    }
    let clamped = kind == GateKind::ClampedSwiglu;
    let (gates, ups) = products.split_at(products.len() / 2);
    let gate = |(&gate, &up): (&f64, &f64)| match clamped {
        false => gate / (1.0 + (-gate).exp()) * up,
        true => {
            let (gate, up) = (gate.min(7.0), up.clamp(-7.0, 7.0));
            gate / (1.0 + (-1.702 * gate).exp()) * (up + 1.0)
        }
    };
    gates.iter().zip(ups).map(|pair| E::from_f32(gate(pair) as f32)).collect()
}

/// A model of three layers: the first and the last have experts, the second has none
/// (`DENSE_LAYER`). Attention adds nothing.
struct Tiny<E> {
    /// If there are biases, gates are clamped (gpt-oss).
    sizes: ExpertSizes,
    /// False if there are no gates. Then all layers but the first consist only of a feed-forward
    /// network (Nemotron-H).
    gated: bool,
    embedding: Vec<E>,
    norm: Vec<E>,
    qkv: Matrices,
    router: Vec<E>,
    correction: Vec<f32>,
    /// The gate of the shared expert. If the experts are beside a dense network: the factors of the
    /// router's inputs, and the norm after the dense network.
    gate: Vec<E>,
    /// The factors of the experts' weights, beside a dense network.
    factors: Vec<E>,
    gate_up: Matrices,
    down: Matrices,
    /// The projections around experts with latent states.
    latent: [Matrices; 2],
    /// The biases of the router and of both projections, large enough to be clamped.
    biases: [Vec<E>; 3],
    /// The matrices of the layer without experts, and of the shared expert.
    dense: [Matrices; 4],
}

impl<E: Number> Tiny<E> {
    fn new((sizes, gated): (ExpertSizes, bool), storage: Storage, seed: u32) -> Self {
        let count = sizes.count;
        let (all, states) = ((storage, seed), sizes.states(HIDDEN));
        let first = |inner: usize| if gated { 2 * inner } else { inner };
        let plain = |more| (Storage::Plain, seed ^ more);
        let dense = |inner: usize| {
            [
                Matrices::new::<E>(1, (first(inner), HIDDEN), gated, plain(71)),
                Matrices::new::<E>(1, (HIDDEN, inner), false, plain(72)),
            ]
        };
        let [gate_up, down] = dense(DENSE);
        let [shared_gate_up, shared_down] = dense(sizes.shared.max(2));
        let norm = numbers::<E>(HIDDEN, seed ^ 2);
        Self {
            sizes,
            gated,
            embedding: numbers(VOCABULARY * HIDDEN, seed ^ 1),
            norm: norm.iter().map(|x| E::from_f32(1.0 + x.to_f32())).collect(),
            qkv: Matrices::new::<E>(1, (3 * HEAD_DIM, HIDDEN), false, (Storage::Plain, seed ^ 3)),
            router: numbers(count * HIDDEN, seed ^ 5),
            correction: numbers(count, seed ^ 6),
            gate: numbers(HIDDEN, seed ^ 7),
            factors: numbers(count, seed ^ 8),
            gate_up: Matrices::new::<E>(count, (first(INNER), states), gated, all),
            down: Matrices::new::<E>(count, (states, INNER), false, all),
            latent: [(states, HIDDEN, 73), (HIDDEN, states, 74)].map(|(outputs, inputs, more)| {
                Matrices::new::<E>(1, (outputs, inputs), false, plain(more))
            }),
            biases: [(1, 1.0), (2 * INNER, 9.0), (HIDDEN, 1.0)].map(|(each, largest)| {
                let biases = numbers::<E>(count * each, seed ^ each as u32);
                biases.iter().map(|x| E::from_f32(x.to_f32() * largest)).collect()
            }),
            dense: [gate_up, down, shared_gate_up, shared_down],
        }
    }

    fn model_sizes(&self) -> Sizes {
        Sizes {
            dtype: dtype::<E>(),
            kv_codes: false,
            hidden: HIDDEN,
            attentions: vec![AttentionSizes {
                heads: 1,
                kv_heads: 1,
                head_dim: HEAD_DIM,
                rotary_dim: HEAD_DIM,
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
            }],
            gate: self.function(),
            gated: self.gated,
            factors: Factors::NONE,
            mean_norms: false,
            wide_norms: false,
            intermediate: DENSE,
            layer_inputs: None,
            experts: Some(self.sizes),
            vocabulary: VOCABULARY,
            positions: POSITIONS,
            page_size: PAGE,
            page_count: VOCABULARY,
            window_page_count: 0,
            eps: EPS,
        }
    }

    fn function(&self) -> GateKind {
        match (self.gated, self.sizes.biases) {
            (false, _) => GateKind::SquaredRelu,
            (true, true) => GateKind::ClampedSwiglu,
            (true, false) => GateKind::Silu,
        }
    }

    fn dense(&self, at: usize, inner: usize) -> DenseMatrices {
        let [gate_up, down] = [at, at + 1].map(|at| self.dense[at].matrix());
        DenseMatrices { inner, gate_up, gate_up_bias: None, down, down_bias: None }
    }

    fn experts(&self) -> ExpertMatrices {
        let sizes = &self.sizes;
        let wide: Vec<f32> = self.router.iter().map(|x| x.to_f32()).collect();
        let [router, gate_up, down] = &self.biases;
        ExpertMatrices {
            router: if sizes.in_float32 { room(&wide) } else { room(&self.router) },
            correction: sizes.corrected.then(|| room(&self.correction)),
            latent: (sizes.latent > 0).then(|| [0, 1].map(|at| self.latent[at].matrix())),
            gate_up: self.gate_up.matrix(),
            down: self.down.matrix(),
            shared: (sizes.shared > 0).then(|| self.dense(2, sizes.shared)),
            shared_gate: sizes.shared_gate.then(|| room(&self.gate)),
            biases: sizes.biases.then(|| ExpertBiases {
                router: room(router),
                gate_up: room(gate_up),
                down: room(down),
            }),
            beside: sizes.beside.then(|| BesideWeights {
                router_factors: room(&self.gate),
                expert_factors: room(&self.factors),
                before: room(&self.norm),
                behind_dense: room(&self.gate),
                behind: room(&self.norm),
            }),
        }
    }

    fn weights(&self) -> Weights {
        let (dtype, storage) = (dtype::<E>(), Storage::Plain);
        let output =
            Packing { outputs: HIDDEN, inputs: HEAD_DIM, interleaved: false, dtype, storage };
        let nothing = vec![0_u8; output.bytes().expect("a matrix")];
        let mixes = |index: usize| self.gated || index == 0;
        let layer = |index: usize| Layer {
            attention: 0,
            recurrence: None,
            beside: None,
            latent: None,
            keys_of: None,
            parallel: false,
            input_norm: mixes(index).then(|| room(&self.norm)),
            attended_norm: None,
            fed_norm: (self.sizes.beside && index != DENSE_LAYER).then(|| room(&self.norm)),
            sinks: None,
            qkv: mixes(index).then(|| self.qkv.matrix()),
            qkv_bias: None,
            head_norms: None,
            output: mixes(index).then(|| weights::Matrix { storage, packed: room(&nothing) }),
            output_bias: None,
            post_norm: Some(room(&self.norm)),
            feed: Some(match index {
                DENSE_LAYER => FeedForward::Dense(self.dense(0, DENSE)),
                _ => FeedForward::Experts(self.experts()),
            }),
            inputs: None,
            factor: None,
        };
        let angles = vec![0.5; POSITIONS * HEAD_DIM / 2];
        Weights {
            embedding: room(&self.embedding),
            embedding_norm: None,
            final_norm: room(&self.norm),
            head: None,
            layers: (0..LAYERS).map(layer).collect(),
            angles: vec![(angles.clone(), angles)],
            query_scales: Vec::new(),
            layer_inputs: None,
        }
    }

    /// Returns the final states of `sampled`, indices of `tokens`, which are computed as one row of
    /// a step.
    fn states(
        &self,
        level: Level,
        tokens: &[i32],
        sampled: &[i64],
        threads: usize,
    ) -> Vec<Vec<f32>> {
        let (sizes, weights) = (self.model_sizes(), self.weights());
        sizes.check().expect("possible");
        weights.check(&sizes).expect("of these sizes");
        let rooms = |bytes: [usize; 2]| -> Vec<[Room; 2]> {
            let both = |_| bytes.map(|bytes| Room::new(bytes).expect("memory"));
            (0..LAYERS).map(both).collect()
        };
        let (pages, states) = (rooms(sizes.pool_bytes(0)), rooms([0; 2]));
        let threads = Arc::new(team(threads));
        let mut model = Model::<E>::new(&sizes, Arc::new(weights), pages, states, threads);
        let pages: Vec<i32> = (0..VOCABULARY as i32).collect();
        let rows = Rows {
            slot: &[0],
            start: &[0],
            length: &[tokens.len() as i64],
            given: &[],
            adapters: &[],
            tokens,
            token_stride: tokens.len(),
            pages: &pages,
            page_stride: pages.len(),
            window_pages: &[],
            sample: sampled,
            states: &[],
        };
        let mut states = vec![f32::NAN; sampled.len() * HIDDEN];
        let run = |threads: &Threads, view: &Step<'_, E>| {
            // SAFETY: each member calls it once; the caller detected the features.
            threads.compute(|member| unsafe { E::compute(level, (view, &member)) });
        };
        // Twice, to check that data left in the buffers by an earlier step does not matter.
        for _ in 0..2 {
            // SAFETY: the row is in the table, and there is room for all results.
            let done = unsafe { model.step(&rows, Wanted::States(&mut states), None, run) };
            assert!(done.is_ok());
        }
        states.chunks_exact(HIDDEN).map(<[f32]>::to_vec).collect()
    }

    /// The final states of a token by the formula; `None` if a choice is too close to a tie.
    fn expected(&self, token: i32) -> Option<Vec<f64>> {
        let row = &self.embedding[token as usize * HIDDEN..][..HIDDEN];
        let mut x: Vec<f64> = row.iter().map(|x| f64::from(x.to_f32())).collect();
        let weight: Vec<f32> = self.norm.iter().map(|x| x.to_f32()).collect();
        for layer in 0..LAYERS {
            let narrow: Vec<f32> = x.iter().map(|&x| x as f32).collect();
            let normalised = |weight: &[f32]| {
                let mut normed = vec![E::default(); HIDDEN];
                math::rms_norm::<E, Plain>(&narrow, weight, EPS, &mut normed);
                normed
            };
            let normed = normalised(&weight);
            let mut output = vec![0.0; HIDDEN];
            let mut add = |weight: f64, terms: Vec<f64>| {
                output.iter_mut().zip(terms).for_each(|(x, term)| *x += weight * term);
            };
            let dense = |at: usize, inner: usize| {
                let first = if self.gated { 2 * inner } else { inner };
                let inner = activated::<E>(&self.dense[at].of(0, first, &normed), self.function());
                self.dense[at + 1].of(0, HIDDEN, &inner)
            };
            if layer == DENSE_LAYER {
                add(1.0, dense(0, DENSE));
                x.iter_mut().zip(output).for_each(|(x, term)| *x += term);
                continue;
            }
            let wide = |of: &[E]| of.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
            let scored = match self.sizes.beside {
                false => normed.clone(),
                true => normalised(&wide(&self.gate).iter().map(|x| x / 8.0).collect::<Vec<_>>()),
            };
            let logits: Vec<f64> = self
                .router
                .chunks_exact(HIDDEN)
                .map(|w| {
                    w.iter()
                        .zip(&scored)
                        .map(|(w, x)| f64::from(w.to_f32()) * f64::from(x.to_f32()))
                        .sum()
                })
                .collect();
            let with_biases = |at: usize, expert: usize, mut products: Vec<f64>| {
                if self.sizes.biases {
                    let size = products.len();
                    let biases = self.biases[at][expert * size..].iter();
                    products.iter_mut().zip(biases).for_each(|(x, b)| *x += f64::from(b.to_f32()));
                }
                products
            };
            let logits = with_biases(0, 0, logits);
            let correction = if self.sizes.corrected { &self.correction[..] } else { &[] };
            let chosen = rule(&self.sizes, &logits, correction);
            for shift in [-1e-2, 1e-2] {
                for at in 0..logits.len() {
                    let mut other = logits.clone();
                    other[at] += shift;
                    let ids = |of: &[(usize, f64)]| of.iter().map(|it| it.0).collect::<Vec<_>>();
                    if ids(&rule(&self.sizes, &other, correction)) != ids(&chosen) {
                        return None;
                    }
                }
            }
            let narrowed = |x: Vec<f64>| x.into_iter().map(|x| E::from_f32(x as f32)).collect();
            let states = self.sizes.states(HIDDEN);
            let read = match self.sizes.latent {
                0 => normed.clone(),
                _ => narrowed(self.latent[0].of(0, states, &normed)),
            };
            let mut routed = vec![0.0; states];
            for (id, weight) in chosen {
                let (inputs, weight) = match self.sizes {
                    ExpertSizes { weighs_inputs: true, .. } => {
                        let scaled = |x: &E| E::from_f32(x.to_f32() * weight as f32);
                        (read.iter().map(scaled).collect(), 1.0)
                    }
                    ExpertSizes { beside: true, .. } => {
                        (read.clone(), weight * f64::from(self.factors[id].to_f32()))
                    }
                    _ => (read.clone(), weight),
                };
                let first = if self.gated { 2 * INNER } else { INNER };
                let products = with_biases(1, id, self.gate_up.of(id, first, &inputs));
                let inner = activated::<E>(&products, self.function());
                let terms = with_biases(2, id, self.down.of(id, states, &inner));
                routed.iter_mut().zip(terms).for_each(|(x, term)| *x += weight * term);
            }
            let routed = match self.sizes.latent {
                0 => routed,
                _ => self.latent[1].of::<E>(0, HIDDEN, &narrowed(routed)),
            };
            add(1.0, routed);
            if self.sizes.beside {
                let norm = |x: &[f64], weight: &[E]| -> Vec<f64> {
                    let mean = x.iter().map(|x| x * x).sum::<f64>() / HIDDEN as f64;
                    let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
                    x.iter().zip(weight).map(|(x, w)| x * factor * f64::from(w.to_f32())).collect()
                };
                let of_experts = norm(&output, &self.norm);
                let of_dense = norm(&dense(2, self.sizes.shared), &self.gate);
                let both: Vec<f64> = of_experts.iter().zip(of_dense).map(|(a, b)| a + b).collect();
                let both = norm(&both, &self.norm);
                x.iter_mut().zip(both).for_each(|(x, term)| *x += term);
                continue;
            }
            if self.sizes.shared > 0 {
                let product = |w: &[E]| -> f64 {
                    let terms = w.iter().zip(&normed);
                    terms.map(|(w, x)| f64::from(w.to_f32()) * f64::from(x.to_f32())).sum()
                };
                let factor = match self.sizes.shared_gate {
                    true => 1.0 / (1.0 + (-product(&self.gate)).exp()),
                    false => 1.0,
                };
                add(factor, dense(2, self.sizes.shared));
            }
            x.iter_mut().zip(output).for_each(|(x, term)| *x += term);
        }
        Some(x)
    }
}

fn check<E: Number>(
    level: Level,
    sizes: (ExpertSizes, bool),
    storage: Storage,
    seed: u32,
    bound: f64,
) {
    let model = Tiny::<E>::new(sizes, storage, seed);
    let tokens: Vec<i32> = (0..VOCABULARY as i32).collect();
    let sampled: Vec<i64> = (0..VOCABULARY as i64).collect();
    let found = model.states(level, &tokens, &sampled, 2);
    let (mut apart, mut size, mut clear) = (0.0, 0.0, 0);
    for (&token, found) in tokens.iter().zip(&found) {
        let Some(expected) = model.expected(token) else { continue };
        clear += 1;
        for (&found, expected) in found.iter().zip(expected) {
            apart += (f64::from(found) - expected).powi(2);
            size += expected.powi(2);
        }
    }
    assert!(clear > VOCABULARY / 4, "{clear} clear choices");
    assert!((apart / size).sqrt() < bound, "{storage:?} {}", (apart / size).sqrt());
    // A token gets the same bits with and without other tokens, for any number of members.
    for (threads, few) in [(1, 1), (3, 1), (2, 7), (1, 16), (3, 17), (2, 60)] {
        let first = seed as usize % (VOCABULARY - few);
        let part = &tokens[first..first + few];
        // Samples only the last tokens: for the other tokens, the last layer computes only keys and
        // values.
        let some: Vec<i64> = (few as i64 / 2..few as i64).collect();
        let again = model.states(level, part, &some, threads);
        for (&at, again) in some.iter().zip(again) {
            let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&again), bits(&found[first + at as usize]), "{few} {threads}");
        }
    }
}

fn check_all<E: Number>(level: Level, seed: u32) {
    let exact = if E::PAIR == 1 { 1e-5 } else { 8e-3 };
    for storage in STORAGES {
        let bound = if storage == Storage::Plain { exact } else { 2e-2 };
        check::<E>(level, (SOFTMAX, true), storage, seed, bound);
    }
    // With clamped gates of up to 7, whose exponentials enlarge errors.
    let biased = ExpertSizes { biases: true, ..SOFTMAX };
    check::<E>(level, (biased, true), Storage::Plain, seed, 2.0 * exact);
    check::<E>(level, (biased, true), Storage::Mxfp4, seed, 2e-2);
    for sizes in ROUTINGS {
        check::<E>(level, (sizes, true), Storage::Plain, seed, exact);
    }
    let weighing = ExpertSizes { weighs_inputs: true, sigmoid: true, shared: 24, ..SOFTMAX };
    let beside = ExpertSizes { beside: true, shared: 40, ..SOFTMAX };
    for (sizes, storage, bound) in [
        (weighing, Storage::Plain, exact),
        (weighing, Storage::Q8_0, 2e-2),
        (beside, Storage::Plain, 2.0 * exact),
        (beside, Storage::Q4_0, 2e-2),
    ] {
        check::<E>(level, (sizes, true), storage, seed, bound);
    }
    // Squares double relative errors.
    let ungated = ROUTINGS[4];
    let wide = ExpertSizes { latent: 96, shared: 0, ..ungated };
    for (sizes, storage, bound) in [
        (ungated, Storage::Plain, 4.0 * exact),
        (ungated, Storage::Q8_0, 4e-2),
        (ExpertSizes { latent: 32, ..ungated }, Storage::Plain, 4.0 * exact),
        (ExpertSizes { latent: 32, weighs_inputs: true, ..ungated }, Storage::Q4_0, 4e-2),
        (wide, Storage::Plain, 4.0 * exact),
    ] {
        check::<E>(level, (sizes, false), storage, seed, bound);
    }
    check::<E>(level, (wide, true), Storage::Plain, seed, 2.0 * exact);
}

#[test]
fn experts_are_the_formula_and_know_no_neighbours() {
    let levels = Level::ALL.iter().copied().filter(|level| level.is_there());
    for (seed, level) in levels.enumerate() {
        check_all::<f32>(level, 3 + seed as u32);
        check_all::<Bf16>(level, 77 + seed as u32);
    }
}
