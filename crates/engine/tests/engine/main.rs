//! Tests of the engine thread with a simulated hand in virtual time.

mod payloads;
mod requests;
mod rig;
