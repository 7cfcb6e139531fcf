//! The hub's cache, in the layout of `huggingface_hub`, so that both programs can use each other's
//! downloads.
//!
//! `models--org--name/` contains `blobs/`, with one file per content, named by its ETag;
//! `snapshots/COMMIT/`, with links to blobs under the files' paths; and `refs/`, with the commit of
//! each branch.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Component, Path, PathBuf};

use crate::error::HubError;

/// A repository's folder in the cache.
#[derive(Debug, Clone)]
pub(crate) struct RepositoryFolder {
    pub(crate) path: PathBuf,
    locks: PathBuf,
}

impl RepositoryFolder {
    /// `repository` has the form `org/name`.
    pub(crate) fn new(hub_cache: &Path, repository: &str) -> Self {
        let name = format!("models--{}", repository.replace('/', "--"));
        Self { path: hub_cache.join(&name), locks: hub_cache.join(".locks").join(name) }
    }

    pub(crate) fn blobs(&self) -> PathBuf {
        self.path.join("blobs")
    }

    /// The folder of a commit's files.
    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.path.join("snapshots").join(commit)
    }

    /// Returns the commit that `revision` referred to at the last request to the hub; `None` if no
    /// file of this commit is cached.
    pub(crate) fn commit_of(&self, revision: &str) -> Option<String> {
        if !is_inside(revision) {
            return None;
        }
        let kept = fs::read_to_string(self.path.join("refs").join(revision)).ok();
        let kept = kept.map(|commit| commit.trim().to_owned());
        let candidates = kept.into_iter().chain([revision.to_owned()]);
        candidates.into_iter().find(|commit| is_name(commit) && self.snapshot(commit).is_dir())
    }

    /// Records that `revision` refers to `commit`.
    pub(crate) fn keep_commit(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        let path = self.path.join("refs").join(revision);
        if revision == commit || fs::read_to_string(&path).is_ok_and(|kept| kept == commit) {
            return Ok(());
        }
        write_atomically(&path, commit.as_bytes())
            .map_err(|error| HubError::disk(&path, "written", &error))
    }

    /// Returns the files in `refs/` of branches that refer to `commit`.
    pub(crate) fn refs_to(&self, commit: &str) -> Vec<PathBuf> {
        let mut folders = vec![self.path.join("refs")];
        let mut found = Vec::new();
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                let path = entry.path();
                if path.is_dir() {
                    folders.push(path);
                } else if fs::read_to_string(&path).is_ok_and(|kept| kept.trim() == commit) {
                    found.push(path);
                }
            }
        }
        found
    }

    /// The folder with the lock files of downloads.
    pub(crate) fn locks(&self) -> &Path {
        &self.locks
    }

    /// Links `name` in the snapshot of `commit` to a blob. If links are impossible, moves the blob
    /// there.
    pub(crate) fn link(&self, commit: &str, name: &str, blob: &str) -> Result<(), HubError> {
        let place = self.snapshot(commit).join(name);
        let target = up(name).join("blobs").join(blob);
        if fs::read_link(&place).is_ok_and(|kept| kept == target) {
            return Ok(());
        }
        let parent = place.parent().unwrap_or(&self.path);
        let made = fs::create_dir_all(parent).and_then(|()| {
            // A link can't be overwritten, and a broken link may exist. So a new link is created
            // and renamed.
            let link = tempfile::Builder::new()
                .prefix(".")
                .suffix(".link")
                .make_in(parent, |path| symlink(&target, path))?;
            link.into_temp_path().persist(&place).map_err(|error| error.error)
        });
        let made = match made {
            Err(error) if links_are_impossible(&error) => {
                fs::rename(self.blobs().join(blob), &place)
            }
            other => other,
        };
        made.map_err(|error| HubError::disk(&place, "written", &error))
    }

    /// Opens the lock file that keeps other processes from downloading `blob` at the same time.
    pub(crate) fn lock(&self, blob: &str) -> Result<Lock, HubError> {
        let path = self.locks.join(format!("{blob}.lock"));
        let opened = fs::create_dir_all(&self.locks)
            .and_then(|()| File::options().create(true).append(true).open(&path));
        let file = opened.map_err(|error| HubError::disk(&path, "written", &error))?;
        Ok(Lock { file })
    }
}

/// A lock between processes. It is released when it is dropped or the process exits.
#[derive(Debug)]
pub(crate) struct Lock {
    file: File,
}

impl Lock {
    /// Tries to take the lock. Returns true if it was taken. On a file system without locks, this
    /// always succeeds: two downloads may then write the same bytes to the same file, which only
    /// wastes time.
    pub(crate) fn try_take(&self) -> bool {
        !matches!(self.file.try_lock(), Err(TryLockError::WouldBlock))
    }

    /// Waits for the lock.
    pub(crate) fn take(&self) {
        while let Err(error) = self.file.lock() {
            if error.kind() != io::ErrorKind::Interrupted {
                break;
            }
        }
    }
}

/// True if `path` stays inside the folder that it is joined to.
pub(crate) fn is_inside(path: &str) -> bool {
    let fits = |part: &str| {
        !matches!(part, "" | "." | "..") && part.len() <= 255 && !part.contains(['\\', '\0'])
    };
    path.split('/').all(fits)
        && Path::new(path).components().all(|part| matches!(part, Component::Normal(_)))
}

/// True if a commit or an ETag from a server is safe to use as a file name.
pub(crate) fn is_name(text: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    !text.is_empty() && text.len() <= 128 && !text.starts_with('.') && text.chars().all(fits)
}

/// Writes a file atomically.
pub(crate) fn write_atomically(path: &Path, content: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder)?;
    let file = tempfile::Builder::new()
        .prefix(".")
        .suffix(".tmp")
        // Created this way, the file gets the usual permissions of the user's files.
        .make_in(folder, |path| File::create_new(path))?;
    fs::write(file.path(), content)?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// Returns the relative path from the folder of `name` in a snapshot to the repository's folder.
fn up(name: &str) -> PathBuf {
    let depth = name.split('/').count() + 1;
    std::iter::repeat_n("..", depth).collect()
}

fn links_are_impossible(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported)
        || error.raw_os_error() == Some(rustix::io::Errno::PERM.raw_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_path_leaves_its_folder() {
        for path in ["a", "a/b.json", "1_Pooling/config.json", "..a/b..", "a b", "é"] {
            assert!(is_inside(path), "{path}");
        }
        let long = "a".repeat(256);
        for path in [
            "", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", "a\\b", "a\0b",
            &long,
        ] {
            assert!(!is_inside(path), "{path}");
        }
    }

    #[test]
    fn no_etag_is_a_path() {
        assert!(is_name("5d3a8e-7.x_2"));
        for text in ["", ".", "..", ".a", "a/b", "a b", "a\"b", "a\nb", &"a".repeat(129)] {
            assert!(!is_name(text), "{text}");
        }
    }

    #[test]
    fn a_link_leads_to_its_blob_from_any_depth() {
        let cache = tempfile::tempdir().unwrap();
        let folder = RepositoryFolder::new(cache.path(), "org/name");
        fs::create_dir_all(folder.blobs()).unwrap();
        for blob in ["one", "two"] {
            fs::write(folder.blobs().join(blob), blob).unwrap();
        }
        for name in ["a.json", "b/c.json", "b/d/e.json"] {
            for blob in ["one", "two", "two"] {
                folder.link("commit", name, blob).unwrap();
                let place = folder.snapshot("commit").join(name);
                assert_eq!(fs::read_to_string(place).unwrap(), blob);
            }
        }
    }

    #[test]
    fn a_branch_is_the_commit_that_was_kept() {
        let cache = tempfile::tempdir().unwrap();
        let folder = RepositoryFolder::new(cache.path(), "org/name");
        folder.keep_commit("refs/pr/1", "c0ffee").unwrap();
        assert_eq!(folder.commit_of("refs/pr/1"), None);
        fs::create_dir_all(folder.snapshot("c0ffee")).unwrap();
        assert_eq!(folder.commit_of("refs/pr/1").as_deref(), Some("c0ffee"));
        assert_eq!(folder.commit_of("c0ffee").as_deref(), Some("c0ffee"));
        fs::write(folder.path.join("refs/evil"), "../../..").unwrap();
        assert_eq!(folder.commit_of("evil"), None);
        assert_eq!(folder.commit_of("../../x"), None);
    }
}
