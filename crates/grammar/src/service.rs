//! Threads that compile, and the cache of their results.
//!
//! | thread | what |
//! |---|---|
//! | `grammar` (N) | builds the vocabulary's trie at the start, then compiles, one source at a time |
//! | `grammar-copy` (1) | copies templates that are compiled, replays tokens of streams that began elsewhere, frees matchers |
//!
//! Neither the http threads nor the engine's ever compile, copy or free a matcher. Copies have a
//! thread of their own. So requests with known grammars do not wait behind a source that takes a
//! second.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::Builder;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use forebay_engine::Constraint;
use forebay_text::{StartThread, Tokenizer};
use llguidance::Matcher;
use lru::LruCache;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tracing::{debug, warn};

use crate::compile::Template;
use crate::error::GrammarError;
use crate::rules::{Bounds, Reasoning, Rules};
use crate::source::Source;
use crate::vocabulary::Vocabulary;

/// Room for llguidance's recursion over nested schemas.
const STACK_BYTES: usize = 32 << 20;
/// The largest number of templates that are kept.
const TEMPLATES: usize = 512;
/// The largest number of bytes of the sources of the templates that are kept: a template takes many
/// times its source.
const TEMPLATE_BYTES: usize = 16 << 20;

/// The settings by which grammars are compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GrammarConfig {
    /// The number of threads that compile, at least one.
    pub threads: usize,
    /// The number of sources that may wait for a thread.
    pub queue: usize,
    /// The longest time that a request waits for its grammar.
    pub patience: Duration,
    /// True if a schema is taken although only a part of it can be enforced.
    pub lenient: bool,
}

impl Default for GrammarConfig {
    fn default() -> Self {
        Self { threads: 1, queue: 256, patience: Duration::from_secs(30), lenient: false }
    }
}

/// Counts of compiled, found and waiting grammars.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GrammarStats {
    /// Sources that were compiled, or refused by the compiler.
    pub compiled: u64,
    /// Requests whose source was compiled already, or in the queue.
    pub hits: u64,
    /// Sources that wait, or are being compiled.
    pub waiting: usize,
    /// Microseconds of compiling, without the trie.
    pub compile_us: u64,
    /// Microseconds that the trie took; 0: it is not ready yet.
    pub trie_us: u64,
}

/// The form and the bounds of a request's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// The wanted form; `None`: any.
    pub source: Option<Source>,
    /// The bounds of reasoning before the answer.
    pub reasoning: Option<Reasoning>,
    /// The other restrictions of the answer.
    pub bounds: Bounds,
    /// The number of choices, each with a constraint of its own.
    pub choices: usize,
    /// Tokens that the answer has already.
    pub said: Vec<i32>,
}

/// The constraints of a request, one for each choice.
pub type Constraints = Vec<Box<dyn Constraint>>;

/// The threads that compile. Cheap to clone. They end with the last clone.
#[derive(Clone)]
pub struct Grammars(Arc<Inner>);

struct Inner {
    config: GrammarConfig,
    compile: Sender<Source>,
    attic: Attic,
    shared: Arc<Shared>,
}

/// The state that the threads share with callers.
struct Shared {
    templates: Mutex<Templates>,
    vocabulary: OnceLock<Result<Vocabulary, GrammarError>>,
    compiled: AtomicU64,
    hits: AtomicU64,
    waiting: AtomicUsize,
    compile_us: AtomicU64,
    trie_us: AtomicU64,
}

type Compiled = Result<Arc<Template>, GrammarError>;

/// The compiled sources, and the orders that wait for a source.
struct Templates {
    done: LruCache<Source, Compiled>,
    /// Bytes of the sources in `done`.
    bytes: usize,
    waiting: HashMap<Source, Vec<Order>>,
}

/// A request for constraints.
struct Order {
    wanted: Wanted,
    reply: oneshot::Sender<Result<Constraints, GrammarError>>,
}

enum Copy {
    /// The attic is for the copies.
    Order(Box<Order>, Option<Arc<Template>>, Attic),
    Free(Box<Matcher>),
}

/// The queue of matchers that a thread frees at its leisure.
#[derive(Clone)]
pub(crate) struct Attic(Sender<Copy>);

impl Attic {
    pub(crate) fn extend(&self, matcher: Option<Matcher>) {
        if let Some(matcher) = matcher {
            // Without the thread it is freed here.
            let _ = self.0.send(Copy::Free(Box::new(matcher)));
        }
    }
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars").field("config", &self.0.config).finish_non_exhaustive()
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
        start: StartThread<'_>,
    ) -> io::Result<Self> {
        let (compile, sources) = unbounded();
        let (copy, copies) = unbounded();
        let attic = Attic(copy);
        let shared = Arc::new(Shared {
            templates: Mutex::new(Templates {
                done: LruCache::new(NonZeroUsize::new(TEMPLATES).unwrap_or(NonZeroUsize::MIN)),
                bytes: 0,
                waiting: HashMap::new(),
            }),
            vocabulary: OnceLock::new(),
            compiled: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            compile_us: AtomicU64::new(0),
            trie_us: AtomicU64::new(0),
        });
        let thread = |name: &str| Builder::new().name(name.into()).stack_size(STACK_BYTES);
        for _ in 0..config.threads.max(1) {
            let (shared, sources, attic) = (Arc::clone(&shared), sources.clone(), attic.clone());
            let (tokenizer, eos) = (Arc::clone(&tokenizer), eos.to_vec());
            let work = move || {
                shared.build_trie(&tokenizer, &eos, vocab_size);
                shared.compile_all(&sources, config.lenient, &attic);
            };
            start(thread("grammar"), Box::new(work))?;
        }
        start(thread("grammar-copy"), Box::new(move || copy_all(&copies)))?;
        Ok(Self(Arc::new(Inner { config, compile, attic, shared })))
    }

    /// The constraints of a request's choices. The caller's thread does none of the work. If a
    /// caller stops waiting, begun work goes on for others.
    ///
    /// # Errors
    /// The source is at fault, there is no room for it, or it takes too long.
    pub async fn constraints(&self, wanted: Wanted) -> Result<Constraints, GrammarError> {
        let (reply, answer) = oneshot::channel();
        self.order(Order { wanted, reply })?;
        let seconds = self.0.config.patience.as_secs();
        match tokio::time::timeout(self.0.config.patience, answer).await {
            Ok(Ok(constraints)) => constraints,
            Ok(Err(_)) => Err(GrammarError::Internal("a thread of the grammars has ended".into())),
            Err(_) => Err(GrammarError::Late { seconds }),
        }
    }

    fn order(&self, order: Order) -> Result<(), GrammarError> {
        let Inner { shared, attic, compile, config } = &*self.0;
        let Some(source) = order.wanted.source.clone() else {
            attic.copy(order, None);
            return Ok(());
        };
        let mut templates = shared.templates.lock();
        match templates.done.get(&source) {
            Some(Ok(template)) => {
                shared.hits.fetch_add(1, Ordering::Relaxed);
                attic.copy(order, Some(Arc::clone(template)));
                return Ok(());
            }
            Some(Err(error)) => {
                shared.hits.fetch_add(1, Ordering::Relaxed);
                return Err(error.clone());
            }
            None => {}
        }
        if let Some(waiting) = templates.waiting.get_mut(&source) {
            shared.hits.fetch_add(1, Ordering::Relaxed);
            waiting.push(order);
            return Ok(());
        }
        if shared.waiting.load(Ordering::Relaxed) >= config.queue {
            return Err(GrammarError::Busy);
        }
        shared.waiting.fetch_add(1, Ordering::Relaxed);
        templates.waiting.insert(source.clone(), vec![order]);
        let gone = |_| GrammarError::Internal("the threads of the grammars have ended".into());
        compile.send(source).map_err(gone)
    }

    /// The counts so far.
    #[must_use]
    pub fn stats(&self) -> GrammarStats {
        let shared = &self.0.shared;
        GrammarStats {
            compiled: shared.compiled.load(Ordering::Relaxed),
            hits: shared.hits.load(Ordering::Relaxed),
            waiting: shared.waiting.load(Ordering::Relaxed),
            compile_us: shared.compile_us.load(Ordering::Relaxed),
            trie_us: shared.trie_us.load(Ordering::Relaxed),
        }
    }
}

impl Attic {
    fn copy(&self, order: Order, template: Option<Arc<Template>>) {
        // Without the thread the reply is dropped, which tells the caller.
        let _ = self.0.send(Copy::Order(Box::new(order), template, self.clone()));
    }
}

impl Shared {
    fn build_trie(&self, tokenizer: &Arc<Tokenizer>, eos: &[i32], vocab_size: u32) {
        self.vocabulary.get_or_init(|| {
            let began = Instant::now();
            let built = contained(|| Vocabulary::new(tokenizer, eos, vocab_size));
            let took = began.elapsed();
            self.trie_us.store(micros(took), Ordering::Relaxed);
            match &built {
                Ok(_) => debug!(ms = took.as_millis(), "the trie of the vocabulary is built"),
                Err(error) => warn!("answers can't be given a form: {error}"),
            }
            built
        });
    }

    /// Compiles until there are no more senders.
    fn compile_all(&self, sources: &Receiver<Source>, lenient: bool, attic: &Attic) {
        while let Ok(source) = sources.recv() {
            if self.templates.lock().unwanted(&source) {
                self.waiting.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let began = Instant::now();
            let compiled = match self.vocabulary.get() {
                Some(Ok(vocabulary)) => {
                    contained(|| Template::new(vocabulary, &source, lenient)).map(Arc::new)
                }
                Some(Err(error)) => Err(error.clone()),
                None => Err(GrammarError::Internal("there is no vocabulary".into())),
            };
            let mut templates = self.templates.lock();
            let orders = templates.waiting.remove(&source).unwrap_or_default();
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            self.compiled.fetch_add(1, Ordering::Relaxed);
            self.compile_us.fetch_add(micros(began.elapsed()), Ordering::Relaxed);
            templates.keep(source, compiled.clone());
            drop(templates);
            for order in orders {
                match &compiled {
                    Ok(template) => attic.copy(order, Some(Arc::clone(template))),
                    // It may have gone meanwhile.
                    Err(error) => drop(order.reply.send(Err(error.clone()))),
                }
            }
        }
    }
}

impl Templates {
    /// Forgets a source if no request waits for it any more.
    fn unwanted(&mut self, source: &Source) -> bool {
        let gone = |order: &Order| order.reply.is_closed();
        let unwanted = self.waiting.get(source).is_none_or(|orders| orders.iter().all(gone));
        if unwanted {
            self.waiting.remove(source);
        }
        unwanted
    }

    fn keep(&mut self, source: Source, compiled: Compiled) {
        self.bytes += source.bytes();
        if let Some((old, _)) = self.done.push(source, compiled) {
            self.bytes -= old.bytes();
        }
        while self.bytes > TEMPLATE_BYTES
            && let Some((old, _)) = self.done.pop_lru()
        {
            self.bytes -= old.bytes();
        }
    }
}

/// Copies and frees until there are no more senders.
fn copy_all(copies: &Receiver<Copy>) {
    while let Ok(copy) = copies.recv() {
        match copy {
            Copy::Free(matcher) => drop(matcher),
            Copy::Order(order, template, attic) => {
                let Order { wanted, reply } = *order;
                if !reply.is_closed() {
                    // It may have gone meanwhile.
                    let _ =
                        reply.send(contained(|| constraints(wanted, template.as_deref(), &attic)));
                }
            }
        }
    }
}

fn constraints(
    wanted: Wanted,
    template: Option<&Template>,
    attic: &Attic,
) -> Result<Constraints, GrammarError> {
    let one = |_| -> Result<Box<dyn Constraint>, GrammarError> {
        let grammar = template.map(|template| (template, attic.clone()));
        let mut rules = Rules::new(grammar, wanted.reasoning.clone(), wanted.bounds.clone());
        for &token in &wanted.said {
            let refused =
                |error| GrammarError::invalid(format!("the tokens so far do not fit: {error}"));
            rules.accept(token).map_err(refused)?;
        }
        Ok(Box::new(rules))
    };
    (0..wanted.choices).map(one).collect()
}

/// No source brings a thread down.
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
