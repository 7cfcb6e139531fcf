//! Grammars from a client's words to masks.

mod calls;
mod forms;
mod rules;
mod service;
mod suite;
mod support;
