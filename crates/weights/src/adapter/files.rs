//! Opens the files of adapters, without reading anything outside their folder.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, open, openat, openat2};
use rustix::io::Errno;

use crate::error::ModelError;

/// The flags for opening every file. Non-blocking, so that opening a named pipe returns at once and
/// the pipe can be refused.
const FLAGS: OFlags =
    OFlags::RDONLY.union(OFlags::CLOEXEC).union(OFlags::NONBLOCK).union(OFlags::NOCTTY);

/// Bytes per read.
const AT_ONCE: u64 = 1 << 20;

/// Where the files of adapters may be.
#[derive(Debug)]
pub enum AdapterFolder {
    /// Anywhere: the paths come from the machine's owner.
    Anywhere,
    /// Only inside this folder, without symbolic links. Paths are relative to it.
    Below(PathBuf, OwnedFd),
}

/// An open regular file.
pub(super) struct OpenFile {
    file: File,
    /// The path of the file, for processes that open it again.
    pub(super) path: PathBuf,
}

impl AdapterFolder {
    /// Opens a folder. Paths below it can't lead outside.
    ///
    /// # Errors
    /// It can't be opened.
    pub fn below(folder: &Path) -> Result<Self, ModelError> {
        let unreadable = |error| ModelError::unreadable(folder, &error);
        let folder = folder.canonicalize().map_err(unreadable)?;
        let opened = open(&folder, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let opened = opened.map_err(|error| ModelError::unreadable(&folder, &error.into()))?;
        Ok(Self::Below(folder, opened))
    }

    pub(super) fn open(&self, path: &Path) -> Result<OpenFile, ModelError> {
        let (opened, whole) = match self {
            Self::Anywhere => (openat(CWD, path, FLAGS, Mode::empty()), path.to_owned()),
            Self::Below(folder, root) => (below(root, path), folder.join(path)),
        };
        let unreadable = |error: Errno| match error {
            // Do not reveal where a link or `..` leads.
            Errno::LOOP | Errno::XDEV | Errno::NOTDIR if matches!(self, Self::Below(..)) => {
                ModelError::broken(format!("{} is not below --lora-root", path.display()))
            }
            other => ModelError::unreadable(path, &other.into()),
        };
        let file = File::from(opened.map_err(unreadable)?);
        let kind = file.metadata().map_err(|error| ModelError::unreadable(path, &error))?;
        if !kind.is_file() {
            return Err(ModelError::broken(format!("{} is not a regular file", path.display())));
        }
        Ok(OpenFile { file, path: whole })
    }
}

/// Opens a file inside a folder, without following symbolic links.
fn below(root: &OwnedFd, path: &Path) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    match openat2(root, path, FLAGS, Mode::empty(), resolve) {
        Err(Errno::NOSYS | Errno::PERM) => stepwise(root, path),
        opened => opened,
    }
}

/// Opens a file as `below` does, one path component at a time, on kernels without `openat2`.
fn stepwise(root: &OwnedFd, path: &Path) -> Result<OwnedFd, Errno> {
    let mut names = Vec::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => names.push(name),
            Component::CurDir => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => {
                return Err(Errno::XDEV);
            }
        }
    }
    let (last, folders) = names.split_last().ok_or(Errno::ISDIR)?;
    let mut at = root.try_clone().map_err(|_| Errno::MFILE)?;
    for folder in folders {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        at = openat(at.as_fd(), *folder, flags, Mode::empty())?;
    }
    openat(at.as_fd(), *last, FLAGS | OFlags::NOFOLLOW, Mode::empty())
}

impl OpenFile {
    /// Returns a path to this open file, even if its name now belongs to another file. It is valid
    /// while the file is open.
    pub(super) fn own_path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.file.as_raw_fd()).into()
    }

    /// Reads a file of at most `most` bytes.
    pub(super) fn read(&self, most: u64) -> Result<Vec<u8>, ModelError> {
        let unreadable = |error| ModelError::unreadable(&self.path, &error);
        let mut bytes = Vec::new();
        (&self.file).take(most + 1).read_to_end(&mut bytes).map_err(unreadable)?;
        if bytes.len() as u64 > most {
            let path = self.path.display();
            return Err(ModelError::broken(format!("{path} has more than {most} bytes")));
        }
        Ok(bytes)
    }

    /// Calls `with` with the bytes of a range, one chunk at a time.
    pub(super) fn each(
        &self,
        offset: u64,
        bytes: u64,
        mut with: impl FnMut(&[u8]),
    ) -> Result<(), ModelError> {
        let mut buffer = vec![0; AT_ONCE.min(bytes) as usize];
        let mut done = 0;
        while done < bytes {
            let some = &mut buffer[..(bytes - done).min(AT_ONCE) as usize];
            let read = self.file.read_exact_at(some, offset + done);
            read.map_err(|error| ModelError::unreadable(&self.path, &error))?;
            with(some);
            done += some.len() as u64;
        }
        Ok(())
    }

    /// Reads the first `N` bytes.
    pub(super) fn first<const N: usize>(&self) -> Result<[u8; N], ModelError> {
        let mut bytes = [0; N];
        let read = self.file.read_exact_at(&mut bytes, 0);
        read.map_err(|error| ModelError::unreadable(&self.path, &error)).map(|()| bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn no_way_leads_out_of_the_folder() {
        let all = tempfile::tempdir().expect("a folder");
        let (root, secret) = (all.path().join("root"), all.path().join("secret"));
        std::fs::create_dir_all(root.join("inner")).expect("made");
        std::fs::write(&secret, "outside").expect("written");
        std::fs::write(root.join("inner/file"), "inside").expect("written");
        symlink("inner/file", root.join("link")).expect("linked");
        symlink(all.path(), root.join("out")).expect("linked");
        let AdapterFolder::Below(_, descriptor) = AdapterFolder::below(&root).expect("opened")
        else {
            panic!("a folder");
        };
        for open in [below, stepwise] {
            let opened = |path: &str| open(&descriptor, Path::new(path)).is_ok();
            assert!(opened("inner/file") && opened("./inner/file"));
            for path in ["../secret", "inner/../../secret", "link", "out/secret", "", "/etc/passwd"]
            {
                assert!(!opened(path), "{path}");
            }
            assert!(!opened(secret.to_str().expect("text")));
        }
        let folder = AdapterFolder::below(&root).expect("opened");
        assert!(folder.open(Path::new("inner")).is_err(), "a folder is no file");
        let fifo = root.join("pipe");
        rustix::fs::mknodat(CWD, &fifo, rustix::fs::FileType::Fifo, Mode::RUSR, 0).expect("made");
        assert!(folder.open(Path::new("pipe")).is_err(), "opening a pipe fails and does not block");
    }
}
