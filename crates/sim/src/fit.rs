//! Fits a profile to measured steps.

use crate::profile::DeviceModel;
use crate::samples::{FitError, Sample};
use crate::solve::{COLUMNS, Equation, non_negative};

const MIN_SAMPLES: usize = 10;
/// The number of samples that are used to search for the roofline's knee.
const SEARCH_SAMPLES: usize = 4000;
/// The number of knees that are tried before the best one is refined.
const KNEES: usize = 40;
/// A knee is used only if its error is below this factor times the error of a straight line.
const KNEE_PAYS: f64 = 0.97;
const ROUNDS: usize = 12;
/// The error, in standard deviations, from which a sample counts less (Huber 1964).
const HUBER: f64 = 1.345;
/// The error, in standard deviations, from which a sample does not count.
const OUTLIER: f64 = 6.0;
/// The relative error below which samples count as exact.
const EXACT: f64 = 1e-7;
/// The factor from the median of absolute errors to the standard deviation of a normal
/// distribution.
const MEDIAN_TO_SIGMA: f64 = 1.4826;

/// A fitted model, and its deviation from the samples.
#[derive(Debug, Clone, PartialEq)]
pub struct Fit {
    /// The fitted model. Its jitter is the part of the variance that the model does not explain.
    pub model: DeviceModel,
    /// The number of steps that were used for the fit.
    pub samples: usize,
    /// The number of steps that deviated so much from the model that they were ignored.
    pub outliers: usize,
    /// The fraction of the variance of the step time that the model explains, without the outliers.
    pub r2: f64,
    /// The relative errors of all steps: the 50th, 90th and 99th percentile.
    pub error_percentiles: [f64; 3],
}

/// Fits a model to measured steps by least squares of the relative errors, with no negative times.
/// Outliers have little weight. The knee of the roofline is the one that fits best.
///
/// # Errors
/// Too few steps took any time.
pub fn fit(samples: &[Sample]) -> Result<Fit, FitError> {
    let timed: Vec<Sample> = samples.iter().copied().filter(|s| s.step_us > 0.0).collect();
    if timed.len() < MIN_SAMPLES {
        return Err(FitError::TooFew { found: timed.len(), needed: MIN_SAMPLES });
    }
    let every = timed.len().div_ceil(SEARCH_SAMPLES);
    let few: Vec<Sample> = timed.iter().copied().step_by(every).collect();
    let best = Robust::new(&timed, best_knee(&few));
    let model = best.model();
    let errors = sorted(best.errors.iter().map(|e| e.abs()).collect());
    let kept: Vec<(f64, f64)> = (timed.iter().zip(&best.errors))
        .filter(|(_, error)| error.abs() <= OUTLIER * best.sigma)
        .map(|(s, error)| (s.step_us, s.step_us - s.step_us / (1.0 + error)))
        .collect();
    let mean = kept.iter().map(|(y, _)| y).sum::<f64>() / kept.len() as f64;
    let total: f64 = kept.iter().map(|(y, _)| (y - mean).powi(2)).sum();
    let left: f64 = kept.iter().map(|(_, error)| error.powi(2)).sum();
    Ok(Fit {
        model,
        samples: timed.len(),
        outliers: timed.len() - kept.len(),
        r2: if total > 0.0 { 1.0 - left / total } else { 1.0 },
        error_percentiles: [0.5, 0.9, 0.99].map(|p| percentile(&errors, p)),
    })
}

/// Returns the number of tokens up to which the time of reading the weights hides the tokens'
/// arithmetic; 0 if no such knee fits the samples.
fn best_knee(samples: &[Sample]) -> f64 {
    let tokens = sorted(samples.iter().map(|s| f64::from(s.load.tokens())).collect());
    let mut knees: Vec<f64> =
        (0..KNEES).map(|i| percentile(&tokens, i as f64 / (KNEES - 1) as f64)).collect();
    knees.dedup();
    let loss = |knee: f64| Robust::new(samples, knee).loss();
    let straight = loss(0.0);
    let losses: Vec<f64> = knees.iter().map(|&knee| loss(knee)).collect();
    let least = (0..knees.len()).min_by(|&a, &b| losses[a].total_cmp(&losses[b])).unwrap_or(0);
    let mut low = knees[least.saturating_sub(1)];
    let mut high = knees[(least + 1).min(knees.len() - 1)];
    for _ in 0..16 {
        let (a, b) = (low + (high - low) / 3.0, high - (high - low) / 3.0);
        if loss(a) <= loss(b) {
            high = b;
        } else {
            low = a;
        }
    }
    let middle = f64::midpoint(low, high);
    let (knee, least) = match loss(middle) {
        refined if refined < losses[least] => (middle, refined),
        _ => (knees[least], losses[least]),
    };
    // With a knee at the largest step, the curve is only a straight line with another constant.
    let real = knee < percentile(&tokens, 1.0) && least < KNEE_PAYS * straight;
    if real { knee } else { 0.0 }
}

/// The robust solution for one knee.
struct Robust {
    knee: f64,
    times: [f64; COLUMNS],
    /// `measured / modelled - 1` of each sample.
    errors: Vec<f64>,
    /// The standard deviation of the errors, estimated from their median.
    sigma: f64,
}

impl Robust {
    fn new(samples: &[Sample], knee: f64) -> Self {
        let equations: Vec<Equation> = samples.iter().map(|s| equation(s, knee)).collect();
        let measured = sorted(samples.iter().map(|s| s.step_us).collect());
        let floor = percentile(&measured, 0.5) * 1e-3;
        // The errors are relative to the measured times at first, later to the modelled times.
        let mut weights: Vec<f64> = samples.iter().map(|s| s.step_us.max(floor).powi(-2)).collect();
        let mut times = [0.0; COLUMNS];
        let mut errors = vec![0.0; samples.len()];
        let mut sigma = 0.0;
        for round in 0..ROUNDS {
            times = non_negative(equations.iter().copied().zip(weights.iter().copied()));
            let modelled = |e: &Equation| {
                let sum: f64 = e.columns.iter().zip(times).map(|(x, time)| x * time).sum();
                sum.max(floor)
            };
            for (error, equation) in errors.iter_mut().zip(&equations) {
                *error = equation.target / modelled(equation) - 1.0;
            }
            let absolute = sorted(errors.iter().map(|e| e.abs()).collect());
            sigma = (MEDIAN_TO_SIGMA * percentile(&absolute, 0.5)).max(EXACT);
            let strict = round >= ROUNDS / 2;
            for ((weight, error), equation) in weights.iter_mut().zip(&errors).zip(&equations) {
                let doubt = match error.abs() / sigma {
                    far if far > OUTLIER && strict => 0.0,
                    far if far > HUBER => HUBER / far,
                    _ => 1.0,
                };
                *weight = doubt * modelled(equation).powi(-2);
            }
        }
        Self { knee, times, errors, sigma }
    }

    /// The mean square of the smallest nine tenths of the errors.
    fn loss(&self) -> f64 {
        let absolute = sorted(self.errors.iter().map(|e| e.abs()).collect());
        let most = (absolute.len() * 9).div_ceil(10);
        absolute[..most].iter().map(|e| e * e).sum::<f64>() / most as f64
    }

    fn model(&self) -> DeviceModel {
        let [step_us, token_us, row_us, context_us, attention_us] = self.times.map(rounded);
        DeviceModel {
            step_us,
            weights_us: rounded(token_us * self.knee),
            token_us,
            row_us,
            context_us,
            attention_us,
            host_us: 0.0,
            // Recordings do not contain the times of images.
            tower_us: 0.0,
            jitter_sigma: if self.sigma > EXACT { rounded(self.sigma.min(1.0)) } else { 0.0 },
        }
    }
}

fn equation(sample: &Sample, knee: f64) -> Equation {
    let load = &sample.load;
    let columns = [
        1.0,
        f64::from(load.tokens()).max(knee),
        f64::from(load.rows),
        load.context as f64,
        load.attention as f64,
    ];
    Equation { columns, target: sample.step_us }
}

/// Rounds to five significant digits: more would suggest a precision that no measurement has.
fn rounded(value: f64) -> f64 {
    if value == 0.0 {
        return 0.0;
    }
    let scale = 10_f64.powi(4 - value.abs().log10().floor() as i32);
    (value * scale).round() / scale
}

fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_unstable_by(f64::total_cmp);
    values
}

/// Returns the value at the fraction `share` of the sorted values.
fn percentile(sorted: &[f64], share: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}
