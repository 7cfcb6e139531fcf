//! Tests of compilations that take too long, with a hook that blocks them and with a simulated
//! clock.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use forebay_text::Tokenizer;
use parking_lot::{Condvar, Mutex};
use tokio::task::JoinHandle;

use super::shared::{GIVEN_UP, REFUSED_FOR};
use super::{GrammarConfig, GrammarError, Grammars, ThreadStart, WantedForm};
use crate::rules::Bounds;
use crate::source::{Form, Source};

const HOUR: Duration = Duration::from_secs(3600);

/// Blocks compilations of sources that begin with `held`.
#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
    /// The sources whose compilation has started.
    begun: Mutex<Vec<String>>,
}

impl Gate {
    fn pass(&self, source: &Source) {
        let Form::Regex(pattern) = &source.form else { return };
        self.begun.lock().push(pattern.to_string());
        if pattern.starts_with("held") {
            let mut open = self.open.lock();
            self.changed.wait_while(&mut open, |open| !*open);
        }
    }

    fn release(&self) {
        *self.open.lock() = true;
        self.changed.notify_all();
    }

    async fn until_begun(&self, pattern: &str) {
        while !self.begun.lock().iter().any(|begun| begun == pattern) {
            tokio::task::yield_now().await;
        }
    }
}

struct Service {
    grammars: Grammars,
    gate: Arc<Gate>,
    /// The number of threads that were started.
    started: Arc<AtomicUsize>,
}

impl Service {
    fn new() -> Self {
        let file = "../text/tests/data/tiny-llama-tokenizer.json";
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        let tokenizer = Arc::new(Tokenizer::from_file(&file).unwrap());
        let (gate, started) = (Arc::new(Gate::default()), Arc::new(AtomicUsize::new(0)));
        let (hook, count) = (Arc::clone(&gate), Arc::clone(&started));
        let start: ThreadStart = Arc::new(move |thread, work| {
            count.fetch_add(1, Ordering::Relaxed);
            thread.spawn(work)
        });
        // Time limits that are not reached in real time.
        let config =
            GrammarConfig { grammar_timeout: HOUR, patience: HOUR, ..GrammarConfig::default() };
        let hook = Arc::new(move |source: &Source| hook.pass(source));
        let grammars = Grammars::with_hook(config, tokenizer, &[0], 2048, &start, hook).unwrap();
        Self { grammars, gate, started }
    }

    fn ask(&self, client: u64, pattern: &str) -> JoinHandle<Result<(), GrammarError>> {
        let wanted = WantedForm {
            source: Some(Form::Regex(pattern.into()).into()),
            reasoning: None,
            bounds: Bounds { ends: [0].into(), ..Bounds::default() },
            choices: 1,
            said: Vec::new(),
            client,
        };
        let grammars = self.grammars.clone();
        tokio::spawn(async move { grammars.constraints(wanted).await.map(drop) })
    }

    async fn asked(&self, client: u64, pattern: &str) -> Result<(), GrammarError> {
        self.ask(client, pattern).await.unwrap()
    }

    /// Requests a source whose compilation is blocked, and abandons the compilation.
    async fn given_up(&self, client: u64, pattern: &str) -> GrammarError {
        let answer = self.ask(client, pattern);
        self.gate.until_begun(pattern).await;
        self.grammars.0.shared.give_up_at(Instant::now() + HOUR);
        answer.await.unwrap().unwrap_err()
    }

    async fn until(&self, holds: impl Fn(&Self) -> bool) {
        while !holds(self) {
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test]
async fn a_compile_that_takes_too_long_is_given_up_and_others_go_on() {
    let service = Service::new();
    let error = service.given_up(1, "held").await;
    assert!(matches!(&error, GrammarError::Invalid { .. }), "{error}");
    assert!(error.to_string().contains("3600 s"), "{error}");
    // A new thread has replaced the blocked thread, so other sources of both clients are compiled.
    assert_eq!(service.asked(2, "[a-z]+").await, Ok(()));
    assert_eq!(service.asked(1, "[0-9]+").await, Ok(()));
    // The abandoned source is not compiled again.
    assert_eq!(service.asked(2, "held").await, Err(error));
    let stats = service.grammars.stats();
    assert_eq!((stats.abandoned, stats.running_on, stats.compiled), (1, 1, 2));
    assert_eq!(
        service.started.load(Ordering::Relaxed),
        4,
        "two service threads, and two that compile"
    );
    // The blocked thread ends after its compilation, and the result is dropped.
    service.gate.release();
    service.until(|service| service.grammars.stats().running_on == 0).await;
    let begun = service.gate.begun.lock().iter().filter(|begun| *begun == "held").count();
    assert_eq!((begun, service.started.load(Ordering::Relaxed)), (1, 4));
}

#[tokio::test]
async fn compiles_that_were_given_up_are_few_and_one_client_has_half_of_them() {
    let service = Service::new();
    assert_eq!(service.asked(1, "known").await, Ok(()));
    for own in 0..GIVEN_UP / 2 {
        assert_eq!(service.grammars.stuck(), None);
        service.given_up(1, &format!("held by the first {own}")).await;
    }
    let overdue = Err(GrammarError::Overdue { compiles: GIVEN_UP / 2 });
    assert_eq!(service.asked(1, "more").await, overdue);
    assert_eq!(service.asked(2, "others").await, Ok(()), "other clients are not affected");
    for own in 0..GIVEN_UP / 2 {
        service.given_up(2, &format!("held by the second {own}")).await;
    }
    let stuck = GrammarError::Stuck { compiles: GIVEN_UP };
    assert_eq!(service.grammars.stuck(), Some(stuck.clone()));
    assert_eq!(service.asked(3, "new").await, Err(stuck));
    assert_eq!(service.asked(3, "known").await, Ok(()), "compiled grammars are still served");
    let most = 2 + GIVEN_UP;
    assert_eq!(service.started.load(Ordering::Relaxed), most, "no further thread is started");
    // New sources are accepted as soon as one compilation ends.
    service.gate.release();
    service.until(|service| service.grammars.stuck().is_none()).await;
    for (client, pattern) in [(1, "more"), (2, "again"), (3, "new")] {
        service.until(|service| service.grammars.stats().running_on == 0).await;
        assert_eq!(service.asked(client, pattern).await, Ok(()));
    }
    assert!(service.started.load(Ordering::Relaxed) <= most + 1);
}

#[tokio::test]
async fn clients_take_turns() {
    let service = Service::new();
    let held = service.ask(1, "held");
    service.gate.until_begun("held").await;
    let mut all: Vec<_> = (0..5).map(|n| service.ask(1, &format!("first{n}"))).collect();
    service.until(|service| service.grammars.stats().waiting == 6).await;
    all.push(service.ask(2, "a longer one of the second"));
    // A source that two clients request is compiled once, in the first client's turn.
    all.push(service.ask(2, "first4"));
    service.until(|service| service.grammars.stats().hits == 1).await;
    service.until(|service| service.grammars.stats().waiting == 7).await;
    service.gate.release();
    held.await.unwrap().unwrap();
    for answer in all {
        answer.await.unwrap().unwrap();
    }
    let begun = service.gate.begun.lock().clone();
    let expected =
        ["held", "first0", "first4", "first1", "a longer one of the second", "first2", "first3"];
    assert_eq!(begun, expected);
}

#[tokio::test]
async fn what_was_given_up_may_be_tried_again_later() {
    let service = Service::new();
    service.given_up(1, "held").await;
    service.gate.release();
    service.until(|service| service.grammars.stats().running_on == 0).await;
    assert!(service.asked(1, "held").await.is_err());
    let (reply, answer) = tokio::sync::oneshot::channel();
    let source: Source = Form::Regex("held".into()).into();
    let later = Instant::now() + HOUR + REFUSED_FOR;
    service.grammars.0.shared.order(source, 1, reply, later).unwrap();
    assert!(answer.await.unwrap().is_ok());
}
