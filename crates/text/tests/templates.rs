//! Compares rendered chat templates with transformers. `tests/text/make_template_cases.py` wrote
//! the expected texts.

use std::collections::BTreeMap;
use std::path::PathBuf;

use forebay_text::{ChatRender, ChatTemplate, ContentFormat, TextError};
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use serde_json::{Value, json};

fn data(name: &str) -> Value {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/templates")
        .join(format!("{name}.json"));
    serde_json::from_slice(&std::fs::read(path).expect("test data")).expect("JSON")
}

fn compile(source: &str, file: &Value) -> Result<ChatTemplate, TextError> {
    let tokens = |name: &str| file["special_tokens"][name].as_str();
    let pad: BTreeMap<String, String> = tokens("pad_token")
        .map(|pad| ("pad_token".to_owned(), pad.to_owned()))
        .into_iter()
        .collect();
    let now: DateTime = file["now"].as_str().expect("a time").parse().expect("a time");
    let now = now.to_zoned(TimeZone::UTC).expect("a time");
    let clock = move || now.clone();
    ChatTemplate::with_clock(source, tokens("bos_token"), tokens("eos_token"), &pad, clock)
}

fn request(case: &Value) -> ChatRender<'_> {
    let flag = |name: &str| case[name].as_bool().unwrap_or(false);
    ChatRender {
        messages: &case["messages"],
        tools: case.get("tools"),
        documents: case.get("documents"),
        add_generation_prompt: flag("add_generation_prompt"),
        continue_final_message: flag("continue_final_message"),
        kwargs: case["kwargs"].as_object(),
    }
}

fn check(case: &Value, rendered: &Result<String, TextError>) -> Result<(), String> {
    match (case["expected"].as_str(), rendered) {
        (Some(expected), Ok(text)) if text == expected => Ok(()),
        (None, Err(TextError::Template(message))) => match case["message"].as_str() {
            Some(expected) if expected != message => {
                Err(format!("expected the message {expected:?}, got {message:?}"))
            }
            _ => Ok(()),
        },
        (expected, _) => Err(format!("expected {expected:?}\n     got {rendered:?}")),
    }
}

fn styles_render_as_transformers_renders(name: &str, format: ContentFormat) {
    let file = data(name);
    let template = compile(file["source"].as_str().expect("a source"), &file).expect("a template");
    assert_eq!(template.content_format(), format);
    let cases = file["cases"].as_array().expect("cases");
    assert!(cases.len() > 20);
    for case in cases {
        if let Err(why) = check(case, &template.render(&request(case))) {
            panic!("{name}: {}\n{why}", serde_json::to_string(case).expect("JSON"));
        }
    }
}

fn expressions_render_as_jinja2_renders(name: &str) {
    let file = data(name);
    let mut wrong = Vec::new();
    for case in file["expressions"].as_array().expect("expressions") {
        let source = case["source"].as_str().expect("a source");
        let rendered = compile(source, &file).and_then(|template| {
            template.render(&ChatRender {
                kwargs: file["kwargs"].as_object(),
                ..ChatRender::new(&file["messages"])
            })
        });
        if let Err(why) = check(case, &rendered) {
            wrong.push(format!("{source}\n{why}\n"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn smollm2() {
    styles_render_as_transformers_renders("smollm2", ContentFormat::String);
}

#[test]
fn llama3() {
    styles_render_as_transformers_renders("llama3", ContentFormat::String);
}

#[test]
fn qwen3() {
    styles_render_as_transformers_renders("qwen3", ContentFormat::String);
}

#[test]
fn mistral() {
    styles_render_as_transformers_renders("mistral", ContentFormat::String);
}

#[test]
fn deepseek() {
    styles_render_as_transformers_renders("deepseek", ContentFormat::String);
}

#[test]
fn phi() {
    styles_render_as_transformers_renders("phi", ContentFormat::String);
}

#[test]
fn gemma() {
    styles_render_as_transformers_renders("gemma", ContentFormat::Either);
}

#[test]
fn fields_that_clients_leave_out_are_one_history_to_every_template() {
    let file = data("histories");
    let sources = file["templates"].as_object().expect("templates");
    assert!(sources.len() > 79);
    let mut failed = Vec::new();
    for (name, source) in sources {
        let template = compile(source.as_str().expect("a source"), &file).expect("a template");
        let cases = file["cases"].as_array().expect("cases").iter();
        for case in cases.filter(|case| case["template"] == **name) {
            let number = case["history"].as_u64().and_then(|number| usize::try_from(number).ok());
            let history = &file["histories"][number.expect("a number")];
            if let Err(why) = check(case, &template.render(&ChatRender::new(history))) {
                failed.push(format!("{name}, {history}: {why}"));
            }
        }
    }
    assert!(failed.is_empty(), "{} failed\n{}", failed.len(), failed.join("\n"));
}

#[test]
fn values() {
    expressions_render_as_jinja2_renders("values");
}

#[test]
fn json_dumps() {
    expressions_render_as_jinja2_renders("json");
}

#[test]
fn python_methods() {
    expressions_render_as_jinja2_renders("python");
}

#[test]
fn control_flow() {
    expressions_render_as_jinja2_renders("flow");
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, Some("<s>"), None, &BTreeMap::new()).expect("a template")
}

const STRINGS: &str = "{% for m in messages %}[{{ m.content + '' }}]{% endfor %}";
const PARTS: &str = "{% for m in messages %}[{% for p in m['content'] %}{{ p['text'] + ';' }}{% endfor %}]{% endfor %}";

#[test]
fn text_parts_are_joined_for_a_template_that_reads_strings() {
    let template = template(STRINGS);
    assert_eq!(template.content_format(), ContentFormat::String);
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    let messages = json!([{"role": "user", "content": parts}, {"role": "user", "content": "c"}]);
    assert_eq!(template.render(&ChatRender::new(&messages)).as_deref(), Ok("[a\nb][c]"));
}

#[test]
fn a_string_becomes_a_part_for_a_template_that_reads_parts() {
    let template = template(PARTS);
    assert_eq!(template.content_format(), ContentFormat::Parts);
    let messages = json!([{"role": "user", "content": "ab"}]);
    assert_eq!(template.render(&ChatRender::new(&messages)).as_deref(), Ok("[ab;]"));
}

#[test]
fn a_list_with_other_parts_is_left_to_the_template() {
    let image = json!([{"type": "image_url", "image_url": {"url": "x"}}]);
    let messages = json!([{"role": "user", "content": image}]);
    let rendered = template(STRINGS).render(&ChatRender::new(&messages));
    assert!(matches!(rendered, Err(TextError::Template(_))), "{rendered:?}");
}

#[test]
fn a_refusal_is_the_templates_message_alone() {
    let template =
        template("{% macro m() %}{{ raise_exception('No, ' ~ 1) }}{% endmacro %}{{ m() }}");
    let messages = json!([]);
    let refused = template.render(&ChatRender::new(&messages));
    assert_eq!(refused, Err(TextError::Template("No, 1".to_owned())));
}

#[test]
fn what_is_not_a_chat_is_refused() {
    let template = template(STRINGS);
    for messages in [json!("text"), json!({}), json!(["text"]), json!(null)] {
        let refused = template.render(&ChatRender::new(&messages));
        assert!(matches!(refused, Err(TextError::Template(_))), "{messages}");
    }
    let messages = json!([{"role": "assistant", "content": "a"}]);
    let both = ChatRender {
        add_generation_prompt: true,
        continue_final_message: true,
        ..ChatRender::new(&messages)
    };
    assert!(template.render(&both).is_err());
}

#[test]
fn endless_recursion_and_deep_nesting_are_errors() {
    let recursive = template(
        "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{% if messages[1].content == 'two' %}{{ m(0) }}{% endif %}",
    );
    let messages = json!([{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]);
    assert!(recursive.render(&ChatRender::new(&messages)).is_err());
    let nested = template(
        "{% set ns = namespace(v=[]) %}{% for i in range(2000) %}{% set ns.v = [ns.v] %}{% endfor %}{{ ns.v | tojson }}",
    );
    assert!(nested.render(&ChatRender::new(&messages)).is_err());
}

#[test]
fn what_costs_too_much_is_said_so() {
    let loops = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}";
    let in_macro = "{% macro m() %}{% for i in range(9999) %}{% set x = i %}{% endfor %}{% endmacro %}{% for i in range(9999) %}{% set y = m() %}{% endfor %}";
    let prints = "{% for i in range(9999) %}{{ 'x' * 1000 }}{% endfor %}";
    let raw = format!("{{% for i in range(9999) %}}{}{{% endfor %}}", "x".repeat(1000));
    let captures = "{% set ns = namespace(x='xxxxxxxxxxxxxxxx') %}{% for i in range(40) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}";
    let deep = "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}";
    for source in [loops, in_macro, prints, &raw, captures, deep] {
        let refused = ChatTemplate::new(source, Some("<s>"), None, &BTreeMap::new());
        assert!(matches!(refused, Err(TextError::Costly(_))), "{source:.80} {refused:.200?}");
        let source = format!("{{% if messages | length > 9 %}}{source}{{% endif %}}");
        let messages = Value::Array(vec![json!({"role": "user", "content": ""}); 10]);
        let rendered = template(&source).render(&ChatRender::new(&messages));
        assert!(matches!(rendered, Err(TextError::Costly(_))), "{source:.80} {rendered:.200?}");
    }
}

#[test]
fn long_chats_cost_what_they_are() {
    let source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}\n{% endfor %}";
    let one = json!({"role": "user", "content": "hello"});
    let messages = Value::Array(vec![one; 100_000]);
    let rendered = template(source).render(&ChatRender::new(&messages)).expect("text");
    assert_eq!(rendered.len(), 100_000 * "<|user|>hello\n".len());
}

#[test]
fn a_callers_variable_cannot_replace_the_chat() {
    let template = template("{{ bos_token }}{{ messages | length }}{{ mine }}");
    let kwargs = json!({"messages": "mine", "mine": "x", "bos_token": "y"});
    let messages = json!([]);
    let request = ChatRender { kwargs: kwargs.as_object(), ..ChatRender::new(&messages) };
    assert_eq!(template.render(&request).as_deref(), Ok("y0x"));
}
