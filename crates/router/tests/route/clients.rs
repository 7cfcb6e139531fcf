//! A router accepts the same requests as a server: from clients, probes and gateways.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;

use crate::fake::{Act, Fake};
use crate::http::{Client, Message, ask, get, post};
use crate::{Rig, eventually};

const CHAT: &str = "/v1/chat/completions";

fn code(message: &Message) -> (u16, String) {
    (message.status(), message.json()["error"]["code"].as_str().unwrap_or_default().to_owned())
}

/// Returns a body of about `bytes` bytes with an image in the given API's format.
fn image(field: &str, bytes: usize) -> String {
    format!("{{\"messages\": [{{\"content\": [{{{field}{}\"}}]}}]}}", "A".repeat(bytes))
}

#[test]
fn images_may_be_larger_than_json() {
    let backend = Fake::other();
    let rig = Rig::new(&[&backend]);
    for (path, field) in [
        (CHAT, "\"type\": \"image_url\", \"image_url\": \"data:image/png;base64,"),
        ("/v1/messages", "\"type\": \"image\", \"source\": \""),
        ("/v1/responses", "\"type\": \"input_image\", \"image_url\": \""),
        ("/api/chat", "\"images\": \""),
        ("/generate", "\"image_data\": \""),
    ] {
        let body = image(field, 5 << 20);
        assert_eq!(post(rig.address, path, &body).status(), 200, "{path}");
        assert_eq!(backend.seen().pop().map(|seen| seen.body.len()), Some(body.len()), "{path}");
    }
    let text = image("\"type\": \"text\", \"text\": \"", 5 << 20);
    assert_eq!(code(&post(rig.address, CHAT, &text)), (413, "body_too_large".into()));
}

#[test]
fn a_client_that_sends_too_much_can_read_why_it_is_refused() {
    let backend = Fake::other();
    let rig = Rig::new(&[&backend]);
    for bytes in [20 << 20, 80 << 20] {
        let body = image("\"type\": \"text\", \"text\": \"", bytes);
        let mut client = Client::connect(rig.address);
        client.send("POST", CHAT, &[], body.as_bytes());
        assert_eq!(code(&client.answer()), (413, "body_too_large".into()), "{bytes}");
    }
    assert!(backend.seen().is_empty());
}

#[test]
fn a_compressed_body_is_inflated_within_the_limits() {
    let backend = Fake::other();
    let rig = Rig::new(&[&backend]);
    let send = |data: &[u8]| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(data).unwrap();
        let body = encoder.finish().unwrap();
        ask(rig.address, "POST", CHAT, &["Content-Encoding: gzip"], &body)
    };
    assert_eq!(send(b"{\"a\": 1}").status(), 200);
    let seen = backend.seen().pop().unwrap();
    assert_eq!((seen.text(), seen.header("content-encoding")), ("{\"a\": 1}", None));
    let bomb = vec![b' '; 100 << 20];
    assert_eq!(code(&send(&bomb)), (413, "body_too_large".into()));
    let broken = ask(rig.address, "POST", CHAT, &["Content-Encoding: gzip"], b"{}");
    assert_eq!(code(&broken), (400, "broken_body".into()));
    let other = ask(rig.address, "POST", CHAT, &["Content-Encoding: br"], b"{}");
    assert_eq!(code(&other), (415, "unsupported_encoding".into()));
}

#[test]
fn probes_may_ask_for_heads() {
    let backend = Fake::other();
    let rig = Rig::new(&[&backend]);
    for path in ["/health", "/livez", "/metrics", "/ping", "/version", "/v1/models"] {
        let mut client = Client::connect(rig.address);
        client.send("HEAD", path, &[], b"");
        assert_eq!(client.head().status(), 200, "{path}");
        assert_eq!(get(rig.address, path).status(), 200, "{path}");
    }
    assert_eq!(get(rig.address, "/livez").json()["status"], "alive");
    let mut client = Client::connect(rig.address);
    client.send("HEAD", CHAT, &[], b"");
    assert_eq!(client.head().status(), 405);
    backend.stop_listening();
    eventually("the backend is found dead", || get(rig.address, "/health").status() == 503);
    assert_eq!(get(rig.address, "/livez").status(), 200);
}

#[test]
fn garbage_of_a_backend_is_a_bad_gateway() {
    let backend = Fake::other();
    let rig = Rig::with(&[&backend], |config| config.retry.retries = 0);
    for bytes in [b"nonsense\r\n\r\n".to_vec(), b"HTTP/9.9 200 OK\r\n\r\n".to_vec(), vec![0; 99]] {
        backend.will([Act::Garbage(bytes)]);
        let answer = post(rig.address, CHAT, "{}");
        assert_eq!(code(&answer), (502, "backend_answer_garbled".into()));
    }
    backend.will([Act::DieFirst]);
    assert_eq!(code(&post(rig.address, CHAT, "{}")), (503, "backend_failed".into()));
}
