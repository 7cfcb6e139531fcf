//! Compiles grammars on separate threads, and caches the results.
//!
//! | thread | what |
//! |---|---|
//! | `grammar` (N) | builds the vocabulary's trie at the start, then compiles, one source at a time |
//! | `grammar-watch` (1) | abandons compilations that take too long, and replaces their threads |
//! | `grammar-free` (1) | frees matchers and templates |
//!
//! HTTP threads and the engine thread never compile a grammar or free a matcher. The matcher of a
//! choice is created when its second mask is computed.

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

/// The stack size for recursion over nested schemas and names in grammars.
const STACK_BYTES: usize = 32 << 20;

/// The settings of the grammar compiler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct GrammarConfig {
    /// The number of compiling threads, at least one.
    pub grammar_threads: usize,
    /// The number of sources that may wait for a thread. One client may have at most half of them
    /// waiting.
    #[serde(skip)]
    pub queue: usize,
    /// The longest time that a request waits for its grammar.
    #[serde(skip)]
    pub patience: Duration,
    /// The longest time that compiling one source may take.
    #[serde(serialize_with = "as_seconds")]
    pub grammar_timeout: Duration,
    /// The size of the cache of compiled grammars in bytes. While several clients have entries, one
    /// client may use at most half. In addition, all running matchers together may grow by this
    /// number of bytes.
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

/// The statistics of the grammar compiler and its cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GrammarStats {
    /// Sources that were compiled, or rejected by the compiler.
    pub compiled: u64,
    /// Sources that the compiler rejected.
    pub refused: u64,
    /// Requests whose source was already compiled or waiting.
    pub hits: u64,
    /// Sources that are waiting or being compiled.
    pub waiting: usize,
    /// The time spent compiling in microseconds, without the trie.
    pub compile_us: u64,
    /// The time for building the trie in microseconds; 0 until it is built.
    pub trie_us: u64,
    /// The size of cached sources and their compiled forms in bytes.
    pub kept_bytes: usize,
    /// Compilations that were abandoned because they took too long.
    pub abandoned: u64,
    /// The number of abandoned compilations that are still running.
    pub running_on: usize,
}

/// The constraints that a request needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedForm {
    /// The requested form; `None` for free text.
    pub source: Option<Source>,
    /// The constraints on reasoning before the answer; `None` if there are none.
    pub reasoning: Option<Reasoning>,
    /// The other constraints on the answer.
    pub bounds: Bounds,
    /// The number of choices. Each gets a separate constraint.
    pub choices: usize,
    /// The tokens that the answer already has. They are checked only when the first mask is
    /// computed.
    pub said: Vec<i32>,
    /// The client on whose behalf the source is compiled.
    pub client: u64,
}

/// The constraints of a request.
#[derive(Debug)]
pub struct Constraints {
    /// The constraints, one for each choice.
    pub choices: Vec<Box<dyn Constraint>>,
    /// The memory that the constraints take in bytes while all choices run, including the shared
    /// compiled grammar.
    pub bytes: usize,
    /// Paths of schema keywords that are not enforced.
    pub left_out: Arc<[String]>,
}

/// A function that starts a thread: at the start, and later to replace threads.
pub type ThreadStart =
    Arc<dyn Fn(Builder, Box<dyn FnMut() + Send>) -> io::Result<JoinHandle<()>> + Send + Sync>;

/// A hook that a compiling thread calls before each source. Tests use it to block compilations.
pub type CompileHook = Arc<dyn Fn(&Source) + Send + Sync>;

/// The compiling threads. The handle is cheap to clone. The threads end when the last clone is
/// dropped.
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
    /// Starts the threads with `start`. They build the trie of the tokens below `vocab_size` in the
    /// background at once; requests that arrive before the trie is complete wait for it. `eos` are
    /// the model's end-of-sequence ids.
    ///
    /// # Errors
    /// The system cannot start a thread.
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
    /// The system cannot start a thread.
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

    /// Returns the constraints of a request's choices. Nothing is compiled or copied on the
    /// caller's thread. If all callers stop waiting for a source before its compilation starts, it
    /// is not compiled.
    ///
    /// # Errors
    /// The source is invalid, the queue is full, or compiling takes too long.
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

    /// Returns the compiled form of a source.
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

    /// Returns why no new source can be compiled; `None` if sources can be compiled.
    #[must_use]
    pub fn stuck(&self) -> Option<GrammarError> {
        self.0.shared.stuck()
    }

    /// Returns the statistics so far.
    #[must_use]
    pub fn stats(&self) -> GrammarStats {
        self.0.shared.stats()
    }
}

#[cfg(test)]
mod tests;
