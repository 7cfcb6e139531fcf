//! Flags about structured output.

use std::num::NonZeroUsize;
use std::time::Duration;

use clap::Args;
use forebay_engine::EngineConfig;
use forebay_grammar::GrammarConfig;
use forebay_machine::Processors;

use super::duration::seconds;

/// The number of cores per mask thread by default. One thread suffices on small machines: masks
/// delay steps only on machines with many cores.
const CORES_A_HELPER: usize = 8;
const MOST_HELPERS: usize = 8;

#[derive(Debug, Args)]
#[command(next_help_heading = "Structured output")]
pub(crate) struct GrammarFlags {
    /// Disable structured output: requests with `response_format` and similar parameters are
    /// answered 400. This saves the memory of the vocabulary's trie.
    #[arg(long)]
    pub(crate) no_grammar: bool,
    /// Number of threads that compile schemas and grammars.
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) grammar_threads: NonZeroUsize,
    /// Longest time in seconds to compile a schema or grammar. Slower ones are refused.
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = seconds)]
    pub(crate) grammar_timeout: Duration,
    /// Size in bytes of the cache of compiled schemas and grammars. While several clients use the
    /// cache, each client may fill at most half of it.
    #[arg(long, value_name = "BYTES", default_value_t = GrammarConfig::default().grammar_cache_bytes)]
    pub(crate) grammar_cache_bytes: usize,
    /// Number of threads that compute token masks besides the engine thread. They compute expensive
    /// masks, and also cheap masks if a step has more than eight of these [default: one for every 8
    /// cores, from 1 to 8].
    #[arg(long, value_name = "N")]
    pub(crate) mask_threads: Option<NonZeroUsize>,
    /// Longest wait of a step for token masks, as a percentage of the step's time, but at least 2
    /// and at most 20 milliseconds. A request whose mask is late gets no token in this step.
    #[arg(long, value_name = "PERCENT", default_value_t = EngineConfig::default().mask_share, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) mask_share: u32,
    /// Accept schemas that can be enforced only partly: unknown keywords are ignored, and `oneOf`
    /// is treated as `anyOf`.
    #[arg(long)]
    pub(crate) grammar_lenient: bool,
}

impl GrammarFlags {
    /// True if grammars are compiled. `pools`: the model is a pooling model, which generates no
    /// answers.
    pub(crate) fn wanted(&self, pools: bool) -> bool {
        !self.no_grammar && !pools
    }

    /// The settings of the grammar compiler.
    pub(crate) fn compiler(&self) -> GrammarConfig {
        GrammarConfig {
            grammar_threads: self.grammar_threads.get(),
            grammar_timeout: self.grammar_timeout,
            grammar_cache_bytes: self.grammar_cache_bytes,
            grammar_lenient: self.grammar_lenient,
            ..GrammarConfig::default()
        }
    }

    /// The number of threads that fill masks.
    pub(crate) fn helpers(&self, processors: &Processors) -> usize {
        let usual = (processors.threads() / CORES_A_HELPER).clamp(1, MOST_HELPERS);
        self.mask_threads.map_or(usual, NonZeroUsize::get)
    }
}
