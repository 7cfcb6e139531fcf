//! Parameters, each with its bound.

use forebay_grammar::{CHOICES as CHOICES_OF_FORM, GRAMMAR_BYTES, REGEX_BYTES, SCHEMA_BYTES};

use crate::limits::{Bound, INPUTS, Param};

pub(super) const fn param(name: &'static str, bound: Bound) -> Param {
    Param { name, bound }
}
pub(super) const fn flag(name: &'static str) -> Param {
    param(name, Bound::Flag)
}
pub(super) const fn ignored(name: &'static str) -> Param {
    param(name, Bound::Ignored)
}
/// The form of an answer, as JSON or as text.
pub(super) const fn source(name: &'static str) -> Param {
    param(name, Bound::Form(SCHEMA_BYTES))
}
pub(super) const fn regex(name: &'static str) -> Param {
    param(name, Bound::Form(REGEX_BYTES))
}
pub(super) const fn grammar(name: &'static str) -> Param {
    param(name, Bound::Form(GRAMMAR_BYTES))
}
/// Texts; the answer is one of them.
pub(super) const fn choices(name: &'static str) -> Param {
    param(
        name,
        Bound::Strings { count: CHOICES_OF_FORM, each: GRAMMAR_BYTES, total: GRAMMAR_BYTES },
    )
}
pub(super) const fn text(name: &'static str, bytes: usize) -> Param {
    param(name, Bound::Text(bytes))
}
pub(super) const fn number(name: &'static str, least: f64, most: f64) -> Param {
    param(name, Bound::Number { least, most })
}
/// A number of tokens or the like, at least `least`.
pub(super) const fn count(name: &'static str, least: u32) -> Param {
    number(name, least as f64, u32::MAX as f64)
}

/// The smallest number above 0 that is one for the device too.
pub(super) const ABOVE_0: f64 = f32::MIN_POSITIVE as f64;
pub(super) const ANY: f64 = f32::MAX as f64;

/// One or many texts.
pub(super) const fn texts(name: &'static str) -> Param {
    param(name, Bound::Strings { count: INPUTS, each: usize::MAX, total: usize::MAX })
}
