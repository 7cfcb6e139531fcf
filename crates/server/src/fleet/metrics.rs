//! Merges the metrics of several models into one exposition.

use std::collections::HashSet;
use std::fmt::Write;

/// The lines of one metric.
#[derive(Debug, Default)]
struct Family {
    name: String,
    head: Vec<String>,
    samples: Vec<String>,
}

/// Merges the Prometheus expositions of several models, each with its model's label. The text
/// format requires all samples of a metric to be adjacent.
pub(crate) fn join(texts: &[String]) -> String {
    let mut families: Vec<Family> = Vec::new();
    // Process-wide metrics have no model label, and are the same in all expositions.
    let mut seen: HashSet<&str> = HashSet::new();
    for text in texts {
        let mut at = None;
        for line in text.lines().filter(|line| !line.is_empty()) {
            let mut words = line.split(' ');
            if words.next() == Some("#") {
                let name = words.nth(1).unwrap_or_default();
                let place = families.iter().position(|family| family.name == name);
                let place = place.unwrap_or_else(|| {
                    families.push(Family { name: name.to_owned(), ..Family::default() });
                    families.len() - 1
                });
                at = Some(place);
                let head = &mut families[place].head;
                if !head.iter().any(|known| known == line) {
                    head.push(line.to_owned());
                }
                continue;
            }
            let series = line.rsplit_once(' ').map_or(line, |(series, _)| series);
            if let Some(place) = at
                && seen.insert(series)
            {
                families[place].samples.push(line.to_owned());
            }
        }
    }
    let mut joined = String::new();
    for line in families.iter().flat_map(|family| family.head.iter().chain(&family.samples)) {
        joined.push_str(line);
        joined.push('\n');
    }
    joined
}

/// One sample of a metric.
pub(crate) struct Sample<'a> {
    pub(crate) model: &'a str,
    /// An additional label: its name and value.
    pub(crate) label: Option<(&'a str, &'a str)>,
    pub(crate) value: f64,
}

/// Formats a metric of the fleet with one sample per model.
pub(crate) fn metric(name: &str, help: &str, kind: &str, samples: &[Sample<'_>]) -> String {
    let mut text = format!("# HELP {name} {help}\n# TYPE {name} {kind}\n");
    for Sample { model, label, value } in samples {
        let model = model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let label = label.map_or_else(String::new, |(name, value)| format!(",{name}=\"{value}\""));
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name}{{model_name=\"{model}\"{label}}} {value}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_comes_once_with_the_samples_of_all() {
        let text = |model: &str| {
            format!(
                "# HELP a of a\n# TYPE a counter\na{{model_name=\"{model}\"}} 1\n# HELP b of b\n# TYPE b histogram\n\
                 b_bucket{{model_name=\"{model}\",le=\"1\"}} 2\nb_sum{{model_name=\"{model}\"}} 3\n# HELP p of p\n# TYPE p gauge\np 4\n"
            )
        };
        let joined = join(&[text("x"), text("y")]);
        let expected = "# HELP a of a\n# TYPE a counter\na{model_name=\"x\"} 1\na{model_name=\"y\"} 1\n# HELP b of b\n\
            # TYPE b histogram\nb_bucket{model_name=\"x\",le=\"1\"} 2\nb_sum{model_name=\"x\"} 3\n\
            b_bucket{model_name=\"y\",le=\"1\"} 2\nb_sum{model_name=\"y\"} 3\n# HELP p of p\n# TYPE p gauge\np 4\n";
        assert_eq!(joined, expected);
    }

    #[test]
    fn names_are_escaped() {
        let sample = Sample { model: "a\"b", label: Some(("state", "ready")), value: 1.0 };
        let text = metric("m", "h", "gauge", &[sample]);
        assert!(text.ends_with("m{model_name=\"a\\\"b\",state=\"ready\"} 1\n"), "{text}");
    }
}
