//! Adapters by their names: loaded at startup and at run time, and registered with the engine.
//!
//! Loading different content under an existing name creates a new adapter with a new id. Running
//! requests keep the old adapter, and the two share no block of the prefix cache.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use forebay_api::ApiError;
use forebay_egress::{AdapterCounts, AdapterLoad, Engine};
use forebay_engine::AdapterOrder;
use parking_lot::RwLock;
use serde_json::Value;
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;

use crate::state::now;

/// The maximum number of adapter names.
const MOST_NAMES: usize = 1024;
/// The maximum length of a name in bytes.
const NAME_BYTES: usize = 128;

/// The checked files of an adapter.
#[derive(Debug, Clone)]
pub struct AdapterFiles {
    /// The path as it was configured or requested.
    pub path: PathBuf,
    /// A hash of the content.
    pub digest: String,
    /// The modules that the adapter changes, each by the last component of its name.
    pub modules: Vec<String>,
    /// The locations of the adapter's matrices in files, for the hands.
    pub manifest: Value,
}

/// Reads and checks the files of an adapter. The error is a one-line message for the client.
pub type AdapterReader = Arc<dyn Fn(&Path) -> Result<AdapterFiles, String> + Send + Sync>;

/// The adapters of a server.
#[derive(Clone)]
pub struct AdapterSettings {
    /// Adapters that are loaded at startup, by name.
    pub at_start: Vec<(String, AdapterFiles)>,
    /// Reads adapters that clients load; `None`: clients can't load any.
    pub reader: Option<AdapterReader>,
    /// True if clients may load adapters without an admin key.
    pub open: bool,
}

impl std::fmt::Debug for AdapterSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&String> = self.at_start.iter().map(|(name, _)| name).collect();
        f.debug_struct("AdapterSettings").field("at_start", &names).finish_non_exhaustive()
    }
}

/// An adapter that requests may name.
#[derive(Debug)]
pub(crate) struct NamedAdapter {
    /// The adapter's id in the engine. Adapters with the same content share an id.
    pub(crate) id: u32,
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    pub(crate) digest: String,
    /// The time of the load, in seconds since 1970.
    pub(crate) loaded: u64,
    /// Counts the requests that use the adapter under this name.
    pub(crate) load: Arc<AdapterLoad>,
}

/// All adapters.
pub(crate) struct Adapters {
    settings: AdapterSettings,
    engine: Arc<dyn Engine>,
    names: RwLock<BTreeMap<String, Arc<NamedAdapter>>>,
    next_id: AtomicU32,
    /// Held during a load, so that only one load runs at a time.
    loading: Mutex<()>,
    reads: AtomicU64,
    failed_reads: AtomicU64,
}

impl Adapters {
    pub(crate) fn new(settings: AdapterSettings, engine: Arc<dyn Engine>) -> Self {
        let adapters = Self {
            engine,
            names: RwLock::default(),
            next_id: AtomicU32::new(1),
            loading: Mutex::default(),
            reads: AtomicU64::new(0),
            failed_reads: AtomicU64::new(0),
            settings,
        };
        for (name, files) in &adapters.settings.at_start {
            adapters.enter(name, files);
        }
        adapters
    }

    pub(crate) fn find(&self, name: &str) -> Option<Arc<NamedAdapter>> {
        self.names.read().get(name).cloned()
    }

    /// Returns all adapters, sorted by name.
    pub(crate) fn all(&self) -> Vec<Arc<NamedAdapter>> {
        self.names.read().values().cloned().collect()
    }

    /// True if clients may load adapters without an admin key.
    pub(crate) fn is_open(&self) -> bool {
        self.settings.open
    }

    /// Registers files under a name. The engine forgets the adapter that had the name before,
    /// unless another name refers to it.
    fn enter(&self, name: &str, files: &AdapterFiles) {
        let mut names = self.names.write();
        let same = names.values().find(|other| other.digest == files.digest);
        let id = same.map_or_else(
            || {
                let id = self.next_id.fetch_add(1, Ordering::Relaxed);
                let manifest = files.manifest.clone();
                // Send the adapter to the hands before any request can name it.
                self.engine.adapter(&AdapterOrder::Know { id, manifest });
                id
            },
            |other| other.id,
        );
        let adapter = NamedAdapter {
            id,
            name: name.to_owned(),
            path: files.path.clone(),
            digest: files.digest.clone(),
            loaded: now(),
            load: Arc::new(AdapterLoad::new(name.to_owned())),
        };
        let old = names.insert(name.to_owned(), Arc::new(adapter));
        self.gone(&names, old.as_deref());
    }

    /// Makes the engine forget `adapter`, which a name no longer refers to, unless another of
    /// `names` refers to it.
    fn gone(&self, names: &BTreeMap<String, Arc<NamedAdapter>>, adapter: Option<&NamedAdapter>) {
        let Some(&NamedAdapter { id, .. }) = adapter else { return };
        if names.values().all(|other| other.id != id) {
            self.engine.adapter(&AdapterOrder::Forget { id });
        }
    }

    /// Loads an adapter for a client. `in_place` allows new content for a name that is in use.
    ///
    /// # Errors
    /// Clients may not load adapters, too many are loaded, the name is taken, or the files can't be
    /// served.
    pub(crate) async fn load(
        &self,
        name: &str,
        path: PathBuf,
        in_place: bool,
    ) -> Result<(), ApiError> {
        let Some(reader) = self.settings.reader.clone() else { return Err(closed()) };
        let _alone = self.loading.lock().await;
        let (taken, count) = {
            let names = self.names.read();
            (names.get(name).cloned(), names.len())
        };
        if taken.is_none() && count >= MOST_NAMES {
            let reason = format!("{MOST_NAMES} adapters are loaded, and no more may be");
            return Err(ApiError::invalid("lora_name", reason));
        }
        self.reads.fetch_add(1, Ordering::Relaxed);
        let read = spawn_blocking(move || reader(&path)).await;
        let read = read.unwrap_or_else(|_| Err("the reader has failed".into()));
        let files = read.map_err(|reason| {
            self.failed_reads.fetch_add(1, Ordering::Relaxed);
            ApiError::invalid("lora_path", reason)
        })?;
        if let Some(facts) = self.engine.facts() {
            let known = &facts.hand.lora_modules;
            if let Some(module) = files.modules.iter().find(|module| !known.contains(module)) {
                let reason = format!("it changes {module}, which the model process does not");
                return Err(ApiError::invalid("lora_path", reason));
            }
        }
        match taken {
            Some(taken) if taken.digest == files.digest => Ok(()),
            Some(_) if !in_place => Err(ApiError::Conflict {
                reason: format!(
                    "an adapter `{name}` with other content is loaded: unload it first, or set `load_inplace`"
                ),
            }),
            _ => {
                self.enter(name, &files);
                Ok(())
            }
        }
    }

    /// Removes a name. Running requests finish.
    ///
    /// # Errors
    /// No adapter has the name, or clients may not load and unload adapters.
    pub(crate) fn unload(&self, name: &str) -> Result<(), ApiError> {
        if self.settings.reader.is_none() {
            return Err(closed());
        }
        let mut names = self.names.write();
        let Some(adapter) = names.remove(name) else {
            let served = names.keys().cloned().collect();
            return Err(ApiError::UnknownModel { model: name.to_owned(), served });
        };
        self.gone(&names, Some(&adapter));
        Ok(())
    }

    pub(crate) fn counts(&self) -> AdapterCounts {
        let load = |adapter: &Arc<NamedAdapter>| Arc::clone(&adapter.load);
        AdapterCounts {
            loads: self.names.read().values().map(load).collect(),
            reads: self.reads.load(Ordering::Relaxed),
            failed_reads: self.failed_reads.load(Ordering::Relaxed),
        }
    }
}

/// Checks that `name` is a valid adapter name.
///
/// # Errors
/// The name is not valid.
pub fn check_adapter_name(name: &str) -> Result<(), String> {
    let fine = |byte: u8| byte.is_ascii_alphanumeric() || b"._:/-".contains(&byte);
    if name.is_empty() || name.len() > NAME_BYTES || !name.bytes().all(fine) {
        return Err(format!(
            "an adapter's name has 1 to {NAME_BYTES} letters, digits, and characters of ._:/-"
        ));
    }
    Ok(())
}

fn closed() -> ApiError {
    let reason = "adapters are loaded at the start only: --lora-root names a folder from which clients may load some".to_owned();
    ApiError::Forbidden { reason, code: "lora_root_needed" }
}
