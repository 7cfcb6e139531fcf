//! Axes of charts: coordinates of values, the values to mark, and the format of numbers.

/// Maps values to coordinates, and chooses round values to mark.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Axis {
    logarithmic: bool,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    /// A linear axis from zero to a round value that is at least `high`, drawn between the
    /// coordinates `from` and `to`, with about `marks` marks.
    pub(super) fn linear(high: f64, from: f64, to: f64, marks: usize) -> Self {
        let high = if high.is_finite() && high > 0.0 { high } else { 1.0 };
        let step = round_step(high / marks.max(1) as f64);
        Self { logarithmic: false, low: 0.0, high: (high / step).ceil() * step, from, to }
    }

    /// A linear axis from zero to exactly `high`.
    pub(super) fn linear_exact(high: f64, from: f64, to: f64) -> Self {
        let high = if high.is_finite() && high > 0.0 { high } else { 1.0 };
        Self { logarithmic: false, low: 0.0, high, from, to }
    }

    /// A logarithmic axis from `low` to `high`, both above zero. A range that is too narrow to be
    /// visible is widened.
    pub(super) fn logarithmic(low: f64, high: f64, from: f64, to: f64) -> Self {
        debug_assert!(low > 0.0 && low <= high && high.is_finite(), "{low} to {high}");
        let missing = (1.1 / (high / low)).sqrt().max(1.0);
        Self { logarithmic: true, low: low / missing, high: high * missing, from, to }
    }

    /// The largest value on the axis.
    pub(super) fn high(&self) -> f64 {
        self.high
    }

    /// The coordinate of a value. A value outside the axis gets the coordinate of the nearer end.
    pub(super) fn at(&self, value: f64) -> f64 {
        let value = value.clamp(self.low, self.high);
        let share = if self.logarithmic {
            (value / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        self.from + share * (self.to - self.from)
    }

    /// The values that divide the drawn axis into `parts` parts of equal length, including both
    /// ends.
    pub(super) fn cuts(&self, parts: usize) -> Vec<f64> {
        let share = |part: usize| part as f64 / parts as f64;
        (0..=parts)
            .map(|part| {
                if part == parts {
                    self.high
                } else if self.logarithmic {
                    self.low * (self.high / self.low).powf(share(part))
                } else {
                    self.low + (self.high - self.low) * share(part)
                }
            })
            .collect()
    }

    /// The round values to mark: at most `most`, and at least two unless `most` is smaller.
    pub(super) fn marks(&self, most: usize) -> Vec<f64> {
        // Only a logarithmic axis of at least a decade gets powers of ten and their multiples as
        // marks. On a shorter axis, evenly spaced values are rounder numbers.
        if self.logarithmic && self.high >= 10.0 * self.low {
            for digits in [&[1, 2, 3, 4, 5, 6, 7, 8, 9][..], &[1, 2, 5], &[1, 3], &[1]] {
                let marks = self.powers(digits);
                if (2..=most).contains(&marks.len()) {
                    return marks;
                }
            }
            let decades = self.powers(&[1]);
            if decades.len() > most {
                let keep_every = decades.len().div_ceil(most.max(1));
                return decades.into_iter().step_by(keep_every).collect();
            }
        }
        let mut wanted = most.max(1);
        loop {
            let step = round_step((self.high - self.low) / wanted as f64);
            let first = (self.low / step - 1e-9).ceil();
            let last = (self.high / step + 1e-9).floor();
            let count = (last - first) as usize + 1;
            if count <= most.max(1) || wanted == 1 {
                return (0..count).map(|index| (first + index as f64) * step).collect();
            }
            wanted -= 1;
        }
    }

    /// The values on the axis that are one of `digits` times a power of ten.
    fn powers(&self, digits: &[i32]) -> Vec<f64> {
        let (first, last) = (self.low.log10().floor() as i32, self.high.log10().floor() as i32);
        (first..=last)
            .flat_map(|power| {
                digits.iter().map(move |&digit| {
                    // Dividing by a positive power of ten avoids results such as
                    // 0.30000000000000004.
                    let digit = f64::from(digit);
                    if power < 0 { digit / 10f64.powi(-power) } else { digit * 10f64.powi(power) }
                })
            })
            .filter(|value| (self.low..=self.high).contains(value))
            .collect()
    }
}

/// The smallest of 1, 2, 5 times a power of ten that is at least `least` (above zero).
fn round_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    let factor = least / power;
    let rounded = [1.0, 2.0, 5.0].into_iter().find(|step| factor <= step * (1.0 + 1e-9));
    rounded.unwrap_or(10.0) * power
}

/// Formats a coordinate, rounded to a tenth of a unit, as briefly as possible.
pub(super) fn coordinate(value: f64) -> String {
    let rounded = (value * 10.0).round() / 10.0;
    // Adding 0.0 turns negative zero, which would be written with its sign, into zero.
    format!("{}", rounded + 0.0)
}

/// Formats a number with about four significant digits and thousands separators. Whole numbers get
/// no decimals.
pub(super) fn plain(value: f64) -> String {
    let size = value.abs();
    let whole = size.fract() == 0.0 && size < 1e15;
    let decimals = match size {
        _ if whole => 0,
        1000.0.. => 0,
        100.0.. => 1,
        1.0.. => 2,
        0.1.. => 3,
        0.001.. => 4,
        _ => return format!("{value:.2e}"),
    };
    let written = format!("{value:.decimals$}");
    let (integer, fraction) = match written.split_once('.') {
        Some((integer, fraction)) => (integer, Some(fraction)),
        None => (written.as_str(), None),
    };
    let digits = integer.trim_start_matches('-');
    let mut out = String::from(if integer.starts_with('-') { "-" } else { "" });
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    if let Some(fraction) = fraction {
        out.push('.');
        out.push_str(fraction);
    }
    out
}

/// Formats a number for an axis: 1,500 is 1.5k, 2,000,000 is 2M.
pub(super) fn short(value: f64) -> String {
    let (scaled, suffix) = match value.abs() {
        1e9.. => (value / 1e9, "G"),
        1e6.. => (value / 1e6, "M"),
        1e3.. => (value / 1e3, "k"),
        _ => (value, ""),
    };
    format!("{}{suffix}", three_digits(scaled))
}

/// Formats a time, given in milliseconds, in the most suitable unit.
pub(super) fn time(milliseconds: f64) -> String {
    match milliseconds.abs() {
        1000.0.. => format!("{} s", three_digits(milliseconds / 1e3)),
        0.9995.. => format!("{} ms", three_digits(milliseconds)),
        0.0 => "0 ms".to_owned(),
        _ => format!("{} µs", three_digits(milliseconds * 1e3)),
    }
}

/// Formats a share as a percentage.
pub(super) fn percent(share: f64) -> String {
    format!("{} %", three_digits(share * 100.0))
}

/// Formats a value with at most three significant digits (but all digits of the integer part),
/// without trailing zeros.
fn three_digits(value: f64) -> String {
    let decimals = match value.abs() {
        100.0.. => 0,
        10.0.. => 1,
        1.0.. => 2,
        _ => 3,
    };
    let written = format!("{value:.decimals$}");
    if written.contains('.') {
        written.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        written
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn linear_axes_end_at_a_round_value() {
        let axis = Axis::linear(37.0, 100.0, 0.0, 4);
        assert_eq!(axis.high(), 40.0);
        assert_eq!(axis.marks(5), [0.0, 10.0, 20.0, 30.0, 40.0]);
        assert_eq!(axis.at(0.0), 100.0);
        assert_eq!(axis.at(20.0), 50.0);
        assert_eq!(axis.at(1000.0), 0.0);
    }

    #[test]
    fn logarithmic_axes_mark_what_fits() {
        let decades = Axis::logarithmic(0.5, 20_000.0, 0.0, 100.0);
        assert_eq!(decades.marks(6), [1.0, 10.0, 100.0, 1000.0, 10_000.0]);
        let two = Axis::logarithmic(9.0, 120.0, 0.0, 100.0);
        assert_eq!(two.marks(6), [10.0, 20.0, 50.0, 100.0]);
        let narrow = Axis::logarithmic(0.21, 0.29, 0.0, 100.0);
        assert_eq!(narrow.marks(6).len(), 4, "{:?}", narrow.marks(6));
        assert!((decades.at(100.0) - 50.0).abs() < 1e-9);
    }

    #[test]
    fn logarithmic_marks_are_exact() {
        assert_eq!(Axis::logarithmic(0.1, 1.0, 0.0, 1.0).marks(10)[2], 0.3);
    }

    #[test]
    fn nothing_to_show_still_makes_an_axis() {
        assert_eq!(Axis::linear(0.0, 0.0, 1.0, 4).high(), 1.0);
        assert_eq!(Axis::linear(f64::NAN, 0.0, 1.0, 4).high(), 1.0);
        let point = Axis::logarithmic(5.0, 5.0, 0.0, 100.0);
        assert!((point.at(5.0) - 50.0).abs() < 1e-9);
    }

    #[test]
    fn numbers_are_written_for_people() {
        assert_eq!(plain(1234567.0), "1,234,567");
        assert_eq!(plain(-1234.56), "-1,235");
        assert_eq!(plain(123.456), "123.5");
        assert_eq!(plain(1.5), "1.50");
        assert_eq!(plain(0.0123), "0.0123");
        assert_eq!(plain(0.5), "0.500");
        assert_eq!(plain(0.0), "0");
        assert_eq!(short(1500.0), "1.5k");
        assert_eq!(short(20.0), "20");
        assert_eq!(time(0.25), "250 µs");
        assert_eq!(time(0.9999), "1 ms");
        assert_eq!(time(12.345), "12.3 ms");
        assert_eq!(time(90_000.0), "90 s");
        assert_eq!(time(0.0), "0 ms");
        assert_eq!(percent(0.0125), "1.25 %");
        assert_eq!(coordinate(-0.01), "0");
        assert_eq!(coordinate(12.34), "12.3");
    }

    proptest! {
        #[test]
        fn marks_lie_on_the_axis_and_rise(low in 1e-6..1e6f64, ratio in 1.0..1e9f64, most in 2usize..12) {
            for axis in [Axis::logarithmic(low, low * ratio, 0.0, 1.0), Axis::linear(low, 0.0, 1.0, most)] {
                let marks = axis.marks(most);
                prop_assert!((1..=most).contains(&marks.len()), "{axis:?} {marks:?}");
                prop_assert!(marks.is_sorted_by(|a, b| a < b));
                let slack = axis.high() * 1e-9;
                let range = axis.low - slack..=axis.high() + slack;
                prop_assert!(marks.iter().all(|mark| range.contains(mark)));
            }
        }

        #[test]
        fn cuts_are_evenly_spaced_on_paper(low in 1e-3..1e3f64, ratio in 1.2..1e6f64, parts in 1usize..60) {
            let axis = Axis::logarithmic(low, low * ratio, 0.0, 100.0);
            for (index, cut) in axis.cuts(parts).into_iter().enumerate() {
                let wanted = 100.0 * index as f64 / parts as f64;
                prop_assert!((axis.at(cut) - wanted).abs() < 1e-6);
            }
        }
    }
}
