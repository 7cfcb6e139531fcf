//! How families are read from configs, and which tensors their rules take.

mod configs;
mod kinds;
mod rules;
mod tables;
mod towers;
