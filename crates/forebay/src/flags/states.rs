//! Flags about recurrent states.

use clap::Args;
use forebay_engine::StateCache;

#[derive(Debug, Args)]
#[command(next_help_heading = "Recurrent states")]
pub(crate) struct StateFlags {
    /// Do not cache recurrent states for later requests.
    #[arg(long)]
    pub(crate) disable_state_cache: bool,
    /// Number of tokens between two cached states of a prompt. States are also cached where prompts
    /// and answers end, and where prompts diverge. 0: only there.
    #[arg(long, value_name = "TOKENS", default_value_t = StateCache::INTERVAL)]
    pub(crate) state_interval: u32,
    /// Largest number of cached states [default: as many as fit].
    #[arg(long, value_name = "N", conflicts_with = "disable_state_cache", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_state_pages: Option<u32>,
}

impl StateFlags {
    /// The number of state pages; `None`: the hand chooses.
    pub(crate) fn pages(&self) -> Option<u32> {
        self.max_state_pages.or(self.disable_state_cache.then_some(0))
    }
}
