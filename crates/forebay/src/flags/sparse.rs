//! Flags about sparse decoding from host memory, by SGLang's names.

use clap::Args;
use forebay_capacity::{KvSave, KvSaveOrder};
use serde::Deserialize;

#[derive(Debug, Args)]
#[command(next_help_heading = "Sparse decoding")]
pub(crate) struct SparseFlags {
    /// For models with sparse attention: keep most of the KV cache of running requests only in host
    /// memory. Turns on the host tier.
    #[arg(long)]
    pub(crate) enable_hisparse: bool,
    /// Settings of sparse decoding as a JSON object, as in SGLang: top_k, device_buffer_size,
    /// host_to_device_ratio.
    #[arg(long, value_name = "JSON", value_parser = parsed)]
    pub(crate) hisparse_config: Option<HisparseConfig>,
    /// Number of positions that a sparse request keeps on the device besides its last pages, at
    /// least the model's top-k [default: twice the top-k].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=32_767))]
    pub(crate) hot_buffer_tokens: Option<u32>,
    /// For measurements: save whole pages once they are full, or each position in the step that
    /// computes it [default: page].
    #[arg(long, value_enum)]
    pub(crate) kv_save: Option<KvSave>,
    /// For measurements: which work waits for saves. `behind`: none; `fence`: the rows of the next
    /// step; `inline`: the whole next step [default: behind].
    #[arg(long, value_enum)]
    pub(crate) kv_save_order: Option<KvSaveOrder>,
}

/// SGLang's `--hisparse-config`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct HisparseConfig {
    pub(crate) top_k: Option<u32>,
    pub(crate) device_buffer_size: Option<u32>,
    pub(crate) host_to_device_ratio: Option<f64>,
}

impl SparseFlags {
    /// The first given flag of sparse decoding.
    pub(crate) fn given(&self) -> Option<&'static str> {
        let flags = [
            ("--hisparse-config", self.hisparse_config.is_some()),
            ("--hot-buffer-tokens", self.hot_buffer_tokens.is_some()),
            ("--kv-save", self.kv_save.is_some()),
            ("--kv-save-order", self.kv_save_order.is_some()),
        ];
        flags.into_iter().find(|(_, given)| *given).map(|(name, _)| name)
    }
}

fn parsed(text: &str) -> Result<HisparseConfig, String> {
    let config: HisparseConfig = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let ratio = config.host_to_device_ratio;
    if ratio.is_some_and(|ratio| !(ratio > 0.0 && ratio <= 1000.0)) {
        return Err("host_to_device_ratio: expected a number above 0 and at most 1000".into());
    }
    if config.device_buffer_size.is_some_and(|size| !(1..=32_767).contains(&size)) {
        return Err("device_buffer_size: expected 1 to 32767 tokens".into());
    }
    Ok(config)
}
