//! Parses an answer that is a call without any mark: a single object, optionally in a code block.

use super::call::{Call, Context, Step};
use super::object::Object;
use crate::finder::leading_blank;
use crate::parts::{Part, Parts};
use crate::scan::is_object;

/// The fence of a code block.
const FENCE: &str = "```";
/// The longest name of a code block's language, in bytes.
const LANGUAGE: usize = 16;

/// The text of an answer that may be a call without marks. The text is held back until it is
/// certain whether it is a call.
#[derive(Debug)]
pub(super) struct Alone {
    /// The whole text of the answer.
    raw: String,
    /// The part of the text that was not parsed yet.
    unread: String,
    object: Object,
    call: Call,
    /// The parts of the call that were read so far.
    held: Parts,
    /// True if the object is complete.
    whole: bool,
    /// True if the object is in a code block whose closing fence has not come yet.
    fenced: bool,
}

/// How an answer begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Opening {
    /// An object starts after this many bytes, possibly in a code block.
    Object {
        at: usize,
        fenced: bool,
    },
    /// More text is needed.
    Unknown,
    Other,
}

/// Classifies the beginning of an answer, given without leading white space.
pub(super) fn opening(text: &str) -> Opening {
    if text.starts_with('{') {
        return Opening::Object { at: 0, fenced: false };
    }
    let Some(rest) = text.strip_prefix(FENCE) else {
        return if FENCE.starts_with(text) { Opening::Unknown } else { Opening::Other };
    };
    let language = rest.bytes().take_while(u8::is_ascii_alphanumeric).count();
    let behind = &rest[language..];
    let object = behind.strip_prefix('\n').unwrap_or(behind);
    match object.chars().next() {
        _ if language > LANGUAGE => Opening::Other,
        None => Opening::Unknown,
        Some('{') if object.len() < behind.len() => {
            Opening::Object { at: text.len() - object.len(), fenced: true }
        }
        Some(_) => Opening::Other,
    }
}

impl Alone {
    /// Creates the state after `raw`, the text before the object.
    pub(super) fn new(raw: String, fenced: bool, index: u32) -> Self {
        Self {
            raw,
            unread: String::new(),
            object: Object::new(true),
            call: Call::new(index),
            held: Parts::default(),
            whole: false,
            fenced,
        }
    }

    /// Reads more text. Returns `Broken` if the answer is not a call.
    pub(super) fn push(&mut self, text: &str, context: Context<'_>) -> Step {
        self.raw.push_str(text);
        self.unread.push_str(text);
        if !self.whole {
            match self.object.step(&mut self.unread, &mut self.call, &mut self.held, context) {
                Step::Done => self.whole = true,
                step => return step,
            }
        }
        let blank = leading_blank(&self.unread);
        self.unread.drain(..blank);
        if self.fenced && self.unread.starts_with(FENCE) {
            self.fenced = false;
            self.unread.drain(..FENCE.len());
            let blank = leading_blank(&self.unread);
            self.unread.drain(..blank);
        }
        let ends = self.unread.is_empty() || self.fenced && FENCE.starts_with(&self.unread);
        if ends { Step::More } else { Step::Broken }
    }

    /// Handles the end of an answer that the model itself ended. If the answer is a complete call,
    /// writes the call and returns true.
    pub(super) fn call(&self, out: &mut Parts) -> bool {
        let mut arguments = String::new();
        for part in self.held.iter() {
            if let Part::Arguments { text, .. } = part {
                arguments.push_str(text);
            }
        }
        let is_call = self.whole && self.unread.is_empty() && is_object(&arguments);
        if is_call {
            self.held.iter().for_each(|part| out.part(part));
        }
        is_call
    }

    /// Returns the whole text of the answer.
    pub(super) fn into_text(self) -> String {
        self.raw
    }
}
