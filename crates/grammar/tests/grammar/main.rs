//! Grammars from a client's words to masks.

mod calls;
mod drafts;
mod forms;
mod rules;
mod service;
mod suite;
mod support;
