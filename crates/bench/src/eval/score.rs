//! Scores the answers.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use super::exam::last_integer;
use crate::record::{Outcome, Record};

/// A question with its answer and score: a line of the raw result file.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Answer {
    /// The index of the question in its file, from 0.
    pub(super) index: usize,
    /// The prompt that was sent.
    pub(super) prompt: String,
    /// The text of the answer, without the stop string; empty if the request failed.
    pub(super) text: String,
    /// The number found in the text; `None`: there is none.
    pub(super) predicted: Option<u64>,
    /// The right answer.
    pub(super) label: u64,
    /// True if the predicted number is the right answer.
    pub(super) correct: bool,
    /// The number of generated tokens.
    pub(super) tokens: u32,
    /// Seconds from the sending of the request to the end of the answer.
    pub(super) latency: f64,
    /// The reason for the failure; `None`: the request succeeded.
    pub(super) error: Option<String>,
}

impl Answer {
    /// Scores the record of question `index`.
    pub(super) fn new(index: usize, prompt: String, label: u64, record: Record) -> Self {
        let latency = record.end_us.saturating_sub(record.sent_us) as f64 / 1e6;
        let (text, tokens, error) = match record.outcome {
            Outcome::Success => (record.text, record.output_tokens, None),
            Outcome::Failed(error) => (String::new(), 0, Some(error)),
        };
        let predicted = last_integer(&text);
        let correct = predicted == Some(label);
        Self { index, prompt, text, predicted, label, correct, tokens, latency, error }
    }
}

/// The results of a run. Shares refer to answered questions only, because a failed request does not
/// measure the model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Score {
    /// The number of questions.
    pub(super) num_questions: usize,
    /// The number of questions whose request failed.
    pub(super) failed: usize,
    /// The number of right answers.
    pub(super) correct: usize,
    /// The share of right answers; `None` if no question was answered.
    pub(super) accuracy: Option<f64>,
    /// The share of answers without a number.
    pub(super) invalid: Option<f64>,
    /// Seconds from the first request to the last answer.
    pub(super) latency: f64,
    /// The number of tokens of all answers.
    pub(super) output_tokens: u64,
    /// Generated tokens per second.
    pub(super) output_throughput: f64,
    /// The number of occurrences of each error message.
    pub(super) errors: BTreeMap<String, usize>,
}

impl Score {
    /// Computes the results for `answers`, which took `latency` seconds in total.
    pub(super) fn new(answers: &[Answer], latency: f64) -> Self {
        let mut errors = BTreeMap::new();
        for error in answers.iter().filter_map(|answer| answer.error.as_ref()) {
            *errors.entry(error.clone()).or_default() += 1;
        }
        let answered: Vec<_> = answers.iter().filter(|answer| answer.error.is_none()).collect();
        let count = |what: fn(&Answer) -> bool| answered.iter().filter(|a| what(a)).count();
        let share =
            |part: usize| (!answered.is_empty()).then(|| part as f64 / answered.len() as f64);
        let correct = count(|answer| answer.correct);
        let output_tokens = answered.iter().map(|answer| u64::from(answer.tokens)).sum();
        Self {
            num_questions: answers.len(),
            failed: answers.len() - answered.len(),
            correct,
            accuracy: share(correct),
            invalid: share(count(|answer| answer.predicted.is_none())),
            latency,
            output_tokens,
            output_throughput: if latency > 0.0 { output_tokens as f64 / latency } else { 0.0 },
            errors,
        }
    }
}

impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let share = |share: Option<f64>| share.map_or("none".into(), |share| format!("{share:.3}"));
        writeln!(f, "Accuracy: {}", share(self.accuracy))?;
        writeln!(f, "Invalid: {}", share(self.invalid))?;
        writeln!(f, "Latency: {:.3} s", self.latency)?;
        write!(f, "Output throughput: {:.3} token/s", self.output_throughput)?;
        for (error, count) in &self.errors {
            write!(f, "\nFailed: {count} of {}: {error}", self.num_questions)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(text: &str, label: u64, outcome: Outcome) -> Answer {
        let record = Record {
            text: text.into(),
            sent_us: 1_000_000,
            end_us: 3_500_000,
            output_tokens: 10,
            outcome,
            ..Record::default()
        };
        Answer::new(0, "p".into(), label, record)
    }

    #[test]
    fn failed_requests_are_neither_wrong_nor_right() {
        let failed = || Outcome::Failed("HTTP 500".into());
        let answers = [
            answer("so 5", 5, Outcome::Success),
            answer("so 6", 5, Outcome::Success),
            answer("so", 5, Outcome::Success),
            answer("", 5, Outcome::Success),
            answer("so 5", 5, failed()),
            answer("", 5, failed()),
        ];
        assert_eq!((answers[0].predicted, answers[0].latency), (Some(5), 2.5));
        assert_eq!((answers[4].predicted, answers[4].correct, answers[4].tokens), (None, false, 0));
        let score = Score::new(&answers, 4.0);
        assert_eq!((score.num_questions, score.failed, score.correct), (6, 2, 1));
        assert_eq!((score.accuracy, score.invalid), (Some(0.25), Some(0.5)));
        assert_eq!((score.output_tokens, score.output_throughput), (40, 10.0));
        assert_eq!(
            score.to_string(),
            "Accuracy: 0.250\nInvalid: 0.500\nLatency: 4.000 s\nOutput throughput: 10.000 token/s\nFailed: 2 of 6: HTTP 500"
        );
    }

    #[test]
    fn nothing_answered_is_no_accuracy() {
        let score = Score::new(&[answer("5", 5, Outcome::Failed("gone".into()))], 1.0);
        assert_eq!((score.accuracy, score.invalid, score.failed), (None, None, 1));
    }
}
