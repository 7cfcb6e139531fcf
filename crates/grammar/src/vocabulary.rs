//! Converts the tokenizer to llguidance's form: a trie of the bytes of every token.

use std::sync::Arc;

use forebay_text::Tokenizer;
use llguidance::ParserFactory;
use llguidance::api::ParserLimits;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{
    InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv,
};

use crate::error::GrammarError;

/// The tokenizer is used for forced text only if it encodes all of these texts losslessly.
const SAMPLES: [&str; 6] = ["a", " a", "{\"name\": \"", "\n\n  x", "</think>", "naïve 7.5"];

/// The limits on compiling a source and computing a mask. The largest known public schemas, those
/// of FHIR, take 500 000 units of lexer fuel and 200 000 symbols.
const LIMITS: ParserLimits = ParserLimits {
    max_items_in_row: 2000,
    initial_lexer_fuel: 600_000,
    // With the limits `step_lexer_fuel` and `step_max_items`, computing a mask takes at most about
    // 15 ms.
    step_lexer_fuel: 200_000,
    step_max_items: 50_000,
    // Each state takes one or two kilobytes.
    max_lexer_states: 50_000,
    max_grammar_size: 300_000,
    precompute_large_lexemes: true,
    // Errors are shown to clients, for whom the state of the parser is useless.
    verbose_errors: false,
};

/// Creates parsers for one tokenizer. Building the trie takes a second for a large vocabulary, and
/// is done once.
pub(crate) struct Vocabulary {
    pub(crate) factory: ParserFactory,
}

impl Vocabulary {
    /// Builds the vocabulary of the tokens below `vocab_size`. `eos` are the ids that may end an
    /// answer.
    pub(crate) fn new(
        tokenizer: &Arc<Tokenizer>,
        eos: &[i32],
        vocab_size: u32,
    ) -> Result<Self, GrammarError> {
        if !tokenizer.adds_bytes() {
            let why = "the model's tokenizer decodes tokens together, so that no grammar can be followed token by token";
            return Err(GrammarError::Tokenizer(why.to_owned()));
        }
        let tokens = tokenizer.vocab_size().min(vocab_size as usize);
        let known = |id: &&i32| usize::try_from(**id).is_ok_and(|id| id < tokens);
        let eos: Vec<TokenId> = eos.iter().filter(known).map(|id| id.cast_unsigned()).collect();
        let Some(&first) = eos.first() else {
            let why = "the model has no end-of-sequence token, so that no answer could be ended";
            return Err(GrammarError::Tokenizer(why.to_owned()));
        };
        let words: Vec<Vec<u8>> = (0..tokens).map(|id| word(tokenizer, id)).collect();
        let info = TokRxInfo::new(words.len() as u32, first);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(&eos);
        let canonical = SAMPLES.iter().all(|text| encodes_exactly(tokenizer, text));
        let env: TokEnv = Arc::new(Env { trie, tokenizer: Arc::clone(tokenizer), canonical });
        let slices = SlicedBiasComputer::general_slices();
        let caps = InferenceCapabilities::default();
        let broken = |error: anyhow::Error| GrammarError::Tokenizer(error.to_string());
        let mut factory = ParserFactory::new(&env, caps, &slices).map_err(broken)?;
        factory.quiet();
        *factory.limits_mut() = LIMITS;
        Ok(Self { factory })
    }
}

/// Returns the bytes of a token. The bytes of a special token start with a marker, so that no text
/// matches them.
fn word(tokenizer: &Tokenizer, id: usize) -> Vec<u8> {
    let Ok(id) = i32::try_from(id) else { return Vec::new() };
    let bytes = tokenizer.token_bytes(id);
    if tokenizer.is_special(id) && !bytes.is_empty() {
        [&[TokTrie::SPECIAL_TOKEN_MARKER], &bytes[..]].concat()
    } else {
        bytes
    }
}

fn encodes_exactly(tokenizer: &Tokenizer, text: &str) -> bool {
    let ids = tokenizer.encode_as_text(text).unwrap_or_default();
    let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).collect();
    bytes == text.as_bytes()
}

struct Env {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
    canonical: bool,
}

impl TokenizerEnv for Env {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        if !self.canonical {
            return self.trie.greedy_tokenize(bytes);
        }
        self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            match self.tokenizer.encode_as_text(text) {
                Ok(ids) => ids.into_iter().map(i32::cast_unsigned).collect(),
                Err(_) => self.trie.greedy_tokenize(text.as_bytes()),
            }
        })
    }

    fn tokenize_is_canonical(&self) -> bool {
        self.canonical
    }
}
