//! The state of the single pass over a body: the current path, and what was found.

use serde::de::Error;
use serde_json::error::Category;

use super::{INERT, SHOWN_BYTES, UNREAD, VALUES, cut};
use crate::error::ApiError;

/// The size of those parts of a parsed body that can be large.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Weight {
    /// The number of JSON values that are kept unparsed, at most [`VALUES`].
    pub values: usize,
    /// The size of embeddings and images in bytes.
    pub embeds: usize,
}

/// A step of the path to a value.
#[derive(Debug)]
pub(crate) enum Step {
    Name(&'static str),
    Key(String),
    Index(usize),
}

/// The kind of the last value that was read.
#[derive(Debug, Clone, Copy, Default)]
pub(super) enum LastValue {
    /// The length of a string in bytes.
    Text(usize),
    Number,
    #[default]
    Other,
}

/// A pass over a body. It tracks the path, weight and unread names.
#[derive(Debug)]
pub struct Walk<'de> {
    body: &'de str,
    pub(super) weight: Weight,
    /// Names of parameters that nothing reads, at most [`UNREAD`].
    pub(super) unread: Vec<String>,
    /// The path to the value that is being read; after an error, the path to the faulty value.
    path: Vec<Step>,
    pub(super) seen: LastValue,
    /// The error that ended the pass, unless it is a syntax or type error of the parser.
    pub(super) failure: Option<ApiError>,
}

impl<'de> Walk<'de> {
    pub(crate) fn new(body: &'de str) -> Self {
        Self {
            body,
            weight: Weight::default(),
            unread: Vec::new(),
            path: Vec::new(),
            seen: LastValue::Other,
            failure: None,
        }
    }

    /// Returns the body.
    pub(crate) fn body(&self) -> &'de str {
        self.body
    }

    /// Stores the error that ends the pass.
    pub(crate) fn end<E: Error>(&mut self, error: ApiError) -> E {
        self.failure = Some(error);
        E::custom("the walk has ended")
    }

    /// Returns the weight of the body, and the names of unread parameters.
    pub(crate) fn finish(self) -> (Weight, Vec<String>) {
        (self.weight, self.unread)
    }

    pub(crate) fn enter(&mut self, step: Step) {
        self.path.push(step);
    }

    /// Removes the last step of the path, after a value was read without error.
    pub(crate) fn leave(&mut self) {
        self.path.pop();
    }

    /// Returns the number of steps to the value that is being read.
    pub(super) fn steps(&self) -> usize {
        self.path.len()
    }

    /// Formats the path of a parameter; `body` for the whole body.
    fn param(&self, steps: usize) -> String {
        let mut param = String::new();
        for step in self.path.iter().take(steps) {
            match step {
                Step::Index(index) => param.push_str(&format!("[{index}]")),
                Step::Name(name) => dotted(&mut param, name),
                Step::Key(key) => dotted(&mut param, key),
            }
        }
        if param.is_empty() { "body".to_owned() } else { param }
    }

    /// Formats the names on the path, without list indices.
    fn names(&self) -> String {
        let mut names = String::new();
        for step in &self.path {
            if let Step::Name(name) = step {
                dotted(&mut names, name);
            }
        }
        names
    }

    /// Creates the error for the value that is being read.
    pub(crate) fn invalid(&self, reason: &str) -> ApiError {
        let param = self.param(usize::MAX);
        ApiError::Invalid { reason: format!("`{param}`: {reason}"), param }
    }

    /// Creates the error for a known parameter that is not supported.
    pub(crate) fn unsupported(&self) -> ApiError {
        ApiError::unsupported(self.names())
    }

    /// Ends the pass with an error for the value at the first `steps` steps of the path.
    pub(super) fn fail<E: Error>(&mut self, steps: usize, reason: &str) -> E {
        let param = self.param(steps);
        self.failure = Some(ApiError::Invalid { reason: format!("`{param}`: {reason}"), param });
        E::custom("over a limit")
    }

    /// Counts a value that is kept unparsed. Fails if there are more than [`VALUES`]; the error
    /// then names the first `steps` steps of the path.
    pub(super) fn keep<E: Error>(&mut self, steps: usize) -> Result<(), E> {
        self.weight.values += 1;
        if self.weight.values <= VALUES {
            return Ok(());
        }
        let reason = format!(
            "messages, content parts, `tools`, `tool_calls` and `chat_template_kwargs` have at most {VALUES} values together"
        );
        Err(self.fail(steps, &reason))
    }

    /// Records an unread parameter whose value would have an effect.
    pub(crate) fn note_unread(&mut self, name: &str) {
        if self.unread.len() >= UNREAD || self.path.is_empty() && INERT.contains(&name) {
            return;
        }
        let mut path = self.names();
        dotted(&mut path, &cut(name, SHOWN_BYTES));
        if !self.unread.contains(&path) {
            self.unread.push(path);
        }
    }

    /// Converts an error in `text`, a part of the body, to an error for the client.
    pub(crate) fn explain(&mut self, error: &serde_json::Error, text: &str) -> ApiError {
        if let Some(failure) = self.failure.take() {
            return failure;
        }
        let full = error.to_string();
        let reason = full.split(" at line ").next().unwrap_or(&full);
        if error.classify() != Category::Data {
            let (line, column) = self.position(text, error);
            return ApiError::MalformedJson { reason: reason.to_owned(), line, column };
        }
        let missing = |reason: &str| {
            Some(reason.strip_prefix("missing field `")?.strip_suffix('`')?.to_owned())
        };
        match missing(reason) {
            Some(field) => {
                self.enter(Step::Key(field));
                self.invalid("required and missing")
            }
            None => self.invalid(&in_words(reason)),
        }
    }

    /// Returns the line and column of an error in the body.
    fn position(&self, text: &str, error: &serde_json::Error) -> (usize, usize) {
        let offset = (text.as_ptr() as usize).saturating_sub(self.body.as_ptr() as usize);
        let before = self.body.get(..offset).unwrap_or_default();
        let line = error.line() + before.matches('\n').count();
        if error.line() > 1 {
            return (line, error.column());
        }
        let start = before.rfind('\n').map_or(0, |newline| newline + 1);
        (line, error.column() + before.len() - start)
    }
}

/// Rewrites the message of a type error without Rust's type names.
fn in_words(reason: &str) -> String {
    let Some((found, expected)) = reason.rsplit_once(", expected ") else {
        return reason.to_owned();
    };
    let expected = match expected {
        "u8" | "u16" | "u32" | "u64" | "usize" | "i8" | "i16" | "i32" | "i64" | "i128" => {
            "a whole number"
        }
        "f32" | "f64" => "a number",
        "a boolean" => "true or false",
        "a sequence" => "a list",
        "a map" => "an object",
        name if name.starts_with("struct ") => "an object",
        other => other,
    };
    let found = found.strip_prefix("invalid type: ").or(found.strip_prefix("invalid value: "));
    let found = match found {
        Some("sequence") => "a list",
        Some("map") => "an object",
        Some(found) => found,
        None => return reason.to_owned(),
    };
    let found = found.replace("floating point", "number").replace("integer", "number");
    format!("expected {expected}, and not {found}")
}

fn dotted(path: &mut String, name: &str) {
    if !path.is_empty() {
        path.push('.');
    }
    path.push_str(name);
}
