//! Compares recurrences with the formula, with rows computed at once and in several chunks.

use std::fmt::Debug;

use super::*;
use crate::element::Element;
use crate::isa::tests::{Check, kernels};
use crate::sizes::StateGate;
use crate::team::Queue;
use crate::team::tests::team;
use crate::tile::Kernel;
use crate::tile::tests::numbers;
use crate::vector::Vector;

const TOKENS: usize = 7;
const TAPS: usize = 3;

/// Pairs of heads that share keys; values take a whole vector and part of another.
const HEADS: RecurrenceSizes = RecurrenceSizes {
    heads: 4,
    key_heads: 2,
    key_dim: 12,
    value_dim: 20,
    tiled: false,
    channel_decay: false,
    delta: true,
    taps: TAPS,
    gate: StateGate::Alone,
    sigmoid_gate: false,
    low_rank: 0,
    norm_size: 0,
};

/// A recurrence, and the outputs of its input projection.
struct Numbers {
    sizes: RecurrenceSizes,
    conv: Vec<f32>,
    conv_bias: Vec<f32>,
    decay: Vec<f32>,
    step_bias: Vec<f32>,
    skip: Vec<f32>,
    /// `[TOKENS, stride]`
    projected: Vec<f32>,
    stride: usize,
}

/// The data that members share.
struct Pieces<'a> {
    recurrence: &'a Recurrence,
    rows: &'a [StateRow],
    numbers: &'a Numbers,
    mixed: *mut f32,
    queue: Queue,
}

// SAFETY: each member writes only its share.
unsafe impl Sync for Pieces<'_> {}

impl Pieces<'_> {
    fn advance<V: Vector>(&self, member: &crate::team::Member<'_>) {
        let Self { recurrence, rows, numbers, mixed, queue } = self;
        let (projected, stride) = (numbers.projected.as_ptr(), numbers.stride);
        let first = numbers.sizes.gates() + numbers.sizes.values();
        let decays = (projected.wrapping_add(first), stride);
        let mixed = *mixed;
        let work = Advance { recurrence, rows, projected, stride, decays, mixed, queue, member };
        // SAFETY: the caller detected the features; the sizes are those of the buffers.
        unsafe { V::compute(work) };
    }
}

impl Numbers {
    fn new(sizes: RecurrenceSizes, seed: u32) -> Self {
        let stride = sizes.widths().0;
        let random = |count: usize, more: u32| numbers::<f32>(count, seed ^ more);
        Self {
            conv: random(TAPS * sizes.channels(), 1),
            conv_bias: random(sizes.channels(), 2),
            decay: random(sizes.heads, 3).iter().map(|x| -x.exp()).collect(),
            step_bias: random(sizes.decays(), 4),
            skip: if sizes.delta { Vec::new() } else { random(sizes.heads, 5) },
            projected: random(TOKENS * stride, 6).iter().map(|x| 3.0 * x).collect(),
            stride,
            sizes,
        }
    }

    /// Returns the outputs `[TOKENS, values]`, computed with rows of these lengths, one per step.
    /// Half of the rows write their state to another row of the state tables than they read from.
    fn found<V: Vector>(&self, lengths: &[usize]) -> Vec<f32> {
        let sizes = self.sizes;
        let [mut inputs, mut states] = sizes.row_bytes().map(|bytes| vec![0.0_f32; bytes / 2]);
        let recurrence = Recurrence {
            sizes,
            inputs: inputs.as_mut_ptr(),
            states: states.as_mut_ptr(),
            conv: self.conv.clone(),
            conv_bias: self.conv_bias.clone(),
            decay: self.decay.clone(),
            step_bias: self.step_bias.clone(),
            low: None,
            skip: self.skip.clone(),
            norm_weight: Vec::new(),
        };
        let mut mixed = vec![0.0; TOKENS * sizes.channels()];
        let (mut first, mut source) = (0, 0);
        for (step, &length) in lengths.iter().enumerate() {
            let target = if step % 2 == 0 { source } else { 1 - source };
            let rows = [StateRow { first, length, source, target }];
            let pieces = Pieces {
                recurrence: &recurrence,
                rows: &rows,
                numbers: self,
                mixed: mixed.as_mut_ptr(),
                queue: Queue::default(),
            };
            team(2).compute(|member| pieces.advance::<V>(&member));
            (first, source) = (first + length, target);
        }
        let rows = mixed.chunks_exact(sizes.channels());
        rows.flat_map(|row| row[2 * sizes.keys()..].to_vec()).collect()
    }

    /// Returns the outputs by the formula.
    fn expected(&self) -> Vec<f64> {
        let sizes = self.sizes;
        let (channels, keys, width) = (sizes.channels(), sizes.keys(), sizes.value_dim);
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let projected = wide(&self.projected);
        let at = |token: usize, column: usize| projected[token * self.stride + column];
        let mut states = vec![vec![0.0; sizes.key_dim * width]; sizes.heads];
        let mut outputs = Vec::new();
        for token in 0..TOKENS {
            let convolved = |channel: usize| {
                let taps = (0..TAPS).filter(|tap| token + tap + 1 >= TAPS).map(|tap| {
                    let weight = f64::from(self.conv[tap * channels + channel]);
                    weight * at(token + tap + 1 - TAPS, channel)
                });
                let sum = taps.sum::<f64>() + f64::from(self.conv_bias[channel]);
                sum * sigmoid(sum)
            };
            let mixed: Vec<f64> = (0..channels).map(convolved).collect();
            for (head, state) in states.iter_mut().enumerate() {
                let key = sizes.key_of(head) * sizes.key_dim;
                let unit = |first: usize| {
                    let x = &mixed[first..][..sizes.key_dim];
                    let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                    let length = if sizes.delta { length } else { 1.0 };
                    x.iter().map(|x| x / length).collect::<Vec<_>>()
                };
                let (q, k) = (unit(key), unit(keys + key));
                let v = &mixed[2 * keys + head * width..][..width];
                let step = |decay: usize| {
                    let x = at(token, channels + sizes.values() + decay);
                    (x + f64::from(self.step_bias[decay])).exp().ln_1p()
                };
                let decay = |channel: usize| {
                    let of =
                        if sizes.channel_decay { head * sizes.key_dim + channel } else { head };
                    (f64::from(self.decay[head]) * step(of)).exp()
                };
                let beta = sigmoid(match sizes.delta {
                    true => at(token, sizes.strengths() + head),
                    false => 0.0,
                });
                for (column, value) in v.iter().enumerate() {
                    let cell = |channel: usize| channel * width + column;
                    let mut old = 0.0;
                    for (channel, k) in k.iter().enumerate() {
                        state[cell(channel)] *= decay(channel);
                        old += k * state[cell(channel)];
                    }
                    let u = match sizes.delta {
                        true => beta * (value - old),
                        false => step(head) * value,
                    };
                    let mut out = 0.0;
                    for (channel, (q, k)) in q.iter().zip(&k).enumerate() {
                        state[cell(channel)] += k * u;
                        out += q * state[cell(channel)];
                    }
                    outputs.push(match sizes.delta {
                        true => out / (sizes.key_dim as f64).sqrt(),
                        false => out + f64::from(self.skip[head]) * value,
                    });
                }
            }
        }
        outputs
    }
}

impl Check for Numbers {
    fn kernel<E: Element + Debug + PartialEq, K: Kernel<E>>(&self) {
        let found = self.found::<K::Vector>(&[TOKENS]);
        for (found, expected) in found.iter().zip(self.expected()) {
            let bound = 1e-5 * expected.abs().max(1.0);
            assert!((f64::from(*found) - expected).abs() < bound, "{found} {expected}");
        }
        let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for lengths in [&[1; TOKENS][..], &[3, 4], &[2, 2, 3], &[6, 1]] {
            assert_eq!(bits(&self.found::<K::Vector>(lengths)), bits(&found), "{lengths:?}");
        }
    }
}

#[test]
fn states_advance_by_the_formula_wherever_rows_are_cut() {
    let channels = RecurrenceSizes { channel_decay: true, value_dim: 24, ..HEADS };
    let tiled = RecurrenceSizes { tiled: true, value_dim: 70, ..HEADS };
    let plain = RecurrenceSizes { delta: false, key_heads: 1, ..HEADS };
    for (seed, sizes) in [HEADS, channels, tiled, plain].into_iter().enumerate() {
        kernels(&Numbers::new(sizes, 11 + seed as u32));
    }
}
