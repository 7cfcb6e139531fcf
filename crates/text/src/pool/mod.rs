//! Threads that render chats and tokenise, so that a long prompt never blocks an HTTP thread.
//!
//! An idle thread takes an input as soon as it arrives. Batches form only from texts that arrive
//! while all threads are busy. A thread takes its share of them, bounded by an estimate of their
//! tokens, and encodes it without returning to the queue. Long inputs are cut into pieces. All
//! threads alternate between pieces and batches, so a short input waits for at most one piece. Long
//! pieces that cannot be cut run on a separate thread, one at a time. The libraries start no
//! threads.

mod queue;
#[cfg(test)]
mod tests;
mod work;

use std::any::Any;
use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use serde::Serialize;
use serde_json::{Map, Value};
use tokio::sync::oneshot;

use crate::encoder::Encoder;
use crate::error::TextError;
use crate::template::{ChatTemplate, Guard};
use crate::tokenizer::Tokenizer;
use queue::{Queue, Task};
use work::{Input, Job, Reply, StartedInput, Terms, Tools};

/// The stack size, for recursive templates and deeply nested tool descriptions. Only used pages
/// take physical memory.
const STACK_BYTES: usize = 8 << 20;
/// The largest number of tokens of a text that callers encode themselves, since waking a thread
/// would take as long.
const WAKE_TOKENS: usize = 32;
/// How long dropping a pool waits for its threads. Results that come later are discarded.
const PATIENCE: Duration = Duration::from_secs(1);
/// The default size of the cache: enough for the history of a few hundred long conversations.
const CACHE_BYTES: usize = 64 << 20;

/// An input to tokenise.
#[derive(Debug, Clone, PartialEq)]
pub enum TextInput {
    /// A plain text.
    Text {
        /// The text. Special tokens spelled in it are recognised.
        text: String,
        /// True if the tokenizer's post-processor runs, which adds a leading bos token, for
        /// example.
        add_special_tokens: bool,
    },
    /// A chat for the model's template. Nothing is added to the rendered text, as with
    /// transformers' `apply_chat_template`.
    Chat {
        /// The list of messages, each an object.
        messages: Value,
        /// The list of tool descriptions; `None` if there are none.
        tools: Option<Value>,
        /// True if the prompt ends with the header of the assistant's message.
        add_generation_prompt: bool,
        /// True if the prompt ends within the last message, which the model continues.
        continue_final_message: bool,
        /// Further variables for the template, such as transformers' `documents`.
        kwargs: Map<String, Value>,
    },
}

/// A tokenised input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// The token ids.
    pub ids: Vec<i32>,
    /// The rendered prompt, if the input was a chat.
    pub text: Option<String>,
    /// The index of the id at which the second text begins, if the input was a pair.
    pub second: Option<u32>,
}

/// Which threads encode inputs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TextMode {
    /// The pool's threads, except for inputs so short that the caller encodes them faster than it
    /// could wake a thread.
    #[default]
    Auto,
    /// The caller's thread, which is blocked meanwhile. Used for comparison.
    Inline,
}

/// The settings of a pool. A field that comes from a flag has the flag's name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TextConfig {
    /// The number of threads, at least one.
    pub text_threads: usize,
    /// The number of inputs that may wait, at least one.
    #[serde(skip)]
    pub queue: usize,
    /// Which threads encode inputs.
    pub tokenizer_mode: TextMode,
    /// The size in bytes of the cache of encoded text, for later turns of conversations; 0 disables
    /// the cache.
    pub text_cache_bytes: usize,
    /// The largest number of inputs that a thread takes at a time; `None` for no limit.
    pub dynamic_batch_tokenizer_batch_size: Option<NonZeroUsize>,
    /// True if special tokens in the strings of chats are recognised. Otherwise they are encoded as
    /// ordinary text.
    pub allow_special_tokens_in_content: bool,
}

impl Default for TextConfig {
    /// The defaults of the flags, for a machine with several processors.
    fn default() -> Self {
        Self {
            text_threads: 2,
            queue: 1024,
            tokenizer_mode: TextMode::Auto,
            text_cache_bytes: CACHE_BYTES,
            dynamic_batch_tokenizer_batch_size: None,
            allow_special_tokens_in_content: false,
        }
    }
}

/// The statistics of a pool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TextStats {
    /// Inputs that wait for a thread.
    pub waiting: usize,
    /// Inputs whose encoding has started.
    pub inputs: u64,
    /// How often a thread took waiting inputs.
    pub batches: u64,
    /// Inputs that were cut into pieces for several threads.
    pub cut: u64,
    /// Inputs that were not encoded because their caller stopped waiting.
    pub cancelled: u64,
    /// Bytes of text passed to the encoder, counted when encoding starts.
    pub encoded_bytes: u64,
    /// Bytes of text that were looked up in the cache.
    pub cache_queries: u64,
    /// Bytes of text that were found in the cache.
    pub cache_hits: u64,
    /// Bytes that the cache uses.
    pub cache_bytes: usize,
}

/// Starts a thread, which runs the function until it returns or panics.
pub type StartThread<'a> =
    &'a dyn Fn(Builder, Box<dyn FnMut() + Send>) -> io::Result<JoinHandle<()>>;

/// Threads that render chats and tokenise, with one bounded queue.
///
/// A caller cancels its input by dropping the future. Parts that have not been started are then
/// skipped.
#[derive(Debug)]
pub struct TextPool {
    shared: Arc<Shared>,
    mode: TextMode,
    patience: Duration,
}

#[derive(Debug)]
struct Shared {
    tools: Tools,
    queue: Queue,
    /// The number of running threads. `ended` is signalled when it reaches zero.
    running: Mutex<usize>,
    ended: Condvar,
    inputs: AtomicU64,
    batches: AtomicU64,
    cut: AtomicU64,
    cancelled: AtomicU64,
}

impl TextPool {
    /// Starts `threads` threads with a queue for `queue` waiting inputs. Both are at least one.
    ///
    /// # Panics
    /// The system cannot start a thread, as with [`std::thread::spawn`].
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        template: Option<Arc<ChatTemplate>>,
        threads: usize,
        queue: usize,
    ) -> Self {
        let config = TextConfig { text_threads: threads, queue, ..TextConfig::default() };
        Self::with_config(tokenizer, template, &config)
    }

    /// Starts a pool.
    ///
    /// # Panics
    /// The system cannot start a thread, as with [`std::thread::spawn`].
    pub fn with_config(
        tokenizer: Arc<Tokenizer>,
        template: Option<Arc<ChatTemplate>>,
        config: &TextConfig,
    ) -> Self {
        Self::started_by(tokenizer, template, config, &|thread, work| thread.spawn(work))
            .expect("the system has room for a thread at start")
    }

    /// Starts a pool whose threads are created by `start`, which may supervise them. A thread
    /// survives a panic on an input. If a thread nevertheless ends in a panic, the pool accepts no
    /// more inputs, and waiting inputs fail with [`TextError::Closed`].
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn started_by(
        tokenizer: Arc<Tokenizer>,
        template: Option<Arc<ChatTemplate>>,
        config: &TextConfig,
        start: StartThread<'_>,
    ) -> io::Result<Self> {
        let guard = match &template {
            Some(template) if !config.allow_special_tokens_in_content => {
                Guard::new(tokenizer.special_texts(), template)
            }
            _ => None,
        };
        let encoder = Encoder::new(tokenizer, config.text_cache_bytes);
        let closed = AtomicBool::new(false);
        let threads = config.text_threads.max(1);
        let shared = Arc::new(Shared {
            tools: Tools { encoder, template, guard, closed },
            queue: Queue::new(
                config.queue.max(1),
                threads,
                config.dynamic_batch_tokenizer_batch_size,
            ),
            running: Mutex::new(0),
            ended: Condvar::new(),
            inputs: AtomicU64::new(0),
            batches: AtomicU64::new(0),
            cut: AtomicU64::new(0),
            cancelled: AtomicU64::new(0),
        });
        let spawn = |name: String, work: fn(&Shared)| {
            let shared = Arc::clone(&shared);
            *shared.running.lock() += 1;
            let thread = Builder::new().name(name).stack_size(STACK_BYTES);
            let work = move || {
                let _ended = ThreadEnd(&shared);
                work(&shared);
            };
            // The thread is not joined: it may be busy with work that no caller waits for.
            start(thread, Box::new(work)).map(drop)
        };
        if config.tokenizer_mode == TextMode::Auto {
            (0..threads).try_for_each(|index| spawn(format!("text-{index}"), Shared::work))?;
            spawn("text-long".to_owned(), Shared::work_long)?;
        }
        Ok(Self { shared, mode: config.tokenizer_mode, patience: PATIENCE })
    }

    /// Limits texts to `most` tokens each, special tokens included; `None` for no limit.
    ///
    /// A text that certainly exceeds the limit is rejected without encoding it. Otherwise encoding
    /// stops at the first token beyond the limit.
    pub fn within(&self, most: impl Into<Option<usize>>) -> Within<'_> {
        let terms = Terms { most: most.into(), ..Terms::default() };
        Within { pool: self, terms, keep: None }
    }

    /// Encodes an input like [`Within::encode`], without a limit.
    ///
    /// # Errors
    /// The same errors as [`Within::encode`].
    pub async fn encode(&self, input: TextInput) -> Result<Encoded, TextError> {
        self.within(None).encode(input).await
    }

    /// Decodes token ids, special tokens included, to the same text as Hugging Face's `decode`.
    ///
    /// # Errors
    /// The errors of [`TextPool::encode`], and [`TextError::Decode`] if the decoder rejects the
    /// tokens.
    pub async fn decode(&self, ids: Vec<i32>) -> Result<String, TextError> {
        let decoded = self.run(Input::Ids(ids), Terms::default(), None).await?.pop();
        Ok(decoded.and_then(|decoded| decoded.text).unwrap_or_default())
    }

    /// Returns the tokenizer that the threads use.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        self.shared.tools.encoder.tokenizer()
    }

    /// Returns the chat template, if there is one.
    pub fn template(&self) -> Option<&Arc<ChatTemplate>> {
        self.shared.tools.template.as_ref()
    }

    /// Returns the statistics of the pool: the work so far, and the current contents.
    pub fn stats(&self) -> TextStats {
        let shared = &self.shared;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (cache_queries, cache_hits, cache_bytes) = shared.tools.encoder.cache_counts();
        TextStats {
            waiting: shared.queue.waiting(),
            inputs: count(&shared.inputs),
            batches: count(&shared.batches),
            cut: count(&shared.cut),
            cancelled: count(&shared.cancelled),
            encoded_bytes: shared.tools.encoder.encoded_bytes(),
            cache_queries,
            cache_hits,
            cache_bytes,
        }
    }

    async fn run(
        &self,
        input: Input,
        terms: Terms,
        keep: Option<Keep>,
    ) -> Result<Vec<Encoded>, TextError> {
        let tokens = input.tokens();
        let is_tiny = tokens <= WAKE_TOKENS && matches!(input, Input::Texts { .. } | Input::Ids(_));
        if is_tiny || self.mode == TextMode::Inline {
            self.shared.inputs.fetch_add(1, Ordering::Relaxed);
            return input.encode(&self.shared.tools, terms);
        }
        let (reply, answer) = oneshot::channel();
        self.shared.queue.push(Job { input, terms, tokens, reply, keep })?;
        answer.await.unwrap_or(Err(TextError::Closed))
    }
}

/// A value that is kept alive while an input is in the pool.
pub type Keep = Arc<dyn Any + Send + Sync>;

/// Access to a pool with a limit on the number of tokens, and a salt.
#[derive(Debug, Clone)]
pub struct Within<'a> {
    pool: &'a TextPool,
    terms: Terms,
    keep: Option<Keep>,
}

impl Within<'_> {
    /// Keeps `keep` alive while the next input is in the pool, even if its caller has stopped
    /// waiting.
    #[must_use]
    pub fn keeping(self, keep: Keep) -> Self {
        Self { keep: Some(keep), ..self }
    }

    /// Shares cached encodings only among inputs with the same salt. Otherwise encoding times would
    /// reveal to a client which texts other clients have sent.
    #[must_use]
    pub fn salted(self, salt: u64) -> Self {
        Self { terms: Terms { salt, ..self.terms }, ..self }
    }

    /// Returns the token ids of one input.
    ///
    /// # Errors
    /// [`TextError::Busy`], without waiting, if the queue is full. [`TextError::NoTemplate`] for a
    /// chat without a template. [`TextError::Template`], [`TextError::Costly`],
    /// [`TextError::Guarded`] and [`TextError::Encode`] if the input cannot be rendered or encoded.
    /// [`TextError::TooLong`] if it has more tokens than the limit.
    pub async fn encode(self, input: TextInput) -> Result<Encoded, TextError> {
        let mut encoded = self.pool.run(input.into(), self.terms, self.keep).await?;
        encoded.pop().ok_or_else(|| TextError::Encode("nothing to encode".to_owned()))
    }

    /// Returns the token ids of several texts, in order. They are one input of the queue, so either
    /// all of them are accepted or none.
    ///
    /// # Errors
    /// The same errors as [`Within::encode`].
    pub async fn encode_all(
        self,
        texts: Vec<String>,
        add_special_tokens: bool,
    ) -> Result<Vec<Vec<i32>>, TextError> {
        let input = Input::Texts { texts, add_special_tokens };
        let encoded = self.pool.run(input, self.terms, self.keep).await?;
        Ok(encoded.into_iter().map(|encoded| encoded.ids).collect())
    }

    /// Returns the token ids of pairs of texts, in order, each with the index at which its second
    /// text begins. They are one input of the queue.
    ///
    /// # Errors
    /// The same errors as [`Within::encode`].
    pub async fn encode_pairs(
        self,
        pairs: Vec<(Arc<str>, String)>,
    ) -> Result<Vec<(Vec<i32>, u32)>, TextError> {
        let encoded = self.pool.run(Input::Pairs(pairs), self.terms, self.keep).await?;
        let pair = |Encoded { ids, second, .. }| (ids, second.unwrap_or_default());
        Ok(encoded.into_iter().map(pair).collect())
    }
}

impl Drop for TextPool {
    /// Waits for the threads, but not long: a thread may be busy with a slow template or a long
    /// word.
    fn drop(&mut self) {
        self.shared.tools.closed.store(true, Ordering::Relaxed);
        self.shared.queue.close();
        let until = Instant::now() + self.patience;
        let mut running = self.shared.running.lock();
        while *running > 0 {
            if self.shared.ended.wait_until(&mut running, until).timed_out() {
                break;
            }
        }
    }
}

/// Records the end of a thread, even after a panic, for the pool's drop.
struct ThreadEnd<'a>(&'a Shared);

impl Drop for ThreadEnd<'_> {
    fn drop(&mut self) {
        *self.0.running.lock() -= 1;
        self.0.ended.notify_all();
    }
}

/// Closes the queue if a thread ends in a panic, so that no caller waits forever.
struct Leave<'a>(&'a Queue);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abandon();
        }
    }
}

impl Shared {
    /// Runs the loop of each thread.
    fn work(&self) {
        let _leave = Leave(&self.queue);
        let count = |counter: &AtomicU64| counter.fetch_add(1, Ordering::Relaxed);
        let mut after_batch = false;
        while let Some(task) = self.queue.take(after_batch) {
            after_batch = matches!(task, Task::Batch(_));
            match task {
                Task::Batch(mut jobs) => {
                    count(&self.batches);
                    self.tools.render(&mut jobs);
                    let done: Vec<_> = jobs.into_iter().filter_map(|job| self.start(job)).collect();
                    // All results are sent together, because each may wake a thread that would take
                    // over this processor.
                    for (reply, result) in done {
                        // The caller may have stopped waiting.
                        let _ = reply.send(result);
                    }
                }
                Task::Piece(long, _) if long.is_over() => self.queue.forget(&long),
                Task::Piece(long, piece) => long.encode(piece, &self.tools),
            }
        }
    }

    /// Runs the loop of the thread for long pieces.
    fn work_long(&self) {
        let _leave = Leave(&self.queue);
        while let Some((long, piece)) = self.queue.take_long() {
            if long.is_over() {
                self.queue.forget(&long);
            } else {
                long.encode(piece, &self.tools);
            }
        }
    }

    fn start(&self, job: Job) -> Option<(Reply, Result<Vec<Encoded>, TextError>)> {
        if job.reply.is_closed() {
            self.cancelled.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        self.inputs.fetch_add(1, Ordering::Relaxed);
        match job.start(&self.tools) {
            StartedInput::Done(reply, result) => Some((reply, result)),
            StartedInput::Long(long) => {
                self.cut.fetch_add(1, Ordering::Relaxed);
                self.queue.push_long(long);
                None
            }
        }
    }
}
