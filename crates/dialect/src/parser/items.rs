//! The syntax around calls.

/// The text before, between and after calls, which is restored if no call follows.
#[derive(Debug, Default)]
pub(super) struct Items {
    /// The text since the last call, or since the mark that may start one.
    pub(super) raw: String,
    /// True if the text started within reasoning.
    pub(super) reasoning: bool,
    /// True if only the mark of a section was read.
    pub(super) section: bool,
    /// True if the text follows a call.
    pub(super) called: bool,
    /// True if the call before the text, or its list, was closed.
    pub(super) closed: bool,
}

/// Characters that may precede a call within the marks.
const BEFORE: [char; 3] = [',', '[', '`'];
/// Characters that may follow a call within the marks.
const BEHIND: [char; 5] = [',', ';', ']', '}', '`'];

impl Items {
    /// Creates the state after a mark.
    pub(super) fn new(raw: String, reasoning: bool, section: bool) -> Self {
        Self { raw, reasoning, section, ..Self::default() }
    }

    /// Creates the state after a call.
    pub(super) fn behind_call() -> Self {
        Self { called: true, ..Self::default() }
    }

    /// True if `c` may be part of the syntax around calls here.
    pub(super) fn takes(&self, c: char) -> bool {
        if self.called { !self.closed && BEHIND.contains(&c) } else { BEFORE.contains(&c) }
    }

    /// Adds text that is part of the syntax.
    pub(super) fn take(&mut self, text: &str) {
        self.raw.push_str(text);
        self.closed |= self.called && text.ends_with(']');
    }

    /// Records the end of a call or a section.
    pub(super) fn close(&mut self) {
        self.raw.clear();
        self.closed = true;
    }

    /// Returns the text that belongs to no call. After a call, the syntax that may follow calls is
    /// left out.
    pub(super) fn text(&self) -> &str {
        let end = self.raw.rfind(BEHIND).filter(|_| self.called);
        end.map_or(&self.raw, |end| &self.raw[end + 1..])
    }
}
