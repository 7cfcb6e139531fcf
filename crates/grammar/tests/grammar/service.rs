//! Tests of the compiling threads, the cache, and their limits.

use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use forebay_grammar::{
    Bounds, Form, GrammarConfig, GrammarError, Grammars, Source, ThreadStart, WantedForm,
};
use forebay_text::Tokenizer;
use serde_json::json;

use crate::support::{Bench, EOS, VOCABULARY, config, start, tokenizer, wanted};

fn source(pattern: &str) -> Source {
    Form::Regex(pattern.into()).into()
}

/// Returns a schema of about a megabyte.
fn large() -> Source {
    let properties: serde_json::Map<String, serde_json::Value> = (0..2500)
        .map(|at| {
            (
                format!("property_number_{at}"),
                json!({"type": "string", "maxLength": at % 50, "description": "x".repeat(400)}),
            )
        })
        .collect();
    let text = json!({"type": "object", "properties": properties}).to_string();
    assert!(text.len() > 1_000_000, "{}", text.len());
    Form::JsonSchema(text.into()).into()
}

#[test]
fn equal_sources_are_compiled_once_and_so_are_bad_ones() {
    let bench = Bench::new(GrammarConfig::default());
    for _ in 0..3 {
        bench.constraints(wanted(Some(source("[a-z]+")))).unwrap();
        assert!(bench.constraints(wanted(Some(source("[")))).is_err());
    }
    let stats = bench.grammars.stats();
    assert_eq!((stats.compiled, stats.hits, stats.waiting), (2, 4, 0));
    assert!(stats.trie_us > 0);
    // Without a form nothing is compiled.
    bench.constraints(wanted(None)).unwrap();
    assert_eq!(bench.grammars.stats().compiled, 2);
}

#[tokio::test]
async fn those_who_ask_at_the_same_time_share_the_work() {
    let grammars = Grammars::new(config(), tokenizer(), &[EOS], VOCABULARY, &start()).unwrap();
    let one = || grammars.constraints(wanted(Some(source("a{1,50}"))));
    let (a, b, c) = tokio::join!(one(), one(), one());
    assert!(a.is_ok() && b.is_ok() && c.is_ok());
    let stats = grammars.stats();
    assert_eq!((stats.compiled, stats.hits), (1, 2));
}

/// Returns a start function for compiling threads that wait for a message on `hold` first.
fn held(hold: &Arc<Mutex<mpsc::Receiver<()>>>) -> ThreadStart {
    let hold = Arc::clone(hold);
    Arc::new(move |thread, mut work| {
        let hold = Arc::clone(&hold);
        thread.spawn(move || {
            let _ = hold.lock().expect("no thread panicked").recv();
            work();
        })
    })
}

#[tokio::test]
async fn requests_that_come_before_the_trie_wait_and_the_queue_is_bounded() {
    let (begin, hold) = mpsc::channel();
    let hold = Arc::new(Mutex::new(hold));
    let config = GrammarConfig { queue: 4, ..config() };
    let grammars = Grammars::new(config, tokenizer(), &[EOS], VOCABULARY, &held(&hold)).unwrap();
    let ask_as = |client: u64, pattern: &str| {
        let (grammars, wanted) = (grammars.clone(), wanted(Some(source(pattern))));
        let wanted = WantedForm { client, ..wanted };
        tokio::spawn(async move { grammars.constraints(wanted).await.map(|_| ()) })
    };
    let ask = |pattern: &str| ask_as(1, pattern);
    let (first, second, gone) = (ask("a"), ask("a"), ask("b"));
    while grammars.stats().waiting < 2 {
        tokio::task::yield_now().await;
    }
    assert_eq!(ask("c").await.unwrap(), Err(GrammarError::Busy), "half of the queue is taken");
    let others = [ask_as(2, "c"), ask_as(2, "e")];
    while grammars.stats().waiting < 4 {
        tokio::task::yield_now().await;
    }
    assert_eq!(ask_as(3, "f").await.unwrap(), Err(GrammarError::Busy), "all of it is taken");
    gone.abort();
    assert!(gone.await.is_err());
    drop(begin);
    assert_eq!((first.await.unwrap(), second.await.unwrap()), (Ok(()), Ok(())));
    for other in others {
        assert_eq!(other.await.unwrap(), Ok(()));
    }
    // The request that was dropped was not compiled.
    assert_eq!(ask("d").await.unwrap(), Ok(()));
    assert_eq!(grammars.stats().compiled, 4);
}

#[tokio::test]
async fn a_known_source_does_not_wait_behind_a_new_one() {
    let grammars = Grammars::new(config(), tokenizer(), &[EOS], VOCABULARY, &start()).unwrap();
    grammars.constraints(wanted(Some(source("[a-z]+")))).await.unwrap();
    let slow = grammars.constraints(wanted(Some(large())));
    let mut slow = std::pin::pin!(slow);
    // The only compiling thread has started with the large schema.
    assert!(futures_poll(slow.as_mut()).await.is_none());
    grammars.constraints(wanted(Some(source("[a-z]+")))).await.unwrap();
    let stats = grammars.stats();
    assert_eq!((stats.compiled, stats.waiting), (1, 1), "the large one is still compiled");
    slow.await.map(|_| ()).unwrap();
}

async fn futures_poll<F: Future>(mut future: std::pin::Pin<&mut F>) -> Option<F::Output> {
    std::future::poll_fn(|context| match future.as_mut().poll(context) {
        std::task::Poll::Ready(output) => std::task::Poll::Ready(Some(output)),
        std::task::Poll::Pending => std::task::Poll::Ready(None),
    })
    .await
}

#[tokio::test(start_paused = true)]
async fn nobody_waits_for_ever() {
    let (begin, hold) = mpsc::channel::<()>();
    let hold = Arc::new(Mutex::new(hold));
    let config = GrammarConfig { patience: Duration::from_secs(5), ..config() };
    let grammars = Grammars::new(config, tokenizer(), &[EOS], VOCABULARY, &held(&hold)).unwrap();
    let late = grammars.constraints(wanted(Some(source("a")))).await;
    assert_eq!(late.err(), Some(GrammarError::Late { seconds: 5, retry_after: 1 }));
    drop(begin);
}

#[test]
fn a_tokenizer_that_decodes_tokens_together_is_an_error_of_the_request() {
    let file =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../text/tests/data/tokenizers/wordpiece.json");
    let wordpiece = Arc::new(Tokenizer::from_file(&file).unwrap());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for (tokenizer, eos) in [(wordpiece, vec![2]), (tokenizer(), vec![]), (tokenizer(), vec![5000])]
    {
        let grammars = Grammars::new(config(), tokenizer, &eos, VOCABULARY, &start()).unwrap();
        let refused = runtime.block_on(grammars.constraints(wanted(Some(source("a")))));
        assert!(matches!(refused, Err(GrammarError::Tokenizer(_))));
    }
}

#[test]
fn tokenizers_with_bytes_for_what_has_no_piece_work_too() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../text/tests/data/tokenizers/byte_fallback.json");
    let pieces = Arc::new(Tokenizer::from_file(&file).unwrap());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let grammars = Grammars::new(config(), Arc::clone(&pieces), &[2], 640, &start()).unwrap();
    let source = Form::Choice(["né 7".to_owned()].into()).into();
    let bounds = Bounds { ends: [2].into(), ..Bounds::default() };
    let wanted = WantedForm { bounds, ..wanted(Some(source)) };
    let mut rules = runtime.block_on(grammars.constraints(wanted)).unwrap().choices.remove(0);
    let mut said = Vec::new();
    while said.last() != Some(&2) {
        let mut words = [0; 20];
        rules.mask(&mut words).unwrap();
        let next = (0..640).find(|&id| words[id as usize / 32] >> (id % 32) & 1 == 1 && id != 0);
        said.push(next.unwrap());
        rules.accept(next.unwrap()).unwrap();
        assert!(said.len() < 20);
    }
    let bytes: Vec<u8> =
        said.iter().filter(|&&id| id != 2).flat_map(|&id| pieces.token_bytes(id)).collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), "né 7");
}
