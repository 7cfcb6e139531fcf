//! The progress of downloads: bars on a terminal, and otherwise a line at intervals.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::error::size;

/// The time between lines if there is no terminal.
const EVERY: Duration = Duration::from_secs(5);

/// The progress of downloads on standard error.
#[derive(Debug)]
pub struct Progress {
    bars: Option<MultiProgress>,
    silent: bool,
    started: Instant,
    /// Milliseconds from `started` to the first file.
    began: AtomicU64,
    /// Milliseconds from `started` to the last line.
    said: AtomicU64,
    total: AtomicU64,
    /// The bytes of the total that are on the disk.
    here: AtomicU64,
    /// The bytes that came over the network.
    came: AtomicU64,
}

impl Progress {
    /// Bars if standard error is a terminal.
    #[must_use]
    pub fn new() -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bars = || MultiProgress::with_draw_target(ProgressDrawTarget::stderr_with_hz(10));
        Self { bars: terminal.then(bars), ..Self::silent_if(false) }
    }

    /// A progress that writes nothing.
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

    /// Writes a line above the bars.
    pub fn say(&self, line: &str) {
        match &self.bars {
            _ if self.silent => {}
            // A terminal that is gone has no reader.
            Some(bars) => drop(bars.println(line)),
            None => eprintln!("{line}"),
        }
    }

    /// Shows a file of `length` bytes, whose first `start` bytes are here.
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
            // Redraw at intervals, so that a silent server is visible.
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

    /// The speed of `bytes` since the first file.
    fn speed(&self, bytes: u64) -> String {
        let took = self.took().max(0.001);
        format!("{}/s", size((bytes as f64 / took) as u64))
    }

    /// Seconds since the first file.
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
        // Only one of the tasks logs it.
        if self.said.compare_exchange(last, millis, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            self.line();
        }
    }

    /// Reports the end, if anything was downloaded.
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

/// The progress of one file. Dropping it removes the bar.
#[derive(Debug)]
pub(crate) struct FileProgress<'a> {
    all: &'a Progress,
    bar: Option<ProgressBar>,
    length: u64,
    position: u64,
}

impl FileProgress<'_> {
    /// Notes `bytes` more bytes.
    pub(crate) fn add(&mut self, bytes: u64) {
        self.position += bytes;
        self.all.moved(bytes);
        if let Some(bar) = &self.bar {
            bar.set_position(self.position);
        }
    }

    /// Bytes that are still to come.
    pub(crate) fn left(&self) -> u64 {
        self.length.saturating_sub(self.position)
    }

    /// Starts the file again, because its bytes were not the announced ones.
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
        // An interrupted download does not show 100 %.
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

/// The end of a path that fits beside a bar.
fn short(name: &str) -> String {
    const ROOM: usize = 32;
    let skip = name.chars().count().saturating_sub(ROOM);
    name.chars().skip(skip).collect()
}
