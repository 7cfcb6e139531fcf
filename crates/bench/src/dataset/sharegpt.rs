//! Conversations in ShareGPT's format: a JSON list of `{"conversations": [{"from": .., "value":
//! ..}, ..]}`.

use std::fmt;
use std::path::Path;

use anyhow::{Context as _, bail, ensure};
use rand::seq::SliceRandom as _;
use rayon::prelude::*;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, SeqAccess, Visitor};

use super::args::SharegptArgs;
use super::seed::{Purpose, generator};
use super::words::{Text, Words};
use crate::WorkItem;

/// Exchanges with a shorter prompt or answer are left out, as in `vllm bench serve`.
const SHORTEST: u32 = 4;
/// The largest number of prompt tokens, unless a context length is given.
const LONGEST_PROMPT: u32 = 1024;
/// The largest number of prompt and answer tokens together, unless a context length is given.
const LONGEST_TOTAL: u32 = 2048;

/// The first two turns of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Exchange {
    /// The first turn.
    pub(crate) prompt: String,
    /// The second turn.
    pub(crate) answer: String,
}

/// Returns the exchanges of a file, in the random order of `seed`. Conversations of fewer than two
/// turns are left out.
///
/// A truncated file is used up to its last complete record, with a warning.
///
/// # Errors
/// If the file can't be read, is not such a list, or contains no conversation of two turns.
pub(crate) fn read(path: &Path, seed: u64) -> anyhow::Result<Vec<Exchange>> {
    let json = std::fs::read(path).with_context(|| path.display().to_string())?;
    let mut exchanges = parse(&json).with_context(|| path.display().to_string())?;
    ensure!(!exchanges.is_empty(), "{}: no conversation has two turns", path.display());
    exchanges.shuffle(&mut generator(seed, Purpose::Order, 0));
    Ok(exchanges)
}

fn parse(json: &[u8]) -> anyhow::Result<Vec<Exchange>> {
    let mut exchanges = Vec::new();
    let mut reader = serde_json::Deserializer::from_slice(json);
    let end = Exchanges(&mut exchanges).deserialize(&mut reader).and_then(|()| reader.end());
    match end {
        Ok(()) => {}
        Err(error) if error.is_eof() && !exchanges.is_empty() => {
            tracing::warn!(
                "the file ends within a record ({error}): its first {} conversations are used",
                exchanges.len()
            );
        }
        Err(error) => bail!("not a list of conversations: {error}"),
    }
    Ok(exchanges)
}

/// Stores each exchange as soon as it is parsed, so that an error later in the file does not lose
/// it.
struct Exchanges<'a>(&'a mut Vec<Exchange>);

impl<'de> DeserializeSeed<'de> for Exchanges<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Exchanges<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a list of conversations")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut records: A) -> Result<(), A::Error> {
        while let Some(record) = records.next_element::<Conversation>()? {
            let mut turns = record.conversations.into_iter().map(|turn| turn.value);
            if let (Some(prompt), Some(answer)) = (turns.next(), turns.next()) {
                self.0.push(Exchange { prompt, answer });
            }
        }
        Ok(())
    }
}

#[derive(Deserialize)]
struct Conversation {
    #[serde(alias = "conversation", default)]
    conversations: Vec<Turn>,
}

#[derive(Deserialize)]
struct Turn {
    value: String,
}

/// The rule that selects exchanges.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Filter {
    output_len: Option<u32>,
    context_len: Option<u32>,
}

impl Filter {
    /// Creates the filter from the flags.
    pub(crate) fn new(args: &SharegptArgs) -> Self {
        Self { output_len: args.sharegpt_output_len, context_len: args.sharegpt_context_len }
    }

    /// True if a prompt of `tokens` tokens may be used at all.
    pub(crate) fn takes_prompt(self, tokens: u32) -> bool {
        let longest = self.context_len.unwrap_or(LONGEST_PROMPT);
        (SHORTEST..=longest).contains(&tokens)
    }

    fn takes(self, prompt: u32, answer: u32) -> bool {
        let long_enough = self.output_len.is_some() || answer >= SHORTEST;
        let longest = self.context_len.unwrap_or(LONGEST_TOTAL);
        self.takes_prompt(prompt) && long_enough && prompt.saturating_add(answer) <= longest
    }
}

/// The first `count` exchanges that pass the filter, or fewer if there are no more. Each is
/// returned with its prompt's tokens and the number of tokens to generate.
///
/// # Errors
/// If no exchange passes, or a text can't be encoded.
pub(crate) fn items(
    exchanges: &[Exchange],
    filter: Filter,
    words: &Words<'_>,
    count: usize,
    as_ids: bool,
) -> anyhow::Result<Vec<WorkItem>> {
    let items = first_that_pass(exchanges, count, |exchange| {
        let answer = match filter.output_len {
            Some(tokens) => tokens,
            None => words.encode(&exchange.answer)?.len() as u32,
        };
        let text = Text { ids: words.encode(&exchange.prompt)?, text: exchange.prompt.clone() };
        let tokens = text.tokens();
        Ok(filter.takes(tokens, answer).then(|| WorkItem {
            prompt: text.prompt(as_ids),
            text_tokens: tokens,
            output_tokens: answer,
            arrival: None,
        }))
    })?;
    ensure!(!items.is_empty(), "no conversation of the file has lengths that are wanted");
    Ok(items)
}

/// The first `count` prompts that pass the filter regardless of their answers, as `(tokens, text)`.
///
/// # Errors
/// If no prompt passes, or a text can't be encoded.
pub(crate) fn prompts(
    exchanges: &[Exchange],
    filter: Filter,
    words: &Words<'_>,
    count: usize,
) -> anyhow::Result<Vec<(u32, String)>> {
    let prompts = first_that_pass(exchanges, count, |exchange| {
        let tokens = words.encode(&exchange.prompt)?.len() as u32;
        Ok(filter.takes_prompt(tokens).then(|| (tokens, exchange.prompt.clone())))
    })?;
    ensure!(!prompts.is_empty(), "no prompt of the file has a length that is wanted");
    Ok(prompts)
}

/// Returns the first `count` exchanges that pass, in order, without encoding much more of the file
/// than needed.
fn first_that_pass<T: Send>(
    exchanges: &[Exchange],
    count: usize,
    pass: impl Fn(&Exchange) -> anyhow::Result<Option<T>> + Sync,
) -> anyhow::Result<Vec<T>> {
    let mut passed = Vec::new();
    let mut rest = exchanges;
    while passed.len() < count && !rest.is_empty() {
        let (now, later) = rest.split_at(rest.len().min((count - passed.len()).max(16)));
        let results: Vec<Option<T>> = now.par_iter().map(&pass).collect::<anyhow::Result<_>>()?;
        passed.extend(results.into_iter().flatten());
        rest = later;
    }
    passed.truncate(count);
    Ok(passed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = r#"[
        {"id": "a", "conversations": [
            {"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}, {"from": "human", "value": "three"}
        ]},
        {"id": "b", "conversations": [{"from": "human", "value": "alone"}]},
        {"id": "c", "conversations": []},
        {"id": "d", "conversation": [{"from": "human", "value": "é\n"}, {"from": "gpt", "value": "日本"}]}
    ]"#;

    fn exchange(prompt: &str, answer: &str) -> Exchange {
        Exchange { prompt: prompt.to_owned(), answer: answer.to_owned() }
    }

    #[test]
    fn the_first_two_turns_are_kept() {
        let expected = vec![exchange("one", "two"), exchange("é\n", "日本")];
        assert_eq!(parse(WHOLE.as_bytes()).expect("exchanges"), expected);
    }

    #[test]
    fn a_file_that_ends_early_is_used_up_to_its_last_whole_record() {
        let first = WHOLE.find(r#"{"id": "b""#).expect("the second record");
        let last = WHOLE
            .find(
                r#"]}
    ]"#,
            )
            .expect("the last record");
        for end in 0..WHOLE.len() {
            let parsed = parse(&WHOLE.as_bytes()[..end]);
            match end {
                _ if end > last + 1 => assert_eq!(parsed.expect("both").len(), 2, "{end}"),
                _ if end >= first => {
                    assert_eq!(parsed.expect("one"), [exchange("one", "two")], "{end}");
                }
                // The comma after the record may also be cut off.
                _ if end + 20 < first => assert!(parsed.is_err(), "{end}"),
                _ => {}
            }
        }
    }

    #[test]
    fn a_file_that_is_wrong_is_refused() {
        for wrong in [
            "",
            "{}",
            "[1]",
            "[] []",
            r#"[{"conversations": [{"from": "human"}]}]"#,
            r#"[{"conversations": [{"value": "a"}, {"value": "b"}]}, nonsense]"#,
        ] {
            let error = parse(wrong.as_bytes()).expect_err(wrong);
            assert!(error.to_string().contains("not a list of conversations"), "{error}");
        }
    }

    #[test]
    fn lengths_are_filtered_as_asked() {
        let filter = |output_len, context_len| Filter { output_len, context_len };
        let usual = filter(None, None);
        for (prompt, answer, taken) in [
            (4, 4, true),
            (3, 4, false),
            (4, 3, false),
            (1024, 1024, true),
            (1025, 4, false),
            (1000, 1049, false),
        ] {
            assert_eq!(usual.takes(prompt, answer), taken, "{prompt} {answer}");
        }
        assert!(filter(Some(1), None).takes(4, 1));
        assert!(filter(None, Some(5000)).takes(4000, 1000));
        assert!(!filter(None, Some(5000)).takes(4000, 1001));
        assert!(!filter(None, Some(20)).takes(18, 4));
    }
}
