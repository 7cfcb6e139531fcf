//! Vectors and scores are returned in the order of the inputs, and requests are aborted when the
//! client disconnects.

use forebay_engine::{FinishReason, Output, RequestError, SubmitError};
use forebay_server::PoolingTask;
use http_body_util::Full;
use hyper::Request;
use serde_json::{Value, json};

use crate::fake::{CONTEXT, TestServer};

const EMBEDDINGS: &str = "/v1/embeddings";

fn vectors(answer: &Value) -> Vec<Vec<f64>> {
    let data = answer["data"].as_array().unwrap();
    for (index, one) in data.iter().enumerate() {
        assert_eq!((&one["index"], &one["object"]), (&json!(index), &json!("embedding")));
    }
    data.iter().map(|one| serde_json::from_value(one["embedding"].clone()).unwrap()).collect()
}

fn error(answer: &Value) -> [Value; 2] {
    ["param", "code"].map(|key| answer["error"][key].clone())
}

#[tokio::test]
async fn answers_come_in_the_order_of_the_inputs() {
    let mut server = TestServer::pooling(PoolingTask::Embed, false).await;
    let body = json!({"input": [[5, 6], [7], [8, 9, 10]], "priority": 3, "user": "me"});
    let answer = server.connect(EMBEDDINGS, &body);
    let mut ids = Vec::new();
    for prompt in [vec![5, 6], vec![7], vec![8, 9, 10]] {
        let request = server.submitted().await;
        assert_eq!(
            (&request.prompt[..], request.max_tokens, request.priority),
            (&prompt[..], 0, 3)
        );
        assert!(request.spec.pooling.is_some());
        ids.push(request.id);
    }
    for at in [2, 0, 1] {
        server.engine.vector(ids[at], [at as f32, 3.0, 4.0]);
    }
    let (status, answer) = answer.await.unwrap();
    assert_eq!(status, 200, "{answer}");
    let expected: Vec<_> = (0..3).map(|at| vec![f64::from(at), 3.0, 4.0]).collect();
    assert_eq!(vectors(&answer), expected);
    assert_eq!(answer["usage"], json!({"prompt_tokens": 6, "total_tokens": 6}));
    assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("tiny")));
}

#[tokio::test]
async fn vectors_are_cut_normalised_and_written_as_asked() {
    let server = TestServer::pooling(PoolingTask::Embed, true).await;
    let post = async |more: Value| {
        let mut body = json!({"input": [3, 0, 0, 0]});
        more.as_object().unwrap().iter().for_each(|(key, value)| body[key] = value.clone());
        let (status, answer) = server.post(EMBEDDINGS, body).await;
        assert_eq!(status, 200, "{answer}");
        answer["data"][0]["embedding"].clone()
    };
    assert_eq!(post(json!({})).await, json!([4.0, 3.0, 0.0]));
    assert_eq!(post(json!({"normalize": true, "dimensions": 2})).await, json!([0.8, 0.6]));
    // The base64 text is 4.0 and 3.0 in little-endian float32.
    let base64 = post(json!({"dimensions": 2, "encoding_format": "base64"})).await;
    assert_eq!(base64, json!("AACAQAAAQEA="));
}

#[tokio::test]
async fn whoever_goes_away_frees_every_input() {
    let mut server = TestServer::pooling(PoolingTask::Embed, false).await;
    let answer = server.connect(EMBEDDINGS, &json!({"input": [[5], [6], [7]]}));
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(server.submitted().await.id);
    }
    server.engine.vector(ids[1], [0.0; 3]);
    answer.abort();
    assert_eq!([server.aborted().await, server.aborted().await, server.aborted().await][..], ids);
    let (status, answer) = {
        let next = server.connect(EMBEDDINGS, &json!({"input": "a"}));
        let id = server.submitted().await.id;
        server.engine.vector(id, [1.0; 3]);
        next.await.unwrap()
    };
    assert_eq!((status, vectors(&answer)), (200, vec![vec![1.0; 3]]));
    let (_, metrics) = server.get("/metrics").await;
    for line in ["\"abort\",model_name=\"tiny\"} 2", "\"stop\",model_name=\"tiny\"} 2"] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
}

#[tokio::test]
async fn the_first_error_answers_for_all() {
    for (failure, status, code) in [
        (RequestError::NotFinite, 500, "not_finite"),
        (RequestError::HandFailed("gone".into()), 503, "failed"),
    ] {
        let mut server = TestServer::pooling(PoolingTask::Embed, false).await;
        let answer = server.connect(EMBEDDINGS, &json!({"input": [[5], [6]]}));
        let ids = [server.submitted().await.id, server.submitted().await.id];
        let finish = Some(FinishReason::Error(failure));
        let (id, pooled) = (ids[1], None);
        server.engine.deliver(vec![Output {
            predicted: None,
            id,
            admission: None,
            token: None,
            pooled,
            prompt: None,
            finish,
        }]);
        let (got, answer) = answer.await.unwrap();
        assert_eq!((got, &answer["error"]["code"]), (status, &json!(code)));
        assert_eq!([server.aborted().await, server.aborted().await], ids);
    }
}

#[tokio::test]
async fn a_full_queue_takes_all_inputs_or_none() {
    let mut server = TestServer::pooling(PoolingTask::Embed, false).await;
    server.engine.refuse_after(1, SubmitError::QueueFull { limit: 1, retry_after: 1 });
    let (status, answer) = server.post(EMBEDDINGS, json!({"input": [[5], [6], [7]]})).await;
    assert_eq!((status, &answer["error"]["code"]), (429, &json!("queue_full")));
    let id = server.submitted().await.id;
    assert_eq!(server.aborted().await, id);
    server.engine.refuse_nothing();
    server.engine.die();
    let (status, answer) = server.post(EMBEDDINGS, json!({"input": [5]})).await;
    assert_eq!((status, &answer["error"]["code"]), (503, &json!("failed")));
}

#[tokio::test]
async fn a_cross_encoder_gets_pairs_and_gives_the_best_first() {
    let mut server = TestServer::pooling(PoolingTask::Score, false).await;
    let body = json!({"query": "a b", "documents": ["c", {"text": "d e"}, "f"], "top_n": 2});
    let answer = server.connect("/v2/rerank", &body);
    let query = server.encode("a b");
    for (document, score) in [("c", 0.0), ("d e", 30.0), ("f", -1.0)] {
        let request = server.submitted().await;
        let segment = request.spec.pooling.unwrap().segment as usize;
        assert_eq!(request.prompt[..segment], query);
        assert_eq!(request.prompt[segment..], server.encode(document));
        server.engine.vector(request.id, [score, 0.0, 0.0]);
    }
    let (status, answer) = answer.await.unwrap();
    assert_eq!(status, 200, "{answer}");
    assert_eq!(
        answer["results"],
        json!([{"index": 1, "document": {"text": "d e"}, "relevance_score": 1.0},
               {"index": 0, "document": {"text": "c"}, "relevance_score": 0.5}])
    );

    let body = json!({"text_1": ["a", "b"], "text_2": ["c", "d"]});
    let answer = server.connect("/v1/score", &body);
    for _ in 0..2 {
        let id = server.submitted().await.id;
        server.engine.vector(id, [0.0; 3]);
    }
    let (_, answer) = answer.await.unwrap();
    assert_eq!(answer["data"][1], json!({"index": 1, "object": "score", "score": 0.5}));
}

#[tokio::test]
async fn a_classifier_gives_each_label_its_probability() {
    let mut server = TestServer::pooling(PoolingTask::Classify, false).await;
    let (near, far) = ([0.0, 3.0_f32.ln(), -80.0], [5.0, -5.0, 5.0]);
    for (path, more) in [("/classify", json!({})), ("/v1/classify", json!({"softmax": true}))] {
        let mut body = json!({"input": ["a b", "c"], "user": "me"});
        more.as_object().unwrap().iter().for_each(|(key, value)| body[key] = value.clone());
        let answer = server.connect(path, &body);
        for scores in [near, far] {
            let request = server.submitted().await;
            assert_eq!(request.spec.pooling.unwrap().segment, 0);
            server.engine.vector(request.id, scores);
        }
        let (status, answer) = answer.await.unwrap();
        assert_eq!(status, 200, "{answer}");
        assert!(answer["id"].as_str().unwrap().starts_with("classify-"));
        let found: Vec<_> = (0..2).map(|at| answer["data"][at].clone()).collect();
        assert_eq!((&found[0]["index"], &found[1]["index"]), (&json!(0), &json!(1)));
        // Of two equal scores, the first label goes first.
        assert_eq!((&found[0]["label"], &found[1]["label"]), (&json!("good"), &json!("bad")));
        assert_eq!(found[0]["num_classes"], json!(3));
        for (one, wanted) in found.iter().zip([[0.25, 0.75, 0.0], [0.499_99, 0.0, 0.499_99]]) {
            let probs: Vec<f64> = serde_json::from_value(one["probs"].clone()).unwrap();
            let near = |(found, wanted): (&f64, f64)| (found - wanted).abs() < 1e-4;
            assert!(probs.iter().zip(wanted).all(near), "{probs:?}");
        }
    }
    let raw = server.connect("/classify", &json!({"input": "a", "use_activation": false}));
    let id = server.submitted().await.id;
    server.engine.vector(id, far);
    assert_eq!(raw.await.unwrap().1["data"][0]["probs"], json!([5.0, -5.0, 5.0]));
    let pooled = server.connect("/pooling", &json!({"input": "a", "task": "classify"}));
    let id = server.submitted().await.id;
    server.engine.vector(id, [0.0; 3]);
    let answer = pooled.await.unwrap().1;
    let third = answer["data"][0]["data"][2].as_f64().unwrap();
    assert!((third - 1.0 / 3.0).abs() < 1e-6, "{answer}");
}

#[tokio::test]
async fn an_embedder_scores_by_cosine() {
    let mut server = TestServer::pooling(PoolingTask::Embed, false).await;
    for (path, body) in [
        ("/score", json!({"text_1": "a", "text_2": ["b", "c"]})),
        ("/rerank", json!({"query": "a", "documents": ["b", "c"], "return_documents": false})),
    ] {
        let answer = server.connect(path, &body);
        for vector in [[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0]] {
            let id = server.submitted().await.id;
            server.engine.vector(id, vector);
        }
        let (status, answer) = answer.await.unwrap();
        assert_eq!(status, 200, "{answer}");
        match path {
            "/score" => assert_eq!(
                (&answer["data"][0]["score"], &answer["data"][1]["score"]),
                (&json!(0.0), &json!(1.0))
            ),
            _ => assert_eq!(
                answer["results"],
                json!([{"index": 1, "relevance_score": 1.0}, {"index": 0, "relevance_score": 0.0}])
            ),
        }
    }
}

#[tokio::test]
async fn inputs_that_do_not_fit_are_refused_or_cut() {
    let server = TestServer::pooling(PoolingTask::Embed, true).await;
    let long = vec![7; CONTEXT as usize + 1];
    let (status, answer) = server.post(EMBEDDINGS, json!({"input": [[5], long]})).await;
    assert_eq!(status, 400);
    assert_eq!(error(&answer), [json!("input[1]"), json!("context_length_exceeded")]);
    let body = json!({"input": [long, [5]], "truncate_prompt_tokens": -1});
    let (status, answer) = server.post(EMBEDDINGS, body).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(vectors(&answer)[0], [f64::from(CONTEXT), 7.0, 0.0]);
    let words = "word ".repeat(200);
    let body = json!({"query": "a", "documents": ["b", words]});
    let (status, answer) = server.post("/rerank", body).await;
    assert_eq!(status, 400);
    assert_eq!(error(&answer), [json!("documents[1]"), json!("context_length_exceeded")]);
    let (status, answer) = server.post(EMBEDDINGS, json!({"input": ["a", ""]})).await;
    assert_eq!(
        (status, &error(&answer)[0]),
        (400, &json!("input[1]")),
        "embeddings of ids add no special tokens"
    );
}

#[tokio::test]
async fn each_kind_of_model_says_what_it_is_not() {
    let pooling = [
        (EMBEDDINGS, json!({"input": "a"})),
        ("/rerank", json!({"query": "a", "documents": ["b"]})),
        ("/v1/score", json!({"text_1": "a", "text_2": "b"})),
    ];
    let generating = [
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "a"}]})),
        ("/v1/completions", json!({"prompt": "a"})),
        ("/generate", json!({"text": "a"})),
    ];
    let generator = TestServer::scripted("a").await;
    let embedder = TestServer::pooling(PoolingTask::Embed, true).await;
    let scorer = TestServer::pooling(PoolingTask::Score, true).await;
    let refused = |server, cases: &[(&'static str, Value)]| {
        let cases = cases.to_vec();
        async move {
            let server: &TestServer = server;
            for (path, body) in cases {
                let (status, answer) = server.post(path, body).await;
                assert_eq!(
                    (status, &error(&answer)[0]),
                    (400, &json!("model")),
                    "{path}: {answer}"
                );
                assert!(answer["error"]["message"].as_str().unwrap().contains("tiny"), "{answer}");
            }
        }
    };
    refused(&generator, &pooling).await;
    refused(&embedder, &generating).await;
    refused(&scorer, &generating).await;
    refused(&scorer, &pooling[..1]).await;
    let classifier = TestServer::pooling(PoolingTask::Classify, true).await;
    refused(&classifier, &generating).await;
    refused(&classifier, &pooling).await;
    let classify = [("/classify", json!({"input": "a"}))];
    refused(&generator, &classify).await;
    refused(&embedder, &classify).await;
    for server in [&generator, &embedder, &scorer, &classifier] {
        let (status, answer) = server.get("/health_generate").await;
        assert_eq!(status, 200, "{answer}");
    }
    let request = Request::post("/v3/rerank").header("host", "test").body(Full::default()).unwrap();
    assert_eq!(embedder.send(request).await.read().await.0, 404);
}
