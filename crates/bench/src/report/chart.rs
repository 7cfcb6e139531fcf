//! The elements that all charts share: the frame with its axes, lines, and legends.

use maud::{Markup, html};

use super::Run;
use super::axis::{Axis, coordinate};

/// Width of every chart, in SVG units; the page scales each chart to the width of the page.
pub(super) const WIDTH: f64 = 520.0;
/// The left edge of the plot, right of the labels of the vertical axis.
pub(super) const LEFT: f64 = 52.0;
/// The right edge of the plot.
pub(super) const RIGHT: f64 = WIDTH - 16.0;

/// The number of colours in the style sheet. Further runs reuse colours, and are distinguished by
/// their letters.
const COLOURS: usize = 8;
/// The number of dash patterns in the style sheet.
const DASHES: usize = 4;

/// The CSS classes for drawing the run at `index`.
pub(super) fn style(index: usize) -> String {
    format!("c{} d{}", index % COLOURS, index % DASHES)
}

/// The letter of the run at `index`: A to Z, then AA, AB, ...
pub(super) fn letter(index: usize) -> String {
    let last = char::from(b'A' + (index % 26) as u8);
    if index < 26 { last.to_string() } else { letter(index / 26 - 1) + &last.to_string() }
}

/// A line through points.
pub(super) fn line(points: impl IntoIterator<Item = (f64, f64)>) -> String {
    let mut path = String::new();
    for (x, y) in points {
        path.push(if path.is_empty() { 'M' } else { 'L' });
        path.push_str(&coordinate(x));
        path.push(' ');
        path.push_str(&coordinate(y));
    }
    path
}

/// A step line: `heights[i]` is its height between `edges[i]` and `edges[i + 1]`.
pub(super) fn steps(edges: &[f64], heights: &[f64]) -> String {
    line(heights.iter().zip(edges.windows(2)).flat_map(|(&y, edge)| [(edge[0], y), (edge[1], y)]))
}

/// The path of the area between the step line (see [`steps`]) and the height `floor`.
pub(super) fn area(edges: &[f64], heights: &[f64], floor: f64) -> String {
    let (Some(&first), Some(&last)) = (edges.first(), edges.last()) else {
        return String::new();
    };
    let outline = steps(edges, heights);
    let (first, last, floor) = (coordinate(first), coordinate(last), coordinate(floor));
    format!("M{first} {floor}{}L{last} {floor}Z", outline.replacen('M', "L", 1))
}

/// Horizontal grid lines, and labels at values of the vertical axis.
pub(super) fn vertical_axis(marks: impl IntoIterator<Item = (f64, String)>) -> Markup {
    html! {
        @for (y, label) in marks {
            line class="grid" x1=(coordinate(LEFT)) x2=(coordinate(RIGHT)) y1=(coordinate(y)) y2=(coordinate(y)) {}
            text class="end" x=(coordinate(LEFT - 6.0)) y=(coordinate(y + 4.0)) { (label) }
        }
    }
}

/// Vertical grid lines from `top` to `bottom`, with labels below, at the marks of the horizontal
/// axis.
pub(super) fn horizontal_axis(
    axis: &Axis,
    top: f64,
    bottom: f64,
    label: impl Fn(f64) -> String,
) -> Markup {
    html! {
        @for mark in axis.marks(7) {
            @let x = coordinate(axis.at(mark));
            line class="grid" x1=(x) x2=(x) y1=(coordinate(top)) y2=(coordinate(bottom)) {}
            text class="middle" x=(x) y=(coordinate(bottom + 18.0)) { (label(mark)) }
        }
        line class="base" x1=(coordinate(LEFT)) x2=(coordinate(RIGHT)) y1=(coordinate(bottom)) y2=(coordinate(bottom)) {}
    }
}

/// A transparent strip that shows a tooltip for one section of a chart.
pub(super) fn strip(from: f64, to: f64, top: f64, bottom: f64, tells: &str) -> Markup {
    html! {
        rect class="strip" x=(coordinate(from)) y=(coordinate(top))
            width=(coordinate(to - from)) height=(coordinate(bottom - top)) { title { (tells) } }
    }
}

/// A chart of the given height with its caption and a note. `summary` describes the chart in words.
pub(super) fn figure(
    (caption, note): (&str, &str),
    legend: &Markup,
    height: f64,
    summary: &str,
    content: &Markup,
) -> Markup {
    let view = format!("0 0 {} {}", coordinate(WIDTH), coordinate(height));
    html! {
        figure {
            figcaption { (caption) " " span class="note" { (note) } }
            (legend)
            svg viewBox=(view) role="img" aria-label=(summary) { (content) }
        }
    }
}

/// A short sample of a run's line, for legends.
pub(super) fn swatch(index: usize) -> Markup {
    html! {
        svg class="swatch" viewBox="0 0 28 10" aria-hidden="true" {
            path class={ "series " (style(index)) } d="M1 5L27 5" {}
        }
    }
}

/// The legend of a chart: the line, letter, label and a note for each run.
pub(super) fn legend<'a>(runs: impl IntoIterator<Item = (usize, &'a Run, String)>) -> Markup {
    html! {
        ul class="legend" {
            @for (index, run, note) in runs {
                li {
                    (swatch(index)) b { (letter(index)) } " " span class="label" { (run.label()) }
                    @if !note.is_empty() { " " span class="note" { (note) } }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_go_on_after_z() {
        let letters: Vec<String> =
            [0, 25, 26, 27, 51, 52, 26 * 27].into_iter().map(letter).collect();
        assert_eq!(letters, ["A", "Z", "AA", "AB", "AZ", "BA", "AAA"]);
    }

    #[test]
    fn paths_follow_their_points() {
        assert_eq!(line([(0.0, 1.0), (2.25, 3.0)]), "M0 1L2.3 3");
        assert_eq!(line([]), "");
        assert_eq!(steps(&[0.0, 1.0, 2.0], &[5.0, 6.0]), "M0 5L1 5L1 6L2 6");
        assert_eq!(area(&[0.0, 1.0], &[5.0], 9.0), "M0 9L0 5L1 5L1 9Z");
        assert_eq!(area(&[], &[], 9.0), "");
    }

    #[test]
    fn runs_look_different() {
        let styles: std::collections::BTreeSet<String> = (0..8).map(style).collect();
        assert_eq!(styles.len(), 8);
    }
}
