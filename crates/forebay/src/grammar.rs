//! The form of answers: the threads that compile it, and what is around a model's reasoning.

use std::io;
use std::sync::Arc;

use forebay_grammar::{GrammarConfig, Grammars, Markers};
use forebay_server::Guard;
use forebay_text::Tokenizer;

use crate::flags::GrammarFlags;
use crate::model::Model;

/// Reasoning as most families write it. A token of its own for each is a sign that the model was trained on it.
const REASONING: (&str, &str) = ("<think>", "</think>");

/// Starts the threads under `guard`; `None`: there are none for such a model, or none are wanted.
pub(crate) fn start(
    flags: &GrammarFlags,
    tokenizer: &Arc<Tokenizer>,
    model: &Model,
    eos: &[i32],
    guard: &Guard,
) -> io::Result<Option<Grammars>> {
    if flags.no_grammar || model.pooling.is_some() {
        return Ok(None);
    }
    let config = GrammarConfig {
        threads: flags.grammar_threads.get(),
        lenient: flags.grammar_lenient,
        ..GrammarConfig::default()
    };
    let start = |thread, work: Box<dyn FnMut() + Send>| guard.start(thread, work);
    Grammars::new(config, Arc::clone(tokenizer), eos, model.vocab_size, &start).map(Some)
}

/// What is around the reasoning of a model whose tokenizer has a token for its beginning and one for its end.
pub(crate) fn markers(tokenizer: &Tokenizer) -> Option<Markers> {
    let one = |marker| tokenizer.token_to_id(marker).map(|id| [id].into());
    Some(Markers { open: one(REASONING.0)?, close: one(REASONING.1)? })
}
