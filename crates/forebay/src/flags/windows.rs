//! Flags about layers with a window.

use clap::Args;

use super::schedule::fraction;

#[derive(Debug, Args)]
#[command(next_help_heading = "Layers with a window")]
pub(crate) struct WindowFlags {
    /// Keep layers with a sliding window in the same page pool as the others. Their pages then stay
    /// after the window has passed them.
    #[arg(long, visible_alias = "disable-hybrid-swa-memory")]
    pub(crate) disable_hybrid_kv_cache_manager: bool,
    /// Pages of layers with a sliding window, relative to the pages of the other layers.
    #[arg(long, value_name = "RATIO", default_value_t = 0.5, value_parser = fraction, conflicts_with = "disable_hybrid_kv_cache_manager")]
    pub(crate) swa_full_tokens_ratio: f64,
}

impl WindowFlags {
    /// Pages of the window part relative to the main part; `None`: one pool for all layers.
    pub(crate) fn ratio(&self) -> Option<f64> {
        (!self.disable_hybrid_kv_cache_manager).then_some(self.swa_full_tokens_ratio)
    }
}
