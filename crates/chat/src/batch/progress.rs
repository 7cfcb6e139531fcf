//! Progress on standard error: a bar on a terminal, otherwise a line from time to time.

use std::io::IsTerminal;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use forebay_batches::InputCounts;
use indicatif::{ProgressBar, ProgressStyle};

/// The interval at which the progress line is redrawn.
pub(super) const REDRAW: Duration = Duration::from_millis(250);
/// The interval of progress lines when standard error is not a terminal.
const LINES: Duration = Duration::from_secs(10);

/// The counts of a run.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Tally {
    /// Requests that were processed in this run.
    pub(super) answered: u64,
    /// Errors among the responses in the output file, including those of earlier runs.
    pub(super) errors: u64,
}

pub(super) struct Progress {
    /// `None`: standard error is not a terminal.
    bar: Option<ProgressBar>,
    size: Option<u64>,
    last: Instant,
}

impl Progress {
    /// Creates the display of progress through a file of `size` bytes; `None`: the size is unknown.
    pub(super) fn new(size: Option<u64>) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| match size {
            Some(size) => ProgressBar::new(size),
            None => ProgressBar::no_length(),
        });
        if let Some(bar) = &bar {
            let template =
                if size.is_some() { "{bar:40} {percent} %  {msg}" } else { "{spinner} {msg}" };
            bar.set_style(
                ProgressStyle::with_template(template)
                    .unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
        }
        Self { bar, size, last: Instant::now() }
    }

    /// Shows the counts, if an update is due.
    pub(super) fn show(&mut self, counts: &InputCounts, tally: Tally, running: usize) {
        let bytes = counts.bytes.load(Ordering::Relaxed);
        let text = line(tally, counts.before.load(Ordering::Relaxed), running);
        if let Some(bar) = &self.bar {
            bar.set_position(bytes);
            bar.set_message(text);
            bar.tick();
        } else if self.last.elapsed() >= LINES {
            self.last = Instant::now();
            let percent = self.size.map(|size| format!("{} % read, ", 100 * bytes / size.max(1)));
            eprintln!("{}{text}", percent.unwrap_or_default());
        }
    }

    /// Removes the bar.
    pub(super) fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn line(tally: Tally, before: u64, running: usize) -> String {
    let Tally { answered, errors } = tally;
    format!("{answered} answered, {before} before, {running} running, {errors} errors")
}
