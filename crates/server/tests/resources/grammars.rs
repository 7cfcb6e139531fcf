//! Bytes that compiled grammars and their matchers need, compared to the bytes that are charged.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forebay_engine::Constraint;
use forebay_grammar::{
    Bounds, Constraints, Form, GrammarConfig, GrammarError, Grammars, Source, ThreadStart,
    WantedForm,
};
use forebay_text::Tokenizer;
use serde_json::{Map, Value, json};

use crate::alone;
use crate::counting::{live, mark, peak};

const EOS: i32 = 0;
const VOCABULARY: u32 = 2048;
const MIB: usize = 1 << 20;
const HOUR: Duration = Duration::from_secs(3600);
/// Bytes of threads, the trie and tables, which are allocated for any grammar.
const NOISE: usize = 128 << 10;

struct Compiler {
    grammars: Grammars,
}

impl Compiler {
    /// Creates a compiler, and waits until its trie is built.
    async fn new(config: GrammarConfig) -> Self {
        let file = "../text/tests/data/tiny-llama-tokenizer.json";
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        let tokenizer = Arc::new(Tokenizer::from_file(&file).unwrap());
        let start: ThreadStart = Arc::new(|thread, work| thread.spawn(work));
        // Generous limits: a slow machine must not abandon a compilation.
        let config = GrammarConfig { grammar_timeout: HOUR, patience: HOUR, ..config };
        let grammars = Grammars::new(config, tokenizer, &[EOS], VOCABULARY, &start).unwrap();
        let compiler = Self { grammars };
        let first = compiler.made(0, &Form::Regex("first".into()).into(), 1).await.unwrap();
        drop(first);
        compiler
    }

    async fn made(
        &self,
        client: u64,
        source: &Source,
        choices: usize,
    ) -> Result<Constraints, GrammarError> {
        let wanted = WantedForm {
            source: Some(source.clone()),
            reasoning: None,
            bounds: Bounds { ends: [EOS].into(), ..Bounds::default() },
            choices,
            said: Vec::new(),
            client,
        };
        self.grammars.constraints(wanted).await
    }
}

/// Accepts one token, for which a matcher is created.
fn step(constraint: &mut dyn Constraint) {
    let mut words = [0; VOCABULARY.div_ceil(32) as usize];
    constraint.mask(&mut words).unwrap();
    let token =
        (1..VOCABULARY.cast_signed()).find(|&id| words[id as usize / 32] >> (id % 32) & 1 == 1);
    constraint.accept(token.unwrap()).unwrap();
    constraint.mask(&mut words).unwrap();
}

/// Creates a grammar in which each terminal is two copies of the next terminal.
fn doubled(lines: usize, salt: usize) -> Source {
    let mut text = String::from("start: T0\n");
    for line in 0..lines {
        writeln!(text, "T{line}: T{0} T{0}", line + 1).unwrap();
    }
    writeln!(text, "T{lines}: /[a-{}]/", char::from(b'b' + salt as u8)).unwrap();
    Form::Lark(text.into()).into()
}

fn schema(value: &Value) -> Source {
    Form::JsonSchema(value.to_string().into()).into()
}

fn properties(count: usize) -> Source {
    let properties: Map<String, Value> = (0..count)
        .map(|at| (format!("property{at}"), json!({"type": "string", "maxLength": 10 + at % 50})))
        .collect();
    let required: Vec<&String> = properties.keys().collect();
    schema(&json!({
        "type": "object",
        "required": required,
        "properties": properties,
        "additionalProperties": false,
    }))
}

fn strings(count: usize) -> Vec<String> {
    (0..count).map(|at| format!("{at} and a word of it")).collect()
}

/// Creates a chain of rules, each within `groups` nested groups, into which the compiler recurses.
fn chain(rules: usize, groups: usize) -> Source {
    let mut text = String::from("start: r0\n");
    let (open, close) = ("(".repeat(groups), ")".repeat(groups));
    for rule in 0..rules {
        // Without the alternative, all text would be forced, and matchers would start with this
        // text.
        writeln!(text, "r{rule}: \"a\" {open}r{}{close} | \"b\"", rule + 1).unwrap();
    }
    writeln!(text, "r{rules}: \"b\"").unwrap();
    Form::Lark(text.into()).into()
}

/// Returns sources of each kind, small and large.
fn sources() -> Vec<(&'static str, Source)> {
    let terminals = |count: usize| -> Source {
        let names: Vec<String> = (0..count).map(|at| format!("T{at}")).collect();
        let mut text = format!("start: ({})+\n", names.join(" | "));
        for at in 0..count {
            writeln!(text, "T{at}: /[a-z]*{at}[a-z]*/").unwrap();
        }
        Form::Lark(text.into()).into()
    };
    let rules: String =
        (0..1000).map(|at| format!("r{at} ::= \"a{at}\" | \"b\" r{}\n", at / 2)).collect();
    let items =
        json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}});
    let tag = json!({
        "structures": (0..50).map(|at| json!({"begin": format!("<f{at}>"), "schema": items, "end": "</f>"})).collect::<Vec<_>>(),
        "triggers": ["<f"],
    });
    vec![
        ("a word", Form::Regex("yes|no".into()).into()),
        ("any JSON", Form::JsonObject.into()),
        ("a small schema", properties(3)),
        ("100 properties", properties(100)),
        ("2000 properties", properties(2000)),
        ("enum of 1000", schema(&json!({"enum": strings(1000)}))),
        ("enum of 20000", schema(&json!({"enum": strings(20_000)}))),
        ("choice of 200", Form::Choice(strings(200).into()).into()),
        ("choice of 400", Form::Choice(strings(400).into()).into()),
        ("terminals doubled 5 times", doubled(5, 0)),
        ("terminals doubled 10 times", doubled(10, 0)),
        ("terminals doubled 14 times", doubled(14, 0)),
        ("50 terminals", terminals(50)),
        ("400 terminals", terminals(400)),
        ("a counted expression", Form::Regex("x0.*a.{18}b.{18}c.{18}".into()).into()),
        ("an expression of optional letters", Form::Regex("[a-z]?".repeat(100).into()).into()),
        ("classes of Unicode", Form::Regex(r"(\w\W){20}\p{Greek}".into()).into()),
        ("GBNF of 1000 rules", Form::Ebnf(format!("root ::= r999\n{rules}").into()).into()),
        ("a chain of rules", chain(2000, 0)),
        ("a chain of groups", chain(80, 22)),
        ("a structural tag", Form::StructuralTag(tag.to_string().into()).into()),
    ]
}

#[tokio::test]
async fn compiled_forms_take_what_is_counted_for_them() {
    let _alone = alone().await;
    let compiler =
        Compiler::new(GrammarConfig { grammar_cache_bytes: 1 << 30, ..GrammarConfig::default() })
            .await;
    let mut wrong = Vec::new();
    // Keep all results: bytes that are freed in the meantime would be missing in the measurement.
    let mut all = Vec::new();
    for (name, source) in sources() {
        let (kept_before, before) = (compiler.grammars.stats().kept_bytes, mark());
        let made = compiler.made(1, &source, 2).await;
        let mut made = made.unwrap_or_else(|error| panic!("{name}: {error}"));
        let kept = live().saturating_sub(before);
        let counted = compiler.grammars.stats().kept_bytes - kept_before;
        let copies_counted = (made.bytes - counted.min(made.bytes)) / 2;
        let before = live();
        made.choices.iter_mut().for_each(|choice| step(&mut **choice));
        let copy = live().saturating_sub(before) / 2;
        println!(
            "{name}: kept {kept} counted {counted} peak {}, a copy {copy} counted {copies_counted}",
            peak(before)
        );
        if counted + NOISE < kept || counted > 4 * kept + NOISE {
            wrong.push(format!("{name}: {kept} bytes are kept, {counted} are counted"));
        }
        if copies_counted + NOISE < copy || copies_counted > 4 * copy + NOISE {
            wrong.push(format!("{name}: a copy takes {copy} bytes, {copies_counted} are counted"));
        }
        all.push(made);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn choices_that_wait_have_no_matcher() {
    const CHOICES: usize = 4096;
    let _alone = alone().await;
    let compiler = Compiler::new(GrammarConfig::default()).await;
    let source = doubled(13, 0);
    drop(compiler.made(1, &source, 1).await.unwrap());
    let before = mark();
    let made = compiler.made(2, &source, CHOICES).await.unwrap();
    let each = peak(before) / CHOICES;
    assert!(each < 1024, "{each} bytes each");
    // Even so, the choices are charged for matchers, because each may need one later.
    assert!(made.bytes > CHOICES * MIB / 4, "{} bytes", made.bytes);
}

#[tokio::test]
async fn what_one_client_has_compiled_is_bounded_and_leaves_others_theirs() {
    const CACHE: usize = 24 * MIB;
    let _alone = alone().await;
    let compiler =
        Compiler::new(GrammarConfig { grammar_cache_bytes: CACHE, ..GrammarConfig::default() })
            .await;
    let own = properties(20);
    drop(compiler.made(2, &own, 1).await.unwrap());
    let before = mark();
    for salt in 0..12 {
        drop(compiler.made(1, &doubled(13, salt), 1).await.unwrap());
        let stats = compiler.grammars.stats();
        assert!(stats.kept_bytes <= CACHE, "{}", stats.kept_bytes);
    }
    let kept = live().saturating_sub(before);
    assert!(kept <= CACHE + NOISE, "{kept} bytes are kept");
    let compiled = compiler.grammars.stats().compiled;
    drop(compiler.made(2, &own, 1).await.unwrap());
    assert_eq!(compiler.grammars.stats().compiled, compiled, "it was compiled again");
}

/// Grammars of some kilobytes whose compiled form would need gigabytes are rejected.
#[tokio::test]
async fn what_would_become_large_is_refused_before_it_is() {
    let _alone = alone().await;
    let compiler = Compiler::new(GrammarConfig::default()).await;
    let lines = |lines: usize| doubled(lines, 0);
    let wide =
        format!("start: A\nA:{}\nB:{}\nC: /[ab]/\n", " B".repeat(60_000), " C".repeat(60_000));
    let chain: String = (0..15_000).map(|at| format!("r{at}: r{}\n", at + 1)).collect();
    let attacks: Vec<(&str, Source, usize)> = vec![
        ("19 doublings", lines(19), MIB),
        ("60 doublings", lines(60), MIB),
        ("60 000 of 60 000", Form::Lark(wide.into()).into(), 16 * MIB),
        (
            "a chain of rules",
            Form::Lark(format!("start: r0\n{chain}r15000: \"a\"\n").into()).into(),
            16 * MIB,
        ),
        ("classes of Unicode", Form::Regex(r"\w".repeat(15_000).into()).into(), MIB),
        ("enum of 60 000", schema(&json!({"enum": strings(60_000)})), 256 * MIB),
    ];
    for (name, source, most) in attacks {
        let before = mark();
        let error = compiler.made(1, &source, 1).await.unwrap_err();
        let peak = peak(before);
        println!("{name}: {peak} bytes, {error}");
        assert!(matches!(error, GrammarError::Invalid { .. }), "{name}: {error}");
        assert!(peak < most, "{name}: {peak} bytes");
    }
    assert!(compiler.grammars.stats().kept_bytes < 16 * MIB);
}
