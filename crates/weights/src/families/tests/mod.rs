//! Tests of how families read configs, and of which tensors their rules take.

mod configs;
mod kinds;
mod rules;
mod tables;
mod towers;
