//! Finds special tokens in clients' text before the template is rendered, and locates them in its
//! output.
//!
//! A chat whose strings cannot form a special token is rendered once. Any other chat is rendered
//! twice. For the second rendering, some characters of those tokens are replaced by *twins*:
//! characters that occur in no special token and in no text of the client. If the two outputs
//! differ only in twins, the twins mark the client's parts of the text, and the first output is the
//! result. So whatever a template does with content (trim, split, compare, measure) works as usual.
//! If the outputs differ otherwise, the template has interpreted such a token, and the chat is
//! rejected.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

use aho_corasick::{AhoCorasick, Anchored, Input, StartKind};
use serde_json::{Map, Value};

use super::{ChatRender, ChatTemplate};
use crate::error::TextError;

/// The range of characters from which twins are chosen: printable letters without case, which are
/// very rare in texts.
const TWINS: Range<u32> = 0x2_0000..0x2_a6d0;

/// A rendered chat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GuardedChat {
    pub(crate) text: String,
    /// The sorted byte ranges of text from the client. A range that matters for special tokens is
    /// included at least in part.
    pub(crate) client: Vec<Range<usize>>,
}

impl GuardedChat {
    /// Creates a chat whose text has no special tokens from the client.
    pub(crate) fn plain(text: String) -> Self {
        Self { text, client: Vec::new() }
    }
}

/// Finds special tokens in the chats of one template.
#[derive(Debug)]
pub(crate) struct Guard {
    /// The texts of the special tokens, sorted.
    tokens: Vec<String>,
    finder: AhoCorasick,
    /// True for each byte that starts a token and is not a letter or digit.
    firsts: Box<[bool; 256]>,
    /// Finds the quoted strings of the template's source, at which the template may split content.
    literals: Option<AhoCorasick>,
    /// All characters that have a twin.
    alphabet: Vec<char>,
    /// Special tokens that the template itself looks for in content, such as marks of reasoning.
    /// They are not guarded.
    inspected: HashSet<String>,
}

/// A chat in which characters were replaced by their twins.
struct TwinnedChat {
    messages: Value,
    tools: Option<Value>,
    documents: Option<Value>,
    kwargs: Option<Map<String, Value>>,
}

/// The mapping between characters and their twins.
struct Twins {
    twin: HashMap<char, char>,
    original: HashMap<char, char>,
}

impl Guard {
    /// Creates a guard, or returns `None` if the tokenizer has no special tokens.
    pub(crate) fn new(mut tokens: Vec<String>, template: &ChatTemplate) -> Option<Self> {
        tokens.retain(|token| !token.is_empty());
        tokens.sort();
        tokens.dedup();
        if tokens.is_empty() {
            return None;
        }
        let finder = AhoCorasick::builder().start_kind(StartKind::Both).build(&tokens).ok()?;
        let mut firsts = Box::new([false; 256]);
        for token in &tokens {
            if !token.starts_with(char::is_alphanumeric) {
                firsts[usize::from(token.as_bytes()[0])] = true;
            }
        }
        let literals: Vec<String> = template.sources().flat_map(literals).collect();
        let literals = (!literals.is_empty())
            .then(|| AhoCorasick::builder().start_kind(StartKind::Both).build(&literals).ok())
            .flatten();
        let mut alphabet: Vec<char> = tokens.iter().flat_map(|token| token.chars()).collect();
        alphabet.sort_unstable();
        alphabet.dedup();
        let mut guard =
            Self { tokens, finder, firsts, literals, alphabet, inspected: HashSet::new() };
        let templates = [Some(template), template.tool_use.as_deref()].into_iter().flatten();
        guard.inspected = templates.flat_map(|template| guard.inspected_by(template)).collect();
        Some(guard)
    }

    /// Finds the tokens whose guarding changes how a short chat is rendered. If such a chat is too
    /// expensive, no more tokens are tried, since each would take as long again.
    fn inspected_by(&self, template: &ChatTemplate) -> HashSet<String> {
        let mut inspected = HashSet::new();
        for token in self.tokens.iter().filter(|token| template.source.contains(token.as_str())) {
            let contents = [format!("a {token} b"), token.clone(), format!("{token}b{token}")];
            for messages in contents.iter().flat_map(|content| probes(content)) {
                let chat = ChatRender::new(&messages);
                let rendered = template.render(&chat).map(|_| self.render(template, &chat));
                match rendered {
                    Ok(Err(TextError::Guarded)) => {
                        inspected.insert(token.clone());
                        break;
                    }
                    Err(TextError::Costly(_)) | Ok(Err(TextError::Costly(_))) => return inspected,
                    _ => {}
                }
            }
        }
        inspected
    }

    /// Renders a chat. The result includes the ranges from the client, as far as they matter for
    /// special tokens.
    pub(crate) fn render(
        &self,
        template: &ChatTemplate,
        chat: &ChatRender<'_>,
    ) -> Result<GuardedChat, TextError> {
        match self.twinned(chat)? {
            None => template.render(chat).map(GuardedChat::plain),
            Some(twinned) => Self::render_twice(template, chat, &twinned),
        }
    }

    /// Renders chats, in order. Each may fail with the errors of [`Self::render`].
    pub(crate) fn render_all(
        &self,
        template: &ChatTemplate,
        chats: &[ChatRender<'_>],
    ) -> Vec<Result<GuardedChat, TextError>> {
        let twinned: Vec<_> = chats.iter().map(|chat| self.twinned(chat)).collect();
        let plain = chats.iter().zip(&twinned).filter(|(_, twinned)| matches!(twinned, Ok(None)));
        let plain: Vec<_> = plain.map(|(chat, _)| *chat).collect();
        let mut texts = template.render_all(&plain).into_iter();
        let rendered = chats.iter().zip(twinned).map(|(chat, twinned)| match twinned? {
            None => texts.next().unwrap_or(Err(TextError::Closed)).map(GuardedChat::plain),
            Some(twinned) => Self::render_twice(template, chat, &twinned),
        });
        rendered.collect()
    }

    /// Renders a chat as it was sent and with twins, and finds the parts that differ.
    fn render_twice(
        template: &ChatTemplate,
        chat: &ChatRender<'_>,
        (twins, twinned): &(Twins, TwinnedChat),
    ) -> Result<GuardedChat, TextError> {
        let shadow = ChatRender {
            messages: &twinned.messages,
            tools: twinned.tools.as_ref(),
            documents: twinned.documents.as_ref(),
            kwargs: twinned.kwargs.as_ref(),
            ..*chat
        };
        // A template may print the time, which can change between the two renderings.
        for _ in 0..2 {
            let text = template.render(chat)?;
            let Ok(shadow) = template.render(&shadow) else { break };
            if let Some(client) = twins.compare(&text, &shadow) {
                return Ok(GuardedChat { text, client });
            }
        }
        Err(TextError::Guarded)
    }

    /// Returns the chat with twins, or `None` if it contains nothing to guard.
    fn twinned(&self, chat: &ChatRender<'_>) -> Result<Option<(Twins, TwinnedChat)>, TextError> {
        let empty = Map::new();
        let kwargs = chat.kwargs.unwrap_or(&empty);
        let values = [Some(chat.messages), chat.tools, chat.documents];
        let mut values = values.into_iter().flatten().chain(kwargs.values());
        let keys = || kwargs.keys().any(|key| self.finder.is_match(key));
        if !values.any(|value| self.is_suspicious(value)) && !keys() {
            return Ok(None);
        }
        let twins = Twins::new(&self.alphabet, chat).ok_or(TextError::Guarded)?;
        let replace = |value: &Value| self.replaced(value, &twins);
        let twinned = TwinnedChat {
            messages: replace(chat.messages),
            tools: chat.tools.map(replace),
            documents: chat.documents.map(replace),
            kwargs: chat.kwargs.map(|kwargs| self.fields(kwargs, &twins)),
        };
        Ok(Some((twins, twinned)))
    }

    fn is_suspicious(&self, value: &Value) -> bool {
        match value {
            Value::String(text) => {
                let has_whole = self.finder.is_match(text) && !self.whole(text).is_empty();
                has_whole || self.beginnings(text).next().is_some()
            }
            Value::Array(values) => values.iter().any(|value| self.is_suspicious(value)),
            Value::Object(fields) => fields
                .iter()
                .any(|(name, value)| self.finder.is_match(name) || self.is_suspicious(value)),
            Value::Null | Value::Bool(_) | Value::Number(_) => false,
        }
    }

    fn replaced(&self, value: &Value, twins: &Twins) -> Value {
        match value {
            Value::String(text) => Value::String(twins.put(text, &self.places(text))),
            Value::Array(values) => {
                values.iter().map(|value| self.replaced(value, twins)).collect()
            }
            Value::Object(fields) => Value::Object(self.fields(fields, twins)),
            Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
        }
    }

    /// Guards the fields of an object. In field names only whole tokens are replaced, since
    /// templates look fields up by name.
    fn fields(&self, fields: &Map<String, Value>, twins: &Twins) -> Map<String, Value> {
        let field = |(name, value): (&String, &Value)| {
            (twins.put(name, &self.whole(name)), self.replaced(value, twins))
        };
        fields.iter().map(field).collect()
    }

    /// Returns the ranges at which `text` has special tokens, or prefixes of tokens. At the end of
    /// the text, or where the template splits content, the template could complete a prefix with
    /// other client text.
    fn places(&self, text: &str) -> Vec<Range<usize>> {
        let mut places = self.whole(text);
        places.extend(self.beginnings(text));
        places
    }

    fn beginnings<'a>(&'a self, text: &'a str) -> impl Iterator<Item = Range<usize>> + 'a {
        let end = text.trim_end().len();
        let bytes = text.bytes().enumerate();
        let starts =
            bytes.filter(|&(at, byte)| self.firsts[usize::from(byte)] && text.is_char_boundary(at));
        starts.filter_map(move |(at, _)| {
            let length = self.beginning(&text[at..], end.saturating_sub(at))?;
            Some(at..at + length)
        })
    }

    fn whole(&self, text: &str) -> Vec<Range<usize>> {
        let found = self.finder.find_overlapping_iter(text);
        let left = |at: usize| self.inspected.contains(&self.tokens[at]);
        found.filter(|found| !left(found.pattern().as_usize())).map(|found| found.range()).collect()
    }

    /// Returns the length of the longest proper prefix of a token at the start of `text` after
    /// which the template may split. `end` is the length of the text without trailing white space.
    fn beginning(&self, text: &str, end: usize) -> Option<usize> {
        if self.finder.find(Input::new(text).anchored(Anchored::Yes)).is_some() {
            // This is a whole token, which is handled elsewhere or not guarded.
            return None;
        }
        let after = self.tokens.partition_point(|token| token.as_str() <= text);
        let near = [after.checked_sub(1), Some(after)];
        let near = near.into_iter().flatten().filter_map(|at| self.tokens.get(at));
        let common = near.map(|token| common(token, text)).max()?;
        let cut = |&length: &usize| {
            length >= end
                || self.literals.as_ref().is_some_and(|literals| {
                    let rest = Input::new(&text[length..]).anchored(Anchored::Yes);
                    literals.find(rest).is_some()
                })
        };
        (1..=common).filter(|&length| text.is_char_boundary(length)).rev().find(cut)
    }
}

/// Returns the number of leading bytes that two texts share, in whole characters.
fn common(left: &str, right: &str) -> usize {
    let same = left.char_indices().zip(right.chars()).take_while(|((_, a), b)| a == b);
    same.last().map_or(0, |((at, c), _)| at + c.len_utf8())
}

impl Twins {
    /// Chooses twins that do not occur in the chat; `None` if too few characters are left.
    fn new(alphabet: &[char], chat: &ChatRender<'_>) -> Option<Self> {
        let mut used = HashSet::new();
        for value in [Some(chat.messages), chat.tools, chat.documents].into_iter().flatten() {
            note_used(value, &mut used);
        }
        for (name, value) in chat.kwargs.into_iter().flatten() {
            used.extend(name.chars().filter(|c| TWINS.contains(&u32::from(*c))));
            note_used(value, &mut used);
        }
        used.extend(alphabet);
        let free = TWINS.filter_map(char::from_u32).filter(|c| !used.contains(c));
        let pairs: Vec<(char, char)> = alphabet.iter().copied().zip(free).collect();
        (pairs.len() == alphabet.len()).then(|| Self {
            twin: pairs.iter().copied().collect(),
            original: pairs.iter().map(|&(original, twin)| (twin, original)).collect(),
        })
    }

    /// Replaces punctuation in these ranges by its twins. In a range without punctuation, letters
    /// and digits are replaced. White space, control characters, quotes and backslashes are kept.
    fn put(&self, text: &str, places: &[Range<usize>]) -> String {
        if places.is_empty() {
            return text.to_owned();
        }
        let mut starts: BTreeMap<usize, char> = BTreeMap::new();
        for place in places {
            let stays =
                |c: char| c.is_whitespace() || c.is_control() || matches!(c, '"' | '\\' | '\'');
            let characters = || text[place.clone()].char_indices().filter(|(_, c)| !stays(*c));
            let only_signs = characters().any(|(_, c)| !c.is_alphanumeric());
            let wanted = characters().filter(|(_, c)| !only_signs || !c.is_alphanumeric());
            starts
                .extend(wanted.filter_map(|(at, c)| Some((place.start + at, *self.twin.get(&c)?))));
        }
        text.char_indices().map(|(at, c)| starts.get(&at).copied().unwrap_or(c)).collect()
    }

    /// Returns the ranges of `text` in which `shadow` has twins; `None` if the two texts also
    /// differ elsewhere.
    fn compare(&self, text: &str, shadow: &str) -> Option<Vec<Range<usize>>> {
        let mut client: Vec<Range<usize>> = Vec::new();
        let mut shadow = shadow.chars();
        for (at, c) in text.char_indices() {
            let seen = shadow.next()?;
            if seen == c {
                continue;
            }
            if self.original.get(&seen) != Some(&c) {
                return None;
            }
            let end = at + c.len_utf8();
            match client.last_mut() {
                Some(last) if last.end == at => last.end = end,
                _ => client.push(at..end),
            }
        }
        shadow.next().is_none().then_some(client)
    }
}

fn note_used(value: &Value, used: &mut HashSet<char>) {
    let note = |text: &str, used: &mut HashSet<char>| {
        used.extend(text.chars().filter(|c| TWINS.contains(&u32::from(*c))));
    };
    match value {
        Value::String(text) => note(text, used),
        Value::Array(values) => values.iter().for_each(|value| note_used(value, used)),
        Value::Object(fields) => fields.iter().for_each(|(name, value)| {
            note(name, used);
            note_used(value, used);
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Returns short chats that reveal how a template treats `content`.
fn probes(content: &str) -> Vec<Value> {
    let message = |role: &str, content: &str| serde_json::json!({"role": role, "content": content});
    let user = message("user", content);
    vec![
        serde_json::json!([user]),
        serde_json::json!([message("system", content), message("user", "u")]),
        serde_json::json!([message("user", "u"), message("assistant", content)]),
        serde_json::json!([message("user", "u"), message("assistant", content), user]),
        serde_json::json!([
            message("user", "u"),
            message("assistant", "a"),
            message("tool", content)
        ]),
    ]
}

/// Returns the quoted strings in a template's source, with escapes unchanged.
fn literals(source: &str) -> Vec<String> {
    let mut found = HashSet::new();
    for quote in ['"', '\''] {
        // Every second part is in quotes. If a quote occurs elsewhere, some parts are not literals,
        // which does no harm.
        for piece in source.split(quote) {
            let piece = piece.replace("\\n", "\n").replace("\\t", "\t").replace("\\\\", "\\");
            if !piece.is_empty() && piece.len() <= 64 {
                found.insert(piece);
            }
        }
    }
    found.into_iter().collect()
}
