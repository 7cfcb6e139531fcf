//! The chart of a latency: the distribution of its values, and the share of values below each.

use std::fmt::Write;

use maud::{Markup, html};

use super::Run;
use super::axis::{Axis, coordinate, percent, time};
use super::chart::{self, LEFT, RIGHT};
use super::histogram::Histogram;
use super::metrics::Latency;

const TOP: f64 = 10.0;
const MIDDLE: f64 = 118.0;
const CURVE_TOP: f64 = 140.0;
const BOTTOM: f64 = 310.0;
const HEIGHT: f64 = 336.0;
/// Bins of the upper chart. The lower chart has a point at each edge, and three between adjacent
/// edges.
const BINS: usize = 48;
const POINTS: usize = BINS * 4;

/// The chart of the runs that have a distribution of `latency`; `None`: there are no such runs.
pub(super) fn figure(latency: Latency, runs: &[Run]) -> Option<Markup> {
    let shown: Vec<(usize, &Run, Histogram)> = runs
        .iter()
        .enumerate()
        .filter_map(|(index, run)| Some((index, run, run.histogram(latency.key)?)))
        .collect();
    let low = shown.iter().map(|(.., histogram)| histogram.low()).min_by(f64::total_cmp)?;
    let high = shown.iter().map(|(.., histogram)| histogram.high()).max_by(f64::total_cmp)?;
    let x = Axis::logarithmic(low, high, LEFT, RIGHT);
    let edges = x.cuts(BINS);
    let shares: Vec<Vec<f64>> = shown
        .iter()
        .map(|(.., histogram)| {
            edges
                .windows(2)
                .map(|edge| histogram.below(edge[1]) - histogram.below(edge[0]))
                .collect()
        })
        .collect();
    let highest = shares.iter().flatten().copied().fold(0.0, f64::max);
    let share = Axis::linear(highest, MIDDLE, TOP, 3);
    let below = Axis::linear_exact(1.0, BOTTOM, CURVE_TOP);
    let across: Vec<f64> = edges.iter().map(|&edge| x.at(edge)).collect();
    let points = x.cuts(POINTS);

    let content = html! {
        (chart::horizontal_axis(&x, TOP, BOTTOM, time))
        (chart::vertical_axis(share.marks(4).into_iter().map(|mark| (share.at(mark), percent(mark)))))
        (chart::vertical_axis([0.0, 0.25, 0.5, 0.75, 0.9, 1.0].map(|mark| (below.at(mark), percent(mark)))))
        @for ((index, ..), shares) in shown.iter().zip(&shares) {
            @let heights: Vec<f64> = shares.iter().map(|&value| share.at(value)).collect();
            path class={ "area " (chart::style(*index)) } d=(chart::area(&across, &heights, MIDDLE)) {}
            path class={ "series " (chart::style(*index)) } d=(chart::steps(&across, &heights)) {}
        }
        @for (index, _, histogram) in &shown {
            @let curve = points.iter().map(|&value| (x.at(value), below.at(histogram.below(value))));
            path class={ "series " (chart::style(*index)) } d=(chart::line(curve)) {}
        }
        @for (place, shown_run) in shown.iter().enumerate() {
            (markers(latency, shown_run, (place, shown.len()), &x, &below))
        }
        @for (bin, edge) in edges.windows(2).enumerate() {
            (chart::strip(across[bin], across[bin + 1], TOP, BOTTOM, &tells(edge, bin, &shown, &shares)))
        }
    };
    let legend =
        chart::legend(shown.iter().map(|(index, run, _)| (*index, *run, note(latency, run))));
    let note =
        format!("above: share of {0}; below: share of {0} that took at most as long", latency.of);
    Some(chart::figure((latency.name, &note), &legend, HEIGHT, &summary(latency, &shown), &content))
}

/// Dots on the curve at the percentiles in the run's file, and the run's letter beside the curve.
/// `place`: the run's index among the `of` shown runs.
fn markers(
    latency: Latency,
    (index, run, histogram): &(usize, &Run, Histogram),
    (place, of): (usize, usize),
    x: &Axis,
    below: &Axis,
) -> Markup {
    // Letters at different heights do not overlap, even if the curves do.
    let level = 0.2 + 0.6 * (place as f64 + 0.5) / of as f64;
    let at = x.cuts(POINTS).into_iter().find(|&value| histogram.below(value) >= level);
    let (index, letter) = (*index, chart::letter(*index));
    html! {
        @for (statistic, name, share) in PERCENTILES {
            @if let Some(value) = run.positive(&format!("{statistic}_{}_ms", latency.key)) {
                circle class={ "dot " (chart::style(index)) } r="3" cx=(coordinate(x.at(value))) cy=(coordinate(below.at(share))) {
                    title { (letter) " " (name) ": " (time(value)) }
                }
            }
        }
        @if of > 1 {
            @if let Some(at) = at {
                text class={ "mark " (chart::style(index)) } x=(coordinate(x.at(at) - 5.0)) y=(coordinate(below.at(level) + 4.0)) {
                    (letter)
                }
            }
        }
    }
}

const PERCENTILES: [(&str, &str, f64); 3] =
    [("median", "median", 0.5), ("p90", "P90", 0.9), ("p99", "P99", 0.99)];

/// The tooltip of one bin.
fn tells(
    edge: &[f64],
    bin: usize,
    shown: &[(usize, &Run, Histogram)],
    shares: &[Vec<f64>],
) -> String {
    let mut text = format!("{} to {}", time(edge[0]), time(edge[1]));
    for ((index, run, histogram), shares) in shown.iter().zip(shares) {
        let (here, below) = (percent(shares[bin]), percent(histogram.below(edge[1])));
        let letter = chart::letter(*index);
        // Writing to a string cannot fail.
        let _ = write!(text, "\n{letter} {}: {here} here, {below} below its end", run.label());
    }
    text
}

/// The percentiles in the run's file, for the legend.
fn note(latency: Latency, run: &Run) -> String {
    let known = PERCENTILES.iter().filter_map(|(statistic, name, _)| {
        let value = run.number(&format!("{statistic}_{}_ms", latency.key))?;
        Some(format!("{name} {}", time(value)))
    });
    known.collect::<Vec<_>>().join(" · ")
}

fn summary(latency: Latency, shown: &[(usize, &Run, Histogram)]) -> String {
    let runs: Vec<String> = shown
        .iter()
        .map(|(index, run, histogram)| {
            let (letter, label, note) = (chart::letter(*index), run.label(), note(latency, run));
            let range = format!("from {} to {}", time(histogram.low()), time(histogram.high()));
            if note.is_empty() {
                format!("{letter} {label} {range}")
            } else {
                format!("{letter} {label} {range}, {note}")
            }
        })
        .collect();
    format!("Distribution of {}, logarithmic axis. {}.", latency.name, runs.join("; "))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::metrics::LATENCIES;
    use super::*;

    fn run(edges: [f64; 3], counts: [u32; 2]) -> Run {
        let histogram = json!({"edges": edges, "counts": counts});
        Run::new(
            "x",
            json!({"median_ttft_ms": 10, "p99_ttft_ms": 0, "histograms": {"ttft_ms": histogram}}),
        )
    }

    #[test]
    fn runs_without_a_distribution_are_left_out() {
        let runs = [Run::new("no", json!({})), run([5.0, 10.0, 20.0], [1, 3])];
        let page = figure(LATENCIES[1], &runs).unwrap().into_string();
        // One area, two lines and the legend's sample, all in the second run's colour.
        assert_eq!(page.matches("class=\"area c1 d1\"").count(), 1);
        assert_eq!(page.matches("class=\"series c1 d1\"").count(), 3);
        assert!(!page.contains("c0 d0"));
        assert!(page.contains("B median: 10 ms"));
        assert!(!page.contains("B P99"), "zero has no place on a logarithmic axis");
        assert!(figure(LATENCIES[0], &runs).is_none());
    }

    #[test]
    fn curves_end_at_all_values() {
        let page = figure(LATENCIES[1], &[run([5.0, 10.0, 20.0], [1, 3])]).unwrap().into_string();
        assert!(page.contains(&format!("L504 {CURVE_TOP}\"")), "{page}");
        assert_eq!(page.matches("class=\"strip\"").count(), BINS);
        assert!(page.contains("100 % below its end"));
    }
}
