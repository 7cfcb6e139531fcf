//! The form of answers: JSON schemas, regular expressions and grammars as constraints of single
//! requests.
//!
//! A [`Source`] is the form that a client asks for. [`Grammars`] compiles it on threads of its own,
//! and keeps the result for the next request with the same source. Each choice gets a
//! [`forebay_engine::Constraint`], which the engine asks for a mask before every token. The parser
//! is llguidance's (Earley over derivatives of regular expressions). This crate adds the needs of a
//! server: limits, a cache, other notations, and other restrictions of an answer.

mod arguments;
mod calls;
mod compile;
mod ebnf;
mod error;
mod formats;
mod kinds;
mod lark;
mod one_text;
mod rules;
mod schema;
mod service;
mod size;
mod source;
mod strings;
mod tag;
mod thinking;
mod vocabulary;

pub use error::GrammarError;
pub use rules::{Bounds, Reasoning};
pub use service::{Constraints, GrammarConfig, GrammarStats, Grammars, Wanted};
pub use source::{
    CHOICES, CallArguments, CallForm, CallText, Form, GRAMMAR_BYTES, REGEX_BYTES, SCHEMA_BYTES,
    SCHEMA_DEPTH, SCHEMA_VALUES, Source, Whitespace,
};
pub use thinking::{Markers, Start};
