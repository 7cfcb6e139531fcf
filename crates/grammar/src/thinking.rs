//! Tracks reasoning before the answer: where it ends, and how long it may be.

use std::sync::Arc;

/// The marks around a model's reasoning, as tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Markers {
    /// The opening mark, at least one token.
    pub open: Arc<[i32]>,
    /// The closing mark, at least one token.
    pub close: Arc<[i32]>,
}

/// Whether the first generated token belongs to the reasoning or the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// The model may start reasoning, or start the answer.
    Open,
    /// The prompt ends within the reasoning.
    Inside,
    /// The prompt has ended the reasoning, or the model does not reason.
    Answer,
}

/// The largest number of tokens (blank lines) between a closing marker and the end of a prompt.
const AFTER_CLOSE: usize = 4;

impl Markers {
    /// Returns whether a prompt ends in the reasoning or the answer.
    #[must_use]
    pub fn start(&self, prompt: &[i32]) -> Start {
        let last =
            |marker: &[i32]| prompt.windows(marker.len()).rposition(|window| window == marker);
        match (last(&self.open), last(&self.close)) {
            (Some(open), close) if close.is_none_or(|close| close < open) => Start::Inside,
            (_, Some(close)) if prompt.len() - close - self.close.len() <= AFTER_CLOSE => {
                Start::Answer
            }
            _ => Start::Open,
        }
    }
}

/// The state of a request's reasoning.
#[derive(Debug, Clone)]
pub(crate) struct Thinking {
    markers: Markers,
    /// The largest number of reasoning tokens, without the markers; `None` for no limit.
    budget: Option<u32>,
    /// The number of reasoning tokens so far, including those of an incomplete marker.
    spent: u32,
    /// True if reasoning may begin at any time, even repeatedly, because the answer has no required
    /// form.
    again: bool,
    state: State,
}

#[derive(Debug, Clone)]
enum State {
    /// This many tokens of the opening marker were generated, and nothing else.
    Opening(usize),
    Inside {
        /// The last tokens, if they may be the beginning of the closing marker.
        tail: Vec<i32>,
    },
    Over,
}

/// The restriction that the state of the reasoning puts on the next token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The answer may begin, or this token may open the reasoning.
    Either(i32),
    /// The model reasons, so any token is allowed.
    Free,
    /// This token is forced: the opening marker has begun, or the reasoning budget is used up.
    Forced(i32),
    /// The token belongs to the answer.
    Answer,
}

impl Thinking {
    /// Creates the state. `again` is true if reasoning may begin at any time, because the answer
    /// has no required form.
    pub(crate) fn new(markers: Markers, start: Start, budget: Option<u32>, again: bool) -> Self {
        let state = match start {
            Start::Inside => State::Inside { tail: Vec::new() },
            Start::Answer if !again => State::Over,
            Start::Open | Start::Answer => State::Opening(0),
        };
        Self { markers, budget, spent: 0, again, state }
    }

    pub(crate) fn phase(&self) -> Phase {
        let Markers { open, close } = &self.markers;
        match &self.state {
            State::Opening(_) if self.again => Phase::Free,
            State::Opening(0) => Phase::Either(open[0]),
            State::Opening(said) => Phase::Forced(open[*said]),
            State::Inside { tail } if self.budget.is_some_and(|most| self.spent >= most) => {
                Phase::Forced(close[tail.len()])
            }
            State::Inside { .. } => Phase::Free,
            State::Over => Phase::Answer,
        }
    }

    /// Records a sampled token. Returns true if the token belongs to the reasoning, false if it
    /// belongs to the answer. `answers` is true if the answer may begin with this token; then the
    /// token opens no reasoning, unless reasoning may begin at any time.
    pub(crate) fn accept(&mut self, token: i32, answers: bool) -> bool {
        let Markers { open, close } = &self.markers;
        match &mut self.state {
            State::Over => false,
            State::Opening(said) if self.again => {
                *said = match token {
                    token if token == open[*said] => *said + 1,
                    token => usize::from(token == open[0]),
                };
                if *said == open.len() {
                    self.state = State::Inside { tail: Vec::new() };
                }
                false
            }
            State::Opening(said) => {
                if token != open[*said] || (*said == 0 && answers) {
                    self.state = State::Over;
                    return false;
                }
                *said += 1;
                if *said == open.len() {
                    self.state = State::Inside { tail: Vec::new() };
                }
                true
            }
            State::Inside { tail } => {
                tail.push(token);
                self.spent += 1;
                // Keep the longest suffix of the output that is a prefix of the marker.
                while !close.starts_with(tail) {
                    tail.remove(0);
                }
                if tail.len() == close.len() {
                    // The tokens of the marker are not reasoning tokens.
                    self.spent = self.spent.saturating_sub(close.len() as u32);
                    self.state = if self.again { State::Opening(0) } else { State::Over };
                }
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn markers() -> Markers {
        Markers { open: [90].into(), close: [7, 7, 8].into() }
    }

    #[test]
    fn the_prompt_says_where_the_model_is() {
        let markers = markers();
        assert_eq!(markers.start(&[1, 2]), Start::Open);
        assert_eq!(markers.start(&[1, 90]), Start::Inside);
        assert_eq!(markers.start(&[1, 90, 5, 7, 7, 8, 3]), Start::Answer);
        assert_eq!(
            markers.start(&[90, 7, 7, 8, 1, 2, 3, 4, 5]),
            Start::Open,
            "a marker of an earlier turn does not count"
        );
        assert_eq!(markers.start(&[90, 7, 7, 8, 1, 90, 2]), Start::Inside);
    }

    #[test]
    fn a_marker_is_found_wherever_it_begins() {
        let mut thinking = Thinking::new(markers(), Start::Open, None, false);
        assert_eq!(thinking.phase(), Phase::Either(90));
        for token in [90, 1, 7, 7, 7] {
            assert!(thinking.accept(token, false));
            assert_eq!(thinking.phase(), Phase::Free);
        }
        assert!(thinking.accept(8, false));
        assert_eq!(thinking.phase(), Phase::Answer);
        assert!(!thinking.accept(7, false));
    }

    #[test]
    fn a_spent_budget_forces_what_is_left_of_the_marker() {
        let mut thinking = Thinking::new(markers(), Start::Inside, Some(3), false);
        for token in [1, 2, 7] {
            assert_eq!(thinking.phase(), Phase::Free);
            thinking.accept(token, false);
        }
        for token in [7, 8] {
            assert_eq!(thinking.phase(), Phase::Forced(token));
            thinking.accept(token, false);
        }
        assert_eq!(thinking.phase(), Phase::Answer);
        let none = Thinking::new(markers(), Start::Inside, Some(0), false);
        assert_eq!(none.phase(), Phase::Forced(7));
    }

    #[test]
    fn without_a_form_it_may_begin_again_and_the_budget_is_one_for_all() {
        let mut thinking = Thinking::new(markers(), Start::Answer, Some(4), true);
        for token in [1, 2, 90, 5, 7, 7, 8, 3, 90, 4, 4] {
            assert_eq!(thinking.phase(), Phase::Free, "{token}");
            thinking.accept(token, false);
        }
        // The tokens of the first closing marker do not count as reasoning.
        assert_eq!(thinking.phase(), Phase::Free);
        thinking.accept(4, false);
        for token in [7, 7, 8] {
            assert_eq!(thinking.phase(), Phase::Forced(token));
            thinking.accept(token, false);
        }
        thinking.accept(90, false);
        assert_eq!(thinking.phase(), Phase::Forced(7), "the budget is spent");
        let long = Markers { open: [90, 91].into(), close: [7].into() };
        let mut long = Thinking::new(long, Start::Open, Some(0), true);
        for token in [90, 5, 90, 90] {
            long.accept(token, false);
            assert_eq!(long.phase(), Phase::Free, "the marker opens no reasoning");
        }
        long.accept(91, false);
        assert_eq!(long.phase(), Phase::Forced(7));
    }

    #[test]
    fn an_answer_that_begins_otherwise_has_no_reasoning() {
        let mut thinking = Thinking::new(markers(), Start::Open, Some(5), false);
        assert!(!thinking.accept(4, false));
        assert_eq!(thinking.phase(), Phase::Answer);
        let mut ambiguous = Thinking::new(markers(), Start::Open, Some(5), false);
        assert!(!ambiguous.accept(90, true));
        let long = Markers { open: [90, 91].into(), close: [7].into() };
        let mut long = Thinking::new(long, Start::Open, None, false);
        assert!(long.accept(90, false));
        assert_eq!(long.phase(), Phase::Forced(91));
    }
}
