//! The settings and results of sparse decoding from host memory, in a plan.

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use forebay_scheduler::{Sparse, SparseStats};
use forebay_sim::{Profile, SaveOrder};
use serde::Serialize;

/// Flags about sparse decoding.
#[derive(Debug, Clone, Args, Serialize)]
pub struct SparseArgs {
    /// Keep most of the KV cache of running requests only in host memory, if the profile's model
    /// has sparse attention.
    #[arg(long)]
    pub enable_hisparse: bool,
    /// Number of positions that a sparse request keeps on the device besides its last pages
    /// [default: twice the model's top-k].
    #[arg(long, value_name = "TOKENS", requires = "enable_hisparse", value_parser = clap::value_parser!(u32).range(1..=32_767))]
    pub hot_buffer_tokens: Option<u32>,
    /// Number of positions per row and layer that are missing on the device, and are copied from
    /// host memory [default: the profile's].
    #[arg(long, value_name = "ROWS", requires = "enable_hisparse")]
    pub miss_rows: Option<u32>,
    /// Save whole pages once they are full, or each position in the step that computes it.
    #[arg(long, value_enum, default_value_t)]
    pub kv_save: KvSave,
    /// Which work waits for saves to the host. `behind`: none; `fence`: the rows of the next step;
    /// `inline`: the whole next step.
    #[arg(long, value_enum, default_value_t)]
    pub kv_save_order: KvSaveOrder,
}

/// The unit in which KV cache is saved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KvSave {
    /// Each page is saved once it is full.
    #[default]
    Page,
    /// Each position is saved in the step that computes it.
    Token,
}

/// The work that waits for saves to the host tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KvSaveOrder {
    /// No work waits for saves.
    #[default]
    Behind,
    /// The rows of the next step.
    Fence,
    /// The whole next step.
    Inline,
}

impl KvSaveOrder {
    /// The name in a hand's configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Behind => "behind",
            Self::Fence => "fence",
            Self::Inline => "inline",
        }
    }
}

impl From<KvSaveOrder> for SaveOrder {
    fn from(order: KvSaveOrder) -> Self {
        match order {
            KvSaveOrder::Behind => Self::Behind,
            KvSaveOrder::Fence => Self::Fence,
            KvSaveOrder::Inline => Self::Inline,
        }
    }
}

impl SparseArgs {
    /// The scheduler's settings of sparse decoding; `None` if it is off.
    ///
    /// # Errors
    /// The profile's model does not use sparse attention, or selects more positions than are kept.
    pub(crate) fn resolve(&self, profile: &Profile, page_size: u32) -> Result<Option<Sparse>> {
        if !self.enable_hisparse {
            return Ok(None);
        }
        let tokens = hot_row_tokens(profile, self.hot_buffer_tokens, page_size)?;
        let save_rows = self.kv_save == KvSave::Token;
        Ok(Some(Sparse { row_pages: tokens / page_size, save_rows }))
    }
}

/// The number of positions that a sparse slot of a simulated device keeps, in whole pages.
///
/// # Errors
/// The profile's model does not use sparse attention, or selects more positions than are kept.
pub fn hot_row_tokens(profile: &Profile, wanted: Option<u32>, page_size: u32) -> Result<u32> {
    let (name, top_k) = (&profile.name, profile.sparse.top_k);
    if top_k == 0 {
        bail!(
            "--enable-hisparse: the model of profile {name} reads all positions (sparse.top_k is 0)"
        );
    }
    let tokens = wanted.unwrap_or(2 * top_k);
    if tokens < top_k {
        bail!(
            "--hot-buffer-tokens {tokens}: fewer than the {top_k} positions that the model chooses"
        );
    }
    Ok(tokens.next_multiple_of(page_size))
}

/// The effect of sparse decoding in a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct SparseOutcome {
    /// How often a request became sparse.
    pub(crate) conversions: u64,
    /// The number of pages that were dropped from running requests.
    pub(crate) pages_dropped: u64,
    /// The number of positions that were copied from host memory, over all rows and layers.
    pub(crate) missed: u64,
    /// Seconds for which rows waited for saves.
    pub(crate) waited_s: f64,
}

impl SparseOutcome {
    pub(crate) fn add(&mut self, stats: &SparseStats) {
        self.conversions += stats.conversions;
        self.pages_dropped += stats.pages_dropped;
        self.missed += stats.missed;
        self.waited_s += stats.waited_us as f64 / 1e6;
    }
}
