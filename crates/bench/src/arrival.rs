//! The times at which requests are sent.

use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use rand::RngExt as _;
use rand_distr::Gamma;

use crate::WorkItem;
use crate::dataset::seed::{Purpose, generator};

/// How the rate changes from the first to the last request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RampUp {
    /// The rate changes by the same amount with every request.
    Linear,
    /// The rate changes by the same factor with every request.
    Exponential,
}

/// Flags about when requests are sent.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Arrivals")]
pub struct ArrivalArgs {
    /// Requests per second; inf sends all at once.
    #[arg(long, value_name = "RPS", default_value = "inf", value_parser = rate)]
    pub request_rate: f64,
    /// Shape of the gamma distribution of the gaps between requests: 1 is a Poisson process,
    /// smaller values are burstier, larger values are steadier.
    #[arg(long, value_name = "SHAPE", default_value_t = 1.0, value_parser = positive)]
    pub burstiness: f64,
    /// Send requests at equal gaps of 1 / --request-rate seconds, without randomness.
    #[arg(long, requires = "request_rate", conflicts_with_all = ["burstiness", "ramp_up_strategy"])]
    pub fixed_rate: bool,
    /// Change the rate over the run, from --ramp-up-start-rps to --ramp-up-end-rps.
    #[arg(
        long,
        value_enum,
        requires_all = ["ramp_up_start_rps", "ramp_up_end_rps"],
        conflicts_with = "request_rate"
    )]
    pub ramp_up_strategy: Option<RampUp>,
    /// Requests per second at the first request.
    #[arg(long, value_name = "RPS", requires = "ramp_up_strategy", value_parser = positive)]
    pub ramp_up_start_rps: Option<f64>,
    /// Requests per second at the last request.
    #[arg(long, value_name = "RPS", requires = "ramp_up_strategy", value_parser = positive)]
    pub ramp_up_end_rps: Option<f64>,
    /// Send requests at the times recorded in the trace.
    #[arg(long, conflicts_with_all = ["request_rate", "burstiness", "fixed_rate", "ramp_up_strategy"])]
    pub use_trace_timestamps: bool,
    /// Speed of the replay, as a multiple of the trace's recorded speed.
    #[arg(
        long,
        value_name = "FACTOR",
        default_value_t = 1.0,
        requires = "use_trace_timestamps",
        value_parser = positive
    )]
    pub trace_speed: f64,
}

/// The time to send each of `items`, from the start of the run. Times never decrease. With an
/// infinite rate, all are zero.
///
/// A constant rate is met exactly, as in `vllm bench serve`. Random gaps are scaled so that the
/// last of `n` requests is sent at `n / rate`, like a Poisson process whose `n`-th arrival is
/// known. So two runs at the same rate offer the same load with any seed. A ramp is not scaled. The
/// first request also waits for its gap.
///
/// With a ramp, each gap has a separate rate. The rate of request `i` of `n` lies between the first
/// and the last rate, at the fraction `i / (n - 1)`. The rate depends on the request and not on the
/// time, as in `vllm bench serve`.
///
/// # Errors
/// The flags require a trace's times but the dataset has none, or the schedule exceeds a
/// [`Duration`].
pub fn schedule(
    args: &ArrivalArgs,
    seed: u64,
    items: &[WorkItem],
) -> anyhow::Result<Vec<Duration>> {
    if args.use_trace_timestamps {
        return items.iter().map(|item| traced(item, args.trace_speed)).collect();
    }
    let count = items.len();
    let rates = Rates::of(args)?;
    if matches!(rates, Rates::Constant(rate) if rate.is_infinite()) {
        return Ok(vec![Duration::ZERO; count]);
    }

    let mut generator = generator(seed, Purpose::Arrivals, 0);
    // Each gap is divided by the rate at its request, so one distribution of mean 1 is enough.
    let unit = Gamma::new(args.burstiness, 1.0 / args.burstiness)
        .context("--burstiness is out of the range of the gamma distribution")?;
    let mut now = 0.0;
    let mut seconds: Vec<f64> = (0..count)
        .map(|index| {
            let gap = if args.fixed_rate { 1.0 } else { generator.sample(unit) };
            now += gap / rates.at(index, count);
            now
        })
        .collect();
    if let Rates::Constant(rate) = rates {
        rescale(&mut seconds, rate);
    }
    seconds
        .into_iter()
        .map(|at| Duration::try_from_secs_f64(at).context("the schedule is too long"))
        .collect()
}

/// Scales the arrivals so that the last request is sent at `count / rate`.
fn rescale(seconds: &mut [f64], rate: f64) {
    let Some(&last) = seconds.last() else { return };
    // Very bursty gaps can all round to zero, which leaves nothing to scale.
    if last > 0.0 {
        let factor = seconds.len() as f64 / rate / last;
        seconds.iter_mut().for_each(|at| *at *= factor);
    }
}

fn traced(item: &WorkItem, speed: f64) -> anyhow::Result<Duration> {
    let arrival = item.arrival.context("--use-trace-timestamps: this dataset has no times")?;
    Duration::try_from_secs_f64(arrival.as_secs_f64() / speed).context("--trace-speed is too small")
}

/// The rate as a function of the request.
#[derive(Debug, Clone, Copy)]
enum Rates {
    Constant(f64),
    Linear { start: f64, end: f64 },
    Exponential { start: f64, end: f64 },
}

impl Rates {
    fn of(args: &ArrivalArgs) -> anyhow::Result<Self> {
        let Some(strategy) = args.ramp_up_strategy else {
            return Ok(Self::Constant(args.request_rate));
        };
        let (Some(start), Some(end)) = (args.ramp_up_start_rps, args.ramp_up_end_rps) else {
            anyhow::bail!("a ramp needs --ramp-up-start-rps and --ramp-up-end-rps");
        };
        Ok(match strategy {
            RampUp::Linear => Self::Linear { start, end },
            RampUp::Exponential => Self::Exponential { start, end },
        })
    }

    /// Requests per second around request `index` of `count`.
    fn at(self, index: usize, count: usize) -> f64 {
        let progress = index as f64 / count.saturating_sub(1).max(1) as f64;
        match self {
            Self::Constant(rate) => rate,
            Self::Linear { start, end } => start + (end - start) * progress,
            Self::Exponential { start, end } => start * (end / start).powf(progress),
        }
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 => Ok(rate),
        _ => Err("a rate is a number above 0, or inf".to_owned()),
    }
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number.is_finite() => Ok(number),
        _ => Err("a number above 0 is needed".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use proptest::prelude::*;

    use super::*;
    use crate::Prompt;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        arrival: ArrivalArgs,
    }

    fn parse(line: &str) -> Result<ArrivalArgs, clap::Error> {
        Line::try_parse_from(std::iter::once("bench").chain(line.split_whitespace()))
            .map(|line| line.arrival)
    }

    fn items(arrivals: &[Option<f64>]) -> Vec<WorkItem> {
        let item = |arrival: &Option<f64>| WorkItem {
            prompt: Prompt::Text("hello".to_owned()),
            text_tokens: 1,
            output_tokens: 1,
            arrival: arrival.map(Duration::from_secs_f64),
        };
        arrivals.iter().map(item).collect()
    }

    fn seconds(line: &str, seed: u64, count: usize) -> Vec<f64> {
        let args = parse(line).expect("flags");
        let schedule = schedule(&args, seed, &items(&vec![None; count])).expect("a schedule");
        schedule.into_iter().map(|at| at.as_secs_f64()).collect()
    }

    fn gaps(seconds: &[f64]) -> Vec<f64> {
        let before = std::iter::once(&0.0).chain(seconds);
        seconds.iter().zip(before).map(|(at, before)| at - before).collect()
    }

    fn mean_and_variation(values: &[f64]) -> (f64, f64) {
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let square = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
        (mean, (square / values.len() as f64).sqrt() / mean)
    }

    fn near(value: f64, expected: f64, share: f64) -> bool {
        (value - expected).abs() <= expected * share
    }

    #[test]
    fn without_a_rate_all_are_sent_at_once() {
        assert_eq!(seconds("", 1, 100), vec![0.0; 100]);
        assert_eq!(seconds("--request-rate inf --burstiness 0.5", 1, 3), vec![0.0; 3]);
        assert_eq!(seconds("--request-rate 5", 1, 0), Vec::<f64>::new());
    }

    #[test]
    fn gaps_have_the_mean_and_the_variation_of_their_distribution() {
        for shape in [0.25, 1.0, 4.0, 100.0_f64] {
            let arrivals = seconds(&format!("--request-rate 20 --burstiness {shape}"), 7, 20_000);
            assert!(near(arrivals[19_999], 1000.0, 1e-6), "{}", arrivals[19_999]);
            let (mean, variation) = mean_and_variation(&gaps(&arrivals));
            assert!(near(mean, 0.05, 1e-6), "{mean}");
            assert!(near(variation, shape.sqrt().recip(), 0.05), "{shape}: {variation}");
        }
    }

    #[test]
    fn poisson_gaps_are_exponential() {
        let gaps = gaps(&seconds("--request-rate 1", 3, 20_000));
        for limit in [0.1_f64, 0.5, 1.0, 3.0] {
            let longer = gaps.iter().filter(|&&gap| gap > limit).count() as f64 / 20_000.0;
            assert!(near(longer, (-limit).exp(), 0.06), "{limit}: {longer}");
        }
    }

    #[test]
    fn a_fixed_rate_has_equal_gaps() {
        let arrivals = seconds("--request-rate 4 --fixed-rate", 1, 8);
        assert_eq!(arrivals, [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]);
    }

    #[test]
    fn a_ramp_goes_from_its_first_rate_to_its_last() {
        for (strategy, middle) in [("linear", 55.0), ("exponential", 1000.0_f64.sqrt())] {
            let line = format!(
                "--ramp-up-strategy {strategy} --ramp-up-start-rps 10 --ramp-up-end-rps 100"
            );
            let gaps = gaps(&seconds(&line, 5, 100_000));
            let rate = |from: usize| mean_and_variation(&gaps[from..from + 1000]).0.recip();
            for (from, expected) in [(0, 10.0), (49_500, middle), (99_000, 100.0)] {
                assert!(near(rate(from), expected, 0.15), "{strategy} {from}: {}", rate(from));
            }
        }
    }

    #[test]
    fn a_seed_gives_one_schedule() {
        let line = "--request-rate 10 --burstiness 2";
        assert_eq!(seconds(line, 1, 50), seconds(line, 1, 50));
        assert_ne!(seconds(line, 1, 50), seconds(line, 2, 50));
    }

    #[test]
    fn the_times_of_a_trace_are_taken_at_its_speed() {
        let args = parse("--use-trace-timestamps --trace-speed 4").expect("flags");
        let traced = schedule(&args, 1, &items(&[Some(0.0), Some(2.0), Some(10.0)]));
        let expected = [0.0, 0.5, 2.5].map(Duration::from_secs_f64).to_vec();
        assert_eq!(traced.expect("a schedule"), expected);

        let error = schedule(&args, 1, &items(&[Some(0.0), None])).expect_err("no time");
        assert!(error.to_string().contains("no times"), "{error}");
    }

    #[test]
    fn a_schedule_longer_than_time_itself_is_refused() {
        let args = parse("--request-rate 1e-300").expect("flags");
        assert!(schedule(&args, 1, &items(&[None])).is_err());
        let args = parse("--use-trace-timestamps --trace-speed 1e-300").expect("flags");
        assert!(schedule(&args, 1, &items(&[Some(1.0)])).is_err());
    }

    #[test]
    fn flags_that_say_nothing_are_refused() {
        for line in [
            "--request-rate 0",
            "--request-rate -1",
            "--request-rate NaN",
            "--request-rate fast",
            "--request-rate 5 --burstiness 0",
            "--request-rate 5 --burstiness inf",
            "--fixed-rate",
            "--request-rate 5 --fixed-rate --burstiness 2",
            "--ramp-up-strategy linear",
            "--ramp-up-strategy linear --ramp-up-start-rps 1",
            "--ramp-up-start-rps 1 --ramp-up-end-rps 2",
            "--ramp-up-strategy linear --ramp-up-start-rps 0 --ramp-up-end-rps 2",
            "--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 2 --request-rate 5",
            "--use-trace-timestamps --request-rate 5",
            "--trace-speed 2",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    proptest! {
        #[test]
        fn arrivals_never_go_back(
            rate in 0.01..10_000.0_f64,
            shape in 0.01..100.0_f64,
            seed: u64,
            count in 1_usize..300,
        ) {
            let line = format!("--request-rate {rate} --burstiness {shape}");
            let arrivals = seconds(&line, seed, count);
            prop_assert!(arrivals.is_sorted());
            prop_assert!(near(arrivals[count - 1], count as f64 / rate, 1e-3));
        }
    }
}
