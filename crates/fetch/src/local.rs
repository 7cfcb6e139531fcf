//! Files on the server's own machine, below one folder.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use url::Url;

use crate::config::InvalidConfig;
use crate::error::FetchError;

/// A folder, as its canonical path.
#[derive(Debug, Clone)]
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn open(folder: &Path) -> Result<Self, InvalidConfig> {
        let wrong = |reason: String| InvalidConfig::Local { folder: folder.to_owned(), reason };
        let real = fs::canonicalize(folder).map_err(|error| wrong(error.to_string()))?;
        if !real.is_dir() {
            return Err(wrong("it is no folder".to_owned()));
        }
        Ok(Self(real))
    }

    /// Opens the file at `url`. After links are resolved, it has to be inside the folder. It may
    /// have at most `limit` bytes.
    pub(crate) fn find(&self, url: &Url, limit: usize) -> Result<LocalFile, FetchError> {
        let path = url.to_file_path().map_err(|()| FetchError::NoSuchFile)?;
        let real = fs::canonicalize(path).map_err(|_| FetchError::NoSuchFile)?;
        // Only regular files: reading from a pipe or a device might block for ever.
        if !real.starts_with(&self.0) || !real.is_file() {
            return Err(FetchError::NoSuchFile);
        }
        let file = File::open(real).map_err(|_| FetchError::NoSuchFile)?;
        let bytes = file.metadata().map_err(|_| FetchError::NoSuchFile)?.len();
        match usize::try_from(bytes) {
            Ok(bytes) if bytes <= limit => Ok(LocalFile { file, bytes }),
            _ => Err(FetchError::TooLarge(limit)),
        }
    }
}

/// An open file in the folder.
#[derive(Debug)]
pub(crate) struct LocalFile {
    file: File,
    bytes: usize,
}

impl LocalFile {
    /// The size in bytes, when the file was opened.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Reads as many bytes as the file had when it was opened, even if it has grown.
    pub(crate) fn read(self) -> Result<Bytes, FetchError> {
        let mut bytes = Vec::with_capacity(self.bytes);
        let mut file = self.file.take(self.bytes as u64);
        file.read_to_end(&mut bytes).map_err(|_| FetchError::NoSuchFile)?;
        Ok(bytes.into())
    }
}
