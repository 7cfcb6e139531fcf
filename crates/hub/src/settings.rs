//! The settings of the hub and its cache, from the environment variables of `huggingface_hub`.

use std::env;
use std::path::{Path, PathBuf};
use std::time::Duration;

use url::Url;

use crate::error::HubError;

const ENDPOINT: &str = "https://huggingface.co";

/// Where models come from, and where downloads are stored.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The hub's URL, without a trailing slash.
    pub endpoint: String,
    /// The token for private and gated repositories.
    pub token: Option<String>,
    /// The folder of the hub's cache. It contains one folder per repository.
    pub hub_cache: PathBuf,
    /// The folder of Forebay's cache.
    pub cache: PathBuf,
    /// True if no request may be sent over the network.
    pub offline: bool,
    /// How long to wait for a server that sends nothing.
    pub patience: Duration,
    /// The number of files that are downloaded concurrently.
    pub at_a_time: usize,
}

impl Settings {
    /// Reads the environment. If `directory` is set, all files are stored below it.
    ///
    /// # Errors
    /// [`HubError::Setting`] if `HF_ENDPOINT` is not a URL.
    pub fn from_env(directory: Option<&Path>, offline: bool) -> Result<Self, HubError> {
        let cache = forebay_cache(directory);
        let hub_cache = match directory {
            Some(_) => cache.join("hub"),
            None => hub_cache(),
        };
        Ok(Self {
            endpoint: endpoint(set("HF_ENDPOINT").as_deref().unwrap_or(ENDPOINT))?,
            token: token(),
            hub_cache,
            cache,
            offline: offline || flag("HF_HUB_OFFLINE") || flag("TRANSFORMERS_OFFLINE"),
            patience: set("HF_HUB_DOWNLOAD_TIMEOUT")
                .and_then(|seconds| seconds.parse().ok())
                .filter(|seconds| (1..=3600).contains(seconds))
                .map_or(Duration::from_secs(20), Duration::from_secs),
            at_a_time: 4,
        })
    }
}

/// Returns `directory`, or `$FOREBAY_CACHE`, or the folder `forebay` in the user's cache folder.
fn forebay_cache(directory: Option<&Path>) -> PathBuf {
    let chosen = directory.map(Path::to_owned).or_else(|| set("FOREBAY_CACHE").map(PathBuf::from));
    match chosen {
        Some(path) => absolute(&expand_home(&path.to_string_lossy())),
        None => user_cache().join("forebay"),
    }
}

fn hub_cache() -> PathBuf {
    let named = set("HF_HUB_CACHE").or_else(|| set("HUGGINGFACE_HUB_CACHE"));
    named.map_or_else(|| home().join("hub"), |path| absolute(&expand_home(&path)))
}

/// The folder in which Hugging Face's libraries store all their files.
fn home() -> PathBuf {
    set("HF_HOME")
        .map_or_else(|| user_cache().join("huggingface"), |path| absolute(&expand_home(&path)))
}

fn user_cache() -> PathBuf {
    let home = || env::home_dir().unwrap_or_else(|| PathBuf::from("/")).join(".cache");
    set("XDG_CACHE_HOME").map_or_else(home, |path| absolute(&expand_home(&path)))
}

/// Replaces `~` at the beginning with the user's home directory, as shells do.
pub(crate) fn expand_home(text: &str) -> PathBuf {
    let rest = text.strip_prefix('~').filter(|rest| rest.is_empty() || rest.starts_with('/'));
    match (rest, env::home_dir()) {
        (Some(rest), Some(home)) => home.join(Path::new(rest.trim_start_matches('/'))),
        _ => PathBuf::from(text),
    }
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Returns the token in the environment, or the token that `hf auth login` stored.
fn token() -> Option<String> {
    if flag("HF_HUB_DISABLE_IMPLICIT_TOKEN") && set("HF_TOKEN").is_none() {
        return None;
    }
    let named = set("HF_TOKEN").or_else(|| set("HUGGING_FACE_HUB_TOKEN"));
    let file = || {
        let path = set("HF_TOKEN_PATH").map_or_else(|| home().join("token"), PathBuf::from);
        std::fs::read_to_string(path).ok()
    };
    // A token is often copied with a trailing line break.
    let token = named.or_else(file)?.trim().to_owned();
    (!token.is_empty()).then_some(token)
}

fn endpoint(text: &str) -> Result<String, HubError> {
    let bad = || {
        HubError::Setting(format!("HF_ENDPOINT is {text:?}, not an http:// or https:// address"))
    };
    let url = Url::parse(text).map_err(|_| bad())?;
    if !matches!(url.scheme(), "http" | "https") || url.host().is_none() || url.query().is_some() {
        return Err(bad());
    }
    Ok(text.trim_end_matches('/').to_owned())
}

fn set(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

fn flag(name: &str) -> bool {
    set(name).is_some_and(|value| {
        ["1", "on", "yes", "true"].contains(&value.to_ascii_lowercase().as_str())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_an_address() {
        assert_eq!(endpoint("http://mirror.test:8080/hf/").unwrap(), "http://mirror.test:8080/hf");
        for text in ["mirror.test", "file:///models", "https://", "ftp://mirror.test", "http://a?b"]
        {
            assert!(endpoint(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_directory_holds_everything() {
        let settings = Settings::from_env(Some(Path::new("/chosen")), true).unwrap();
        assert_eq!(settings.cache, Path::new("/chosen"));
        assert_eq!(settings.hub_cache, Path::new("/chosen/hub"));
        assert!(settings.offline);
    }
}
