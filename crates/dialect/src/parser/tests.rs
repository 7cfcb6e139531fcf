//! Tests outputs of models that deviate from all templates.

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

/// Parses `text` one character at a time, and counts the complete calls. Formats calls as
/// `name(arguments)` and reasoning as `{...}`.
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

/// Checks that all of a text is content, with and without tools.
#[track_caller]
fn check_said(calls: &str, text: &str) {
    check(calls, text, text, 0);
    let dialect = dialect(calls, "qwen3");
    let shown = read_with(Reading { dialect, ..Reading::default() }, text, true);
    assert_eq!(shown, (text.to_owned(), 0), "without tools: {text}");
}

#[test]
fn what_is_no_call_is_text_as_it_was_said() {
    for text in [
        "Write <tool_call> to begin and </tool_call> to end.",
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>\nf(1)\n</tool_call> and more",
        "<tool_call>{\"a\": 1}</tool_call>",
        "a</tool_call> b",
        "1 < 2 <tool",
        " \n",
        "For example:\n\n```xml\n<tool_call>\n{\"name\": \"your_tool\", \"arguments\": {}}\n</tool_call>\n```\n\nThat is all.",
        "Models write <think> first.",
        "Models write <think> first and </think> behind it, then <tool_call>.",
        "So:\n<think>\nHm.\n</think>\nb",
    ] {
        check_said("hermes", text);
    }
    for text in [
        "Write <tool_call> and <function=name>, then <parameter=x>.",
        "<function=other>\n<parameter=city>\nx\n</parameter>\n</function>\n</tool_call>",
    ] {
        check_said("qwen3_coder", text);
    }
    for text in
        ["Write <tool_call> to begin and </tool_call> to end.", "<tool_call>no\n</tool_call>"]
    {
        check_said("glm45", text);
    }
    check_said("minimax_m2", "Say <minimax:tool_call>\n<invoke name=\"other\">\n</invoke>.");
    check_said("deepseek_v32", "Say <｜DSML｜function_calls> and </｜DSML｜function_calls>.");
    check_said("llama3_json", "{\"name\": \"nobody\", \"parameters\": {}}");
    check_said("llama3_json", "{\"a\": [1, 2]}");
    check_said("llama3_json", "{not json");
    check_said("pythonic", "[1] See there");
    check_said("pythonic", "[f x]");
    check_said("pythonic", "[other(1)]");
}

#[test]
fn special_tokens_are_no_text() {
    check("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>x", "x", 0);
    check(
        "kimi_k2",
        "<|tool_call_begin|>functions.other:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "functions.other:0{}",
        0,
    );
    check("mistral", "a[TOOL_CALLS]", "a", 0);
    check("gemma4", "a <|tool_call>call:other{}<tool_call|>", "a call:other{}", 0);
    check("llama3_json", "<|python_tag|>print(1)", "print(1)", 0);
}

#[test]
fn a_call_in_the_middle_of_marks_is_a_call() {
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
    for (text, shown) in [
        (
            format!("Write <tool_call> like so: {call} and </tool_call>."),
            "Write <tool_call> like so:f({}) and </tool_call>.",
        ),
        (format!("<tool_call> {call}"), "<tool_call>f({})"),
        (
            format!("<tool_call>{{\"name\": \"no\"}}</tool_call>{call}"),
            "<tool_call>{\"name\": \"no\"}</tool_call>f({})",
        ),
        (format!("```\n{call}\n```"), "```f({})\n```"),
    ] {
        // White space before the call is output after the call if more text follows.
        let (read, complete) = read("hermes", &text);
        assert_eq!(complete, 1, "{text}");
        let blank = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(blank(&read).replace(' ', ""), blank(shown).replace(' ', ""), "{text}");
    }
}

#[test]
fn blank_lines_around_a_call_stay_between_texts() {
    let call = "<tool_call>{\"name\": \"f\"}</tool_call>";
    for (text, shown) in [
        (format!("One.\n\n{call}\n\nTwo."), "One.f({})\n\n\n\nTwo."),
        (format!("One.\n{call}\n{call}\nTwo."), "One.f({})f({})\n\nTwo."),
        (format!("One. {call}"), "One.f({})"),
        (format!("{call}\n\nTwo."), "f({})Two."),
        (format!("One.\n\n{call}\n"), "One.f({})"),
        (
            format!("<think>a</think>\n\n{call}\n\nTwo.\n\n{call}\nThree."),
            "{a}f({})Two.f({})\n\n\nThree.",
        ),
    ] {
        let complete = text.matches(call).count();
        check("hermes", &text, shown, u32::try_from(complete).expect("a number"));
    }
    check("pythonic", "[f(city='x')]\n\nDone [1].", "f({\"city\": \"x\"})Done [1].", 1);
}

#[test]
fn reasoning_that_mentions_marks_stays_reasoning() {
    let shown = |text: &str| {
        let dialect = dialect("hermes", "qwen3");
        let start = Start::of(dialect, "assistant\n<think>\n", false);
        let with = |tools| {
            read_with(
                Reading { dialect, tools, start: start.clone(), ..Reading::default() },
                text,
                true,
            )
        };
        assert_eq!(with(tools()), with(Arc::default()), "{text}");
        with(tools()).0
    };
    for text in [
        "I may write <tool_call> and </tool_call>.",
        "<tool_call>",
        "The form is <tool_call>{\"name\": \"other\"}</tool_call>, no more.",
        "Models write <think> first.",
        "a\n\n<tool_call> b",
    ] {
        assert_eq!(shown(text), format!("{{{text}}}"));
        assert_eq!(shown(&format!("{text}\n</think>\n\nb")), format!("{{{text}}}b"));
    }
    let call = "<tool_call>{\"name\": \"f\"}</tool_call>";
    let dialect = dialect("hermes", "qwen3");
    let start = Start::of(dialect, "<think>", false);
    let reading = Reading { dialect, tools: tools(), start, ..Reading::default() };
    let text = format!("a <tool_call> {call}\n</think>\n\nb </think>");
    assert_eq!(read_with(reading, &text, true).0, "{a <tool_call>}f({})b </think>");
}

#[test]
fn an_answer_that_is_one_object_may_be_a_call() {
    let object = "{\"name\": \"f\", \"arguments\": {\"city\": \"a } b\"}}";
    let shown = "f({\"city\": \"a } b\"})";
    for text in [
        object.to_owned(),
        format!(" \n{object}\n\n"),
        format!("```json\n{object}\n```"),
        format!("```\n{object}```\n"),
        format!("```json\n{object}"),
        "{\"arguments\": {\"city\": \"a } b\"}, \"name\": \"f\"}".to_owned(),
    ] {
        check("hermes", &text, shown, 1);
        check("generic", &text, shown, 1);
    }
    for text in [
        format!("{object}\n\nThis calls f."),
        format!("Here:\n```json\n{object}\n```"),
        format!("```json\n{object}\n```\nThat was it."),
        format!("```json\n{object}\n{object}\n```"),
        format!("```json {object}```"),
        format!("`{object}`"),
        object.replace("\"f\"", "\"nobody\""),
        "{\"name\": \"f\"}".to_owned(),
        "{\"name\": \"f\", \"arguments\": [1]}".to_owned(),
        "{\"name\": \"f\", \"arguments\": {}, \"more\": 1}".to_owned(),
        "{\"name\": \"f\", \"arguments\": {".to_owned(),
        "```json\n[1]\n```".to_owned(),
        "```".to_owned(),
    ] {
        check_said("hermes", &text);
    }
    let bound = |bound| {
        let dialect = dialect("hermes", "none");
        read_with(Reading { dialect, tools: tools(), bound, ..Reading::default() }, object, true).1
    };
    assert_eq!((bound(false), bound(true)), (1, 0), "a grammar keeps calls behind their mark");
    let cut = Reading { dialect: dialect("hermes", "none"), tools: tools(), ..Reading::default() };
    assert_eq!(read_with(cut, object, false), (object.to_owned(), 0));
    let behind = format!("<think>Hm.</think>\n\n{object}");
    check("hermes", &behind, &format!("{{Hm.}}{shown}"), 1);
    let both = "{\"a\": 1} <tool_call>{\"name\": \"f\"}</tool_call>";
    check("hermes", both, "{\"a\": 1}f({})", 1);
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
    for calls in ["llama3_json", "hermes"] {
        let dialect = dialect(calls, "none");
        let mut parser = Parser::new(Reading { dialect, tools: tools(), ..Reading::default() });
        let mut parts = Parts::default();
        parser.push("{\"city\": \"Par", &mut parts);
        assert_eq!(parts.as_content(), Some("{\"city\": \"Par"), "{calls}");
    }
}

#[test]
fn a_call_that_is_cut_stays_as_far_as_it_came() {
    let reading =
        || Reading { dialect: dialect("hermes", "qwen3"), tools: tools(), ..Reading::default() };
    let cut = |text: &str| read_with(reading(), text, false);
    assert_eq!(cut("<tool_call>{\"name\": \"f\", \"argu"), ("f()".into(), 0));
    assert_eq!(cut("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\""), ("f({\"a\")".into(), 0));
    assert_eq!(cut("Hi <tool_ca"), ("Hi ".into(), 0));
    // The arguments object is complete, and the model ended the answer there.
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
    assert_eq!(with("qwen3", "assistant\n", false, "b</think>c"), "b</think>c");
    assert_eq!(with("qwen3", "assistant\n", false, "</think>c"), "c");
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
    // A missing mark, the format of another family, and an older format.
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

/// Returns the number of bytes that a parser scans for white space after `prefix`, if characters
/// arrive one at a time.
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
