//! The compiler of grammars, and the cache of its results.
//!
//! | thread | what |
//! |---|---|
//! | `grammar` (N) | builds the vocabulary's trie at the start, then compiles, one source at a time |
//! | `grammar-watch` (1) | abandons compilations that take too long, and replaces their threads |
//! | `grammar-free` (1) | frees matchers and templates |
//!
//! HTTP threads and the engine thread never compile or free a matcher. A choice gets its matcher
//! when its second mask is filled.

mod kept;
mod shared;
mod turns;

use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use forebay_engine::{Constraint, as_seconds};
use forebay_text::Tokenizer;
use serde::Serialize;
use tokio::sync::oneshot;

use self::shared::{Shared, Trie};
use crate::attic::Attic;
use crate::compile::Template;
use crate::error::GrammarError;
use crate::rules::{Bounds, Reasoning, Rules};
use crate::source::Source;

/// Stack for recursion over nested schemas and names in grammars.
const STACK_BYTES: usize = 32 << 20;

/// The settings by which grammars are compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct GrammarConfig {
    /// The number of threads that compile, at least one.
    pub grammar_threads: usize,
    /// The number of sources that may wait for a thread. One client may have at most half of them.
    #[serde(skip)]
    pub queue: usize,
    /// The longest time that a request waits for its grammar.
    #[serde(skip)]
    pub patience: Duration,
    /// The longest time that one compile may take.
    #[serde(serialize_with = "as_seconds")]
    pub grammar_timeout: Duration,
    /// Bytes of cached compiled grammars. While several clients have some, one may have at most
    /// half. Active matchers may grow by as much again.
    pub grammar_cache_bytes: usize,
    /// True if a schema is accepted although only a part of it can be enforced.
    pub grammar_lenient: bool,
}

impl Default for GrammarConfig {
    fn default() -> Self {
        Self {
            grammar_threads: 1,
            queue: 256,
            patience: Duration::from_secs(30),
            grammar_timeout: Duration::from_secs(2),
            grammar_cache_bytes: 256 << 20,
            grammar_lenient: false,
        }
    }
}

/// Counts of compiled, found, kept and waiting grammars.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GrammarStats {
    /// Sources that were compiled, or refused by the compiler.
    pub compiled: u64,
    /// Of these, sources that were refused.
    pub refused: u64,
    /// Requests whose source was compiled already, or queued.
    pub hits: u64,
    /// Sources that wait, or are being compiled.
    pub waiting: usize,
    /// Microseconds of compiling, without the trie.
    pub compile_us: u64,
    /// Microseconds that building the trie took; 0: not ready yet.
    pub trie_us: u64,
    /// Bytes of cached sources and their compiled forms.
    pub kept_bytes: usize,
    /// Compilations that were abandoned because they took too long.
    pub abandoned: u64,
    /// Of these, compiles that still run.
    pub running_on: usize,
}

/// The form and the bounds of a request's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedForm {
    /// The requested form; `None`: any.
    pub source: Option<Source>,
    /// The bounds of reasoning before the answer.
    pub reasoning: Option<Reasoning>,
    /// The other restrictions of the answer.
    pub bounds: Bounds,
    /// The number of choices, each with a constraint of its own.
    pub choices: usize,
    /// Tokens that the answer has already. They are only checked when the first mask is filled.
    pub said: Vec<i32>,
    /// The client, whose turn a compile takes.
    pub client: u64,
}

/// The constraints of a request.
#[derive(Debug)]
pub struct Constraints {
    /// The constraints, one for each choice.
    pub choices: Vec<Box<dyn Constraint>>,
    /// Bytes that the constraints take while all choices run, including the shared compiled
    /// grammar.
    pub bytes: usize,
    /// Paths of schema keywords that are not enforced.
    pub left_out: Arc<[String]>,
}

/// Starts a thread, now or later.
pub type ThreadStart =
    Arc<dyn Fn(Builder, Box<dyn FnMut() + Send>) -> io::Result<JoinHandle<()>> + Send + Sync>;

/// A hook that a compiling thread calls before each source. Tests block compilations with it.
pub type CompileHook = Arc<dyn Fn(&Source) + Send + Sync>;

/// The compiling threads. Cheap to clone. They end when the last clone is dropped.
#[derive(Clone)]
pub struct Grammars(Arc<Inner>);

struct Inner {
    attic: Attic,
    shared: Arc<Shared>,
}

type Compiled = Result<Arc<Template>, GrammarError>;

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars").field("config", &self.0.shared.config).finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.end();
    }
}

impl Grammars {
    /// Starts the threads with `start`. The trie of the tokens below `vocab_size` is built at once,
    /// in the background, and earlier requests wait for it. `eos` are the model's end-of-sequence
    /// ids.
    ///
    /// # Errors
    /// The system has no room for a thread.
    pub fn new(
        config: GrammarConfig,
        tokenizer: Arc<Tokenizer>,
        eos: &[i32],
        vocab_size: u32,
        start: &ThreadStart,
    ) -> io::Result<Self> {
        Self::with_hook(config, tokenizer, eos, vocab_size, start, Arc::new(|_| {}))
    }

    /// Starts the threads like [`Grammars::new`]. They call `before` with each source before they
    /// compile it.
    ///
    /// # Errors
    /// The system has no room for a thread.
    pub fn with_hook(
        config: GrammarConfig,
        tokenizer: Arc<Tokenizer>,
        eos: &[i32],
        vocab_size: u32,
        start: &ThreadStart,
        before: CompileHook,
    ) -> io::Result<Self> {
        let trie = Trie { tokenizer, eos: eos.to_vec(), vocab_size };
        let (attic, free) = Attic::new(config.grammar_cache_bytes);
        start(Builder::new().name("grammar-free".into()), Box::new(free))?;
        let shared = Shared::start(config, trie, Arc::clone(start), before)?;
        Ok(Self(Arc::new(Inner { attic, shared })))
    }

    /// The constraints of a request's choices. The caller's thread compiles and copies nothing. If
    /// all callers stop waiting for a source before its turn, it is not compiled.
    ///
    /// # Errors
    /// The source is at fault, there is no room for it, or it takes too long.
    pub async fn constraints(&self, wanted: WantedForm) -> Result<Constraints, GrammarError> {
        let WantedForm { source, reasoning, bounds, choices, said, client } = wanted;
        let template = match source {
            Some(source) => Some(self.template(source, client).await?),
            None => None,
        };
        let one = |_| -> Box<dyn Constraint> {
            let (reasoning, bounds) = (reasoning.clone(), bounds.clone());
            let attic = self.0.attic.clone();
            Box::new(Rules::new(template.as_ref(), reasoning, bounds, &said, attic))
        };
        let footprint = template.as_ref().map(|template| template.footprint());
        let bytes = footprint.map_or(0, |footprint| {
            footprint.kept.saturating_add(footprint.copy.saturating_mul(choices))
        });
        let left_out = template.as_ref().map(|template| Arc::clone(template.left_out()));
        let left_out = left_out.unwrap_or_default();
        Ok(Constraints { choices: (0..choices).map(one).collect(), bytes, left_out })
    }

    /// The compiled form of a source.
    async fn template(&self, source: Source, client: u64) -> Compiled {
        let shared = &self.0.shared;
        let (reply, answer) = oneshot::channel();
        shared.order(source, client, reply, Instant::now())?;
        match tokio::time::timeout(shared.config.patience, answer).await {
            Ok(Ok(compiled)) => compiled,
            Ok(Err(_)) => Err(GrammarError::Internal("a thread of the grammars has ended".into())),
            Err(_) => Err(shared.late()),
        }
    }

    /// Why no new source can be compiled; `None`: it can.
    #[must_use]
    pub fn stuck(&self) -> Option<GrammarError> {
        self.0.shared.stuck()
    }

    /// The counts so far.
    #[must_use]
    pub fn stats(&self) -> GrammarStats {
        self.0.shared.stats()
    }
}

#[cfg(test)]
mod tests;
