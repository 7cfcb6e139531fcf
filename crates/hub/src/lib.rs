//! Finds models by name, downloads them from the Hugging Face hub, lists and removes them.
//!
//! The cache has the layout of `huggingface_hub`, and the same environment variables are read:
//! `HF_TOKEN`, `HF_ENDPOINT`, `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`, and those for proxies.
//! ADR 44 states why no existing library is used.
//!
//! ```no_run
//! use forebay_hub::{Hub, HubError, Interpreter, ModelName, Progress, Settings};
//!
//! let settings = Settings::from_env(None, false)?;
//! let interpreter = Interpreter { path: "python3".into(), prepare: |_command| {} };
//! let hub = Hub::new(settings, Progress::new(), interpreter)?;
//! let mut found = hub.find(&ModelName::parse("Qwen/Qwen3-0.6B", None)?, true)?;
//! // Its config is here: whoever can't run it says so before its weights come.
//! hub.complete(&mut found)?;
//! println!("{}", found.path.display());
//! # Ok::<(), HubError>(())
//! ```

mod cache;
mod choose;
mod client;
mod connector;
mod download;
mod embedded;
mod error;
mod folder;
mod hub;
mod name;
mod progress;
mod proxies;
mod repository;
mod settings;
mod stored;

pub use download::free;
pub use embedded::{Interpreter, NAME as DEFAULT_MODEL};
pub use error::{HubError, size};
pub use hub::{Found, Hub, Token};
pub use name::{HubName, ModelName};
pub use progress::Progress;
pub use settings::Settings;
pub use stored::{Format, Removal, StoredModel, list, removal, remove};
