//! The number of prompt tokens that a step may have, so that running streams get their next tokens
//! in time.
//!
//! Two times are learned: that of decode-only steps, and the time that prompts add to it. The first
//! grows with the context, which is the number of positions that the rows read. A burst of prompts
//! after a lone stream has a larger context than any decode step measured so far. A prompt adds
//! time for each token, and for each pair of a token and an earlier position, since chunks deeper
//! in a long prompt take longer.

use crate::config::DecodeGap;

/// The automatic gap, as a multiple of the time of a decode-only step. A step reads all weights
/// however few tokens it has, so a smaller gap spends more of the device's time on weights.
const STEPS: f64 = 6.0;
/// The factor by which earlier steps lose weight at each step with prompts.
const FADING: f64 = 1.0 - 1.0 / 64.0;
/// The factor by which earlier steps lose weight at each decode-only step. There are many of these
/// steps, and measurements under another load are worth keeping.
const DECODE_FADING: f64 = 1.0 - 1.0 / 1024.0;
/// The share of independent variation below which the times of tokens and pairs can't be separated.
const SINGULAR: f64 = 1e-6;
/// The variance of contexts, relative to their squared mean, below which their effect can't be
/// measured.
const NARROW: f64 = 1e-3;

/// The learned times of steps.
#[derive(Debug)]
pub(crate) struct Pace {
    gap: DecodeGap,
    /// The time of a decode-only step in microseconds, as a linear function of its context.
    decodes: Line,
    /// Decaying sums for a least-squares fit of the time that prompts add, by their tokens and by
    /// their pairs of a token and an earlier position.
    sums: Sums,
}

#[derive(Debug, Default)]
struct Sums {
    tokens_tokens: f64,
    tokens_pairs: f64,
    pairs_pairs: f64,
    tokens_us: f64,
    pairs_us: f64,
}

/// A fading least-squares fit of times by contexts.
#[derive(Debug, Default)]
struct Line {
    weight: f64,
    x: f64,
    y: f64,
    x_x: f64,
    x_y: f64,
}

impl Pace {
    pub(crate) fn new(gap: DecodeGap) -> Self {
        Self { gap, decodes: Line::default(), sums: Sums::default() }
    }

    /// Learns from the time of a step. `rows` yields the first position and the length of each row.
    pub(crate) fn learn(&mut self, rows: impl Iterator<Item = (u32, u32)>, device_us: u32) {
        if self.gap == DecodeGap::Off || device_us == 0 {
            return;
        }
        let (mut tokens, mut pairs, mut context, mut any) = (0.0, 0.0, 0, false);
        for (start, length) in rows {
            any = true;
            if length > 1 {
                let length = f64::from(length);
                tokens += length;
                pairs += length * (f64::from(start) + length / 2.0);
            } else {
                context += u64::from(start);
            }
        }
        let device_us = f64::from(device_us);
        if tokens > 0.0 {
            let us = (device_us - self.decodes.at(context).unwrap_or(0.0)).max(0.0);
            self.sums.add(tokens, pairs, us);
        } else if any {
            self.decodes.add(context, device_us);
        }
    }

    /// The largest number of prompt tokens, of at most `most`, that a step may have beside running
    /// streams. `depth`: the position at which the prompts continue; `context`: the total number of
    /// positions of the streams.
    pub(crate) fn tokens(&self, most: u32, depth: u32, context: u64) -> u32 {
        let decode_us = self.decodes.at(context);
        let gap_us = match self.gap {
            DecodeGap::Off => None,
            DecodeGap::Auto => decode_us.map(|us| STEPS * us),
            DecodeGap::Micros(us) => Some(f64::from(us)),
        };
        let (Some(gap_us), (token_us, pair_us)) = (gap_us, self.sums.times()) else { return most };
        let left_us = (gap_us - decode_us.unwrap_or(0.0)).max(0.0);
        // The positive root of pair_us / 2 * n^2 + first_us * n = left_us.
        let first_us = token_us + pair_us * f64::from(depth);
        let root = (first_us * first_us + 2.0 * pair_us * left_us).sqrt();
        if first_us + root > 0.0 {
            (2.0 * left_us / (first_us + root)).min(f64::from(most)) as u32
        } else {
            most
        }
    }
}

impl Line {
    fn add(&mut self, context: u64, us: f64) {
        let (x, add) =
            (context as f64, |sum: &mut f64, more: f64| *sum = *sum * DECODE_FADING + more);
        add(&mut self.weight, 1.0);
        add(&mut self.x, x);
        add(&mut self.y, us);
        add(&mut self.x_x, x * x);
        add(&mut self.x_y, x * us);
    }

    /// The time at a context; `None`: nothing was measured.
    fn at(&self, context: u64) -> Option<f64> {
        if self.weight == 0.0 {
            return None;
        }
        let (x, y) = (self.x / self.weight, self.y / self.weight);
        let variance = self.x_x / self.weight - x * x;
        let slope = if variance > NARROW * x * x {
            // The clamp keeps the time of a step without context at 0 or above.
            ((self.x_y / self.weight - x * y) / variance).clamp(0.0, y / x)
        } else {
            0.0
        };
        Some(y + slope * (context as f64 - x))
    }
}

impl Sums {
    fn add(&mut self, tokens: f64, pairs: f64, us: f64) {
        let add = |sum: &mut f64, product: f64| *sum = *sum * FADING + product;
        add(&mut self.tokens_tokens, tokens * tokens);
        add(&mut self.tokens_pairs, tokens * pairs);
        add(&mut self.pairs_pairs, pairs * pairs);
        add(&mut self.tokens_us, tokens * us);
        add(&mut self.pairs_us, pairs * us);
    }

    /// Microseconds per token and per pair; 0: not measured.
    fn times(&self) -> (f64, f64) {
        let Self { tokens_tokens, tokens_pairs, pairs_pairs, tokens_us, pairs_us } = *self;
        if tokens_tokens == 0.0 {
            return (0.0, 0.0);
        }
        let determinant = tokens_tokens * pairs_pairs - tokens_pairs * tokens_pairs;
        if determinant > SINGULAR * tokens_tokens * pairs_pairs {
            let token_us = (tokens_us * pairs_pairs - pairs_us * tokens_pairs) / determinant;
            let pair_us = (pairs_us * tokens_tokens - tokens_us * tokens_pairs) / determinant;
            match (token_us >= 0.0, pair_us >= 0.0) {
                (true, true) => return (token_us, pair_us),
                (false, _) => return (0.0, pairs_us / pairs_pairs),
                (true, false) => {}
            }
        }
        (tokens_us / tokens_tokens, 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that takes 8 ms per step, 20 us per prompt token and 1 ns per pair.
    fn device_us(start: u32, length: u32) -> u32 {
        let length = f64::from(length);
        let pairs = length * (f64::from(start) + length / 2.0);
        (8000.0 + 20.0 * length + 0.001 * pairs) as u32
    }

    fn learned(gap: DecodeGap, length: u32) -> Pace {
        let mut pace = Pace::new(gap);
        for step in 0..200 {
            pace.learn([(500, 1), (700, 1)].into_iter(), 8000);
            let start = step * length;
            pace.learn([(500, 1), (start, length)].into_iter(), device_us(start, length));
        }
        pace
    }

    #[test]
    fn a_step_with_as_many_tokens_takes_the_gap() {
        let pace = learned(DecodeGap::Micros(30_000), 512);
        for depth in [0, 10_000, 100_000, 1_000_000] {
            let tokens = pace.tokens(u32::MAX, depth, 1200);
            let us = device_us(depth, tokens);
            assert!((29_000..=31_000).contains(&us), "{tokens} tokens at {depth} take {us} us");
        }
        assert_eq!(pace.tokens(100, 0, 1200), 100, "no more than there is room for");
        assert_eq!(
            learned(DecodeGap::Micros(7000), 512).tokens(1024, 0, 1200),
            0,
            "decoding takes more"
        );
    }

    #[test]
    fn the_automatic_bound_is_some_steps_that_only_decode() {
        let pace = learned(DecodeGap::Auto, 512);
        let us = f64::from(device_us(0, pace.tokens(u32::MAX, 0, 1200)));
        assert!((us - STEPS * 8000.0).abs() < 1000.0, "{us}");
    }

    #[test]
    fn without_a_bound_or_a_measurement_all_tokens_have_room() {
        assert_eq!(learned(DecodeGap::Off, 512).tokens(1024, 1_000_000, 0), 1024);
        for gap in [DecodeGap::Auto, DecodeGap::Micros(1000)] {
            assert_eq!(Pace::new(gap).tokens(1024, 0, 0), 1024);
        }
    }

    #[test]
    fn equal_chunks_at_one_depth_tell_a_time_a_token() {
        let mut pace = Pace::new(DecodeGap::Micros(10_000));
        for _ in 0..100 {
            pace.learn([(0, 100)].into_iter(), 5000);
        }
        assert!((199..=200).contains(&pace.tokens(u32::MAX, 0, 0)));
    }

    /// Qwen3-0.6B on an H100: 1.3 ms per step, 45 ns per context position, and 3.5 us per prompt
    /// token.
    #[test]
    fn a_burst_after_a_lone_stream_has_the_gap_of_its_own_steps() {
        let decode_us = |context: u64| 1300.0 + 0.045 * context as f64;
        let mut pace = Pace::new(DecodeGap::Auto);
        for start in 512..640 {
            pace.learn([(start, 1)].into_iter(), decode_us(u64::from(start)) as u32);
        }
        // Four prompts per step, until 256 streams decode.
        for step in 0..64u32 {
            let rows = (0..4 * step).map(|_| (512, 1));
            let context = 512 * u64::from(4 * step);
            let us = decode_us(context) + 3.5 * 2048.0;
            pace.learn(rows.chain([(0, 512); 4]), us as u32);
            assert!(pace.tokens(2048, 0, context) > 1800, "{context}");
        }
        let us = decode_us(256 * 512);
        let tokens = f64::from(pace.tokens(u32::MAX, 0, 256 * 512));
        assert!((us + 3.5 * tokens - STEPS * us).abs() < 0.5 * us, "{tokens}");
    }
}
