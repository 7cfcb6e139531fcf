//! Parses lines of a file of requests.

use bytes::Bytes;
use forebay_api::ROUTES;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::lines::Text;

/// Routes that stream their response by default.
const STREAMED: [&str; 2] = ["/api/chat", "/api/generate"];
/// The byte order mark that some editors put at the start of a file.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// A line that is not empty.
#[derive(Debug, PartialEq)]
pub struct BatchLine {
    /// The number of the line in the file.
    pub number: u64,
    /// The `custom_id` of the line.
    pub name: Option<String>,
    /// The request, or the fault of an invalid line.
    pub request: Result<BatchRequest, LineFault>,
}

/// A request in the form in which it is sent.
#[derive(Debug, Clone, PartialEq)]
pub struct BatchRequest {
    /// The route.
    pub path: &'static str,
    /// The body, unchanged.
    pub body: Bytes,
}

/// The reason why a line was not sent to a server.
#[derive(Debug, PartialEq)]
pub struct LineFault {
    /// A machine-readable code, OpenAI's if there is one.
    pub code: &'static str,
    /// An error message of one sentence.
    pub message: String,
    /// The field at fault.
    pub param: Option<&'static str>,
}

impl LineFault {
    fn of(code: &'static str, param: &'static str, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), param: Some(param) }
    }

    /// The fault of a line whose `custom_id` an earlier line also has.
    pub fn repeated(name: &str) -> Self {
        let message = format!("`custom_id`: a line before this one is named {name:?} too");
        Self::of("duplicate_custom_id", "custom_id", message)
    }

    /// The fault of a line for a route other than the batch's.
    pub(crate) fn other_route(endpoint: &str) -> Self {
        Self::of("mismatched_url", "url", format!("`url`: the batch is for {endpoint}"))
    }

    /// The fault of a request that was not computed before its batch expired.
    pub(crate) fn expired() -> Self {
        let message = "the batch's completion window was over".to_owned();
        Self { code: "batch_expired", message, param: None }
    }

    fn too_long(bytes: u64) -> Self {
        let message = format!("a line of {bytes} bytes is too long");
        Self { code: "line_too_long", message, param: None }
    }
}

#[derive(Deserialize)]
struct Fields<'a> {
    #[serde(borrow, default)]
    custom_id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    method: Option<&'a RawValue>,
    #[serde(borrow, default)]
    url: Option<&'a RawValue>,
    #[serde(borrow, default)]
    body: Option<&'a RawValue>,
}

/// The fields of a body that determine the form of the response.
#[derive(Deserialize)]
struct Form<'a> {
    #[serde(borrow, default)]
    stream: Option<&'a RawValue>,
    #[serde(borrow, default)]
    background: Option<&'a RawValue>,
}

impl BatchLine {
    /// Parses a line; `None`: it is empty.
    pub(crate) fn parse(text: &Text<'_>) -> Option<Self> {
        let number = text.number;
        let fault = |fault| Some(Self { number, name: None, request: Err(fault) });
        let Some(bytes) = text.bytes else { return fault(LineFault::too_long(text.length)) };
        let unmarked = bytes.strip_prefix(BYTE_ORDER_MARK).filter(|_| number == 1);
        let bytes = unmarked.unwrap_or(bytes).trim_ascii();
        if bytes.is_empty() {
            return None;
        }
        let invalid = |message| LineFault { code: "invalid_json_line", message, param: None };
        if bytes[0] != b'{' {
            return fault(invalid("a line is a JSON object".into()));
        }
        let fields: Fields<'_> = match serde_json::from_slice(bytes) {
            Ok(fields) => fields,
            Err(error) => return fault(invalid(error.to_string())),
        };
        let name: String = match text_of(fields.custom_id, "custom_id") {
            Ok(name) => name,
            Err(wrong) => return fault(wrong),
        };
        Some(Self { number, name: Some(name), request: request(&fields) })
    }

    /// The size in bytes of the request, which stays in memory until the answer is written.
    pub fn size(&self) -> usize {
        self.request.as_ref().map_or(0, |request| request.body.len())
    }
}

fn text_of(field: Option<&RawValue>, name: &'static str) -> Result<String, LineFault> {
    let field = field.ok_or_else(|| {
        LineFault::of("missing_required_parameter", name, format!("`{name}` is missing"))
    })?;
    serde_json::from_str(field.get()).map_err(|_| {
        LineFault::of("invalid_value", name, format!("`{name}`: a string is expected"))
    })
}

fn request(fields: &Fields<'_>) -> Result<BatchRequest, LineFault> {
    if fields.method.is_some() && text_of(fields.method, "method")? != "POST" {
        return Err(LineFault::of("invalid_method", "method", "`method`: POST is expected"));
    }
    let url = text_of(fields.url, "url")?;
    let Some(route) = ROUTES.iter().find(|route| route.path == url) else {
        let message = format!("`url`: {url:?} is no route for a batch, as /v1/chat/completions is");
        return Err(LineFault::of("invalid_url", "url", message));
    };
    let body = fields.body.filter(|body| body.get().starts_with('{'));
    let body = body
        .ok_or_else(|| LineFault::of("invalid_value", "body", "`body`: an object is expected"))?
        .get();
    let form: Form<'_> = serde_json::from_str(body)
        .map_err(|error| LineFault::of("invalid_value", "body", format!("`body`: {error}")))?;
    let stream = form.stream.map_or(STREAMED.contains(&route.path), is_true);
    if stream || form.background.is_some_and(is_true) {
        let message = "`body`: the answer comes in one piece: no `stream`, no `background`";
        return Err(LineFault::of("invalid_value", "body", message));
    }
    Ok(BatchRequest { path: route.path, body: Bytes::copy_from_slice(body.as_bytes()) })
}

fn is_true(value: &RawValue) -> bool {
    value.get() == "true"
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn parse(line: &[u8]) -> Option<BatchLine> {
        let length = line.len() as u64;
        BatchLine::parse(&Text { number: 1, bytes: Some(line), length, ended: true })
    }

    fn fault(line: &Value) -> (Option<String>, &'static str, Option<&'static str>) {
        let line = parse(line.to_string().as_bytes()).unwrap();
        let fault = line.request.unwrap_err();
        (line.name, fault.code, fault.param)
    }

    #[test]
    fn a_request_is_sent_as_it_stands() {
        let body = br#"{"model":"m",  "n": 1.0, "stream":false}"#;
        let head = br#"{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": "#;
        let line = parse(&[BYTE_ORDER_MARK, head, body, b"}\r"].concat()).unwrap();
        let request = BatchRequest { path: "/v1/completions", body: Bytes::from_static(body) };
        assert_eq!(line.size(), body.len());
        assert_eq!(line, BatchLine { number: 1, name: Some("a".into()), request: Ok(request) });
        assert_eq!(parse(b" \r"), None);
        // If a client omits the method, POST is assumed.
        let short = json!({"custom_id": "a\n", "url": "/v1/embeddings", "body": {}});
        assert!(parse(short.to_string().as_bytes()).unwrap().request.is_ok());
    }

    #[test]
    fn a_fault_names_its_field() {
        let line = |field: &str, value: Value| {
            let mut line = json!({
                "custom_id": "a", "method": "POST", "url": "/v1/responses", "body": {},
            });
            line[field] = value;
            fault(&line)
        };
        let named = |code, field| (Some("a".to_owned()), code, Some(field));
        assert_eq!(line("method", json!("GET")), named("invalid_method", "method"));
        assert_eq!(line("url", json!("/flush_cache")), named("invalid_url", "url"));
        assert_eq!(line("url", json!("http://host/v1/responses")), named("invalid_url", "url"));
        assert_eq!(line("url", Value::Null), named("missing_required_parameter", "url"));
        for body in [json!([]), Value::Null, json!({"stream": true}), json!({"background": true})] {
            assert_eq!(line("body", body), named("invalid_value", "body"));
        }
        assert_eq!(line("url", json!("/api/chat")), named("invalid_value", "body"));
        let nameless = |code| (None, code, Some("custom_id"));
        assert_eq!(line("custom_id", json!(7)), nameless("invalid_value"));
        assert_eq!(line("custom_id", Value::Null), nameless("missing_required_parameter"));
        for text in
            [&b"nonsense"[..], b"[1]", b"{\"custom_id\": \"a\"", b"{\"custom_id\": \"\xff\"}"]
        {
            let line = parse(text).unwrap();
            assert_eq!((line.name, line.request.unwrap_err().code), (None, "invalid_json_line"));
        }
        let long =
            BatchLine::parse(&Text { number: 9, bytes: None, length: 70, ended: true }).unwrap();
        assert_eq!((long.number, long.request.unwrap_err().code), (9, "line_too_long"));
    }
}
