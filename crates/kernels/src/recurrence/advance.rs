//! Computes a recurrence along the tokens of a step's rows. A member takes one channel group of the
//! convolution, or one head, of a row, and proceeds token by token. So a result depends only on its
//! own row and the state before it, however the row was divided into chunks.

use std::ops::Range;

use super::Recurrence;
use crate::math::{self, Sigmoid, Silu};
use crate::sizes::{RecurrenceSizes, StateGate};
use crate::team::{Member, Queue};
use crate::vector::{LANES, Vector, VectorWork};

/// The number of channels of the convolution that a member takes at a time.
const CHANNELS: usize = 64;
/// The number of vectors of a state's columns that are advanced together. With a single vector,
/// each addition would wait for the previous one.
const TOGETHER: usize = 4;
/// The epsilon in the length of a key or query.
const EPSILON: f32 = 1e-6;

/// A row of a step whose states are advanced.
#[derive(Clone, Copy)]
pub(crate) struct StateRow {
    /// The row's first token.
    pub(crate) first: usize,
    pub(crate) length: usize,
    /// The row of the state tables with the state before the row's first token.
    pub(crate) source: usize,
    /// The row of the state tables that receives the state after the last token. The states after
    /// earlier tokens are written to the row `source`.
    pub(crate) target: usize,
}

/// One member's share of the work of advancing the states of all rows. Replaces the values in
/// `mixed` by the outputs of the heads, or of the convolution. Returns after a barrier.
pub(crate) struct Advance<'a> {
    pub(crate) recurrence: &'a Recurrence,
    pub(crate) rows: &'a [StateRow],
    /// The outputs `[tokens, stride]` of the layer's input projection.
    pub(crate) projected: *const f32,
    pub(crate) stride: usize,
    /// The first token's decays, and the distance in elements from the decays of one token to those
    /// of the next token.
    pub(crate) decays: (*const f32, usize),
    /// `[tokens, channels]`
    pub(crate) mixed: *mut f32,
    pub(crate) queue: &'a Queue,
    pub(crate) member: &'a Member<'a>,
}

/// Gates the output of a token and normalises it.
pub(crate) struct Gating<'a> {
    pub(crate) recurrence: &'a Recurrence,
    pub(crate) values: &'a mut [f32],
    /// The gates of the token, which are overwritten.
    pub(crate) gates: &'a mut [f32],
    pub(crate) eps: f32,
}

/// Replaces values by their sigmoids.
pub(crate) struct Sigmoids<'a>(pub(crate) &'a mut [f32]);

/// A head's factors for one token.
struct Strength {
    /// The decay of the state; 1 if channels have their own decays.
    decay: f32,
    /// The factor of the value that the state already has for a key.
    taken: f32,
    /// The factor of the value that is written for a key.
    given: f32,
    /// The factor of the state's output for a query.
    read: f32,
    /// The factor of the values that are added directly to the output.
    skip: f32,
}

/// The queries, keys and decays with which a head reads and writes its state for one token.
#[derive(Clone, Copy)]
struct HeadKeys<'a> {
    q: &'a [f32],
    k: &'a [f32],
    /// The decays of the key's elements; empty if the head has a single decay.
    decays: &'a [f32],
    /// The key times these decays; also empty if the head has a single decay.
    decayed: &'a [f32],
}

/// A head's state before and after a token, which may be the same memory.
#[derive(Clone, Copy)]
struct HeadState {
    from: *const f32,
    to: *mut f32,
}

impl VectorWork for Advance<'_> {
    #[inline(always)]
    unsafe fn compute<V: Vector>(self) {
        let Self { recurrence, rows, queue, member, .. } = self;
        let (channels, heads) = (recurrence.sizes.channels(), recurrence.sizes.heads);
        let blocks = channels.div_ceil(CHANNELS);
        for unit in member.share(rows.len() * blocks) {
            let first = unit % blocks * CHANNELS;
            let some = first..(first + CHANNELS).min(channels);
            // SAFETY: only this member accesses these channels of the row and of its state.
            unsafe { self.convolve::<V>(&rows[unit / blocks], some) };
        }
        member.meet();
        if heads == 0 {
            return;
        }
        loop {
            let mine = queue.take(rows.len() * heads, member.members);
            if mine.is_empty() {
                break;
            }
            for unit in mine {
                // SAFETY: only this member accesses this head of the row and of its state.
                unsafe { self.walk::<V>(&rows[unit / heads], unit % heads) };
            }
        }
        member.meet();
    }
}

impl Advance<'_> {
    /// Computes the convolution of some channels along a row.
    #[inline(always)]
    unsafe fn convolve<V: Vector>(&self, row: &StateRow, channels: Range<usize>) {
        let Recurrence { sizes, inputs, conv, conv_bias, .. } = self.recurrence;
        let (all, before) = (sizes.channels(), sizes.taps - 1);
        let (first, count) = (channels.start, channels.len());
        let mut now = [0.0; CHANNELS];
        let now = &mut now[..count];
        // SAFETY: only this member accesses the row and the channels. Rows of a table do not
        // overlap, nor do rows of the projection.
        unsafe {
            for index in 0..row.length {
                let (token, last) = (row.first + index, index + 1 == row.length);
                let place = |row: usize| inputs.add(row * before * all + first);
                let (from, to) =
                    (place(row.source), place(if last { row.target } else { row.source }));
                let input = self.projected.add(token * self.stride + first);
                if sizes.heads == 0 {
                    let gates = std::slice::from_raw_parts(input.add(all), count);
                    let values = std::slice::from_raw_parts(input.add(2 * all), count);
                    now.copy_from_slice(gates);
                    multiply(now, values);
                } else {
                    now.copy_from_slice(std::slice::from_raw_parts(input, count));
                }
                let sum = self.mixed.add(token * all + first);
                let sum = std::slice::from_raw_parts_mut(sum, count);
                sum.copy_from_slice(&conv_bias[first..][..count]);
                for tap in 0..before {
                    let held = from.add(tap * all).cast_const();
                    let numbers = std::slice::from_raw_parts(held, count);
                    add_product(sum, numbers, &conv[tap * all + first..][..count]);
                    if tap > 0 {
                        std::ptr::copy_nonoverlapping(held, to.add((tap - 1) * all), count);
                    }
                }
                if before > 0 {
                    let to = to.add((before - 1) * all);
                    std::ptr::copy_nonoverlapping(now.as_ptr(), to, count);
                }
                add_product(sum, now, &conv[before * all + first..][..count]);
                if sizes.heads > 0 {
                    math::apply::<V, Silu>(sum);
                }
            }
        }
    }

    /// Advances a head's state along a row.
    #[inline(always)]
    unsafe fn walk<V: Vector>(&self, row: &StateRow, head: usize) {
        let Recurrence { sizes, states, decay, step_bias, skip, .. } = self.recurrence;
        let (channels, keys, strengths) = (sizes.channels(), sizes.keys(), sizes.strengths());
        let &RecurrenceSizes { heads, key_dim, value_dim, delta, .. } = sizes;
        let first_key = sizes.key_of(head) * key_dim;
        let of_channels = if sizes.channel_decay { key_dim } else { 0 };
        let mut own = vec![0.0; 2 * of_channels];
        let (decays, decayed) = own.split_at_mut(of_channels);
        let skip = skip.get(head).copied().unwrap_or(0.0);
        let root = (key_dim as f32).sqrt();
        // SAFETY: only this member accesses the row and the head.
        unsafe {
            for index in 0..row.length {
                let (token, last) = (row.first + index, index + 1 == row.length);
                let place = |row: usize| states.add((row * heads + head) * key_dim * value_dim);
                let (from, to) =
                    (place(row.source), place(if last { row.target } else { row.source }));
                let mixed = self.mixed.add(token * channels);
                let q = std::slice::from_raw_parts(mixed.add(first_key), key_dim);
                let k = std::slice::from_raw_parts(mixed.add(keys + first_key), key_dim);
                let v = mixed.add(2 * keys + head * value_dim);
                let (first, apart) = self.decays;
                let steps = first.add(token * apart);
                for (channel, to) in decays.iter_mut().enumerate() {
                    let at = head * key_dim + channel;
                    *to = (decay[head] * softplus(*steps.add(at) + step_bias[at])).exp();
                    decayed[channel] = *to * k[channel];
                }
                let (step, decay) = match sizes.channel_decay {
                    true => (1.0, 1.0),
                    false => {
                        let step = softplus(*steps.add(head) + step_bias[head]);
                        (step, (decay[head] * step).exp())
                    }
                };
                let strength = match delta {
                    true => {
                        // Scales key and query to length 1.
                        let k = math::rms_factor::<V>(k, EPSILON / key_dim as f32) / root;
                        let q = math::rms_factor::<V>(q, EPSILON / key_dim as f32) / root;
                        let strength = self.projected.add(token * self.stride + strengths);
                        let beta = 1.0 / (1.0 + (-*strength.add(head)).exp());
                        Strength { decay, taken: decay * k, given: beta * k, read: q / root, skip }
                    }
                    false => Strength { decay, taken: 0.0, given: step, read: 1.0, skip },
                };
                let state = HeadState { from: from.cast_const(), to };
                let keys = HeadKeys { q, k, decays, decayed };
                let (values, how) = ((v, value_dim), (&strength, delta));
                match sizes.channel_decay {
                    true => advance::<V, true>(state, keys, values, how),
                    false => advance::<V, false>(state, keys, values, how),
                }
            }
        }
    }
}

/// Advances one head by a token: its state becomes `decay * S + k u`, and its values become `q S`
/// plus the directly added values. With `CHANNELS`, each element of a key has its own decay.
///
/// # Safety
/// The states must have a row of `dim` values for each element of a key, and `values` must have
/// `dim` values.
#[inline(always)]
unsafe fn advance<V: Vector, const CHANNELS: bool>(
    HeadState { from, to }: HeadState,
    keys: HeadKeys<'_>,
    (values, dim): (*mut f32, usize),
    how: (&Strength, bool),
) {
    let whole = dim / LANES;
    let mut at = 0;
    // SAFETY: the columns are inside the state, and there are as many values.
    unsafe {
        while at < whole {
            let first = at * LANES;
            let state = HeadState { from: from.add(first), to: to.add(first) };
            let place = (state, values.add(first), dim);
            if at + TOGETHER <= whole {
                columns::<V, TOGETHER, CHANNELS>(place, keys, how);
                at += TOGETHER;
            } else {
                columns::<V, 1, CHANNELS>(place, keys, how);
                at += 1;
            }
        }
        let HeadKeys { q, k, decays, decayed } = keys;
        let read = if CHANNELS { decayed } else { k };
        let (strength, delta) = how;
        for column in whole * LANES..dim {
            let (from, to, value) = (from.add(column), to.add(column), values.add(column));
            let mut old = 0.0;
            if delta {
                for (index, k) in read.iter().enumerate() {
                    old += k * *from.add(index * dim);
                }
            }
            let u = strength.given * (*value - strength.taken * old);
            let mut out = 0.0;
            for (index, (q, k)) in q.iter().zip(k).enumerate() {
                let decay = if CHANNELS { decays[index] } else { strength.decay };
                let now = decay * *from.add(index * dim) + k * u;
                *to.add(index * dim) = now;
                out += q * now;
            }
            *value = strength.read * out + strength.skip * *value;
        }
    }
}

/// [`advance`] for `N` vectors of columns.
///
/// # Safety
/// See [`advance`].
#[inline(always)]
unsafe fn columns<V: Vector, const N: usize, const CHANNELS: bool>(
    (HeadState { from, to }, values, dim): (HeadState, *mut f32, usize),
    HeadKeys { q, k, decays, decayed }: HeadKeys<'_>,
    (strength, delta): (&Strength, bool),
) {
    let &Strength { decay, taken, given, read: of_query, skip } = strength;
    let read = if CHANNELS { decayed } else { k };
    let zero = [V::splat(0.0); N];
    // SAFETY: the caller upholds the contract.
    unsafe {
        let mut old = zero;
        if delta {
            for (index, &k) in read.iter().enumerate() {
                let (row, k) = (from.add(index * dim), V::splat(k));
                for (part, old) in old.iter_mut().enumerate() {
                    *old = V::load(row.add(part * LANES)).fused(k, *old);
                }
            }
        }
        let mut u = zero;
        for part in 0..N {
            let value = V::load(values.add(part * LANES));
            u[part] = value.sub(V::splat(taken).mul(old[part])).mul(V::splat(given));
        }
        let (mut out, of_head) = (zero, V::splat(decay));
        for (index, (&q, &k)) in q.iter().zip(k).enumerate() {
            let (before, behind) = (from.add(index * dim), to.add(index * dim));
            let (q, k) = (V::splat(q), V::splat(k));
            let decay = if CHANNELS { V::splat(decays[index]) } else { of_head };
            for part in 0..N {
                let held = V::load(before.add(part * LANES)).mul(decay);
                let now = u[part].fused(k, held);
                now.store(behind.add(part * LANES));
                out[part] = now.fused(q, out[part]);
            }
        }
        for (part, out) in out.into_iter().enumerate() {
            let place = values.add(part * LANES);
            let skipped = V::load(place).mul(V::splat(skip));
            out.fused(V::splat(of_query), skipped).store(place);
        }
    }
}

impl VectorWork for Gating<'_> {
    #[inline(always)]
    unsafe fn compute<V: Vector>(self) {
        let Self { recurrence, values, gates, eps } = self;
        let RecurrenceSizes { gate, sigmoid_gate, norm_size: size, heads, .. } = recurrence.sizes;
        if sigmoid_gate {
            math::apply::<V, Sigmoid>(gates);
        } else if heads > 0 {
            math::apply::<V, Silu>(gates);
        }
        if gate != StateGate::BehindNorm {
            multiply(values, gates);
        }
        if gate != StateGate::Alone {
            let weights = recurrence.norm_weight.chunks_exact(size).cycle();
            for (part, weights) in values.chunks_exact_mut(size).zip(weights) {
                let factor = math::rms_factor::<V>(part, eps);
                part.iter_mut().for_each(|value| *value *= factor);
                multiply(part, weights);
            }
        }
        if gate == StateGate::BehindNorm {
            multiply(values, gates);
        }
    }
}

impl VectorWork for Sigmoids<'_> {
    #[inline(always)]
    unsafe fn compute<V: Vector>(self) {
        math::apply::<V, Sigmoid>(self.0);
    }
}

#[inline(always)]
fn multiply(to: &mut [f32], factors: &[f32]) {
    for (to, factor) in to.iter_mut().zip(factors) {
        *to *= factor;
    }
}

#[inline(always)]
fn add_product(to: &mut [f32], numbers: &[f32], factors: &[f32]) {
    for ((to, number), factor) in to.iter_mut().zip(numbers).zip(factors) {
        *to += number * factor;
    }
}

/// `ln(1 + e^x)`
#[inline(always)]
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}
