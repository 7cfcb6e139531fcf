//! The output file, which a later run can continue.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufReader, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::line::LineFault;
use crate::lines::Lines;
use crate::names::{BatchNames, LineIdentity};
use crate::{ANSWER, ENVELOPE};

/// The beginning of every line that this module writes.
const BEGINNING: &[u8] = b"{\"id\":\"batch_req_";

/// A line of the output file, in OpenAI's format.
#[derive(Debug, Serialize)]
pub struct BatchAnswer {
    id: String,
    custom_id: Option<String>,
    response: Option<Response>,
    error: Option<Error>,
}

#[derive(Debug, Serialize)]
struct Response {
    status_code: u16,
    request_id: Option<String>,
    body: Body,
}

/// The body of a response: JSON, or other text.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Body {
    Json(Box<RawValue>),
    Text(String),
}

#[derive(Debug, Serialize)]
struct Error {
    code: &'static str,
    message: String,
    param: Option<&'static str>,
    line: u64,
}

impl BatchAnswer {
    /// Creates the answer from a server's response to the request `name`.
    pub fn from_server(
        name: Option<String>,
        status_code: u16,
        request_id: Option<String>,
        body: Vec<u8>,
    ) -> Self {
        let id = format!("batch_req_{}", request_id.as_deref().unwrap_or("0"));
        let response = Response { status_code, request_id, body: Body::new(body) };
        Self { id, custom_id: name, response: Some(response), error: None }
    }

    /// Creates the answer to a line that is not sent to a server, with the reason.
    pub fn from_fault(number: u64, name: Option<String>, fault: LineFault) -> Self {
        let LineFault { code, message, param } = fault;
        let error = Error { code, message, param, line: number };
        Self {
            id: format!("batch_req_line_{number}"),
            custom_id: name,
            response: None,
            error: Some(error),
        }
    }

    /// Encodes the answer as a line, including the line break.
    ///
    /// # Errors
    /// The answer can't be written as JSON.
    pub fn to_line(&self) -> Result<Vec<u8>> {
        let mut line = serde_json::to_vec(self)?;
        line.push(b'\n');
        Ok(line)
    }

    /// True if the answer is an error.
    pub fn is_error(&self) -> bool {
        self.response.as_ref().is_none_or(|response| is_refusal(response.status_code))
    }
}

fn is_refusal(status: u16) -> bool {
    !(200..300).contains(&status)
}

impl Body {
    /// Creates a body as received. A multi-line JSON body is rewritten, because an answer has to be
    /// on one line.
    fn new(bytes: Vec<u8>) -> Self {
        let text = String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned());
        let text = match text.contains(['\n', '\r']) {
            true => match serde_json::from_str::<serde_json::Value>(&text) {
                Ok(value) => value.to_string(),
                Err(_) => return Self::Text(text),
            },
            false => text,
        };
        if serde_json::from_str::<&RawValue>(&text).is_err() {
            return Self::Text(text);
        }
        // `from_string` would lose the text if it failed, so the text was checked first.
        RawValue::from_string(text).map_or_else(|error| Self::Text(error.to_string()), Self::Json)
    }
}

/// The fields of an output line that a later run needs.
#[derive(Deserialize)]
struct StoredLine {
    #[serde(default)]
    custom_id: Option<String>,
    #[serde(default)]
    response: Option<StoredResponse>,
    #[serde(default)]
    error: Option<StoredError>,
}

#[derive(Deserialize)]
struct StoredResponse {
    status_code: u16,
}

#[derive(Deserialize)]
struct StoredError {
    #[serde(default)]
    line: Option<u64>,
}

impl StoredLine {
    fn identity(&self) -> Result<LineIdentity<'_>> {
        if self.response.is_none() && self.error.is_none() {
            bail!("it has neither `response` nor `error`");
        }
        match (self.error.as_ref().and_then(|error| error.line), &self.custom_id) {
            (Some(line), _) => Ok(LineIdentity::Line(line)),
            (None, Some(name)) => Ok(LineIdentity::Name(name)),
            (None, None) => bail!("it has no `custom_id`"),
        }
    }

    fn is_error(&self) -> bool {
        self.response.as_ref().is_none_or(|response| is_refusal(response.status_code))
    }
}

/// An open output file.
#[derive(Debug)]
pub struct BatchOutput {
    file: File,
}

/// The answers that an output file contains.
#[derive(Debug, Default)]
pub struct AnsweredLines {
    /// The requests that have an answer.
    pub names: BatchNames,
    /// The number of successful answers and errors.
    pub count: u64,
    /// The number of answers that are errors.
    pub errors: u64,
    /// The size of the file in bytes.
    pub bytes: u64,
}

impl BatchOutput {
    /// Opens the file. An incomplete last line, which a killed process has left, is removed.
    ///
    /// # Errors
    /// The file can't be written, another process writes to it, or a line is not an answer. The
    /// file is then unchanged.
    pub fn open(path: &Path) -> Result<(Self, AnsweredLines)> {
        Self::read(path).with_context(|| path.display().to_string())
    }

    fn read(path: &Path) -> Result<(Self, AnsweredLines)> {
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
        // Some file systems do not support locks.
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            bail!("another process writes to it");
        }
        let (mut answered, mut end, mut ended) = (AnsweredLines::default(), 0, true);
        let mut lines = Lines::new(BufReader::new(&file), ANSWER + ENVELOPE);
        while let Some(text) = lines.next()? {
            let bytes = text.bytes.context("a line is too long for an answer")?;
            if !bytes.trim_ascii().is_empty() {
                match answered.add(bytes) {
                    Ok(()) => {}
                    Err(_) if !text.ended && is_begun(bytes) => break,
                    Err(error) => {
                        let number = text.number;
                        return Err(error.context(format!("line {number} is no answer of a batch")));
                    }
                }
            }
            (end, ended) = (end + text.length, text.ended);
        }
        if file.metadata()?.len() > end {
            file.set_len(end)?;
        }
        if !ended {
            file.write_all(b"\n")?;
            end += 1;
        }
        answered.bytes = end;
        Ok((Self { file }, answered))
    }

    /// Appends an answer with a single write.
    ///
    /// # Errors
    /// The answer can't be written. If a part of the line was written, the next run removes it.
    pub fn write(&mut self, answer: &BatchAnswer) -> Result<()> {
        self.write_line(&answer.to_line()?)
    }

    /// Appends an answer that is already encoded as a line.
    ///
    /// # Errors
    /// The same as those of [`Self::write`].
    pub fn write_line(&mut self, line: &[u8]) -> Result<()> {
        self.file.write_all(line).context("the output")
    }
}

impl AnsweredLines {
    fn add(&mut self, line: &[u8]) -> Result<()> {
        let stored: StoredLine = serde_json::from_slice(line)?;
        self.names.add_answer(stored.identity()?);
        self.count += 1;
        self.errors += u64::from(stored.is_error());
        Ok(())
    }
}

/// True if `line` is the beginning of an answer. Incomplete lines of other programs are not
/// removed.
fn is_begun(line: &[u8]) -> bool {
    line.starts_with(BEGINNING) || BEGINNING.starts_with(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(name: &str, body: &str) -> BatchAnswer {
        BatchAnswer::from_server(Some(name.into()), 200, Some("x".into()), body.into())
    }

    fn written(answer: &BatchAnswer) -> String {
        String::from_utf8(serde_json::to_vec(answer).unwrap()).unwrap()
    }

    #[test]
    fn lines_have_openais_shape() {
        assert_eq!(
            written(&answer("a", r#"{"n": 1.0}"#)),
            r#"{"id":"batch_req_x","custom_id":"a","response":{"status_code":200,"request_id":"x","body":{"n": 1.0}},"error":null}"#
        );
        assert!(written(&answer("a", "{\n \"n\": 1\r\n}")).contains(r#""body":{"n":1}"#));
        assert!(written(&answer("a", "busy\n")).contains(r#""body":"busy\n""#));
        let fault = LineFault { code: "invalid_json_line", message: "why".into(), param: None };
        assert_eq!(
            written(&BatchAnswer::from_fault(3, None, fault)),
            r#"{"id":"batch_req_line_3","custom_id":null,"response":null,"error":{"code":"invalid_json_line","message":"why","param":null,"line":3}}"#
        );
    }

    #[test]
    fn a_later_run_goes_on_wherever_the_first_was_killed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.jsonl");
        let (mut first, _) = BatchOutput::open(&path).unwrap();
        assert!(BatchOutput::open(&path).unwrap_err().root_cause().to_string().contains("another"));
        for name in ["a", "b"] {
            first.write(&answer(name, "{}")).unwrap();
        }
        drop(first);
        let whole = std::fs::read(&path).unwrap();
        for cut in 0..=whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let (mut again, answered) = BatchOutput::open(&path).unwrap();
            let half = whole.len() / 2;
            // The line break is not part of an answer.
            for (name, end) in [("a", half), ("b", whole.len())] {
                let has = answered.names.has_answer(LineIdentity::Name(name));
                assert_eq!(has, cut >= end - 1, "{name} of {cut} bytes");
                if !has {
                    again.write(&answer(name, "{}")).unwrap();
                }
            }
            assert_eq!(std::fs::read(&path).unwrap(), whole, "{cut} bytes");
        }
    }

    #[test]
    fn a_file_of_something_else_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.jsonl");
        let request = r#"{"custom_id":"a","url":"/v1/completions","body":{}}"#;
        let answer = written(&answer("a", "{}"));
        for text in [
            "a letter".into(),
            "a letter\n".into(),
            "{\"a\": 1}".into(),
            request.into(),
            format!("{answer}\n{{\n"),
        ] {
            std::fs::write(&path, &text).unwrap();
            assert!(BatchOutput::open(&path).is_err(), "{text}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
    }

    #[test]
    fn errors_of_an_earlier_run_count() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.jsonl");
        let (mut first, _) = BatchOutput::open(&path).unwrap();
        let refused = BatchAnswer::from_server(Some("a".into()), 400, None, b"{}".to_vec());
        let fault = BatchAnswer::from_fault(4, Some("b".into()), LineFault::repeated("b"));
        for answer in [&answer("b", "{}"), &refused, &fault] {
            first.write(answer).unwrap();
        }
        assert!(refused.is_error() && fault.is_error() && !answer("b", "{}").is_error());
        drop(first);
        let (_, answered) = BatchOutput::open(&path).unwrap();
        assert_eq!(answered.errors, 2);
        assert!(answered.names.has_answer(LineIdentity::Line(4)));
    }
}
