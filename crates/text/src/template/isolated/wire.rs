//! The messages between a server and its rendering processes.
//!
//! Values are encoded in a binary form, since JSON would round some floats and limit the depth.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use serde_json::{Map, Number, Value};

use super::super::program::Variables;
use crate::error::TextError;

const NULL: u8 = 0;
const FALSE: u8 = 1;
const TRUE: u8 = 2;
const SIGNED: u8 = 3;
const UNSIGNED: u8 = 4;
const FLOAT: u8 = 5;
const STRING: u8 = 6;
const ARRAY: u8 = 7;
const OBJECT: u8 = 8;

/// The first byte of a response: its kind.
const TEXT: u8 = 0;
const REFUSED: u8 = 1;
const COSTLY: u8 = 2;

/// The largest size of an error text in bytes. An error that a template raises may be of any
/// length.
pub(super) const ERROR_BYTES: usize = 64 << 10;
/// The size of a response in bytes without its text.
pub(super) const ANSWER_HEAD: usize = 1;

/// The size in bytes up to which messages are copied together with their lengths and written in one
/// system call, which is faster. A socket buffers this much without a reader.
const COPIED_BYTES: usize = 64 << 10;
const LENGTH_BYTES: usize = 4;

/// Returns how many of the first messages are written together; at least one.
pub(super) fn fitting(frames: &[Vec<u8>]) -> usize {
    let mut bytes = 0;
    let fits = |frame: &&Vec<u8>| {
        bytes += LENGTH_BYTES + frame.len();
        bytes <= COPIED_BYTES
    };
    frames.iter().take_while(fits).count().max(1)
}

/// Writes a message, preceded by its length.
pub(super) fn write_frame(stream: &mut UnixStream, frame: &[u8]) -> io::Result<()> {
    let length = u32::try_from(frame.len()).map_err(io::Error::other)?.to_le_bytes();
    if frame.len() + LENGTH_BYTES <= COPIED_BYTES {
        return stream.write_all(&[&length, frame].concat());
    }
    stream.write_all(&length)?;
    stream.write_all(frame)
}

/// Writes messages, each preceded by its length.
pub(super) fn write_frames(stream: &mut UnixStream, frames: &[Vec<u8>]) -> io::Result<()> {
    if let [frame] = frames {
        return write_frame(stream, frame);
    }
    let mut together = Vec::new();
    for frame in frames {
        let length = u32::try_from(frame.len()).map_err(io::Error::other)?;
        together.extend_from_slice(&length.to_le_bytes());
        together.extend_from_slice(frame);
    }
    stream.write_all(&together)
}

/// Reads a message of at most `most` bytes; `None` at the end of the stream.
pub(super) fn read_frame(stream: &mut impl Read, most: usize) -> io::Result<Option<Vec<u8>>> {
    let mut length = [0; LENGTH_BYTES];
    if let Err(error) = stream.read_exact(&mut length) {
        let ended = error.kind() == io::ErrorKind::UnexpectedEof;
        return if ended { Ok(None) } else { Err(error) };
    }
    let length = u32::from_le_bytes(length) as usize;
    if length > most {
        return Err(io::Error::other(format!("a message of {length} bytes, at most {most}")));
    }
    let mut frame = vec![0; length];
    stream.read_exact(&mut frame)?;
    Ok(Some(frame))
}

/// The first message to a process, which contains the template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Setup {
    pub(super) source: String,
    pub(super) special_tokens: BTreeMap<String, String>,
}

impl Setup {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        put_text(&self.source, &mut out);
        for (name, token) in &self.special_tokens {
            put_text(name, &mut out);
            put_text(token, &mut out);
        }
        out
    }

    pub(super) fn from_bytes(mut bytes: &[u8]) -> Option<Self> {
        let source = take_text(&mut bytes)?;
        let mut special_tokens = BTreeMap::new();
        while !bytes.is_empty() {
            let name = take_text(&mut bytes)?;
            special_tokens.insert(name, take_text(&mut bytes)?);
        }
        Some(Self { source, special_tokens })
    }
}

/// The variables for rendering a chat, as a process receives them.
#[derive(Debug)]
pub(super) struct ReceivedVariables {
    messages: Vec<Value>,
    tools: Option<Value>,
    documents: Option<Value>,
    kwargs: Map<String, Value>,
    add_generation_prompt: bool,
}

impl ReceivedVariables {
    pub(super) fn from_bytes(mut bytes: &[u8]) -> Option<Self> {
        let bytes = &mut bytes;
        let add_generation_prompt = take_byte(bytes)? == TRUE;
        let messages = take_values(bytes)?;
        let some = |value: Value| Some(value).filter(|value| !value.is_null());
        let tools = some(take_value(bytes)?);
        let documents = some(take_value(bytes)?);
        let kwargs = take_fields(bytes)?;
        Some(Self { messages, tools, documents, kwargs, add_generation_prompt })
    }

    pub(super) fn variables(&self) -> Variables<'_> {
        Variables {
            messages: &self.messages,
            tools: self.tools.as_ref(),
            documents: self.documents.as_ref(),
            add_generation_prompt: self.add_generation_prompt,
            kwargs: Some(&self.kwargs),
        }
    }
}

/// Encodes the message that [`ReceivedVariables`] decodes.
pub(super) fn variables_to_bytes(variables: &Variables<'_>) -> Vec<u8> {
    let mut out = vec![if variables.add_generation_prompt { TRUE } else { FALSE }];
    put_values(variables.messages, &mut out);
    put_value(variables.tools.unwrap_or(&Value::Null), &mut out);
    put_value(variables.documents.unwrap_or(&Value::Null), &mut out);
    let empty = Map::new();
    put_fields(variables.kwargs.unwrap_or(&empty), &mut out);
    out
}

/// Encodes the response of a process.
pub(super) fn answer_to_bytes(rendered: &Result<String, TextError>) -> Vec<u8> {
    let (kind, text) = match rendered {
        Ok(text) => (TEXT, text.as_str()),
        Err(TextError::Template(why)) => (REFUSED, start(why)),
        Err(TextError::Costly(why)) => (COSTLY, start(why)),
        Err(other) => return answer_to_bytes(&Err(TextError::Template(other.to_string()))),
    };
    let mut out = Vec::with_capacity(ANSWER_HEAD + text.len());
    out.push(kind);
    out.extend_from_slice(text.as_bytes());
    out
}

/// Decodes the result in a response; `None` if the response is not valid.
pub(super) fn answer_from_bytes(mut answer: Vec<u8>) -> Option<Result<String, TextError>> {
    let kind = *answer.first()?;
    answer.remove(0);
    let text = String::from_utf8(answer).ok()?;
    match kind {
        TEXT => Some(Ok(text)),
        REFUSED => Some(Err(TextError::Template(text))),
        COSTLY => Some(Err(TextError::Costly(text))),
        _ => None,
    }
}

/// Returns the first [`ERROR_BYTES`] bytes of an error's text.
fn start(text: &str) -> &str {
    let mut end = text.len().min(ERROR_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

fn put_length(length: usize, out: &mut Vec<u8>) {
    out.extend_from_slice(&(length as u64).to_le_bytes());
}

fn put_text(text: &str, out: &mut Vec<u8>) {
    put_length(text.len(), out);
    out.extend_from_slice(text.as_bytes());
}

fn put_values(values: &[Value], out: &mut Vec<u8>) {
    put_length(values.len(), out);
    values.iter().for_each(|value| put_value(value, out));
}

fn put_fields(fields: &Map<String, Value>, out: &mut Vec<u8>) {
    put_length(fields.len(), out);
    for (name, value) in fields {
        put_text(name, out);
        put_value(value, out);
    }
}

fn put_value(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::Null => out.push(NULL),
        Value::Bool(value) => out.push(if *value { TRUE } else { FALSE }),
        Value::Number(number) => {
            let (kind, bytes) = match (number.as_u64(), number.as_i64()) {
                (Some(number), _) => (UNSIGNED, number.to_le_bytes()),
                (None, Some(number)) => (SIGNED, number.to_le_bytes()),
                (None, None) => (FLOAT, number.as_f64().unwrap_or_default().to_le_bytes()),
            };
            out.push(kind);
            out.extend_from_slice(&bytes);
        }
        Value::String(text) => {
            out.push(STRING);
            put_text(text, out);
        }
        Value::Array(values) => {
            out.push(ARRAY);
            put_values(values, out);
        }
        Value::Object(fields) => {
            out.push(OBJECT);
            put_fields(fields, out);
        }
    }
}

fn take_byte(bytes: &mut &[u8]) -> Option<u8> {
    let (first, rest) = bytes.split_first()?;
    *bytes = rest;
    Some(*first)
}

fn take_eight(bytes: &mut &[u8]) -> Option<[u8; 8]> {
    let (taken, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*taken)
}

/// Reads a length and checks it against the rest of the message, in which each item takes at least
/// a byte.
fn take_length(bytes: &mut &[u8]) -> Option<usize> {
    let length = usize::try_from(u64::from_le_bytes(take_eight(bytes)?)).ok()?;
    (length <= bytes.len()).then_some(length)
}

fn take_text(bytes: &mut &[u8]) -> Option<String> {
    let length = take_length(bytes)?;
    let (text, rest) = bytes.split_at(length);
    *bytes = rest;
    Some(std::str::from_utf8(text).ok()?.to_owned())
}

fn take_values(bytes: &mut &[u8]) -> Option<Vec<Value>> {
    let length = take_length(bytes)?;
    (0..length).map(|_| take_value(bytes)).collect()
}

fn take_fields(bytes: &mut &[u8]) -> Option<Map<String, Value>> {
    let length = take_length(bytes)?;
    (0..length).map(|_| Some((take_text(bytes)?, take_value(bytes)?))).collect()
}

fn take_value(bytes: &mut &[u8]) -> Option<Value> {
    Some(match take_byte(bytes)? {
        NULL => Value::Null,
        FALSE => Value::Bool(false),
        TRUE => Value::Bool(true),
        SIGNED => Value::from(i64::from_le_bytes(take_eight(bytes)?)),
        UNSIGNED => Value::from(u64::from_le_bytes(take_eight(bytes)?)),
        FLOAT => Value::Number(Number::from_f64(f64::from_le_bytes(take_eight(bytes)?))?),
        STRING => Value::String(take_text(bytes)?),
        ARRAY => Value::Array(take_values(bytes)?),
        OBJECT => Value::Object(take_fields(bytes)?),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            "\\PC{0,20}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 40, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::vec(("[a-z]{0,6}", inner), 0..6)
                    .prop_map(|fields| Value::Object(fields.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn variables_arrive_as_they_were_sent(
            messages in prop::collection::vec(values(), 0..4),
            tools in values(),
            documents in values(),
            kwargs in prop::collection::vec(("[a-z]{0,6}", values()), 0..4),
            add_generation_prompt: bool,
        ) {
            let kwargs: Map<String, Value> = kwargs.into_iter().collect();
            let sent = Variables {
                messages: &messages,
                tools: Some(&tools),
                documents: Some(&documents),
                add_generation_prompt,
                kwargs: Some(&kwargs),
            };
            let received = ReceivedVariables::from_bytes(&variables_to_bytes(&sent)).expect("variables");
            let got = received.variables();
            prop_assert_eq!(got.messages, sent.messages);
            prop_assert_eq!(got.tools.unwrap_or(&Value::Null), &tools);
            prop_assert_eq!(got.documents.unwrap_or(&Value::Null), &documents);
            prop_assert_eq!(got.kwargs, Some(&kwargs));
            prop_assert_eq!(got.add_generation_prompt, add_generation_prompt);
        }

        #[test]
        fn a_damaged_message_is_refused(at in 0..60_usize, byte: u8) {
            let messages = [json!({"role": "user", "content": [1, -1, 0.5, null, true, "text"]})];
            let sent = Variables {
                messages: &messages,
                tools: None,
                documents: None,
                add_generation_prompt: true,
                kwargs: None,
            };
            let mut bytes = variables_to_bytes(&sent);
            bytes[at] = byte;
            let _ = ReceivedVariables::from_bytes(&bytes);
            prop_assert!(ReceivedVariables::from_bytes(&bytes[..at]).is_none());
        }
    }

    #[test]
    fn answers_arrive_as_they_were_given() {
        let answers = [
            Ok("text".to_owned()),
            Err(TextError::Template("why".to_owned())),
            Err(TextError::Costly("why".to_owned())),
        ];
        for answer in answers {
            assert_eq!(answer_from_bytes(answer_to_bytes(&answer)), Some(answer));
        }
        let long = Err(TextError::Template("é".repeat(ERROR_BYTES)));
        assert_eq!(answer_to_bytes(&long).len(), ANSWER_HEAD + ERROR_BYTES);
        assert_eq!(answer_from_bytes(vec![9, b'a']), None);
    }
}
