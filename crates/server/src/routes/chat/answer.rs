//! A model's answer in OpenAI's message format: as a whole, and as the chunks of a stream.

use std::sync::Arc;

use forebay_api::{
    ChatChoice, ChatChunkChoice, ChatDelta, ChatLogprobs, ChatTokenLogprob, ChatTopLogprob,
    FunctionCall, FunctionDelta, ResponseMessage, TokenOutput, ToolCall, ToolCallDelta,
};
use forebay_dialect::{Ids, Part};
use forebay_egress::{
    Candidate, Delta, EventEncoder, Logprobs, Tally,
    events::{Chunks, Cut},
};
use forebay_text::Tokenizer;
use xxhash_rust::xxh3::xxh3_128;

use crate::routes::wording::{matched_stop, stop_reason, token_name};

/// Creates ids for tool calls to which the model gives none. A brain that continues another brain's
/// stream creates the same ids.
#[derive(Debug, Clone)]
pub(crate) struct CallIds {
    /// The id of the response.
    pub(crate) response: String,
    pub(crate) form: Ids,
}

impl CallIds {
    pub(crate) fn name(&self, choice: u32, call: u32) -> String {
        /// The 32 letters and digits of ids.
        const LETTERS: &[u8; 32] = b"0123456789abcdefghijklmnopqrstuv";
        let hash = xxh3_128(format!("{}/{choice}/{call}", self.response).as_bytes());
        match self.form {
            Ids::Nine => {
                let letter = |at: u32| char::from(LETTERS[(hash >> (5 * at)) as usize & 31]);
                (0..9).map(letter).collect()
            }
            Ids::Free | Ids::Counted => format!("call_{:024x}", hash >> 32),
        }
    }
}

/// How tokens are written in a response.
#[derive(Clone)]
pub(super) struct Tokens {
    /// The tokenizer for log-probabilities; `None`: log-probabilities are not requested.
    pub(super) tokenizer: Option<Arc<Tokenizer>>,
    pub(super) output: TokenOutput,
}

/// Converts a finished choice to its entry in a non-streamed response.
pub(super) fn choice(index: u32, delta: &Delta, tokens: &Tokens, ids: &CallIds) -> ChatChoice {
    ChatChoice {
        index,
        message: message(index, delta, ids),
        logprobs: tokens.logprobs(&delta.logprobs),
        finish_reason: delta.finish_reason().unwrap_or_default(),
        stop_reason: delta.end.as_ref().and_then(stop_reason),
        matched_stop: delta.end.as_ref().and_then(matched_stop),
        token_ids: tokens.output.ids.then(|| delta.tokens.clone()),
    }
}

fn message(choice: u32, delta: &Delta, ids: &CallIds) -> ResponseMessage {
    let (mut content, mut reasoning) = (String::new(), None::<String>);
    let mut calls: Vec<ToolCall> = Vec::new();
    for part in delta.parts.iter() {
        match part {
            Part::Content(text) => content.push_str(text),
            Part::Reasoning(text) => reasoning.get_or_insert_default().push_str(text),
            Part::Call { index, name, id } => calls.push(ToolCall {
                id: id.map_or_else(|| ids.name(choice, index), str::to_owned),
                kind: "function",
                function: FunctionCall { name: name.to_owned(), arguments: String::new() },
            }),
            // Arguments belong to the call before them.
            Part::Arguments { text, .. } => {
                if let Some(call) = calls.last_mut() {
                    call.function.arguments.push_str(text);
                }
            }
        }
    }
    let only_others = content.is_empty() && (reasoning.is_some() || !calls.is_empty());
    ResponseMessage {
        role: "assistant",
        content: (!only_others).then_some(content),
        refusal: None,
        reasoning: reasoning.clone(),
        reasoning_content: reasoning,
        tool_calls: calls,
    }
}

impl Tokens {
    /// Returns the log-probabilities, if requested.
    fn logprobs(&self, all: &Logprobs) -> Option<ChatLogprobs> {
        let tokenizer = self.tokenizer.as_deref()?;
        let likely = |&(id, logprob): &Candidate| {
            let token = token_name(tokenizer, id, self.output);
            ChatTopLogprob { token, logprob, bytes: tokenizer.token_bytes(id) }
        };
        let entry = |(sampled, top): (Candidate, &[Candidate])| {
            let ChatTopLogprob { token, logprob, bytes } = likely(&sampled);
            let top_logprobs = top.iter().map(likely).collect();
            ChatTokenLogprob { token, logprob, bytes, top_logprobs }
        };
        Some(ChatLogprobs { content: all.iter().map(entry).collect() })
    }
}

/// Writes the chunks of a stream.
pub(super) struct ChatEncoder {
    chunks: Chunks,
    tokens: Tokens,
    ids: CallIds,
    choices: Vec<ChoiceState>,
}

#[derive(Default)]
struct ChoiceState {
    /// True once the role was sent.
    opened: bool,
    /// The chunk template of a delta with text only, after the role was sent.
    content: Option<Cut>,
}

impl ChatEncoder {
    pub(super) fn new(chunks: Chunks, tokens: Tokens, ids: CallIds, n: u32) -> Self {
        let choices = (0..n).map(|_| ChoiceState::default()).collect();
        Self { chunks, tokens, ids, choices }
    }
}

impl EventEncoder for ChatEncoder {
    fn delta(
        &mut self,
        index: u32,
        delta: &mut Delta,
        tally: &Tally,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()> {
        let Self { chunks, tokens, ids, choices } = self;
        let state = &mut choices[index as usize];
        let usage = || tally.usage();
        if !state.opened {
            state.opened = true;
            let role =
                ChatDelta { role: Some("assistant"), content: Some(""), ..ChatDelta::default() };
            chunks.first(&chunk(index, role), || tally.usage_before(), out)?;
        }
        if state.content.is_none() && tokens.tokenizer.is_none() && !tokens.output.ids {
            let content = ChatDelta { content: Some(""), ..ChatDelta::default() };
            state.content = chunks.cut(&chunk(index, content), "content")?;
        }
        match (delta.parts.as_content(), &state.content) {
            (Some(""), _) if delta.logprobs.is_empty() && !tokens.output.ids => {}
            (Some(text), Some(cut)) => cut.write(text, out)?,
            (content, _) => {
                let mut logprobs = tokens.logprobs(&delta.logprobs);
                let mut token_ids = tokens.output.ids.then_some(&delta.tokens[..]);
                let nothing = (content == Some("")).then_some(Part::Content(""));
                for part in nothing.into_iter().chain(delta.parts.iter()) {
                    let id = match part {
                        Part::Call { index: call, id, .. } => {
                            Some(id.map_or_else(|| ids.name(index, call), str::to_owned))
                        }
                        _ => None,
                    };
                    let part = part_delta(part, id.as_deref());
                    // Log-probabilities cover the tokens of all parts; the first part's chunk
                    // carries them.
                    let choice = ChatChunkChoice {
                        logprobs: logprobs.take(),
                        token_ids: token_ids.take(),
                        ..chunk(index, part)
                    };
                    chunks.choice(&choice, usage, out)?;
                }
            }
        }
        if let Some(end) = &delta.end {
            let last = ChatChunkChoice {
                finish_reason: delta.finish_reason(),
                stop_reason: stop_reason(end),
                matched_stop: matched_stop(end),
                ..chunk(index, ChatDelta::default())
            };
            chunks.choice(&last, usage, out)?;
        }
        Ok(())
    }

    fn end(&mut self, tally: &Tally, out: &mut Vec<u8>) -> serde_json::Result<()> {
        self.chunks.usage(tally.usage(), out)
    }

    fn resumable(&self) -> bool {
        self.choices.len() == 1
    }

    fn resume(&mut self, before: &Delta) {
        for choice in &mut self.choices {
            // The role was sent before the first token.
            choice.opened = !before.tokens.is_empty();
        }
    }
}

/// Creates a chunk of a choice that is not finished.
fn chunk(index: u32, delta: ChatDelta<'_>) -> ChatChunkChoice<'_> {
    ChatChunkChoice {
        index,
        delta,
        logprobs: None,
        finish_reason: None,
        stop_reason: None,
        matched_stop: None,
        token_ids: None,
    }
}

/// Converts a part of a delta; `id` is the id of the call that the part begins.
fn part_delta<'a>(part: Part<'a>, id: Option<&'a str>) -> ChatDelta<'a> {
    let nothing = ChatDelta::default();
    match part {
        Part::Content(text) => ChatDelta { content: Some(text), ..nothing },
        Part::Reasoning(text) => {
            ChatDelta { reasoning: Some(text), reasoning_content: Some(text), ..nothing }
        }
        Part::Call { index, name, .. } => {
            let function = FunctionDelta { name: Some(name), arguments: "" };
            let call = ToolCallDelta { index, id, kind: Some("function"), function };
            ChatDelta { tool_calls: Some([call]), ..nothing }
        }
        Part::Arguments { index, text } => {
            let function = FunctionDelta { name: None, arguments: text };
            let call = ToolCallDelta { index, id: None, kind: None, function };
            ChatDelta { tool_calls: Some([call]), ..nothing }
        }
    }
}
