//! A hand for CPUs, in Rust.
