//! Prefill apart from decode, with a server for each.
//!
//! A *decode server* has a *prefill server* compute a prompt ([`decode`]). The prefill server
//! answers with a stream of blocks, in the order of the prompt and as they are saved in its host
//! tier ([`prefill`]). The decode server puts them into memory of its own (`room`), which its hands
//! read as the host tier of one replica more. The request goes to the engine with a
//! [`forebay_engine::Loan`] of these pages. What has not come is computed.
//!
//! `wire` has the messages, `tier` the places of pages in memory, `ask` the connection.

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
