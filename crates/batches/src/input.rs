//! Reads the requests of a file that have no answer yet.

use std::fs::File;
use std::io::{BufRead, BufReader, Result as IoResult, stdin};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use anyhow::{Context, Result};
use tokio::sync::mpsc::{Receiver, Sender, channel};

use crate::line::{BatchLine, LineFault};
use crate::lines::Lines;
use crate::names::{BatchNames, LineIdentity, SeenBefore};

/// The path that means standard input.
const STDIN: &str = "-";

/// Counters of the input that was read so far.
#[derive(Debug, Default)]
pub struct InputCounts {
    /// The number of bytes that were read.
    pub bytes: AtomicU64,
    /// The number of requests that were answered by an earlier run.
    pub before: AtomicU64,
}

/// A file of requests. A separate thread reads one line ahead.
#[derive(Debug)]
pub struct BatchInput {
    lines: Receiver<IoResult<BatchLine>>,
    /// The counters of the input that was read so far.
    pub counts: Arc<InputCounts>,
    /// The size of the file in bytes; `None`: unknown.
    pub size: Option<u64>,
}

impl BatchInput {
    /// Opens the file, or standard input. Requests with an answer in `names` are skipped. Lines of
    /// more than `longest` bytes are not read.
    ///
    /// # Errors
    /// The file can't be read.
    pub fn open(path: &Path, names: BatchNames, longest: usize) -> Result<Self> {
        let (reader, size): (Box<dyn BufRead + Send>, _) = if path == Path::new(STDIN) {
            (Box::new(BufReader::new(stdin())), None)
        } else {
            let file = File::open(path).with_context(|| path.display().to_string())?;
            let facts = file.metadata()?;
            (Box::new(BufReader::new(file)), facts.is_file().then_some(facts.len()))
        };
        let (sender, lines) = channel(1);
        let counts = Arc::<InputCounts>::default();
        let reading = Reading { names, counts: Arc::clone(&counts), sender };
        thread::Builder::new()
            .name("batch-input".into())
            .spawn(move || reading.read(Lines::new(reader, longest)))?;
        Ok(Self { lines, counts, size })
    }

    /// Returns the next line that needs an answer; `None` at the end.
    pub async fn next(&mut self) -> Option<IoResult<BatchLine>> {
        self.lines.recv().await
    }
}

struct Reading {
    names: BatchNames,
    counts: Arc<InputCounts>,
    sender: Sender<IoResult<BatchLine>>,
}

impl Reading {
    fn read<R: BufRead>(mut self, mut lines: Lines<R>) {
        loop {
            let line = match lines.next() {
                Ok(Some(text)) => {
                    self.counts.bytes.fetch_add(text.length, Ordering::Relaxed);
                    BatchLine::parse(&text)
                }
                Ok(None) => return,
                Err(error) => {
                    // The receiver may have been dropped.
                    let _ = self.sender.blocking_send(Err(error));
                    return;
                }
            };
            let Some(line) = line.and_then(|line| self.unanswered(line)) else { continue };
            if self.sender.blocking_send(Ok(line)).is_err() {
                return;
            }
        }
    }

    /// Returns the line if it needs an answer; `None`: it has an answer.
    fn unanswered(&mut self, mut line: BatchLine) -> Option<BatchLine> {
        let mut answered = false;
        if let Some(name) = &line.name {
            match self.names.add_request(name) {
                SeenBefore::Nothing => {}
                SeenBefore::Answer => answered = true,
                SeenBefore::Request => line.request = Err(LineFault::repeated(name)),
            }
        }
        if line.request.is_err() {
            answered |= self.names.has_answer(LineIdentity::Line(line.number));
        }
        if answered {
            self.counts.before.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unanswered(
        text: &str,
        names: BatchNames,
    ) -> Vec<(u64, Option<String>, Option<&'static str>)> {
        let (sender, mut lines) = channel(16);
        let counts = Arc::<InputCounts>::default();
        let reading = Reading { names, counts: Arc::clone(&counts), sender };
        reading.read(Lines::new(text.as_bytes(), 100));
        assert_eq!(counts.bytes.load(Ordering::Relaxed), text.len() as u64);
        let mut found = Vec::new();
        while let Ok(line) = lines.try_recv() {
            let BatchLine { number, name, request } = line.unwrap();
            found.push((number, name, request.err().map(|fault| fault.code)));
        }
        found
    }

    #[test]
    fn each_line_is_answered_once() {
        let line = |name: &str| {
            format!("{{\"custom_id\":\"{name}\",\"url\":\"/v1/completions\",\"body\":{{}}}}\n")
        };
        let text = format!("{}\n{}{}x\n{}", line("a"), line("b"), line("a"), "y".repeat(101));
        let named = |number, name: &str, fault| (number, Some(name.to_owned()), fault);
        let second = named(4, "a", Some("duplicate_custom_id"));
        let (invalid, long) = (Some("invalid_json_line"), Some("line_too_long"));
        assert_eq!(
            unanswered(&text, BatchNames::default()),
            [
                named(1, "a", None),
                named(3, "b", None),
                second.clone(),
                (5, None, invalid),
                (6, None, long)
            ]
        );
        // The process was killed after it had written the error of the second `a`, but before it
        // wrote the answer of the first.
        let mut names = BatchNames::default();
        names.add_answer(LineIdentity::Line(4));
        names.add_answer(LineIdentity::Line(5));
        names.add_answer(LineIdentity::Name("b"));
        assert_eq!(unanswered(&text, names), [named(1, "a", None), (6, None, long)]);
        // The process was killed after it had written the answer of the first `a`, but before it
        // wrote the error of the second.
        let mut names = BatchNames::default();
        names.add_answer(LineIdentity::Name("a"));
        let rest = [named(3, "b", None), second, (5, None, invalid), (6, None, long)];
        assert_eq!(unanswered(&text, names), rest);
    }
}
