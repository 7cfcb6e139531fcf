//! From one request's tokens to what may be sent.

use std::sync::Arc;

use forebay_api::Generation;
use forebay_dialect::Parts;
use forebay_text::{Detokenizer, StopStrings, Tokenizer};

use crate::call::Terms;

/// Makes text of tokens, holds back what may become a stop string, and finds those.
#[derive(Debug)]
pub(crate) struct Speller {
    detokenizer: Detokenizer,
    stops: StopStrings,
    /// Whether the token that ends the request is spelled too.
    include_stop: bool,
    /// Stop strings do not count up to here.
    min_tokens: u32,
    tokens: u32,
}

/// What ends an answer before the engine does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// The stop string with this number.
    Stop(usize),
}

impl Speller {
    /// At the start of a request's text.
    pub(crate) fn new(tokenizer: &Arc<Tokenizer>, terms: &Terms) -> Self {
        let Generation { include_stop, skip_special_tokens, .. } = &terms.generation;
        Self {
            detokenizer: Detokenizer::new(Arc::clone(tokenizer), *skip_special_tokens),
            stops: StopStrings::new(Arc::clone(&terms.stops), *include_stop),
            include_stop: *include_stop,
            min_tokens: terms.generation.sampling.min_tokens,
            tokens: 0,
        }
    }

    /// Appends what a token brings. `ends`: it is the stop token that ended the request. `fresh` is a buffer.
    pub(crate) fn push(
        &mut self,
        id: i32,
        ends: bool,
        fresh: &mut String,
        out: &mut Parts,
    ) -> Option<Found> {
        fresh.clear();
        self.tokens += 1;
        if !ends || self.include_stop {
            self.detokenizer.push(id, fresh);
        }
        self.content(fresh, out)
    }

    /// Appends what was held back: the request has ended.
    pub(crate) fn finish(&mut self, fresh: &mut String, out: &mut Parts) -> Option<Found> {
        fresh.clear();
        self.detokenizer.finish(fresh);
        let found = self.content(fresh, out);
        if found.is_none() {
            out.content_with(|out| self.stops.finish(out));
        }
        found
    }

    /// A stop string that was found.
    pub(crate) fn stop(&self, index: usize) -> String {
        self.stops.text(index).to_owned()
    }

    /// Appends text for the reader, and looks for stop strings in it.
    fn content(&mut self, fresh: &str, out: &mut Parts) -> Option<Found> {
        if self.tokens <= self.min_tokens {
            out.content(fresh);
            return None;
        }
        out.content_with(|out| self.stops.push(fresh, out)).map(Found::Stop)
    }
}
