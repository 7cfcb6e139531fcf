//! Reports a plan, as text for people and as JSON for programs.

use std::path::PathBuf;

use forebay_scheduler::DecodeGap;
use forebay_sim::{DeviceModel, Profile, SparseModel};
use serde::Serialize;

use crate::args::{Goal, PlanArgs, Router, SloMetric, WritePolicy};
use crate::groups;
use crate::outcome::{Latency, Outcome};
use crate::pd::PdSplit;
use crate::sparse::SparseArgs;
use crate::traffic::Traffic;

/// If devices compute for less than this share of the time, more devices would not help to meet an
/// objective.
const IDLE: f64 = 0.25;

/// The content of `--output-file`.
#[derive(Debug, Serialize)]
pub(crate) struct PlanFile {
    forebay_version: &'static str,
    trace: Option<PathBuf>,
    speed: f64,
    requests: usize,
    traffic_seconds: f64,
    input_tokens: u64,
    output_tokens: u64,
    profile: String,
    profile_origin: String,
    device: String,
    model: String,
    step_time: DeviceModel,
    kv_tokens: u64,
    page_size: u32,
    max_running_requests: u32,
    chunked_prefill_size: u32,
    prefix_cache: bool,
    step_shares: bool,
    decode_gap_ms: DecodeGap,
    queue_moves: bool,
    /// Host pages per hot page.
    host_ratio: f64,
    hicache_write_policy: WritePolicy,
    sparse: SparseArgs,
    sparse_model: SparseModel,
    lookahead: u32,
    router: Router,
    goal: Goal,
    /// The smallest number of replicas that meets the goal; `null` if no tried number does.
    answer: Option<u32>,
    /// The split with the highest goodput, with disaggregated prefill.
    #[serde(skip_serializing_if = "Option::is_none")]
    split: Option<PdSplit>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pd_local_tokens: Option<u32>,
    /// The outcomes of the tried numbers of replicas, sorted by number.
    tried: Vec<Outcome>,
    /// The total virtual time of all simulations.
    simulated_seconds: f64,
    cpu_seconds: f64,
}

impl PlanFile {
    /// Collects the settings and results of a plan.
    pub(crate) fn new(
        args: &PlanArgs,
        profile: &Profile,
        traffic: &Traffic,
        answer: Option<u32>,
        tried: Vec<Outcome>,
        (host_ratio, cpu_seconds): (f64, f64),
    ) -> Self {
        let (input_tokens, output_tokens) = tokens(traffic);
        Self {
            forebay_version: env!("CARGO_PKG_VERSION"),
            trace: args.trace.clone(),
            speed: args.speed,
            requests: traffic.arrivals.len(),
            traffic_seconds: traffic.duration_us() as f64 / 1e6,
            input_tokens,
            output_tokens,
            profile: profile.name.clone(),
            profile_origin: profile.origin.clone(),
            device: profile.device.clone(),
            model: profile.model.clone(),
            step_time: profile.time,
            kv_tokens: args.max_total_tokens.unwrap_or(profile.kv_tokens),
            page_size: args.page_size,
            max_running_requests: args.max_running_requests,
            chunked_prefill_size: args.chunked_prefill_size,
            prefix_cache: !args.disable_radix_cache,
            step_shares: !args.shares.disable_step_shares,
            decode_gap_ms: args.shares.decode_gap_ms,
            queue_moves: !args.moves.disable_queue_moves,
            host_ratio,
            hicache_write_policy: args.hicache_write_policy,
            sparse: args.sparse.clone(),
            sparse_model: profile.sparse,
            lookahead: args.lookahead,
            router: args.router,
            goal: args.goal(),
            answer,
            split: best(&tried).and_then(|best| Some(best.pd.as_ref()?.split)),
            pd_local_tokens: args.pd.pd.map(|_| args.pd.pd_local_tokens),
            simulated_seconds: tried.iter().map(|outcome| outcome.makespan_s).sum(),
            tried,
            cpu_seconds,
        }
    }

    /// Prints the result of the plan.
    pub(crate) fn print(&self) {
        println!();
        match self.answer {
            None if self.split.is_some() => self.print_splits(),
            Some(1) => println!("Enough: 1 replica."),
            Some(answer) => println!("Enough: {answer} replicas."),
            None => self.print_why_not(),
        }
        if let Some(refused) = self.tried.iter().map(|o| o.refused).max().filter(|&n| n > 0) {
            println!(
                "{refused} requests are larger than the KV pool of a replica and were refused."
            );
        }
        let last = self.answer.unwrap_or(u32::MAX);
        let shown = self.tried.iter().rev().find(|outcome| outcome.replicas <= last);
        let shown = best(&self.tried).or(shown);
        groups::print(shown.map_or(&[], |outcome| &outcome.groups));
        println!(
            "Simulated {:.0} s of traffic in {:.2} s of CPU: {:.0} times as fast as it happens.",
            self.simulated_seconds,
            self.cpu_seconds,
            self.simulated_seconds / self.cpu_seconds.max(1e-9),
        );
    }
}

impl PlanFile {
    fn print_splits(&self) {
        println!(
            "{:>8}  {:>15}  {:>15}  {:>8}  {:>11}  {:>5}",
            "", "busy: prefill", "2nd token ms", "", "lent tokens", ""
        );
        println!(
            "{:>8}  {:>7} {:>7}  {:>7} {:>7}  {:>8}  {:>11}  {:>5}",
            "replicas", "", "decode", "p50", "p99", "handed", "a request", "holds"
        );
        for outcome in &self.tried {
            let Some(pd) = &outcome.pd else { continue };
            let ms = |value: Option<f64>| value.map_or("-".to_owned(), |ms| format!("{ms:.1}"));
            println!(
                "{:>8}  {:>6.1}% {:>6.1}%  {:>7} {:>7}  {:>8}  {:>11.0}  {:>5}",
                outcome.name(),
                100.0 * pd.prefill_utilisation,
                100.0 * pd.decode_utilisation,
                ms(pd.second_ms.p50),
                ms(pd.second_ms.p99),
                pd.handed,
                pd.lent_tokens as f64 / outcome.completed.max(1) as f64,
                pd.holds
            );
        }
        if let (Some(best), Some(both)) = (best(&self.tried), self.tried.first()) {
            println!(
                "\nBest split: {}, with a goodput of {:.2} %. {} replicas that do both: {:.2} %.",
                best.name(),
                100.0 * best.goodput,
                both.name(),
                100.0 * both.goodput
            );
        }
    }

    fn print_why_not(&self) {
        let Some(most) = self.tried.last() else { return };
        println!("Not enough: {} replicas.", most.replicas);
        if most.utilisation < IDLE {
            println!(
                "Their devices have work only {:.0} % of the time: more of them would hardly help. \
                 A request alone is too slow for the objectives.",
                100.0 * most.utilisation
            );
        }
    }
}

/// The best outcome with disaggregated prefill; `None`: no split was tried.
fn best(tried: &[Outcome]) -> Option<&Outcome> {
    let splits = tried.iter().filter(|outcome| outcome.pd.is_some());
    // Of equal outcomes, the first is kept, because it has the fewest prefill replicas.
    splits.reduce(|best, other| if other.score() > best.score() { other } else { best })
}

fn tokens(traffic: &Traffic) -> (u64, u64) {
    traffic.arrivals.iter().fold((0, 0), |(input, output), arrival| {
        (input + u64::from(arrival.input), output + u64::from(arrival.output))
    })
}

/// Prints the device, the traffic and the goal of a plan.
pub(crate) fn print_head(args: &PlanArgs, profile: &Profile, traffic: &Traffic) {
    let (input, output) = tokens(traffic);
    let requests = traffic.arrivals.len();
    println!("Device   {}: {}, {}", profile.name, profile.device, profile.model);
    println!(
        "Traffic  {requests} requests in {:.0} s, {:.0} prompt and {:.0} output tokens each on average",
        traffic.duration_us() as f64 / 1e6,
        input as f64 / requests as f64,
        output as f64 / requests as f64,
    );
    println!("Goal     {}\n", goal(&args.goal()));
}

fn goal(goal: &Goal) -> String {
    let limits: Vec<String> = (goal.slos.iter())
        .map(|slo| {
            let name = match slo.metric {
                SloMetric::Ttft => "time to first token",
                SloMetric::Tpot => "time per output token",
                SloMetric::E2el => "whole time",
            };
            format!("{name} at most {} ms", slo.limit_ms)
        })
        .collect();
    let limits = limits.join(", ");
    match goal.goodput {
        Some(wanted) => format!("{limits}, for {} % of the requests", 100.0 * wanted),
        None => format!("{limits}, at the {}th percentile", goal.percentile),
    }
}

/// Prints the table of tried numbers, each row as soon as it is known.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    begun: bool,
}

impl Rows {
    /// Prints the row of an outcome. The first call also prints the heading.
    pub(crate) fn print(&mut self, outcome: &Outcome) {
        if !std::mem::replace(&mut self.begun, true) {
            println!(
                "{:>8}  {:^5}  {:^26}  {:^20}  {:^19}  {:>7}  {:>6}  {:>6}  {:>10}",
                "", "", "TTFT ms", "TPOT ms", "E2E s", "prefix", "device", "queue", ""
            );
            println!(
                "{:>8}  {:>5}  {:>8} {:>8} {:>8}  {:>6} {:>6} {:>6}  {:>6} {:>6} {:>5}  {:>7}  {:>6}  {:>6}  {:>10}",
                "replicas",
                "meets",
                "p50",
                "p90",
                "p99",
                "p50",
                "p90",
                "p99",
                "p50",
                "p90",
                "p99",
                "hits",
                "busy",
                "peak",
                "goodput"
            );
        }
        println!("{}", row(outcome));
    }
}

fn row(outcome: &Outcome) -> String {
    let show = |value: Option<f64>, scale: f64, digits| {
        value.map_or("never".to_owned(), |value| format!("{:.digits$}", value / scale))
    };
    let three = |latency: &Latency, scale, digits| {
        [latency.p50, latency.p90, latency.p99].map(|value| show(value, scale, digits))
    };
    let [t50, t90, t99] = three(&outcome.ttft_ms, 1.0, 0);
    let [o50, o90, o99] = three(&outcome.tpot_ms, 1.0, 1);
    let [e50, e90, e99] = three(&outcome.e2el_ms, 1000.0, 1);
    format!(
        "{:>8}  {:>5}  {t50:>8} {t90:>8} {t99:>8}  {o50:>6} {o90:>6} {o99:>6}  {e50:>6} {e90:>6} {e99:>5}  {:>6.1}%  {:>5.1}%  {:>6}  {:>9.2}%",
        outcome.name(),
        if outcome.met { "yes" } else { "no" },
        100.0 * outcome.prefix_hit_rate,
        100.0 * outcome.utilisation,
        outcome.queue_peak,
        100.0 * outcome.goodput,
    )
}
