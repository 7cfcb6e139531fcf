//! Samples a token from adjusted logits, in the order of `docs/protocol.md`: temperature, `top_k`,
//! `top_p`, `min_p`. The request's seed and the position determine the random number.
//!
//! Float operations have the same order as in `python/forebay/layers/ops.py`, so both hands sample
//! the same tokens.

use crate::exponential::exp;

const LOW_BITS: u32 = 16;
const KEYS: usize = 1 << LOW_BITS;
/// The number of weights in a span. The search compares the sums of spans first, then the weights
/// of one span.
const SPAN: usize = 512;

/// The parameters of one draw.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Draw {
    /// The temperature, above 0.
    pub(crate) temperature: f32,
    /// The number of candidates. 0, or at least the vocabulary size: no limit.
    pub(crate) top_k: i32,
    /// The probability mass of the candidates; 1: no limit.
    pub(crate) top_p: f32,
    /// The smallest probability of a candidate, as a share of the largest; 0: no limit.
    pub(crate) min_p: f32,
    /// The random number in 0 .. 1 that selects the token.
    pub(crate) u: f64,
}

/// Buffers that are reused from row to row.
#[derive(Default)]
pub(crate) struct Scratch {
    /// Logits minus the largest logit, divided by the temperature.
    scaled: Vec<f32>,
    weights: Vec<f32>,
    values: Vec<f32>,
    table: Vec<f64>,
    spans: Vec<f64>,
}

/// The finaliser of SplitMix64 (Steele et al. 2014).
fn splitmix64(x: u64) -> u64 {
    let z = x.wrapping_add(GOLDEN);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Returns a number in 0 .. 1: a pure function of a request's seed and a position. It is the only
/// source of randomness.
pub(crate) fn uniform(seed: u64, position: u64) -> f64 {
    let bits = splitmix64(seed.wrapping_add(position.wrapping_mul(GOLDEN))) >> 11;
    bits as f64 / (1_u64 << 53) as f64
}

/// Returns the largest value.
pub(crate) fn largest(values: &[f32]) -> f32 {
    let (chunks, rest) = values.as_chunks::<16>();
    let mut most = [f32::NEG_INFINITY; 16];
    for chunk in chunks {
        for (most, &value) in most.iter_mut().zip(chunk) {
            *most = if value > *most { value } else { *most };
        }
    }
    most.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max)
}

/// Samples a token from finite logits, at least one of which is above minus infinity.
pub(crate) fn draw(logits: &[f32], how: &Draw, scratch: &mut Scratch) -> usize {
    let most = largest(logits);
    let Scratch { scaled, weights, values, table, spans } = scratch;
    scaled.clear();
    // Relative to the largest logit, so that a tiny temperature can't overflow.
    scaled.extend(logits.iter().map(|&logit| (logit - most) / how.temperature));
    weights.clear();
    weights.extend(scaled.iter().map(|&value| exp(value)));
    let limited = how.top_k > 0 && (how.top_k as usize) < logits.len();
    if limited {
        let kept = most_likely(scaled, how, values);
        keep(scaled, weights, kept);
    } else if how.top_p < 1.0 {
        let kept = nucleus(scaled, weights, how.top_p, table);
        // Of equally likely tokens, those with lower ids are kept.
        keep(scaled, weights, kept);
    }
    if how.min_p > 0.0 {
        // The largest weight is 1.
        weights.iter_mut().filter(|weight| **weight < how.min_p).for_each(|weight| *weight = 0.0);
    }
    place(weights, how.u, spans)
}

/// The set of kept tokens: all above a threshold, and the first `equals` of those equal to it.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Kept {
    above: f32,
    equals: usize,
}

/// Zeroes the weights of all tokens that are not kept.
fn keep(scaled: &[f32], weights: &mut [f32], kept: Kept) {
    let mut equals = kept.equals;
    for (&value, weight) in scaled.iter().zip(weights) {
        if value > kept.above {
            continue;
        }
        if value == kept.above && equals > 0 {
            equals -= 1;
        } else {
            *weight = 0.0;
        }
    }
}

/// The tokens that `top_k` keeps, reduced to those that `top_p` keeps (1: no limit).
fn most_likely(scaled: &[f32], how: &Draw, values: &mut Vec<f32>) -> Kept {
    let count = how.top_k as usize;
    values.clear();
    values.extend_from_slice(scaled);
    let down = |one: &f32, other: &f32| other.total_cmp(one);
    values.select_nth_unstable_by(count - 1, down);
    values.truncate(count);
    values.sort_unstable_by(down);
    let total: f64 = values.iter().map(|&value| f64::from(exp(value))).sum();
    let share = if how.top_p >= 1.0 { f64::INFINITY } else { f64::from(how.top_p) };
    let goal = share * total;
    let mut before = 0.0;
    let mut kept = 0;
    for &value in values.iter() {
        let weight = f64::from(exp(value));
        // The mass before the token is computed as `sum - weight`, as in the PyTorch hand, so that
        // both round it in the same way.
        let sum = before + weight;
        if sum - weight < goal {
            kept += 1;
        }
        before = sum;
    }
    let above = values[kept.max(1) - 1];
    let larger = values.iter().filter(|&&value| value > above).count();
    Kept { above, equals: kept.max(1) - larger }
}

/// Applies top-p: returns the smallest set of most likely tokens with a probability mass of at
/// least `top_p`, which is below 1.
///
/// Nothing is sorted, because the size of the set is unknown. The bits of a token's distance from
/// the largest logit have the same order as the distance. Two tables, by the upper and the lower
/// half of these bits, locate where the sum of probabilities reaches its goal.
fn nucleus(scaled: &[f32], weights: &[f32], top_p: f32, table: &mut Vec<f64>) -> Kept {
    let total: f64 = weights.iter().map(|&weight| f64::from(weight)).sum();
    let goal = f64::from(top_p) * total;
    let key = |value: f32| value.abs().to_bits();
    let masses = || scaled.iter().zip(weights).map(|(&value, &weight)| (key(value), weight));
    table.clear();
    table.resize(KEYS, 0.0);
    for (key, weight) in masses() {
        table[(key >> LOW_BITS) as usize] += f64::from(weight);
    }
    let (high, before) = reached(table, goal);
    table.clear();
    table.resize(KEYS, 0.0);
    for (key, weight) in masses().filter(|(key, _)| (key >> LOW_BITS) as usize == high) {
        table[key as usize & (KEYS - 1)] += f64::from(weight);
    }
    let (low, more) = reached(table, goal - before);
    let threshold = f32::from_bits((high << LOW_BITS | low) as u32);
    // The remaining mass, as a number of tokens that are as likely as the threshold.
    let left = (goal - before - more) / f64::from(exp(-threshold));
    let left = if left.is_nan() { 1.0 } else { left.ceil().clamp(1.0, scaled.len() as f64) };
    Kept { above: -threshold, equals: left as usize }
}

/// The first key at which the cumulative mass reaches the goal, and the mass before this key.
fn reached(table: &[f64], goal: f64) -> (usize, f64) {
    let total: f64 = table.iter().sum();
    // Rounding may put the goal above the total: then take the last key with a token.
    let goal = goal.min(total);
    let mut sum = 0.0;
    for (key, &mass) in table.iter().enumerate() {
        sum += mass;
        if sum >= goal {
            return (key, sum - mass);
        }
    }
    (table.len() - 1, sum - table[table.len() - 1])
}

/// The first token, in order of ids, at which the cumulative weight exceeds the share `u` of the
/// total.
fn place(weights: &[f32], u: f64, spans: &mut Vec<f64>) -> usize {
    spans.clear();
    let mut total = 0.0;
    for span in weights.chunks(SPAN) {
        let (chunks, rest) = span.as_chunks::<8>();
        let mut sums = [0.0_f64; 8];
        for chunk in chunks {
            for (sum, &weight) in sums.iter_mut().zip(chunk) {
                *sum += f64::from(weight);
            }
        }
        total += sums.iter().sum::<f64>() + rest.iter().map(|&it| f64::from(it)).sum::<f64>();
        spans.push(total);
    }
    let below = (u * total).min(total.next_down());
    let span = spans.iter().position(|&sum| sum > below).unwrap_or(spans.len() - 1);
    let mut sum = if span == 0 { 0.0 } else { spans[span - 1] };
    let first = span * SPAN;
    let mut last = first;
    for (token, &weight) in weights[first..].iter().take(SPAN).enumerate() {
        sum += f64::from(weight);
        if weight > 0.0 {
            last = first + token;
            if sum > below {
                break;
            }
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The reference implementation, which sorts.
    fn slow(logits: &[f32], how: &Draw) -> usize {
        let most = largest(logits);
        let scaled: Vec<f32> = logits.iter().map(|&it| (it - most) / how.temperature).collect();
        let mut order: Vec<usize> = (0..scaled.len()).collect();
        order.sort_by(|&a, &b| scaled[b].total_cmp(&scaled[a]));
        if how.top_k > 0 {
            order.truncate(how.top_k as usize);
        }
        let weight = |token: usize| f64::from(exp(scaled[token]));
        let total: f64 = order.iter().map(|&token| weight(token)).sum();
        let mut before = 0.0;
        let mut kept = Vec::new();
        for &token in &order {
            let enough = how.top_p < 1.0 && before >= f64::from(how.top_p) * total;
            if (!enough || kept.is_empty()) && weight(token) >= f64::from(how.min_p) {
                kept.push(token);
            }
            before += weight(token);
        }
        kept.sort_unstable();
        let total: f64 = kept.iter().map(|&token| weight(token)).sum();
        let mut sum = 0.0;
        for &token in &kept {
            sum += weight(token);
            if sum > how.u * total {
                return token;
            }
        }
        kept[kept.len() - 1]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]
        #[test]
        fn it_draws_what_sorting_draws(
            logits in proptest::collection::vec(-8_i8..8, 3..700), temperature in 0.3_f32..2.0,
            top_k in 0..9_i32, top_p in 0.05_f32..1.1, min_p in prop_oneof![Just(0.0_f32), 0.01_f32..0.5], u in 0.0..1.0_f64,
        ) {
            // Logits with few distinct values, so that many are equal.
            let logits: Vec<f32> = logits.iter().map(|&logit| f32::from(logit) * 0.71).collect();
            let top_p = top_p.min(1.0);
            let top_k = top_k.min(logits.len() as i32);
            let how = Draw { temperature, top_k, top_p, min_p, u };
            prop_assert_eq!(draw(&logits, &how, &mut Scratch::default()), slow(&logits, &how));
        }

        #[test]
        fn what_may_not_come_is_never_drawn(seed in any::<u64>(), allowed in 0..600_usize) {
            let mut logits = vec![f32::NEG_INFINITY; 600];
            logits[allowed] = -3.0;
            let how = Draw { temperature: 0.7, top_k: 0, top_p: 0.9, min_p: 0.0, u: uniform(seed, 3) };
            prop_assert_eq!(draw(&logits, &how, &mut Scratch::default()), allowed);
        }
    }

    #[test]
    fn uniform_numbers_are_those_of_the_protocol() {
        assert_eq!(
            splitmix64(0),
            0xe220_a839_7b1d_cdaf,
            "the first number of the generator with seed 0"
        );
        let mean: f64 = (0..10_000).map(|at| uniform(7, at)).sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.02);
    }
}
