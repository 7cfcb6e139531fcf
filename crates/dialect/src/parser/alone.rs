//! An answer that is a call without any mark: a single object, perhaps in a code block.

use super::call::{Call, Context, Step};
use super::object::Object;
use crate::finder::leading_blank;
use crate::parts::{Part, Parts};
use crate::scan::is_object;

/// The fence around a block of code.
const FENCE: &str = "```";
/// The longest name of a code block's language, in bytes.
const LANGUAGE: usize = 16;

/// The text of an answer that may be such a call. It is held back until that is certain.
#[derive(Debug)]
pub(super) struct Alone {
    /// All of the text.
    raw: String,
    /// The unread part of it.
    unread: String,
    object: Object,
    call: Call,
    /// The call, as far as it is read.
    held: Parts,
    /// The object is complete.
    whole: bool,
    /// The fence at the end has not come.
    fenced: bool,
}

/// The kinds of beginnings of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Opening {
    /// An object begins after this many bytes, in a code block or not.
    Object {
        at: usize,
        fenced: bool,
    },
    /// More text is needed.
    Unknown,
    Other,
}

/// Reads the beginning of an answer, without white space before it.
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
    /// Begins with the text before the object.
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

    /// Reads more; `Broken` if the text has another form.
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

    /// Ends the answer, which was the model's own choice. Writes the call, if it is one.
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

    /// All of the text.
    pub(super) fn into_text(self) -> String {
        self.raw
    }
}
