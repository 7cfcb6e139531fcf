//! vLLM's protocol: the decode server gets the parameters from the prefill server's answer.

use super::*;

/// Returns a prefill server's answer with parameters that name `block`.
fn hands_on(block: u32) -> Act {
    let params = params(block);
    Act::Answer(200, json!({"choices": [], "kv_transfer_params": params}).to_string())
}

fn params(block: u32) -> Value {
    json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[block]],
           "remote_engine_id": "e", "remote_request_id": format!("r{block}")})
}

/// Returns the parameters that decode servers received, in any order.
fn got(decode: &[Fake]) -> Vec<Value> {
    decode.iter().flat_map(bodies).map(|body| body["kv_transfer_params"].clone()).collect()
}

#[test]
fn what_the_prefill_server_hands_on_goes_to_the_decode_server_once() {
    let (prefill, decode) = (vllm(1), vllm(1));
    let rig = rig(&prefill, &decode);
    for block in 0..3 {
        prefill[0].will([hands_on(block)]);
        decode[0].will([Act::Stream(STREAM.to_vec())]);
        let body = "{\"stream\":true,\"max_tokens\":7,\"stream_options\":{},\"prompt\":\"a\"}";
        let answer = post(rig.address, "/v1/completions", body);
        assert_eq!(answer.text().as_bytes(), STREAM);
        let first = bodies(&prefill[0]).pop().unwrap();
        assert_eq!((&first["max_tokens"], &first["stream"]), (&json!(1), &json!(false)));
        assert_eq!(first.get("stream_options"), None);
        assert_eq!(first["kv_transfer_params"]["do_remote_decode"], true);
        assert_eq!(first["kv_transfer_params"]["remote_host"], Value::Null);
        let second = bodies(&decode[0]).pop().unwrap();
        assert_eq!(second["kv_transfer_params"], params(block));
        assert_eq!((&second["max_tokens"], &second["stream"]), (&json!(7), &json!(true)));
    }
    assert_eq!(rig.metric("forebay_router_pairs_unfetched_total"), 0.0);
}

#[test]
fn a_retry_repeats_the_first_leg() {
    for failure in [Act::DieFirst, Act::Answer(500, "{}".into()), Act::Answer(503, "{}".into())] {
        let (prefill, decode) = (vllm(1), vllm(3));
        let rig = rig(&prefill, &decode);
        prefill[0].will((0..9).map(hands_on));
        // Two of three decode servers fail once. The prefill result of a failed attempt is not used
        // again.
        decode[..2].iter().for_each(|fake| {
            fake.will([failure.clone()]);
        });
        for _ in 0..3 {
            assert_eq!(post(rig.address, CHAT, "{}").status(), 200, "{failure:?}");
        }
        let mut sent: Vec<String> = got(&decode).iter().map(Value::to_string).collect();
        let count = sent.len();
        sent.sort_unstable();
        sent.dedup();
        assert_eq!((sent.len(), count), (5, 5), "parameters were sent twice: {failure:?}");
        assert_eq!(prefill[0].seen().len(), 5);
    }
}

#[test]
fn a_prefill_server_that_lies_is_not_believed() {
    let lies = [
        hands_on(1),
        Act::Answer(200, "{\"kv_transfer_params\":[1]}".into()),
        Act::Answer(200, "{\"kv_transfer_params\":{\"do_remote_decode\":true}}".into()),
        Act::Answer(200, "<html>".into()),
    ];
    for lie in lies {
        let (prefill, decode) = (vllm(2), vllm(1));
        let rig = rig_with((&prefill, &decode), |config| {
            config.pairs.prefill_policy = Some(Policy::RoundRobin);
        });
        // The prefill servers take turns. Their first answers contain the same parameters; later
        // answers repeat them or are invalid.
        prefill.iter().for_each(|fake| {
            fake.will([hands_on(1)]);
        });
        let first = post(rig.address, CHAT, "{}");
        assert_eq!(first.status(), 200);
        let other = prefill.iter().find(|fake| fake.seen().is_empty()).unwrap();
        // This server's first answer repeats the other server's parameters.
        assert_eq!(post(rig.address, CHAT, "{}").status(), 200);
        assert!(!other.seen().is_empty());
        prefill.iter().for_each(|fake| {
            fake.will([lie.clone(), hands_on(2), hands_on(3)]);
        });
        assert_eq!(post(rig.address, CHAT, "{}").status(), 200, "{lie:?}");
        let mut sent: Vec<Value> = got(&decode);
        sent.retain(|params| !params.is_null());
        let mut names: Vec<String> = sent.iter().map(Value::to_string).collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count, "parameters were sent twice: {sent:?}");
        assert!(sent.iter().all(|params| params["do_remote_prefill"] == true), "{sent:?}");
    }
}

#[test]
fn what_hands_nothing_on_is_computed_by_the_decode_server() {
    let (prefill, decode) = (vllm(1), vllm(1));
    let rig = rig(&prefill, &decode);
    for answer in ["{}", "{\"kv_transfer_params\":null}"] {
        prefill[0].will([Act::Answer(200, answer.into())]);
        assert_eq!(post(rig.address, CHAT, "{\"max_tokens\":5}").status(), 200);
        assert_eq!(bodies(&decode[0]).pop().unwrap(), json!({"max_tokens": 5}));
    }
    assert_eq!(rig.metric("forebay_router_pairs_unfetched_total"), 2.0);
}

#[test]
fn what_the_prefill_server_refuses_is_not_asked_of_the_decode_server() {
    let (prefill, decode) = (vllm(1), vllm(1));
    let rig = rig(&prefill, &decode);
    prefill[0].will([Act::Answer(400, "{\"error\":\"too long\"}".into())]);
    let answer = post(rig.address, CHAT, "{}");
    assert_eq!((answer.status(), answer.text()), (400, "{\"error\":\"too long\"}"));
    // Requests for several choices would use the parameters several times.
    for (path, body, status) in [
        (CHAT, "{\"n\":2}", 400),
        ("/v1/completions", "{\"prompt\":[\"a\",\"b\"]}", 400),
        ("/generate", "{\"text\":\"a\"}", 501),
    ] {
        assert_eq!(post(rig.address, path, body).status(), status, "{body}");
    }
    assert_eq!((prefill[0].seen().len(), decode[0].seen().len()), (1, 0));
}

#[test]
fn a_client_that_leaves_ends_the_first_leg() {
    let (prefill, decode) = (vllm(1), vllm(1));
    let rig = rig(&prefill, &decode);
    prefill[0].will([Act::Hang]);
    let left = leave(&rig, &prefill[0], None);
    eventually("the prefill request has ended", || prefill[0].alive() == 0);
    assert!(prefill[0].spans()[0].end.saturating_duration_since(left) < OUTLIVED);
    assert!(decode[0].seen().is_empty());
}
