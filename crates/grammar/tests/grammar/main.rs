//! Tests of grammars, from a client's parameters to masks.

mod calls;
mod drafts;
mod forms;
mod rules;
mod service;
mod suite;
mod support;
