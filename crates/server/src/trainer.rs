//! Receives tensors that a trainer broadcasts in a process group of which this server is a member.
//!
//! The server leaves a group when the group is destroyed, when the server stops, or when a transfer
//! fails; the trainer then has to create another group. Received tensors go to files, like tensors
//! in bodies, so an update applies all of them or none ([`Weights::update`]).

use std::path::PathBuf;
use std::sync::Arc;

use forebay_api::ApiError;
use tokio::sync::{Mutex, MutexGuard, OwnedMutexGuard};
use tokio::task::spawn_blocking;

use crate::weight_files::{NamedTensor, TensorFolder, TensorReceiver, TrainerGroup};
use crate::weights::{Source, Update, Weights, in_blocking, joined};

/// The parameter that lists tensors.
const NAMES: &str = "names";
/// The parameter that names a group.
const GROUP: &str = "group_name";
/// The maximum size of a tensor's element in bytes.
const LARGEST_ELEMENT: u64 = 8;

/// The connection to this server's trainer.
pub(crate) struct Trainer {
    weights: Arc<Weights>,
    /// The group that was joined; `None`: there is none.
    link: Mutex<Option<JoinedGroup>>,
}

/// A joined process group.
struct JoinedGroup {
    name: String,
    receiver: Box<dyn TensorReceiver>,
    /// The tensors received so far for an incomplete update.
    begun: Option<Begun>,
}

/// The tensors of an incomplete update.
struct Begun {
    folder: TensorFolder,
    files: Vec<PathBuf>,
    bytes: u64,
    /// The lock that prevents other updates from being received.
    _turn: OwnedMutexGuard<()>,
}

/// Tensors that a trainer is about to send.
pub(crate) struct SentTensors {
    pub(crate) group: String,
    pub(crate) tensors: Vec<NamedTensor>,
    /// True if later requests send more tensors of the same update.
    pub(crate) more: bool,
    pub(crate) version: Option<String>,
    /// True if requests are aborted before the update.
    pub(crate) aborts: bool,
    /// True if the engine stays paused after the update.
    pub(crate) keeps_pause: bool,
}

impl Trainer {
    pub(crate) fn new(weights: Arc<Weights>) -> Arc<Self> {
        Arc::new(Self { weights, link: Mutex::default() })
    }

    /// Locks the group, if no operation on it is running.
    fn idle(&self) -> Result<MutexGuard<'_, Option<JoinedGroup>>, ApiError> {
        self.link.try_lock().map_err(|_| {
            let reason = "the group is being joined, or tensors of it are being received";
            ApiError::Conflict { reason: reason.to_owned() }
        })
    }

    /// Joins a trainer's group. Continues even if the future is dropped.
    ///
    /// # Errors
    /// Another group was joined already, or the ranks do not all join in time.
    pub(crate) async fn join(self: Arc<Self>, group: TrainerGroup) -> Result<(), ApiError> {
        let files = Arc::clone(&self.weights.settings()?.files);
        let task = tokio::spawn(async move {
            let mut link = self.idle()?;
            if let Some(JoinedGroup { name, .. }) = &*link {
                let reason =
                    format!("the group {name} was joined: /destroy_weights_update_group leaves it");
                return Err(ApiError::Conflict { reason });
            }
            let name = group.name.clone();
            let receiver = in_blocking(move || files.join(&group), "master_address").await?;
            *link = Some(JoinedGroup { name, receiver, begun: None });
            Ok(())
        });
        joined(task.await)
    }

    /// Leaves the group, and drops the tensors of an incomplete update.
    ///
    /// # Errors
    /// This group was not joined.
    pub(crate) async fn leave(&self, group: &str) -> Result<(), ApiError> {
        self.weights.settings()?;
        let mut link = self.idle()?;
        check_group(link.as_ref(), group)?;
        let joined = link.take();
        // Stopping the receiver's process may take a moment.
        let leave = move || {
            drop(joined);
            Ok(())
        };
        in_blocking(leave, GROUP).await
    }

    /// Receives tensors. When the update is complete, all replicas switch to the new weights.
    /// Returns the number of requests that continue with the new weights; `None`: more tensors are
    /// to come. Continues even if the future is dropped.
    ///
    /// # Errors
    /// The tensors can't be received; the server then leaves the group. Or the new weights can't be
    /// loaded. In both cases the old weights stay in use.
    pub(crate) async fn receive(
        self: Arc<Self>,
        sent: SentTensors,
    ) -> Result<Option<usize>, ApiError> {
        self.weights.settings()?;
        joined(tokio::spawn(async move { self.receive_now(sent).await }).await)
    }

    async fn receive_now(&self, sent: SentTensors) -> Result<Option<usize>, ApiError> {
        let SentTensors { group, tensors, more, version, aborts, keeps_pause } = sent;
        let mut link = self.idle()?;
        check_group(link.as_ref(), &group)?;
        let Some(JoinedGroup { name, mut receiver, begun }) = link.take() else {
            return Err(unknown(&group));
        };
        let mut begun = match begun {
            Some(begun) => begun,
            None => match self.weights.folder(NAMES).await {
                Ok((folder, turn)) => Begun { folder, files: Vec::new(), bytes: 0, _turn: turn },
                Err(error) => return Err(given_up(receiver, error).await),
            },
        };
        begun.bytes = begun.bytes.saturating_add(tensors.iter().map(bytes).sum());
        let limit = begun.folder.most_bytes;
        if begun.bytes > limit {
            let reason = format!("the tensors are larger than the checkpoint: {limit} bytes");
            return Err(given_up(receiver, ApiError::invalid("shapes", reason)).await);
        }
        let number = begun.files.len();
        let file = begun.folder.path.join(format!("changed-{number}.safetensors"));
        begun.files.push(file.clone());
        let received = spawn_blocking(move || {
            let received = receiver.receive(&tensors, &file);
            received.map(|()| receiver)
        });
        let received = received.await.unwrap_or_else(|error| Err(error.to_string()));
        let receiver = received.map_err(|why| {
            let reason = format!("the tensors did not come, and the group {name} is left: {why}");
            ApiError::invalid(NAMES, reason)
        })?;
        let joined = link.insert(JoinedGroup { name, receiver, begun: None });
        if more {
            joined.begun = Some(begun);
            return Ok(None);
        }
        let source = Source::Tensors(begun.folder.clone(), std::mem::take(&mut begun.files));
        let update = Update { source, param: NAMES, version, aborts, keeps_pause };
        Arc::clone(&self.weights).update(update).await.map(Some)
    }
}

/// Leaves a group whose trainer may be sending tensors that nobody receives, so that the trainer's
/// calls fail at once. Returns the error.
async fn given_up(receiver: Box<dyn TensorReceiver>, error: ApiError) -> ApiError {
    // Stopping the receiver's process may take a moment.
    let _ = spawn_blocking(move || drop(receiver)).await;
    error
}

/// Returns the maximum size of a tensor in bytes.
fn bytes(tensor: &NamedTensor) -> u64 {
    let elements = tensor.shape.iter().fold(1_u64, |all, &size| all.saturating_mul(size));
    let element = match tensor.dtype.trim_start_matches("torch.") {
        "float16" | "bfloat16" | "half" => 2,
        "float32" | "float" => 4,
        _ => LARGEST_ELEMENT,
    };
    elements.saturating_mul(element)
}

fn check_group(joined: Option<&JoinedGroup>, group: &str) -> Result<(), ApiError> {
    if joined.is_some_and(|joined| joined.name == group) { Ok(()) } else { Err(unknown(group)) }
}

fn unknown(group: &str) -> ApiError {
    let reason = format!("there is no group {group}: /init_weights_update_group joins it");
    ApiError::invalid(GROUP, reason)
}
