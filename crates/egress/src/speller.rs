//! Converts the tokens of a choice to the text that may be sent.

use std::sync::Arc;

use forebay_api::Generation;
use forebay_dialect::{Parser, Part, Parts};
use forebay_text::{Detokenizer, StopStrings, Tokenizer};

use crate::terms::Terms;

/// Converts tokens to text and splits it into parts. It finds stop strings in the content, and
/// holds back text that may become a stop string.
#[derive(Debug)]
pub struct Speller {
    detokenizer: Detokenizer,
    /// Finds reasoning and tool calls; `None` if all text is content.
    parser: Option<Box<Reader>>,
    stops: StopStrings,
    /// True if the text of the stop token is part of the output.
    include_stop: bool,
    /// Stop strings in the first `min_tokens` tokens are ignored.
    min_tokens: u32,
    tokens: u32,
    /// True if the last token was reasoning.
    reasons: bool,
}

#[derive(Debug)]
struct Reader {
    parser: Parser,
    /// The parts that the parser returned last.
    fresh: Parts,
}

/// Why an answer is complete before the engine has ended the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EarlyEnd {
    /// The stop string with this index was found.
    Stop(usize),
    /// The only required tool call is complete.
    Call,
}

impl Speller {
    /// Creates a speller at the start of an answer. `marks`: the special tokens that the dialect's
    /// parser needs, ascending.
    pub fn new(tokenizer: &Arc<Tokenizer>, terms: &Terms, marks: &Arc<[i32]>) -> Self {
        let Generation { include_stop, skip_special_tokens, .. } = &terms.generation;
        let parser = terms.reading.as_ref().map(|reading| {
            Box::new(Reader { parser: Parser::new(reading.clone()), fresh: Parts::default() })
        });
        let shown = parser.as_ref().map_or_else(Default::default, |_| Arc::clone(marks));
        Self {
            detokenizer: Detokenizer::showing(Arc::clone(tokenizer), *skip_special_tokens, shown),
            parser,
            stops: StopStrings::new(Arc::clone(&terms.stops), *include_stop),
            include_stop: *include_stop,
            min_tokens: terms.generation.sampling.min_tokens,
            tokens: 0,
            reasons: false,
        }
    }

    /// Appends the text of a token. `ends` is true for the stop token that ended the request.
    /// `fresh` is a buffer, whose content is overwritten.
    pub fn push(
        &mut self,
        id: i32,
        ends: bool,
        fresh: &mut String,
        out: &mut Parts,
    ) -> Option<EarlyEnd> {
        fresh.clear();
        self.tokens += 1;
        if !ends || self.include_stop {
            self.detokenizer.push(id, fresh);
        }
        let Some(mut reader) = self.parser.take() else { return self.content(fresh, out) };
        let before = reader.parser.is_reasoning();
        reader.parser.push(fresh, &mut reader.fresh);
        // The marks around the reasoning do not count as reasoning.
        self.reasons = before && reader.parser.is_reasoning() && !ends;
        let found = self.pass(&mut reader, out);
        self.parser = Some(reader);
        found
    }

    /// Appends the text that was held back, because the request has ended. `complete` is false if a
    /// length limit ended it.
    pub fn finish(
        &mut self,
        complete: bool,
        fresh: &mut String,
        out: &mut Parts,
    ) -> Option<EarlyEnd> {
        fresh.clear();
        self.detokenizer.finish(fresh);
        let found = match self.parser.take() {
            None => self.content(fresh, out),
            Some(mut reader) => {
                reader.parser.push(fresh, &mut reader.fresh);
                reader.parser.finish(complete, &mut reader.fresh);
                let found = self.pass(&mut reader, out);
                self.parser = Some(reader);
                found.filter(|found| *found != EarlyEnd::Call)
            }
        };
        if found.is_none() {
            out.content_with(|out| self.stops.finish(out));
        }
        found
    }

    /// True if a tool call is complete that the client did not force.
    pub fn has_called(&self) -> bool {
        self.parser.as_ref().is_some_and(|reader| reader.parser.has_chosen())
    }

    /// True if the last token belonged to reasoning.
    pub fn reasons(&self) -> bool {
        self.reasons
    }

    /// Returns the stop string with this index.
    pub fn stop(&self, index: usize) -> String {
        self.stops.text(index).to_owned()
    }

    /// Moves the parts that were read to `out`.
    fn pass(&mut self, reader: &mut Reader, out: &mut Parts) -> Option<EarlyEnd> {
        let mut found = None;
        for part in reader.fresh.iter() {
            if let Part::Content(text) = part {
                found = self.content(text, out);
                if found.is_some() {
                    break;
                }
            } else {
                // A stop string does not match across a part of another kind, such as reasoning.
                out.content_with(|out| self.stops.finish(out));
                out.part(part);
            }
        }
        reader.fresh.clear();
        found.or(reader.parser.is_over().then_some(EarlyEnd::Call))
    }

    /// Appends text of the content, and searches it for stop strings.
    fn content(&mut self, fresh: &str, out: &mut Parts) -> Option<EarlyEnd> {
        if self.tokens <= self.min_tokens {
            out.content(fresh);
            return None;
        }
        out.content_with(|out| self.stops.push(fresh, out)).map(EarlyEnd::Stop)
    }
}
