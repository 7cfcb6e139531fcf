//! The times of steps that only decode, by the number of their positions.

/// The numbers of positions whose times are kept, ascending.
const SIZES: [u32; 16] = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64, 128];
/// The weight of all earlier steps of a size, at most, where a new one has 1. Times that differ by
/// 30 % have a mean that is right to 4 %.
const MEMORY: f64 = 23.0;
/// The share of a size's weight that is left after a step of another size. So what was once
/// measured as slow, and is not tried again, is forgotten in the end.
const FADING: f64 = 1.0 - 1.0 / 512.0;
/// The weight of the shape, beside those of the steps that were measured.
const PRIOR: f64 = 1.5;
/// The bound on one time, as a multiple of the expected one: machines stop for a moment.
const OUTLIER: f64 = 2.0;

/// The usual time of a step of so many positions, in units of a step of one. A step reads all
/// weights once. Arithmetic counts from some positions on (ADR 86).
fn shape(positions: f64) -> f64 {
    let beyond = (positions - 6.0).max(0.0);
    1.0 + 0.08 * (positions.min(6.0) - 1.0) + 0.2 * beyond
}

/// Learned times of steps that only decode, in microseconds.
#[derive(Debug, Clone, Default)]
pub struct StepCosts {
    means: [f64; SIZES.len()],
    weights: [f64; SIZES.len()],
}

impl StepCosts {
    /// Takes the time of a step of so many positions.
    pub fn learn(&mut self, positions: u32, us: u32) {
        if positions == 0 || us == 0 {
            return;
        }
        let size = size_of(positions);
        let scale = f64::from(SIZES[size]);
        let mut us = f64::from(us) * shape(scale) / shape(f64::from(positions));
        if let Some(expected) = self.us(SIZES[size]) {
            us = us.clamp(expected / OUTLIER, expected * OUTLIER);
        }
        self.weights.iter_mut().for_each(|weight| *weight *= FADING);
        let weight = &mut self.weights[size];
        self.means[size] = (self.means[size] * *weight + us) / (*weight + 1.0);
        *weight = (*weight + 1.0).min(MEMORY);
    }

    /// The expected time of a step of so many positions, at least 1; `None`: no step was measured.
    #[must_use]
    pub fn us(&self, positions: u32) -> Option<f64> {
        let sizes = || SIZES.iter().zip(self.means.iter().zip(&self.weights));
        let weight: f64 = self.weights.iter().sum();
        if weight <= 0.0 {
            return None;
        }
        // Microseconds of a unit of the shape, over all that was measured.
        let units = sizes().map(|(&size, (mean, weight))| mean * weight / shape(f64::from(size)));
        let unit = units.sum::<f64>() / weight;
        let of_size = |size: usize| {
            let prior = unit * shape(f64::from(SIZES[size]));
            let (mean, weight) = (self.means[size], self.weights[size]);
            (mean * weight + prior * PRIOR) / (weight + PRIOR)
        };
        let above = SIZES.partition_point(|&size| size < positions);
        let last = SIZES.len() - 1;
        if above > last {
            let more = shape(f64::from(positions)) / shape(f64::from(SIZES[last]));
            return Some(of_size(last) * more);
        }
        if SIZES[above] == positions || above == 0 {
            return Some(of_size(above));
        }
        let (low, high) = (f64::from(SIZES[above - 1]), f64::from(SIZES[above]));
        let share = (f64::from(positions) - low) / (high - low);
        Some(of_size(above - 1) * (1.0 - share) + of_size(above) * share)
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
        assert!((guess / 1240.0 - 1.0).abs() < 0.01, "{guess}: as the shape has it");
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
        assert!(costs.us(2).expect("learned") < 1300.0, "it is worth another try");
    }
}
