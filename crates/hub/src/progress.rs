//! Displays the progress of downloads: bars on a terminal, otherwise lines at intervals.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::error::size;

/// The time between two lines if standard error is not a terminal.
const EVERY: Duration = Duration::from_secs(5);

/// The progress of downloads on standard error.
#[derive(Debug)]
pub struct Progress {
    bars: Option<MultiProgress>,
    silent: bool,
    started: Instant,
    /// Milliseconds from `started` to the start of the first file.
    began: AtomicU64,
    /// Milliseconds from `started` to the last line that was written.
    said: AtomicU64,
    total: AtomicU64,
    /// The number of bytes of the total that are on the disk.
    here: AtomicU64,
    /// The number of bytes that were downloaded.
    came: AtomicU64,
}

impl Progress {
    /// Creates a progress display, with bars if standard error is a terminal.
    #[must_use]
    pub fn new() -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bars = || MultiProgress::with_draw_target(ProgressDrawTarget::stderr_with_hz(10));
        Self { bars: terminal.then(bars), ..Self::silent_if(false) }
    }

    /// Creates a progress display that writes nothing.
    #[must_use]
    pub fn silent() -> Self {
        Self::silent_if(true)
    }

    fn silent_if(silent: bool) -> Self {
        Self {
            bars: None,
            silent,
            started: Instant::now(),
            began: AtomicU64::new(0),
            said: AtomicU64::new(0),
            total: AtomicU64::new(0),
            here: AtomicU64::new(0),
            came: AtomicU64::new(0),
        }
    }

    /// Writes a line, above the bars if there are any.
    pub fn say(&self, line: &str) {
        match &self.bars {
            _ if self.silent => {}
            // An error means that the terminal was closed, so nobody reads the line.
            Some(bars) => drop(bars.println(line)),
            None => eprintln!("{line}"),
        }
    }

    /// Adds a file of `length` bytes, of which the first `start` bytes are on the disk already.
    pub(crate) fn file(&self, name: &str, length: u64, start: u64) -> FileProgress<'_> {
        if self.total.fetch_add(length, Ordering::Relaxed) == 0 {
            let now = self.started.elapsed().as_millis() as u64;
            self.began.store(now, Ordering::Relaxed);
            self.said.store(now, Ordering::Relaxed);
        }
        self.here.fetch_add(start, Ordering::Relaxed);
        let bar = self.bars.as_ref().map(|bars| {
            let bar = bars.add(ProgressBar::new(length));
            bar.set_style(style());
            bar.set_message(short(name));
            bar.set_position(start);
            bar.reset_eta();
            // Redraw at intervals, so that a stalled server is visible.
            bar.enable_steady_tick(Duration::from_millis(250));
            bar
        });
        FileProgress { all: self, bar, length, position: start }
    }

    fn line(&self) {
        let (total, here) = (self.total.load(Ordering::Relaxed), self.here.load(Ordering::Relaxed));
        let percent = (here * 100).checked_div(total).unwrap_or(100);
        let speed = self.speed(self.came.load(Ordering::Relaxed));
        self.say(&format!("downloading: {percent}% of {}, {speed}", size(total)));
    }

    /// Returns the average speed for `bytes` bytes since the first file started.
    fn speed(&self, bytes: u64) -> String {
        let took = self.took().max(0.001);
        format!("{}/s", size((bytes as f64 / took) as u64))
    }

    /// Returns the seconds since the first file started.
    fn took(&self) -> f64 {
        let began = Duration::from_millis(self.began.load(Ordering::Relaxed));
        self.started.elapsed().saturating_sub(began).as_secs_f64()
    }

    fn moved(&self, bytes: u64) {
        self.here.fetch_add(bytes, Ordering::Relaxed);
        self.came.fetch_add(bytes, Ordering::Relaxed);
        let last = self.said.load(Ordering::Relaxed);
        let millis = self.started.elapsed().as_millis() as u64;
        if self.bars.is_some() || millis < last + EVERY.as_millis() as u64 {
            return;
        }
        // Only one of the concurrent tasks writes the line.
        if self.said.compare_exchange(last, millis, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            self.line();
        }
    }

    /// Reports the total, if anything was downloaded.
    pub(crate) fn finish(&self) {
        let total = self.total.swap(0, Ordering::Relaxed);
        self.here.store(0, Ordering::Relaxed);
        let came = self.came.swap(0, Ordering::Relaxed);
        if total == 0 {
            return;
        }
        let (took, speed) = (self.took(), self.speed(came));
        self.say(&format!("downloaded 100% of {} in {took:.1} s, {speed}", size(total)));
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self::new()
    }
}

/// The progress of one file. Dropping it removes the file's bar.
#[derive(Debug)]
pub(crate) struct FileProgress<'a> {
    all: &'a Progress,
    bar: Option<ProgressBar>,
    length: u64,
    position: u64,
}

impl FileProgress<'_> {
    /// Records that `bytes` more bytes were downloaded.
    pub(crate) fn add(&mut self, bytes: u64) {
        self.position += bytes;
        self.all.moved(bytes);
        if let Some(bar) = &self.bar {
            bar.set_position(self.position);
        }
    }

    /// The number of bytes that are still missing.
    pub(crate) fn left(&self) -> u64 {
        self.length.saturating_sub(self.position)
    }

    /// Resets the file's progress, because its bytes were not the announced ones.
    pub(crate) fn restart(&mut self) {
        self.all.here.fetch_sub(self.position, Ordering::Relaxed);
        self.position = 0;
        if let Some(bar) = &self.bar {
            bar.set_position(0);
        }
    }
}

impl Drop for FileProgress<'_> {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        // An interrupted download must not be displayed as complete.
        if self.position < self.length {
            self.all.total.fetch_sub(self.length, Ordering::Relaxed);
            self.all.here.fetch_sub(self.position, Ordering::Relaxed);
        }
    }
}

fn style() -> ProgressStyle {
    const LINE: &str = "{msg:32!} {wide_bar} {percent:>3}% of {decimal_total_bytes} {decimal_bytes_per_sec:>12} {eta:>4}";
    ProgressStyle::with_template(LINE).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// Returns the end of a path, short enough to fit beside a bar.
fn short(name: &str) -> String {
    const ROOM: usize = 32;
    let skip = name.chars().count().saturating_sub(ROOM);
    name.chars().skip(skip).collect()
}
