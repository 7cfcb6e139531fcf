//! Experts compared with the formula, at every level, and a token's bits with any other tokens in
//! the step.

use proptest::prelude::*;

use super::*;
use crate::codes::SHARED;
use crate::codes::tests::Encoded;
use crate::dispatch::{Level, Number};
use crate::element::Bf16;
use crate::isa::plain::{Array, Plain};
use crate::layer::{AttentionSpec, LayerSpec};
use crate::math;
use crate::model::{Model, ModelSpec, StepSpec};
use crate::pack::pack;
use crate::quantise::{pack_blocks, quantise, stored_len, unpacked};
use crate::step::Step;
use crate::team::{Kind, Team};
use crate::tile::tests::numbers;

const HIDDEN: usize = 64;
const INNER: usize = 32;
const DENSE: usize = 48;
const HEAD_DIM: usize = 16;
const VOCABULARY: usize = 90;
const PAGE: usize = 16;
const EPS: f32 = 1e-5;
const FORMATS: [Option<Format>; 7] = [
    None,
    Some(Format::Int8),
    Some(Format::Q8_0),
    Some(Format::Q4_0),
    Some(Format::Q4_1),
    Some(Format::Mxfp4),
    Some(Format::Iq4Nl),
];

fn number(format: Option<Format>) -> u32 {
    (0..7).find(|&number| Format::of(number) == format).unwrap_or(0)
}

/// One matrix, or that of all experts: packed, and with its values.
struct Matrices {
    format: Option<Format>,
    inputs: usize,
    packed: Vec<u8>,
    /// `[count, outputs, inputs]`.
    values: Vec<f32>,
}

impl Matrices {
    fn new<E: Element>(
        count: usize,
        (outputs, inputs): (usize, usize),
        interleaved: bool,
        (format, seed): (Option<Format>, u32),
    ) -> Self {
        let (mut packed, mut values) = (Vec::new(), Vec::new());
        for index in 0..count {
            let source: Vec<E> = numbers(outputs * inputs, seed ^ (index as u32 * 7919 + 13));
            let Some(format) = format else {
                let mut one =
                    vec![E::default(); packed_len(padded_outputs(outputs, interleaved), inputs)];
                // SAFETY: plain loops.
                unsafe { pack::<E, Plain>(&source, outputs, inputs, interleaved, &mut one) };
                // SAFETY: numbers, as bytes.
                packed.extend_from_slice(unsafe {
                    std::slice::from_raw_parts(one.as_ptr().cast::<u8>(), size_of_val(&one[..]))
                });
                values.extend(source.iter().map(|x| x.to_f32()));
                continue;
            };
            let mut one = vec![0; quantised_bytes(format, outputs, inputs, interleaved)];
            if format == Format::Int8 {
                quantise(&source, outputs, inputs, interleaved, &mut one);
                for row in source.chunks_exact(inputs) {
                    values.extend(meant(Some(format), row));
                }
            } else {
                let mut stored: Vec<u8> = numbers::<f32>(stored_len(format, outputs, inputs), seed)
                    .iter()
                    .map(|x| (x.to_bits() >> 7) as u8)
                    .collect();
                for block in stored.chunks_exact_mut(stored_len(format, 1, SHARED)) {
                    // 2^-7, and of codes of 8 bits 2^-11; least values of -2^-4.
                    let wide = matches!(format, Format::Q8_0 | Format::Iq4Nl);
                    let scale: u16 = if wide { 0x1000 } else { 0x2000 };
                    match format {
                        Format::Mxfp4 => block[0] = 121,
                        _ => block[..2].copy_from_slice(&scale.to_le_bytes()),
                    }
                    if format == Format::Q4_1 {
                        block[2..4].copy_from_slice(&0xac00_u16.to_le_bytes());
                    }
                    values.extend(unpacked(format, block));
                }
                pack_blocks(format, &stored, outputs, inputs, interleaved, &mut one);
            }
            packed.extend(one);
        }
        Self { format, inputs, packed, values }
    }

    /// Products of a row with all outputs of one of the matrices.
    fn of<E: Element>(&self, index: usize, outputs: usize, row: &[E]) -> Vec<f64> {
        let x = meant(self.format, row);
        let size = outputs * self.inputs;
        let rows = self.values[index * size..][..size].chunks_exact(self.inputs);
        rows.map(|w| w.iter().zip(&x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum()).collect()
    }
}

/// A row as it is multiplied with a matrix of a format.
fn meant<E: Element>(format: Option<Format>, row: &[E]) -> Vec<f32> {
    let Some(format) = format else { return row.iter().map(|x| x.to_f32()).collect() };
    let shared = format.shared(row.len());
    let Encoded { codes, scales, .. } = Encoded::of::<E, Array>(row, row.len(), shared);
    codes.iter().enumerate().map(|(at, &code)| scales[at / shared] * f32::from(code)).collect()
}

fn gated<E: Element>(products: &[f64], clamped: bool) -> Vec<E> {
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

/// The rule, for tokens without ties: ids ascending with their weights.
fn rule(routing: &RoutingSpec, logits: &[f64], correction: &[f32]) -> Vec<(usize, f64)> {
    let scores: Vec<f64> = match routing.scores {
        0 => {
            let sum: f64 = logits.iter().map(|x| x.exp()).sum();
            logits.iter().map(|x| x.exp() / sum).collect()
        }
        _ => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
    };
    let mut wanted = scores.clone();
    for (wanted, &correction) in wanted.iter_mut().zip(correction) {
        *wanted += f64::from(correction);
    }
    let best = |values: &[f64], count: usize| {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|&a, &b| values[b].total_cmp(&values[a]).then(a.cmp(&b)));
        order.truncate(count);
        order
    };
    let size = wanted.len() / routing.groups as usize;
    let of_group = |group: &[f64]| -> f64 {
        best(group, routing.best_of_group as usize).iter().map(|&at| group[at]).sum()
    };
    let groups: Vec<f64> = wanted.chunks_exact(size).map(of_group).collect();
    let kept = best(&groups, routing.kept_groups as usize);
    for (id, wanted) in wanted.iter_mut().enumerate() {
        if !kept.contains(&(id / size)) {
            *wanted = f64::NEG_INFINITY;
        }
    }
    let mut ids = best(&wanted, routing.per_token as usize);
    ids.sort_unstable();
    let sum: f64 = ids.iter().map(|&id| scores[id]).sum();
    let divisor = if routing.normalise == 1 { sum + 1e-20 } else { 1.0 };
    ids.iter().map(|&id| (id, scores[id] / divisor * f64::from(routing.scaling))).collect()
}

/// Two layers with experts around one without; attention gives nothing.
struct Tiny<E> {
    routing: RoutingSpec,
    /// Experts and the router have biases, and gates are clamped (gpt-oss).
    biased: bool,
    format: Option<Format>,
    embedding: Vec<E>,
    norm: Vec<E>,
    nothing: Vec<u8>,
    qkv: Matrices,
    router: Vec<E>,
    /// The same in float32.
    wide_router: Vec<f32>,
    correction: Vec<f32>,
    /// The gate of the shared expert.
    gate: Vec<E>,
    gate_up: Matrices,
    down: Matrices,
    /// The biases of the router and of both products, large enough to be clamped.
    biases: [Vec<E>; 3],
    /// The matrices of the layer without experts, and of the shared expert.
    dense: [Matrices; 4],
    angles: Vec<f32>,
    pages: Vec<Vec<E>>,
}

impl<E: Number> Tiny<E> {
    fn new((routing, biased): (RoutingSpec, bool), format: Option<Format>, seed: u32) -> Self {
        let count = routing.count as usize;
        let all = (format, seed);
        let shared = routing.shared.max(2) as usize;
        let router: Vec<E> = numbers(count * HIDDEN, seed ^ 5);
        let dense = |inner: usize| {
            let of = |shape, gated, more| Matrices::new::<E>(1, shape, gated, (None, seed ^ more));
            [of((2 * inner, HIDDEN), true, 71), of((HIDDEN, inner), false, 72)]
        };
        let [gate_up, down] = dense(DENSE);
        let [shared_gate_up, shared_down] = dense(shared);
        let positions = PAGE * VOCABULARY;
        Self {
            routing,
            biased,
            format,
            embedding: numbers(VOCABULARY * HIDDEN, seed ^ 1),
            norm: numbers::<E>(HIDDEN, seed ^ 2)
                .iter()
                .map(|x| E::from_f32(1.0 + x.to_f32()))
                .collect(),
            nothing: vec![0; 4 * VOCABULARY * HIDDEN],
            qkv: Matrices::new::<E>(1, (3 * HEAD_DIM, HIDDEN), false, (None, seed ^ 3)),
            wide_router: router.iter().map(|x| x.to_f32()).collect(),
            router,
            correction: numbers(count, seed ^ 6),
            gate: numbers(HIDDEN, seed ^ 7),
            gate_up: Matrices::new::<E>(count, (2 * INNER, HIDDEN), true, all),
            down: Matrices::new::<E>(count, (HIDDEN, INNER), false, all),
            biases: [(1, 1.0), (2 * INNER, 9.0), (HIDDEN, 1.0)].map(|(each, largest)| {
                let biases = numbers::<E>(count * each, seed ^ each as u32);
                biases.iter().map(|x| E::from_f32(x.to_f32() * largest)).collect()
            }),
            dense: [gate_up, down, shared_gate_up, shared_down],
            angles: vec![0.5; positions * HEAD_DIM / 2],
            pages: vec![vec![E::default(); positions * HEAD_DIM]; 6],
        }
    }

    fn corrected(&self) -> bool {
        corrected(&self.routing)
    }

    /// The shared expert of this size has a gate (Qwen2-MoE).
    fn has_gate(&self) -> bool {
        self.routing.shared == GATED
    }

    /// The final stream of each of `tokens`, as one row of a step; `sampled`: of those.
    fn states(
        &mut self,
        level: Level,
        tokens: &[i32],
        sampled: &[i64],
        threads: usize,
    ) -> Vec<Vec<f32>> {
        let address = |bytes: &[u8]| bytes.as_ptr().cast::<c_void>();
        let null: *const c_void = std::ptr::null();
        let norm = self.norm.as_ptr().cast::<c_void>();
        let router = match self.routing.in_float32 {
            0 => self.router.as_ptr().cast(),
            _ => self.wide_router.as_ptr().cast(),
        };
        let correction = if self.corrected() { self.correction.as_ptr() } else { null.cast() };
        let shared_gate = if self.has_gate() { self.gate.as_ptr().cast() } else { null };
        let shared = self.routing.shared > 0;
        let bias = |at: usize| match self.biased {
            true => self.biases[at].as_ptr().cast::<c_void>(),
            false => null,
        };
        let mut layers = Vec::new();
        for (layer, pages) in self.pages.chunks_exact_mut(2).enumerate() {
            let [keys, values] = pages else { unreachable!("two") };
            let experts = ExpertsSpec {
                router,
                correction,
                gate_up: address(&self.gate_up.packed),
                down: address(&self.down.packed),
                formats: [number(self.format); 2],
                shared_gate,
                router_bias: bias(0),
                gate_up_bias: bias(1),
                down_bias: bias(2),
            };
            let has_experts = layer != 1;
            let dense = |at: usize| match (has_experts, shared) {
                (false, _) => address(&self.dense[at].packed),
                (true, true) => address(&self.dense[2 + at].packed),
                (true, false) => null,
            };
            layers.push(LayerSpec {
                input_norm: norm,
                qkv: address(&self.qkv.packed),
                qkv_bias: null,
                q_norm: null,
                k_norm: null,
                output: address(&self.nothing),
                output_bias: null,
                post_norm: norm,
                gate_up: dense(0),
                gate_up_bias: null,
                down: dense(1),
                down_bias: null,
                keys: keys.as_mut_ptr().cast(),
                values: values.as_mut_ptr().cast(),
                attended_norm: null,
                fed_norm: null,
                sinks: null,
                formats: [0; 4],
                attention: 0,
                parallel: 0,
                experts: if has_experts { experts } else { ExpertsSpec::NONE },
                recurrence: std::ptr::null(),
            });
        }
        let kind = AttentionSpec {
            heads: 1,
            kv_heads: 1,
            head_dim: HEAD_DIM as u32,
            rotary_dim: HEAD_DIM as u32,
            window: 0,
            chunk: 0,
            norm_rows: 0,
            scale: 0.25,
            cap: 0.0,
            gate: 0,
            cos: self.angles.as_ptr(),
            sin: self.angles.as_ptr(),
        };
        let spec = ModelSpec {
            dtype: u32::from(E::PAIR == 2),
            layers: layers.len() as u32,
            hidden: HIDDEN as u32,
            attentions: 1,
            attention: &raw const kind,
            mean_norms: 0,
            wide_norms: 0,
            activation: if self.biased { 3 } else { 0 },
            embedding_scale: 1.0,
            input_scale: 1.0,
            residual_scale: 1.0,
            logit_scale: 1.0,
            logit_cap: 0.0,
            intermediate: DENSE as u32,
            vocabulary: VOCABULARY as u32,
            positions: (PAGE * VOCABULARY) as u32,
            page_size: PAGE as u32,
            page_count: VOCABULARY as u32,
            threads: threads as u32,
            eps: EPS,
            embedding: self.embedding.as_ptr().cast(),
            final_norm: norm,
            head: address(&self.nothing),
            layer: layers.as_ptr(),
            head_format: 0,
            routing: self.routing,
            kv_codes: 0,
            query_scales: std::ptr::null(),
        };
        let pages: Vec<i32> = (0..VOCABULARY as i32).collect();
        let (zero, length) = ([0_i64], [tokens.len() as i64]);
        let mut states = vec![f32::NAN; sampled.len() * HIDDEN];
        let step = StepSpec {
            rows: 1,
            slot: zero.as_ptr(),
            start: zero.as_ptr(),
            length: length.as_ptr(),
            tokens: tokens.as_ptr(),
            token_stride: tokens.len() as u64,
            pages: pages.as_ptr(),
            page_stride: pages.len() as u64,
            sample: sampled.as_ptr(),
            sampled: sampled.len() as u64,
            given: std::ptr::null(),
            given_until: std::ptr::null(),
            logits: std::ptr::null_mut(),
            best: std::ptr::null_mut(),
            finite: std::ptr::null_mut(),
            times: std::ptr::null_mut(),
            states: states.as_mut_ptr(),
            vectors: std::ptr::null_mut(),
            state_rows: std::ptr::null(),
        };
        let team = Team { threads, kind: Kind::Started };
        // SAFETY: everything lives and is as described; the caller detected the features.
        unsafe {
            assert!(spec.is_possible());
            let mut model = Model::<E>::new(&spec, team);
            let run = |team: &Team, view: &Step<'_, E>| {
                team.run(|member| E::compute(level, (view, &member)));
            };
            // Twice: what a step leaves in buffers is nobody's business.
            for _ in 0..2 {
                assert!(model.step(&step, None, run).is_ok());
            }
        }
        states.chunks_exact(HIDDEN).map(<[f32]>::to_vec).collect()
    }

    /// The same by the formula; none where a choice is too close to call.
    fn expected(&self, token: i32) -> Option<Vec<f64>> {
        let row = &self.embedding[token as usize * HIDDEN..][..HIDDEN];
        let mut x: Vec<f64> = row.iter().map(|x| f64::from(x.to_f32())).collect();
        let weight: Vec<f32> = self.norm.iter().map(|x| x.to_f32()).collect();
        for layer in 0..3 {
            let narrow: Vec<f32> = x.iter().map(|&x| x as f32).collect();
            let mut normed = vec![E::default(); HIDDEN];
            math::rms_norm::<E, Plain>(&narrow, &weight, EPS, &mut normed);
            let mut add = |weight: f64, terms: Vec<f64>| {
                x.iter_mut().zip(terms).for_each(|(x, term)| *x += weight * term);
            };
            let dense = |at: usize, inner: usize| {
                let inner = gated::<E>(&self.dense[at].of(0, 2 * inner, &normed), self.biased);
                self.dense[at + 1].of(0, HIDDEN, &inner)
            };
            if layer == 1 {
                add(1.0, dense(0, DENSE));
                continue;
            }
            let logits: Vec<f64> = self
                .router
                .chunks_exact(HIDDEN)
                .map(|w| {
                    w.iter()
                        .zip(&normed)
                        .map(|(w, x)| f64::from(w.to_f32()) * f64::from(x.to_f32()))
                        .sum()
                })
                .collect();
            let with_biases = |at: usize, expert: usize, mut products: Vec<f64>| {
                if self.biased {
                    let size = products.len();
                    let biases = self.biases[at][expert * size..].iter();
                    products.iter_mut().zip(biases).for_each(|(x, b)| *x += f64::from(b.to_f32()));
                }
                products
            };
            let logits = with_biases(0, 0, logits);
            let correction = if self.corrected() { &self.correction[..] } else { &[] };
            let chosen = rule(&self.routing, &logits, correction);
            for shift in [-1e-2, 1e-2] {
                for at in 0..logits.len() {
                    let mut other = logits.clone();
                    other[at] += shift;
                    let ids = |of: &[(usize, f64)]| of.iter().map(|it| it.0).collect::<Vec<_>>();
                    if ids(&rule(&self.routing, &other, correction)) != ids(&chosen) {
                        return None;
                    }
                }
            }
            for (id, weight) in chosen {
                let products = with_biases(1, id, self.gate_up.of(id, 2 * INNER, &normed));
                let inner = gated::<E>(&products, self.biased);
                add(weight, with_biases(2, id, self.down.of(id, HIDDEN, &inner)));
            }
            if self.routing.shared > 0 {
                let product = |w: &[E]| -> f64 {
                    let terms = w.iter().zip(&normed);
                    terms.map(|(w, x)| f64::from(w.to_f32()) * f64::from(x.to_f32())).sum()
                };
                let factor = match self.has_gate() {
                    true => 1.0 / (1.0 + (-product(&self.gate)).exp()),
                    false => 1.0,
                };
                add(factor, dense(2, self.routing.shared as usize));
            }
        }
        Some(x)
    }
}

const SOFTMAX: RoutingSpec = RoutingSpec {
    count: 12,
    per_token: 3,
    intermediate: INNER as u32,
    shared: 0,
    scores: 0,
    in_float32: 0,
    groups: 1,
    kept_groups: 1,
    best_of_group: 1,
    normalise: 1,
    scaling: 1.0,
};
/// Sigmoids are corrected (DeepSeek-V3), and the softmax of a router in 32 bits without groups
/// (ERNIE 4.5).
fn corrected(routing: &RoutingSpec) -> bool {
    routing.scores == 1 || routing.in_float32 == 1 && routing.groups == 1
}

/// The size of a shared expert with a gate.
const GATED: u32 = 40;
const ROUTINGS: [RoutingSpec; 5] = [
    SOFTMAX,
    RoutingSpec { normalise: 0, scaling: 4.0, ..SOFTMAX },
    RoutingSpec { groups: 4, kept_groups: 2, in_float32: 1, shared: GATED, ..SOFTMAX },
    RoutingSpec { in_float32: 1, shared: 24, ..SOFTMAX },
    RoutingSpec {
        scores: 1,
        in_float32: 1,
        groups: 3,
        kept_groups: 2,
        best_of_group: 2,
        scaling: 2.5,
        shared: 16,
        ..SOFTMAX
    },
];

fn check<E: Number>(
    level: Level,
    routing: (RoutingSpec, bool),
    format: Option<Format>,
    seed: u32,
    bound: f64,
) {
    let mut model = Tiny::<E>::new(routing, format, seed);
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
    assert!(clear > VOCABULARY / 3, "{clear} clear choices");
    assert!((apart / size).sqrt() < bound, "{format:?} {}", (apart / size).sqrt());
    // A token gets the same bits with others and without, whoever computes it.
    for (threads, few) in [(1, 1), (3, 1), (2, 7), (1, 16), (3, 17), (2, 60)] {
        let first = seed as usize % (VOCABULARY - few);
        let part = &tokens[first..first + few];
        // The last of them only: others are left after the last layer's keys.
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
    for format in FORMATS {
        let bound = if format.is_none() { exact } else { 2e-2 };
        check::<E>(level, (SOFTMAX, false), format, seed, bound);
    }
    // Gates of 7 and their exponentials.
    check::<E>(level, (SOFTMAX, true), None, seed, 2.0 * exact);
    check::<E>(level, (SOFTMAX, true), Some(Format::Mxfp4), seed, 2e-2);
    for routing in ROUTINGS {
        check::<E>(level, (routing, false), None, seed, exact);
    }
}

#[test]
fn experts_are_the_formula_and_know_no_neighbours() {
    let levels = Level::ALL.iter().copied().filter(|level| level.is_there());
    for (seed, level) in levels.enumerate() {
        check_all::<f32>(level, 3 + seed as u32);
        check_all::<Bf16>(level, 77 + seed as u32);
    }
}

#[test]
fn a_rule_that_differs_is_noticed() {
    let logits: Vec<f32> = numbers::<f32>(12, 9).iter().map(|x| 8.0 * x).collect();
    let correction: Vec<f32> = numbers(12, 10);
    let wide: Vec<f64> = logits.iter().map(|&x| x.into()).collect();
    let chosen = |routing: &RoutingSpec, correction: &[f32]| {
        let (mut ids, mut weights) = ([0; 3], [0.0; 3]);
        Chooser::default().choose(routing, (&logits, correction), (&mut ids, &mut weights));
        ids.iter().map(|&id| id as usize).zip(weights).collect::<Vec<_>>()
    };
    let same = |found: &[(usize, f32)], wanted: &[(usize, f64)]| {
        let close = |(a, b): (&(usize, f32), &(usize, f64))| {
            a.0 == b.0 && (f64::from(a.1) - b.1).abs() < 1e-5
        };
        found.iter().zip(wanted).all(close)
    };
    for (index, routing) in ROUTINGS.iter().enumerate() {
        let own = if corrected(routing) { &correction[..] } else { &[] };
        for (other, wanted) in ROUTINGS.iter().enumerate() {
            let of_other = if corrected(wanted) { &correction[..] } else { &[] };
            let agrees = same(&chosen(routing, own), &rule(wanted, &wide, of_other));
            // Groups need not change a choice, the rest of these rules does.
            assert!(agrees == (index == other) || (index + other == 2 && agrees));
        }
    }
}

proptest! {
    #[test]
    fn of_equal_scores_the_lower_id_wins_and_all_ids_differ(
        logits in prop::collection::vec(
            prop::sample::select(vec![0.0f32, 1.0, -1.0, f32::NAN, f32::INFINITY]), 12,
        ),
    ) {
        for routing in ROUTINGS {
            let (mut ids, mut weights) = ([0; 3], [0.0; 3]);
            Chooser::default().choose(&routing, (&logits, &[]), (&mut ids, &mut weights));
            prop_assert!(ids.windows(2).all(|pair| pair[0] < pair[1]) && ids[2] < 12);
            if logits.iter().all(|x| x.is_finite()) {
                let wide: Vec<f64> = logits.iter().map(|&x| x.into()).collect();
                // In numbers of another size other sums are equal.
                if routing.best_of_group == 1 {
                    let wanted = rule(&routing, &wide, &[]);
                    let wanted: Vec<u32> = wanted.iter().map(|it| it.0 as u32).collect();
                    prop_assert_eq!(&ids[..], &wanted[..]);
                }
            }
        }
    }

    #[test]
    fn rows_are_sorted_by_expert_and_token(
        tokens in prop::collection::vec(prop::sample::subsequence((0..9_u32).collect::<Vec<_>>(), 3), 0..80),
        most in 1_usize..8,
        panels in 1_usize..4,
        block in 1_usize..10,
    ) {
        let ids: Vec<u32> = tokens.concat();
        let mut sorted = Sorted::default();
        sorted.sort(&ids, 3, 9, most);
        let total = sorted.count_pieces(panels, |_| block);
        let experts: Vec<u32> = {
            let mut of_rows = vec![u32::MAX; ids.len()];
            for (place, &row) in sorted.rows.iter().enumerate() {
                of_rows[row as usize] = ids[place];
                prop_assert_eq!(sorted.tokens[row as usize] as usize, place / 3);
            }
            of_rows
        };
        let keys: Vec<(u32, u32)> = experts.iter().copied().zip(sorted.tokens.clone()).collect();
        prop_assert!(keys.is_sorted());
        let covered: usize = sorted.active.iter().map(|active| active.count).sum();
        prop_assert_eq!(covered, ids.len());
        for active in &sorted.active {
            let own = &experts[active.first..active.first + active.count];
            prop_assert!(own.iter().all(|&expert| expert as usize == active.expert));
            prop_assert_eq!(active.end - active.begin, panels * active.count.div_ceil(block));
        }
        let mut next = 0;
        for tile in &sorted.tiles {
            prop_assert_eq!(tile.first, next);
            prop_assert!((1..=most).contains(&tile.count));
            let own = &experts[tile.first..tile.first + tile.count];
            prop_assert!(own.iter().all(|expert| *expert == own[0]));
            next += tile.count;
        }
        prop_assert_eq!(next, ids.len());
        for piece in 0..total {
            let active = sorted.active[sorted.place_of(piece)];
            prop_assert!((active.begin..active.end).contains(&piece));
        }
    }
}
