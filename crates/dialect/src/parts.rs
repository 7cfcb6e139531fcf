//! The parts of an answer, in order: text, reasoning and tool calls.

/// The kind of a run of text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Content,
    Reasoning,
    /// The name of a tool, which starts a call.
    Name,
    /// The call's id as the model wrote it, directly after the name.
    Id,
    Arguments,
}

/// A run of text of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    kind: Kind,
    /// The index of the call that the run belongs to; 0 for other runs.
    call: u32,
    /// The end of the run in the combined text.
    end: u32,
}

/// One part of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part<'a> {
    /// Text for the user.
    Content(&'a str),
    /// The reasoning before the answer.
    Reasoning(&'a str),
    /// The start of a tool call.
    Call {
        /// The index of the call in the answer, from 0.
        index: u32,
        /// The complete name of the tool.
        name: &'a str,
        /// The call's id as the model wrote it; `None` if the family writes no ids.
        id: Option<&'a str>,
    },
    /// More arguments of a call. The concatenated pieces of a call are a JSON object.
    Arguments {
        /// The index of the call.
        index: u32,
        /// A piece of JSON.
        text: &'a str,
    },
}

/// The parts of an answer, in order. They are stored as one text with boundaries, so that a token
/// costs no allocation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Parts {
    text: String,
    runs: Vec<Run>,
}

impl Parts {
    /// True if there are no parts.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Returns the size of the parts in memory, in bytes.
    pub fn weight(&self) -> usize {
        self.text.len() + self.runs.len() * size_of::<Run>()
    }

    /// Returns the text if all of it is content; empty if there are no parts.
    pub fn as_content(&self) -> Option<&str> {
        match self.runs[..] {
            [] => Some(""),
            [Run { kind: Kind::Content, .. }] => Some(&self.text),
            _ => None,
        }
    }

    /// Removes the parts and keeps the allocated memory.
    pub fn clear(&mut self) {
        self.text.clear();
        self.runs.clear();
    }

    /// Appends content.
    pub fn content(&mut self, text: &str) {
        self.push(Kind::Content, 0, text);
    }

    /// Appends what `write` writes, as content.
    pub fn content_with<R>(&mut self, write: impl FnOnce(&mut String) -> R) -> R {
        let before = self.text.len();
        let result = write(&mut self.text);
        if self.text.len() > before {
            self.ends(Kind::Content, 0);
        }
        result
    }

    /// Appends reasoning.
    pub fn reasoning(&mut self, text: &str) {
        self.push(Kind::Reasoning, 0, text);
    }

    /// Starts the call with index `index`.
    pub fn call(&mut self, index: u32, name: &str, id: Option<&str>) {
        self.text.push_str(name);
        self.runs.push(Run { kind: Kind::Name, call: index, end: self.end() });
        if let Some(id) = id {
            self.text.push_str(id);
            self.runs.push(Run { kind: Kind::Id, call: index, end: self.end() });
        }
    }

    /// Appends to the arguments of the call with index `index`.
    pub fn arguments(&mut self, index: u32, text: &str) {
        self.push(Kind::Arguments, index, text);
    }

    /// Appends a part.
    pub fn part(&mut self, part: Part<'_>) {
        match part {
            Part::Content(text) => self.content(text),
            Part::Reasoning(text) => self.reasoning(text),
            Part::Call { index, name, id } => self.call(index, name, id),
            Part::Arguments { index, text } => self.arguments(index, text),
        }
    }

    /// Removes the reasoning.
    pub(crate) fn without_reasoning(&mut self) {
        if self.runs.iter().any(|run| run.kind == Kind::Reasoning) {
            let mut kept = Self::default();
            self.iter()
                .filter(|part| !matches!(part, Part::Reasoning(_)))
                .for_each(|part| kept.part(part));
            *self = kept;
        }
    }

    /// Appends the parts of `newer`, and clears `newer`.
    pub fn append(&mut self, newer: &mut Self) {
        let before = self.end();
        let joins = match (self.runs.last(), newer.runs.first()) {
            (Some(last), Some(first)) => joins(*last, first.kind, first.call),
            _ => false,
        };
        if joins {
            self.runs.pop();
        }
        self.text.push_str(&newer.text);
        let moved = |run: Run| Run { end: before.saturating_add(run.end), ..run };
        self.runs.extend(newer.runs.drain(..).map(moved));
        newer.text.clear();
    }

    /// Iterates over the parts. Adjacent parts have different kinds, unless they are calls.
    pub fn iter(&self) -> impl Iterator<Item = Part<'_>> {
        let mut at = 0;
        let mut runs = self.runs.iter().peekable();
        std::iter::from_fn(move || {
            let run = runs.next()?;
            let text = &self.text[at..run.end as usize];
            at = run.end as usize;
            Some(match run.kind {
                Kind::Content => Part::Content(text),
                Kind::Reasoning => Part::Reasoning(text),
                Kind::Arguments => Part::Arguments { index: run.call, text },
                Kind::Name | Kind::Id => {
                    let id = runs.next_if(|next| next.kind == Kind::Id).map(|next| {
                        let id = &self.text[at..next.end as usize];
                        at = next.end as usize;
                        id
                    });
                    Part::Call { index: run.call, name: text, id }
                }
            })
        })
    }

    fn push(&mut self, kind: Kind, call: u32, text: &str) {
        if !text.is_empty() {
            self.text.push_str(text);
            self.ends(kind, call);
        }
    }

    /// Records that the text appended last is of kind `kind`.
    fn ends(&mut self, kind: Kind, call: u32) {
        let end = self.end();
        match self.runs.last_mut() {
            Some(last) if joins(*last, kind, call) => last.end = end,
            _ => self.runs.push(Run { kind, call, end }),
        }
    }

    fn end(&self) -> u32 {
        // An answer is bounded far below 4 GiB.
        u32::try_from(self.text.len()).unwrap_or(u32::MAX)
    }
}

fn joins(last: Run, kind: Kind, call: u32) -> bool {
    last.kind == kind && last.call == call && !matches!(kind, Kind::Name | Kind::Id)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn filled() -> Parts {
        let mut parts = Parts::default();
        parts.reasoning("why ");
        parts.reasoning("not");
        parts.content("");
        parts.content("yes");
        parts.call(0, "f", Some("functions.f:0"));
        parts.arguments(0, "{");
        parts.arguments(0, "}");
        parts.call(1, "g", None);
        parts.call(2, "h", None);
        parts.arguments(2, "{}");
        parts
    }

    #[test]
    fn neighbours_of_one_kind_are_one_part() {
        let expected = [
            Part::Reasoning("why not"),
            Part::Content("yes"),
            Part::Call { index: 0, name: "f", id: Some("functions.f:0") },
            Part::Arguments { index: 0, text: "{}" },
            Part::Call { index: 1, name: "g", id: None },
            Part::Call { index: 2, name: "h", id: None },
            Part::Arguments { index: 2, text: "{}" },
        ];
        assert_eq!(filled().iter().collect::<Vec<_>>(), expected);
        assert_eq!(filled().as_content(), None);
        assert_eq!(Parts::default().as_content(), Some(""));
    }

    proptest! {
        #[test]
        fn parts_in_pieces_are_the_parts(
            pieces in prop::collection::vec((0..5_u32, "[a-c]{0,2}"), 0..12), at in any::<prop::sample::Index>(),
        ) {
            let write = |parts: &mut Parts, (kind, text): &(u32, String)| match kind {
                0 => parts.content(text),
                1 => parts.reasoning(text),
                2 => parts.call(7, text, None),
                3 => parts.call(8, text, Some(text)),
                _ => parts.arguments(7, text),
            };
            let mut whole = Parts::default();
            pieces.iter().for_each(|piece| write(&mut whole, piece));
            let cut = at.index(pieces.len() + 1);
            let (mut left, mut right) = (Parts::default(), Parts::default());
            pieces[..cut].iter().for_each(|piece| write(&mut left, piece));
            pieces[cut..].iter().for_each(|piece| write(&mut right, piece));
            left.append(&mut right);
            prop_assert_eq!(left, whole);
            prop_assert!(right.is_empty());
        }
    }
}
