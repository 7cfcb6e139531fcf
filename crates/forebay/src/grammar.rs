//! Structured output: the threads that compile grammars, and the marks around a model's reasoning.

use std::io;
use std::sync::Arc;

use forebay_dialect::Dialect;
use forebay_grammar::{GrammarConfig, Grammars, Markers, ThreadStart};
use forebay_server::Guard;
use forebay_text::Tokenizer;

use crate::model::Model;

/// Tokens of at most this many bytes are common in any text, so they can't identify a mark.
const SHORT: usize = 4;

/// Starts the threads under `guard`. Returns `None` if answers can't be constrained.
pub(crate) fn start(
    config: Option<GrammarConfig>,
    tokenizer: &Arc<Tokenizer>,
    model: &Model,
    guard: &Guard,
) -> io::Result<Option<Grammars>> {
    let Some(config) = config else { return Ok(None) };
    let guard = guard.clone();
    let start: ThreadStart = Arc::new(move |thread, work| guard.start(thread, work));
    let eos = &model.eos_token_ids;
    Grammars::new(config, Arc::clone(tokenizer), eos, model.vocab_size, &start).map(Some)
}

/// The marks around a model's reasoning. Each mark has to begin with a token that is rare in other
/// text. The closing mark has to be a single token, because no other tokenisation of a mark is
/// recognised. `None`: the model has no such marks.
pub(crate) fn markers(tokenizer: &Tokenizer, dialect: Dialect) -> Option<Markers> {
    let (open, close) = dialect.reasoning_marks()?;
    let encode = |mark: &str| tokenizer.encode(mark.trim_end(), false).ok();
    let (open, close) = (encode(open)?, encode(close)?);
    let own = |token: Option<&i32>| token.is_some_and(|&id| tokenizer.token_text(id).len() > SHORT);
    (own(open.first()) && own(close.first()) && close.len() == 1)
        .then(|| Markers { open: open.into(), close: close.into() })
}
