//! The log-probabilities of prompts. The engine reports them with the first choice of a prompt, and
//! the response shows them in every choice of that prompt.

use std::sync::Arc;

use forebay_api::{PromptTokenLogprob, PromptTokenLogprobs};
use forebay_engine as engine;
use forebay_text::Tokenizer;

use crate::delta::{Candidate, Delta, LOGPROB_JSON, Logprobs};

/// The log-probabilities of a prompt's tokens, in order, in the binary form of [`Logprobs`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PromptLogprobList {
    tokens: Logprobs,
    /// The rank of each token.
    ranks: Vec<i32>,
}

impl PromptLogprobList {
    /// Appends log-probabilities from the engine.
    pub fn push(&mut self, more: &engine::PromptLogprobs) {
        let entries = more.ids.len().checked_div(more.ranks.len()).unwrap_or(0).max(1);
        let mut candidates = Vec::with_capacity(entries);
        for (ids, values) in more.ids.chunks(entries).zip(more.values.chunks(entries)) {
            candidates.clear();
            candidates.extend(ids.iter().copied().zip(values.iter().copied()));
            self.tokens.push(&candidates);
        }
        self.ranks.extend_from_slice(&more.ranks);
    }

    pub(crate) fn append(&mut self, newer: &mut Self) {
        self.tokens.append(&mut newer.tokens);
        self.ranks.append(&mut newer.ranks);
    }

    pub(crate) fn clear(&mut self) {
        self.tokens.clear();
        self.ranks.clear();
    }

    /// The size in memory in bytes. This is not the size in the response, which
    /// `Submission::repeated` in the server contains.
    pub fn weight(&self) -> usize {
        self.tokens.candidates() * size_of::<Candidate>() + self.ranks.len() * 2 * size_of::<i32>()
    }

    /// The approximate size as JSON, in bytes.
    pub fn json(&self) -> usize {
        self.tokens.candidates() * LOGPROB_JSON
    }

    /// Iterates over the tokens, each with its log-probability and the most likely tokens at its
    /// position.
    pub fn iter(&self) -> impl Iterator<Item = (Candidate, &[Candidate])> {
        self.tokens.iter()
    }

    /// Formats the log-probabilities as vLLM does, with the `most` most likely tokens per position.
    /// The first token has none.
    pub fn listed(&self, most: u8, tokenizer: &Tokenizer) -> Vec<Option<PromptTokenLogprobs>> {
        let of_token = |((token, top), &rank): ((Candidate, &[Candidate]), &i32)| {
            let top = &top[..top.len().min(most.into())];
            let entry = |(id, logprob): Candidate, rank| {
                let decoded_token = tokenizer.token_text(id);
                (id, PromptTokenLogprob { logprob, rank, decoded_token })
            };
            let place = top.iter().position(|&(id, _)| id == token.0);
            let others = (1..).zip(top).filter(|(_, candidate)| candidate.0 != token.0);
            let rank = place.map_or(rank.cast_unsigned(), |place| place as u32 + 1);
            let first = std::iter::once(entry(token, rank));
            let others = others.map(|(rank, &candidate)| entry(candidate, rank));
            Some(PromptTokenLogprobs(first.chain(others).collect()))
        };
        std::iter::once(None).chain(self.iter().zip(&self.ranks).map(of_token)).collect()
    }
}

/// Holds back the deltas of a stream's choices until the log-probabilities of their prompts are
/// complete.
pub struct PromptLogprobGate {
    /// For each choice, the index of its prompt, and whether this choice delivers the prompt's
    /// log-probabilities.
    choices: Vec<(usize, bool)>,
    prompts: Vec<ToldPrompt>,
    /// The deltas that are held back, per choice.
    held: Vec<Delta>,
}

#[derive(Default)]
struct ToldPrompt {
    logprobs: Arc<PromptLogprobList>,
    complete: bool,
}

impl PromptLogprobGate {
    /// Creates the gate. `choices` has the number of choices per prompt.
    pub fn new(choices: impl Iterator<Item = u32>) -> Self {
        let (mut all, mut prompts) = (Vec::new(), Vec::new());
        for (prompt, n) in choices.enumerate() {
            all.extend((0..n).map(|choice| (prompt, choice == 0)));
            prompts.push(ToldPrompt::default());
        }
        let held = vec![Delta::default(); all.len()];
        Self { choices: all, prompts, held }
    }

    /// Merges a delta into the held ones. Returns the deltas that can be sent now, and leaves
    /// `delta` empty.
    pub fn take(&mut self, choice: u32, delta: &mut Delta) -> Vec<(u32, Delta)> {
        let (prompt, brings) = self.choices[choice as usize];
        let told = &mut self.prompts[prompt];
        if told.complete {
            return vec![(choice, std::mem::take(delta))];
        }
        if brings {
            Arc::make_mut(&mut told.logprobs).append(&mut delta.prompt);
            told.complete = !delta.tokens.is_empty() || delta.end.is_some();
        }
        let complete = told.complete;
        self.held[choice as usize].merge(delta);
        if !complete {
            return Vec::new();
        }
        let of_prompt = (0..).zip(&self.choices).filter(|(_, of)| of.0 == prompt);
        let held = of_prompt.map(|(at, _)| (at, std::mem::take(&mut self.held[at as usize])));
        held.filter(|(_, delta)| *delta != Delta::default()).collect()
    }

    /// Returns the log-probabilities of a choice's prompt received so far.
    pub fn told(&self, choice: u32) -> &Arc<PromptLogprobList> {
        &self.prompts[self.choices[choice as usize].0].logprobs
    }
}

/// Takes the log-probabilities of each prompt from its first choice, after all choices have ended.
/// `choices` has the number of choices per prompt.
pub fn told(
    deltas: &mut [Delta],
    choices: impl Iterator<Item = u32>,
) -> Vec<Arc<PromptLogprobList>> {
    let mut at = 0;
    let first = |n: u32| {
        let told = deltas.get_mut(at).map(|delta| std::mem::take(&mut delta.prompt));
        at += n as usize;
        Arc::new(told.unwrap_or_default())
    };
    choices.map(first).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::delta::End;

    fn told_of(ranks: &[i32], ids: &[i32], values: &[f32]) -> PromptLogprobList {
        let mut told = PromptLogprobList::default();
        let more = engine::PromptLogprobs {
            ranks: ranks.to_vec(),
            ids: ids.to_vec(),
            values: values.to_vec(),
        };
        told.push(&more);
        told
    }

    fn token(id: i32) -> Delta {
        Delta { tokens: vec![id], ..Delta::default() }
    }

    #[test]
    fn a_token_comes_first_and_once_and_its_place_is_its_rank() {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
        let file = manifest.join("../text/tests/data/tiny-llama-tokenizer.json");
        let tokenizer = Tokenizer::from_file(&file).unwrap();
        let mut told = told_of(&[7], &[3, 5, 4], &[-9.0, -0.5, -1.0]);
        told.append(&mut told_of(&[2], &[4, 5, 4], &[-1.0, f32::NEG_INFINITY, -1.0]));
        let list = |most| serde_json::to_value(told.listed(most, &tokenizer)).unwrap();
        let entry = |logprob: f32, rank, id| json!({"logprob": logprob, "rank": rank, "decoded_token": tokenizer.token_text(id)});
        let (of_3, of_5, of_4) = (entry(-9.0, 7, 3), entry(-0.5, 1, 5), entry(-1.0, 2, 4));
        let second = json!({"4": of_4, "5": entry(-9999.0, 1, 5)});
        assert_eq!(list(2), json!([null, {"3": of_3, "5": of_5, "4": of_4}, second]));
        assert_eq!(list(0), json!([null, {"3": of_3}, {"4": of_4}]));
    }

    #[test]
    fn nothing_is_shown_before_the_prompt_is_complete_and_nothing_is_lost() {
        let mut awaited = PromptLogprobGate::new([2, 1].into_iter());
        let part = |rank| Delta { prompt: told_of(&[rank], &[3], &[-1.0]), ..Delta::default() };
        assert_eq!(awaited.take(0, &mut part(1)), []);
        assert_eq!(awaited.take(1, &mut token(8)), []);
        assert_eq!(awaited.take(1, &mut token(9)), []);
        assert_eq!(awaited.take(2, &mut token(7)), [(2, token(7))], "another prompt");
        let mut last = part(2);
        last.tokens.push(5);
        let both = Delta { tokens: vec![8, 9], ..Delta::default() };
        assert_eq!(awaited.take(0, &mut last), [(0, token(5)), (1, both)]);
        assert_eq!(awaited.take(0, &mut token(6)), [(0, token(6))]);
        assert_eq!(**awaited.told(1), told_of(&[1, 2], &[3, 3], &[-1.0, -1.0]));
        let end = || Delta { end: Some(End::Length), ..Delta::default() };
        let mut other = PromptLogprobGate::new([1].into_iter());
        assert_eq!(other.take(0, &mut end()), [(0, end())], "a prompt and nothing else");
    }
}
