//! The progress bar of a run.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::client::Live;

const REDRAW: Duration = Duration::from_millis(250);

/// A progress bar on stderr. A separate thread draws it until this is dropped.
pub(crate) struct Progress {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Progress {
    /// Starts drawing, if standard error is a terminal.
    pub(crate) fn start(live: Arc<Live>, total: u64) -> Self {
        let bar = ProgressBar::new(total);
        if bar.is_hidden() {
            return Self { stop: None, thread: None };
        }
        bar.set_style(style());
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || {
            let mut last = (Instant::now(), 0);
            while stopped.recv_timeout(REDRAW) == Err(RecvTimeoutError::Timeout) {
                let now = (Instant::now(), live.chunks.load(Ordering::Relaxed));
                let seconds = (now.0 - last.0).as_secs_f64();
                draw(&bar, &live, (now.1 - last.1) as f64 / seconds);
                last = now;
            }
            bar.finish_and_clear();
        });
        Self { stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // The panic hook has already printed the message.
            let _ = thread.join();
        }
    }
}

fn style() -> ProgressStyle {
    ProgressStyle::with_template("{wide_bar} {pos}/{len} [{elapsed_precise}<{eta_precise}] {msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
}

fn draw(bar: &ProgressBar, live: &Live, chunks_per_second: f64) {
    let load = |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed);
    let ended = load(&live.ended);
    let running = load(&live.sent).saturating_sub(ended);
    bar.set_position(ended);
    bar.set_message(format!(
        "{running} running, {chunks_per_second:.0} chunks/s, {} late",
        load(&live.late)
    ));
}
