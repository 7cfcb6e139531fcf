//! The cache of packed weights, which the next start reuses: its conditions and file names.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use forebay_kernels::{Threads, build};
use forebay_protocol::HandConfig;
use forebay_weights::{Entry, PackedFile, content_key};
use rustix::process::nice;
use serde_json::{Map, Value, json};

use crate::blocks::quantization;
use crate::load::{Loaded, Plan, rooms, shared};
use crate::pooled::kind;

/// The cache's folder within the model's cache folder.
const FOLDER: &str = "packed";
const LOWEST_PRIORITY: i32 = 19;

/// The packed weights of a decoder on disk.
pub(crate) struct Kept {
    file: PackedFile,
    was_read: bool,
}

impl Kept {
    /// Opens the cached weights of a configuration; `None` if this configuration is never cached.
    pub(crate) fn open(config: &HandConfig) -> Option<Self> {
        let model = &config.model;
        let folder = model.get("cache").and_then(Value::as_str)?;
        let pools = kind(config).is_some();
        if pools || config.weight_cache_bytes == 0 || config.load_format != "auto" {
            return None;
        }
        let facts = json!({
            "order": build(),
            "dtype": format!("torch.{}", config.dtype),
            "quantization": quantization(config),
            "format": model.get("format"),
            "config": model.get("config"),
        });
        // An error here is not reported, because loading the files reports it.
        let key = content_key(&files(model), &facts).ok()?;
        let file =
            PackedFile::open(&Path::new(folder).join(FOLDER), &key, config.weight_cache_bytes);
        Some(Self { file, was_read: false })
    }

    /// The format of each matrix in the checkpoint; `None` if the cache does not state the formats.
    pub(crate) fn stored(&self) -> Option<BTreeMap<String, String>> {
        let text = self.file.notes()?.get("stored")?.as_str()?;
        serde_json::from_str(text).ok()
    }

    /// Reads the weights; `None` if the checkpoint has to be loaded.
    pub(crate) fn load(
        &mut self,
        plan: &Plan,
        threads: &Threads,
        report: &(dyn Fn(usize, usize) + Sync),
    ) -> Option<Loaded> {
        self.file.notes()?;
        let entries = plan.entries();
        let fits = |(name, entry): &(&str, Entry)| self.file.entry(name) == Some(entry);
        if !entries.iter().all(fits) {
            return None;
        }
        let mut rooms = rooms(plan).ok()?;
        let into = rooms.iter_mut().map(|(name, room)| (name.as_str(), &mut room[..])).collect();
        let total = entries.len();
        let report = |done: u64, all: u64| {
            report((total as u128 * u128::from(done) / u128::from(all.max(1))) as usize, total);
        };
        let read = self.file.read(into, |count, work| threads.each(count, work), &report);
        self.was_read = read;
        read.then(|| shared(rooms))
    }

    /// Removes the files that were read, because their content is wrong. Returns false if none were
    /// read.
    pub(crate) fn discard(&mut self) -> bool {
        if self.was_read {
            self.file.remove();
        }
        self.was_read
    }

    /// Starts a thread that writes the final weights, unless the files exist.
    pub(crate) fn save(self, plan: &Plan, loaded: Loaded) {
        if self.was_read {
            return;
        }
        let entries: Vec<(String, Entry)> =
            plan.entries().into_iter().map(|(name, entry)| (name.to_owned(), entry)).collect();
        let stored = json!(plan.formats().stored);
        let mut notes = Map::new();
        notes.insert("stored".into(), stored.to_string().into());
        let write = move || {
            // On Linux, `nice` affects only the calling thread. Steps get priority.
            let _ = nice(LOWEST_PRIORITY);
            let tensors: Vec<(&str, &Entry, &[u8])> = entries
                .iter()
                .filter_map(|(name, entry)| Some((name.as_str(), entry, &loaded.get(name)?[..])))
                .collect();
            self.file.write(&tensors, &notes);
        };
        // The process may exit without waiting for this thread. The next writer removes an
        // incomplete file.
        let started = std::thread::Builder::new().name("keep-weights".into()).spawn(write);
        if let Err(error) = started {
            eprintln!("the weights are not kept: {error}");
        }
    }
}

/// The paths of the model's files, as the brain's configuration lists them.
pub(crate) fn files(model: &Value) -> Vec<PathBuf> {
    let files = model.get("files").and_then(Value::as_array).into_iter().flatten();
    files.filter_map(Value::as_str).map(PathBuf::from).collect()
}
