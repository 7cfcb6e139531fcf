//! The models and adapters that backends list.
//!
//! A request goes only to backends that list its model, as long as some backend does. A request for
//! a name that no backend lists may go to any backend, because some servers accept names that they
//! do not list.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use forebay_api::{members, plain_string};
use lru::LruCache;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout_at};

use crate::backend::Backend;

/// The path of the list of models.
pub(crate) const LIST: &str = "/v1/models";
/// The path of a single model.
const ONE: &str = "/v1/models/";
/// The largest number of unlisted names (names that no backend lists) that are remembered.
const MOST_UNLISTED: NonZeroUsize = NonZeroUsize::new(1024).expect("not zero");
/// The time for which backends are not queried again for an unlisted name.
const UNLISTED: Duration = Duration::from_secs(1);
/// The suffix that Ollama's clients append to a model's name.
const LATEST: &str = ":latest";

/// The list of models of one backend.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Listed(Vec<(String, Value)>);

#[derive(Deserialize)]
struct Answer {
    data: Vec<Value>,
}

impl Listed {
    /// Parses a response. `None`: it is not a list of models.
    pub(crate) fn read(body: &[u8]) -> Option<Self> {
        let Answer { data } = serde_json::from_slice(body).ok()?;
        let named = |card: Value| Some((card.get("id")?.as_str()?.to_owned(), card));
        Some(Self(data.into_iter().filter_map(named).collect()))
    }

    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|(id, _)| id == name)
    }

    /// True if a request may use this name: a listed name, or the names of a model and of an
    /// adapter joined by `:`.
    fn knows(&self, name: &str) -> bool {
        self.has(name)
            || name.strip_suffix(LATEST).is_some_and(|name| self.has(name))
            || name
                .match_indices(':')
                .any(|(at, _)| self.has(&name[..at]) && self.has(&name[at + 1..]))
    }

    /// Returns the names that are listed with a digest of their content, each with its digest.
    fn digests(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().filter_map(|(id, card)| Some((id.as_str(), card.get("digest")?.as_str()?)))
    }
}

/// A backend's last list of models, and the state of queries for it.
#[derive(Debug, Default)]
pub(crate) struct Models {
    /// The last list; `None`: the backend has not returned a list.
    listed: Mutex<Option<Arc<Listed>>>,
    /// The sequence number of the last query.
    begun: AtomicU64,
    /// The sequence number of the last query that was answered or failed.
    ended: watch::Sender<u64>,
    /// Wakes the task that queries the list.
    pub(crate) wanted: Notify,
}

impl Models {
    /// Starts a query and returns its sequence number.
    pub(crate) fn begin(&self) -> u64 {
        self.begun.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Records the result of a query. Returns true if the list has changed.
    pub(crate) fn end(&self, number: u64, listed: Option<Listed>) -> bool {
        let listed = listed.map(Arc::new);
        let before = std::mem::replace(&mut *self.listed.lock(), listed.clone());
        self.ended.send_replace(number);
        before != listed
    }

    /// Records that a query got no answer.
    pub(crate) fn fail(&self, number: u64) {
        self.ended.send_replace(number);
    }

    /// The `owned_by` field of the first model, which names the engine.
    pub(crate) fn owner(&self) -> Option<String> {
        let listed = self.listed()?;
        let (_, card) = listed.0.first()?;
        card.get("owned_by")?.as_str().map(str::to_owned)
    }

    fn listed(&self) -> Option<Arc<Listed>> {
        self.listed.lock().clone()
    }
}

/// Names that no backend listed when queried, with the time of the query.
#[derive(Debug)]
pub(crate) struct Unlisted(Mutex<LruCache<Box<str>, Instant>>);

impl Default for Unlisted {
    fn default() -> Self {
        Self(Mutex::new(LruCache::new(MOST_UNLISTED)))
    }
}

impl Unlisted {
    /// True if backends should be queried for this name, because they were not recently queried for
    /// it. Records the query.
    pub(crate) fn asks(&self, name: &str) -> bool {
        let (mut asked, now) = (self.0.lock(), Instant::now());
        if asked.get(name).is_some_and(|&before| now < before + UNLISTED) {
            return false;
        }
        asked.put(name.into(), now);
        true
    }
}

/// Returns the name of the model or adapter that a request is for.
pub(crate) fn wanted(path: &str, body: &[u8]) -> Option<Box<str>> {
    if let Some(name) = path.strip_prefix(ONE) {
        return Some(name.into());
    }
    let text = |value| std::str::from_utf8(plain_string(value)?).ok().map(Into::into);
    let field = |field: &[u8]| members(body).find(|&(name, _)| name == field);
    // SGLang's native route has a separate field for the adapter.
    let adapter = (path == "/generate").then(|| field(b"lora_path")).flatten();
    adapter.or_else(|| field(b"model")).and_then(|(_, value)| text(value))
}

/// Returns the ids of the backends that should not get a request for this name, because they do not
/// list the name and other backends do.
pub(crate) fn without(backends: &[Arc<Backend>], name: &str) -> Vec<u32> {
    let lists = |backend: &Arc<Backend>| Some((backend.id, backend.models.listed()?.knows(name)));
    let found: Vec<(u32, bool)> = backends.iter().filter_map(lists).collect();
    let listed = found.iter().any(|(_, knows)| *knows);
    found.into_iter().filter(|(_, knows)| listed && !knows).map(|(id, _)| id).collect()
}

/// True if some backend lists this name, or no backend has returned a list.
pub(crate) fn is_listed(backends: &[Arc<Backend>], name: &str) -> bool {
    let mut told = backends.iter().filter_map(|backend| backend.models.listed()).peekable();
    told.peek().is_none() || told.any(|listed| listed.knows(name))
}

/// Queries the lists of all backends that are up. Waits for the answers, for at most `time`.
pub(crate) async fn renew(backends: &[Arc<Backend>], time: Duration) {
    let until = Instant::now() + time;
    let asked: Vec<_> = backends
        .iter()
        .filter(|backend| backend.is_up())
        .map(|backend| {
            let Models { begun, ended, wanted, .. } = &backend.models;
            // A query that is already in flight may have been answered before the wanted model was
            // added.
            let next = begun.load(Ordering::Relaxed) + 1;
            wanted.notify_one();
            (ended.subscribe(), next)
        })
        .collect();
    for (mut ended, next) in asked {
        // After the deadline, the last known list is used.
        let _ = timeout_at(until, ended.wait_for(|&number| number >= next)).await;
    }
}

/// Returns the combined list of all backends that are up. `None`: no backend has returned a list. A
/// model of a pair has to be on both servers.
pub(crate) fn all(backends: &[Arc<Backend>]) -> Option<Value> {
    let told = |prefill: bool| -> Vec<Arc<Listed>> {
        let up = backends.iter().filter(|backend| backend.is_up());
        let up = up.filter(|backend| backend.duty.is_prefill() == prefill);
        up.filter_map(|backend| backend.models.listed()).collect()
    };
    let (prefill, told) = (told(true), told(false));
    if told.is_empty() {
        return None;
    }
    let mut cards: Vec<&(String, Value)> = Vec::new();
    for card in told.iter().flat_map(|listed| &listed.0) {
        let served = prefill.is_empty() || prefill.iter().any(|listed| listed.has(&card.0));
        if served && !cards.iter().any(|(id, _)| *id == card.0) {
            cards.push(card);
        }
    }
    let id = |card: Option<&&(String, Value)>| card.map(|(id, _)| id.clone());
    let (first, last) = (id(cards.first()), id(cards.last()));
    let data: Vec<&Value> = cards.into_iter().map(|(_, card)| card).collect();
    Some(
        json!({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": false}),
    )
}

/// Returns one message for each adapter name that backends list with different digests.
pub(crate) fn conflicts(backends: &[Arc<Backend>]) -> Vec<String> {
    let told: Vec<(&Arc<Backend>, Arc<Listed>)> =
        backends.iter().filter_map(|backend| Some((backend, backend.models.listed()?))).collect();
    let mut first: BTreeMap<&str, (&str, &Arc<Backend>)> = BTreeMap::new();
    let mut lines: BTreeMap<&str, String> = BTreeMap::new();
    for (backend, listed) in &told {
        for (name, digest) in listed.digests() {
            let (known, at) = *first.entry(name).or_insert((digest, backend));
            if known != digest {
                lines.entry(name).or_insert_with(|| {
                    let (one, other) = (at.url.url(), backend.url.url());
                    format!("{name} is another adapter at {other} than at {one}")
                });
            }
        }
    }
    lines.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(cards: &Value) -> Listed {
        Listed::read(json!({"data": cards}).to_string().as_bytes()).unwrap()
    }

    #[test]
    fn a_name_is_one_of_the_list_or_made_of_two() {
        let listed = listed(&json!([{"id": "org/base"}, {"id": "a:b"}, {"id": "tone"}, {"x": 1}]));
        for name in ["org/base", "tone", "a:b", "org/base:tone", "org/base:a:b", "tone:latest"] {
            assert!(listed.knows(name), "{name}");
        }
        for name in ["base", "org/base:other", "other:tone", "latest", ""] {
            assert!(!listed.knows(name), "{name}");
        }
        assert_eq!(Listed::read(b"{\"data\": 1}"), None);
        assert_eq!(Listed::read(b"nonsense"), None);
    }

    #[test]
    fn the_name_is_in_the_path_or_in_the_body() {
        let of = |path: &str, body: &str| wanted(path, body.as_bytes());
        let chat = "/v1/chat/completions";
        assert_eq!(of(chat, r#"{"a": {"model": "x"}, "model": "tone"}"#).as_deref(), Some("tone"));
        assert_eq!(of(chat, r#"{"model": 3}"#), None);
        let both = r#"{"model": "base", "lora_path": "tone"}"#;
        assert_eq!(of("/generate", both).as_deref(), Some("tone"));
        assert_eq!(of(chat, both).as_deref(), Some("base"));
        assert_eq!(of("/v1/models/org/base", "").as_deref(), Some("org/base"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_that_nobody_lists_is_asked_for_once_a_second() {
        let unlisted = Unlisted::default();
        assert!(unlisted.asks("a"));
        assert!(!unlisted.asks("a") && unlisted.asks("b"));
        tokio::time::advance(UNLISTED).await;
        assert!(unlisted.asks("a"));
    }

    #[test]
    fn a_question_that_had_begun_does_not_count() {
        let models = Models::default();
        let number = models.begin();
        let ended = models.ended.subscribe();
        assert!(models.end(number, Some(listed(&json!([{"id": "a"}])))));
        assert_eq!(*ended.borrow(), number);
        assert!(!models.end(models.begin(), Some(listed(&json!([{"id": "a"}])))));
        assert!(models.end(models.begin(), None));
    }
}
