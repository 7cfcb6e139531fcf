//! The way of responses into the store.

use std::sync::Arc;

use bytes::Bytes;
use forebay_api::Item;
use serde::Deserialize;
use serde_json::Value;

use crate::state::Shared;
use crate::store::{FinishedResponse, Owner, Turn};

/// Stores a response, and the conversation up to it.
pub(super) struct Keeper {
    pub(super) state: Shared,
    pub(super) owner: Owner,
    pub(super) input: Vec<Item>,
    /// The turns of the conversation before.
    pub(super) before: Vec<Arc<Turn>>,
    /// True for a background response, which is computed after its answer was sent.
    pub(super) background: bool,
}

impl Keeper {
    /// Keeps the response `id`, which has ended.
    pub(super) fn keep(self, id: &str, response: &Value) {
        let Self { state, owner, input, before, background } = self;
        let items = response["output"].as_array().into_iter().flatten();
        // All items were made by this server, so none is left out.
        let output = items.filter_map(|item| Item::deserialize(item).ok()).collect();
        let body = Bytes::from(response.to_string());
        state.store.keep(owner, id, FinishedResponse { body, input, output, before, background });
    }
}
