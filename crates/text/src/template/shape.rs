//! Detects message features that not every template supports, by rendering short chats, and adapts
//! messages to the template.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::{Map, Value, json};

use super::history::{has_calls, with_function};
use super::{ChatRender, ChatTemplate};

/// The features that a template supports. If a probe is inconclusive, messages are not changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// True if messages of the role `system` are supported.
    system: bool,
    /// True if messages of the role `developer` are supported.
    developer: bool,
    /// True if there may be several system messages at the beginning.
    several_systems: bool,
    /// True if a system message may follow other messages.
    late_system: bool,
    /// True if two user messages may be adjacent.
    repeated: bool,
    /// The form of an assistant's message without content.
    nothing: EmptyContent,
    arguments: Arguments,
    /// True if call ids may be of any form. Some templates require nine letters and digits.
    long_ids: bool,
    /// True if the template renders tool descriptions.
    tools: bool,
    /// True if the template renders calls of earlier turns.
    calls: bool,
}

/// The form of a call's arguments that a template accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arguments {
    Object,
    Text,
    /// Arguments are passed unchanged.
    Either,
}

/// How a message with calls represents missing content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EmptyContent {
    Null,
    Empty,
    /// The content is passed unchanged.
    Either,
}

const PROBE: &str = "forebay-probe-one";
const OTHER: &str = "forebay-probe-two";
const LONG_ID: &str = "call_0123456789abcdef01234567";
const SHORT_ID: &str = "abcdef123";
/// The characters of a short id.
const LETTERS: &[u8; 32] = b"0123456789abcdefghijklmnopqrstuv";

impl Shape {
    /// The shape that changes nothing.
    pub(super) const ANY: Self = Self {
        system: true,
        developer: true,
        several_systems: true,
        late_system: true,
        repeated: true,
        nothing: EmptyContent::Either,
        arguments: Arguments::Either,
        long_ids: true,
        tools: true,
        calls: true,
    };

    /// Detects which messages `template` supports. The template's own shape must still be
    /// [`Shape::ANY`].
    pub(super) fn of(template: &ChatTemplate) -> Self {
        let render = |messages: Value| template.render(&ChatRender::new(&messages)).ok();
        let user = |text: &str| json!({"role": "user", "content": text});
        let system = |text: &str| json!({"role": "system", "content": text});
        let answer = json!({"role": "assistant", "content": "a"});
        let shows = |messages: Value| render(messages).is_some_and(|text| text.contains(PROBE));
        if !shows(json!([user(PROBE)])) {
            return Self { tools: Self::takes_tools(template), ..Self::ANY };
        }
        let takes_system = shows(json!([system(PROBE), user("u")]));
        let both = |messages: Value| {
            render(messages).is_some_and(|text| text.contains(PROBE) && text.contains(OTHER))
        };
        let called = |content: Value, id: &str, arguments: Value| {
            let call = json!({"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}});
            let result = json!({"role": "tool", "tool_call_id": id, "name": "f", "content": "r"});
            json!([user("u"), {"role": "assistant", "content": content, "tool_calls": [call]}, result])
        };
        let object = json!({"k": PROBE});
        let text = Value::String(object.to_string());
        let shown = |text: &String| text.contains(PROBE);
        let takes = |id: &str, arguments: &Value| {
            let empty = render(called(json!(""), id, arguments.clone()));
            // Some templates render calls only if the content is null.
            empty.filter(shown).or_else(|| render(called(Value::Null, id, arguments.clone())))
        };
        // The other probes use short ids: a template that rejects long ids would reject every probe
        // with a long one.
        let long_ids = takes(SHORT_ID, &object).or(takes(SHORT_ID, &text)).is_none()
            || takes(LONG_ID, &object).or(takes(LONG_ID, &text)).is_some();
        let as_object =
            takes(SHORT_ID, &object).is_some_and(|text| shown(&text) && !text.contains("{'k'"));
        let as_text = takes(SHORT_ID, &text).is_some_and(|text| shown(&text));
        let calls = as_object || as_text;
        let (arguments, given) = match (as_object, as_text) {
            (true, _) => (Arguments::Object, object),
            (false, true) => (Arguments::Text, text),
            (false, false) => (Arguments::Either, object),
        };
        // If the template renders no calls at all, a chat that renders counts as accepted.
        let taken = |content: Value| {
            render(called(content, SHORT_ID, given.clone())).filter(|text| !calls || shown(text))
        };
        let (empty, null) = (taken(json!("")), taken(Value::Null));
        let prints = |text: &String| ["None", "null"].iter().any(|word| text.contains(word));
        let nothing = match (empty, null) {
            (Some(_), None) => EmptyContent::Empty,
            (None, Some(_)) => EmptyContent::Null,
            (Some(empty), Some(null)) if prints(&null) && !prints(&empty) => EmptyContent::Empty,
            (None, None) => EmptyContent::Empty,
            (Some(_), Some(_)) => EmptyContent::Either,
        };
        Self {
            system: takes_system,
            // A template that prints any role would pass the probe, although the model may not know
            // `developer`. So the source has to name this role.
            developer: template.source.contains("developer")
                && shows(json!([{"role": "developer", "content": PROBE}, user("u")])),
            several_systems: both(json!([system(PROBE), system(OTHER), user("u")])),
            late_system: shows(json!([system("s"), user("u"), answer, system(PROBE), user("v")])),
            repeated: both(json!([user(PROBE), user(OTHER)])),
            nothing,
            arguments,
            long_ids,
            tools: Self::takes_tools(template),
            calls,
        }
    }

    fn takes_tools(template: &ChatTemplate) -> bool {
        let parameters = json!({"type": "object", "properties": {}});
        let function = json!({"name": PROBE, "description": "d", "parameters": parameters});
        let tools = json!([{"type": "function", "function": function}]);
        let chats = [
            json!([{"role": "user", "content": "u"}]),
            json!([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]),
        ];
        chats.iter().any(|messages| {
            let chat = ChatRender { tools: Some(&tools), ..ChatRender::new(messages) };
            template.render(&chat).is_ok_and(|text| text.contains(PROBE))
        })
    }

    pub(super) fn tools(&self) -> bool {
        self.tools
    }

    pub(super) fn calls(&self) -> bool {
        self.calls
    }

    /// Describes the changes to messages in words.
    pub(super) fn notes(&self) -> Vec<&'static str> {
        [
            (!self.developer, "developer messages become system messages"),
            (!self.system, "system messages become part of the first user message"),
            (self.system && !self.several_systems, "system messages at the beginning are joined"),
            (
                self.system && !self.late_system,
                "system messages behind others become user messages",
            ),
            (!self.repeated, "messages of one role in a row are joined"),
            (
                self.nothing == EmptyContent::Empty && self.calls,
                "content that is null beside calls becomes an empty string",
            ),
            (self.nothing == EmptyContent::Null, "empty content beside calls becomes null"),
            (self.arguments == Arguments::Object, "arguments of calls are given as objects"),
            (self.arguments == Arguments::Text, "arguments of calls are given as strings"),
            (!self.long_ids, "calls get names of nine letters and digits"),
        ]
        .into_iter()
        .filter_map(|(done, note)| done.then_some(note))
        .collect()
    }

    /// Adapts messages to this shape.
    pub(super) fn adapt(&self, messages: &mut Vec<Value>) {
        for message in messages.iter_mut().filter_map(Value::as_object_mut) {
            if !self.developer && role(message) == "developer" {
                set_role(message, "system");
            }
            self.adapt_calls(message);
        }
        self.adapt_systems(messages);
        if !self.repeated {
            let all = messages.len();
            join(messages, |role| matches!(role, "user" | "assistant"), all);
        }
    }

    /// Sets missing content of a message with calls to the form that the template expects.
    pub(super) fn adapt_nothing(&self, message: &mut Map<String, Value>) {
        if !has_calls(message) {
            return;
        }
        let content = match (self.nothing, message.get("content")) {
            (EmptyContent::Empty, Some(Value::Null)) => Value::String(String::new()),
            (EmptyContent::Null, Some(Value::String(text))) if text.is_empty() => Value::Null,
            _ => return,
        };
        message.insert("content".to_owned(), content);
    }

    fn adapt_systems(&self, messages: &mut Vec<Value>) {
        let is_system = |message: &Value| message["role"] == "system";
        let leading = messages.iter().take_while(|message| is_system(message)).count();
        if !self.system {
            let texts: Vec<String> = messages.drain(..leading).filter_map(|m| text(&m)).collect();
            let first = messages.iter_mut().find(|message| message["role"] == "user");
            if let Some(message) = first {
                texts.iter().rev().for_each(|text| prepend(message, text));
            } else if !texts.is_empty() {
                messages.insert(0, json!({"role": "user", "content": texts.join("\n\n")}));
            }
        } else if !self.several_systems && leading > 1 {
            join(messages, |role| role == "system", leading);
        }
        let begin = messages.iter().take_while(|message| is_system(message)).count();
        if !self.system || !self.late_system {
            for message in messages.iter_mut().skip(begin).filter(|message| is_system(message)) {
                message["role"] = Value::String("user".to_owned());
            }
        }
    }

    fn adapt_calls(&self, message: &mut Map<String, Value>) {
        if !self.long_ids
            && let Some(id) = message.get_mut("tool_call_id")
        {
            shorten(id);
        }
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
        for call in calls.into_iter().flatten().filter_map(Value::as_object_mut) {
            if !self.long_ids
                && let Some(id) = call.get_mut("id")
            {
                shorten(id);
            }
            with_function(call, |function| self.adapt_arguments(function));
        }
    }

    fn adapt_arguments(&self, function: &mut Map<String, Value>) {
        let Some(arguments) = function.get_mut("arguments") else { return };
        match (self.arguments, &*arguments) {
            (Arguments::Object, Value::String(text)) => {
                // OpenAI's clients send arguments back unchanged, even if they were truncated.
                let read = serde_json::from_str(text).ok();
                if let Some(value) = read.filter(Value::is_object) {
                    *arguments = value;
                }
            }
            (Arguments::Text, Value::Object(_)) => {
                *arguments = Value::String(arguments.to_string());
            }
            _ => {}
        }
    }
}

fn role(message: &Map<String, Value>) -> &str {
    message.get("role").and_then(Value::as_str).unwrap_or_default()
}

fn set_role(message: &mut Map<String, Value>, role: &str) {
    message.insert("role".to_owned(), Value::String(role.to_owned()));
}

/// Returns the text of a message's content.
fn text(message: &Value) -> Option<String> {
    match &message["content"] {
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) => {
            let texts = parts.iter().filter_map(|part| part["text"].as_str());
            Some(texts.collect::<Vec<_>>().join("\n"))
        }
        _ => None,
    }
}

/// Inserts text before the content of a message.
fn prepend(message: &mut Value, text: &str) {
    match &mut message["content"] {
        Value::String(content) => *content = format!("{text}\n\n{content}"),
        Value::Array(parts) => parts.insert(0, json!({"type": "text", "text": text})),
        content => *content = Value::String(text.to_owned()),
    }
}

/// Joins adjacent messages of the same role among the first `count` messages, for the roles in
/// `of`.
fn join(messages: &mut Vec<Value>, of: impl Fn(&str) -> bool, count: usize) {
    let mut joined: Vec<Value> = Vec::with_capacity(messages.len());
    for (number, message) in std::mem::take(messages).into_iter().enumerate() {
        let plain = |message: &Value| message.get("tool_calls").is_none();
        let role = message["role"].as_str().unwrap_or_default();
        let last = joined.last_mut().filter(|last| {
            number < count && of(role) && last["role"] == role && plain(last) && plain(&message)
        });
        match (last, text(&message)) {
            (Some(last), Some(more)) => {
                let before = text(last).unwrap_or_default();
                *last = message;
                match &mut last["content"] {
                    Value::Array(parts) => {
                        parts.insert(0, json!({"type": "text", "text": before}));
                    }
                    content => *content = Value::String(format!("{before}\n\n{more}")),
                }
            }
            _ => joined.push(message),
        }
    }
    *messages = joined;
}

/// Shortens a call id to nine letters and digits. The same id always gives the same result.
fn shorten(id: &mut Value) {
    let Value::String(text) = id else { return };
    if text.len() == SHORT_ID.len() && text.bytes().all(|b| b.is_ascii_alphanumeric()) {
        return;
    }
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    let hash = hasher.finish();
    let letter = |at: u32| char::from(LETTERS[(hash >> (5 * at)) as usize & 31]);
    *text = (0..9).map(letter).collect();
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn render(source: &str, messages: Value) -> String {
        let template = ChatTemplate::new(source, None, None, &BTreeMap::new()).expect("a template");
        template.render(&ChatRender::new(&messages)).expect("text")
    }

    fn user(text: &str) -> Value {
        json!({"role": "user", "content": text})
    }
    fn system(text: &str) -> Value {
        json!({"role": "system", "content": text})
    }

    const PRINTS: &str = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}";
    /// Requires that user and assistant messages alternate, as Gemma's and Mistral's templates do.
    const TURNS: &str = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}";
    /// Allows one system message, at the beginning, as Qwen's templates do.
    const FIRST: &str = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}";
    const CALLS: &str = "{% for m in messages %}[{{ m.content }}]{% for c in m.tool_calls %}{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}{% endfor %}";
    const TEXT_CALLS: &str = "{% for m in messages %}{% if m.content is not none %}[{{ m.content }}]{% endif %}{% for c in m.tool_calls %}{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}{% endfor %}";
    const NINE: &str = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{{ c.id }}={{ c.function.arguments | tojson }}{% endfor %}{% if m.tool_call_id %}<{{ m.tool_call_id }}>{% endif %}{% endfor %}";

    #[test]
    fn what_a_template_takes_is_left_alone() {
        let messages = json!([system("a"), system("b"), user("c"), user("d"), system("e")]);
        assert_eq!(render(PRINTS, messages), "[system:a][system:b][user:c][user:d][system:e]");
    }

    #[test]
    fn roles_that_a_template_refuses_become_others() {
        let developer = json!({"role": "developer", "content": "d"});
        assert_eq!(render(PRINTS, json!([developer, user("u")])), "[system:d][user:u]");
        let messages = json!([system("a"), developer, user("u"), system("late")]);
        assert_eq!(render(FIRST, messages.clone()), "[system:a\n\nd][user:u][user:late]");
        assert_eq!(render(TURNS, messages), "[user:a\n\nd\n\nu\n\nlate]");
        let knows = "{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}";
        assert_eq!(render(knows, json!([developer, user("u")])), "D[developer:d][user:u]");
        assert_eq!(
            render(TURNS, json!([user("a"), user("b"), {"role": "assistant", "content": "c"}])),
            "[user:a\n\nb][assistant:c]"
        );
    }

    fn called(content: Value, arguments: Value) -> Value {
        let call = json!({"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}});
        json!([user("u"), {"role": "assistant", "content": content, "tool_calls": [call]}])
    }

    #[test]
    fn arguments_come_as_the_template_takes_them() {
        let expected = "[u][]call_1 f {\"a\": 1}";
        assert_eq!(render(CALLS, called(json!(""), json!("{\"a\": 1}"))), expected);
        assert_eq!(render(CALLS, called(json!(""), json!({"a": 1}))), expected);
        assert_eq!(render(CALLS, called(Value::Null, json!({"a": 1}))), expected);
        assert_eq!(render(CALLS, called(json!(""), json!(""))), "[u][]call_1 f {}");
        assert_eq!(render(CALLS, called(json!(""), json!("{\"a"))), "[u][]call_1 f \"{\\\"a\"");
        let expected = "[u]f {\"a\":1}";
        assert_eq!(render(TEXT_CALLS, called(Value::Null, json!("{\"a\":1}"))), expected);
        assert_eq!(render(TEXT_CALLS, called(Value::Null, json!({"a": 1}))), expected);
        let only_null = "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.arguments }}{% else %}[{{ m.content }}]{% endif %}{% endfor %}";
        assert_eq!(render(only_null, called(json!(""), json!("{}"))), "[u]{}");
    }

    #[test]
    fn fields_that_are_null_are_not_there() {
        let user = user("u");
        for (source, message, expected) in [
            (PRINTS, json!({"role": "assistant", "content": null}), "[user:u][assistant:]"),
            (PRINTS, json!({"role": "assistant"}), "[user:u][assistant:]"),
            (PRINTS, json!({"role": "tool", "content": null}), "[user:u][tool:]"),
            (PRINTS, json!({"role": "assistant", "tool_calls": null}), "[user:u][assistant:]"),
            (PRINTS, json!({"role": "assistant", "tool_calls": []}), "[user:u][assistant:]"),
            (PRINTS, called(Value::Null, json!({}))[1].clone(), "[user:u][assistant:]"),
            (CALLS, json!({"role": "assistant", "tool_calls": []}), "[u][]"),
            (CALLS, called(Value::Null, Value::Null)[1].clone(), "[u][]call_1 f {}"),
            (TEXT_CALLS, called(Value::Null, Value::Null)[1].clone(), "[u]f {}"),
            (TEXT_CALLS, called(Value::Null, json!(" "))[1].clone(), "[u]f {}"),
            (TEXT_CALLS, json!({"role": "assistant", "content": null}), "[u][]"),
        ] {
            assert_eq!(render(source, json!([user, message])), expected, "{message}");
        }
        let strict = "{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}";
        for field in ["reasoning_content", "name", "refusal", "audio", "tool_calls"] {
            let mut message = json!({"role": "assistant", "content": null});
            message[field] = Value::Null;
            assert_eq!(render(strict, json!([user, message])), "user:u;assistant:;");
        }
        let thinks = "{% for m in messages %}{% if m.reasoning_content is defined %}<{{ m.reasoning_content + '>' }}{% endif %}{{ m.content }}{% endfor %}";
        let thought = |text: Value| json!({"role": "assistant", "reasoning_content": text});
        assert_eq!(render(thinks, json!([user, thought(Value::Null)])), "u");
        assert_eq!(render(thinks, json!([user, thought(json!("hm"))])), "u<hm>");
        let parts =
            "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}";
        assert_eq!(render(parts, json!([user, {"role": "assistant"}])), "<u><>");
    }

    #[test]
    fn lines_of_a_template_end_as_in_jinja2() {
        let source = "{% for m in messages %}\r\n[{{ m.content }}]\r{% endfor %}\r\nend\r\n";
        assert_eq!(render(source, json!([user("a\r\nb")])), "[a\r\nb]\nend");
    }

    #[test]
    fn chats_with_tools_have_a_template_of_their_own() {
        let new = |source: &str| {
            ChatTemplate::new(source, None, None, &BTreeMap::new()).expect("a template")
        };
        let template =
            new(PRINTS).with_tool_use(new("{{ tools | length }}{{ messages[-1].content }}"));
        let (messages, tools, none) = (json!([user("u")]), json!([{"name": "f"}]), json!([]));
        let text = |tools| template.render(&ChatRender { tools, ..ChatRender::new(&messages) });
        assert_eq!(text(None).as_deref(), Ok("[user:u]"));
        assert_eq!(text(Some(&none)).as_deref(), Ok("[user:u]"));
        assert_eq!(text(Some(&tools)).as_deref(), Ok("1u"));
        let chats = [None, Some(&tools), Some(&none)]
            .map(|tools| ChatRender { tools, ..ChatRender::new(&messages) });
        let all = ["[user:u]", "1u", "[user:u]"].map(|text| Ok(text.to_owned()));
        assert_eq!(template.render_all(&chats), all);
        let named =
            new(PRINTS).with_tool_use(new("{{ tools | tojson }}{{ messages[-1].content }}"));
        assert!(named.takes_tools() && named.shows_tools() && named.sources().count() == 2);
    }

    #[test]
    fn a_system_message_shows_tools_that_the_template_does_not() {
        let mut template =
            ChatTemplate::new(PRINTS, None, None, &BTreeMap::new()).expect("a template");
        let tools = json!([{"type": "function", "function": {"name": "look"}}]);
        let mut messages = called(Value::Null, json!({"a": 1}));
        let result = json!({"role": "tool", "tool_call_id": "call_1", "content": null});
        messages.as_array_mut().expect("a list").push(result);
        template.show_tools_generically();
        assert!(template.takes_tools() && template.has_generic_tools() && !template.shows_tools());
        let text = |template: &ChatTemplate, tools| {
            let chat = ChatRender { tools, ..ChatRender::new(&messages) };
            template.render(&chat).expect("text")
        };
        let turns = "[user:u][assistant:<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":1}}\n</tool_call>][user:<tool_response>\n\n</tool_response>]";
        // Calls of earlier turns are rendered even without tools.
        assert_eq!(text(&template, None), turns);
        let shown = text(&template, Some(&tools));
        assert!(shown.starts_with("[system:You can call functions") && shown.ends_with(turns));
        assert!(shown.contains(r#"{"type":"function","function":{"name":"look"}}"#), "{shown}");
        // A template that renders tools itself is not changed.
        let mut own = ChatTemplate::new(
            "{{ tools | tojson }}{{ messages[-1].content }}",
            None,
            None,
            &BTreeMap::new(),
        )
        .expect("a template");
        own.show_tools_generically();
        assert!(own.takes_tools() && !own.has_generic_tools());
    }

    #[test]
    fn names_of_calls_are_shortened_alike() {
        let mut messages = called(json!(""), json!({}));
        let result = json!({"role": "tool", "tool_call_id": "call_1", "content": "r"});
        messages.as_array_mut().expect("a list").push(result);
        let text = render(NINE, messages);
        let (id, rest) = text["u".len()..].split_once('=').expect("a name");
        assert_eq!(id.len(), 9);
        assert_eq!(rest, format!("{{}}r<{id}>"));
    }

    #[test]
    fn templates_say_whether_they_take_tools() {
        let shape = |source: &str| {
            let template = ChatTemplate::new(source, None, None, &BTreeMap::new());
            template.expect("a template").shape
        };
        assert!(!shape(PRINTS).tools());
        assert!(shape("{{ tools | tojson }}{{ messages[-1].content }}").tools());
        assert!(shape(FIRST).notes().contains(&"system messages at the beginning are joined"));
    }
}
