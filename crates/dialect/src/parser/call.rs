//! The parsing state of a call, shared by all formats.

use crate::family::Ids;
use crate::finder::{Found, find};
use crate::parts::Parts;
use crate::schema::Tools;

/// The context in which a call is parsed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Context<'a> {
    pub(super) tools: &'a Tools,
    /// The mark that ends a call wherever it occurs.
    pub(super) close: &'static str,
    /// True if `close` is a special token.
    pub(super) special: bool,
    pub(super) ids: Ids,
}

/// The longest name of a tool or an argument, and the longest text before one, in bytes. Longer
/// text does not count as a name, because it would be scanned again with each token.
pub(super) const LONGEST: usize = 1024;

/// The result of parsing more text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// More text is needed.
    More,
    /// The call is complete.
    Done,
    /// The text is not a call, or ends within one.
    Broken,
}

/// A call, as far as it was parsed.
#[derive(Debug, Clone, Default)]
pub(super) struct Call {
    pub(super) index: u32,
    pub(super) name: Option<String>,
    /// True if any text of the arguments was written.
    pub(super) written: bool,
    /// The text that was read before it was certain to be a call.
    pub(super) raw: String,
}

/// Finds the first of `marks` in `text`. Returns its position and its index in `marks` if the
/// position is at most `most`; otherwise the step to take.
pub(super) fn near(text: &str, marks: &[&str], most: usize) -> Result<(usize, usize), Step> {
    match find(text, marks.iter().copied()) {
        Found::Mark { at, mark } if at <= most => Ok((at, mark)),
        Found::Nothing { safe } if safe <= most => Err(Step::More),
        Found::Mark { .. } | Found::Nothing { .. } => Err(Step::Broken),
    }
}

impl Call {
    pub(super) fn new(index: u32) -> Self {
        Self { index, ..Self::default() }
    }

    pub(super) fn has_begun(&self) -> bool {
        self.name.is_some()
    }

    /// Removes `length` bytes from the front of the unread text.
    pub(super) fn take(&mut self, pending: &mut String, length: usize) {
        if self.name.is_none() {
            self.raw.push_str(&pending[..length]);
        }
        pending.drain(..length);
    }

    /// Starts the call. Returns false if no offered tool has this name: then the text is not a
    /// call.
    #[must_use]
    pub(super) fn begin(&mut self, written: &str, context: Context<'_>, out: &mut Parts) -> bool {
        let written = written.trim();
        let name = match context.ids {
            Ids::Counted => counted(written).unwrap_or(written),
            Ids::Free | Ids::Nine => written,
        };
        if !context.tools.has(name) {
            return false;
        }
        let id = (name != written).then_some(written);
        out.call(self.index, name, id);
        self.name = Some(name.to_owned());
        self.raw = String::new();
        true
    }

    /// Appends to the arguments of the call.
    pub(super) fn arguments(&mut self, text: &str, out: &mut Parts) {
        self.written |= !text.is_empty();
        out.arguments(self.index, text);
    }

    /// Ends the call. If no arguments were written, writes an empty object.
    pub(super) fn end(&mut self, out: &mut Parts) {
        if self.has_begun() && !self.written {
            self.arguments("{}", out);
        }
    }
}

/// Returns the name in `functions.NAME:NUMBER`.
fn counted(written: &str) -> Option<&str> {
    let rest = written.strip_prefix("functions.").unwrap_or(written);
    let (name, number) = rest.rsplit_once(':')?;
    number.parse::<u32>().ok().map(|_| name)
}
