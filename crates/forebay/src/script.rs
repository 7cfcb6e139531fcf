//! `--sim-script`: reads a simulated device's answers from a file.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use forebay_sim::Script;
use forebay_text::Tokenizer;
use serde::Deserialize;

/// The scripted answers, each with the prompt text that triggers it.
pub(crate) struct Answers {
    answers: Vec<Answer>,
    tokenizer: Arc<Tokenizer>,
}

struct Answer {
    after: String,
    tokens: Arc<[i32]>,
}

/// A line of the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    /// The answer is given if the prompt contains this text. If several answers match, the one
    /// whose text occurs last in the prompt is given.
    #[serde(default)]
    after: String,
    /// The answer.
    say: Say,
    /// True if the end-of-sequence token follows the answer.
    #[serde(default = "yes")]
    end: bool,
}

fn yes() -> bool {
    true
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Say {
    Text(String),
    Pieces(Vec<Piece>),
}

/// A part of an answer. Parts are tokenised separately, so that a script can split a word into
/// tokens that the tokenizer would not choose.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Piece {
    Text(String),
    Token(i32),
}

impl Answers {
    /// Reads a file. `end`: the end-of-sequence token. Token ids have to be below `vocab_size`.
    ///
    /// # Errors
    /// The file can't be read, or a line is not an answer; the message gives the line number.
    pub(crate) fn read(
        file: &Path,
        tokenizer: &Arc<Tokenizer>,
        end: Option<i32>,
        vocab_size: u32,
    ) -> Result<Self> {
        let text = std::fs::read_to_string(file)
            .with_context(|| format!("--sim-script {}", file.display()))?;
        Self::parse(&text, tokenizer, end, vocab_size)
            .with_context(|| format!("--sim-script {}", file.display()))
    }

    fn parse(
        text: &str,
        tokenizer: &Arc<Tokenizer>,
        end: Option<i32>,
        vocab_size: u32,
    ) -> Result<Self> {
        let mut answers = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            if line.trim().is_empty() {
                continue;
            }
            let read = || -> Result<Answer> {
                let Line { after, say, end: ends } = serde_json::from_str(line)?;
                let pieces = match say {
                    Say::Text(text) => vec![Piece::Text(text)],
                    Say::Pieces(pieces) => pieces,
                };
                let mut tokens = Vec::new();
                for piece in pieces {
                    match piece {
                        Piece::Text(text) => tokens.extend(tokenizer.encode(&text, false)?),
                        Piece::Token(id) => tokens.push(id),
                    }
                }
                tokens.extend(end.filter(|_| ends));
                let known = |id: &i32| u32::try_from(*id).is_ok_and(|id| id < vocab_size);
                if let Some(id) = tokens.iter().find(|id| !known(id)) {
                    bail!("token {id} is not of the model's vocabulary of {vocab_size}");
                }
                Ok(Answer { after, tokens: tokens.into() })
            };
            answers.push(read().with_context(|| format!("line {number}"))?);
        }
        if answers.is_empty() {
            bail!("there is no answer in it");
        }
        Ok(Self { answers, tokenizer: Arc::clone(tokenizer) })
    }
}

impl fmt::Debug for Answers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answers").field("answers", &self.answers.len()).finish_non_exhaustive()
    }
}

impl Script for Answers {
    fn answer(&self, prompt: &[i32]) -> Option<Arc<[i32]>> {
        let prompt = self.tokenizer.decode(prompt, false).ok()?;
        let found = self.answers.iter().filter_map(|answer| {
            let at = prompt.rfind(&answer.after)?;
            // Every prompt contains the empty text; it counts as found at the start.
            let end = if answer.after.is_empty() { 0 } else { at + answer.after.len() };
            Some(((end, answer.after.len()), answer))
        });
        found.max_by_key(|(place, _)| *place).map(|(_, answer)| Arc::clone(&answer.tokens))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer() -> Arc<Tokenizer> {
        let file = include_bytes!("../../text/tests/data/tiny-llama-tokenizer.json");
        Arc::new(Tokenizer::from_bytes(file).expect("a tokenizer"))
    }

    #[test]
    fn the_text_that_was_said_last_decides() {
        let tokenizer = tokenizer();
        let file = r#"
            {"say": "anything"}
            {"after": "weather", "say": "<|im_start|>call"}
            {"after": "rain", "say": ["w", "et", 5], "end": false}
        "#;
        let answers = Answers::parse(file, &tokenizer, Some(2), 2048).expect("answers");
        let ask = |prompt: &str| {
            let ids = tokenizer.encode(prompt, false).expect("ids");
            let answer = answers.answer(&ids).expect("an answer");
            let text = tokenizer.decode(&answer, false).expect("text");
            (text, answer.last().copied())
        };
        assert_eq!(ask("hello").0, "anything<|im_end|>");
        assert_eq!(ask("the weather?").0, "<|im_start|>call<|im_end|>");
        let (text, last) = ask("the weather? rain.");
        assert!(text.starts_with("wet"), "{text}");
        assert_eq!(last, Some(5));
        assert_eq!(ask("rain. and the weather?").0, "<|im_start|>call<|im_end|>");
    }

    #[test]
    fn a_wrong_line_is_named() {
        for (file, why) in [
            ("{\"say\": \"a\"}\n{\"say\": 3}", "line 2"),
            ("{\"say\": \"a\", \"when\": \"b\"}", "when"),
            ("{\"say\": [4000]}", "token 4000"),
            ("\n\n", "no answer"),
        ] {
            let error = Answers::parse(file, &tokenizer(), None, 2048).expect_err(file);
            assert!(format!("{error:#}").contains(why), "{error:#}");
        }
    }
}
