//! The text around calls.

/// Text before, between and after calls, which is given back if no call follows.
#[derive(Debug, Default)]
pub(super) struct Items {
    /// The text since the last call, or since the mark that may begin one.
    pub(super) raw: String,
    /// True if the text began within reasoning.
    pub(super) reasoning: bool,
    /// True if only the mark of a section has come.
    pub(super) section: bool,
    /// True once a call has arrived.
    pub(super) called: bool,
    /// True if the end of that call or of its list has come.
    pub(super) closed: bool,
}

/// Characters that may precede a call within its marks.
const BEFORE: [char; 3] = [',', '[', '`'];
/// Characters that may follow a call within its marks.
const BEHIND: [char; 5] = [',', ';', ']', '}', '`'];

impl Items {
    /// Items after a mark.
    pub(super) fn new(raw: String, reasoning: bool, section: bool) -> Self {
        Self { raw, reasoning, section, ..Self::default() }
    }

    /// Items after a call.
    pub(super) fn behind_call() -> Self {
        Self { called: true, ..Self::default() }
    }

    /// True if `c` can belong to the syntax around calls here.
    pub(super) fn takes(&self, c: char) -> bool {
        if self.called { !self.closed && BEHIND.contains(&c) } else { BEFORE.contains(&c) }
    }

    /// Adds text that belongs to the form.
    pub(super) fn take(&mut self, text: &str) {
        self.raw.push_str(text);
        self.closed |= self.called && text.ends_with(']');
    }

    /// Records the end of a call or of a section.
    pub(super) fn close(&mut self) {
        self.raw.clear();
        self.closed = true;
    }

    /// The text that belongs to no call.
    pub(super) fn text(&self) -> &str {
        let end = self.raw.rfind(BEHIND).filter(|_| self.called);
        end.map_or(&self.raw, |end| &self.raw[end + 1..])
    }
}
