//! Request bodies for the servers of a pair: the client's body without some of its members, and
//! with others appended.
//!
//! The body is scanned for its members but not parsed, and the kept ranges are not copied.

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;
use forebay_api::{ApiError, members};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use crate::pairs::{GENERATE, PairEngine};
use crate::payload::Payload;

/// Members of a body by which the servers of a pair find each other. Only the router may write
/// them: a client could otherwise name another server, or the data of another request.
const RESERVED: [&str; 5] = [
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "kv_transfer_params",
    "ec_transfer_params",
];
/// Members that configure streaming.
const STREAM: [&str; 2] = ["stream", "stream_options"];
/// Members that limit the length of an answer.
const LENGTH: [&str; 4] =
    ["max_tokens", "max_completion_tokens", "min_tokens", "min_completion_tokens"];
/// Numeric members that request several choices.
const CHOICES: [&str; 2] = ["n", "best_of"];
/// vLLM's parameters that make it keep the prompt's KV cache for another server.
const KEEP: &str = r#""kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

/// A member of a JSON object.
struct Member<'a> {
    name: Cow<'a, str>,
    value: &'a [u8],
    /// The range of the member's name and value in the body.
    range: Range<usize>,
}

/// Returns the members of a body.
fn found(body: &[u8]) -> impl Iterator<Item = Member<'_>> {
    let place = |part: &[u8]| part.as_ptr().addr() - body.as_ptr().addr();
    members(body).map(move |(name, value)| {
        // The range includes the quotes around the name.
        let (start, end) = (place(name) - 1, place(value) + value.len());
        let quoted = &body[start..=start + 1 + name.len()];
        let plain = std::str::from_utf8(name).ok().filter(|name| !name.contains('\\'));
        let name = match plain {
            Some(plain) => Cow::Borrowed(plain),
            None => Cow::Owned(serde_json::from_slice(quoted).unwrap_or_default()),
        };
        Member { name, value, range: start..end }
    })
}

/// Returns the error if a body is not a JSON object; `None` if it is one.
fn malformed(body: &[u8]) -> Option<ApiError> {
    let open = body.len() - body.trim_ascii_start().len() + 1;
    let end = found(body).last().map_or(open, |member| member.range.end);
    let closed = body.get(end..).is_some_and(|rest| rest.trim_ascii() == b"}");
    if closed && body.trim_ascii_start().starts_with(b"{") {
        return None;
    }
    Some(match serde_json::from_slice::<IgnoredAny>(body) {
        Ok(_) => ApiError::invalid("", "the request body has to be a JSON object"),
        Err(error) => {
            let text = error.to_string();
            let reason = text.split(" at line ").next().unwrap_or(&text).to_owned();
            ApiError::MalformedJson { reason, line: error.line(), column: error.column() }
        }
    })
}

/// The requirements of a request that a pair computes.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct PairNeeds {
    /// The error for the client if only vLLM servers are available; `None`: vLLM can compute the
    /// request.
    not_by_vllm: Option<ApiError>,
}

impl PairNeeds {
    /// Determines the requirements of a request.
    ///
    /// # Errors
    /// The body is not a JSON object, names servers of a pair itself, or requests something that no
    /// pair computes.
    pub(crate) fn new(path: &str, body: &[u8]) -> Result<Self, ApiError> {
        if let Some(error) = malformed(body) {
            return Err(error);
        }
        let mut not_by_vllm = (path == GENERATE).then(|| {
            let reason = format!("POST {path} is a route of SGLang, and the servers are vLLM");
            ApiError::NotImplemented { reason }
        });
        let (mut echo, mut logprobs) = (false, false);
        for Member { name, value, .. } in found(body) {
            if value == b"null" {
                continue;
            }
            match &*name {
                reserved if RESERVED.contains(&reserved) => {
                    let reason = format!("`{name}`: the router writes it, for the pair it chooses");
                    return Err(ApiError::invalid(name, reason));
                }
                "prompt_logprobs" => return Err(of_the_prompt(&name)),
                "logprob_start_len" if value != b"-1" => return Err(of_the_prompt(&name)),
                "echo" => echo = value == b"true",
                "logprobs" => logprobs = true,
                _ => {}
            }
            let many = CHOICES.contains(&&*name) && value != b"1"
                || name == "use_beam_search" && value == b"true"
                || name == "prompt" && has_several(value);
            if many && not_by_vllm.is_none() {
                let reason = format!(
                    "`{name}`: a pair of vLLM computes one choice of one prompt, since what its \
                     prefill server hands on is used once"
                );
                not_by_vllm = Some(ApiError::invalid(name, reason));
            }
        }
        if echo && logprobs {
            return Err(of_the_prompt("echo"));
        }
        Ok(Self { not_by_vllm })
    }

    /// True if servers of this engine can compute the request.
    pub(crate) fn fit(&self, engine: PairEngine) -> bool {
        engine != PairEngine::Vllm || self.not_by_vllm.is_none()
    }

    /// Returns the error if servers of these engines exist but none can compute the request.
    /// `None`: one of them can, or there are no engines.
    pub(crate) fn unserved(&self, engines: &[PairEngine]) -> Option<ApiError> {
        let fits = engines.is_empty() || engines.iter().any(|&engine| self.fit(engine));
        self.not_by_vllm.clone().filter(|_| !fits)
    }
}

/// Returns the error for log-probabilities of a prompt.
fn of_the_prompt(param: &str) -> ApiError {
    let reason = format!(
        "`{param}`: log-probabilities of a prompt are the prefill server's, and the answer is the \
         decode server's"
    );
    ApiError::invalid(param, reason)
}

/// True if a value of `prompt` contains several prompts. A list of numbers is one prompt.
fn has_several(value: &[u8]) -> bool {
    let first = value.strip_prefix(b"[").and_then(|rest| rest.trim_ascii_start().first());
    if !matches!(first, Some(b'"' | b'[')) {
        return false;
    }
    serde_json::from_slice::<Vec<&RawValue>>(value).is_ok_and(|prompts| prompts.len() > 1)
}

/// Returns a body without some of its members, and with `added` after the rest.
fn spliced(body: &Bytes, without: &[&str], added: String) -> Payload {
    let mut kept: Vec<Range<usize>> = Vec::new();
    // Adjacent members that are kept form one range, including the comma between them.
    let mut goes_on = false;
    for Member { name, range, .. } in found(body) {
        let keep = !without.contains(&&*name) && !RESERVED.contains(&&*name);
        match kept.last_mut() {
            Some(last) if keep && goes_on => last.end = range.end,
            _ if keep => kept.push(range),
            _ => {}
        }
        goes_on = keep;
    }
    let comma = || Bytes::from_static(b",");
    let mut pieces = vec![Bytes::from_static(b"{")];
    for range in kept {
        pieces.extend([body.slice(range), comma()]);
    }
    if added.is_empty() && pieces.len() > 1 {
        pieces.pop();
    }
    pieces.push(format!("{added}}}").into());
    Payload::from(pieces)
}

/// The bootstrap room at an SGLang prefill server in which the servers of a pair meet. Rooms are
/// random 63-bit numbers, so no room, nor one of the next few numbers, is used twice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Room(String);

impl Room {
    /// Creates a new room at a prefill server.
    pub(crate) fn new(host: &str, port: u16) -> Self {
        let host = serde_json::Value::from(host);
        let room = rand::random::<u64>() >> 1;
        Self(format!(r#""bootstrap_host":{host},"bootstrap_port":{port},"bootstrap_room":{room}"#))
    }

    /// Returns the body for the prefill server. Its answer is not streamed, so that its status
    /// shows success or failure.
    pub(crate) fn prefill(&self, body: &Bytes) -> Payload {
        spliced(body, &STREAM, format!(r#""stream":false,{}"#, self.0))
    }

    /// Returns the body for the decode server.
    pub(crate) fn decode(&self, body: &Bytes) -> Payload {
        spliced(body, &[], self.0.clone())
    }
}

/// Returns the body for a vLLM prefill server: it generates one token, and the answer is not
/// streamed.
pub(crate) fn prefill_alone(body: &Bytes) -> Payload {
    let without = [&STREAM[..], &LENGTH[..]].concat();
    let chat = found(body).any(|member| member.name == "max_completion_tokens");
    let completion = if chat { r#""max_completion_tokens":1,"# } else { "" };
    spliced(body, &without, format!(r#""stream":false,"max_tokens":1,{completion}{KEEP}"#))
}

/// Returns the body for a vLLM decode server, with the parameters from the prefill server's answer.
pub(crate) fn decode_with(body: &Bytes, params: Option<&[u8]>) -> Payload {
    let added = params.map(|params| String::from_utf8_lossy(params).into_owned());
    let added =
        added.map_or_else(String::new, |params| format!(r#""kv_transfer_params":{params}"#));
    spliced(body, &[], added)
}

#[derive(Deserialize)]
struct Params {
    #[serde(default)]
    do_remote_prefill: bool,
    #[serde(default)]
    do_remote_decode: bool,
}

/// Returns the parameters in a vLLM prefill server's answer that the decode server needs. `None`:
/// there is nothing to transfer.
///
/// # Errors
/// The answer does not follow the protocol.
pub(crate) fn handed_on(answer: &[u8]) -> Result<Option<&[u8]>, &'static str> {
    if malformed(answer).is_some() {
        return Err("the prefill server's answer is no JSON object");
    }
    let last = found(answer).filter(|member| member.name == "kv_transfer_params").last();
    let value = match last {
        Some(Member { value, .. }) if value != b"null" && value != b"{}" => value,
        _ => return Ok(None),
    };
    let params = serde_json::from_slice::<Params>(value).ok();
    match params.filter(|_| value.starts_with(b"{")) {
        Some(Params { do_remote_prefill: true, do_remote_decode: false }) => Ok(Some(value)),
        Some(_) => Err("the prefill server's kv_transfer_params are not for a decode server"),
        None => Err("the prefill server's kv_transfer_params are no object"),
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use proptest::prelude::*;
    use serde_json::{Map, Value, json};

    use super::*;

    fn sent(payload: Payload) -> Value {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let body = runtime.block_on(payload.collect()).unwrap().to_bytes();
        serde_json::from_slice(&body).unwrap_or_else(|_| panic!("{body:?}"))
    }

    fn needs(body: &str) -> Result<PairNeeds, ApiError> {
        PairNeeds::new("/v1/completions", body.as_bytes())
    }

    #[test]
    fn a_room_is_in_both_bodies_and_in_no_others() {
        let body =
            Bytes::from(r#" {"a":[1,{"stream":2}], "stream" : true,"n":2,"stream_options":{}} "#);
        let room = Room::new("[::1]", 9);
        let (prefill, decode) = (sent(room.prefill(&body)), sent(room.decode(&body)));
        assert_eq!(prefill["stream"], false);
        assert_eq!(prefill.get("stream_options"), None);
        assert_eq!((&decode["stream"], &decode["stream_options"]), (&json!(true), &json!({})));
        for sent in [&prefill, &decode] {
            assert_eq!(sent["a"], json!([1, {"stream": 2}]));
            assert_eq!(
                (&sent["bootstrap_host"], &sent["bootstrap_port"]),
                (&json!("[::1]"), &json!(9))
            );
            assert_eq!(sent["bootstrap_room"], prefill["bootstrap_room"]);
        }
        assert!(prefill["bootstrap_room"].as_i64().is_some(), "63 bits");
        assert_ne!(Room::new("a", 9), Room::new("a", 9));
        let empty = sent(room.decode(&Bytes::from("{ }")));
        assert_eq!(empty.as_object().unwrap().len(), 3);
    }

    #[test]
    fn vllms_first_leg_has_one_token_and_the_second_the_clients_words() {
        let body = Bytes::from(
            r#"{"stream":true,"max_tokens":9,"min_tokens":2,"model":"m","kv_transfer_params":null}"#,
        );
        let first = sent(prefill_alone(&body));
        assert_eq!((&first["stream"], &first["max_tokens"]), (&json!(false), &json!(1)));
        assert_eq!((first.get("min_tokens"), first.get("max_completion_tokens")), (None, None));
        assert_eq!(first["kv_transfer_params"]["do_remote_decode"], true);
        let second = sent(decode_with(&body, Some(br#"{"x":1}"#)));
        let expected = json!({"stream": true, "max_tokens": 9, "min_tokens": 2, "model": "m",
                              "kv_transfer_params": {"x": 1}});
        assert_eq!(second, expected);
        let alone = sent(decode_with(&body, None));
        assert_eq!(alone.get("kv_transfer_params"), None);
        assert_eq!(sent(decode_with(&Bytes::from("{}"), None)), json!({}));
        let chat = Bytes::from(r#"{"max_completion_tokens":9}"#);
        assert_eq!(sent(prefill_alone(&chat))["max_completion_tokens"], 1);
    }

    #[test]
    fn what_a_client_may_not_say_is_refused_however_it_is_written() {
        for name in RESERVED {
            let escaped = format!("\\u00{:02x}{}", name.as_bytes()[0], &name[1..]);
            for written in [name, &escaped] {
                let refused = needs(&format!(r#"{{"a":1,"{written}":{{}}}}"#)).unwrap_err();
                assert!(refused.to_string().starts_with(&format!("`{name}`")), "{refused}");
            }
            assert!(needs(&format!(r#"{{"{name}":null}}"#)).is_ok());
        }
        for body in [
            r#"{"prompt_logprobs":1}"#,
            r#"{"logprob_start_len":0}"#,
            r#"{"echo":true,"logprobs":1}"#,
        ] {
            assert_eq!(needs(body).unwrap_err().status(), 400, "{body}");
        }
        let taken = r#"{"logprob_start_len":-1,"echo":false,"logprobs":2,"prompt_logprobs":null}"#;
        assert!(needs(taken).is_ok());
    }

    #[test]
    fn bodies_that_are_no_objects_are_refused() {
        for body in ["", "[]", "{", r#"{"a":1"#, r#"{"a" 1}"#, r#"{"a":1,}"#, r#"{"a":1} x"#, "3"] {
            assert_eq!(needs(body).unwrap_err().status(), 400, "{body}");
        }
    }

    #[test]
    fn one_use_of_what_is_handed_on_is_one_choice_of_one_prompt() {
        let fits = |body: &str| needs(body).unwrap().fit(PairEngine::Vllm);
        for one in [
            r#"{"n":1,"best_of":null,"prompt":["a"],"use_beam_search":false}"#,
            r#"{"prompt":[1,2,3]}"#,
            r#"{"prompt":[[1,2]]}"#,
            r#"{"prompt":"a, b"}"#,
        ] {
            assert!(fits(one), "{one}");
        }
        for many in [
            r#"{"n":2}"#,
            r#"{"best_of":3}"#,
            r#"{"use_beam_search":true}"#,
            r#"{"prompt":["a","b"]}"#,
            r#"{"prompt":[ [1],[2] ]}"#,
        ] {
            assert!(!fits(many), "{many}");
            let needs = needs(many).unwrap();
            assert!(needs.fit(PairEngine::SgLang));
            assert_eq!(needs.unserved(&[PairEngine::Vllm]).unwrap().status(), 400);
            assert_eq!(needs.unserved(&[PairEngine::Vllm, PairEngine::SgLang]), None);
            assert_eq!(needs.unserved(&[]), None);
        }
        let generate = PairNeeds::new(GENERATE, b"{}").unwrap();
        assert_eq!(generate.unserved(&[PairEngine::Vllm]).unwrap().status(), 501);
    }

    #[test]
    fn only_what_the_protocol_says_is_handed_on() {
        let params = r#"{"do_remote_prefill":true,"remote_block_ids":[1]}"#;
        let answer = format!(r#"{{"choices":[],"kv_transfer_params":{params}}}"#);
        assert_eq!(handed_on(answer.as_bytes()), Ok(Some(params.as_bytes())));
        for none in ["{}", r#"{"kv_transfer_params":null}"#, r#"{"kv_transfer_params":{}}"#] {
            assert_eq!(handed_on(none.as_bytes()), Ok(None));
        }
        for wrong in [
            r#"{"kv_transfer_params":7}"#,
            r#"{"kv_transfer_params":[true,false]}"#,
            r#"{"kv_transfer_params":{"do_remote_decode":true}}"#,
            r#"{"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":true}}"#,
            r#"{"kv_transfer_params":{"do_remote_prefill":true"#,
            "<html>",
        ] {
            assert!(handed_on(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }

    proptest! {
        /// All other members of a body stay unchanged, in any number and order.
        #[test]
        fn members_that_are_not_meant_stay(
            names in prop::collection::vec("[a-c]|stream|max_tokens|stream_options|n", 0..8),
            pretty: bool,
        ) {
            let numbered = names.into_iter().enumerate();
            let body: Map<String, Value> =
                numbered.map(|(index, name)| (name, json!({"at": index, "x": ",}"}))).collect();
            let written = if pretty { serde_json::to_vec_pretty(&body) } else { serde_json::to_vec(&body) };
            let written = Bytes::from(written.unwrap());
            prop_assert!(malformed(&written).is_none());
            prop_assert_eq!(sent(decode_with(&written, None)), Value::from(body.clone()));
            let first = sent(prefill_alone(&written));
            for (name, value) in body {
                let changed = STREAM.contains(&&*name) || LENGTH.contains(&&*name);
                prop_assert!(changed || first[&name] == value);
            }
        }
    }
}
