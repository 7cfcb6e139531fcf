//! The conversation, and its answers.

use std::io::Write;
use std::time::Instant;

use anyhow::{Result, bail};
use clap::Args;
use http::{Method, StatusCode};
use serde::Serialize;
use serde_json::{Value, json};

use crate::answer::{Answer, End, Piece};
use crate::link::{Link, refusal, whole};

/// The sampling parameters of a request. Parameters that are not set are not sent, so the server's
/// defaults apply.
#[derive(Debug, Clone, Default, Args, Serialize)]
pub(crate) struct Sampling {
    /// Largest number of tokens of an answer.
    #[arg(long, value_name = "TOKENS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_tokens: Option<u32>,
    /// Sampling temperature; 0 always takes the most likely token.
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f32>,
    /// Nucleus sampling: sample from the most likely tokens whose probabilities add up to this.
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    top_p: Option<f32>,
    /// Seed of sampling, for repeatable answers.
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
}

/// How an answer ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AnswerEnd {
    /// The answer is complete.
    Whole(End),
    /// The user stopped the answer.
    Stopped,
}

/// The conversation so far.
#[derive(Debug)]
pub(crate) struct Conversation {
    pub(crate) model: String,
    system: Option<String>,
    sampling: Sampling,
    /// The messages of user and assistant, alternating.
    messages: Vec<(&'static str, String)>,
}

impl Conversation {
    pub(crate) fn new(model: String, system: Option<String>, sampling: Sampling) -> Self {
        Self { model, system, sampling, messages: Vec::new() }
    }

    /// Adds a message of the user.
    pub(crate) fn say(&mut self, text: &str) {
        self.messages.push(("user", text.to_owned()));
    }

    /// Removes all messages.
    pub(crate) fn clear(&mut self) {
        self.messages.clear();
    }

    /// Begins a new conversation, with another system message.
    pub(crate) fn set_system(&mut self, text: &str) {
        self.system = (!text.is_empty()).then(|| text.to_owned());
        self.clear();
    }

    /// Removes the last answer. Returns false if there is none.
    pub(crate) fn take_back(&mut self) -> bool {
        let answered = matches!(self.messages.last(), Some(("assistant", _)));
        if answered {
            self.messages.pop();
        }
        answered
    }

    /// Removes the last user message if it has no answer.
    fn unsay(&mut self) {
        if matches!(self.messages.last(), Some(("user", _))) {
            self.messages.pop();
        }
    }

    fn body(&self) -> Value {
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        let said = self.messages.iter().map(|(role, text)| json!({"role": role, "content": text}));
        let mut body = json!({
            "model": self.model,
            "messages": system.chain(said).collect::<Vec<_>>(),
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        // The struct of sampling parameters serialises to a JSON object.
        if let (Some(body), Ok(Value::Object(sampling))) =
            (body.as_object_mut(), serde_json::to_value(&self.sampling))
        {
            body.extend(sampling);
        }
        body
    }

    /// Requests the model's answer, and writes it as it arrives. Ctrl-C stops it, and its text so
    /// far stays in the conversation. With `styled`, reasoning is written too, in faint text.
    ///
    /// # Errors
    /// The server returns an error or closes the connection: then the user's last message is
    /// removed. Or writing to `out` fails.
    pub(crate) async fn answer(
        &mut self,
        link: &Link,
        out: &mut impl Write,
        styled: bool,
    ) -> Result<AnswerEnd> {
        let mut text = String::new();
        let ended = self.stream(link, out, styled, &mut text).await;
        match &ended {
            Ok(_) => self.messages.push(("assistant", text)),
            Err(_) => self.unsay(),
        }
        ended
    }

    async fn stream(
        &self,
        link: &Link,
        out: &mut impl Write,
        styled: bool,
        text: &mut String,
    ) -> Result<AnswerEnd> {
        let asked = Instant::now();
        let body = self.body();
        let sending = link.send(Method::POST, "/v1/chat/completions", Some(&body));
        let response = tokio::select! {
            response = sending => response?,
            _ = tokio::signal::ctrl_c() => return Ok(AnswerEnd::Stopped),
        };
        let status = response.status();
        if status != StatusCode::OK {
            let answer = serde_json::from_slice(&whole(response).await?).unwrap_or(Value::Null);
            bail!("{}", refusal(status, &answer));
        }
        let mut answer = Answer::new(response.into_body(), asked);
        let mut thinking = false;
        while !answer.is_over() {
            let pieces = tokio::select! {
                pieces = answer.next() => pieces?,
                _ = tokio::signal::ctrl_c() => {
                    writeln!(out, "{}", if thinking { FAINT_END } else { "" })?;
                    return Ok(AnswerEnd::Stopped);
                }
            };
            for piece in pieces.into_iter().flatten() {
                let (thought, said) = match &piece {
                    Piece::Reasoning(said) => (true, said),
                    Piece::Content(said) => (false, said),
                };
                if !thought {
                    text.push_str(said);
                } else if !styled {
                    continue;
                }
                if thought != thinking {
                    write!(out, "{}", if thought { FAINT } else { FAINT_END_AND_GAP })?;
                    thinking = thought;
                }
                write!(out, "{}", shown(said))?;
            }
            out.flush()?;
        }
        writeln!(out, "{}", if thinking { FAINT_END } else { "" })?;
        Ok(AnswerEnd::Whole(answer.end()))
    }
}

const FAINT: &str = "\x1b[2m";
const FAINT_END: &str = "\x1b[0m";
const FAINT_END_AND_GAP: &str = "\x1b[0m\n\n";

/// Removes control characters that terminals interpret, since a model may generate any.
pub(crate) fn shown(text: &str) -> String {
    let order = |&letter: &char| letter.is_control() && letter != '\n' && letter != '\t';
    text.chars().filter(|letter| !order(letter)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_said_is_sent() {
        let sampling = Sampling { seed: Some(3), ..Sampling::default() };
        let mut talk = Conversation::new("m".into(), Some("Be kind.".into()), sampling);
        talk.say("Hello");
        let body = talk.body();
        assert_eq!(body["messages"].as_array().unwrap().len(), 2);
        assert_eq!((&body["seed"], body.get("temperature")), (&json!(3), None));
        assert!(!talk.take_back(), "there is no answer");
        talk.messages.push(("assistant", "Hi".into()));
        assert!(talk.take_back());
        talk.set_system("");
        assert_eq!(talk.body()["messages"], json!([]));
    }

    #[test]
    fn a_model_gives_the_terminal_no_orders() {
        assert_eq!(shown("a\x1b[2Jb\x07c\n\td\r\u{9b}1m"), "a[2Jbc\n\td1m");
    }
}
