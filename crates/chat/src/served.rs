//! `forebay ls URL`: the models of a running server.

use anyhow::{Result, bail};
use http::{Method, StatusCode};
use serde::Serialize;
use serde_json::Value;
use tokio::runtime::Builder;

use crate::is_url;
use crate::link::{Link, refusal};

/// A model that a server lists in `/v1/models`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ServedModel {
    /// The name that requests use.
    pub name: String,
    /// The state that the server reports; `None`: servers of one model do not report it.
    pub state: Option<String>,
    /// The size of the model's files in bytes; `None`: not reported.
    pub bytes: Option<u64>,
}

impl ServedModel {
    fn read(card: &Value) -> Option<Self> {
        Some(Self {
            name: card["id"].as_str()?.to_owned(),
            state: card["state"].as_str().map(str::to_owned),
            bytes: card["size"].as_u64(),
        })
    }
}

/// Requests the list of models, loaded or not, from the server at `url`.
///
/// # Errors
/// `url` is not a URL of a server, or the server cannot be reached, returns an error, or sends an
/// unexpected response.
pub fn served_models(url: &str, key: Option<&str>) -> Result<Vec<ServedModel>> {
    if !is_url(url) {
        bail!("`{url}` is not the URL of a server, such as http://127.0.0.1:8000");
    }
    let link = Link::to(url, key)?;
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let (status, answer) = runtime.block_on(link.ask(Method::GET, "/v1/models"))?;
    if status != StatusCode::OK {
        bail!("{}", refusal(status, &answer));
    }
    match answer["data"].as_array() {
        Some(cards) => Ok(cards.iter().filter_map(ServedModel::read).collect()),
        None => bail!("{} answered with something else than a list of models", link.name()),
    }
}
