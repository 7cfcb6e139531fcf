//! Flags about layers with a sliding window.

use clap::Args;

use super::schedule::fraction;

#[derive(Debug, Args)]
#[command(next_help_heading = "Layers with a window")]
pub(crate) struct WindowFlags {
    /// Keep layers with a sliding window in the same page pool as the other layers. Their pages are
    /// then not freed when the window moves past them.
    #[arg(long, visible_alias = "disable-hybrid-swa-memory")]
    pub(crate) disable_hybrid_kv_cache_manager: bool,
    /// Number of pages of layers with a sliding window, relative to the pages of the other layers.
    #[arg(long, value_name = "RATIO", default_value_t = 0.5, value_parser = fraction, conflicts_with = "disable_hybrid_kv_cache_manager")]
    pub(crate) swa_full_tokens_ratio: f64,
}

impl WindowFlags {
    /// The number of pages of layers with a window relative to those of other layers; `None`: one
    /// pool for all layers.
    pub(crate) fn ratio(&self) -> Option<f64> {
        (!self.disable_hybrid_kv_cache_manager).then_some(self.swa_full_tokens_ratio)
    }
}
