//! Structured output: JSON schemas, regular expressions and grammars as constraints on answers.
//!
//! A [`Source`] is the form that a client requests. [`Grammars`] compiles it on separate threads,
//! and caches the result for later requests with the same source. Each choice gets a
//! [`forebay_engine::Constraint`], which computes a mask for the engine before every token. The
//! parser is llguidance's (Earley over derivatives of regular expressions). This crate adds what a
//! server needs: limits, a cache, other notations, and other restrictions on an answer.
//!
//! ```
//! use std::sync::Arc;
//!
//! use forebay_grammar::{Bounds, Form, GrammarConfig, Grammars, ThreadStart, WantedForm};
//! use forebay_text::Tokenizer;
//!
//! # let end = 0;
//! # let vocabulary = 2048;
//! let file = "../text/tests/data/tiny-llama-tokenizer.json";
//! let tokenizer = Arc::new(Tokenizer::from_file(file.as_ref())?);
//! let config = GrammarConfig::default();
//! let start: ThreadStart = Arc::new(|thread, work| thread.spawn(work));
//! let grammars = Grammars::new(config, Arc::clone(&tokenizer), &[end], vocabulary, &start)?;
//! let bounds = Bounds { ends: [end].into(), ..Bounds::default() };
//! let source = Some(Form::Choice(["yes".to_owned(), "no".to_owned()].into()).into());
//! let wanted =
//!     WantedForm { source, reasoning: None, bounds, choices: 1, said: Vec::new(), client: 0 };
//!
//! let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
//! let mut constraints = runtime.block_on(grammars.constraints(wanted))?;
//! let mut constraint = constraints.choices.pop().expect("one choice");
//! for id in tokenizer.encode_as_text("no")? {
//!     constraint.accept(id)?;
//! }
//! assert!(constraint.accept(tokenizer.encode_as_text("!")?[0]).is_err(), "it has ended");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod arguments;
mod attic;
mod calls;
mod compile;
mod ebnf;
mod error;
mod expansion;
mod faults;
mod finite;
mod footprint;
mod formats;
mod growth;
mod keywords;
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
mod work;

pub use error::GrammarError;
pub use rules::{Bounds, Reasoning};
pub use service::{
    CompileHook, Constraints, GrammarConfig, GrammarStats, Grammars, ThreadStart, WantedForm,
};
pub use source::{
    CHOICES, CallArguments, CallForm, CallText, Form, GRAMMAR_BYTES, REGEX_BYTES, SCHEMA_BYTES,
    SCHEMA_DEPTH, SCHEMA_VALUES, Source, Whitespace,
};
pub use thinking::{Markers, Start};
