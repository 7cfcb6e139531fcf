//! The forms in which families of models write reasoning, text and calls of tools.
//!
//! [`Dialect`] names the family of a model. Two things come from the one description of a family.
//! The [`Parser`] makes [`Parts`] of an answer that comes token by token. The grammar has a model
//! write calls and nothing else.

mod family;
mod finder;
mod grammar;
mod names;
mod parser;
mod parts;
mod python;
mod scan;
mod schema;

pub use family::Ids;
pub use grammar::{
    ArgumentStyle, ArgumentTags, CONTENT, CallGrammar, Instead, Marks, text_without,
};
pub use names::{Choice, Dialect, Evidence, UnknownName};
pub use parser::{Parser, Place, Reading, Start};
pub use parts::{Part, Parts};
pub use schema::Tools;
