//! Distributions: the counts of values in bins, and the share of values below each value.

/// A distribution: `counts[i]` values lie between `edges[i]` and `edges[i + 1]`, in milliseconds.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Histogram {
    edges: Vec<f64>,
    /// The share of all values below each edge, from 0 to 1.
    below: Vec<f64>,
}

impl Histogram {
    /// Creates a histogram; `None`: the numbers of edges and counts do not match, edges do not
    /// increase, or there are no values.
    pub(super) fn new(edges: Vec<f64>, counts: &[f64]) -> Option<Self> {
        let total: f64 = counts.iter().sum();
        let rising =
            edges.is_sorted_by(|a, b| a < b) && edges.first().is_some_and(|&edge| edge >= 0.0);
        let counted = counts.iter().all(|&count| count >= 0.0) && total > 0.0;
        if !rising || !counted || edges.len() != counts.len() + 1 {
            return None;
        }
        // Empty bins at the ends would only widen the axis.
        let first = counts.iter().position(|&count| count > 0.0)?;
        let last = counts.iter().rposition(|&count| count > 0.0)?;
        let mut below = vec![0.0];
        let mut sum = 0.0;
        for count in &counts[first..=last] {
            sum += count;
            below.push(sum / total);
        }
        Some(Self { edges: edges[first..=last + 1].to_vec(), below })
    }

    /// Creates the histogram of values, in bins of equal width on a logarithmic scale.
    pub(super) fn of(values: &[f64]) -> Option<Self> {
        const BINS_PER_DECADE: f64 = 40.0;
        let positive = || values.iter().copied().filter(|value| *value > 0.0 && value.is_finite());
        let bin = |value: f64| (value.log10() * BINS_PER_DECADE).floor() as i64;
        let first = positive().map(bin).min()?;
        let last = positive().map(bin).max()?;
        let mut counts = vec![0.0; usize::try_from(last - first + 1).ok()?];
        for value in positive() {
            counts[(bin(value) - first) as usize] += 1.0;
        }
        let edges = (first..=last + 1).map(|edge| 10f64.powf(edge as f64 / BINS_PER_DECADE));
        Self::new(edges.collect(), &counts)
    }

    /// Splits the bin that contains `value`, given the exact `share` of values below it: bins may
    /// be wide, but percentiles are exact. Does nothing if the share contradicts the counts.
    pub(super) fn refine(&mut self, value: f64, share: f64) {
        let after = self.edges.partition_point(|&edge| edge < value);
        let inside = after > 0 && self.edges.get(after).is_some_and(|&edge| edge > value);
        if inside && (self.below[after - 1]..=self.below[after]).contains(&share) {
            self.edges.insert(after, value);
            self.below.insert(after, share);
        }
        // Remove the edges beyond the largest value.
        let end = self.below.partition_point(|&share| share < 1.0) + 1;
        self.edges.truncate(end);
        self.below.truncate(end);
    }

    /// The smallest edge, or a positive replacement for zero, which a logarithmic axis can't show.
    pub(super) fn low(&self) -> f64 {
        if self.edges[0] > 0.0 { self.edges[0] } else { self.edges[1] / 2.0 }
    }

    /// The greatest edge.
    pub(super) fn high(&self) -> f64 {
        self.edges[self.edges.len() - 1]
    }

    /// The share of values below `value`. Within a bin, values are assumed to be evenly spread on a
    /// logarithmic scale.
    pub(super) fn below(&self, value: f64) -> f64 {
        let after = self.edges.partition_point(|&edge| edge <= value);
        if after == 0 {
            return 0.0;
        }
        if after == self.edges.len() {
            return 1.0;
        }
        let (low, high) = (self.edges[after - 1], self.edges[after]);
        let share = if low > 0.0 { (value / low).ln() / (high / low).ln() } else { value / high };
        self.below[after - 1] + share * (self.below[after] - self.below[after - 1])
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::super::Run;
    use super::*;

    #[test]
    fn percentiles_make_wide_bins_exact() {
        let value = json!({"histograms": {"itl_ms": {"edges": [1, 10, 100], "counts": [5, 5]}},
            "median_itl_ms": 4, "p90_itl_ms": 50, "p99_itl_ms": 1e9, "max_itl_ms": 60});
        let histogram = Run::new("x", value).histogram("itl").unwrap();
        assert_eq!(histogram.edges, [1.0, 4.0, 10.0, 50.0, 60.0]);
        assert_eq!(histogram.below, [0.0, 0.5, 0.5, 0.9, 1.0]);
    }

    #[test]
    fn percentiles_that_do_not_fit_change_nothing() {
        let mut histogram = Histogram::new(vec![1.0, 10.0, 100.0], &[5.0, 5.0]).unwrap();
        let before = histogram.clone();
        for (value, share) in
            [(0.5, 0.5), (1.0, 0.1), (4.0, 0.6), (20.0, 0.4), (100.0, 1.0), (500.0, 1.0)]
        {
            histogram.refine(value, share);
        }
        assert_eq!(histogram, before);
    }

    #[test]
    fn a_first_edge_of_zero_can_be_drawn() {
        let histogram = Histogram::new(vec![0.0, 2.0, 4.0], &[1.0, 1.0]).unwrap();
        assert_eq!(histogram.low(), 1.0);
        assert_eq!(histogram.below(1.0), 0.25);
    }

    proptest! {
        #[test]
        fn shares_rise_from_zero_to_one(values in prop::collection::vec(1e-3..1e5f64, 1..200)) {
            let histogram = Histogram::of(&values).unwrap();
            let mut sorted = values;
            sorted.sort_by(f64::total_cmp);
            let shares: Vec<f64> = sorted.iter().map(|&value| histogram.below(value)).collect();
            prop_assert!(shares.is_sorted());
            prop_assert!(histogram.below(histogram.low() * 0.999) == 0.0);
            prop_assert!(histogram.below(histogram.high() * 1.001) == 1.0);
            // At the end of a bin, the share is exact.
            let count = sorted.len() as f64;
            for (index, &edge) in histogram.edges.iter().enumerate() {
                let exact = sorted.iter().filter(|&&value| value < edge).count() as f64 / count;
                prop_assert!((histogram.below[index] - exact).abs() < 2.0 / count);
            }
        }

        #[test]
        fn whatever_is_said_of_it_it_stays_a_distribution(
            values in prop::collection::vec(1e-3..1e3f64, 1..50),
            said in prop::collection::vec((1e-4..1e4f64, 0.0..=1.0f64), 0..8),
        ) {
            let mut histogram = Histogram::of(&values).unwrap();
            for (value, share) in said {
                histogram.refine(value, share);
                prop_assert_eq!(histogram.edges.len(), histogram.below.len());
                prop_assert!(histogram.edges.is_sorted_by(|a, b| a < b));
                prop_assert!(histogram.below.is_sorted());
                prop_assert_eq!((histogram.below[0], histogram.below.last()), (0.0, Some(&1.0)));
            }
        }
    }
}
