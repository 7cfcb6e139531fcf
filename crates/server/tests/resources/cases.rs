//! Request bodies from the table of limits.

use forebay_api::ROUTES;
use forebay_api::limits::{Bound, Param, Params};

/// A parameter of a route, and the body in which its value is inserted.
pub(crate) struct Case {
    pub(crate) route: &'static str,
    /// The parameter's name in errors.
    pub(crate) param: String,
    pub(crate) bound: Bound,
    /// The body before and after the value.
    around: (String, String),
}

impl Case {
    pub(crate) fn body(&self, value: &str) -> String {
        [&self.around.0, value, &self.around.1].concat()
    }
}

fn is_alias(path: &str) -> bool {
    matches!(
        path,
        "/v1/rerank"
            | "/v2/rerank"
            | "/v1/score"
            | "/v1/classify"
            | "/pooling"
            | "/apply-template"
            | "/v1/messages/count_tokens"
            | "/api/embed"
            | "/api/show"
    )
}

/// The fields that a body requires beside the tested parameter.
fn needed(route: &str) -> &'static [(&'static str, &'static str)] {
    match route {
        "/v1/chat/completions" | "/v1/messages" | "/api/chat" => {
            &[("messages", r#"[{"role":"user","content":"a"}]"#)]
        }
        "/v1/completions" | "/completion" | "/tokenize" | "/api/generate" | "/api/embeddings" => {
            &[("prompt", r#""a""#)]
        }
        "/generate" => &[("text", r#""a""#)],
        "/v1/embeddings" | "/classify" | "/v1/responses" | "/v1/responses/input_tokens" => {
            &[("input", r#""a""#)]
        }
        "/rerank" => &[("query", r#""a""#), ("documents", r#"["a"]"#)],
        "/score" => &[("text_1", r#""a""#), ("text_2", r#""a""#)],
        "/detokenize" => &[("tokens", "[1]")],
        other => panic!("{other} is a new route: say what a body needs"),
    }
}

/// Creates a case for every parameter of every route, including those of nested objects.
pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    // Aliases of a route have the same parameters.
    for route in ROUTES.iter().filter(|route| !is_alias(route.path)) {
        for param in all(route.params) {
            let others = needed(route.path).iter().filter(|(name, _)| *name != param.name);
            let others: String =
                others.map(|(name, value)| format!(r#""{name}":{value},"#)).collect();
            // The number of tokens to generate does not matter here.
            let around = (format!(r#"{{{others}"{}":"#, param.name), "}".to_owned());
            add(&mut cases, route.path, param.name.to_owned(), param, around);
        }
    }
    cases
}

fn all(params: Params) -> impl Iterator<Item = &'static Param> {
    params.iter().flat_map(|group| group.iter())
}

fn add(
    cases: &mut Vec<Case>,
    route: &'static str,
    path: String,
    param: &'static Param,
    around: (String, String),
) {
    let (inner, open, close, dot) = match param.bound {
        Bound::Object(params) => (params, "{", "}", "."),
        Bound::Objects(_, params) | Bound::Image(params) => (params, "{", "}", "."),
        Bound::Documents(_, params) | Bound::Content(params) => (params, "[{", "}]", "[0]."),
        Bound::Messages(_, params) => (params, "[{", "}]", "[0]."),
        _ => (&[] as Params, "", "", ""),
    };
    for param in all(inner) {
        // A message requires a role, and a part requires a type.
        let others = match param.name {
            "content" | "name" | "reasoning_content" | "tool_calls" | "tool_call_id" => {
                r#""role":"user","#
            }
            "text" if matches!(param.bound, Bound::Prompt) => r#""type":"text","#,
            "image_url" => r#""type":"image_url","#,
            _ => "",
        };
        let before = format!(r#"{}{open}{others}"{}":"#, around.0, param.name);
        let after = format!("{close}{}", around.1);
        add(cases, route, format!("{path}{dot}{}", param.name), param, (before, after));
    }
    cases.push(Case { route, param: path, bound: param.bound, around });
}

/// Returns values of every type, each of about this many bytes.
pub(crate) fn values(bytes: usize) -> [(&'static str, String); 12] {
    let list = |element: &str| {
        let count = (bytes / (element.len() + 1)).max(1);
        format!("[{element}{}]", format!(",{element}").repeat(count - 1))
    };
    let object = |value: &str| {
        let count = bytes / (value.len() + 10);
        let entries: Vec<_> = (0..count).map(|at| format!(r#""{at:06}":{value}"#)).collect();
        format!("{{{}}}", entries.join(","))
    };
    let nested = "[".repeat(60);
    [
        ("a string", format!("\"{}\"", "a".repeat(bytes))),
        ("a string that errors show longer", format!("\"{}\"", "\u{7f}".repeat(bytes))),
        ("a string of escapes", format!("\"{}\"", "\\u0001".repeat(bytes / 6))),
        ("numbers", list("0")),
        (
            "numbers one after another",
            format!(
                "[{}0]",
                (0..bytes / 8).map(|id| format!("{:6},", id % 30_000)).collect::<String>()
            ),
        ),
        ("empty strings", list("\"\"")),
        ("lists of a number", list("[1]")),
        ("empty objects", list("{}")),
        ("an object of numbers", object("0")),
        ("objects", list(r#"{"role":"user","content":"a"}"#)),
        ("objects with lists", list(r#"{"type":"text","text":"","x":[0,0,0,0]}"#)),
        (
            "an object of nested lists",
            format!(r#"{{"x":{}}}"#, list(&format!("{nested}{}", "]".repeat(60)))),
        ),
    ]
}
