//! The questions, the prompts, and the search for numbers in the model's answers.

use std::collections::HashSet;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;

/// The strings that end an answer. Without them, models continue with questions of their own.
pub(super) const STOP: [&str; 3] = ["Question", "Assistant:", "<|separator|>"];

/// A line of a GSM8K file.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Question {
    question: String,
    /// The reasoning, followed by `####` and the answer.
    answer: String,
}

/// The prompts of an evaluation, with the right answers.
#[derive(Debug)]
pub(super) struct Exam {
    /// The prompts, one for each question, in file order. Each contains the examples.
    pub(super) prompts: Vec<String>,
    /// The right answer to each question.
    pub(super) labels: Vec<u64>,
}

impl Question {
    /// The question in the format of a prompt, without its answer.
    fn asked(&self) -> String {
        format!("Question: {}\nAnswer:", self.question)
    }

    /// The question in a normalised form, to find copies of it.
    fn essence(&self) -> String {
        let words = self.question.split_whitespace();
        words.map(str::to_lowercase).collect::<Vec<_>>().join(" ")
    }
}

/// Reads the questions of a file with one JSON object per line.
pub(super) fn read(path: &Path) -> Result<Vec<Question>> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let questions = lines.map(|(number, line)| {
        serde_json::from_str(line)
            .with_context(|| format!("{}:{}: no GSM8K question", path.display(), number + 1))
    });
    questions.collect()
}

impl Exam {
    /// Creates prompts for the first `count` of `questions`, or for all if there are fewer. Each
    /// prompt begins with the first `shots` of `examples` and their answers.
    ///
    /// # Errors
    /// There are too few examples, a question has no numeric answer, or an example is also a
    /// question.
    pub(super) fn new(
        questions: &[Question],
        examples: &[Question],
        shots: usize,
        count: usize,
    ) -> Result<Self> {
        let questions = &questions[..count.min(questions.len())];
        ensure!(!questions.is_empty(), "there is no question to ask");
        let Some(examples) = examples.get(..shots) else {
            bail!("{shots} examples are wanted, and there are {}", examples.len());
        };
        let scored: HashSet<String> = questions.iter().map(Question::essence).collect();
        if let Some(example) = examples.iter().find(|example| scored.contains(&example.essence())) {
            bail!(
                "an example is also asked, so its answer would be in the prompt: {:?}",
                example.question
            );
        }
        let prefix: String =
            examples.iter().map(|e| format!("{} {}\n\n", e.asked(), e.answer)).collect();
        let labels = questions.iter().map(|question| {
            last_integer(&question.answer)
                .with_context(|| format!("no number answers {:?}", question.question))
        });
        Ok(Self {
            prompts: questions.iter().map(|q| prefix.clone() + &q.asked()).collect(),
            labels: labels.collect::<Result<_>>()?,
        })
    }
}

/// Returns the last run of digits in a text, ignoring commas. As in published results, a sign is
/// ignored, and the result for `3.50` is 50. If the last run has leading zeros and is not zero, the
/// result is `None`. A run that is too large for any right answer becomes the largest integer.
pub(super) fn last_integer(text: &str) -> Option<u64> {
    let text = text.replace(',', "");
    let last = text.rsplit(|c: char| !c.is_ascii_digit()).find(|run| !run.is_empty())?;
    if last.starts_with('0') && last.bytes().any(|digit| digit != b'0') {
        return None;
    }
    Some(last.parse().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn questions(texts: &[(&str, &str)]) -> Vec<Question> {
        let made = texts.iter().map(|&(question, answer)| Question {
            question: question.into(),
            answer: answer.into(),
        });
        made.collect()
    }

    #[test]
    fn answers_are_read_as_published_results_were() {
        let table = [
            ("", None),
            ("no idea", None),
            ("#### 18", Some(18)),
            ("She makes 9 * 2 = $<<9*2=18>>18 every day.", Some(18)),
            ("$70,000", Some(70_000)),
            ("1,2 and 3", Some(3)),
            ("4, 5", Some(5)),
            ("4,5", Some(45)),
            ("-7", Some(7)),
            ("3.50", Some(50)),
            ("$10.00", Some(0)),
            ("$10.05", None),
            ("10 and then 007", None),
            ("0", Some(0)),
            ("12th of May", Some(12)),
            ("x5y", Some(5)),
            ("7 \u{0663}", Some(7)),
            ("99999999999999999999999999", Some(u64::MAX)),
        ];
        for (text, expected) in table {
            assert_eq!(last_integer(text), expected, "{text:?}");
        }
    }

    #[test]
    fn prompts_are_exact_to_the_byte() {
        let examples = questions(&[("1+1?", "It is 2\n#### 2"), ("2+2?", "#### 4"), ("x", "y")]);
        let asked = questions(&[("3+3?", "#### 6"), ("4+4?", "#### 8"), ("5+5?", "#### 10")]);
        let exam = Exam::new(&asked, &examples, 2, 2).unwrap();
        let prefix =
            "Question: 1+1?\nAnswer: It is 2\n#### 2\n\nQuestion: 2+2?\nAnswer: #### 4\n\n";
        assert_eq!(
            exam.prompts,
            [
                format!("{prefix}Question: 3+3?\nAnswer:"),
                format!("{prefix}Question: 4+4?\nAnswer:")
            ]
        );
        assert_eq!(exam.labels, [6, 8]);
        let exam = Exam::new(&asked, &[], 0, 100).unwrap();
        assert_eq!(exam.prompts.len(), 3);
        assert_eq!(exam.prompts[0], "Question: 3+3?\nAnswer:");
    }

    #[test]
    fn an_example_must_not_be_asked() {
        let asked = questions(&[("How much?", "#### 1"), ("How  many \nducks?", "#### 2")]);
        let examples = questions(&[("Who?", "#### 3"), ("how many ducks?", "#### 2")]);
        let error = Exam::new(&asked, &examples, 2, 2).unwrap_err().to_string();
        assert!(error.contains("how many ducks?"), "{error}");
        assert!(Exam::new(&asked, &examples, 1, 2).is_ok(), "an example that is not shown");
        assert!(Exam::new(&asked, &examples, 2, 1).is_ok(), "a question that is not asked");
    }

    #[test]
    fn an_exam_that_cannot_be_held_is_refused() {
        let fine = questions(&[("a", "#### 1")]);
        assert!(Exam::new(&fine, &[], 1, 1).is_err(), "too few examples");
        assert!(Exam::new(&[], &fine, 1, 1).is_err(), "no question");
        assert!(Exam::new(&fine, &[], 0, 0).is_err(), "no question wanted");
        assert!(Exam::new(&questions(&[("a", "none")]), &[], 0, 1).is_err(), "no label");
    }
}
