//! Storing of responses.

use std::sync::Arc;

use bytes::Bytes;
use forebay_api::Item;
use serde::Deserialize;
use serde_json::Value;

use crate::state::Shared;
use crate::store::{FinishedResponse, Owner, Turn};

/// Stores a response and the conversation that led to it.
pub(super) struct Keeper {
    pub(super) state: Shared,
    pub(super) owner: Owner,
    pub(super) input: Vec<Item>,
    /// The earlier turns of the conversation.
    pub(super) before: Vec<Arc<Turn>>,
    /// True for a background response, which is computed after the HTTP response was sent.
    pub(super) background: bool,
}

impl Keeper {
    /// Stores the finished response `id`.
    pub(super) fn keep(self, id: &str, response: &Value) {
        let Self { state, owner, input, before, background } = self;
        let items = response["output"].as_array().into_iter().flatten();
        // This server made all items, so none is left out.
        let output = items.filter_map(|item| Item::deserialize(item).ok()).collect();
        let body = Bytes::from(response.to_string());
        state.store.keep(owner, id, FinishedResponse { body, input, output, before, background });
    }
}
