//! Flags about recurrent states.

use clap::Args;
use forebay_engine::StateCache;

#[derive(Debug, Args)]
#[command(next_help_heading = "Recurrent states")]
pub(crate) struct StateFlags {
    /// Do not keep recurrent states for the prefix cache.
    #[arg(long)]
    pub(crate) disable_state_cache: bool,
    /// Tokens between two kept states of a prompt. States are also kept where prompts and answers
    /// end, and where prompts diverge; 0: only there.
    #[arg(long, value_name = "TOKENS", default_value_t = StateCache::INTERVAL)]
    pub(crate) state_interval: u32,
    /// The largest number of kept states [default: as many as the hand has memory for].
    #[arg(long, value_name = "N", conflicts_with = "disable_state_cache", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_state_pages: Option<u32>,
}

impl StateFlags {
    /// State pages of the hand; `None`: it chooses a number.
    pub(crate) fn pages(&self) -> Option<u32> {
        self.max_state_pages.or(self.disable_state_cache.then_some(0))
    }
}
