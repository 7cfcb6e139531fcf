//! Outputs of models that no template shows.

use serde_json::json;

use super::*;
use crate::family::CALLS;
use crate::finder::LOOKED_AT;
use crate::names::{Choice, Evidence};
use crate::parts::Part;

fn tools() -> Arc<Tools> {
    let schema = json!({"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}});
    Arc::new(Tools::new([("f".to_owned(), schema.clone()), ("g".to_owned(), schema)]))
}

fn dialect(calls: &str, reasoning: &str) -> Dialect {
    let evidence = Evidence { template: "", has_token: &|_| false };
    Dialect::new(&Choice::new(Some(calls)), &Choice::new(Some(reasoning)), evidence).unwrap()
}

/// Reads `text`, one character at a time, and counts the complete calls. Calls are shown as
/// `name(arguments)`, reasoning as `{...}`.
fn read_with(reading: Reading, text: &str, complete: bool) -> (String, u32) {
    let mut parser = Parser::new(reading);
    let mut parts = Parts::default();
    for c in text.chars() {
        parser.push(c.encode_utf8(&mut [0; 4]), &mut parts);
    }
    parser.finish(complete, &mut parts);
    let mut shown = String::new();
    let mut open = false;
    for part in parts.iter() {
        if open && !matches!(part, Part::Arguments { .. }) {
            shown.push(')');
            open = false;
        }
        match part {
            Part::Content(text) => shown.push_str(text),
            Part::Reasoning(text) => shown.push_str(&format!("{{{text}}}")),
            Part::Call { name, id, .. } => {
                shown.push_str(&format!(
                    "{}{name}(",
                    id.map_or(String::new(), |id| format!("{id}="))
                ));
                open = true;
            }
            Part::Arguments { text, .. } => shown.push_str(text),
        }
    }
    if open {
        shown.push(')');
    }
    (shown, parser.complete_calls())
}

fn read(calls: &str, text: &str) -> (String, u32) {
    let dialect = dialect(calls, "qwen3");
    read_with(Reading { dialect, tools: tools(), ..Reading::default() }, text, true)
}

#[track_caller]
fn check(calls: &str, text: &str, shown: &str, complete: u32) {
    assert_eq!(read(calls, text), (shown.to_owned(), complete), "{text}");
}

#[test]
fn objects_in_every_order_and_form() {
    let call = |body: &str| format!("<tool_call>{body}</tool_call>");
    for (body, shown) in [
        (r#"{"name": "f", "arguments": {"a": 1}}"#, r#"f({"a": 1})"#),
        (r#"{"arguments": {"a": 1}, "name": "f"}"#, r#"f({"a": 1})"#),
        (r#"{"name": "f", "parameters": {"a": 1}}"#, r#"f({"a": 1})"#),
        (r#"{"type": "function", "name": "f", "arguments": {}, "id": {"x": 1}}"#, "f({})"),
        (r#"{"function": "f", "arguments": {}}"#, "f({})"),
        (r#"{"name": "f"}"#, "f({})"),
        (r#"{"name": "f", "arguments": null}"#, "f({})"),
        (r#"{"name": "f", "arguments": "{\"a\": 1}"}"#, r#"f({"a": 1})"#),
        (r#"{"name": "f", "arguments": "a"}"#, r#"f("a")"#),
        (r#"[{"name": "f", "arguments": {}}, {"name": "g"}]"#, "f({})g({})"),
        (r#"{"name": "f", "arguments": {}}}"#, "f({})"),
        (r#"{"name": "f", "arguments": {"a": "</tool_call>"}}"#, r#"f({"a": "</tool_call>"})"#),
        (r#"{"name": "\u0066", "arguments": {}}"#, "f({})"),
    ] {
        let complete = if shown.contains("g(") { 2 } else { 1 };
        check("hermes", &call(body), shown, complete);
    }
}

#[test]
fn what_is_no_call_is_text_without_its_marks() {
    check("hermes", "<tool_call>\nf(1)\n</tool_call> and more", "f(1)\n and more", 0);
    check("hermes", "<tool_call>{\"a\": 1}</tool_call>", "{\"a\": 1}", 0);
    check("hermes", "a</tool_call> b", "a b", 0);
    check("hermes", "<tool_call></tool_call>", "", 0);
    check("hermes", "1 < 2 <tool", "1 < 2 <tool", 0);
    check("hermes", " \n", " \n", 0);
    check(
        "llama3_json",
        "{\"name\": \"nobody\", \"parameters\": {}}",
        "{\"name\": \"nobody\", \"parameters\": {}}",
        0,
    );
    check("llama3_json", "{\"a\": [1, 2]}", "{\"a\": [1, 2]}", 0);
    check("llama3_json", "{not json", "{not json", 0);
    check("pythonic", "[1] See there", "[1] See there", 0);
    check("pythonic", "[f x]", "[f x]", 0);
    check("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>x", "x", 0);
}

#[test]
fn what_is_too_long_for_a_name_is_none() {
    let long = "x".repeat(5000);
    for calls in ["glm45", "kimi_k2", "deepseek_v3", "gemma4", "pythonic", "qwen3_coder"] {
        let open = match calls {
            "glm45" => "<tool_call>",
            "kimi_k2" => "<|tool_call_begin|>",
            "deepseek_v3" => "<｜tool▁call▁begin｜>",
            "gemma4" => "<|tool_call>call:",
            "pythonic" => "[",
            _ => "<function=",
        };
        let (shown, complete) = read(calls, &format!("{open}{long}"));
        assert_eq!(complete, 0, "{calls}");
        assert!(shown.ends_with(&long), "{calls}: {shown:.40}");
    }
}

#[test]
fn an_answer_in_json_is_not_held_back() {
    let reading =
        Reading { dialect: dialect("llama3_json", "none"), tools: tools(), ..Reading::default() };
    let mut parser = Parser::new(reading);
    let mut parts = Parts::default();
    parser.push("{\"city\": \"Par", &mut parts);
    assert_eq!(parts.as_content(), Some("{\"city\": \"Par"));
}

#[test]
fn a_call_that_is_cut_stays_as_far_as_it_came() {
    let reading =
        || Reading { dialect: dialect("hermes", "qwen3"), tools: tools(), ..Reading::default() };
    let cut = |text: &str| read_with(reading(), text, false);
    assert_eq!(cut("<tool_call>{\"name\": \"f\", \"argu"), ("f()".into(), 0));
    assert_eq!(cut("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\""), ("f({\"a\")".into(), 0));
    assert_eq!(cut("Hi <tool_ca"), ("Hi ".into(), 0));
    // The object of the arguments is whole, and the model ended there by itself.
    check("hermes", "<tool_call>{\"name\": \"f\", \"arguments\": {}", "f({})", 1);
    assert_eq!(cut("<tool_call>{\"name\": \"f\", \"arguments\": {}"), ("f({})".into(), 0));
    check(
        "qwen3_coder",
        "<tool_call><function=f><parameter=days>\n3\n</parameter>",
        "f({\"days\": 3})",
        1,
    );
    check("qwen3_coder", "<tool_call><function=f><parameter=city>\nPar", "f({\"city\": \"Par)", 0);
}

#[test]
fn broken_json_ends_where_its_mark_does() {
    let broken = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"x}\n</tool_call>\n<tool_call>\n{\"name\": \"g\"}\n</tool_call>";
    check("hermes", broken, "f({\"a\": \"x})g({})", 1);
    let broken = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\": \"x<|tool_call_end|>rest";
    check("kimi_k2", broken, "functions.f:0=f({\"a\": \"x)rest", 0);
}

#[test]
fn reasoning_begins_and_ends_in_many_ways() {
    let with = |name: &str, prompt: &str, continues: bool, text: &str| {
        let dialect = dialect("hermes", name);
        let start = Start::of(dialect, prompt, continues);
        read_with(Reading { dialect, tools: tools(), start, ..Reading::default() }, text, true).0
    };
    assert_eq!(with("qwen3", "assistant\n", false, "<think>\na\n</think>\n\nb"), "{a}b");
    assert_eq!(with("qwen3", "assistant\n<think>\n", false, "a\n</think>\n\nb"), "{a}b");
    assert_eq!(with("qwen3", "assistant\n<think>\n", false, "<think>\na</think>b"), "{a}b");
    assert_eq!(with("qwen3", "<think>\n\n</think>\n\n", false, "\n\nb"), "b");
    assert_eq!(with("qwen3", "assistant\n", false, "b"), "b");
    assert_eq!(with("qwen3", "assistant\n", false, "b</think>c"), "bc");
    assert_eq!(with("qwen3", "assistant\n<think>\n", false, "never closed"), "{never closed}");
    assert_eq!(with("qwen3", "user: <think>\nassistant\n", false, "b"), "b");
    assert_eq!(with("qwen3", "assistant\n<think>\nI", true, " think</think>b"), "{ think}b");
    assert_eq!(with("qwen3", "assistant\n<think>x</think>So", true, " it is"), " it is");
    assert_eq!(with("deepseek_r1", "assistant\n", false, "a</think>b"), "{a}b");
    assert_eq!(with("deepseek_r1", "<think></think>", false, "b"), "b");
    let call = "<tool_call>{\"name\": \"f\"}</tool_call>";
    assert_eq!(with("qwen3", "<think>", false, &format!("a\n{call}\nb")), "{a}f({})b");
    assert_eq!(with("none", "<think>", false, "a</think>b"), "a</think>b");
}

#[test]
fn other_writings_of_a_family_are_read_too() {
    // A mark that was left out, a body of another family, and an older form.
    check(
        "qwen3_coder",
        "<function=f><parameter=city>x</parameter></function>",
        "f({\"city\": \"x\"})",
        1,
    );
    check("qwen3_coder", "<tool_call>{\"name\": \"f\"}</tool_call>", "f({})", 1);
    check(
        "qwen3_coder",
        "<function=f>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "f({\"days\": 3})",
        1,
    );
    check("mistral", "[TOOL_CALLS]{\"name\": \"f\", \"arguments\": {}}", "f({})", 1);
    check(
        "llama3_json",
        "<|python_tag|>{\"name\": \"f\", \"parameters\": {\"a\": 1}}; {\"name\": \"g\"}",
        "f({\"a\": 1})g({})",
        2,
    );
    check(
        "pythonic",
        "<|python_start|>[f(city='x'), g('y', 3)]<|python_end|>",
        "f({\"city\": \"x\"})g({\"city\": \"y\", \"days\": 3})",
        2,
    );
    let long = "[f(city=\"\"\"a\n\"b\" c\"\"\")]";
    check("pythonic", long, "f({\"city\": \"a\\n\\\"b\\\" c\"})", 1);
    check("glm45", "<tool_call>f</tool_call>", "f({})", 1);
    check(
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>x",
        "f({})x",
        1,
    );
    let older = "[TOOL_CALLS]f[CALL_ID]abc[ARGS]{\"city\": \"x\"}[TOOL_CALLS]g[ARGS]{}";
    let evidence = Evidence { template: "", has_token: &|token| token == "[ARGS]" };
    let named = Dialect::new(&Choice::new(Some("mistral")), &Choice::None, evidence).unwrap();
    let reading = Reading { dialect: named, tools: tools(), ..Reading::default() };
    assert_eq!(read_with(reading, older, true), ("f({\"city\": \"x\"})g({})".into(), 2));
}

#[test]
fn channels_are_for_the_reader_the_model_and_tools() {
    let with = |prompt: &str, text: &str| {
        let dialect = dialect("openai", "openai_gptoss");
        let start = Start::of(dialect, prompt, false);
        read_with(Reading { dialect, tools: tools(), start, ..Reading::default() }, text, true)
    };
    let prompt = "<|end|><|start|>assistant";
    for (text, shown, complete) in [
        ("<|channel|>final<|message|>Hi<|return|>", "Hi", 0),
        (
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hi",
            "{Hm}Hi",
            0,
        ),
        ("<|channel|>commentary<|message|>I look.<|end|>", "I look.", 0),
        (
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>",
            "f({\"a\": 1})",
            1,
        ),
        (" to=functions.f<|channel|>commentary json<|message|>{}", "f({})", 1),
        ("<|channel|>analysis to=python<|message|>print(1)<|call|>", "{print(1)}", 0),
        ("<|channel|>commentary to=g<|message|>{}<|end|>", "g({})", 1),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "{a}b", 0),
    ] {
        assert_eq!(with(prompt, text), (shown.into(), complete), "{text}");
    }
    let open = "<|start|>assistant<|channel|>final<|message|>So";
    assert_eq!(with(open, " it is<|return|>").0, " it is");
    assert_eq!(with("plain", "no channels at all").0, "no channels at all");
}

#[test]
fn reasoning_that_nobody_wants_is_left_out() {
    let reading =
        Reading { dialect: dialect("hermes", "qwen3"), silent: true, ..Reading::default() };
    assert_eq!(read_with(reading, "<think>a</think>b", true).0, "b");
}

/// Bytes that a parser looks at for white space behind `prefix`, which comes in single characters.
fn looked_at(calls: &'static Calls, prefix: &str, blanks: usize) -> usize {
    let dialect = Dialect { calls: Some(calls), reasoning: None };
    let mut parser = Parser::new(Reading { dialect, tools: tools(), ..Reading::default() });
    let mut parts = Parts::default();
    parser.push(prefix, &mut parts);
    let before = LOOKED_AT.get();
    for blank in [" ", "\n"].into_iter().cycle().take(blanks) {
        parser.push(blank, &mut parts);
    }
    parser.finish(true, &mut parts);
    LOOKED_AT.get() - before
}

#[test]
fn white_space_is_looked_at_a_bounded_number_of_times() {
    const BLANKS: usize = 3000;
    const TIMES: usize = 64;
    let inside = [
        "",
        "f",
        "f(",
        "f(a=",
        "call:f{",
        "call:f{a:",
        "{",
        "[",
        "[{",
        "{\"",
        "{\"name\"",
        "{\"name\":",
        "{\"name\": \"f\"",
        "{\"name\": \"f\",",
        "{\"name\": \"f\", \"arguments\":",
        "{\"name\": \"f\", \"arguments\": {",
        "{\"name\": \"f\", \"arguments\": {}",
        "{\"name\": \"f\"}",
        "<|channel|>",
        "<|channel|>commentary to=functions.f<|message|>",
        "<|channel|>final<|message|>",
    ];
    for calls in CALLS {
        let mut starts = vec![
            String::new(),
            calls.section.0.to_owned(),
            calls.call.0.to_owned(),
            format!("{}{}", calls.section.0, calls.call.0),
        ];
        if let Form::Tagged(tags) = &calls.body {
            let name = format!("{}{}f{}", starts[3], tags.name.0, tags.name.1);
            let key = format!("{name}{}city{}", tags.key.0, tags.key.1);
            starts.extend([key.clone() + tags.value.0, key, name]);
        }
        for prefix in starts.iter().flat_map(|start| inside.map(|rest| format!("{start}{rest}"))) {
            let more = looked_at(calls, &prefix, 2 * BLANKS)
                .saturating_sub(looked_at(calls, &prefix, BLANKS));
            assert!(more <= TIMES * BLANKS, "{more} for {BLANKS} blanks behind {prefix:?}");
        }
    }
}
