//! Counts the tokens of a call, for its usage.

use std::ops::Range;

use forebay_api::Usage;
use forebay_engine::PredictedTokens;

use crate::delta::Delta;

/// The tokens of a call so far.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    /// The number of tokens of each prompt.
    prompts: Vec<u32>,
    /// The number of tokens of each prompt that were found in the prefix cache.
    cached: Vec<u32>,
    /// True if the client may not see the number of cached tokens.
    hidden: bool,
    /// The number of generated tokens of each choice.
    generated: Vec<u32>,
    /// The number of reasoning tokens of each choice.
    reasoning: Vec<u32>,
    /// True if reasoning tokens are reported, because the model reasons.
    reasons: bool,
    /// The verified tokens of the predicted output for each choice; `None` if there is no
    /// prediction.
    predicted: Option<Vec<PredictedTokens>>,
    /// The index of each choice's prompt.
    prompt_of: Vec<usize>,
}

impl Tally {
    /// Creates the tally from each prompt's number of tokens and number of choices.
    pub fn new(prompts: impl Iterator<Item = (u32, u32)>) -> Self {
        let mut tally = Self::default();
        for (index, (tokens, choices)) in prompts.enumerate() {
            tally.prompts.push(tokens);
            tally.cached.push(0);
            tally.prompt_of.extend((0..choices).map(|_| index));
        }
        tally.generated = vec![0; tally.prompt_of.len()];
        tally.reasoning = tally.generated.clone();
        tally
    }

    /// Omits the number of cached tokens from the usage.
    pub fn hide_cached(&mut self) {
        self.hidden = true;
    }

    /// Includes the number of reasoning tokens in the usage.
    pub fn show_reasoning(&mut self) {
        self.reasons = true;
    }

    /// Includes the verified tokens of the predicted output in the usage.
    pub fn show_predicted(&mut self) {
        self.predicted = Some(vec![PredictedTokens::default(); self.choices()]);
    }

    fn told(&self, usage: Usage, choices: Range<usize>) -> Usage {
        let mut usage = usage;
        if self.reasons {
            usage = usage.with_reasoning(self.reasoning[choices.clone()].iter().sum());
        }
        if let Some(predicted) = &self.predicted {
            let mut sum = PredictedTokens::default();
            predicted[choices].iter().for_each(|choice| sum += *choice);
            usage = usage.with_prediction(sum.accepted, sum.rejected);
        }
        usage
    }

    fn shown(&self, cached: u32) -> Option<u32> {
        (!self.hidden).then_some(cached)
    }

    /// Returns the number of choices of all prompts.
    pub fn choices(&self) -> usize {
        self.generated.len()
    }

    /// Returns the number of tokens of all prompts.
    pub fn prompt_tokens(&self) -> u32 {
        self.prompts.iter().sum()
    }

    /// Returns the number of tokens generated in all choices.
    pub fn generated_tokens(&self) -> u32 {
        self.generated.iter().sum()
    }

    /// Returns the usage of the whole call, with each prompt counted once.
    pub fn usage(&self) -> Usage {
        let cached = self.shown(self.cached.iter().sum());
        let usage = Usage::new(self.prompt_tokens(), self.generated_tokens(), cached);
        self.told(usage, 0..self.choices())
    }

    /// Returns the usage before the first token is generated.
    pub fn usage_before(&self) -> Usage {
        let usage = Usage::new(self.prompt_tokens(), 0, self.shown(self.cached.iter().sum()));
        self.told(usage, 0..0)
    }

    /// Returns the usage of one choice.
    pub fn usage_of(&self, choice: u32) -> Usage {
        let prompt = self.prompt_of[choice as usize];
        let generated = self.generated[choice as usize];
        let usage = Usage::new(self.prompts[prompt], generated, self.shown(self.cached[prompt]));
        self.told(usage, choice as usize..choice as usize + 1)
    }

    /// Adds the tokens of a delta.
    pub fn add(&mut self, choice: u32, delta: &Delta) {
        let prompt = self.prompt_of[choice as usize];
        self.generated[choice as usize] += u32::try_from(delta.tokens.len()).unwrap_or(u32::MAX);
        self.reasoning[choice as usize] += delta.reasoning_tokens;
        if let Some(predicted) = &mut self.predicted {
            predicted[choice as usize] += delta.predicted;
        }
        if let Some(cached) = delta.cached_tokens {
            // The choices of a prompt share its pages, so the largest count of its choices is
            // reported.
            self.cached[prompt] = self.cached[prompt].max(cached);
        }
    }
}
