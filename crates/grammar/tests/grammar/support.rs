//! Shared helpers of this crate's tests.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forebay_engine::{Allowed, Constraint};
use forebay_grammar::{
    Bounds, Constraints, Form, GrammarConfig, GrammarError, Grammars, Reasoning, Source,
    ThreadStart, WantedForm,
};
use forebay_text::Tokenizer;

/// The end-of-sequence token in the tests' byte-level tokenizer.
pub(crate) const EOS: i32 = 0;
pub(crate) const VOCABULARY: u32 = 2048;

pub(crate) fn tokenizer() -> Arc<Tokenizer> {
    let file =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../text/tests/data/tiny-llama-tokenizer.json");
    Arc::new(Tokenizer::from_file(&file).expect("a tokenizer"))
}

/// A generous time limit, so that no compilation is abandoned on a slow machine.
pub(crate) const HOUR: Duration = Duration::from_secs(3600);

/// The default settings, with a time limit that slow machines do not reach.
pub(crate) fn config() -> GrammarConfig {
    GrammarConfig { grammar_timeout: HOUR, ..GrammarConfig::default() }
}

pub(crate) fn start() -> ThreadStart {
    Arc::new(|thread, work| thread.spawn(work))
}

pub(crate) struct Bench {
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) grammars: Grammars,
    runtime: tokio::runtime::Runtime,
}

impl Bench {
    pub(crate) fn new(config: GrammarConfig) -> Self {
        Self::of(tokenizer(), config)
    }

    pub(crate) fn of(tokenizer: Arc<Tokenizer>, config: GrammarConfig) -> Self {
        let config = GrammarConfig { grammar_timeout: HOUR, ..config };
        let grammars = Grammars::new(config, Arc::clone(&tokenizer), &[EOS], VOCABULARY, &start());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        Self {
            tokenizer,
            grammars: grammars.expect("threads"),
            runtime: runtime.expect("a runtime"),
        }
    }

    pub(crate) fn constraints(&self, wanted: WantedForm) -> Result<Constraints, GrammarError> {
        self.runtime.block_on(self.grammars.constraints(wanted))
    }

    pub(crate) fn rules(&self, wanted: WantedForm) -> Box<dyn Constraint> {
        self.constraints(wanted).expect("a good source").choices.pop().expect("one choice")
    }

    /// Returns the constraint of a form.
    pub(crate) fn form(&self, form: Form) -> Box<dyn Constraint> {
        self.rules(wanted(Some(form.into())))
    }

    pub(crate) fn refused(&self, form: Form) -> GrammarError {
        self.constraints(wanted(Some(form.into()))).expect_err("a bad source")
    }

    /// True if the constraint accepts the text, as the tokenizer encodes it.
    pub(crate) fn fits(&self, mut constraint: Box<dyn Constraint>, text: &str) -> bool {
        let ids = self.tokenizer.encode_as_text(text).expect("tokens");
        ids.into_iter().all(|id| constraint.accept(id).is_ok()) && may(&mut *constraint, EOS)
    }

    /// Draws a random answer that ends as soon as it can; `None` if it did not end within `most`
    /// tokens.
    pub(crate) fn draw(
        &self,
        constraint: &mut dyn Constraint,
        seed: u64,
        most: usize,
    ) -> Option<String> {
        let mut said = Vec::new();
        let mut state = seed;
        for _ in 0..most {
            let ids = allowed(constraint);
            assert!(!ids.is_empty());
            if ids.contains(&EOS) {
                return Some(self.tokenizer.decode(&said, false).expect("text"));
            }
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let id = ids[(state >> 33) as usize % ids.len()];
            constraint.accept(id).expect("the mask allowed the token");
            said.push(id);
        }
        None
    }
}

pub(crate) fn wanted(source: Option<Source>) -> WantedForm {
    let bounds = Bounds { ends: [EOS].into(), ..Bounds::default() };
    WantedForm { source, reasoning: None, bounds, choices: 1, said: Vec::new(), client: 0 }
}

pub(crate) fn reasons(source: Option<Source>, reasoning: Reasoning) -> WantedForm {
    WantedForm { reasoning: Some(reasoning), ..wanted(source) }
}

/// Returns the ids that the constraint allows next.
pub(crate) fn allowed(constraint: &mut dyn Constraint) -> Vec<i32> {
    let mut words = vec![0; VOCABULARY.div_ceil(32) as usize];
    let all = 0..VOCABULARY.cast_signed();
    match constraint.mask(&mut words).expect("the constraint allows a token") {
        Allowed::Everything => all.collect(),
        Allowed::Some => all.filter(|&id| words[id as usize / 32] >> (id % 32) & 1 == 1).collect(),
    }
}

pub(crate) fn may(constraint: &mut dyn Constraint, id: i32) -> bool {
    allowed(constraint).contains(&id)
}
