//! The owner thread against a simulated hand in virtual time.

mod payloads;
mod requests;
mod rig;
