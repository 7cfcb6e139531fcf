//! Weight updates at run time, and the pauses around them.
//!
//! All replicas are paused. The first replica starts its hand with the new weights, and the others
//! follow if that has succeeded. If one of the others fails, all replicas return to the old
//! weights.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use forebay_api::ApiError;
use forebay_egress::Engine;
use forebay_engine::{EngineHandle, PauseMode, Reload, Status};
use parking_lot::RwLock;
use serde_json::Value;
use tokio::sync::{Mutex, OwnedMutexGuard, oneshot};
use tokio::task::spawn_blocking;

use crate::state::not_serving;
use crate::weight_files::{ParameterValues, TensorFolder, WeightFiles};

/// The default name of the weights, as in SGLang.
const FIRST_VERSION: &str = "default";
/// The maximum length of a version in bytes.
const VERSION_BYTES: usize = 128;

/// The settings of a server whose hands can load other weights.
#[derive(Clone)]
pub struct WeightSettings {
    /// The model description with which hands start.
    pub model: Value,
    /// Access to the files with weights.
    pub files: Arc<dyn WeightFiles>,
    /// True if clients may change weights without an admin key.
    pub open: bool,
}

impl std::fmt::Debug for WeightSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WeightSettings").field("open", &self.open).finish_non_exhaustive()
    }
}

/// The name of the current weights. Clones share the name.
#[derive(Debug, Clone)]
pub(crate) struct WeightVersion(Arc<RwLock<Arc<str>>>);

impl WeightVersion {
    pub(crate) fn now(&self) -> Arc<str> {
        Arc::clone(&self.0.read())
    }

    /// Changes the name of the weights.
    ///
    /// # Errors
    /// The name is too long.
    pub(crate) fn set(&self, version: &str) -> Result<(), ApiError> {
        check_version(version)?;
        *self.0.write() = version.into();
        Ok(())
    }
}

/// Checks a name of weights.
///
/// # Errors
/// The name is too long.
fn check_version(version: &str) -> Result<(), ApiError> {
    if version.len() <= VERSION_BYTES {
        return Ok(());
    }
    let reason =
        format!("`weight_version` has {} bytes, and {VERSION_BYTES} at most", version.len());
    Err(ApiError::invalid("weight_version", reason))
}

/// The source of new weights.
pub(crate) enum Source {
    /// A complete checkpoint, in a folder or GGUF file.
    Path(PathBuf),
    /// Tensors in these files of the folder replace tensors of the served checkpoint.
    Tensors(TensorFolder, Vec<PathBuf>),
}

/// An update of weights that a client requests.
pub(crate) struct Update {
    pub(crate) source: Source,
    /// The request parameter that specifies the weights. Errors name this parameter.
    pub(crate) param: &'static str,
    pub(crate) version: Option<String>,
    /// True if requests are aborted before the update.
    pub(crate) aborts: bool,
    /// True if the engine stays paused after the update.
    pub(crate) keeps_pause: bool,
}

/// The model that the hands have loaded.
struct ServedWeights {
    /// The model's description for hands.
    model: Value,
    /// The folder with replaced tensors; `None`: no tensors were replaced.
    #[expect(dead_code, reason = "its end removes the folder")]
    folder: Option<TensorFolder>,
}

/// The pauses and the weights of a server.
pub(crate) struct Weights {
    engine: Arc<dyn Engine>,
    settings: Option<WeightSettings>,
    version: WeightVersion,
    /// True while a client's pause lasts.
    paused: AtomicBool,
    /// The hands' current model. Locked by the pause, resume or update that is running.
    served: Mutex<ServedWeights>,
    /// Locked while tensors are received, so that only one update uses disk space at a time.
    receiving: Arc<Mutex<()>>,
    next_id: AtomicU64,
}

impl Weights {
    pub(crate) fn new(settings: Option<WeightSettings>, engine: Arc<dyn Engine>) -> Arc<Self> {
        let model = settings.as_ref().map_or(Value::Null, |settings| settings.model.clone());
        Arc::new(Self {
            engine,
            settings,
            version: WeightVersion(Arc::new(RwLock::new(FIRST_VERSION.into()))),
            paused: AtomicBool::new(false),
            served: Mutex::new(ServedWeights { model, folder: None }),
            receiving: Arc::default(),
            next_id: AtomicU64::new(1),
        })
    }

    /// Returns the version; `None`: the weights never change.
    pub(crate) fn version(&self) -> Option<&WeightVersion> {
        self.settings.is_some().then_some(&self.version)
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Acquire)
    }

    /// True if clients may change weights without an admin key.
    pub(crate) fn is_open(&self) -> bool {
        self.settings.as_ref().is_none_or(|settings| settings.open)
    }

    /// Pauses all replicas, and optionally empties the prefix cache. Returns the number of
    /// remaining requests. Continues even if the future is dropped.
    ///
    /// # Errors
    /// The engine has stopped, or the pause was cancelled before all replicas were paused.
    pub(crate) async fn pause(
        self: Arc<Self>,
        mode: PauseMode,
        clears: bool,
    ) -> Result<usize, ApiError> {
        let task = tokio::spawn(async move {
            let served = self.served.lock().await;
            self.paused.store(true, Ordering::Release);
            let handles = self.engine.handles();
            // Unlock: another pause or a resume may be requested before the requests have finished.
            drop(served);
            let left = pause_all(&handles, mode).await?;
            if clears {
                self.engine.flush_cache(Box::new(|_| {}));
            }
            Ok(left)
        });
        joined(task.await)
    }

    /// Ends a pause.
    pub(crate) async fn resume(&self) {
        let _served = self.served.lock().await;
        self.paused.store(false, Ordering::Release);
        self.engine.handles().iter().for_each(EngineHandle::resume);
    }

    /// Makes all replicas compute with new weights. Running requests continue with them. Returns
    /// the number of these requests. Continues even if the future is dropped.
    ///
    /// # Errors
    /// The weights can't be read or loaded. The old weights stay in use.
    pub(crate) async fn update(self: Arc<Self>, update: Update) -> Result<usize, ApiError> {
        update.version.as_deref().map_or(Ok(()), check_version)?;
        joined(tokio::spawn(async move { self.update_now(update).await }).await)
    }

    async fn update_now(&self, update: Update) -> Result<usize, ApiError> {
        let Update { source, param, version, aborts, keeps_pause } = update;
        let refused = |reason| ApiError::invalid(param, reason);
        let files = Arc::clone(&self.settings()?.files);
        let mut served = self.served.lock().await;
        let last = served.model.clone();
        let read = spawn_blocking(move || match source {
            Source::Path(path) => {
                files.describe(&path).map(|model| ServedWeights { model, folder: None })
            }
            Source::Tensors(folder, changed) => {
                let model = files.lay(&folder, &changed, &last)?;
                Ok(ServedWeights { model, folder: Some(folder) })
            }
        });
        let next = match read.await {
            Ok(read) => read.map_err(refused)?,
            Err(error) => return Err(refused(format!("the weights can't be read: {error}"))),
        };
        let handles = self.engine.handles();
        let mode = if aborts { PauseMode::Abort } else { PauseMode::Keep };
        let left = pause_all(&handles, mode).await?;
        let loaded = self.load(&handles, &next.model, &served.model).await;
        if loaded.is_ok() {
            // This drops the folder of the previous weights, which no replica needs any more.
            *served = next;
            if let Some(version) = version {
                self.version.set(&version)?;
            }
            self.paused.fetch_or(keeps_pause, Ordering::AcqRel);
        }
        if !self.is_paused() {
            handles.iter().for_each(EngineHandle::resume);
        }
        loaded.map(|()| left).map_err(refused)
    }

    pub(crate) fn settings(&self) -> Result<&WeightSettings, ApiError> {
        self.settings.as_ref().ok_or_else(|| {
            let reason = "this server's weights do not change: it computes on a simulated device, with random weights, with --pd, or serves several models";
            ApiError::Forbidden { reason: reason.to_owned(), code: "weights_fixed" }
        })
    }

    /// Creates a folder for the tensors of one update, and locks the receiving of tensors.
    ///
    /// # Errors
    /// Another update is being received, or the served tensors can't be replaced.
    pub(crate) async fn folder(
        &self,
        param: &'static str,
    ) -> Result<(TensorFolder, OwnedMutexGuard<()>), ApiError> {
        let files = Arc::clone(&self.settings()?.files);
        let Ok(turn) = Arc::clone(&self.receiving).try_lock_owned() else {
            let reason = "the tensors of another update are being received".to_owned();
            return Err(ApiError::Conflict { reason });
        };
        let model = self.served.lock().await.model.clone();
        let folder = in_blocking(move || files.folder(&model), param).await?;
        Ok((folder, turn))
    }

    /// Returns the first rows of a parameter of the hands' current model.
    ///
    /// # Errors
    /// There is no such parameter, or it is not stored as plain numbers.
    pub(crate) async fn rows(
        &self,
        name: String,
        rows: usize,
    ) -> Result<ParameterValues, ApiError> {
        let files = Arc::clone(&self.settings()?.files);
        // Locked while the files are read, because an update would remove them.
        let served = self.served.lock().await;
        let model = served.model.clone();
        in_blocking(move || files.rows(&model, &name, rows), "name").await
    }

    /// Loads the weights in one replica, then in the others. If one replica fails, all return to
    /// the previous weights.
    async fn load(
        &self,
        handles: &[EngineHandle],
        next: &Value,
        last: &Value,
    ) -> Result<(), String> {
        let Some((first, others)) = handles.split_first() else {
            return Err("there is no replica".into());
        };
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        reload(first, id, next).await?;
        let mut loads: Vec<_> = others.iter().map(|handle| reload(handle, id, next)).collect();
        let mut failure = None;
        for load in &mut loads {
            failure = load.await.err().or(failure);
        }
        let Some(failure) = failure else { return Ok(()) };
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let back: Vec<_> = handles.iter().map(|handle| reload(handle, id, last)).collect();
        for load in back {
            if let Err(error) = load.await {
                tracing::error!("a replica could not go back to the last weights: {error}");
            }
        }
        Err(failure)
    }
}

/// Pauses engines. Returns the number of remaining requests.
async fn pause_all(handles: &[EngineHandle], mode: PauseMode) -> Result<usize, ApiError> {
    let pauses = handles.iter().map(|handle| {
        let (sender, receiver) = oneshot::channel();
        // The caller may have been dropped by now.
        handle.pause(mode, Box::new(move |left| _ = sender.send(left)));
        receiver
    });
    let pauses: Vec<oneshot::Receiver<usize>> = pauses.collect();
    let mut all = 0;
    for pause in pauses {
        all += pause.await.map_err(|_| {
            let reason = "the pause was ended before it had begun".to_owned();
            not_serving(Status::Failed(reason))
        })?;
    }
    Ok(all)
}

/// Makes an engine load other weights. The future returns the outcome.
fn reload(
    handle: &EngineHandle,
    id: u64,
    model: &Value,
) -> impl Future<Output = Result<(), String>> + Unpin + use<> {
    let (sender, receiver) = oneshot::channel();
    let reply = Box::new(move |outcome| _ = sender.send(outcome));
    handle.reload(Reload { id, model: model.clone(), reply });
    Box::pin(async move { receiver.await.unwrap_or_else(|_| Err("the engine has ended".into())) })
}

/// Runs file work on a blocking thread. An error is attributed to the parameter `param`.
pub(crate) async fn in_blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
    param: &'static str,
) -> Result<T, ApiError> {
    let done = spawn_blocking(work).await.unwrap_or_else(|error| Err(error.to_string()));
    done.map_err(|reason| ApiError::invalid(param, reason))
}

pub(crate) fn joined<T>(
    task: Result<Result<T, ApiError>, tokio::task::JoinError>,
) -> Result<T, ApiError> {
    task.unwrap_or_else(|error| Err(not_serving(Status::Failed(error.to_string()))))
}
