//! Folders for tensors that clients send, inside this process's folder in shared memory.
//!
//! A folder is removed when its last user drops it, and all folders when the process exits. Each
//! process locks a file in its folder. So the next process that needs such folders can remove those
//! of a killed process.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};
use rustix::process::geteuid;
use tempfile::TempDir;

/// The mount point of shared memory.
const SHARED_MEMORY: &str = "/dev/shm";
/// The prefix of the folders' names.
const PREFIX: &str = "forebay-weights-";
/// The file that the process keeps locked.
const LOCK: &str = ".lock";

/// The folders of this process.
#[derive(Default)]
pub(super) struct Overlays(Mutex<Option<Root>>);

/// The folder of this process, which contains all the others.
struct Root {
    folder: TempDir,
    /// Keeps the lock.
    _lock: File,
}

impl Overlays {
    /// Creates a new folder.
    ///
    /// # Errors
    /// The folder can't be created.
    pub(super) fn add(&self) -> Result<TempDir> {
        let mut root = self.0.lock();
        let root = match &mut *root {
            Some(root) => root,
            none => {
                let shared = Path::new(SHARED_MEMORY);
                let below = |parent: &Path| {
                    clear(parent);
                    Root::below(parent)
                };
                // Without shared memory, ordinary files work too, but more slowly.
                let made = below(shared).or_else(|_| below(&std::env::temp_dir()));
                none.insert(made.context("no folder for tensors")?)
            }
        };
        tempfile::Builder::new()
            .prefix("step-")
            .tempdir_in(root.folder.path())
            .context("no folder for tensors")
    }

    /// True if `folder` was made by [`Self::add`], or is inside of such a folder.
    pub(super) fn has(&self, folder: &Path) -> bool {
        let root = self.0.lock();
        root.as_ref().is_some_and(|root| folder.starts_with(root.path()))
    }
}

impl Root {
    fn below(parent: &Path) -> Result<Self> {
        let own = fs::Permissions::from_mode(0o700);
        let parent = parent.canonicalize()?;
        let folder = tempfile::Builder::new().prefix(PREFIX).permissions(own).tempdir_in(parent)?;
        // The file is locked before it gets the name by which other processes find it.
        let unnamed = folder.path().join("lock");
        let lock = File::create_new(&unnamed)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        fs::rename(unnamed, folder.path().join(LOCK))?;
        Ok(Self { folder, _lock: lock })
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// Removes folders that this user's processes left when they were killed.
fn clear(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    let named = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX))
    };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    for path in paths.filter(named) {
        let own =
            path.symlink_metadata().is_ok_and(|it| it.is_dir() && it.uid() == geteuid().as_raw());
        let Ok(lock) = File::open(path.join(LOCK)) else { continue };
        if own && flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            tracing::info!("{} is left over from a process that is gone", path.display());
            // Another process may remove the folder at the same time.
            let _ = fs::remove_dir_all(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_go_with_their_users_and_with_the_process() {
        let overlays = Overlays::default();
        let (one, other) = (overlays.add().expect("a folder"), overlays.add().expect("a folder"));
        assert!(overlays.has(one.path()) && !overlays.has(Path::new(SHARED_MEMORY)));
        let root = one.path().parent().expect("a parent").to_owned();
        let mode = fs::metadata(&root).expect("a folder").permissions().mode();
        assert_eq!(mode & 0o077, 0, "other users could read weights there");
        let gone = one.path().to_owned();
        drop(one);
        assert!(!gone.exists() && other.path().exists());
        drop(overlays);
        assert!(!root.exists());
    }

    #[test]
    fn what_a_killed_process_left_is_removed_and_what_is_in_use_is_not() {
        let parent = tempfile::tempdir().expect("a folder");
        let used = Root::below(parent.path()).expect("a folder");
        let left = Root::below(parent.path()).expect("a folder");
        let gone = left.folder.keep();
        drop(left._lock);
        let unlocked = parent.path().join(format!("{PREFIX}new"));
        fs::create_dir(&unlocked).expect("a folder");
        clear(parent.path());
        assert!(used.path().exists() && !gone.exists());
        assert!(
            unlocked.exists(),
            "an unlocked new folder is kept, as its process may be about to lock it"
        );
    }
}
