//! Tests of the pool with real threads. In some tests, a template blocks a thread.

mod long;
mod special;

use super::*;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use crossbeam_channel::{Receiver, Sender};
use jiff::Zoned;
use parking_lot::Mutex;

use crate::encoder::Texts;

const TOKENIZER: &[u8] = include_bytes!("../../../tests/data/tiny-llama-tokenizer.json");
/// A template that blocks the rendering thread until the test releases it.
const STOP: &str = "{% if stop %}{{ strftime_now('%Y') }}{% endif %}";

/// Lets a test wait until a thread of the pool blocks, and release it.
struct Stops {
    started: Receiver<()>,
    go_on: Sender<()>,
}

fn tokenizer() -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_bytes(TOKENIZER).expect("a tokenizer"))
}

/// Creates a pool whose template blocks the rendering thread.
fn stoppable(config: &TextConfig) -> (TextPool, Stops) {
    stoppable_by(STOP, config)
}

/// Creates a pool whose template contains [`STOP`].
fn stoppable_by(template: &str, config: &TextConfig) -> (TextPool, Stops) {
    let (start, started) = crossbeam_channel::unbounded();
    let (go_on, gone_on) = crossbeam_channel::unbounded::<()>();
    let clock = move || {
        start.send(()).expect("the test listens");
        // The channel is closed if the test has ended.
        let _ = gone_on.recv();
        Zoned::now()
    };
    let template = ChatTemplate::with_clock(template, None, None, &BTreeMap::new(), clock);
    let template = Arc::new(template.expect("a template"));
    (TextPool::with_config(tokenizer(), Some(template), config), Stops { started, go_on })
}

fn config(threads: usize, queue: usize) -> TextConfig {
    TextConfig { text_threads: threads, queue, ..TextConfig::default() }
}

fn text(text: &str) -> TextInput {
    TextInput::Text { text: text.to_owned(), add_special_tokens: false }
}

fn chat() -> TextInput {
    TextInput::Chat {
        messages: serde_json::json!([]),
        tools: None,
        add_generation_prompt: true,
        continue_final_message: false,
        kwargs: Map::from_iter([("stop".to_owned(), Value::Bool(true))]),
    }
}

fn tools(encoder: Encoder) -> Tools {
    Tools { encoder, template: None, guard: None, closed: AtomicBool::new(false) }
}

/// Returns a text that is too long for the caller's thread.
fn sentence() -> TextInput {
    text(&prose(200, 1))
}

/// Returns a text of about `bytes` bytes that differs for each `seed`.
fn prose(bytes: usize, seed: usize) -> String {
    let mut text = String::new();
    let mut word = seed + 1;
    while text.len() < bytes {
        word = word * 48_271 % 1_000_003 + 1;
        text.push_str(&format!("word{word} and the "));
    }
    text
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().expect("a runtime").block_on(future)
}

fn poll_once<F: Future + ?Sized>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

type Pending<'a, T> = Pin<Box<dyn Future<Output = Result<T, TextError>> + 'a>>;

/// Starts an input that must be cut into pieces.
fn cut(job: Job, tools: &Tools) -> Arc<work::Long> {
    match job.start(tools) {
        StartedInput::Long(long) => long,
        StartedInput::Done(..) => panic!("the input is short"),
    }
}

/// Submits an input without waiting for the result.
fn submit(pool: &TextPool, input: TextInput) -> Pending<'_, Encoded> {
    let mut pending: Pending<'_, Encoded> = Box::pin(pool.encode(input));
    assert!(poll_once(pending.as_mut()).is_pending());
    pending
}

/// Blocks a thread of the pool.
fn occupy<'a>(pool: &'a TextPool, stops: &Stops) -> Pending<'a, Encoded> {
    let busy = submit(pool, chat());
    stops.started.recv().expect("a thread renders it");
    busy
}

#[test]
fn texts_are_encoded() {
    let pool = TextPool::new(tokenizer(), None, 2, 4);
    let one = block_on(pool.encode(text("hello"))).expect("ids");
    let all = block_on(pool.within(None).encode_all(vec!["hello".into(), String::new()], false))
        .expect("ids");
    assert_eq!(all, [one.ids, Vec::new()]);
    assert_eq!(one.text, None);
    assert_eq!(block_on(pool.within(None).encode_all(Vec::new(), false)), Ok(Vec::new()));
}

#[test]
fn pairs_are_encoded_in_order_on_a_thread_and_in_line() {
    for mode in [TextMode::Auto, TextMode::Inline] {
        let pool = TextPool::with_config(
            tokenizer(),
            None,
            &TextConfig { tokenizer_mode: mode, ..config(1, 4) },
        );
        let pair = |seed| (prose(90, seed).into(), prose(30, seed + 7));
        let pairs: Vec<(Arc<str>, String)> = (0..5).map(pair).collect();
        let encoded = block_on(pool.within(None).encode_pairs(pairs.clone())).expect("pairs");
        let alone = pairs.iter().map(|(a, b)| tokenizer().encode_pair(a, b).expect("a pair"));
        assert_eq!(encoded, alone.collect::<Vec<_>>());
    }
}

#[test]
fn what_is_tiny_waits_for_nobody() {
    let (pool, stops) = stoppable(&config(1, 1));
    let busy = occupy(&pool, &stops);
    assert!(block_on(pool.encode(text("hello"))).is_ok());
    drop(stops);
    assert!(block_on(busy).is_ok());
}

#[test]
fn a_full_queue_is_busy_at_once_and_order_is_kept() {
    let (pool, stops) = stoppable(&config(1, 1));
    let busy = occupy(&pool, &stops);
    let waiting = submit(&pool, sentence());
    assert_eq!(pool.stats().waiting, 1);
    let mut refused = pin!(pool.encode(sentence()));
    assert_eq!(poll_once(refused.as_mut()), Poll::Ready(Err(TextError::Busy)));
    drop(stops);
    assert!(block_on(busy).is_ok());
    assert!(block_on(waiting).is_ok());
}

#[test]
fn a_dropped_future_cancels_its_input() {
    let (pool, stops) = stoppable(&config(1, 3));
    let busy = occupy(&pool, &stops);
    drop(submit(&pool, chat()));
    let last = submit(&pool, sentence());
    stops.go_on.send(()).expect("a thread waits");
    assert!(block_on(busy).is_ok());
    assert!(block_on(last).is_ok());
    assert!(stops.started.is_empty(), "the cancelled chat was rendered");
    let stats = pool.stats();
    assert_eq!((stats.inputs, stats.cancelled), (2, 1));
}

#[test]
fn what_waits_is_taken_together_up_to_a_number_of_tokens() {
    for (count, bytes, inputs, batches) in
        [(40, 150, None, 1), (40, 150, NonZeroUsize::new(10), 4), (4, 4500, None, 4)]
    {
        let (pool, stops) =
            stoppable(&TextConfig { dynamic_batch_tokenizer_batch_size: inputs, ..config(1, 100) });
        let busy = occupy(&pool, &stops);
        let texts: Vec<String> = (0..count).map(|seed| prose(bytes, seed)).collect();
        let waiting: Vec<_> = texts.iter().map(|one| submit(&pool, text(one))).collect();
        drop(stops);
        assert!(block_on(busy).is_ok());
        for (waiting, text) in waiting.into_iter().zip(&texts) {
            let plain = pool.tokenizer().encode(text, false);
            assert_eq!(block_on(waiting).map(|encoded| encoded.ids), plain);
        }
        // The chat is one more batch.
        assert_eq!(pool.stats().batches, batches + 1, "{count} inputs of {bytes} bytes");
    }
}

#[test]
fn several_threads_share_what_waits() {
    let (pool, stops) = stoppable(&config(2, 100));
    let busy = [occupy(&pool, &stops), occupy(&pool, &stops)];
    let waiting: Vec<_> = (0..10).map(|_| submit(&pool, sentence())).collect();
    stops.go_on.send(()).expect("a thread waits");
    // Only one thread is free, and it takes half of the queue each time.
    for waiting in waiting {
        assert!(block_on(waiting).is_ok());
    }
    assert!(pool.stats().batches >= 2 + 3);
    drop(stops);
    for busy in busy {
        assert!(block_on(busy).is_ok());
    }
}

#[test]
fn a_short_input_overtakes_a_long_one_that_came_before() {
    let (pool, stops) = stoppable(&config(1, 100));
    let busy = occupy(&pool, &stops);
    let long = prose(2 << 20, 1);
    let mut waiting_long = submit(&pool, text(&long));
    let short = submit(&pool, sentence());
    drop(stops);
    assert!(block_on(busy).is_ok());
    assert!(block_on(short).is_ok());
    // Two megabytes occupy the only thread many times as long as all other inputs so far.
    assert!(poll_once(waiting_long.as_mut()).is_pending());
    let plain = pool.tokenizer().encode(&long, false);
    assert_eq!(block_on(waiting_long).map(|encoded| encoded.ids), plain);
    assert_eq!(pool.stats().cut, 1);
}

#[test]
fn a_long_input_that_is_cancelled_stops_between_pieces() {
    let shared = |pieces: &[&str]| {
        let encoder = Encoder::new(tokenizer(), 0);
        let tools = tools(encoder);
        let (reply, answer) = oneshot::channel();
        let input = Input::Texts {
            texts: pieces.iter().map(|&piece| piece.to_owned()).collect(),
            add_special_tokens: false,
        };
        let job = Job { tokens: input.tokens(), input, terms: Terms::default(), reply, keep: None };
        (cut(job, &tools), answer, tools)
    };
    let text = prose(30_000, 1);
    let queue = Queue::new(1, 1, None);
    let (long, answer, tools) = shared(&[&text, &text]);
    queue.push_long(Arc::clone(&long));
    let Some(Task::Piece(taken, 0)) = queue.take(false) else { panic!("no piece") };
    taken.encode(0, &tools);
    assert!(!long.is_over());
    drop(answer);
    assert!(long.is_over());
    queue.forget(&long);
    queue.close();
    assert!(queue.take(false).is_none());
}

#[test]
fn pieces_of_long_inputs_and_batches_take_turns() {
    let tools = tools(Encoder::new(tokenizer(), 0));
    let queue = Queue::new(10, 1, None);
    let text = prose(20_000, 1);
    let job = |text: &str| {
        let (reply, answer) = oneshot::channel();
        let input = Input::Texts { texts: vec![text.to_owned()], add_special_tokens: false };
        (Job { tokens: input.tokens(), input, terms: Terms::default(), reply, keep: None }, answer)
    };
    let (first, _first_answer) = job(&text);
    let (second, _second_answer) = job(&text);
    let first = cut(first, &tools);
    let second = cut(second, &tools);
    assert_eq!((first.pieces(), second.pieces()), (3, 3));
    queue.push_long(Arc::clone(&first));
    queue.push_long(Arc::clone(&second));
    let answers: Vec<_> = (0..2)
        .map(|_| {
            let (short, answer) = job(&text[..8000]);
            queue.push(short).expect("room");
            answer
        })
        .collect();
    queue.close();
    let mut order = Vec::new();
    let mut after_batch = true;
    while let Some(task) = queue.take(after_batch) {
        after_batch = matches!(task, Task::Batch(_));
        order.push(match task {
            Task::Batch(jobs) => format!("{} short", jobs.len()),
            Task::Piece(long, piece) if Arc::ptr_eq(&long, &first) => format!("first {piece}"),
            Task::Piece(_, piece) => format!("second {piece}"),
        });
    }
    let expected =
        ["first 0", "1 short", "second 0", "1 short", "first 1", "second 1", "first 2", "second 2"];
    assert_eq!(order, expected);
    drop(answers);
}

#[test]
fn a_panic_is_an_error_and_the_thread_lives_on() {
    let panics = || panic!("a test's own panic");
    let template = ChatTemplate::with_clock(STOP, None, None, &BTreeMap::new(), panics);
    let template = Arc::new(template.expect("a template"));
    for mode in [TextMode::Auto, TextMode::Inline] {
        let config = TextConfig { tokenizer_mode: mode, ..config(1, 1) };
        let pool = TextPool::with_config(tokenizer(), Some(Arc::clone(&template)), &config);
        assert!(matches!(block_on(pool.encode(chat())), Err(TextError::Encode(_))));
        assert!(block_on(pool.encode(sentence())).is_ok());
    }
}

#[test]
fn a_chat_needs_a_template() {
    let pool = TextPool::new(tokenizer(), None, 1, 1);
    assert_eq!(block_on(pool.encode(chat())), Err(TextError::NoTemplate));
}

#[test]
fn inline_encodes_on_the_thread_that_asks() {
    let seen = Arc::new(Mutex::new(None));
    let thread = Arc::clone(&seen);
    let clock = move || {
        *thread.lock() = Some(std::thread::current().id());
        Zoned::now()
    };
    let template = ChatTemplate::with_clock(STOP, None, None, &BTreeMap::new(), clock);
    let template = Arc::new(template.expect("a template"));
    for (mode, here) in [(TextMode::Auto, false), (TextMode::Inline, true)] {
        let config = TextConfig { tokenizer_mode: mode, ..config(1, 1) };
        let pool = TextPool::with_config(tokenizer(), Some(Arc::clone(&template)), &config);
        let encoded = block_on(pool.encode(chat())).expect("ids");
        assert_eq!(encoded.text.map(|text| text.len()), Some(4));
        let seen = seen.lock().take();
        assert_eq!(seen == Some(std::thread::current().id()), here);
    }
}

#[test]
fn the_end_of_a_pool_does_not_wait_for_a_template() {
    let (mut pool, stops) = stoppable(&config(1, 4));
    pool.patience = Duration::ZERO;
    drop(occupy(&pool, &stops));
    drop(pool);
    // The thread is still blocked in the template.
    assert!(stops.started.is_empty());
    drop(stops);
}

#[test]
fn dropping_the_pool_skips_what_nobody_waits_for() {
    let (pool, stops) = stoppable(&config(1, 4));
    let busy = occupy(&pool, &stops);
    drop(busy);
    drop(stops);
    drop(pool);
}

#[test]
fn ids_become_text_on_a_thread_and_in_line() {
    let (pool, stops) = stoppable(&config(1, 1));
    let text = prose(4000, 3);
    let ids = tokenizer().encode(&text, false).expect("ids");
    assert_eq!(block_on(pool.decode(ids[..5].to_vec())), tokenizer().decode(&ids[..5], false));
    let expected = tokenizer().decode(&ids, false);
    let busy = occupy(&pool, &stops);
    let mut waiting = pin!(pool.decode(ids.clone()));
    assert!(poll_once(waiting.as_mut()).is_pending());
    assert_eq!(block_on(pool.decode(ids)), Err(TextError::Busy));
    drop(stops);
    assert!(block_on(busy).is_ok());
    assert_eq!(block_on(waiting), expected);
}

#[test]
fn a_thread_that_panics_leaves_nobody_waiting() {
    struct Refuse;
    impl std::task::Wake for Refuse {
        fn wake(self: Arc<Self>) {
            panic!("not on an input");
        }
    }
    let (pool, stops) = stoppable(&config(1, 4));
    let mut poisoned = Box::pin(pool.encode(chat()));
    let waker = Waker::from(Arc::new(Refuse));
    assert!(poisoned.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    stops.started.recv().expect("a thread renders it");
    let waiting = submit(&pool, sentence());
    drop(stops);
    assert_eq!(block_on(waiting), Err(TextError::Closed));
    assert_eq!(block_on(pool.encode(sentence())), Err(TextError::Closed));
}
