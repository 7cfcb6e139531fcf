//! Parses OpenAI's Harmony format, in which each message has a channel, and some messages are
//! calls.

use super::call::{Call, Context};
use crate::family::Ids;
use crate::family::harmony::{ALL, CALL, CHANNEL, END, MESSAGE, RETURN, START};
use crate::finder::{Found, find, without_trailing_blank};
use crate::parts::Parts;
use crate::schema::Tools;

/// Parses messages. A message that is neither for the user nor for a tool is reasoning.
#[derive(Debug, Clone)]
pub(super) struct Harmony {
    /// The header of the current message.
    header: String,
    body: Option<Body>,
    /// White space that may be at the end of a call's arguments.
    blank: String,
}

#[derive(Debug, Clone)]
enum Body {
    Content,
    Reasoning,
    Call(Call),
}

impl Harmony {
    /// Creates the parser in the state after `prompt`.
    pub(super) fn new(prompt: &str) -> Self {
        let mut harmony = Self { header: String::new(), body: None, blank: String::new() };
        let Some((_, open)) = prompt.rsplit_once(START) else { return harmony };
        match open.split_once(MESSAGE) {
            Some((header, text)) if ![END, RETURN, CALL].iter().any(|mark| text.contains(mark)) => {
                let to_reader = !channel(header).starts_with("analysis");
                harmony.body = Some(if to_reader { Body::Content } else { Body::Reasoning });
            }
            Some(_) => {}
            None => open.clone_into(&mut harmony.header),
        }
        harmony
    }

    /// True if the current message is reasoning.
    pub(super) fn is_reasoning(&self) -> bool {
        matches!(self.body, Some(Body::Reasoning))
    }

    /// Parses text up to the end of a call. Returns the number of completed calls.
    pub(super) fn push(
        &mut self,
        pending: &mut String,
        begun: &mut u32,
        tools: &Tools,
        out: &mut Parts,
    ) -> u32 {
        loop {
            let found = find(pending, ALL.into_iter());
            let at = match found {
                Found::Mark { at, .. } => at,
                Found::Nothing { safe } => safe,
            };
            let text: String = pending.drain(..at).collect();
            match &mut self.body {
                None => self.header.push_str(&text),
                Some(Body::Content) => out.content(&text),
                Some(Body::Reasoning) => out.reasoning(&text),
                Some(Body::Call(call)) => {
                    let end = without_trailing_blank(&text);
                    if end > 0 {
                        call.arguments(&std::mem::take(&mut self.blank), out);
                        call.arguments(&text[..end], out);
                    }
                    self.blank.push_str(&text[end..]);
                }
            }
            let Found::Mark { mark, .. } = found else { return 0 };
            let mark = ALL[mark];
            pending.drain(..mark.len());
            match (mark, &mut self.body) {
                (MESSAGE, None) => self.body = Some(self.open(begun, tools, out)),
                (START | END | RETURN | CALL, body) => {
                    let complete = end_call(body, out);
                    *body = None;
                    self.blank.clear();
                    self.header.clear();
                    if complete {
                        return 1;
                    }
                }
                // If a model does not end a message, the mark of the next message's channel ends
                // it.
                (CHANNEL, body @ Some(_)) => {
                    let complete = end_call(body, out);
                    *body = None;
                    self.header = CHANNEL.to_owned();
                    if complete {
                        return 1;
                    }
                }
                (mark, None) => self.header.push_str(mark),
                (_, Some(_)) => {}
            }
        }
    }

    fn open(&mut self, begun: &mut u32, tools: &Tools, out: &mut Parts) -> Body {
        let header = std::mem::take(&mut self.header);
        let recipient = header.split_once("to=").map(|(_, rest)| {
            let end = rest.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(rest.len());
            &rest[..end]
        });
        let Some(recipient) = recipient else {
            let reasons = channel(&header).starts_with("analysis");
            return if reasons { Body::Reasoning } else { Body::Content };
        };
        let name = recipient.strip_prefix("functions.").unwrap_or(recipient);
        let mut call = Call::new(*begun);
        let context = Context { tools, close: "", special: true, ids: Ids::Free };
        if !call.begin(name, context, out) {
            return Body::Reasoning;
        }
        *begun += 1;
        Body::Call(call)
    }

    /// Ends the answer. `complete` is false if a length limit ended it. Returns the number of calls
    /// that this completes.
    pub(super) fn finish(&mut self, pending: &mut String, complete: bool, out: &mut Parts) -> u32 {
        let text = std::mem::take(pending);
        match self.body.take() {
            None => {
                // The header has no channel, so the message becomes content.
                let role = self.header.trim();
                if !role.is_empty() && role != "assistant" && !self.header.contains(CHANNEL) {
                    out.content(role.strip_prefix("assistant").unwrap_or(role));
                    out.content(&text);
                }
                0
            }
            Some(Body::Content) => {
                out.content(&text);
                0
            }
            Some(Body::Reasoning) => {
                out.reasoning(&text);
                0
            }
            Some(Body::Call(mut call)) => {
                call.arguments(text.trim_end(), out);
                if complete {
                    call.end(out);
                }
                u32::from(complete)
            }
        }
    }
}

/// Ends a message. Returns true if the message is a call.
fn end_call(body: &mut Option<Body>, out: &mut Parts) -> bool {
    let Some(Body::Call(call)) = body else { return false };
    call.end(out);
    true
}

/// Returns the channel in a header.
fn channel(header: &str) -> &str {
    header.rsplit_once(CHANNEL).map_or("", |(_, channel)| channel.trim_start())
}
