//! Disaggregated prefill and decode: prompts are computed by separate servers.
//!
//! A *decode server* has a *prefill server* compute a prompt ([`decode`]). The prefill server
//! responds with a stream of blocks in prompt order, as they are saved in its host tier
//! ([`prefill`]). The decode server writes them into a memory region (`room`), which its hands read
//! as the host tier of an additional replica. The request goes to the engine with a
//! [`forebay_engine::Loan`] of these pages. The engine computes the blocks that did not arrive.
//!
//! `wire` has the messages, `tier` the layout of pages in memory, `ask` the connection.

mod ask;
pub(crate) mod counts;
pub(crate) mod decode;
mod parts;
pub(crate) mod prefill;
mod room;
pub(crate) mod side;
mod tier;
mod wire;

pub use parts::{DecodeConfig, Disaggregation, PdParts};
