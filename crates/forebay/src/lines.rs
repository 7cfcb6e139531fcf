//! Writes log lines to stderr, which may have no reader.
//!
//! A pipe without a reader buffers 64 KiB. After that, every write blocks the calling thread. So a
//! separate thread writes the lines. Its queue is bounded: lines that do not fit are dropped and
//! counted. Once there is a reader again, the count is reported.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_server::Guard;
use tracing_subscriber::fmt::MakeWriter;

/// The largest total size of queued lines in bytes.
const MOST: usize = 4 << 20;
/// How long a process that exits waits until the last lines are written.
pub(crate) const LAST_LINES: Duration = Duration::from_secs(1);
/// How long a panic waits until its line is written, because it may be about to end the process.
const PANIC: Duration = Duration::from_millis(200);

enum Message {
    Line(Vec<u8>),
    /// Confirmed once all earlier messages are written.
    Flush(Sender<()>),
}

/// The queue of log lines, which never blocks. Clones share it.
#[derive(Clone)]
pub(crate) struct Lines {
    lane: Sender<Message>,
    waiting: Arc<AtomicUsize>,
    dropped: Arc<AtomicU64>,
    most: usize,
}

impl Lines {
    /// Starts the log thread under `guard`. It writes to `out`.
    pub(crate) fn start(
        out: impl Write + Send + 'static,
        guard: &Guard,
    ) -> io::Result<(Self, JoinHandle<()>)> {
        Self::with_most(MOST, out, guard)
    }

    fn with_most(
        most: usize,
        mut out: impl Write + Send + 'static,
        guard: &Guard,
    ) -> io::Result<(Self, JoinHandle<()>)> {
        let (lane, messages) = channel();
        let lines = Self { lane, waiting: Arc::default(), dropped: Arc::default(), most };
        let (waiting, dropped) = (Arc::clone(&lines.waiting), Arc::clone(&lines.dropped));
        let thread =
            guard.spawn("log", move || write_all(&messages, &mut out, &waiting, &dropped))?;
        Ok((lines, thread))
    }

    /// Queues a line, or drops it if the queue is full.
    pub(crate) fn push(&self, line: &[u8]) {
        let before = self.waiting.fetch_add(line.len(), Ordering::Relaxed);
        if before + line.len() > self.most || self.lane.send(Message::Line(line.to_vec())).is_err()
        {
            self.waiting.fetch_sub(line.len(), Ordering::Relaxed);
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Queues a line even if the queue is full.
    pub(crate) fn push_always(&self, line: &[u8]) {
        self.waiting.fetch_add(line.len(), Ordering::Relaxed);
        // A closed channel means that the log thread has ended; there is no other place to write
        // to.
        let _ = self.lane.send(Message::Line(line.to_vec()));
    }

    /// Waits until the queued lines are written, for at most `limit`. Returns true if they are.
    fn flush(&self, limit: Duration) -> bool {
        let (done, written) = channel();
        if self.lane.send(Message::Flush(done)).is_err() {
            return false;
        }
        // Success is either the confirmation or the end of the thread.
        written.recv_timeout(limit) != Err(RecvTimeoutError::Timeout)
    }

    /// The number of dropped lines.
    pub(crate) fn dropped(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.dropped)
    }

    /// Writes the queued lines, if a reader accepts them in time.
    pub(crate) fn finish(&self) {
        let until = Instant::now() + LAST_LINES;
        let dropped = self.dropped.load(Ordering::Relaxed);
        if self.flush(LAST_LINES) && dropped > 0 {
            self.push_always(format!("{dropped} log lines were dropped in all\n").as_bytes());
            self.flush(until.saturating_duration_since(Instant::now()));
        }
    }

    /// Writes panics through the queue: a panicking thread must not wait for a reader of the log.
    pub(crate) fn take_panics(&self) {
        let lines = self.clone();
        std::panic::set_hook(Box::new(move |panic| {
            let thread = std::thread::current();
            let name = thread.name().unwrap_or("unnamed");
            let trace = std::backtrace::Backtrace::capture();
            let trace = match trace.status() {
                std::backtrace::BacktraceStatus::Captured => format!("\n{trace}"),
                _ => String::new(),
            };
            lines.push_always(format!("thread '{name}': {panic}{trace}\n").as_bytes());
            // The process may be about to end, so wait until the line is written. The log thread
            // can't wait for itself.
            if name != "log" {
                lines.flush(PANIC);
            }
        }));
    }
}

/// The main loop of the log thread.
fn write_all(
    messages: &Receiver<Message>,
    out: &mut impl Write,
    waiting: &AtomicUsize,
    dropped: &AtomicU64,
) {
    let mut said = 0;
    for message in messages {
        match message {
            Message::Line(line) => {
                // There is nowhere to report that stderr is broken.
                let _ = out.write_all(&line);
                waiting.fetch_sub(line.len(), Ordering::Relaxed);
            }
            Message::Flush(done) => {
                let _ = out.flush();
                // The caller may no longer wait.
                let _ = done.send(());
            }
        }
        let now = dropped.load(Ordering::Relaxed);
        if now > said {
            let line =
                format!("{} log lines were dropped: they were not read in time\n", now - said);
            let _ = out.write_all(line.as_bytes());
            said = now;
        }
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Pen<'a>;

    fn make_writer(&'a self) -> Pen<'a> {
        Pen(self)
    }
}

/// Passes each line that `tracing` writes to the queue.
pub(crate) struct Pen<'a>(&'a Lines);

impl Write for Pen<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Condvar, Mutex};

    use super::*;

    /// A pipe whose writes block until it is opened.
    #[derive(Clone, Default)]
    struct Pipe(Arc<End>);

    #[derive(Default)]
    struct End {
        is_open: Mutex<bool>,
        opened: Condvar,
        taken: Mutex<Vec<u8>>,
    }

    impl Pipe {
        fn open(&self) {
            *self.0.is_open.lock().unwrap() = true;
            self.0.opened.notify_all();
        }
        fn text(&self) -> String {
            String::from_utf8(self.0.taken.lock().unwrap().clone()).unwrap()
        }
    }

    impl Write for Pipe {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let End { is_open, opened, taken } = &*self.0;
            drop(opened.wait_while(is_open.lock().unwrap(), |is_open| !*is_open).unwrap());
            taken.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn nobody_waits_for_a_reader_and_what_is_lost_is_said() {
        let pipe = Pipe::default();
        let (lines, _thread) = Lines::with_most(100, pipe.clone(), &Guard::default()).unwrap();
        for number in 0..1000 {
            lines.push(format!("line {number:04}\n").as_bytes());
        }
        // The queue has room for ten lines of ten bytes.
        assert_eq!(lines.dropped().load(Ordering::Relaxed), 990);
        assert!(!lines.flush(Duration::ZERO), "the pipe is not read");
        lines.push_always(b"a panic\n");
        pipe.open();
        lines.finish();
        let text = pipe.text();
        let said: Vec<&str> = text.lines().collect();
        assert_eq!((said[0], said.len()), ("line 0000", 13), "{text}");
        assert_eq!(said.iter().filter(|line| line.starts_with("line ")).count(), 10);
        assert!(said.contains(&"990 log lines were dropped: they were not read in time"), "{text}");
        assert!(said.contains(&"a panic"));
        assert_eq!(said[12], "990 log lines were dropped in all");
        // There is room in the queue again.
        lines.push(b"more\n");
        assert!(lines.flush(LAST_LINES));
        assert!(pipe.text().ends_with("more\n"));
    }

    #[test]
    fn a_pipe_that_panics_is_known_and_nobody_waits_for_it() {
        struct Broken;
        impl Write for Broken {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                panic!("broken");
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let guard = Guard::default();
        let (lines, thread) = Lines::start(Broken, &guard).unwrap();
        lines.push(b"a line\n");
        thread.join().unwrap();
        assert_eq!(guard.cause().as_deref(), Some("the thread log panicked: broken"));
        lines.push(b"another\n");
        lines.finish();
        assert_eq!(lines.dropped().load(Ordering::Relaxed), 1);
    }
}
