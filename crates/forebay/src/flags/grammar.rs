//! Flags about the form of answers.

use std::num::NonZeroUsize;

use clap::Args;
use forebay_machine::Processors;

/// Cores for each thread that helps with masks: a step waits for its masks only where it has many.
const CORES_A_HELPER: usize = 8;
const MOST_HELPERS: usize = 8;

#[derive(Debug, Args)]
#[command(next_help_heading = "Form of answers")]
pub(crate) struct GrammarFlags {
    /// Answers have any form: requests with `response_format` and the like get 400. Saves the trie
    /// of the vocabulary.
    #[arg(long)]
    pub(crate) no_grammar: bool,
    /// Threads that compile schemas and grammars.
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) grammar_threads: NonZeroUsize,
    /// Threads that fill masks beside the engine's, if a step has more than eight [default: one for
    /// every 8 cores].
    #[arg(long, value_name = "N")]
    pub(crate) mask_threads: Option<usize>,
    /// Take schemas of which only a part can be kept: keywords that are not known are left out, and
    /// `oneOf` is read as `anyOf`.
    #[arg(long)]
    pub(crate) grammar_lenient: bool,
}

impl GrammarFlags {
    /// Threads that fill masks.
    pub(crate) fn helpers(&self, processors: &Processors) -> usize {
        let usual = (processors.threads() / CORES_A_HELPER).min(MOST_HELPERS);
        self.mask_threads.unwrap_or(usual)
    }
}
