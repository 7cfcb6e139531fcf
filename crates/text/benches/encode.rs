//! Measures the text pool: `cargo bench -p forebay-text --bench encode`.
//!
//! Texts consist of random words, so that no text is cached. The tokenizer is that of
//! `FOREBAY_BENCH_TOKENIZER` (a `tokenizer.json`), or the small one of the tests.

use std::hint::black_box;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use forebay_text::{Backend, Encoder, TextConfig, TextInput, TextMode, TextPool, Tokenizer};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

const WORDS: &str = include_str!("../src/lib.rs");
/// The size of a short text, of about 500 tokens.
const SHORT_BYTES: usize = 2000;
/// The size of a long text, of about 100 000 tokens.
const LONG_BYTES: usize = 400_000;
const BACKLOG: usize = 1000;
const THREADS: usize = 2;

fn file() -> PathBuf {
    let tests =
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-llama-tokenizer.json");
    std::env::var_os("FOREBAY_BENCH_TOKENIZER").map_or_else(tests, PathBuf::from)
}

fn load(backend: Backend) -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_file_for(&file(), backend).expect("a tokenizer"))
}

fn pool(tokenizer: &Arc<Tokenizer>, mode: TextMode, cache_bytes: usize) -> TextPool {
    let config = TextConfig {
        text_threads: THREADS,
        queue: 2 * BACKLOG,
        tokenizer_mode: mode,
        text_cache_bytes: cache_bytes,
        ..TextConfig::default()
    };
    TextPool::with_config(Arc::clone(tokenizer), None, &config)
}

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(THREADS).build().expect("a runtime")
}

/// Returns a text of `bytes` bytes that differs for each seed.
fn text(bytes: usize, seed: u64) -> String {
    let words: Vec<&str> = WORDS.split_whitespace().collect();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut text = String::with_capacity(bytes + 32);
    while text.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        text.push_str(words[(state >> 33) as usize % words.len()]);
        text.push(if state.is_multiple_of(17) { '\n' } else { ' ' });
    }
    text
}

fn input(text: &str) -> TextInput {
    TextInput::Text { text: text.to_owned(), add_special_tokens: true }
}

/// Returns a conversation of `turns` turns in ChatML.
fn conversation(turns: u64, seed: u64) -> String {
    let turn = |at: u64| {
        let (question, answer) = (text(400, seed + 2 * at), text(1600, seed + 2 * at + 1));
        format!(
            "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
        )
    };
    (0..turns).map(turn).collect()
}

/// Measures a single request, from submission to the result.
fn lone(c: &mut Criterion) {
    let mut group = c.benchmark_group("lone");
    for (backend, tokenizer) in backends() {
        for bytes in [64, 256, SHORT_BYTES] {
            let text = text(bytes, 1);
            for (name, mode) in [("inline", TextMode::Inline), ("pool", TextMode::Auto)] {
                let (pool, runtime) = (pool(&tokenizer, mode, 0), runtime());
                group.bench_function(format!("{backend}/{bytes}-bytes/{name}"), |b| {
                    b.iter(|| runtime.block_on(pool.encode(input(&text))).expect("ids"));
                });
            }
        }
    }
    group.finish();
}

/// Measures many simultaneous requests, until the last one is finished.
fn backlog(c: &mut Criterion) {
    let mut group = c.benchmark_group("backlog");
    group.sample_size(10).throughput(Throughput::Bytes((BACKLOG * SHORT_BYTES) as u64));
    let texts: Vec<String> = (0..BACKLOG as u64).map(|seed| text(SHORT_BYTES, seed)).collect();
    for (backend, tokenizer) in backends() {
        for (name, mode) in [("inline", TextMode::Inline), ("pool", TextMode::Auto)] {
            let (pool, runtime) = (Arc::new(pool(&tokenizer, mode, 0)), runtime());
            group.bench_function(format!("{backend}/{name}"), |b| {
                b.iter(|| {
                    runtime.block_on(async {
                        let mut all = JoinSet::new();
                        for text in &texts {
                            let (pool, input) = (Arc::clone(&pool), input(text));
                            all.spawn(async move { pool.encode(input).await.expect("ids") });
                        }
                        all.join_all().await
                    })
                });
            });
        }
    }
    // Compares with the library's own batches: one call of the library per batch, which the library
    // spreads over threads.
    let library = tokenizers::Tokenizer::from_file(file()).expect("a tokenizer");
    for batch in [32, BACKLOG] {
        group.bench_function(format!("hf/encode-batch-of-{batch}"), |b| {
            b.iter(|| {
                for texts in texts.chunks(batch) {
                    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
                    black_box(library.encode_batch_fast(texts, true).expect("ids"));
                }
            });
        });
    }
    group.finish();
}

/// Measures a short prompt that is submitted right after a long one.
fn long(c: &mut Criterion) {
    let mut group = c.benchmark_group("long");
    group.sample_size(10).throughput(Throughput::Bytes(LONG_BYTES as u64));
    let text = text(LONG_BYTES, 1);
    for (backend, tokenizer) in backends() {
        for (name, mode) in [("inline", TextMode::Inline), ("pool", TextMode::Auto)] {
            let (pool, runtime) = (pool(&tokenizer, mode, 0), runtime());
            group.bench_function(format!("{backend}/{name}"), |b| {
                b.iter(|| runtime.block_on(pool.encode(input(&text))).expect("ids"));
            });
        }
        group.bench_function(format!("{backend}/plain"), |b| {
            b.iter(|| tokenizer.encode(&text, true).expect("ids"));
        });
        let (pool, runtime) = (Arc::new(pool(&tokenizer, TextMode::Auto, 0)), runtime());
        group.bench_function(format!("{backend}/short-one-behind-two-long"), |b| {
            b.iter_custom(|rounds| {
                (0..rounds).map(|_| runtime.block_on(short_behind_long(&pool, &text))).sum()
            });
        });
    }
    group.finish();
}

async fn short_behind_long(pool: &Arc<TextPool>, text: &str) -> Duration {
    let mut long = JoinSet::new();
    for _ in 0..THREADS {
        let (pool, input) = (Arc::clone(pool), input(text));
        long.spawn(async move { pool.encode(input).await.expect("ids") });
    }
    tokio::task::yield_now().await;
    let start = Instant::now();
    black_box(pool.encode(input("What comes next?")).await.expect("ids"));
    let waited = start.elapsed();
    long.join_all().await;
    waited
}

/// Measures the last turn of a conversation whose history is cached, and new texts that are not
/// cached at all.
fn turns(c: &mut Criterion) {
    let mut group = c.benchmark_group("turns");
    group.sample_size(20);
    let mut seed = 0;
    for (backend, tokenizer) in backends() {
        for (name, cache_bytes) in [("plain", 0), ("cached", 64 << 20)] {
            let encoder = Encoder::new(Arc::clone(&tokenizer), cache_bytes);
            group.bench_function(format!("{backend}/turn-20/{name}"), |b| {
                b.iter_batched(
                    || {
                        seed += 1000;
                        let history = conversation(19, seed);
                        encoder.encode(&history, false).expect("ids");
                        history + &conversation(1, seed + 500)
                    },
                    |text| encoder.encode(&text, false).expect("ids"),
                    criterion::BatchSize::PerIteration,
                );
            });
            group.bench_function(format!("{backend}/new-conversation/{name}"), |b| {
                b.iter_batched(
                    || {
                        seed += 1000;
                        conversation(4, seed)
                    },
                    |text| encoder.encode(&text, false).expect("ids"),
                    criterion::BatchSize::PerIteration,
                );
            });
        }
    }
    group.finish();
}

fn backends() -> [(&'static str, Arc<Tokenizer>); 2] {
    [("hf", load(Backend::Hf)), ("fastokens", load(Backend::Fastokens))]
}

criterion_group!(benches, lone, backlog, long, turns);
criterion_main!(benches);
