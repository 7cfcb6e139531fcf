//! Computes a token from logits, in the order of `docs/protocol.md`: adjust, filter, sample. Each
//! row is processed independently of the other rows.

use std::cmp::Ordering;

use crate::draw::{self, Draw, uniform};
use crate::exponential::exp;
use crate::tables::Slot;

/// The number of values that are summed in 32 bits before their sum is added in 64 bits.
const SPAN: usize = 64;

/// The slot, position and mask of a row that is sampled.
#[derive(Clone, Copy)]
pub(crate) struct Ask<'a> {
    pub(crate) slot: &'a Slot,
    /// The position of the token to be sampled.
    pub(crate) position: usize,
    /// Bit `i % 32` of word `i / 32` is set if token `i` is allowed; `None` if all tokens are.
    pub(crate) mask: Option<&'a [u32]>,
}

/// A sampled token, or an error, with the requested log-probabilities.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sampled {
    /// 0 if the logits were not finite.
    pub(crate) token: i32,
    pub(crate) finite: bool,
    /// The token and the most likely tokens, with their log-probabilities; empty if not requested.
    pub(crate) logprobs: Vec<(i32, f32)>,
}

/// Buffers that are reused from row to row.
#[derive(Default)]
pub(crate) struct Scratch {
    adjusted: Vec<f32>,
    draw: draw::Scratch,
}

/// The index of the largest logit; of equal logits, the first.
pub(crate) fn greedy(logits: &[f32]) -> usize {
    let most = draw::largest(logits);
    logits.iter().position(|&logit| logit == most).unwrap_or(0)
}

/// True if all logits are finite.
pub(crate) fn finite(logits: &[f32]) -> bool {
    // Infinities and NaNs have all exponent bits set.
    const EXPONENT: u32 = 0x7f80_0000;
    logits.iter().fold(true, |fine, logit| fine & (logit.to_bits() & EXPONENT != EXPONENT))
}

/// Samples a row.
pub(crate) fn sample(logits: &[f32], ask: &Ask<'_>, scratch: &mut Scratch) -> Sampled {
    let (slot, params) = (ask.slot, &ask.slot.spec.sampling);
    if !finite(logits) {
        let logprobs = slot.logprobs().map_or_else(Vec::new, |most| vec![(0, f32::NAN); 1 + most]);
        return Sampled { token: 0, finite: false, logprobs };
    }
    let Scratch { adjusted, draw } = scratch;
    let from = if params.changes_logits() || ask.mask.is_some() || suppresses(ask) {
        adjust(logits, ask, adjusted);
        &adjusted[..]
    } else {
        logits
    };
    let token = if params.temperature > 0.0 {
        let how = Draw {
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            u: uniform(params.seed, ask.position as u64),
        };
        draw::draw(from, &how, draw)
    } else {
        greedy(from)
    };
    let logprobs = slot.logprobs().map_or_else(Vec::new, |most| likely(logits, token, most));
    Sampled { token: token as i32, finite: true, logprobs }
}

/// True if stop ids are not allowed yet. With a mask, only the mask decides whether the request may
/// end.
fn suppresses(ask: &Ask<'_>) -> bool {
    ask.mask.is_none() && ask.slot.suppresses(ask.position)
}

/// Applies biases, penalties, the suppression of stop ids, allowed ids and the mask.
fn adjust(logits: &[f32], ask: &Ask<'_>, adjusted: &mut Vec<f32>) {
    let (slot, params) = (ask.slot, &ask.slot.spec.sampling);
    adjusted.clear();
    adjusted.extend_from_slice(logits);
    for &(id, value) in params.logit_bias.iter() {
        adjusted[id as usize] += value;
    }
    if params.has_penalty() {
        for (&id, count) in &slot.counts {
            let Some(logit) = usize::try_from(id).ok().and_then(|id| adjusted.get_mut(id)) else {
                continue;
            };
            let repetition = params.repetition_penalty;
            let repeated = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
            let generated = count.generated as f32;
            let present = if count.generated > 0 { 1.0 } else { 0.0 };
            *logit =
                repeated - params.frequency_penalty * generated - params.presence_penalty * present;
        }
    }
    if suppresses(ask) {
        for &id in slot.spec.stop_ids.iter() {
            adjusted[id as usize] = f32::NEG_INFINITY;
        }
    }
    if let Some(ids) = &params.allowed {
        let kept: Vec<f32> = ids.iter().map(|&id| adjusted[id as usize]).collect();
        adjusted.fill(f32::NEG_INFINITY);
        for (&id, logit) in ids.iter().zip(kept) {
            adjusted[id as usize] = logit;
        }
    }
    if let Some(mask) = ask.mask {
        for (logits, &word) in adjusted.chunks_mut(32).zip(mask) {
            if word == u32::MAX {
                continue;
            }
            for (bit, logit) in logits.iter_mut().enumerate() {
                if word >> bit & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
}

/// The token and the `most` most likely tokens, with log-probabilities of the unmodified
/// distribution.
pub(crate) fn likely(logits: &[f32], token: usize, most: usize) -> Vec<(i32, f32)> {
    let largest = draw::largest(logits);
    let of_span = |span: &[f32]| f64::from(span.iter().map(|&it| exp(it - largest)).sum::<f32>());
    let total: f64 = logits.chunks(SPAN).map(of_span).sum();
    let normaliser = total.ln() as f32;
    let entry = |token: usize| (token as i32, logits[token] - largest - normaliser);
    std::iter::once(token).chain(top(logits, most)).map(entry).collect()
}

/// The ids of the `most` largest values, in descending order; of equal values, the lower id comes
/// first.
fn top(logits: &[f32], most: usize) -> Vec<usize> {
    let most = most.min(logits.len());
    if most == 0 {
        return Vec::new();
    }
    let down = |&(one, a): &(f32, usize), &(other, b): &(f32, usize)| -> Ordering {
        other.total_cmp(&one).then(a.cmp(&b))
    };
    // A value below the smallest kept value is not inserted.
    let mut kept: Vec<(f32, usize)> = Vec::with_capacity(2 * most);
    let mut least = f32::NEG_INFINITY;
    for (id, &logit) in logits.iter().enumerate() {
        if kept.len() >= most && logit <= least {
            continue;
        }
        kept.push((logit, id));
        if kept.len() == 2 * most {
            kept.select_nth_unstable_by(most - 1, down);
            kept.truncate(most);
            least = kept[most - 1].0;
        }
    }
    kept.sort_unstable_by(down);
    kept.truncate(most);
    kept.into_iter().map(|(_, id)| id).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use forebay_protocol::{SamplingParams, SlotSpec};

    use super::*;
    use crate::tables::Count;

    fn of(slot: &Slot, logits: &[f32], position: usize, mask: Option<&[u32]>) -> i32 {
        sample(logits, &Ask { slot, position, mask }, &mut Scratch::default()).token
    }

    #[test]
    fn each_way_to_adjust_changes_what_is_most_likely() {
        let logits = [1.0, 3.0, 2.0, -1.0];
        let plain = Slot::default();
        assert_eq!(of(&plain, &logits, 0, None), 1);
        let greedy = || plain.spec.sampling.clone();
        let slot =
            |sampling| Slot { spec: SlotSpec { sampling, ..SlotSpec::default() }, ..plain.clone() };
        let biased = slot(SamplingParams { logit_bias: [(0, 5.0)].into(), ..greedy() });
        assert_eq!(of(&biased, &logits, 0, None), 0);
        let mut repeated = slot(SamplingParams { repetition_penalty: 2.0, ..greedy() });
        repeated.counts = [(1, Count { seen: 1, generated: 0 })].into();
        assert_eq!(of(&repeated, &logits, 0, None), 2);
        let penalties =
            SamplingParams { frequency_penalty: 0.4, presence_penalty: 0.3, ..greedy() };
        let mut frequent = slot(penalties);
        frequent.counts = [(1, Count { seen: 2, generated: 2 })].into();
        assert_eq!(of(&frequent, &logits, 0, None), 2);
        let mut stops = slot(SamplingParams { min_tokens: 3, ..greedy() });
        (stops.prompt_len, stops.spec.stop_ids) = (1, [1].into());
        assert_eq!((of(&stops, &logits, 3, None), of(&stops, &logits, 4, None)), (2, 1));
        assert_eq!(
            of(&stops, &logits, 3, Some(&[0b1010])),
            1,
            "a mask decides itself which tokens end"
        );
        let mut only = stops.clone();
        only.spec.sampling.allowed = Some([1].into());
        assert_eq!(of(&only, &logits, 3, None), 1, "only the allowed token is sampled");
        let some = slot(SamplingParams { allowed: Some([0, 3].into()), ..greedy() });
        assert_eq!(of(&some, &logits, 0, None), 0);
        assert_eq!(of(&plain, &logits, 0, Some(&[0b1100])), 2);
        let broken = [1.0, f32::NAN, 2.0, 0.0];
        let ask = Ask { slot: &plain, position: 0, mask: None };
        let sampled = sample(&broken, &ask, &mut Scratch::default());
        assert_eq!((sampled.token, sampled.finite), (0, false));
    }

    proptest! {
        #[test]
        fn the_most_likely_are_those_of_sorting(logits in proptest::collection::vec(-5_i8..5, 1..200), most in 0..20_usize) {
            let logits: Vec<f32> = logits.iter().map(|&it| f32::from(it)).collect();
            let mut order: Vec<usize> = (0..logits.len()).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
            order.truncate(most);
            prop_assert_eq!(top(&logits, most), order);
            let all = likely(&logits, 0, logits.len());
            let sum: f32 = all[1..].iter().map(|(_, value)| value.exp()).sum();
            prop_assert!((sum - 1.0).abs() < 1e-4);
        }
    }
}
