//! The outcome of a simulation with a number of replicas.

use serde::Serialize;

use crate::args::{Goal, Slo, SloMetric};
use crate::groups::GroupOutcome;
use crate::pd::PdOutcome;
use crate::simulate::{Life, Run};
use crate::sparse::SparseOutcome;

/// Percentiles of a latency over all requests, in milliseconds. `None`: infinite, because too many
/// requests were refused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct Latency {
    /// The median.
    pub(crate) p50: Option<f64>,
    /// The 90th percentile.
    pub(crate) p90: Option<f64>,
    /// The 99th percentile.
    pub(crate) p99: Option<f64>,
    /// The maximum.
    pub(crate) max: Option<f64>,
}

impl Latency {
    fn of(sorted: &[f64]) -> Self {
        let at = |p| Some(percentile(sorted, p)).filter(|value| value.is_finite());
        Self { p50: at(50.0), p90: at(90.0), p99: at(99.0), max: at(100.0) }
    }
}

/// The outcome of a simulation with a number of replicas.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Outcome {
    /// The number of replicas.
    pub(crate) replicas: u32,
    /// True if the replicas meet the objectives.
    pub(crate) met: bool,
    /// The number of requests that were served.
    pub(crate) completed: usize,
    /// The number of requests that do not fit in a replica's KV pool even alone. Their latencies
    /// count as infinite.
    pub(crate) refused: usize,
    /// Time to the first token.
    pub(crate) ttft_ms: Latency,
    /// Mean time per token after the first.
    pub(crate) tpot_ms: Latency,
    /// Time between consecutive tokens of a request.
    pub(crate) itl_ms: Latency,
    /// Time to the last token.
    pub(crate) e2el_ms: Latency,
    /// The share of requests that meet all objectives.
    pub(crate) goodput: f64,
    /// The share of prompt tokens that were found in the prefix cache.
    pub(crate) prefix_hit_rate: f64,
    /// The share of prompt tokens that were found in the host tier. It is a part of
    /// `prefix_hit_rate`.
    pub(crate) host_hit_rate: f64,
    /// The share of the makespan in which the devices computed. The makespan is the time from the
    /// first arrival to the end of the last request.
    pub(crate) utilisation: f64,
    /// The largest number of simultaneously waiting requests at one replica.
    pub(crate) queue_peak: usize,
    /// The largest number of simultaneously running requests on one replica.
    pub(crate) running_peak: usize,
    /// How often a request was preempted, so that it lost its pages to another request.
    pub(crate) preemptions: u64,
    /// How often a queued request moved to another replica.
    pub(crate) moves: u64,
    /// The number of steps of all replicas.
    pub(crate) steps: u64,
    /// Seconds from the first arrival to the end of the last request.
    pub(crate) makespan_s: f64,
    /// Generated tokens per second, over all replicas.
    pub(crate) output_throughput: f64,
    /// Mean time per token after the first, over the tokens of all requests.
    pub(crate) mean_tpot_ms: f64,
    /// The effect of sparse decoding.
    pub(crate) sparse: SparseOutcome,
    /// Requests grouped by client and prompt length, and how long each group waits for the others.
    pub(crate) groups: Vec<GroupOutcome>,
    /// Disaggregated prefill; `None`: each replica does both prefill and decode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pd: Option<PdOutcome>,
}

impl Outcome {
    /// The number of prefill replicas; 0: each replica does prefill and decode.
    pub(crate) fn prefill(&self) -> u32 {
        self.pd.as_ref().map_or(0, |pd| pd.split.prefill)
    }

    /// Returns a score, which is larger for a better outcome. Scores compare goodput first, then
    /// the 90th percentile of TTFT.
    pub(crate) fn score(&self) -> (f64, f64) {
        (self.goodput, -self.ttft_ms.p90.unwrap_or(f64::INFINITY))
    }

    /// The number of replicas, or their split, as text.
    pub(crate) fn name(&self) -> String {
        let split = self.pd.as_ref().map(|pd| pd.split.to_string());
        split.unwrap_or_else(|| self.replicas.to_string())
    }

    /// Computes the outcome of a run.
    pub(crate) fn of(run: &Run, goal: &Goal) -> Self {
        let metrics = [SloMetric::Ttft, SloMetric::Tpot, SloMetric::E2el];
        let sorted = metrics.map(|metric| {
            let mut all: Vec<f64> =
                run.lives.iter().filter_map(|life| latency_ms(life, metric)).collect();
            all.sort_unstable_by(f64::total_cmp);
            all
        });
        let fine = |life: &&Life| goal.slos.iter().all(|slo| meets(life, slo));
        let goodput = share(run.lives.iter().filter(fine).count() as u64, run.lives.len() as u64);
        let met = match goal.goodput {
            Some(wanted) => goodput >= wanted,
            None => goal.slos.iter().all(|slo| {
                percentile(&sorted[slo.metric as usize], goal.percentile) <= slo.limit_ms
            }),
        };
        let completed = run.lives.iter().filter(|life| life.ends > 0).count();
        let makespan_s = run.makespan_us as f64 / 1e6;
        let tokens: u64 = run.lives.iter().map(|life| u64::from(life.tokens)).sum();
        let itl: Vec<f64> = run.itl_us.iter().map(|&us| f64::from(us) / 1000.0).collect();
        let mean_tpot_ms = itl.iter().sum::<f64>() / itl.len().max(1) as f64;
        let [ttft_ms, tpot_ms, e2el_ms] = sorted.map(|sorted| Latency::of(&sorted));
        Self {
            replicas: run.replicas,
            met,
            completed,
            refused: run.lives.len() - completed,
            ttft_ms,
            tpot_ms,
            itl_ms: Latency::of(&itl),
            mean_tpot_ms,
            sparse: run.sparse,
            groups: run.waits.outcomes(|members| {
                let lives = members.iter().map(|&at| &run.lives[at]);
                let mut ttft: Vec<f64> =
                    lives.filter_map(|life| latency_ms(life, SloMetric::Ttft)).collect();
                ttft.sort_unstable_by(f64::total_cmp);
                Latency::of(&ttft)
            }),
            e2el_ms,
            goodput,
            prefix_hit_rate: share(run.cached_tokens, run.prompt_tokens),
            host_hit_rate: share(run.host_tokens, run.prompt_tokens),
            utilisation: share(run.busy_us, run.makespan_us * u64::from(run.replicas)),
            queue_peak: run.queue_peak,
            running_peak: run.running_peak,
            pd: of_split(run),
            preemptions: run.preemptions,
            moves: run.moves,
            steps: run.steps,
            makespan_s,
            output_throughput: if makespan_s > 0.0 { tokens as f64 / makespan_s } else { 0.0 },
        }
    }
}

fn of_split(run: &Run) -> Option<PdOutcome> {
    let pd = run.pd?;
    let handed = run.lives.iter().filter(|life| life.handed && life.tokens > 1);
    let mut second: Vec<f64> =
        handed.map(|life| (life.second_us - life.first_us) as f64 / 1000.0).collect();
    second.sort_unstable_by(f64::total_cmp);
    let busy = |us, replicas: u32| share(us, run.makespan_us * u64::from(replicas));
    Some(PdOutcome {
        split: pd.split,
        handed: pd.handed,
        lent_tokens: pd.lent_tokens,
        holds: pd.holds,
        second_ms: Latency::of(&second),
        prefill_utilisation: busy(pd.prefill_busy_us, pd.split.prefill),
        decode_utilisation: busy(run.busy_us - pd.prefill_busy_us, pd.split.decode),
    })
}

/// A request's latency; `None` for the TPOT of a request with a single token.
fn latency_ms(life: &Life, metric: SloMetric) -> Option<f64> {
    let ms = |from_us: u64, to_us: u64| (to_us - from_us) as f64 / 1000.0;
    if life.ends == 0 {
        return Some(f64::INFINITY);
    }
    match metric {
        SloMetric::Ttft => Some(ms(life.arrived_us, life.first_us)),
        SloMetric::E2el => Some(ms(life.arrived_us, life.last_us)),
        SloMetric::Tpot => {
            (life.tokens > 1).then(|| ms(life.first_us, life.last_us) / f64::from(life.tokens - 1))
        }
    }
}

fn meets(life: &Life, slo: &Slo) -> bool {
    latency_ms(life, slo.metric).is_none_or(|value| value <= slo.limit_ms)
}

/// The nearest-rank percentile: the smallest of the sorted values such that at least `p` percent of
/// the values are at most as large. 0 if there are no values.
fn percentile(sorted: &[f64], p: f64) -> f64 {
    let rank = (sorted.len() as f64 * p / 100.0).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or(0.0)
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn life(ttft_ms: u64, tpot_ms: u64, tokens: u32) -> Life {
        let first_us = 500 + 1000 * ttft_ms;
        let last_us = first_us + u64::from(tokens - 1) * 1000 * tpot_ms;
        Life { arrived_us: 500, first_us, last_us, tokens, ends: 1, ..Life::default() }
    }

    fn outcome(lives: &[Life], slos: &[(SloMetric, f64)], goodput: Option<f64>) -> Outcome {
        let slos = slos.iter().map(|&(metric, limit_ms)| Slo { metric, limit_ms }).collect();
        let goal = Goal { slos, percentile: 90.0, goodput };
        let run = Run { replicas: 1, lives: lives.to_vec(), ..Run::default() };
        Outcome::of(&run, &goal)
    }

    #[test]
    fn latencies_are_counted_from_the_arrival_and_by_nearest_rank() {
        let lives: Vec<Life> = (1..=10).map(|i| life(10 * i, i, 11)).collect();
        let sum = outcome(&lives, &[(SloMetric::Ttft, 90.0)], None);
        let of = |p50, p90, p99| Latency { p50, p90, p99, max: p99 };
        assert_eq!(sum.ttft_ms, of(Some(50.0), Some(90.0), Some(100.0)));
        assert_eq!(sum.tpot_ms, of(Some(5.0), Some(9.0), Some(10.0)));
        assert_eq!(sum.e2el_ms, of(Some(100.0), Some(180.0), Some(200.0)));
        assert!(sum.met);
        assert!((sum.goodput - 0.9).abs() < 1e-9);
        assert!(!outcome(&lives, &[(SloMetric::Ttft, 89.9)], None).met);
    }

    #[test]
    fn goodput_wants_all_objectives_of_the_same_request() {
        let lives = [life(10, 50, 2), life(50, 10, 2), life(10, 10, 2), life(10, 99, 1)];
        let slos = [(SloMetric::Ttft, 20.0), (SloMetric::Tpot, 20.0)];
        let sum = outcome(&lives, &slos, Some(0.5));
        assert!((sum.goodput - 0.5).abs() < 1e-9, "an answer of one token has no late token");
        assert!(sum.met);
        assert!(!outcome(&lives, &slos, Some(0.51)).met);
    }

    #[test]
    fn who_is_refused_waits_for_ever() {
        let mut lives = vec![life(1, 1, 2); 9];
        lives.push(Life::default());
        let sum = outcome(&lives, &[(SloMetric::E2el, 1e9)], None);
        assert_eq!((sum.completed, sum.refused), (9, 1));
        assert!(sum.met, "the target holds at the 90th percentile");
        assert_eq!((sum.ttft_ms.p90, sum.ttft_ms.p99), (Some(1.0), None));
        lives.push(Life::default());
        assert!(!outcome(&lives, &[(SloMetric::E2el, 1e9)], None).met);
    }
}
