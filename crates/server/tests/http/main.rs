//! The server over a real socket, with an engine that does what the test says.

mod client;
mod errors;
mod fake;
mod generation;
mod info;
mod lifecycle;
