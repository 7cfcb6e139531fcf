//! Errors in finding a model by name. Each is one line, with advice for the user.

use std::io;
use std::path::Path;

/// Why a model can't be found, downloaded or removed.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// No model has this name.
    #[error(
        "'{0}' is neither a file or directory here, nor a model of the hub (org/name), nor 'smollm2'"
    )]
    Name(String),
    /// A path that does not exist, or is not a model.
    #[error("{0}")]
    Path(String),
    /// The repository lacks needed files, or has too many candidates.
    #[error("{0}")]
    Repository(String),
    /// Terms have to be accepted first.
    #[error(
        "access to {repository} must be asked for: accept its terms at {endpoint}/{repository}, then set HF_TOKEN to a token of that account"
    )]
    Gated {
        /// `org/name`.
        repository: String,
        /// The hub's address.
        endpoint: String,
    },
    /// There is no such branch, tag or commit.
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
    /// A refusal without a reason.
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
    /// The model is not here, and downloads are off.
    #[error("{0} is not in the cache, and offline nothing is downloaded")]
    NotCached(String),
    /// The model is not here, so there is nothing to remove.
    #[error("{0} is not in the cache; `forebay ls` shows what is")]
    NotStored(String),
    /// Only a part of the model is here, and downloads are off.
    #[error(
        "{repository} is not complete in the cache, and offline nothing is downloaded: {lacks}"
    )]
    Incomplete {
        /// `org/name`.
        repository: String,
        /// The missing files.
        lacks: String,
    },
    /// The hub, or a machine in between, does not answer as expected.
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
    /// The hub's address does not answer.
    #[error("{endpoint} does not answer ({cause})")]
    Silent {
        /// The hub's address.
        endpoint: String,
        /// The cause, as it was observed.
        cause: String,
    },
    /// The server sent other bytes than announced.
    #[error("{file} of {what} is not what {endpoint} announced: {cause}; nothing of it is kept")]
    Lie {
        /// The repository, with its revision if one was named.
        what: String,
        /// The file's path in the repository.
        file: String,
        /// The hub's address.
        endpoint: String,
        /// The difference.
        cause: String,
    },
    /// The disk is full, or would be.
    #[error(
        "{folder} has {free} free, and {file} needs {needed}: make room (`forebay ls` shows the models there, `forebay rm` removes one), or set HF_HOME to another disk"
    )]
    Full {
        /// The folder of the download.
        folder: String,
        /// The file's path in the repository.
        file: String,
        /// The free space with its unit.
        free: String,
        /// The needed space with its unit.
        needed: String,
    },
    /// A file can't be read or written.
    #[error("{path} can't be {done}: {cause}")]
    Disk {
        /// The path of the file or folder.
        path: String,
        /// `read`, `written` or the like.
        done: &'static str,
        /// The system's message.
        cause: String,
    },
    /// A variable of the environment has an invalid value.
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

    /// True if a model that was downloaded before may be used despite the error.
    pub(crate) fn is_of_the_network(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }
}

/// The system's error message without the error number.
fn words(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

/// A number of bytes for display, in powers of ten like disk sizes.
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
