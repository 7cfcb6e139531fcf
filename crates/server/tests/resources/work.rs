//! Work that is done on an HTTP thread without yielding to other tasks.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use forebay_api::limits::{CHOICES, PROMPTS, STOP_IDS};
use serde_json::json;
use tokio::task::{LocalSet, yield_now};

use crate::alone;
use crate::fake::TestServer;

/// The maximum number of choices that may be submitted without yielding.
const A_FEW: usize = 32;

/// Returns the maximum number of requests that are submitted between two polls of a second task,
/// which is always ready to run on the only thread.
async fn longest_run(route: &str, body: serde_json::Value, choices: usize) -> usize {
    let _alone = alone().await;
    let mut server = TestServer::driven().await;
    let (longest, done) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(false)));
    let engine = Arc::clone(&server.engine);
    let local = LocalSet::new();
    let (worst, over) = (Rc::clone(&longest), Rc::clone(&done));
    local.spawn_local(async move {
        let mut before = 0;
        while !over.get() {
            yield_now().await;
            let now = engine.submitted();
            worst.set(worst.get().max(now - before));
            before = now;
        }
    });
    local
        .run_until(async {
            let request = server.connect(route, &body);
            for _ in 0..choices {
                server.submitted().await;
            }
            done.set(true);
            request.abort();
        })
        .await;
    longest.get()
}

#[tokio::test]
async fn many_choices_are_submitted_a_few_at_a_time() {
    let ids: Vec<usize> = (10..10 + STOP_IDS).collect();
    let sampling = json!({"stop_token_ids": ids, "n": 4});
    let native = json!({"text": vec!["a"; PROMPTS], "sampling_params": sampling});
    let choices = 4 * PROMPTS;
    let longest = longest_run("/generate", native, choices).await;
    assert!(longest <= A_FEW, "{longest} of {choices} choices without yielding");
    let chat = json!({"messages": [{"role": "user", "content": "a"}], "n": CHOICES});
    let longest = longest_run("/v1/chat/completions", chat, CHOICES as usize).await;
    assert!(longest <= A_FEW, "{longest} of {CHOICES} choices without yielding");
}

/// The server notices a client that disconnects while its choices are still being submitted.
#[tokio::test]
async fn a_client_that_leaves_stops_the_submitting() {
    let _alone = alone().await;
    let mut server = TestServer::driven().await;
    let body = json!({"prompt": vec!["a"; PROMPTS], "n": 4, "stream": true});
    let request = server.connect("/v1/completions", &body);
    server.submitted().await;
    request.abort();
    let engine = Arc::clone(&server.engine);
    // The first abort shows that the call was dropped.
    while !matches!(server.event().await, crate::fake::Event::Abort(_)) {}
    let count = engine.submitted();
    assert!(count < 4 * PROMPTS, "{count} choices");
    for _ in 0..1000 {
        yield_now().await;
    }
    assert_eq!(engine.submitted(), count, "a choice was submitted after the abort");
}
