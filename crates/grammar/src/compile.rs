//! Compiles a source to a template: a matcher in its initial state, with the first mask.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::api::{StopReason, TopLevelGrammar};
use llguidance::earley::Parser;
use llguidance::{Matcher, TokenParser, panic_utils};
use parking_lot::Mutex;
use serde_json::json;

use crate::error::GrammarError;
use crate::footprint::Footprint;
use crate::source::{CHOICES, Form, Source};
use crate::vocabulary::Vocabulary;
use crate::work::Work;
use crate::{calls, ebnf, expansion, lark, schema, tag};

/// The prefix of llguidance's errors that report a panic.
const PANIC: &str = "panic: ";

/// The largest size of a template in bytes.
pub(crate) const TEMPLATE_BYTES: usize = 32 << 20;

/// A matcher, with a parser that shares its lexer and exposes counts that the matcher does not
/// expose.
pub(crate) struct CountedMatcher {
    pub(crate) matcher: Matcher,
    parser: Parser,
}

impl CountedMatcher {
    /// The size of the lexer in bytes, which grows with use.
    pub(crate) fn bytes(&self) -> usize {
        self.parser.lexer_stats().num_bytes
    }

    /// The size of the vocabulary of the compiler.
    pub(crate) fn tokens(&self) -> usize {
        self.matcher.tok_env().map_or(0, |env| env.tok_trie().vocab_size())
    }
}

/// A compiled source. Each request gets a copy of its matcher.
pub(crate) struct Template {
    /// The parser in its initial state. Copies are independent of it.
    parser: Mutex<TokenParser>,
    /// The mask for the first token, computed once because it is by far the most expensive.
    first: Arc<[u32]>,
    /// The model's end-of-sequence ids.
    eos: Arc<[i32]>,
    footprint: Footprint,
    /// The paths of schema keywords that are not enforced.
    left_out: Arc<[String]>,
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Template").finish_non_exhaustive()
    }
}

impl Template {
    /// Compiles `source`. With `lenient`, a schema is accepted even if only part of it can be
    /// enforced.
    pub(crate) fn new(
        vocabulary: &Vocabulary,
        source: &Source,
        lenient: bool,
    ) -> Result<Self, GrammarError> {
        let (bytes, limit) = (source.bytes(), source.limit());
        if bytes > limit {
            return Err(GrammarError::invalid(format!("{bytes} bytes are more than {limit}")));
        }
        let work = &mut Work::default();
        let mut parsed = Vec::new();
        let mut left_out = Vec::new();
        let from_lark = |text: String| {
            expansion::check(&text)?;
            Ok(TopLevelGrammar::from_lark(text))
        };
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
                expansion::classes(text)?;
                let schema = schema::read(text, work)?;
                parsed.push((String::new(), schema.clone()));
                TopLevelGrammar::from_json_schema(schema::with_options(
                    schema,
                    &source.whitespace,
                    lenient,
                ))
            }
            Form::Regex(pattern) => from_lark(format!("start: {}", tag::regex(pattern)?))?,
            Form::Choice(choices) => {
                if choices.is_empty() || choices.len() > CHOICES {
                    let reason = format!("{} choices are not from 1 to {CHOICES}", choices.len());
                    return Err(GrammarError::invalid(reason));
                }
                from_lark(lark::choice(choices))?
            }
            Form::Lark(text) => {
                lark::no_options(text)?;
                from_lark(text.to_string())?
            }
            Form::Ebnf(text) => from_lark(ebnf::to_lark(text)?)?,
            Form::StructuralTag(text) => {
                from_lark(tag::to_lark(text, &source.whitespace, lenient, work)?)?
            }
            Form::Calls(form) => {
                let calls = calls::to_lark(form, &source.whitespace, lenient, work)?;
                (parsed, left_out) = (calls.schemas, calls.left_out);
                from_lark(calls.lark)?
            }
        };
        let mut explain = |said: &str| {
            // llguidance counts symbols and states in small integers, and asserts that they fit.
            if said.starts_with(PANIC) {
                return GrammarError::invalid("it is too large to be compiled");
            }
            let explain = |(path, schema): &calls::Named| {
                tag::below(path, schema::explain(schema, said, work))
            };
            let errors = parsed.iter().map(explain);
            let named = |error: &GrammarError, path: &str| match error {
                GrammarError::Invalid { path: found, .. } => found != path,
                _ => false,
            };
            // Reports the first error whose path names a keyword within a schema.
            let found = errors.zip(&parsed).find(|(error, (path, _))| named(error, path));
            found.map_or_else(|| GrammarError::invalid(brief(said)), |(error, _)| error)
        };
        let parser = vocabulary.factory.create_parser(grammar);
        let mut parser = parser.map_err(|error| explain(&format!("{error:#}")))?;
        let first = panic_utils::catch_unwind(AssertUnwindSafe(|| {
            parser.start_without_prompt();
            if parser.stop_reason() == StopReason::NotStopped {
                parser.compute_mask()
            } else {
                // A grammar that accepts only the empty text allows only end tokens.
                Ok(parser.token_env.tok_trie().eos_token_set())
            }
        }));
        let first = first.map_err(|error| explain(&error.to_string()))?;
        let eos = vocabulary.factory.tok_env().tok_trie().eos_tokens();
        let eos = eos.iter().map(|id| id.cast_signed()).collect();
        let first: Arc<[u32]> = first.as_slice().into();
        let footprint = Footprint::new(&parser.parser, source.size() + size_of_val(&*first));
        if footprint.kept > TEMPLATE_BYTES {
            let kept = footprint.kept;
            let reason = format!("compiled it takes {kept} bytes, more than {TEMPLATE_BYTES}");
            return Err(GrammarError::invalid(reason));
        }
        let left_out = left_out.into();
        Ok(Self { first, eos, parser: Mutex::new(parser), footprint, left_out })
    }

    /// Returns the memory that the compiled source takes.
    pub(crate) fn footprint(&self) -> Footprint {
        self.footprint
    }

    /// Returns a copy of the matcher, for one request.
    pub(crate) fn matcher(&self) -> CountedMatcher {
        let parser = self.parser.lock().deep_clone();
        CountedMatcher { parser: parser.parser.clone(), matcher: Matcher::new(Ok(parser)) }
    }

    /// Returns the paths of schema keywords that are not enforced.
    pub(crate) fn left_out(&self) -> &Arc<[String]> {
        &self.left_out
    }

    /// Returns the model's end-of-sequence ids.
    pub(crate) fn eos(&self) -> &[i32] {
        &self.eos
    }

    /// Returns the mask for the first token.
    pub(crate) fn first(&self) -> &[u32] {
        &self.first
    }
}

/// Returns the part of an error that is useful to a client: after its first line, the error repeats
/// the grammar.
pub(crate) fn brief(said: &str) -> String {
    const MOST: usize = 300;
    let line = said.lines().find(|line| !line.trim().is_empty()).unwrap_or_default().trim();
    let shown = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
    line.chars().take(MOST).map(shown).collect()
}
