//! Streams, and how they continue or end when their backend dies.

use std::io::Write;
use std::net::TcpListener;
use std::time::Duration;

use forebay_api::peer::RouterTag;

use crate::fake::{Act, Fake, TOKENS};
use crate::http::{Client, Message, get, post, read_chunk, read_head};
use crate::{Rig, eventually};

const CHAT: &str = "/v1/chat/completions";
const WHOLE: usize = usize::MAX;

/// Returns the text of a Forebay server's stream, and checks that all events have the first
/// stream's name.
fn text(answer: &Message) -> String {
    let events = answer.events();
    assert!(events.iter().all(|event| event["name"] == "5;first"), "{answer:?}");
    events.iter().map(|event| event["text"].as_str().unwrap()).collect()
}

fn expected(tokens: u32) -> String {
    (0..tokens).map(|position| format!("{} ", 3 * position)).collect()
}

#[test]
fn a_brains_stream_comes_without_its_comments() {
    let backend = Fake::brain();
    backend.will([Act::Tokens(5, WHOLE)]);
    let rig = Rig::new(&[&backend]);
    let answer = post(rig.address, CHAT, "{}");
    assert_eq!(text(&answer), expected(5));
    assert!(answer.headers.iter().all(|(name, _)| !name.starts_with("x-forebay")), "{answer:?}");
    let tag = RouterTag::decode(backend.seen()[0].header("x-forebay-router").unwrap()).unwrap();
    assert_eq!((tag.seq, tag.floor), (1, 1));
}

/// Starts two Forebay servers with a common script, and waits until the router has identified both.
fn pair() -> (Vec<Fake>, Rig) {
    let brains = Fake::brains(2);
    let rig = Rig::with(&[&brains[0], &brains[1]], |config| config.breaker.failures = 0);
    eventually("both backends report as Forebay", || {
        let loads = get(rig.address, "/v1/loads").json();
        loads["loads"].as_array().unwrap().iter().all(|backend| backend["forebay"] == true)
    });
    (brains, rig)
}

#[test]
fn wherever_a_brains_stream_is_cut_another_goes_on() {
    let (brains, rig) = pair();
    let mut cut = 0;
    loop {
        brains[0].will([Act::Tokens(TOKENS, cut)]);
        let before: usize = brains.iter().map(|brain| brain.seen().len()).sum();
        let answer = post(rig.address, CHAT, "{}");
        assert_eq!(text(&answer), expected(TOKENS), "cut after {cut} bytes");
        let asked = brains.iter().map(|brain| brain.seen().len()).sum::<usize>() - before;
        if asked == 1 {
            break;
        }
        assert_eq!(asked, 2, "cut after {cut} bytes");
        cut += 1;
    }
    assert!(cut > 300, "{cut}");
    assert!(rig.metric("forebay_router_failovers_total") > 200.0);
}

#[test]
fn a_stream_outlives_several_deaths() {
    let (brains, rig) = pair();
    for cuts in [[150, 120, 130], [60, 60, 60], [150, 0, 200], [110, 100, 0]] {
        brains[0].will(cuts.map(|cut| Act::Tokens(TOKENS, cut)));
        let answer = post(rig.address, CHAT, "{\"seed\":1}");
        assert_eq!(text(&answer), expected(TOKENS), "{cuts:?}");
    }
    // A server that continues a stream gets the token ids so far, followed by the same body.
    let resumed: Vec<Message> = brains.iter().flat_map(Fake::seen).collect();
    let resumed: Vec<&Message> =
        resumed.iter().filter(|seen| seen.header("x-forebay-resume").is_some()).collect();
    assert!(resumed.len() > 5 && resumed.iter().all(|seen| seen.text().ends_with(",{\"seed\":1}")));
}

#[test]
fn a_stream_that_nobody_goes_on_with_ends_with_one_error() {
    let (brains, rig) = pair();
    brains[0].will([Act::Tokens(TOKENS, 150)]);
    brains[0].will(vec![Act::DieFirst; 20]);
    let events = post(rig.address, CHAT, "{}").events();
    let (error, tokens) = events.split_last().unwrap();
    assert_eq!(error["error"]["code"], "backend_failed");
    assert_eq!(tokens.len(), 1);
    let (brains, rig) = pair();
    // A server that responds with anything but the rest of the stream cannot continue it.
    brains[0].will([Act::Tokens(TOKENS, 150)]);
    brains[0].will(vec![Act::Answer(400, "{}".into()); 20]);
    let events = post(rig.address, CHAT, "{}").events();
    let codes: Vec<_> = events.iter().filter(|event| !event["error"].is_null()).collect();
    assert_eq!(codes.len(), 1);
    assert!(codes[0]["error"]["message"].as_str().unwrap().contains("400"), "{codes:?}");
}

#[test]
fn a_stream_of_others_that_breaks_ends_with_one_error_event() {
    let backend = Fake::other();
    let rig = Rig::with(&[&backend], |config| config.breaker.failures = 0);
    for half in ["data: {\"a\":1}\n\n", "data: {\"a\":1}\n\ndata: {\"a\":2}"] {
        backend.will([Act::DieAfter("text/event-stream", half.as_bytes().to_vec())]);
        let events = post(rig.address, CHAT, "{}").events();
        let (error, before) = events.split_last().unwrap();
        assert_eq!(error["error"]["code"], "backend_failed");
        assert!(before.iter().all(|event| event["a"].is_number()));
    }
    assert_eq!(rig.metric("forebay_router_errors_total"), 2.0);
}

#[test]
fn a_large_answer_that_breaks_is_not_mistaken_for_a_whole_one() {
    let backend = Fake::other();
    backend.will([Act::DieAfter("application/json", vec![b'x'; 3 << 20])]);
    let rig = Rig::new(&[&backend]);
    assert!(!post(rig.address, CHAT, "{}").whole);
}

#[test]
fn the_same_brain_is_told_which_dispatches_are_settled() {
    let backend = Fake::brain();
    let rig = Rig::new(&[&backend]);
    (0..3).for_each(|_| assert_eq!(text(&post(rig.address, CHAT, "{}")), expected(TOKENS)));
    let tags: Vec<_> = backend
        .seen()
        .iter()
        .map(|seen| RouterTag::decode(seen.header("x-forebay-router").unwrap()).unwrap())
        .map(|tag| (tag.seq, tag.floor))
        .collect();
    assert_eq!(tags, [(1, 1), (2, 2), (3, 3)]);
}

#[test]
fn a_slow_client_slows_its_backend_and_loses_nothing() {
    const PIECES: usize = 2000;
    let piece = vec![b'x'; 64 << 10];
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let length = piece.len();
    let (stuck, is_stuck) = std::sync::mpsc::channel();
    let writer = std::thread::spawn(move || {
        for socket in listener.incoming() {
            let mut socket = socket.unwrap();
            let mut reader = std::io::BufReader::new(socket.try_clone().unwrap());
            let Some(head) = read_head(&mut reader) else { continue };
            if head.path() != CHAT {
                let _ = socket.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}");
                continue;
            }
            let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
            socket.write_all(head.as_bytes()).unwrap();
            socket.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
            let framed = [format!("{length:x}\r\n").as_bytes(), &piece, b"\r\n"].concat();
            let mut stuck = Some(stuck);
            for _ in 0..PIECES {
                let mut left = &framed[..];
                while !left.is_empty() {
                    match socket.write(left) {
                        Ok(taken) => left = &left[taken..],
                        // The socket's buffer is full, because the router holds only a limited part
                        // of the stream.
                        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                            if let Some(stuck) = stuck.take() {
                                stuck.send(()).unwrap();
                            }
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
            }
            socket.write_all(b"0\r\n\r\n").unwrap();
            return;
        }
    });
    let rig = Rig::with(&[], |config| {
        config.sources.urls.push(address.to_string());
        // The backend serves one connection at a time, so health checks are rare.
        config.health.interval = Duration::from_secs(60);
    });
    let mut client = Client::connect(rig.address);
    client.send("POST", CHAT, &[], b"{}");
    client.head();
    is_stuck.recv_timeout(crate::PATIENCE).unwrap();
    let mut total = 0;
    while let Some(chunk) = read_chunk(&mut client.0).filter(|chunk| !chunk.is_empty()) {
        total += chunk.len();
    }
    assert_eq!(total, PIECES * length);
    writer.join().unwrap();
}
