//! The adapters of a server: those loaded at start, and a reader for those that clients load.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail, ensure};
use forebay_server::{AdapterFiles, AdapterReader, AdapterSettings, check_adapter_name};
use forebay_weights::{Adapter, AdapterFolder, Shape};
use tracing::warn;

use crate::flags::ServeFlags;
use crate::model::Model;
use crate::resolve::Resolved;

/// Reads the adapters of the command line; `None`: requests can't name adapters.
///
/// # Errors
/// An adapter can't be served under its name.
pub(super) fn settings(
    flags: &ServeFlags,
    model: &Model,
    resolved: &Resolved,
) -> Result<Option<AdapterSettings>> {
    let Some(places) = resolved.hand.lora else { return Ok(None) };
    let shape = model.shape.as_ref().and_then(|shape| shape.decoder());
    let shape = Arc::new(shape.context("the model has no shape")?.clone());
    let mut at_start: Vec<(String, AdapterFiles)> = Vec::new();
    for (name, path) in flags.adapters.named()? {
        check_adapter_name(&name).map_err(|why| anyhow!("--lora-modules {name}: {why}"))?;
        ensure!(
            !resolved.model.served_model_names.contains(&name),
            "--lora-modules {name}: the model has this name"
        );
        if at_start.iter().any(|(other, _)| *other == name) {
            bail!("--lora-modules {name}: two adapters have this name");
        }
        let files = read(&AdapterFolder::Anywhere, &path, &path, &shape, places.rank);
        at_start.push((name, files.map_err(|why| anyhow!("--lora-modules: {why}"))?));
    }
    let reader = flags.adapters.lora_root.as_deref().map(|root| reader(root, &shape, places.rank));
    Ok(Some(AdapterSettings { at_start, reader: reader.transpose()?, open: is_local(flags) }))
}

/// Creates the reader of adapters in the folder `root`.
fn reader(root: &Path, shape: &Arc<Shape>, rank: u32) -> Result<AdapterReader> {
    let named = || format!("--lora-root {}", root.display());
    let folder = AdapterFolder::below(root).with_context(named)?;
    let root = root.canonicalize().with_context(named)?;
    let shape = Arc::clone(shape);
    Ok(Arc::new(move |path| {
        // Clients may send a path relative to `root`, or an absolute path.
        let below = path.strip_prefix(&root).unwrap_or(path);
        read(&folder, below, path, &shape, rank)
    }))
}

fn read(
    folder: &AdapterFolder,
    below: &Path,
    path: &Path,
    shape: &Shape,
    rank: u32,
) -> Result<AdapterFiles, String> {
    let read = Adapter::read(folder, below, shape, rank).map_err(|error| error.to_string())?;
    for warning in &read.warnings {
        warn!(adapter = %path.display(), "{warning}");
    }
    let Adapter { digest, modules, manifest, .. } = read;
    Ok(AdapterFiles { path: path.to_owned(), digest, modules, manifest })
}

/// True if no other machine can reach the server.
pub(super) fn is_local(flags: &ServeFlags) -> bool {
    let host = flags.listen.host.as_str();
    let loopback = host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    flags.listen.uds.is_some() || loopback || host == "localhost"
}
