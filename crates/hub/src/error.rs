//! Errors of finding a model by its name. Each is one line with advice for the user.

use std::io;
use std::path::Path;

/// Why a model can't be found, downloaded or removed.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The name does not fit any form of a model's name.
    #[error(
        "'{0}' is neither a file or directory here, nor a model of the hub (org/name), nor 'smollm2'"
    )]
    Name(String),
    /// The path does not exist, or is not a model.
    #[error("{0}")]
    Path(String),
    /// The repository lacks needed files, or several files are candidates.
    #[error("{0}")]
    Repository(String),
    /// The user first has to accept terms.
    #[error(
        "access to {repository} must be asked for: accept its terms at {endpoint}/{repository}, then set HF_TOKEN to a token of that account"
    )]
    Gated {
        /// `org/name`.
        repository: String,
        /// The hub's address.
        endpoint: String,
    },
    /// The repository has no such branch, tag or commit.
    #[error("{repository} has no revision '{revision}'")]
    Revision {
        /// `org/name`.
        repository: String,
        /// The revision, as the user wrote it.
        revision: String,
    },
    /// The hub has no such repository, or does not show it to this user.
    #[error(
        "{repository} is not at {endpoint}, or it is private and HF_TOKEN holds no token that may read it"
    )]
    NotThere {
        /// `org/name`.
        repository: String,
        /// The hub's address.
        endpoint: String,
    },
    /// The server refused access without a reason.
    #[error(
        "{endpoint} refuses access to {what} ({status}): set HF_TOKEN to a token that may read it"
    )]
    Refused {
        /// The repository, with its revision if one was named.
        what: String,
        /// The hub's address.
        endpoint: String,
        /// The HTTP status.
        status: u16,
    },
    /// The model is not in the cache, and downloads are off.
    #[error("{0} is not in the cache, and offline nothing is downloaded")]
    NotCached(String),
    /// The model is not in the cache, so there is nothing to remove.
    #[error("{0} is not in the cache; `forebay ls` shows what is")]
    NotStored(String),
    /// Only a part of the model is in the cache, and downloads are off.
    #[error(
        "{repository} is not complete in the cache, and offline nothing is downloaded: {lacks}"
    )]
    Incomplete {
        /// `org/name`.
        repository: String,
        /// The missing files.
        lacks: String,
    },
    /// The hub, or a server in between, does not respond as expected.
    #[error(
        "{what} can't be downloaded from {endpoint} ({cause}); check the network, HF_ENDPOINT and the proxy's settings"
    )]
    Unreachable {
        /// The repository, with its revision if one was named.
        what: String,
        /// The hub's address.
        endpoint: String,
        /// The cause.
        cause: String,
    },
    /// The hub's address does not respond.
    #[error("{endpoint} does not answer ({cause})")]
    Silent {
        /// The hub's address.
        endpoint: String,
        /// The cause of the failure.
        cause: String,
    },
    /// The server sent other bytes than it had announced.
    #[error("{file} of {what} is not what {endpoint} announced: {cause}; nothing of it is kept")]
    Lie {
        /// The repository, with its revision if one was named.
        what: String,
        /// The file's path in the repository.
        file: String,
        /// The hub's address.
        endpoint: String,
        /// How the bytes differ.
        cause: String,
    },
    /// The disk is full, or the download would fill it.
    #[error(
        "{folder} has {free} free, and {file} needs {needed}: make room (`forebay ls` shows the models there, `forebay rm` removes one), or set HF_HOME to another disk"
    )]
    Full {
        /// The folder of the download.
        folder: String,
        /// The file's path in the repository.
        file: String,
        /// The free space, with a unit.
        free: String,
        /// The needed space, with a unit.
        needed: String,
    },
    /// A file can't be read or written.
    #[error("{path} can't be {done}: {cause}")]
    Disk {
        /// The path of the file or folder.
        path: String,
        /// The failed operation, such as `read` or `written`.
        done: &'static str,
        /// The operating system's message.
        cause: String,
    },
    /// An environment variable has an invalid value.
    #[error("{0}")]
    Setting(String),
    /// The default model is not available.
    #[error("{0}")]
    Embedded(String),
}

impl HubError {
    pub(crate) fn disk(path: &Path, done: &'static str, error: &io::Error) -> Self {
        Self::Disk { path: path.display().to_string(), done, cause: words(error) }
    }

    /// True if, despite the error, a model that was downloaded earlier may be used.
    pub(crate) fn is_of_the_network(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }
}

/// Returns the operating system's message without the error number.
fn words(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

/// Formats a number of bytes for display, in powers of ten like disk sizes.
#[must_use]
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["kB", "MB", "GB", "TB"];
    if bytes < 1000 {
        return format!("{bytes} bytes");
    }
    let mut value = bytes as f64 / 1000.0;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    if value < 9.95 {
        format!("{value:.1} {}", UNITS[unit])
    } else {
        format!("{value:.0} {}", UNITS[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_two_digits_or_three() {
        let sizes = [0, 999, 1000, 93_400_000, 999_499_999, 999_500_000, 3_000_000_000_000_000];
        let said = sizes.map(size);
        assert_eq!(
            said,
            ["0 bytes", "999 bytes", "1.0 kB", "93 MB", "999 MB", "1.0 GB", "3000 TB"]
        );
    }
}
