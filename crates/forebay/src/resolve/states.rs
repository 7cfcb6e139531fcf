//! Limits the number of running requests by the memory for recurrent states.

use std::fs;

use forebay_engine::EngineConfig;
use tracing::warn;

use crate::model::Model;

/// Rows of the state table per slot: two, because the previous state may be needed again.
const ROWS: u64 = 2;
/// The states of slots get the memory that the weights leave, divided by this. KV pages and cached
/// states get the rest.
const SHARE: u64 = 2;

/// Lowers the number of running requests until the states of all slots fit. `budget`: bytes for
/// weights, pages and states together. `element`: bytes of an element of the model's data type.
pub(super) fn bound(engine: &mut EngineConfig, model: &Model, element: u64, budget: u64) {
    let of_slot = ROWS * model.state_bytes(element);
    if of_slot == 0 {
        return;
    }
    let length = |file: &std::path::PathBuf| fs::metadata(file).map_or(0, |found| found.len());
    let weights: u64 = model.files.iter().map(length).sum();
    let slots = budget.saturating_sub(weights) / SHARE / of_slot;
    let wanted = engine.max_running_requests;
    let fits = |&running: &u32| u64::from(EngineConfig::usual_slots(running)) <= slots;
    let most = (1..=wanted).rev().find(fits).unwrap_or(1);
    if most < wanted {
        warn!(
            "--max-running-requests {wanted} is lowered to {most}: the recurrent states of a request take {:.1} MB",
            (of_slot / ROWS) as f64 / 1e6
        );
        engine.max_running_requests = most;
        engine.slots = EngineConfig::usual_slots(most);
    }
}
