//! The page: runs, warnings, the comparison, charts, and errors.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::Run;
use super::axis::{percent, plain};
use super::care::cautions;
use super::metrics::{self, Better, LATENCIES, SAME, Verdict, ratio};
use super::{chart, cpu, distribution, timeline};

/// The largest number of errors that are listed for a run, the most frequent first.
const MOST_ERRORS: usize = 20;

const SETTINGS: [(&str, &str); 17] = [
    ("model", "Model"),
    ("backend", "Backend"),
    ("base_url", "Server"),
    ("dataset_name", "Dataset"),
    ("random_input_len", "Random input length"),
    ("random_output_len", "Random output length"),
    ("random_range_ratio", "Random range ratio"),
    ("num_prompts", "Prompts"),
    ("request_rate", "Request rate (req/s)"),
    ("burstiness", "Burstiness"),
    ("max_concurrency", "Max concurrency"),
    ("goodput_slos", "Goodput limits (ms)"),
    ("late_threshold_ms", "Late when sent after (ms)"),
    ("seed", "Seed"),
    ("forebay_version", "Forebay's version"),
    ("date", "Date"),
    ("source", "File"),
];

/// The metrics that most readers look for.
const HEADLINES: [(&str, &str, Better); 6] = [
    ("output_throughput", "Output tokens/s", Better::Higher),
    ("request_throughput", "Requests/s", Better::Higher),
    ("median_ttft_ms", "Median TTFT (ms)", Better::Lower),
    ("p99_ttft_ms", "P99 TTFT (ms)", Better::Lower),
    ("median_tpot_ms", "Median TPOT (ms)", Better::Lower),
    ("p99_itl_ms", "P99 ITL (ms)", Better::Lower),
];

/// Returns the whole page, as HTML.
pub(super) fn page(title: &str, runs: &[Run]) -> String {
    let content = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                // No content of a result file can make the page load or run anything.
                meta http-equiv="Content-Security-Policy"
                    content="default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'";
                link rel="icon" href="data:,";
                title { (title) }
                style { (PreEscaped(include_str!("style.css"))) }
            }
            body {
                header { h1 { (title) } (introduction(runs)) }
                main {
                    (care(runs))
                    (headlines(runs))
                    (section("settings", "What was run", &settings(runs)))
                    (section("comparison", if runs.len() > 1 { "Comparison" } else { "Results" }, &comparison(runs)))
                    (section("distributions", "Latencies", &distributions(runs)))
                    (section("timelines", "Over time", &charts(timeline::figures(runs))))
                    (section("cpu", "CPU time", &charts(cpu::figure(runs).into_iter().collect())))
                    (section("errors", "Errors", &errors(runs)))
                }
                footer { (words()) }
            }
        }
    };
    content.into_string()
}

/// A section, which is omitted if its content is empty.
fn section(id: &str, heading: &str, content: &Markup) -> Markup {
    html! {
        @if !content.0.is_empty() {
            section id=(id) { h2 { (heading) } (content) }
        }
    }
}

fn introduction(runs: &[Run]) -> Markup {
    html! {
        ul class="runs" {
            @for (index, run) in runs.iter().enumerate() {
                li {
                    (chart::swatch(index)) b { (chart::letter(index)) } " " span class="label" { (run.label()) }
                    " " span class="note" { (said_of(run)) }
                }
            }
        }
    }
}

/// Describes a run in one line: model, backend, load.
fn said_of(run: &Run) -> String {
    let most =
        run.positive("max_concurrency").map(|most| format!("at most {} at once", plain(most)));
    let rate = match (run.number("request_rate"), run.setting("request_rate")) {
        (Some(rate), _) => Some(format!("{} requests/s", plain(rate))),
        (None, Some(rate)) if rate != "inf" => Some(format!("requests as of {rate}")),
        (None, Some(_)) if most.is_none() => Some("all at once".to_owned()),
        _ => None,
    };
    let prompts = run.positive("num_prompts").or(run.positive("completed"));
    let parts = [
        run.setting("model"),
        run.setting("backend"),
        run.setting("dataset_name"),
        prompts.map(|prompts| format!("{} prompts", plain(prompts))),
        rate,
        most,
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(" · ")
}

fn care(runs: &[Run]) -> Markup {
    let cautions = cautions(runs);
    html! {
        @if !cautions.is_empty() {
            section id="care" role="note" aria-labelledby="care-heading" {
                h2 id="care-heading" { "⚠ Read with care" }
                ul { @for caution in &cautions { li { (caution) } } }
            }
        }
    }
}

fn headlines(runs: &[Run]) -> Markup {
    let known = |key: &str| runs.iter().any(|run| run.number(key).is_some());
    html! {
        div class="tiles" {
            @for (key, name, better) in HEADLINES.into_iter().filter(|(key, ..)| known(key)) {
                @let highest = runs.iter().filter_map(|run| run.number(key)).fold(0.0, f64::max);
                div class="tile" {
                    h3 { (name) }
                    @for (index, run) in runs.iter().enumerate() {
                        @if let Some(value) = run.number(key) {
                            div class="row" {
                                @if runs.len() > 1 { b { (chart::letter(index)) } }
                                span class="value" { (plain(value)) }
                                @if index > 0 { (verdict(ratio(runs[0].number(key), Some(value)), better)) }
                                @if runs.len() > 1 && highest > 0.0 {
                                    div class="track" aria-hidden="true" {
                                        div class={ "fill " (chart::style(index)) }
                                            style={ "width:" (format!("{:.1}", value.max(0.0) / highest * 100.0)) "%" } {}
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// A table cell with the ratio to the first run and the verdict; empty if there is no ratio.
fn verdict(ratio: Option<f64>, better: Better) -> Markup {
    let (class, text) = match ratio {
        Some(ratio) => {
            let verdict = Verdict::of(ratio, better);
            (verdict.class(), format!("{ratio:.2}× {}", verdict.mark()))
        }
        None => ("same", String::new()),
    };
    html! { span class={ "ratio " (class) } { (text.trim_end()) } }
}

/// The head row of a table with a column for each run.
fn head(first: &str, runs: &[Run]) -> Markup {
    html! {
        thead {
            tr {
                th scope="col" { (first) }
                @for (index, run) in runs.iter().enumerate() {
                    th scope="col" { (chart::swatch(index)) (chart::letter(index)) br; span class="label" { (run.label()) } }
                }
            }
        }
    }
}

/// A table that scrolls sideways, which also works with the keyboard.
fn table(name: &str, content: &Markup) -> Markup {
    html! { div class="scroll" role="region" tabindex="0" aria-label=(name) { table { (content) } } }
}

fn settings(runs: &[Run]) -> Markup {
    let of = |run: &Run, key: &str| match key {
        "source" => Some(run.source().to_owned()),
        _ => run.setting(key),
    };
    table(
        "What was run",
        &html! {
            (head("Setting", runs))
            tbody {
                @for (key, name) in SETTINGS {
                    @let values: Vec<Option<String>> = runs.iter().map(|run| of(run, key)).collect();
                    @if values.iter().any(Option::is_some) {
                        tr {
                            th scope="row" { (name) }
                            @if values.len() > 1 && values.iter().all(|value| *value == values[0]) {
                                td class="text" colspan=(values.len()) { (values[0].as_deref().unwrap_or("–")) " " span class="note" { "(all)" } }
                            } @else {
                                @for value in &values { td class="text" { (value.as_deref().unwrap_or("–")) } }
                            }
                        }
                    }
                }
            }
        },
    )
}

fn comparison(runs: &[Run]) -> Markup {
    let groups = metrics::groups(runs);
    let rows = html! {
        (head("Metric", runs))
        @for group in &groups {
            tbody {
                tr class="heading" { th scope="rowgroup" colspan=(runs.len() + 1) { span { (group.name) } } }
                @for row in &group.rows {
                    @let first = runs[0].number(&row.key);
                    tr {
                        th scope="row" { (row.name) }
                        @for (index, run) in runs.iter().enumerate() {
                            @let value = run.number(&row.key);
                            td {
                                @match value {
                                    Some(value) => span class="value" title=(value) { (plain(value)) },
                                    None => "–",
                                }
                                @if index > 0 { (verdict(ratio(first, value), row.better)) }
                            }
                        }
                    }
                }
            }
        }
    };
    html! {
        (table("Results of all runs", &rows))
        @if runs.len() > 1 {
            p class="note" {
                "Ratios are to run A. Better (▲) and worse (▼) are said where one direction is better; a difference of at most "
                (percent(SAME)) " is called the same."
            }
        }
    }
}

fn distributions(runs: &[Run]) -> Markup {
    charts(
        LATENCIES.into_iter().filter_map(|latency| distribution::figure(latency, runs)).collect(),
    )
}

fn charts(figures: Vec<Markup>) -> Markup {
    html! {
        @if !figures.is_empty() {
            div class="charts" { @for figure in figures { (figure) } }
        }
    }
}

fn errors(runs: &[Run]) -> Markup {
    let errors: Vec<(usize, Vec<(String, u64)>)> =
        runs.iter().map(Run::errors).enumerate().filter(|(_, errors)| !errors.is_empty()).collect();
    if errors.is_empty() {
        return html! {};
    }
    let rows = html! {
        thead { tr { th scope="col" { "Run" } th scope="col" { "Requests" } th scope="col" { "Error" } } }
        tbody {
            @for (index, errors) in &errors {
                @for (text, count) in errors.iter().take(MOST_ERRORS) {
                    tr {
                        th scope="row" { (chart::letter(*index)) }
                        td { (plain(*count as f64)) }
                        td class="text" { (text) }
                    }
                }
                @if errors.len() > MOST_ERRORS {
                    tr {
                        th scope="row" { (chart::letter(*index)) }
                        td { (plain(errors[MOST_ERRORS..].iter().map(|(_, count)| *count as f64).sum())) }
                        td class="text" { "in " (errors.len() - MOST_ERRORS) " other kinds of error" }
                    }
                }
            }
        }
    };
    table("Errors", &rows)
}

fn words() -> Markup {
    html! {
        details {
            summary { "What the words mean" }
            dl {
                @for latency in LATENCIES { dt { (latency.name) } dd { (latency.meaning) } }
                dt { "Concurrency" } dd { "the sum of all end-to-end latencies divided by the duration." }
                dt { "Late sends" } dd { "requests that the load generator sent too long after it was to send them." }
                dt { "P90, P95, P99" } dd { "90, 95 and 99 of 100 values are at most this." }
            }
        }
        p class="note" { "Made by forebay bench report " (env!("CARGO_PKG_VERSION")) "." }
    }
}
