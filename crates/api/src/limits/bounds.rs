//! Bounds that several parameters share.

use forebay_grammar::{CHOICES, GRAMMAR_BYTES, REGEX_BYTES, SCHEMA_BYTES};

use super::{Bound, LOGPROBS, NAME_BYTES, Param, WORD_BYTES};

/// Returns the bound of a count (for example of tokens) that is at least `least`.
pub(crate) const fn count(least: u32) -> Bound {
    Bound::Amount { least: least as f64, most: u32::MAX as f64 }
}

/// Numbers within the range of a 32-bit or 64-bit integer.
pub(crate) const I32: Bound = Bound::Number { least: i32::MIN as f64, most: i32::MAX as f64 };
pub(crate) const I64: Bound = Bound::Number { least: i64::MIN as f64, most: i64::MAX as f64 };
/// A number of tokens. A negative number means the rest of the context.
pub(crate) const COUNT_OR_REST: Bound =
    Bound::Amount { least: i64::MIN as f64, most: u32::MAX as f64 };
/// A number of tokens, or -1 for all.
pub(crate) const COUNT_OR_ALL: Bound = Bound::Amount { least: -1.0, most: u32::MAX as f64 };
/// A seed: any 64-bit integer, signed or unsigned.
pub(crate) const SEEDS: Bound = Bound::Number { least: i64::MIN as f64, most: u64::MAX as f64 };
/// The number of alternative tokens to report log-probabilities for.
pub(crate) const ALTERNATIVES: Bound = Bound::Number { least: 0.0, most: LOGPROBS as f64 };
/// The name of a model, a user or a request.
pub(crate) const NAME: Bound = Bound::Text(NAME_BYTES);
/// A role, a type, or another short word.
pub(crate) const WORD: Bound = Bound::Text(WORD_BYTES);
/// A schema, pattern or grammar for the output, as JSON or as text.
pub(crate) const SOURCE: Bound = Bound::Form(SCHEMA_BYTES);
pub(crate) const PATTERN: Bound = Bound::Form(REGEX_BYTES);
pub(crate) const GRAMMAR: Bound = Bound::Form(GRAMMAR_BYTES);
/// A list of texts, one of which the output must be.
pub(crate) const ANSWERS: Bound =
    Bound::Strings { count: CHOICES, each: GRAMMAR_BYTES, total: GRAMMAR_BYTES };
/// Creates the parameter for a field of an object. The fields of such an object are declared by its
/// type, and not by a table (`parameter`).
pub(crate) const fn param(name: &'static str, bound: Bound) -> Param {
    Param { name, bound }
}
