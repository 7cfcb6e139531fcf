//! Computes the memory of a model before it is loaded, for `forebay plan --model`.

use forebay_protocol::HandConfig;
use forebay_weights::ModelShape;

use crate::load::Plan;
use crate::parts::DecoderParts;
use crate::pooled::kind;
use crate::runner::{HandError, STATE_ELEMENT, formats, free, numbers, shape, sizes};
use crate::states::state_pages;
use crate::windows::{WindowLayers, page_bytes};

/// The memory of a hand, as its `ready` message reports it. Everything except page counts is in
/// bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    /// The weights, in the formats that the kernels read.
    pub weight_bytes: u64,
    /// One page over all layers; if there is a window part, one page of the main part.
    pub page_bytes: u64,
    /// The number of pages; if there is a window part, the number of pages of the main part.
    pub page_count: u32,
    /// One page of the window part.
    pub window_page_bytes: u64,
    /// The number of pages of the window part; 0 if all layers share one pool.
    pub window_page_count: u32,
    /// All pages of both parts.
    pub kv_bytes: u64,
    /// The recurrent states of all slots, and of all state pages.
    pub state_bytes: u64,
}

/// Computes the memory of a model that this hand serves, if `available` bytes are free.
///
/// # Errors
/// Returns one line: the model has no KV pages, it pools, its files can't be read, or the memory
/// does not suffice.
pub fn footprint(config: &HandConfig, available: u64) -> Result<Footprint, String> {
    count(config, available).map_err(|error| error.to_string())
}

fn count(config: &HandConfig, available: u64) -> Result<Footprint, HandError> {
    let model = shape(config)?;
    let ModelShape::Decoder(shape) = &model else {
        return Err(HandError::Config(
            "an encoder keeps no pages: there is nothing to plan".into(),
        ));
    };
    if kind(config).is_some() {
        return Err(HandError::Config("the memory of models that pool is not planned".into()));
    }
    let parts = DecoderParts::new(shape)?;
    let (number, dtype, _) = numbers(&config.dtype)?;
    let plan = Plan::new(&parts, number, formats(config, &parts, None, &mut None)?)?;
    let of_slot = shape.state_bytes(STATE_ELEMENT);
    let pages = state_pages(config, of_slot, free(config, &plan, available, of_slot));
    let rows = if of_slot > 0 { 2 * u64::from(config.slots) + pages } else { 0 };
    let state_bytes = rows * of_slot;
    let windows = WindowLayers::new(config, shape, of_slot > 0);
    let taken = plan.bytes() + state_bytes;
    let sizes = sizes(config, &parts, &windows, dtype, (available, taken))?;
    let page_count = sizes.page_count as u32;
    let of_parts = page_bytes(&parts, &sizes);
    let [page_bytes, window_page_bytes] = of_parts;
    Ok(Footprint {
        weight_bytes: plan.bytes(),
        page_bytes,
        page_count,
        window_page_bytes,
        window_page_count: sizes.window_page_count as u32,
        kv_bytes: windows.bytes(page_count, of_parts),
        state_bytes,
    })
}
