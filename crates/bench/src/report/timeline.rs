//! Charts over the time of a run: the values of each second.

use maud::{Markup, html};

use super::Run;
use super::axis::{Axis, plain, short};
use super::chart::{self, LEFT, RIGHT};
use super::run::Timeline;

const TOP: f64 = 10.0;
const BOTTOM: f64 = 172.0;
const HEIGHT: f64 = 198.0;
/// The largest number of intervals in a chart. In longer runs, an interval covers several seconds.
const PIECES: usize = 180;

/// A kind of chart: its caption, the unit of its values, and its series.
type Kind = (&'static str, &'static str, fn(&Timeline) -> &[f64]);

const KINDS: [Kind; 5] = [
    ("Output token throughput", "tokens/s", |timeline| &timeline.output_tokens),
    ("Requests in flight", "requests", |timeline| &timeline.concurrency),
    ("Requests sent", "requests/s", |timeline| &timeline.sent),
    ("Requests finished", "requests/s", |timeline| &timeline.finished),
    ("Requests failed", "requests/s", |timeline| &timeline.failed),
];

/// All charts of the runs that have a timeline; empty if no run has one.
pub(super) fn figures(runs: &[Run]) -> Vec<Markup> {
    let shown: Vec<(usize, &Run, Timeline)> = runs
        .iter()
        .enumerate()
        .filter_map(|(index, run)| Some((index, run, run.timeline()?)))
        .collect();
    let seconds = shown.iter().map(|(.., timeline)| timeline.output_tokens.len()).max();
    let Some(seconds) = seconds else {
        return Vec::new();
    };
    let width = piece_width(seconds);
    // A series of zeros, such as failures in most runs, gets no chart.
    let worth = |(.., series): &&Kind| {
        shown.iter().any(|(.., timeline)| series(timeline).iter().any(|&value| value > 0.0))
    };
    KINDS.iter().filter(worth).map(|&kind| figure(kind, seconds, width, &shown)).collect()
}

/// The smallest round number of seconds per interval that gives at most [`PIECES`] intervals.
fn piece_width(seconds: usize) -> usize {
    let widths = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600];
    let enough = |width: &usize| seconds.div_ceil(*width) <= PIECES;
    widths.into_iter().find(enough).unwrap_or_else(|| seconds.div_ceil(PIECES))
}

/// The mean of every `width` values; the last interval may have fewer values.
fn means(series: &[f64], width: usize) -> Vec<f64> {
    series.chunks(width).map(|piece| piece.iter().sum::<f64>() / piece.len() as f64).collect()
}

fn figure(kind: Kind, seconds: usize, width: usize, shown: &[(usize, &Run, Timeline)]) -> Markup {
    let (name, unit, series) = kind;
    let pieces: Vec<Vec<f64>> =
        shown.iter().map(|(.., timeline)| means(series(timeline), width)).collect();
    let highest = pieces.iter().flatten().copied().fold(0.0, f64::max);
    let x = Axis::linear_exact(seconds as f64, LEFT, RIGHT);
    let y = Axis::linear(highest, BOTTOM, TOP, 4);
    // The last interval may be shorter.
    let edge = |index: usize| ((index * width) as f64).min(seconds as f64);
    let content = html! {
        (chart::horizontal_axis(&x, TOP, BOTTOM, |mark| format!("{} s", plain(mark))))
        (chart::vertical_axis(y.marks(5).into_iter().map(|mark| (y.at(mark), short(mark)))))
        @for ((index, ..), pieces) in shown.iter().zip(&pieces) {
            @let edges: Vec<f64> = (0..=pieces.len()).map(|index| x.at(edge(index))).collect();
            @let heights: Vec<f64> = pieces.iter().map(|&value| y.at(value)).collect();
            @if shown.len() == 1 {
                path class={ "area " (chart::style(*index)) } d=(chart::area(&edges, &heights, BOTTOM)) {}
            }
            path class={ "series " (chart::style(*index)) } d=(chart::steps(&edges, &heights)) {}
        }
        @for piece in 0..seconds.div_ceil(width) {
            @let (from, to) = (edge(piece), edge(piece + 1));
            (chart::strip(x.at(from), x.at(to), TOP, BOTTOM, &tells(piece, (from, to), unit, shown, &pieces)))
        }
    };
    let spans = if width == 1 { String::new() } else { format!(", means of {width} s") };
    let note = format!("{unit}{spans}");
    let legend = chart::legend(shown.iter().map(|(index, run, _)| (*index, *run, String::new())));
    let peaks: Vec<String> = shown
        .iter()
        .zip(&pieces)
        .map(|((index, run, timeline), pieces)| {
            let values = series(timeline);
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            let peak = pieces.iter().copied().fold(0.0, f64::max);
            format!(
                "{} {}: mean {}, peak {}",
                chart::letter(*index),
                run.label(),
                plain(mean),
                plain(peak)
            )
        })
        .collect();
    let summary = format!("{name} ({note}) over {seconds} seconds. {}.", peaks.join("; "));
    chart::figure((name, &note), &legend, HEIGHT, &summary, &content)
}

/// The tooltip of one interval.
fn tells(
    piece: usize,
    (from, to): (f64, f64),
    unit: &str,
    shown: &[(usize, &Run, Timeline)],
    pieces: &[Vec<f64>],
) -> String {
    let mut lines = vec![format!("{} to {} s", plain(from), plain(to))];
    for ((index, run, _), pieces) in shown.iter().zip(pieces) {
        if let Some(value) = pieces.get(piece) {
            lines.push(format!(
                "{} {}: {} {unit}",
                chart::letter(*index),
                run.label(),
                plain(*value)
            ));
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn run(seconds: usize) -> Run {
        let rows: Vec<_> = (0..seconds)
            .map(|second| json!({"second": second, "output_tokens": second * 100, "failed": 1}))
            .collect();
        Run::new("x", json!({"timeline": rows}))
    }

    #[test]
    fn every_second_of_a_short_run_is_shown() {
        let figures: Vec<String> = figures(&[run(5), Run::new("none", json!({}))])
            .into_iter()
            .map(Markup::into_string)
            .collect();
        assert_eq!(figures.len(), 2, "tokens and failures");
        assert_eq!(figures[0].matches("class=\"strip\"").count(), 5);
        assert!(figures[0].contains("4 to 5 s\nA x: 400 tokens/s"), "{}", figures[0]);
        assert!(figures[0].contains("mean 200, peak 400"));
        assert!(figures.iter().all(|figure| !figure.contains("NaN")));
    }

    #[test]
    fn long_runs_are_drawn_in_pieces() {
        assert_eq!((piece_width(180), piece_width(181), piece_width(3600)), (1, 2, 30));
        assert!(86_400usize.div_ceil(piece_width(86_400)) <= PIECES);
        assert_eq!(means(&[1.0, 3.0, 5.0], 2), [2.0, 5.0]);
        let page = figures(&[run(201), run(3)]).swap_remove(0).into_string();
        assert_eq!(page.matches("class=\"strip\"").count(), 101);
        assert!(page.contains("means of 2 s"));
        assert!(page.contains("200 to 201 s"), "the last piece ends with the run");
    }

    #[test]
    fn no_timelines_no_charts() {
        assert!(figures(&[Run::new("x", json!({}))]).is_empty());
    }
}
