use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::*;
use crate::objects::BatchObject;
use crate::store::{BatchConfig, NewBatch};

/// A model that returns the body of the request.
#[derive(Default)]
struct Echo {
    asked: Mutex<HashMap<String, usize>>,
    running: AtomicUsize,
    most: AtomicUsize,
    /// While true, responses are delayed.
    held: AtomicBool,
    freed: Notify,
    begun: Notify,
}

struct Count<'a>(&'a AtomicUsize);

impl Drop for Count<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl BatchModel for Echo {
    async fn answer(&self, _owner: &Owner, request: BatchRequest) -> BatchOutcome {
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        let _count = Count(&self.running);
        self.most.fetch_max(running, Ordering::SeqCst);
        let body: Value = serde_json::from_slice(&request.body).unwrap();
        let prompt = body["prompt"].as_str().unwrap().to_owned();
        *self.asked.lock().entry(prompt.clone()).or_default() += 1;
        self.begun.notify_one();
        while self.held.load(Ordering::SeqCst) {
            self.freed.notified().await;
        }
        tokio::task::yield_now().await;
        match prompt.as_str() {
            "stop" => return BatchOutcome::Stopped,
            "key" => return BatchOutcome::Unauthorized,
            _ => {}
        }
        let status = if prompt.starts_with("bad") { 400 } else { 200 };
        BatchOutcome::Answer { status, id: Some("r".into()), body: request.body.to_vec() }
    }
}

const DAY: u64 = 24 * 3600;
const ROUTE: &str = "/v1/completions";

fn config(folder: &Path) -> BatchConfig {
    BatchConfig {
        batch_dir: folder.to_owned(),
        batch_max_bytes: 1 << 20,
        batch_key_bytes: 1 << 16,
        batch_max_file_bytes: 1 << 15,
        batch_max_requests: 100,
        batch_concurrency: 3,
        batch_ttl: 30 * DAY,
        longest_line: 1000,
    }
}

fn line(name: &str, prompt: &str) -> String {
    let body = json!({"prompt": prompt});
    format!("{}\n", json!({"custom_id": name, "method": "POST", "url": ROUTE, "body": body}))
}

fn prompts(prompts: &[&str]) -> String {
    prompts.iter().map(|prompt| line(prompt, prompt)).collect()
}

struct World {
    store: Arc<BatchStore>,
    model: Arc<Echo>,
    owner: Owner,
    runner: Option<JoinHandle<()>>,
    folder: TempDir,
}

impl World {
    fn new() -> Self {
        Self::with(|_| {})
    }

    fn with(change: impl FnOnce(&mut BatchConfig)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut config = config(folder.path());
        change(&mut config);
        let store = Arc::new(BatchStore::open(config, 0).unwrap());
        let owner = store.owner(Some("key"));
        Self { store, model: Arc::default(), owner, runner: None, folder }
    }

    fn upload(&self, owner: &Owner, text: &str) -> String {
        let mut upload = self.store.upload(owner).unwrap();
        upload.write(text.as_bytes()).unwrap();
        upload.finish("in.jsonl", Some("batch"), None, 0).unwrap().id
    }

    fn create(&self, owner: &Owner, text: &str) -> String {
        let input_file_id = self.upload(owner, text);
        let new = NewBatch {
            input_file_id,
            endpoint: ROUTE.into(),
            completion_window: "24h".into(),
            metadata: None,
        };
        self.store.create(owner, new, 0).unwrap().id
    }

    fn run(&mut self, now: u64) {
        let (store, model) = (Arc::clone(&self.store), Arc::clone(&self.model));
        self.runner = Some(tokio::spawn(run_batches(store, model, move || now)));
    }

    fn batch(&self, owner: &Owner, id: &str) -> BatchObject {
        self.store.batch(owner, id, 0).unwrap()
    }

    async fn ended(&self, id: &str) -> BatchObject {
        loop {
            let batch = self.batch(&self.owner, id);
            if batch.status.is_over() {
                return batch;
            }
            tokio::task::yield_now().await;
        }
    }

    /// Opens the store again, like a server that starts after it was killed.
    async fn restart(self) -> Self {
        let Self { store, owner, runner, folder, .. } = self;
        if let Some(runner) = runner {
            runner.abort();
            runner.await.ok();
        }
        // The folder stays locked until the aborted tasks have stopped.
        let mut store = Some(store);
        let config = config(folder.path());
        let store = loop {
            drop(store.take());
            match BatchStore::open(config.clone(), 0) {
                Ok(store) => break Arc::new(store),
                Err(_) => tokio::task::yield_now().await,
            }
        };
        Self { store, model: Arc::default(), owner, runner: None, folder }
    }

    fn lines(&self, file: Option<&String>) -> Vec<Value> {
        let Some(id) = file else { return Vec::new() };
        self.store.content(&self.owner, id, 0).unwrap();
        let path = self.folder.path().join("files").join(format!("{id}.jsonl"));
        let text = fs::read_to_string(path).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn names(&self, file: Option<&String>) -> Vec<String> {
        let names = |line: &Value| line["custom_id"].as_str().unwrap().to_owned();
        let mut names: Vec<_> = self.lines(file).iter().map(names).collect();
        names.sort();
        names
    }
}

#[tokio::test]
async fn a_batch_becomes_a_file_of_answers_and_one_of_refusals() {
    let mut world = World::new();
    let id = world.create(&world.owner, &prompts(&["a", "bad", "b", "c", "d"]));
    assert_eq!(world.batch(&world.owner, &id).status, BatchStatus::Validating);
    world.run(7);
    let batch = world.ended(&id).await;
    assert_eq!(batch.status, BatchStatus::Completed);
    let counts = RequestCounts { total: 5, completed: 4, failed: 1 };
    assert_eq!(batch.request_counts, counts);
    assert_eq!(world.names(batch.output_file_id.as_ref()), ["a", "b", "c", "d"]);
    let refused = &world.lines(batch.error_file_id.as_ref())[0];
    assert_eq!(
        (&refused["custom_id"], &refused["response"]["status_code"]),
        (&json!("bad"), &json!(400))
    );
    assert_eq!((batch.in_progress_at, batch.completed_at), (Some(7), Some(7)));
    assert!(world.model.most.load(Ordering::SeqCst) <= 3);
}

#[tokio::test]
async fn wrong_lines_fail_the_batch_before_anything_is_computed() {
    let mut world = World::with(|config| config.batch_max_requests = 6);
    let wrong = format!(
        "{}{}nonsense\n{}",
        prompts(&["a", "a"]),
        line("b", "b").replace(ROUTE, "/v1/embeddings"),
        line("c", &"x".repeat(1000)),
    );
    let id = world.create(&world.owner, &wrong);
    let empty = world.create(&world.owner, "\n");
    let many = world.create(&world.owner, &prompts(&["1", "2", "3", "4", "5", "6", "7"]));
    world.run(0);
    let codes = |batch: BatchObject| {
        assert_eq!((batch.status, batch.output_file_id), (BatchStatus::Failed, None));
        let errors = batch.errors.unwrap().data;
        errors.into_iter().map(|error| (error.code, error.line)).collect::<Vec<_>>()
    };
    let of = |code: &str, line| (code.to_owned(), line);
    let expected = [
        of("duplicate_custom_id", Some(2)),
        of("mismatched_url", Some(3)),
        of("invalid_json_line", Some(4)),
        of("line_too_long", Some(5)),
    ];
    assert_eq!(codes(world.ended(&id).await), expected);
    assert_eq!(codes(world.ended(&empty).await), [of("empty_file", None)]);
    assert_eq!(codes(world.ended(&many).await), [of("too_many_requests", None)]);
    assert!(world.model.asked.lock().is_empty());
}

#[tokio::test]
async fn a_killed_server_goes_on_where_it_was() {
    let good: Vec<String> = (0..15).map(|number| format!("n{number:02}")).collect();
    let bad: Vec<String> = (0..5).map(|number| format!("bad{number}")).collect();
    let mixed = good.chunks(3).zip(&bad).flat_map(|(good, bad)| good.iter().chain([bad]));
    let text = prompts(&mixed.map(String::as_str).collect::<Vec<_>>());
    for kill_after in 0..20 {
        let mut world = World::new();
        let id = world.create(&world.owner, &text);
        world.run(0);
        loop {
            let counts = world.batch(&world.owner, &id).request_counts;
            if counts.completed + counts.failed >= kill_after {
                break;
            }
            tokio::task::yield_now().await;
        }
        let mut world = world.restart().await;
        world.run(0);
        let batch = world.ended(&id).await;
        assert_eq!(batch.status, BatchStatus::Completed);
        assert_eq!(batch.request_counts, RequestCounts { total: 20, completed: 15, failed: 5 });
        assert_eq!(world.names(batch.output_file_id.as_ref()), good, "each has one answer");
        assert_eq!(world.names(batch.error_file_id.as_ref()), bad, "a refusal is an answer too");
        assert!(world.model.asked.lock().len() <= 20 - usize::try_from(kill_after).unwrap());
    }
}

#[tokio::test]
async fn a_cancelled_batch_keeps_its_answers_and_aborts_the_rest() {
    let mut world = World::new();
    let text = prompts(&["a", "b", "c", "d", "e"]);
    let waiting = world.create(&world.owner, &text);
    assert_eq!(
        world.store.cancel(&world.owner, &waiting, 3).unwrap().status,
        BatchStatus::Cancelling
    );
    // The older batch is computed first.
    let id = world.create(&world.owner, &text);
    world.model.held.store(true, Ordering::SeqCst);
    world.run(5);
    assert_eq!(world.ended(&waiting).await.status, BatchStatus::Cancelled);
    while world.model.running.load(Ordering::SeqCst) < 3 {
        world.model.begun.notified().await;
    }
    world.store.cancel(&world.owner, &id, 4).unwrap();
    let batch = world.ended(&id).await;
    assert_eq!((batch.status, batch.cancelling_at), (BatchStatus::Cancelled, Some(4)));
    assert_eq!((batch.request_counts.total, batch.output_file_id), (5, None));
    while world.model.running.load(Ordering::SeqCst) > 0 {
        tokio::task::yield_now().await;
    }
    let again = world.store.cancel(&world.owner, &id, 6);
    assert!(matches!(again, Err(StoreError::Conflict(_))));
}

#[tokio::test]
async fn requests_whose_time_is_over_are_named_in_the_file_of_errors() {
    let mut world = World::new();
    let id = world.create(&world.owner, &prompts(&["a", "b"]));
    world.run(DAY);
    let batch = world.ended(&id).await;
    assert_eq!((batch.status, batch.expired_at), (BatchStatus::Expired, Some(DAY)));
    let lines = world.lines(batch.error_file_id.as_ref());
    assert_eq!(lines.len(), 2);
    assert!(lines.iter().all(|line| line["error"]["code"] == "batch_expired"));
    assert_eq!(batch.request_counts.failed, 2);
}

#[tokio::test]
async fn a_server_that_stops_leaves_the_batch_for_its_next_start() {
    let mut world = World::new();
    let id = world.create(&world.owner, &prompts(&["stop"]));
    world.run(0);
    world.runner.take().unwrap().await.unwrap();
    assert_eq!(world.batch(&world.owner, &id).status, BatchStatus::InProgress);
    assert_eq!(world.store.waiting(), [world.owner.clone()]);
}

#[tokio::test]
async fn a_key_that_is_gone_and_a_full_store_fail_the_batch() {
    let mut world = World::with(|config| config.batch_key_bytes = 1000);
    let gone = world.create(&world.owner, &prompts(&["key"]));
    let full = world.create(&world.owner, &prompts(&["a", "b", "c", "d", "e"]));
    world.run(0);
    let code = |batch: BatchObject| batch.errors.unwrap().data[0].code.clone();
    assert_eq!(code(world.ended(&gone).await), "invalid_api_key");
    let full = world.ended(&full).await;
    let answered = full.request_counts.completed;
    assert!((1..5).contains(&answered), "{answered}");
    assert_eq!(world.names(full.output_file_id.as_ref()).len() as u64, answered);
    assert_eq!(code(full), "storage_quota_exceeded");
}

#[tokio::test]
async fn owners_are_computed_beside_each_other() {
    let mut world = World::new();
    let other = world.store.owner(Some("other"));
    let many: Vec<String> = (0..30).map(|number| format!("m{number:02}")).collect();
    let many = prompts(&many.iter().map(String::as_str).collect::<Vec<_>>());
    let long = world.create(&world.owner, &many);
    let short = world.create(&other, &prompts(&["a"]));
    world.run(0);
    while !world.batch(&other, &short).status.is_over() {
        tokio::task::yield_now().await;
    }
    assert!(
        !world.batch(&world.owner, &long).status.is_over(),
        "the long batch ended before the short one"
    );
    world.ended(&long).await;
}
