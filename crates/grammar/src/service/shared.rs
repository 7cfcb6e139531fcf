//! The state of the compiler that callers and threads share.
//!
//! A compilation cannot be stopped from outside. So one that takes too long is abandoned: its
//! callers get an error, and a new thread replaces its thread, which ends with the compilation. The
//! number of abandoned compilations that are still running is limited. At the limit no new source
//! is accepted, and the health check fails.

use std::collections::HashMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Builder;
use std::time::{Duration, Instant};

use forebay_machine::stand_back;
use forebay_text::Tokenizer;
use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;
use tracing::{debug, warn};

use super::kept::Kept;
use super::turns::Turns;
use super::{CompileHook, Compiled, GrammarConfig, GrammarStats, STACK_BYTES, ThreadStart};
use crate::compile::Template;
use crate::error::GrammarError;
use crate::source::Source;
use crate::vocabulary::Vocabulary;

/// The largest number of abandoned compilations that are still running. One client may have at most
/// half of them.
pub(super) const GIVEN_UP: usize = 4;
/// How long a source is rejected after its compilation was abandoned.
pub(super) const REFUSED_FOR: Duration = Duration::from_secs(60);
/// The delay before another attempt to start a thread.
const RETRY: Duration = Duration::from_secs(1);
/// The largest value of `Retry-After`, in seconds.
const MOST_RETRY_SECONDS: u64 = 60;

/// The state that the threads and the callers share.
pub(super) struct Shared {
    pub(super) config: GrammarConfig,
    state: Mutex<State>,
    /// Wakes compiling threads: there is a source, or the service has ended.
    sources: Condvar,
    /// Wakes the watching thread: a compilation has started, or a thread is missing.
    watched: Condvar,
    trie: Trie,
    vocabulary: OnceLock<Result<Vocabulary, GrammarError>>,
    start: ThreadStart,
    before: CompileHook,
    compiled: AtomicU64,
    refused: AtomicU64,
    hits: AtomicU64,
    abandoned: AtomicU64,
    compile_us: AtomicU64,
    trie_us: AtomicU64,
}

/// The parameters of the trie to build.
pub(super) struct Trie {
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) eos: Vec<i32>,
    pub(super) vocab_size: u32,
}

struct State {
    kept: Kept,
    waiting: HashMap<Source, WaitingSource>,
    turns: Turns,
    /// The compilations that are running, by number.
    running: HashMap<u64, Compile>,
    /// The client of each abandoned compilation that is still running, by number.
    given_up: HashMap<u64, u64>,
    /// The number of compiling threads, without those of abandoned compilations.
    threads: usize,
    /// The number of the next compilation.
    next: u64,
    ended: bool,
}

/// A source that was not compiled yet.
#[derive(Default)]
struct WaitingSource {
    /// The channels to the callers.
    replies: Vec<oneshot::Sender<Compiled>>,
    /// The clients on whose behalf the source may be compiled.
    clients: Vec<u64>,
    begun: bool,
}

/// A compilation that is running.
#[derive(Clone)]
struct Compile {
    number: u64,
    source: Source,
    client: u64,
    began: Instant,
}

impl Shared {
    pub(super) fn start(
        config: GrammarConfig,
        trie: Trie,
        start: ThreadStart,
        before: CompileHook,
    ) -> io::Result<Arc<Self>> {
        let threads = config.grammar_threads.max(1);
        let shared = Arc::new(Self {
            config: GrammarConfig { grammar_threads: threads, ..config },
            state: Mutex::new(State {
                kept: Kept::new(config.grammar_cache_bytes),
                waiting: HashMap::new(),
                turns: Turns::default(),
                running: HashMap::new(),
                given_up: HashMap::new(),
                threads,
                next: 0,
                ended: false,
            }),
            sources: Condvar::new(),
            watched: Condvar::new(),
            trie,
            vocabulary: OnceLock::new(),
            start,
            before,
            compiled: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            abandoned: AtomicU64::new(0),
            compile_us: AtomicU64::new(0),
            trie_us: AtomicU64::new(0),
        });
        for _ in 0..threads {
            shared.start_thread()?;
        }
        let watcher = Arc::clone(&shared);
        let thread = Builder::new().name("grammar-watch".into());
        (shared.start)(thread, Box::new(move || watcher.watch()))?;
        Ok(shared)
    }

    fn start_thread(self: &Arc<Self>) -> io::Result<()> {
        let shared = Arc::clone(self);
        let thread = Builder::new().name("grammar".into()).stack_size(STACK_BYTES);
        (self.start)(thread, Box::new(move || shared.compile_all())).map(drop)
    }

    /// Signals the end of the service to the threads.
    pub(super) fn end(&self) {
        self.state.lock().ended = true;
        self.sources.notify_all();
        self.watched.notify_all();
    }

    /// Looks `source` up in the cache, or queues it for compilation on behalf of `client`. The
    /// reply may be sent at once.
    ///
    /// # Errors
    /// The source was rejected, the queue is full, or too many compilations were abandoned: in
    /// total, or for this client.
    pub(super) fn order(
        &self,
        source: Source,
        client: u64,
        reply: oneshot::Sender<Compiled>,
        now: Instant,
    ) -> Result<(), GrammarError> {
        let mut state = self.state.lock();
        let state = &mut *state;
        if let Some(compiled) = state.kept.get(&source, now) {
            self.hits.fetch_add(1, Ordering::Relaxed);
            let template = compiled?;
            // The caller has just sent the request and waits for the reply.
            let _ = reply.send(Ok(template));
            return Ok(());
        }
        let known = state.waiting.contains_key(&source);
        if !known {
            state.room(client, self.config.queue)?;
        }
        let waiting = state.waiting.entry(source.clone()).or_default();
        waiting.replies.push(reply);
        if known {
            self.hits.fetch_add(1, Ordering::Relaxed);
        }
        // The source is compiled when the first of its clients gets a turn.
        if !waiting.begun && !waiting.clients.contains(&client) {
            waiting.clients.push(client);
            state.turns.push(client, source);
            self.sources.notify_one();
        }
        Ok(())
    }

    /// Returns the error for a caller that has waited too long.
    pub(super) fn late(&self) -> GrammarError {
        let stats = self.stats();
        let each = stats.compile_us / stats.compiled.max(1);
        let all = each.saturating_mul(stats.waiting as u64) / self.config.grammar_threads as u64;
        let retry_after = (1 + all / 1_000_000).min(MOST_RETRY_SECONDS) as u32;
        GrammarError::Late { seconds: self.config.patience.as_secs(), retry_after }
    }

    pub(super) fn stuck(&self) -> Option<GrammarError> {
        self.state.lock().stuck()
    }

    pub(super) fn stats(&self) -> GrammarStats {
        let state = self.state.lock();
        GrammarStats {
            compiled: self.compiled.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
            hits: self.hits.load(Ordering::Relaxed),
            waiting: state.waiting.len(),
            compile_us: self.compile_us.load(Ordering::Relaxed),
            trie_us: self.trie_us.load(Ordering::Relaxed),
            kept_bytes: state.kept.bytes(),
            abandoned: self.abandoned.load(Ordering::Relaxed),
            running_on: state.given_up.len(),
        }
    }

    fn build_trie(&self) {
        self.vocabulary.get_or_init(|| {
            let began = Instant::now();
            let Trie { tokenizer, eos, vocab_size } = &self.trie;
            let built = contained(|| Vocabulary::new(tokenizer, eos, *vocab_size));
            let took = began.elapsed();
            self.trie_us.store(micros(took), Ordering::Relaxed);
            match &built {
                Ok(_) => debug!(ms = took.as_millis(), "the trie of the vocabulary is built"),
                Err(error) => warn!("structured output is not available: {error}"),
            }
            built
        });
    }

    /// Compiles sources until the service ends, or until a compilation of this thread was
    /// abandoned.
    fn compile_all(&self) {
        // A compilation may take seconds, while other threads have to write chunks of streams. So
        // this thread gets a lower priority.
        stand_back();
        self.build_trie();
        while let Some(compile) = self.next() {
            (self.before)(&compile.source);
            let compiled = match self.vocabulary.get() {
                Some(Ok(vocabulary)) => {
                    let lenient = self.config.grammar_lenient;
                    contained(|| Template::new(vocabulary, &compile.source, lenient)).map(Arc::new)
                }
                Some(Err(error)) => Err(error.clone()),
                None => Err(GrammarError::Internal("there is no vocabulary".into())),
            };
            if !self.finish(&compile, &compiled) {
                return;
            }
        }
    }

    /// Waits for the next source; `None` when the service ends.
    fn next(&self) -> Option<Compile> {
        let mut state = self.state.lock();
        loop {
            if state.ended {
                return None;
            }
            if let Some(compile) = state.begin(Instant::now()) {
                self.watched.notify_one();
                return Some(compile);
            }
            self.sources.wait(&mut state);
        }
    }

    /// Sends the result to the callers of a compilation. Returns true if the thread is to continue
    /// with the next source.
    fn finish(&self, compile: &Compile, compiled: &Compiled) -> bool {
        let mut state = self.state.lock();
        if state.running.remove(&compile.number).is_none() {
            state.given_up.remove(&compile.number);
            let missing = state.threads < self.config.grammar_threads;
            state.threads += usize::from(missing);
            return missing;
        }
        self.compiled.fetch_add(1, Ordering::Relaxed);
        self.refused.fetch_add(u64::from(compiled.is_err()), Ordering::Relaxed);
        self.compile_us.fetch_add(micros(compile.began.elapsed()), Ordering::Relaxed);
        let waiting = state.waiting.remove(&compile.source).unwrap_or_default();
        let source = compile.source.clone();
        let evicted = state.kept.put(source, compile.client, compiled.clone(), None);
        // The lock is released before large templates are freed.
        drop(state);
        drop(evicted);
        waiting.answer(compiled);
        true
    }

    /// Abandons compilations that take too long, until the service ends.
    fn watch(self: &Arc<Self>) {
        let mut state = self.state.lock();
        while !state.ended {
            let mut next = self.give_up(&mut state, Instant::now());
            let missing = state.missing(self.config.grammar_threads);
            state.threads += missing;
            for _ in 0..missing {
                if let Err(error) = self.start_thread() {
                    warn!("no thread for compiling grammars: {error}");
                    state.threads -= 1;
                    next = Some(Instant::now() + RETRY);
                }
            }
            match next {
                Some(next) => {
                    self.watched.wait_until(&mut state, next);
                }
                None => self.watched.wait(&mut state),
            }
        }
    }

    /// Abandons compilations that take too long. Returns the time at which the next one is to be
    /// abandoned; `None` if none is running.
    fn give_up(&self, state: &mut State, now: Instant) -> Option<Instant> {
        let limit = self.config.grammar_timeout;
        let deadline = |compile: &Compile| compile.began.checked_add(limit);
        let is_late = |compile: &&Compile| deadline(compile).is_some_and(|end| now >= end);
        let late = state.running.values().filter(is_late);
        for Compile { number, source, client, .. } in late.cloned().collect::<Vec<_>>() {
            warn!(
                bytes = source.size(),
                "a grammar is given up that was not compiled within {limit:?}"
            );
            self.abandoned.fetch_add(1, Ordering::Relaxed);
            state.running.remove(&number);
            state.given_up.insert(number, client);
            state.threads -= 1;
            let reason = format!("it was not compiled within {} s", limit.as_secs_f64());
            let error = Err(GrammarError::invalid(reason));
            if let Some(waiting) = state.waiting.remove(&source) {
                waiting.answer(&error);
            }
            state.kept.put(source, client, error, Some(now + REFUSED_FOR));
        }
        state.running.values().filter_map(deadline).min()
    }

    /// Abandons the compilations whose time limit has passed at `now`.
    #[cfg(test)]
    pub(super) fn give_up_at(&self, now: Instant) {
        self.give_up(&mut self.state.lock(), now);
        self.watched.notify_one();
    }
}

impl State {
    /// Rejects a client's new source if the queue, or the client's half of the queue, is full. Also
    /// rejects the source if too many abandoned compilations are still running, in total or for
    /// this client.
    fn room(&self, client: u64, queue: usize) -> Result<(), GrammarError> {
        if let Some(stuck) = self.stuck() {
            return Err(stuck);
        }
        let own = self.given_up.values().filter(|other| **other == client).count();
        if own >= GIVEN_UP / 2 {
            return Err(GrammarError::Overdue { compiles: own });
        }
        if self.waiting.len() >= queue || self.turns.of(client) >= queue.div_ceil(2) {
            return Err(GrammarError::Busy);
        }
        Ok(())
    }

    fn stuck(&self) -> Option<GrammarError> {
        let compiles = self.given_up.len();
        (compiles >= GIVEN_UP).then_some(GrammarError::Stuck { compiles })
    }

    /// Returns the number of threads to start as replacements.
    fn missing(&self, threads: usize) -> usize {
        if self.given_up.len() < GIVEN_UP { threads.saturating_sub(self.threads) } else { 0 }
    }

    /// Starts the next source that a caller still waits for.
    fn begin(&mut self, now: Instant) -> Option<Compile> {
        loop {
            let (client, source) = self.turns.pop()?;
            let Some(waiting) = self.waiting.get_mut(&source) else { continue };
            if waiting.begun {
                continue;
            }
            waiting.replies.retain(|reply| !reply.is_closed());
            if waiting.replies.is_empty() {
                self.waiting.remove(&source);
                continue;
            }
            waiting.begun = true;
            let compile = Compile { number: self.next, source, client, began: now };
            self.next += 1;
            self.running.insert(compile.number, compile.clone());
            return Some(compile);
        }
    }
}

impl WaitingSource {
    fn answer(self, compiled: &Compiled) {
        for reply in self.replies {
            // The caller may have stopped waiting.
            let _ = reply.send(compiled.clone());
        }
    }
}

/// Catches panics, so that no source ends a thread.
fn contained<T>(work: impl FnOnce() -> Result<T, GrammarError>) -> Result<T, GrammarError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        warn!("compiling a grammar panicked: {text}");
        Err(GrammarError::Internal("the grammar could not be compiled".into()))
    })
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
