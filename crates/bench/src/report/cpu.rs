//! Bars of CPU time: each process of the server, and the load generator.

use maud::{Markup, html};

use super::Run;
use super::axis::{Axis, coordinate, plain, short};
use super::chart::{self, RIGHT};
use super::run::Process;

/// Processes with less than this share of their run's CPU time are combined.
const SMALL: f64 = 0.01;
const LEFT: f64 = 8.0;
const GROUP: f64 = 26.0;
const ROW: f64 = 36.0;
/// The largest number of characters of a name. Longer names are cut; the tooltip shows the full
/// name.
const LONGEST_NAME: usize = 32;

/// The chart of the runs whose CPU time is known; `None`: there are no such runs.
pub(super) fn figure(runs: &[Run]) -> Option<Markup> {
    let shown: Vec<(usize, &Run, Vec<Process>)> = runs
        .iter()
        .enumerate()
        .map(|(index, run)| (index, run, processes(run)))
        .filter(|(.., processes)| !processes.is_empty())
        .collect();
    if shown.is_empty() {
        return None;
    }
    // Runs of different lengths can only be compared per token.
    let per_token = shown.iter().all(|(_, run, _)| run.positive("total_output_tokens").is_some());
    let scale = |run: &Run| match run.positive("total_output_tokens") {
        Some(tokens) if per_token => 1e6 / tokens,
        _ => 1.0,
    };
    let unit = if per_token { "µs" } else { "s" };
    let longest = shown
        .iter()
        .flat_map(|(_, run, processes)| {
            processes.iter().map(|process| process.seconds() * scale(run))
        })
        .fold(0.0, f64::max);
    let mut groups = Vec::new();
    let mut bottom = 6.0;
    for (index, run, processes) in &shown {
        let name = bottom;
        bottom += GROUP;
        let bars: Vec<(f64, &Process)> = processes
            .iter()
            .enumerate()
            .map(|(row, process)| (bottom + ROW * row as f64, process))
            .collect();
        bottom += ROW * bars.len() as f64;
        groups.push((*index, *run, name, bars));
    }
    let x = Axis::linear(longest, LEFT, RIGHT, 5);
    let content = html! {
        @for mark in x.marks(6) {
            @let at = coordinate(x.at(mark));
            line class="grid" x1=(at) x2=(at) y1="0" y2=(coordinate(bottom)) {}
            text class=(if mark == 0.0 { "start" } else if mark >= x.high() { "end" } else { "middle" })
                x=(at) y=(coordinate(bottom + 18.0)) { (short(mark)) " " (unit) }
        }
        @for (index, run, y, bars) in &groups {
            text class={ "group " (chart::style(*index)) } x=(coordinate(LEFT)) y=(coordinate(y + 17.0)) {
                (chart::letter(*index)) " " (cut(run.label()))
            }
            @for (y, process) in bars {
                (bar(*index, process, scale(run), &tells(run, process), &x, *y))
            }
        }
    };
    let caption = match per_token {
        true => ("CPU time per output token", "µs; paler: in the kernel"),
        false => ("CPU time", "s; paler: in the kernel"),
    };
    Some(chart::figure(caption, &html! {}, bottom + 26.0, &summary(&shown), &content))
}

fn bar(index: usize, process: &Process, scale: f64, tells: &str, x: &Axis, y: f64) -> Markup {
    let (user, all) = (x.at(process.user * scale), x.at(process.seconds() * scale));
    html! {
        g {
            title { (process.name) ": " (tells) }
            text class="start" x=(coordinate(LEFT)) y=(coordinate(y + 12.0)) { (cut(&process.name)) " – " (tells) }
            rect class={ "bar kernel " (chart::style(index)) } x=(coordinate(LEFT)) y=(coordinate(y + 17.0))
                width=(coordinate(all - LEFT)) height="11" {}
            rect class={ "bar " (chart::style(index)) } x=(coordinate(LEFT)) y=(coordinate(y + 17.0))
                width=(coordinate(user - LEFT)) height="11" {}
        }
    }
}

/// The tooltip of a process: CPU seconds, average number of cores, and time per token.
fn tells(run: &Run, process: &Process) -> String {
    let seconds = process.seconds();
    let mut text = format!("{} s", plain(seconds));
    if let Some(duration) = run.positive("duration") {
        text.push_str(&format!(", {} cores", plain(seconds / duration)));
    }
    if let Some(tokens) = run.positive("total_output_tokens") {
        text.push_str(&format!(", {} µs/token", plain(seconds * 1e6 / tokens)));
    }
    text
}

/// The processes of a run: the server's, with the small ones combined, and then the load generator.
fn processes(run: &Run) -> Vec<Process> {
    let mut kept = joined(run.server_processes());
    kept.extend(run.client_process());
    kept
}

/// Returns the processes, largest first, with all small ones combined.
fn joined(mut processes: Vec<Process>) -> Vec<Process> {
    let all: f64 = processes.iter().map(Process::seconds).sum();
    let few = processes.partition_point(|process| process.seconds() >= all * SMALL);
    if processes.len() - few > 1 {
        let small = processes.split_off(few);
        processes.push(Process {
            name: format!("{} small processes", small.len()),
            user: small.iter().map(|process| process.user).sum(),
            system: small.iter().map(|process| process.system).sum(),
        });
    }
    processes
}

fn cut(name: &str) -> String {
    if name.chars().count() <= LONGEST_NAME {
        return name.to_owned();
    }
    name.chars().take(LONGEST_NAME - 1).chain(['…']).collect()
}

fn summary(shown: &[(usize, &Run, Vec<Process>)]) -> String {
    let runs: Vec<String> = shown
        .iter()
        .map(|(index, run, processes)| {
            let parts: Vec<String> = processes
                .iter()
                .map(|process| format!("{} {}", process.name, tells(run, process)))
                .collect();
            format!("{} {}: {}", chart::letter(*index), run.label(), parts.join("; "))
        })
        .collect();
    format!("CPU time of each process. {}.", runs.join(". "))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn process(name: &str, user: f64) -> Process {
        Process { name: name.to_owned(), user, system: 0.0 }
    }

    #[test]
    fn small_processes_become_one() {
        let names = |processes: Vec<Process>| -> Vec<String> {
            joined(processes).into_iter().map(|process| process.name).collect()
        };
        assert_eq!(
            names(vec![process("a", 99.0), process("b", 0.2), process("c", 0.1)]),
            ["a", "2 small processes"]
        );
        assert_eq!(names(vec![process("a", 99.0), process("b", 0.2)]), ["a", "b"]);
        assert_eq!(names(vec![process("a", 0.0), process("b", 0.0)]), ["a", "b"]);
        assert!(joined(Vec::new()).is_empty());
    }

    #[test]
    fn bars_are_per_token_where_tokens_are_known() {
        let mut value =
            json!({"client_cpu_seconds": 2, "duration": 4, "total_output_tokens": 1000});
        let page = figure(&[Run::new("x", value.clone())]).unwrap().into_string();
        assert!(page.contains("load generator – 2 s, 0.500 cores, 2,000 µs/token"), "{page}");
        value["total_output_tokens"] = json!(0);
        let page = figure(&[Run::new("x", value)]).unwrap().into_string();
        assert!(page.contains("s; paler"), "{page}");
        assert!(figure(&[Run::new("x", json!({}))]).is_none());
    }

    #[test]
    fn the_kernel_is_shown_beside_the_user() {
        let value = json!({"server_cpu": [{"pid": 1, "name": "n".repeat(50), "user_seconds": 1, "system_seconds": 3}]});
        let page = figure(&[Run::new("x", value)]).unwrap().into_string();
        // The axis ends at four seconds, so one second is a quarter of it.
        assert!(page.contains("width=\"496\""), "{page}");
        assert!(page.contains("width=\"124\""), "{page}");
        assert!(page.contains("…") && page.contains(&"n".repeat(50)));
    }
}
