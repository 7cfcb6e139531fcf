//! Flags about LoRA adapters. The names are those of vLLM, SGLang and llama-server.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Deserialize;

#[derive(Debug, Args)]
#[command(next_help_heading = "Adapters")]
pub(crate) struct AdapterFlags {
    /// Serve LoRA adapters with a generating model. A request names an adapter instead of the
    /// model, and a step may mix adapters.
    #[arg(long)]
    pub(crate) enable_lora: bool,
    /// Adapters to load at start, as NAME=PATH. A path is a PEFT folder or a GGUF file. JSON is
    /// accepted too: {"name": NAME, "path": PATH}.
    #[arg(long, visible_alias = "lora-paths", num_args = 1.., value_name = "NAME=PATH")]
    pub(crate) lora_modules: Vec<String>,
    /// Adapters to load at start, named after their files without the extension.
    #[arg(long, value_name = "FILE")]
    pub(crate) lora: Vec<PathBuf>,
    /// Largest number of different adapters in a step. Device memory is reserved for all of them.
    #[arg(long, visible_alias = "max-loras-per-batch", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) max_loras: u32,
    /// Largest rank of an adapter.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) max_lora_rank: u32,
    /// Number of further adapters that are kept in host memory. All other adapters are read from
    /// disk again when a request names them.
    #[arg(long, visible_alias = "max-loaded-loras", default_value_t = 32, value_parser = clap::value_parser!(u32).range(0..=1024))]
    pub(crate) max_cpu_loras: u32,
    /// Folder from which clients with an admin key may load adapters at run time. If no admin key
    /// is set, any client may, provided that only this machine can reach the server.
    #[arg(long, value_name = "DIR")]
    pub(crate) lora_root: Option<PathBuf>,
}

/// The JSON form of a named adapter.
#[derive(Deserialize)]
struct Named {
    name: String,
    path: PathBuf,
}

impl AdapterFlags {
    /// True if requests may name adapters.
    pub(crate) fn is_enabled(&self) -> bool {
        self.enable_lora
            || !self.lora_modules.is_empty()
            || !self.lora.is_empty()
            || self.lora_root.is_some()
    }

    /// The adapters to load at the start, with their names.
    ///
    /// # Errors
    /// An entry has no name or no path.
    pub(crate) fn named(&self) -> Result<Vec<(String, PathBuf)>> {
        let modules = self.lora_modules.iter().map(|module| {
            if module.trim_start().starts_with('{') {
                let Named { name, path } = serde_json::from_str(module)
                    .with_context(|| format!("--lora-modules {module}"))?;
                return Ok((name, path));
            }
            match module.split_once('=') {
                Some((name, path)) if !path.is_empty() => Ok((name.to_owned(), path.into())),
                _ => bail!("--lora-modules {module}: expected NAME=PATH"),
            }
        });
        let files = self.lora.iter().map(|path| {
            let stem = path.file_stem().and_then(|stem| stem.to_str());
            let stem = stem.with_context(|| format!("--lora {}: no file", path.display()))?;
            Ok((stem.to_owned(), path.clone()))
        });
        modules.chain(files).collect()
    }
}
