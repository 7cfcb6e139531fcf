//! The times of decode-only steps, by the number of their positions.

/// The step sizes, in positions, whose times are kept; ascending.
const SIZES: [u32; 16] = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64, 128];
/// The largest weight of all earlier steps of a size, relative to a weight of 1 for a new step. If
/// times vary by 30 %, their mean is accurate to 4 %.
const MEMORY: f64 = 23.0;
/// The factor on every size's weight at each step. So an outdated measurement fades, even if its
/// size is not tried again because it was slow.
const FADING: f64 = 1.0 - 1.0 / 512.0;
/// The weight of the prior curve relative to the measured steps.
const PRIOR: f64 = 1.5;
/// The bound on one measured time, as a multiple of the expected time: devices may stall for a
/// moment.
const OUTLIER: f64 = 2.0;

/// The number of positions up to which a step mostly takes the time of reading all weights once.
/// Beyond that, arithmetic takes the time (ADR 86).
const READING: f64 = 6.0;
/// The usual cost of a position beyond [`READING`], relative to a step of one position. It holds
/// until steps with prompts are measured.
const USUAL_SLOPE: f64 = 0.2;
/// The cost of a drafted position relative to a prompt position: a draft needs logits too.
const WITH_LOGITS: f64 = 1.5;
/// The weight of all earlier steps with prompts, relative to a weight of 1 for a new step.
const PROMPTS: f64 = 7.0;

/// The usual time of a step of up to [`READING`] positions, relative to a step of one.
fn reading(positions: f64) -> f64 {
    1.0 + 0.08 * (positions.min(READING) - 1.0)
}

fn beyond(positions: f64) -> f64 {
    (positions - READING).max(0.0)
}

/// The curve of step times that is given by the time of a one-position step and a slope.
#[derive(Debug, Clone, Copy)]
struct Shape {
    /// Microseconds of a step of one position.
    unit: f64,
    /// Microseconds of each position beyond [`READING`].
    slope: f64,
}

impl Shape {
    fn us(self, positions: f64) -> f64 {
        self.unit * reading(positions) + self.slope * beyond(positions)
    }
}

/// Learned times of decode-only steps, in microseconds.
#[derive(Debug, Clone, Default)]
pub struct StepCosts {
    means: [f64; SIZES.len()],
    weights: [f64; SIZES.len()],
    /// Microseconds per position in steps with long prompts; 0: not measured.
    prompt_us: f64,
}

impl StepCosts {
    /// Learns the time of a step of `positions` positions.
    pub fn learn(&mut self, positions: u32, us: u32) {
        if positions == 0 || us == 0 {
            return;
        }
        let size = size_of(positions);
        let mut us = f64::from(us);
        if let Some(shape) = self.shape() {
            us *= shape.us(f64::from(SIZES[size])) / shape.us(f64::from(positions));
            let expected = self.of_size(size, shape);
            us = us.clamp(expected / OUTLIER, expected * OUTLIER);
        }
        self.weights.iter_mut().for_each(|weight| *weight *= FADING);
        let weight = &mut self.weights[size];
        self.means[size] = (self.means[size] * *weight + us) / (*weight + 1.0);
        *weight = (*weight + 1.0).min(MEMORY);
    }

    /// Learns the time of a step of `positions` positions, most of which belong to prompts. This
    /// time bounds the cost of arithmetic before a step with many drafts has been measured.
    pub fn learn_prompt(&mut self, positions: u32, us: u32) {
        if positions >= SIZES[SIZES.len() - 1] && us > 0 {
            let us = f64::from(us) / f64::from(positions);
            let before = if self.prompt_us > 0.0 { PROMPTS } else { 0.0 };
            self.prompt_us = (self.prompt_us * before + us) / (before + 1.0);
        }
    }

    /// The expected time of a step of `positions` positions, at least 1; `None`: no step was
    /// measured.
    #[must_use]
    pub fn us(&self, positions: u32) -> Option<f64> {
        let shape = self.shape()?;
        let of_size = |size| self.of_size(size, shape);
        let above = SIZES.partition_point(|&size| size < positions);
        let last = SIZES.len() - 1;
        if above > last {
            let more = shape.us(f64::from(positions)) / shape.us(f64::from(SIZES[last]));
            return Some(of_size(last) * more);
        }
        if SIZES[above] == positions || above == 0 {
            return Some(of_size(above));
        }
        let (low, high) = (f64::from(SIZES[above - 1]), f64::from(SIZES[above]));
        let share = (f64::from(positions) - low) / (high - low);
        Some(of_size(above - 1) * (1.0 - share) + of_size(above) * share)
    }

    /// The expected time at one of the kept sizes. The prior curve has a fixed weight ([`PRIOR`])
    /// among the measured steps.
    fn of_size(&self, size: usize, shape: Shape) -> f64 {
        let (mean, weight) = (self.means[size], self.weights[size]);
        (mean * weight + shape.us(f64::from(SIZES[size])) * PRIOR) / (weight + PRIOR)
    }

    /// The shape that fits all measurements.
    fn shape(&self) -> Option<Shape> {
        let weight: f64 = self.weights.iter().sum();
        if weight <= 0.0 {
            return None;
        }
        let learned = (self.prompt_us > 0.0).then_some(WITH_LOGITS * self.prompt_us);
        let units = SIZES.iter().zip(self.means.iter().zip(&self.weights)).map(|(&size, it)| {
            let (mean, size) = (it.0, f64::from(size));
            let usual = mean / (reading(size) + USUAL_SLOPE * beyond(size));
            let unit = learned.map_or(usual, |slope| {
                // A step takes at least the time of reading the weights, whatever its positions
                // cost.
                ((mean - slope * beyond(size)) / reading(size)).max(usual)
            });
            unit * it.1
        });
        let unit = units.sum::<f64>() / weight;
        Some(Shape { unit, slope: learned.unwrap_or(USUAL_SLOPE * unit) })
    }
}

/// The nearest of [`SIZES`].
fn size_of(positions: u32) -> usize {
    let above = SIZES.partition_point(|&size| size < positions).min(SIZES.len() - 1);
    if above == 0 || SIZES[above] <= positions {
        return above;
    }
    if SIZES[above] - positions < positions - SIZES[above - 1] { above } else { above - 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_learned_by_size() {
        let mut costs = StepCosts::default();
        assert_eq!(costs.us(3), None);
        for _ in 0..50 {
            costs.learn(1, 1000);
        }
        let guess = costs.us(4).expect("learned");
        assert!((guess / 1240.0 - 1.0).abs() < 0.01, "{guess}: as computed from the model's shape");
        for _ in 0..50 {
            costs.learn(4, 3000);
        }
        let (one, four) = (costs.us(1).expect("learned"), costs.us(4).expect("learned"));
        assert!((950.0..1200.0).contains(&one) && (2700.0..3100.0).contains(&four), "{one} {four}");
        let between = costs.us(14).expect("learned");
        assert!(
            costs.us(12).expect("learned") < between && between < costs.us(16).expect("learned")
        );
        assert!(costs.us(400).expect("learned") > costs.us(128).expect("learned"));
    }

    #[test]
    fn prompts_tell_what_many_positions_cost() {
        let mut costs = StepCosts::default();
        for _ in 0..50 {
            costs.learn(8, 2000);
        }
        let before = costs.us(72).expect("learned");
        costs.learn_prompt(127, 60_000);
        assert_eq!(costs.us(72), Some(before), "a short step changes little");
        for _ in 0..20 {
            costs.learn_prompt(512, 512 * 40);
        }
        let after = costs.us(72).expect("learned");
        // 66 positions at 60 us, plus reading the weights once.
        assert!((5000.0..6500.0).contains(&after) && after < 0.5 * before, "{before} {after}");
        assert!((costs.us(8).expect("learned") / 2000.0 - 1.0).abs() < 0.05);
        for _ in 0..20 {
            costs.learn(72, 9000);
        }
        assert!(costs.us(72).expect("learned") > 8000.0, "measured times count more");
    }

    #[test]
    fn one_outlier_changes_little_and_is_forgotten() {
        let mut costs = StepCosts::default();
        for _ in 0..50 {
            costs.learn(1, 1000);
            costs.learn(2, 1080);
        }
        costs.learn(2, 1_000_000);
        assert!(costs.us(2).expect("learned") < 1200.0);
        for _ in 0..40 {
            costs.learn(2, 5000);
        }
        assert!(costs.us(2).expect("learned") > 3000.0);
        for _ in 0..5000 {
            costs.learn(1, 1000);
        }
        assert!(costs.us(2).expect("learned") < 1300.0, "the measured cost allows another try");
    }
}
