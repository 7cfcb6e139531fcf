//! Measures masks for `benchmarks/mask_times.py`:
//! `masks TOKENIZER.json VOCABULARY SOURCES.json SEED`.
//!
//! `SOURCES.json` is a list of JSON schemas. One line is printed per schema: the microseconds from
//! the request to the first mask, then the microseconds of each further mask of a random walk. The
//! walk draws each token from the mask. A schema that is rejected has no line.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use forebay_engine::Allowed;
use forebay_grammar::{
    Bounds, Form, GrammarConfig, Grammars, Source, ThreadStart, WantedForm, Whitespace,
};
use forebay_text::Tokenizer;

type Failure = Box<dyn std::error::Error>;

/// The number of tokens of a walk.
const STEPS: usize = 200;

/// SplitMix64 (Steele, Lea, Flood 2014).
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Draws one of the tokens that a mask allows.
fn drawn(mask: &[u32], state: &mut u64) -> Option<i32> {
    let count: u64 = mask.iter().map(|word| u64::from(word.count_ones())).sum();
    let mut left = next(state) % count.max(1);
    for (word, bits) in (0..).zip(mask) {
        let ones = u64::from(bits.count_ones());
        if left >= ones {
            left -= ones;
            continue;
        }
        let mut bits = *bits;
        for _ in 0..left {
            bits &= bits - 1;
        }
        return Some(32 * word + bits.trailing_zeros().cast_signed());
    }
    None
}

fn main() -> Result<(), Failure> {
    let mut words = std::env::args().skip(1);
    let mut word = || words.next().ok_or("masks TOKENIZER.json VOCABULARY SOURCES.json SEED");
    let tokenizer = Arc::new(Tokenizer::from_file(Path::new(&word()?))?);
    let vocabulary: u32 = word()?.parse()?;
    let schemas: Vec<serde_json::Value> = serde_json::from_slice(&std::fs::read(word()?)?)?;
    let mut state: u64 = word()?.parse()?;
    let eos = tokenizer.token_to_id("<|im_end|>").ok_or("the tokenizer has no <|im_end|>")?;
    let start: ThreadStart = Arc::new(|thread, work| thread.spawn(work));
    let grammars = Grammars::new(GrammarConfig::default(), tokenizer, &[eos], vocabulary, &start)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut mask = vec![0; vocabulary.div_ceil(32) as usize];
    let ask = |schema: String| {
        let source =
            Source { form: Form::JsonSchema(schema.into()), whitespace: Whitespace::Bounded };
        let wanted = WantedForm {
            source: Some(source),
            reasoning: None,
            bounds: Bounds::default(),
            choices: 1,
            said: Vec::new(),
            client: 0,
        };
        runtime.block_on(grammars.constraints(wanted))
    };
    // This request waits until the trie of the vocabulary is built in the background.
    ask(r#"{"type": "null"}"#.into())?;
    let mut out = io::stdout().lock();
    for schema in schemas {
        let begun = Instant::now();
        // A generated schema may have no valid value.
        let Ok(mut constraints) = ask(schema.to_string()) else { continue };
        let mut constraint = constraints.choices.pop().ok_or("no constraint")?;
        let mut times = Vec::with_capacity(STEPS);
        for _ in 0..STEPS {
            let before = if times.is_empty() { begun } else { Instant::now() };
            let allowed = constraint.mask(&mut mask)?;
            times.push(before.elapsed().as_nanos() as f64 / 1e3);
            if allowed == Allowed::Everything {
                break;
            }
            let Some(token) = drawn(&mask, &mut state).filter(|&token| token != eos) else { break };
            constraint.accept(token)?;
        }
        let times: Vec<String> = times.iter().map(|us| format!("{us:.2}")).collect();
        writeln!(out, "{}", times.join(" "))?;
    }
    Ok(())
}
