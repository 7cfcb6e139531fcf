//! Threads that render and tokenise, so that a long prompt never holds up an HTTP thread.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Sender, TrySendError};
use serde_json::{Map, Value};
use tokio::sync::oneshot;

use crate::error::TextError;
use crate::template::{ChatRender, ChatTemplate};
use crate::tokenizer::Tokenizer;

/// Room for a template's recursion and a deeply nested tool description; only what is used is ever real memory.
const STACK_BYTES: usize = 8 << 20;

/// What is to be turned into token ids.
#[derive(Debug, Clone, PartialEq)]
pub enum TextInput {
    /// A text as it is.
    Text {
        /// The text. Special tokens written out in it are recognised.
        text: String,
        /// Run the tokenizer's post-processor (a leading bos token, say).
        add_special_tokens: bool,
    },
    /// A chat, to be rendered by the model's template. Nothing is added to what the template writes, as with
    /// transformers' `apply_chat_template`.
    Chat {
        /// A list of messages, each an object.
        messages: Value,
        /// A list of tool descriptions.
        tools: Option<Value>,
        /// End with the beginning of the assistant's answer.
        add_generation_prompt: bool,
        /// End inside the last message, for the model to go on with it.
        continue_final_message: bool,
        /// More variables for the template; `documents` is one that transformers names.
        kwargs: Map<String, Value>,
    },
}

/// A tokenised input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// The token ids.
    pub ids: Vec<i32>,
    /// The rendered prompt, where the input was a chat.
    pub text: Option<String>,
}

/// What a worker works with.
#[derive(Debug)]
struct Tools {
    tokenizer: Arc<Tokenizer>,
    template: Option<Arc<ChatTemplate>>,
}

type Job = Box<dyn FnOnce(&Tools) + Send>;

/// Threads that render chats and tokenise, with one bounded first-come-first-served queue.
///
/// A caller that stops waiting (drops its future) cancels its job: it is skipped when its turn comes.
pub struct TextPool {
    tools: Arc<Tools>,
    /// `None` only while dropping.
    jobs: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
}

impl fmt::Debug for TextPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TextPool").field("threads", &self.threads.len()).finish_non_exhaustive()
    }
}

impl TextPool {
    /// Starts `threads` threads, at least one, with room for `queue` waiting inputs, at least one.
    ///
    /// # Panics
    /// If the system refuses a thread, as [`std::thread::spawn`] does.
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        template: Option<Arc<ChatTemplate>>,
        threads: usize,
        queue: usize,
    ) -> Self {
        let tools = Arc::new(Tools { tokenizer, template });
        let (sender, receiver) = crossbeam_channel::bounded::<Job>(queue.max(1));
        let worker = |index: usize| {
            let (tools, receiver) = (Arc::clone(&tools), receiver.clone());
            std::thread::Builder::new()
                .name(format!("text-{index}"))
                .stack_size(STACK_BYTES)
                .spawn(move || receiver.iter().for_each(|job| job(&tools)))
                .expect("the system has room for a thread at start")
        };
        let threads = (0..threads.max(1)).map(worker).collect();
        Self { tools, jobs: Some(sender), threads }
    }

    /// The token ids of one input.
    ///
    /// # Errors
    /// [`TextError::Busy`], at once, when the queue is full; [`TextError::NoTemplate`] for a chat without a template;
    /// [`TextError::Template`] and [`TextError::Encode`] for what cannot be rendered or encoded.
    pub async fn encode(&self, input: TextInput) -> Result<Encoded, TextError> {
        self.run(move |tools| tools.encode(input)).await
    }

    /// The token ids of several texts, in order. They take one place in the queue, so that all are taken or none.
    ///
    /// # Errors
    /// As [`TextPool::encode`].
    pub async fn encode_all(
        &self,
        texts: Vec<String>,
        add_special_tokens: bool,
    ) -> Result<Vec<Vec<i32>>, TextError> {
        let encode_all = move |tools: &Tools| {
            texts.iter().map(|text| tools.tokenizer.encode(text, add_special_tokens)).collect()
        };
        self.run(encode_all).await
    }

    /// The token ids of pairs of texts and where the second of each begins, in order. They take one place in the queue.
    ///
    /// # Errors
    /// As [`TextPool::encode`].
    pub async fn encode_pairs(
        &self,
        pairs: Vec<(String, String)>,
    ) -> Result<Vec<(Vec<i32>, u32)>, TextError> {
        let encode_all = move |tools: &Tools| {
            pairs.iter().map(|(first, second)| tools.tokenizer.encode_pair(first, second)).collect()
        };
        self.run(encode_all).await
    }

    /// The tokenizer that the threads use.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tools.tokenizer
    }

    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Tools) -> Result<T, TextError> + Send + 'static,
    ) -> Result<T, TextError> {
        let (reply, answer) = oneshot::channel();
        let job: Job = Box::new(move |tools| {
            if reply.is_closed() {
                return;
            }
            let result = catch_unwind(AssertUnwindSafe(|| work(tools))).unwrap_or_else(|_| {
                Err(TextError::Encode("the tokeniser failed on this input".to_owned()))
            });
            // The caller may have gone by now; then nobody wants the answer.
            let _ = reply.send(result);
        });
        match self.jobs.as_ref().map(|jobs| jobs.try_send(job)) {
            Some(Ok(())) => answer.await.unwrap_or(Err(TextError::Closed)),
            Some(Err(TrySendError::Full(_))) => Err(TextError::Busy),
            Some(Err(TrySendError::Disconnected(_))) | None => Err(TextError::Closed),
        }
    }
}

impl Drop for TextPool {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // A worker catches its jobs' panics, so there is nothing to learn from how it ended.
            let _ = thread.join();
        }
    }
}

impl Tools {
    fn encode(&self, input: TextInput) -> Result<Encoded, TextError> {
        match input {
            TextInput::Text { text, add_special_tokens } => {
                Ok(Encoded { ids: self.tokenizer.encode(&text, add_special_tokens)?, text: None })
            }
            TextInput::Chat {
                messages,
                tools,
                add_generation_prompt,
                continue_final_message,
                kwargs,
            } => {
                let template = self.template.as_ref().ok_or(TextError::NoTemplate)?;
                let text = template.render(&ChatRender {
                    messages: &messages,
                    tools: tools.as_ref(),
                    documents: kwargs.get("documents"),
                    add_generation_prompt,
                    continue_final_message,
                    kwargs: Some(&kwargs),
                })?;
                Ok(Encoded { ids: self.tokenizer.encode(&text, false)?, text: Some(text) })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::{Pin, pin};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Context, Poll, Waker};

    const TOKENIZER: &[u8] = include_bytes!("../tests/data/tiny-llama-tokenizer.json");

    fn pool(threads: usize, queue: usize) -> TextPool {
        let tokenizer = Tokenizer::from_bytes(TOKENIZER).expect("a tokenizer");
        TextPool::new(Arc::new(tokenizer), None, threads, queue)
    }

    fn text(text: &str) -> TextInput {
        TextInput::Text { text: text.to_owned(), add_special_tokens: false }
    }

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().expect("a runtime").block_on(future)
    }

    fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    type Busy<'a> = Pin<Box<dyn Future<Output = Result<(), TextError>> + 'a>>;

    /// Occupies the pool's one thread until the returned sender is dropped.
    fn occupy(pool: &TextPool) -> (Busy<'_>, Sender<()>) {
        let (started, has_started) = crossbeam_channel::bounded::<()>(0);
        let (release, released) = crossbeam_channel::bounded::<()>(0);
        let mut busy = Box::pin(pool.run(move |_| {
            drop(started);
            let _ = released.recv();
            Ok(())
        }));
        assert!(poll_once(busy.as_mut()).is_pending());
        assert!(has_started.recv().is_err());
        (busy, release)
    }

    #[test]
    fn texts_are_encoded() {
        let pool = pool(2, 4);
        let one = block_on(pool.encode(text("hello"))).expect("ids");
        let all =
            block_on(pool.encode_all(vec!["hello".into(), String::new()], false)).expect("ids");
        assert_eq!(all, [one.ids, Vec::new()]);
        assert_eq!(one.text, None);
    }

    #[test]
    fn a_full_queue_is_busy_at_once_and_order_is_kept() {
        let pool = pool(1, 1);
        let (busy, release) = occupy(&pool);
        let mut waiting = pin!(pool.encode(text("a")));
        assert!(poll_once(waiting.as_mut()).is_pending());
        let mut refused = pin!(pool.encode(text("b")));
        assert_eq!(poll_once(refused.as_mut()), Poll::Ready(Err(TextError::Busy)));
        drop(release);
        assert_eq!(block_on(busy), Ok(()));
        assert!(block_on(waiting).is_ok());
    }

    #[test]
    fn a_dropped_future_cancels_its_job() {
        let pool = pool(1, 2);
        let (busy, release) = occupy(&pool);
        let ran = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&ran);
        let mut cancelled = Box::pin(pool.run(move |_| {
            flag.store(true, Ordering::SeqCst);
            Ok(())
        }));
        assert!(poll_once(cancelled.as_mut()).is_pending());
        drop(cancelled);
        let last = pool.encode(text("a"));
        let mut last = pin!(last);
        assert!(poll_once(last.as_mut()).is_pending());
        drop(release);
        assert_eq!(block_on(busy), Ok(()));
        assert!(block_on(last).is_ok());
        assert!(!ran.load(Ordering::SeqCst));
    }

    #[test]
    fn a_panic_is_an_error_and_the_thread_lives_on() {
        let pool = pool(1, 1);
        let failed: Result<(), _> = block_on(pool.run(|_| panic!("a test's own panic")));
        assert!(matches!(failed, Err(TextError::Encode(_))));
        assert!(block_on(pool.encode(text("a"))).is_ok());
    }

    #[test]
    fn a_chat_needs_a_template() {
        let chat = TextInput::Chat {
            messages: serde_json::json!([]),
            tools: None,
            add_generation_prompt: true,
            continue_final_message: false,
            kwargs: Map::new(),
        };
        assert_eq!(block_on(pool(1, 1).encode(chat)), Err(TextError::NoTemplate));
    }

    #[test]
    fn dropping_the_pool_skips_what_nobody_waits_for() {
        let pool = pool(1, 4);
        let (busy, release) = occupy(&pool);
        drop(busy);
        drop(release);
        drop(pool);
    }
}
