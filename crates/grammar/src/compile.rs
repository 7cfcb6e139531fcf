//! The way from a source to a template: a matcher at the beginning of an answer, with the first
//! mask.

use std::fmt;
use std::sync::Arc;

use llguidance::Matcher;
use llguidance::api::TopLevelGrammar;
use parking_lot::Mutex;
use serde_json::json;

use crate::error::GrammarError;
use crate::source::{CHOICES, Form, Source};
use crate::vocabulary::Vocabulary;
use crate::{calls, ebnf, lark, schema, tag};

/// The beginning of llguidance's errors that were panics.
const PANIC: &str = "panic: ";

/// A compiled source. Requests get copies of its matcher.
pub(crate) struct Template {
    /// The matcher at its beginning. A copy of it is independent of it.
    matcher: Mutex<Matcher>,
    /// The mask of an answer's first token. It is computed once, because the first mask is by far
    /// the dearest.
    first: Arc<[u32]>,
    /// The model's end-of-sequence ids.
    eos: Arc<[i32]>,
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Template").finish_non_exhaustive()
    }
}

impl Template {
    /// Compiles `source`. With `lenient`, schemas pass of which only a part can be enforced.
    pub(crate) fn new(
        vocabulary: &Vocabulary,
        source: &Source,
        lenient: bool,
    ) -> Result<Self, GrammarError> {
        let (bytes, limit) = (source.bytes(), source.limit());
        if bytes > limit {
            return Err(GrammarError::invalid(format!("{bytes} bytes are more than {limit}")));
        }
        let mut parsed = Vec::new();
        let grammar = match &source.form {
            Form::JsonObject => {
                let schema = json!({ "type": "object" });
                TopLevelGrammar::from_json_schema(schema::with_options(
                    schema,
                    &source.whitespace,
                    lenient,
                ))
            }
            Form::JsonSchema(text) => {
                let schema = schema::read(text)?;
                parsed.push((String::new(), schema.clone()));
                TopLevelGrammar::from_json_schema(schema::with_options(
                    schema,
                    &source.whitespace,
                    lenient,
                ))
            }
            Form::Regex(pattern) => {
                TopLevelGrammar::from_lark(format!("start: {}", tag::regex(pattern)?))
            }
            Form::Choice(choices) => {
                if choices.is_empty() || choices.len() > CHOICES {
                    let reason = format!("{} choices are not from 1 to {CHOICES}", choices.len());
                    return Err(GrammarError::invalid(reason));
                }
                TopLevelGrammar::from_lark(lark::choice(choices))
            }
            Form::Lark(text) => {
                lark::no_options(text)?;
                TopLevelGrammar::from_lark(text.to_string())
            }
            Form::Ebnf(text) => TopLevelGrammar::from_lark(ebnf::to_lark(text)?),
            Form::StructuralTag(text) => {
                TopLevelGrammar::from_lark(tag::to_lark(text, &source.whitespace, lenient)?)
            }
            Form::Calls(form) => {
                let (lark, schemas) = calls::to_lark(form, &source.whitespace, lenient)?;
                parsed = schemas;
                TopLevelGrammar::from_lark(lark)
            }
        };
        let explain = |said: &str| {
            // It counts symbols and states in small numbers, and asserts that they do.
            if said.starts_with(PANIC) {
                return GrammarError::invalid("it is too large to be compiled");
            }
            let explain =
                |(path, schema): &calls::Named| tag::below(path, schema::explain(schema, said));
            let errors = parsed.iter().map(explain);
            let named = |error: &GrammarError, path: &str| match error {
                GrammarError::Invalid { path: found, .. } => found != path,
                _ => false,
            };
            // The one that finds a place in its schema.
            let found = errors.zip(&parsed).find(|(error, (path, _))| named(error, path));
            found.map_or_else(|| GrammarError::invalid(brief(said)), |(error, _)| error)
        };
        let parser = vocabulary.factory.create_parser(grammar);
        let parser = parser.map_err(|error| explain(&format!("{error:#}")))?;
        let mut matcher = Matcher::new(Ok(parser));
        // A grammar that only the empty text fits has nothing to say but the end.
        let first = matcher.compute_mask_or_eos().map_err(|error| explain(&error.to_string()))?;
        let eos = vocabulary.factory.tok_env().tok_trie().eos_tokens();
        let eos = eos.iter().map(|id| id.cast_signed()).collect();
        Ok(Self { first: first.as_slice().into(), eos, matcher: Mutex::new(matcher) })
    }

    /// A matcher of one's own.
    pub(crate) fn matcher(&self) -> Matcher {
        self.matcher.lock().deep_clone()
    }

    /// The model's end-of-sequence ids.
    pub(crate) fn eos(&self) -> Arc<[i32]> {
        Arc::clone(&self.eos)
    }

    /// The mask at the beginning.
    pub(crate) fn first(&self) -> Arc<[u32]> {
        Arc::clone(&self.first)
    }
}

/// The part of an error that a client wants to read: beyond its first line it repeats the grammar.
pub(crate) fn brief(said: &str) -> String {
    const MOST: usize = 300;
    let line = said.lines().find(|line| !line.trim().is_empty()).unwrap_or_default().trim();
    let shown = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
    line.chars().take(MOST).map(shown).collect()
}
