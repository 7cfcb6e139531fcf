//! The form of answers, from the request to what the engine gets.

use forebay_engine::{Allowed, Constraint, FinishReason, RequestError};
use serde_json::{Value, json};

use crate::fake::{EOS, TestServer};

const COMPLETIONS: &str = "/v1/completions";

/// The ids that may come next.
fn allowed(constraint: &mut dyn Constraint, vocabulary: usize) -> Vec<i32> {
    let mut words = vec![0; vocabulary.div_ceil(32)];
    let all = 0..i32::try_from(vocabulary).unwrap();
    match constraint.mask(&mut words).unwrap() {
        Allowed::Everything => all.collect(),
        Allowed::Some => all.filter(|&id| words[id as usize / 32] >> (id % 32) & 1 == 1).collect(),
    }
}

fn completion(more: Value) -> Value {
    let mut body = json!({"prompt": "once", "max_tokens": 8});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn each_choice_has_a_constraint_of_its_own() {
    let mut server = TestServer::scripted("a").await;
    let vocabulary = server.tokenizer.vocab_size();
    let body = completion(json!({"regex": "[ab]{2}", "n": 2}));
    assert_eq!(server.post(COMPLETIONS, body).await.0, 200);
    let (a, b) = (server.encode("a")[0], server.encode("b")[0]);
    for first in [a, b] {
        let mut constraint = server.submitted().await.all.constraint.unwrap();
        let ids = allowed(&mut *constraint, vocabulary);
        assert!(ids.contains(&a) && ids.contains(&b) && !ids.contains(&EOS), "{ids:?}");
        constraint.accept(first).unwrap();
        constraint.accept(a).unwrap();
        assert_eq!(allowed(&mut *constraint, vocabulary), [EOS]);
    }
}

#[tokio::test]
async fn what_has_no_form_has_no_constraint() {
    let mut server = TestServer::scripted("a").await;
    let text = json!({"type": "text"});
    for more in
        [json!({}), json!({"response_format": text, "bad_words": [], "allowed_token_ids": [5]})]
    {
        server.post(COMPLETIONS, completion(more)).await;
        assert!(server.submitted().await.all.constraint.is_none());
    }
}

#[tokio::test]
async fn the_parameters_of_sampling_go_along() {
    let mut server = TestServer::scripted("a").await;
    let vocabulary = server.tokenizer.vocab_size();
    let (a, b) = (server.encode("a")[0], server.encode("b")[0]);
    let more = json!({
        "regex": "[abc]+", "allowed_token_ids": [a, b, EOS], "bad_words": ["b"], "min_tokens": 2, "stop_token_ids": [a],
    });
    server.post(COMPLETIONS, completion(more)).await;
    let mut constraint = server.submitted().await.all.constraint.unwrap();
    // What ends the answer too soon is not said, and neither is a bad word, as long as there is
    // anything else.
    assert_eq!(allowed(&mut *constraint, vocabulary), [a]);
    constraint.accept(b).unwrap();
    constraint.accept(b).unwrap();
    let ids = allowed(&mut *constraint, vocabulary);
    assert!(ids.contains(&EOS) && ids.contains(&a) && !ids.contains(&b), "{ids:?}");
}

#[tokio::test]
async fn a_form_that_cannot_be_compiled_names_its_place_and_is_not_submitted() {
    let mut server = TestServer::scripted("a").await;
    let schema = json!({"properties": {"x": {"uniqueItems": true}}});
    for (more, param) in [
        (json!({"guided_json": schema}), "guided_json.properties.x.uniqueItems"),
        (json!({"regex": "("}), "regex"),
        (json!({"thinking_budget": 3}), "thinking_budget"),
    ] {
        for stream in [false, true] {
            let mut body = completion(more.clone());
            body["stream"] = stream.into();
            let (status, answer) = server.post(COMPLETIONS, body).await;
            assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{answer}");
        }
    }
    assert!(server.try_event().is_none());
}

#[tokio::test]
async fn a_constraint_that_breaks_is_the_requests_fault() {
    let mut server = TestServer::driven().await;
    let answer = server.connect(COMPLETIONS, &completion(json!({"regex": "[ab]+"})));
    let id = server.submitted().await.id;
    let why = RequestError::Constraint("the grammar: it is too complex".into());
    server.engine.token(id, 5, true, Some(FinishReason::Error(why)));
    let (status, answer) = answer.await.unwrap();
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("response_format")), "{answer}");
}
