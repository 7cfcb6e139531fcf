//! The streamed response of `/v1/chat/completions`.

use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::Deserialize;

/// The maximum length of a line of a stream in bytes.
const LONGEST: usize = 16 << 20;

/// A delta of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Piece {
    /// The model's reasoning before its answer.
    Reasoning(String),
    /// The text of the answer.
    Content(String),
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<Trouble>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    delta: Delta,
    finish_reason: Option<String>,
}

#[derive(Deserialize, Default)]
struct Delta {
    content: Option<String>,
    #[serde(alias = "reasoning")]
    reasoning_content: Option<String>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct Usage {
    completion_tokens: u32,
}

#[derive(Deserialize)]
struct Trouble {
    message: String,
}

/// Statistics of a finished answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct End {
    /// The number of tokens of the answer, if the server reports it.
    pub(crate) tokens: Option<u32>,
    /// The finish reason.
    pub(crate) reason: Option<String>,
    /// The time from the request to the first delta, and from the first to the last delta.
    pub(crate) first: Duration,
    pub(crate) rest: Duration,
}

impl End {
    /// Formats the statistics as one line.
    pub(crate) fn line(&self) -> String {
        let Some(tokens) = self.tokens else { return String::new() };
        let mut line = format!("{tokens} tokens");
        let seconds = self.rest.as_secs_f64();
        if tokens > 1 && seconds > 0.0 {
            line += &format!(" · {:.1} tokens/s", f64::from(tokens - 1) / seconds);
        }
        line += &format!(" · first after {} ms", self.first.as_millis());
        if self.reason.as_deref() == Some("length") {
            line += " · cut by its length";
        }
        line
    }
}

/// Reads the deltas of an answer as they arrive.
pub(crate) struct Answer {
    body: Incoming,
    lines: Lines,
    asked: Instant,
    first: Option<Instant>,
    last: Instant,
    end: End,
}

impl Answer {
    pub(crate) fn new(body: Incoming, asked: Instant) -> Self {
        let (lines, end) = (Lines::default(), End::default());
        Self { body, lines, asked, first: None, last: asked, end }
    }

    /// Returns the next deltas; `None` at the end.
    ///
    /// # Errors
    /// The server closes the connection early, or reports an error.
    pub(crate) async fn next(&mut self) -> Result<Option<Vec<Piece>>> {
        loop {
            let Some(frame) = self.body.frame().await else {
                bail!("the server broke off before the end of its answer");
            };
            let frame = frame.map_err(|error| anyhow!("the server broke off: {error}"))?;
            let Ok(data) = frame.into_data() else { continue };
            let mut pieces = Vec::new();
            let done = self.lines.take(&data, |line| self.end.read(line, &mut pieces))?;
            if !pieces.is_empty() {
                self.last = Instant::now();
                self.first.get_or_insert(self.last);
            }
            if done {
                // The last frame may contain deltas too.
                return Ok((!pieces.is_empty()).then_some(pieces));
            }
            if !pieces.is_empty() {
                return Ok(Some(pieces));
            }
        }
    }

    /// True after the end of the answer.
    pub(crate) fn is_over(&self) -> bool {
        self.lines.done
    }

    /// Returns the statistics of the answer.
    pub(crate) fn end(self) -> End {
        let first = self.first.unwrap_or(self.last);
        End {
            first: first.saturating_duration_since(self.asked),
            rest: self.last.saturating_duration_since(first),
            ..self.end
        }
    }
}

impl End {
    /// Parses the data of an event.
    fn read(&mut self, line: &[u8], pieces: &mut Vec<Piece>) -> Result<()> {
        let chunk: Chunk = serde_json::from_slice(line)
            .map_err(|error| anyhow!("the server sent an invalid chunk: {error}"))?;
        if let Some(Trouble { message }) = chunk.error {
            bail!("{message}");
        }
        if let Some(usage) = chunk.usage {
            self.tokens = Some(usage.completion_tokens);
        }
        for Choice { delta, finish_reason } in chunk.choices {
            let filled = |text: Option<String>| text.filter(|text| !text.is_empty());
            pieces.extend(filled(delta.reasoning_content).map(Piece::Reasoning));
            pieces.extend(filled(delta.content).map(Piece::Content));
            self.reason = finish_reason.or_else(|| self.reason.take());
        }
        Ok(())
    }
}

/// Splits the stream, which arrives in chunks of any size, into events.
#[derive(Default)]
struct Lines {
    rest: Vec<u8>,
    done: bool,
}

impl Lines {
    /// Passes the data of complete lines to `read`. Returns true once the stream is done.
    fn take(&mut self, data: &Bytes, mut read: impl FnMut(&[u8]) -> Result<()>) -> Result<bool> {
        self.rest.extend_from_slice(data);
        let mut from = 0;
        while let Some(length) = self.rest[from..].iter().position(|&byte| byte == b'\n') {
            let line = self.rest[from..from + length].trim_ascii();
            from += length + 1;
            match line.strip_prefix(b"data:").map(<[u8]>::trim_ascii) {
                Some(b"[DONE]") => self.done = true,
                Some(data) if !self.done => read(data)?,
                _ => {}
            }
        }
        self.rest.drain(..from);
        if self.rest.len() > LONGEST {
            bail!("the server sent a line of more than {LONGEST} bytes");
        }
        Ok(self.done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(parts: &[&[u8]]) -> Result<(Vec<Piece>, End, bool)> {
        let (mut lines, mut end, mut pieces) = (Lines::default(), End::default(), Vec::new());
        for part in parts {
            lines.take(&Bytes::copy_from_slice(part), |line| end.read(line, &mut pieces))?;
        }
        Ok((pieces, end, lines.done))
    }

    const STREAM: &str = concat!(
        ": a comment\r\n\r\n",
        "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n",
        "data: {\"choices\":[{\"delta\":{\"reasoning_content\":\"hm\"}}]}\n\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"Hé\"}}]}\n\n",
        "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"length\"}],\"usage\":null}\n\n",
        "data: {\"choices\":[],\"usage\":{\"completion_tokens\":7}}\n\ndata: [DONE]\n\n"
    );

    #[test]
    fn a_stream_says_the_same_wherever_it_is_cut() {
        let pieces = [Piece::Reasoning("hm".into()), Piece::Content("Hé".into())];
        for cut in 0..STREAM.len() {
            let (first, second) = STREAM.as_bytes().split_at(cut);
            let (found, end, done) = read(&[first, second]).unwrap();
            assert_eq!((found.as_slice(), done), (&pieces[..], true), "{cut}");
            assert_eq!((end.tokens, end.reason.as_deref()), (Some(7), Some("length")));
        }
    }

    #[test]
    fn an_error_in_the_stream_is_one() {
        let error = read(&[b"data: {\"error\":{\"message\":\"it died\"}}\n\n"]).unwrap_err();
        assert_eq!(error.to_string(), "it died");
        assert!(read(&[b"data: {]\n"]).is_err());
    }

    #[test]
    fn numbers_are_told_where_there_are_any() {
        let first = Duration::from_millis(40);
        let end = End { tokens: Some(11), first, rest: Duration::from_secs(2), reason: None };
        assert_eq!(end.line(), "11 tokens · 5.0 tokens/s · first after 40 ms");
        assert_eq!(End::default().line(), "");
        let alone = End { tokens: Some(1), first, ..End::default() };
        assert_eq!(alone.line(), "1 tokens · first after 40 ms");
    }
}
