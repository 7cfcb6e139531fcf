//! SGLang's protocol: both servers get the request at the same time.

use super::*;
use crate::fake::Gate;
use crate::http::{read_body, read_chunk};

#[test]
fn both_servers_meet_in_a_room_that_is_used_once() {
    let (prefill, decode) = sglang(1, 1);
    let rig = rig(&prefill, &decode);
    let mut rooms = Vec::new();
    for count in 1..=3 {
        prefill[0].will([Act::Answer(200, "{\"of\":\"prefill\"}".into())]);
        decode[0].will([Act::Stream(STREAM.to_vec())]);
        let body = "{\"stream\":true,\"n\":2,\"messages\":[]}";
        let answer = post(rig.address, CHAT, body);
        assert_eq!(answer.text().as_bytes(), STREAM, "the answer is the decode server's");
        let (first, second) = (asked(&prefill, count), asked(&decode, count));
        let (first, second) = (&first[count - 1], &second[count - 1]);
        for name in ["bootstrap_host", "bootstrap_port", "bootstrap_room", "n", "messages"] {
            assert_eq!(first[name], second[name], "{name}");
        }
        assert_eq!(
            (&first["bootstrap_host"], &first["bootstrap_port"]),
            (&json!("127.0.0.1"), &json!(7777))
        );
        assert_eq!((&first["stream"], &second["stream"]), (&json!(false), &json!(true)));
        rooms.push(first["bootstrap_room"].as_i64().unwrap());
    }
    rooms.sort_unstable();
    rooms.dedup();
    assert_eq!(rooms.len(), 3);
    assert_eq!(rig.metric("forebay_router_pairs_total"), 3.0);
}

/// Returns acts that fail before any answer.
fn failures() -> [Act; 5] {
    [
        Act::DieFirst,
        Act::DieAfter("application/json", b"{".to_vec()),
        Act::Answer(500, "{}".into()),
        Act::Answer(503, "{}".into()),
        Act::Garbage(b"nonsense\r\n\r\n".to_vec()),
    ]
}

/// Returns the time at which the only act of this kind ended.
fn end(fakes: &[Fake], wanted: fn(&Act) -> bool) -> Instant {
    let spans: Vec<_> = fakes.iter().flat_map(Fake::spans).collect();
    let found: Vec<_> = spans.iter().filter(|span| wanted(&span.act)).collect();
    assert_eq!(found.len(), 1, "{spans:?}");
    found[0].end
}

#[test]
fn whichever_server_fails_the_other_ends_and_another_pair_goes_on_in_a_new_room() {
    for prefill_fails in [true, false] {
        for failure in failures() {
            let (prefill, decode) = sglang(2, 2);
            let rig = rig(&prefill, &decode);
            let (failing, hanging) = match prefill_fails {
                true => (&prefill, &decode),
                false => (&decode, &prefill),
            };
            let all = || prefill.iter().chain(&decode);
            // Either server of a kind may get the first request. A server that is to fail does so
            // only once its partner hangs.
            let (gates, keys): (Vec<_>, Vec<_>) = (0..2).map(|_| Gate::new()).unzip();
            for (fake, gate) in failing.iter().zip(gates) {
                fake.will([Act::Held(gate, Box::new(failure.clone()))]);
            }
            hanging.iter().for_each(|fake| {
                fake.will([Act::Hang]);
            });
            let address = rig.address;
            let asked = std::thread::spawn(move || post(address, CHAT, "{}"));
            eventually("a pair has the request", || all().map(Fake::alive).sum::<usize>() == 2);
            all().for_each(Fake::forget);
            drop(keys);
            let status = asked.join().unwrap().status();
            assert_eq!(status, 200, "{failure:?}, prefill: {prefill_fails}");
            eventually("no server has requests left", || all().all(|fake| fake.alive() == 0));
            let failed = end(failing, |act| matches!(act, Act::Held(..)));
            let hung = end(hanging, |act| matches!(act, Act::Hang));
            assert!(hung.saturating_duration_since(failed) < OUTLIVED, "{failure:?}");
            let rooms = |fakes: &[Fake]| -> Vec<i64> {
                let all = crate::pairs::asked(fakes, 2);
                all.iter().map(|body| body["bootstrap_room"].as_i64().unwrap()).collect()
            };
            let (first, mut second) = (rooms(&prefill), rooms(&decode));
            if first[0] != second[0] {
                second.reverse();
            }
            assert_eq!(first, second, "both servers get the same rooms");
            assert_ne!(first[0], first[1], "each attempt has a room of its own");
            let once = |fakes: &[Fake]| fakes.iter().all(|fake| bodies(fake).len() == 1);
            assert!(once(failing), "another pair was asked");
        }
    }
}

#[test]
fn a_prefill_server_that_refuses_the_request_is_heard_at_once() {
    let (prefill, decode) = sglang(1, 1);
    let rig = rig(&prefill, &decode);
    decode[0].will([Act::Hang]);
    let gone = decode[0].hung_up();
    prefill[0].will([Act::Answer(400, "{\"error\":{\"message\":\"too long\"}}".into())]);
    let answer = post(rig.address, CHAT, "{\"stream\":true}");
    assert_eq!(answer.status(), 400);
    assert!(answer.text().contains("too long") && answer.whole);
    gone.recv_timeout(OUTLIVED).unwrap();
    assert_eq!(
        (prefill[0].seen().len(), decode[0].seen().len()),
        (1, 1),
        "no server is asked again"
    );
}

#[test]
fn a_client_that_leaves_ends_both() {
    let (prefill, decode) = sglang(1, 1);
    let rig = rig(&prefill, &decode);
    for half in [Act::Hang, Act::HangAfter(b"data: 1\n\n".to_vec())] {
        prefill[0].will([Act::Hang]);
        decode[0].will([half]);
        let left = leave(&rig, &prefill[0], Some(&decode[0]));
        eventually("both requests have ended", || prefill[0].alive() + decode[0].alive() == 0);
        let ends = [&prefill[0], &decode[0]].map(|fake| fake.spans().last().unwrap().end);
        assert!(ends.iter().all(|end| end.saturating_duration_since(left) < OUTLIVED));
    }
}

#[test]
fn a_stream_whose_prefill_server_dies_ends_with_one_error() {
    let (prefill, decode) = sglang(1, 1);
    let rig = rig(&prefill, &decode);
    prefill[0].will([Act::Hang]);
    decode[0].will([Act::HangAfter(b"data: {\"a\":1}\n\n".to_vec())]);
    let mut client = Client::connect(rig.address);
    client.send("POST", CHAT, &[], b"{\"stream\":true}");
    let mut answer = client.head();
    let first = read_chunk(&mut client.0).unwrap();
    eventually("both servers have the request", || prefill[0].alive() + decode[0].alive() == 2);
    prefill[0].restart();
    read_body(&mut client.0, &mut answer);
    let rest = answer.events();
    assert_eq!((first, rest.len()), (b"data: {\"a\":1}\n\n".to_vec(), 1), "{rest:?}");
    assert_eq!(rest[0]["error"]["code"], "backend_failed");
    assert_eq!(answer.text().matches("[DONE]").count(), 1);
    eventually("no server has requests left", || decode[0].alive() == 0);
}

#[test]
fn a_prefill_server_that_has_answered_is_out_of_it() {
    let (prefill, decode) = sglang(1, 1);
    let rig = rig(&prefill, &decode);
    let (gate, open) = Gate::new();
    decode[0].will([Act::Wait(gate)]);
    let address = rig.address;
    let asked = std::thread::spawn(move || post(address, CHAT, "{}"));
    eventually("the prefill has ended", || prefill[0].spans().len() == 1);
    prefill[0].die();
    eventually("a backend is down", || get(rig.address, "/health").status() == 503);
    drop(open);
    assert_eq!(asked.join().unwrap().status(), 200);
}

#[test]
fn a_prefill_server_that_hangs_ends_soon_after_the_answer() {
    let (prefill, decode) = sglang(1, 1);
    let rig = rig(&prefill, &decode);
    let (gate, open) = Gate::new();
    prefill[0].will([Act::Hang]);
    decode[0].will([Act::Wait(gate)]);
    let address = rig.address;
    let asked = std::thread::spawn(move || post(address, CHAT, "{}"));
    eventually("both servers have the request", || prefill[0].alive() + decode[0].alive() == 2);
    drop(open);
    assert_eq!(asked.join().unwrap().status(), 200);
    let answered = Instant::now();
    eventually("the prefill request has ended", || prefill[0].alive() == 0);
    let end = prefill[0].spans()[0].end;
    assert!(end.saturating_duration_since(answered) < OUTLIVED);
}

#[test]
fn a_stream_that_is_complete_is_complete_whatever_the_prefill_server_does() {
    let (prefill, decode) = sglang(1, 1);
    let rig = rig(&prefill, &decode);
    // A complete stream in one chunk, and a stream in two chunks, split within its last event.
    for pieces in [vec![STREAM.to_vec()], vec![STREAM[..20].to_vec(), STREAM[20..].to_vec()]] {
        prefill[0].will([Act::Hang]);
        decode[0].will([Act::HangAfter(pieces[0].clone())]);
        let mut client = Client::connect(rig.address);
        client.send("POST", CHAT, &[], b"{\"stream\":true}");
        let mut answer = client.head();
        let first = read_chunk(&mut client.0).unwrap();
        eventually("both servers have the request", || prefill[0].alive() + decode[0].alive() == 2);
        prefill[0].restart();
        read_body(&mut client.0, &mut answer);
        let rest = answer.text().to_owned();
        assert_eq!(first, pieces[0]);
        match pieces.len() {
            1 => assert!(answer.whole && rest.is_empty(), "{rest}"),
            _ => assert_eq!(rest.matches("[DONE]").count(), 1, "{rest}"),
        }
    }
}

#[test]
fn failures_of_prefill_servers_open_their_breakers() {
    let (prefill, decode) = sglang(1, 1);
    let rig = rig_with((&prefill, &decode), |config| {
        config.breaker.failures = 2;
        config.retry.retries = 0;
        config.api_keys = vec!["one".into(), "two".into()];
    });
    for key in ["one", "two"] {
        prefill[0].will([Act::Answer(502, "{}".into())]);
        decode[0].will([Act::Hang]);
        let key = format!("Authorization: Bearer {key}");
        let answer = crate::http::ask(rig.address, "POST", CHAT, &[&key], b"{}");
        assert_eq!(answer.status(), 502);
    }
    let key = "Authorization: Bearer one";
    let loads = crate::http::ask(rig.address, "GET", "/v1/loads", &[key], b"").json();
    let states: Vec<_> = (0..2).map(|at| loads["loads"][at]["breaker"].clone()).collect();
    assert_eq!(states, ["open", "closed"]);
}
