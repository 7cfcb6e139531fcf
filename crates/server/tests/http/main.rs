//! Tests of the server over a real socket, with an engine that the test controls.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod access;
mod adapters;
mod calls;
mod client;
mod connections;
mod dialects;
mod errors;
mod fake;
mod generation;
mod info;
mod intake;
mod lifecycle;
mod limits;
mod memory;
mod pd;
mod peers;
mod pooling;
mod replicas;
mod shares;
mod sharing;
mod streams;
mod structure;
