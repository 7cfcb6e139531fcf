use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

use super::super::{ChatRender, ChatTemplate, Guard, Renderer};
use super::{RenderProcess, render_templates};
use crate::error::TextError;

const CHILD: &str = "FOREBAY_TEST_RENDERS";

/// Returns a command that runs [`the_process_that_renders`] of this test program.
fn start() -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "template::isolated::tests::the_process_that_renders", "--nocapture"]);
    command.env(CHILD, "1");
    command
}

/// The process that these tests start; it is not a test itself.
#[test]
fn the_process_that_renders() {
    if std::env::var_os(CHILD).is_some() {
        render_templates().expect("a server at standard input");
    }
}

fn isolated(source: &str) -> Result<ChatTemplate, TextError> {
    ChatTemplate::isolated(source, Some("<s>"), None, &BTreeMap::new(), start)
}

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

/// Templates that would crash a server that renders them in its own process.
const BOMBS: [&str; 8] = [
    "{{ '%9999999999d'|format(1) }}",
    "{% set n = namespace(x='xxxxxxxx') %}{% for i in range(34) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(20) %}{% set n.x = n.x.replace('a', 'aaaa') %}{% endfor %}",
    "{{ range(99999)|join('x' * 100000) }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x|length }}",
    "{{ 'x'*99999999 ~ 'x'*99999999 ~ 'x'*99999999 ~ 'x'*99999999 ~ 'x'*99999999 ~ 'x'*99999999 }}",
    "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% for j in range(5) %}{% set n.x = [n.x] %}{% endfor %}{% endfor %}",
    "{% set n = namespace(x=[], y=[]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
];

#[test]
fn a_template_that_takes_everything_is_refused_at_the_start() {
    for source in BOMBS {
        let refused = isolated(source);
        assert!(matches!(refused, Err(TextError::Costly(_))), "{source:.60} {refused:.300?}");
    }
}

#[test]
fn a_template_that_waits_for_a_word_costs_that_chat_alone() {
    for bomb in BOMBS {
        // Constants are evaluated when the template is compiled.
        if bomb.contains("'x'*") {
            continue;
        }
        let source = format!(
            "{{% for m in messages %}}{{{{ m.content }}}}{{% if m.content == 'word' %}}{bomb}{{% endif %}}{{% endfor %}}"
        );
        let template = isolated(&source).expect("a template");
        for _ in 0..2 {
            let word = user("word");
            let refused = template.render(&ChatRender::new(&word));
            assert!(matches!(refused, Err(TextError::Costly(_))), "{bomb:.60} {refused:.300?}");
            let other = user("other");
            assert_eq!(template.render(&ChatRender::new(&other)).as_deref(), Ok("other"));
        }
    }
}

#[test]
fn chats_that_share_a_message_share_no_end() {
    let source = format!(
        "{{% for m in messages %}}{{{{ m.content }}}}{{% if m.content == 'word' %}}{}{{% endif %}}{{% endfor %}}",
        BOMBS[1]
    );
    let template = isolated(&source).expect("a template");
    let long = "x".repeat(100 << 10);
    let contents = ["first", "word", "second", &long, "word", "word", "third"];
    let chats: Vec<_> = contents.iter().map(|content| user(content)).collect();
    let mut requests: Vec<_> = chats.iter().map(ChatRender::new).collect();
    requests[0].continue_final_message = true;
    requests[0].add_generation_prompt = true;
    let rendered = template.render_all(&requests);
    assert!(matches!(rendered[0], Err(TextError::Template(_))), "{:?}", rendered[0]);
    for (content, rendered) in contents.iter().zip(&rendered).skip(1) {
        match *content {
            "word" => assert!(matches!(rendered, Err(TextError::Costly(_))), "{rendered:.300?}"),
            content => assert_eq!(rendered.as_deref(), Ok(content)),
        }
    }
}

#[test]
fn chats_that_come_together_wake_one_process() {
    let started = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&started);
    let counting = move || {
        counted.fetch_add(1, Ordering::Relaxed);
        start()
    };
    let source = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let template = ChatTemplate::isolated(source, None, None, &BTreeMap::new(), counting);
    let template = template.expect("a template");
    let chats: Vec<_> = (0..100).map(|number| user(&format!("chat {number}"))).collect();
    let requests: Vec<_> = chats.iter().map(ChatRender::new).collect();
    let rendered = template.render_all(&requests);
    let texts: Vec<_> = (0..100).map(|number| Ok(format!("chat {number}"))).collect();
    assert_eq!(rendered, texts);
    assert_eq!(started.load(Ordering::Relaxed), 1);
    assert_eq!(super::wire::fitting(&vec![vec![0; 600]; 200]), (64 << 10) / 604);
    assert_eq!(super::wire::fitting(&[vec![0; 1 << 20], vec![0]]), 1);
}

#[test]
fn a_template_that_waits_for_a_special_token_is_tried_once_at_the_start() {
    let started = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&started);
    let counting = move || {
        counted.fetch_add(1, Ordering::Relaxed);
        start()
    };
    let source = format!(
        "{{% for m in messages %}}{{{{ m.content }}}}{{% if '<|a|>' in m.content or '<|b|>' in m.content %}}{}{{% endif %}}{{% endfor %}}",
        BOMBS[1]
    );
    let template = ChatTemplate::isolated(&source, None, None, &BTreeMap::new(), counting);
    let tokens = vec!["<|a|>".to_owned(), "<|b|>".to_owned()];
    assert!(Guard::new(tokens, &template.expect("a template")).is_some());
    // The first chat ended its process, and one restart was enough.
    assert_eq!(started.load(Ordering::Relaxed), 1);
}

#[test]
fn a_rendering_has_the_memory_that_it_is_said_to_have() {
    let of = |mebibytes: usize| {
        let source = format!(
            "{{% set n = namespace(x=[]) %}}{{% for i in range({mebibytes}) %}}{{% set n.x = n.x + ['x' * (1048576 + i)] %}}{{% endfor %}}{{{{ n.x|length }}}}"
        );
        isolated(&source).and_then(|template| template.render(&ChatRender::new(&json!([]))))
    };
    assert_eq!(of(100).as_deref(), Ok("100"));
    assert!(matches!(of(600), Err(TextError::Costly(_))));
}

/// Reads a file with the chats or templates of `tests/templates.rs`.
fn file(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/templates").join(name);
    serde_json::from_slice(&std::fs::read(path).expect("test data")).expect("JSON")
}

#[test]
fn it_renders_as_the_same_process_would() {
    for name in ["smollm2.json", "qwen3.json", "mistral.json"] {
        let file = file(name);
        let source = file["source"].as_str().expect("a source");
        let pad = BTreeMap::from([("pad_token".to_owned(), "<pad>".to_owned())]);
        let here = ChatTemplate::new(source, Some("<s>"), Some("</s>"), &pad).expect("a template");
        let there = ChatTemplate::isolated(source, Some("<s>"), Some("</s>"), &pad, start)
            .expect("a template");
        assert_eq!(here.content_format(), there.content_format());
        assert_eq!(here.adaptations(), there.adaptations());
        for case in file["cases"].as_array().expect("cases") {
            let flag = |name: &str| case[name].as_bool().unwrap_or(false);
            let chat = ChatRender {
                messages: &case["messages"],
                tools: case.get("tools"),
                documents: case.get("documents"),
                add_generation_prompt: flag("add_generation_prompt"),
                continue_final_message: flag("continue_final_message"),
                kwargs: case["kwargs"].as_object(),
            };
            assert_eq!(here.render(&chat), there.render(&chat), "{name}");
        }
    }
}

#[test]
fn a_process_that_others_ended_is_replaced() {
    let template = isolated("{{ messages[0].content }}").expect("a template");
    let chat = user("text");
    for _ in 0..2 {
        assert_eq!(template.render(&ChatRender::new(&chat)).as_deref(), Ok("text"));
        let Renderer::Processes(pool) = &template.renderer else { panic!("no processes") };
        let mut idle = pool.idle.lock();
        assert_eq!(idle.len(), 1);
        idle[0].child.kill().expect("a process");
        idle[0].child.wait().expect("an end");
    }
}

#[test]
fn what_is_no_template_is_said_so() {
    let refused = isolated("{% if %}");
    assert!(matches!(refused, Err(TextError::Template(_))), "{refused:?}");
    let none = ChatTemplate::isolated("", None, None, &BTreeMap::new(), || {
        Command::new("/nonexistent/forebay")
    });
    assert!(matches!(none, Err(TextError::Renderer(_))), "{none:?}");
    let other =
        ChatTemplate::isolated("", None, None, &BTreeMap::new(), || Command::new("/bin/true"));
    assert!(matches!(other, Err(TextError::Renderer(_))), "{other:?}");
}

#[test]
fn a_process_has_no_variables_but_a_few() {
    let mut process = RenderProcess::spawn(start()).expect("a process");
    // The process responds to its first message once it is running.
    let setup = super::Setup { source: String::new(), special_tokens: BTreeMap::new() };
    process.ask(&[setup.to_bytes()]).expect("a process");
    process.answer(100).expect("an answer").expect("a template");
    let environ = std::fs::read(format!("/proc/{}/environ", process.child.id())).expect("a file");
    let names: Vec<&[u8]> = environ
        .split(|&byte| byte == 0)
        .filter_map(|variable| variable.split(|&byte| byte == b'=').next())
        .filter(|name| !name.is_empty())
        .collect();
    let known = [&super::ENVIRONMENT[..], &[CHILD]].concat();
    assert!(std::env::var_os("PATH").is_some());
    assert!(names.iter().all(|name| known.iter().any(|known| known.as_bytes() == *name)));
}
