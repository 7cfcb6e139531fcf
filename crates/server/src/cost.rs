//! The bytes of memory that are charged to a request.
//!
//! A request is charged twice. The first charge covers its body and the parsed values, until its
//! prompts are token ids. The second covers its choices and its response, until the response has
//! been sent. The memory of a compiled grammar is added to the second charge.

use forebay_egress::LOGPROB_JSON;
use forebay_engine::History;

/// Bytes of memory per byte of a body: the body, its contiguous copy, and the parsed values.
const UNREAD: usize = 4;
/// Bytes of a parsed request per byte of its body: strings, rendered prompt and token ids.
const READ: usize = 3;
/// Bytes of one of the JSON values that are kept unparsed, including the chat template's copy.
const VALUE: usize = 512;
/// The fixed bytes of each request.
const REQUEST: usize = 4096;
/// Bytes of a choice: its entries in the queue, the egress and the mailbox.
const CHOICE: usize = 4096;
/// Bytes of a token id.
const TOKEN: usize = size_of::<i32>();
/// Bytes of a log-probability in memory: a token id and a value.
const LOGPROB: usize = 8;
/// Bytes of a generated token: its id in the server and in the engine, and its text.
const GENERATED: usize = 12;
/// The maximum number of tokens that are charged to a choice in advance. Few answers are longer;
/// further tokens are charged when they are generated.
const EXPECTED: u32 = 4096;
/// Bytes of an element of an embedding: two copies as `f32`, and its JSON text.
const ELEMENT: usize = 2 * size_of::<f32>() + 16;

/// Bytes of a request whose body has `body` bytes, received or still expected.
pub(crate) fn unread(body: usize) -> usize {
    REQUEST.saturating_add(body.saturating_mul(UNREAD))
}

/// Bytes of the parsed form of a body of `body` bytes. Its embeddings take `embeds` more bytes, and
/// `values` JSON values are kept unparsed.
pub(crate) fn read(body: usize, embeds: usize, values: usize) -> usize {
    REQUEST + body * READ + embeds + values * VALUE
}

/// Bytes of prompts and their choices.
pub(crate) fn choices(prompts: impl Iterator<Item = Size>) -> usize {
    prompts.map(|size| size.bytes()).fold(0, usize::saturating_add)
}

/// Bytes of `inputs` pooled prompts with `tokens` tokens in all, and their vectors of `size`
/// elements.
pub(crate) fn inputs(inputs: usize, tokens: usize, size: usize) -> usize {
    let vectors = inputs.saturating_mul(CHOICE + ELEMENT * size);
    vectors.saturating_add(2 * TOKEN * tokens)
}

/// The sizes of a prompt and its choices.
pub(crate) struct Size {
    /// The number of tokens of the prompt.
    pub(crate) prompt: usize,
    /// The number of tokens in which drafts are looked up.
    pub(crate) indexed: usize,
    /// The maximum number of tokens of a choice.
    pub(crate) max_tokens: u32,
    pub(crate) choices: usize,
    /// The number of log-probabilities per generated token.
    pub(crate) candidates: usize,
    /// The number of allowed token ids.
    pub(crate) allowed: usize,
    /// The number of log-probabilities per prompt token.
    pub(crate) told: usize,
    /// Bytes of the response that repeat the prompt, and of its log-probabilities.
    pub(crate) repeated: usize,
}

impl Size {
    fn bytes(&self) -> usize {
        let Self { prompt, indexed, max_tokens, choices, candidates, allowed, told, repeated } =
            *self;
        let tokens = max_tokens.min(EXPECTED) as usize;
        // An admitted choice has a copy of the prompt's tokens.
        let choice = CHOICE + TOKEN * prompt + tokens * (GENERATED + LOGPROB_JSON * candidates);
        // All prompts and choices share the allowed ids. They are counted once per prompt, which is
        // more than they take.
        (TOKEN * (prompt + allowed) + LOGPROB * told * prompt)
            .saturating_add(repeated)
            .saturating_add(History::bytes(indexed))
            .saturating_add(choice.saturating_mul(choices))
    }
}

#[cfg(test)]
mod tests {
    use forebay_http::{ByteBudget, ClientId};

    use super::*;

    #[test]
    fn a_body_is_charged_before_and_after_it_is_parsed() {
        let budget = ByteBudget::new(1 << 20);
        let charge = budget.open(ClientId(1));
        charge.at_least(unread(1000)).unwrap();
        let before = budget.used();
        charge.at_least(unread(10)).unwrap();
        assert_eq!(budget.used(), before, "the charge only grows while the body is read");
        assert!(before >= 4000);
        charge.set(read(1000, 0, 0)).unwrap();
        assert!(budget.used() < before);
    }
}
