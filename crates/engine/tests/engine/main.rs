//! The engine thread against a simulated worker in virtual time.

mod payloads;
mod requests;
mod rig;
