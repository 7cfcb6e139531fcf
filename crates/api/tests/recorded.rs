//! Compares how each API handles each field with the recordings in `recorded/`.
//!
//! The fields and values are listed here by hand, independent of the tables in `src`. `RECORD=1`
//! writes the recordings again; then `git diff` shows what changed for clients.

mod corpus;

use std::fmt::Debug;
use std::fmt::Write as _;
use std::path::PathBuf;

use corpus::{Fields, faults};
use forebay_api::limits::Limited;
use forebay_api::{
    ApiError, ChatRequest, ClassifyRequest, CompletionRequest, DetokenizeRequest, EmbeddingRequest,
    GenerateRequest, GenerationDefaults, Limits, LlamaRequest, MessagesRequest, OllamaChatRequest,
    OllamaEmbedRequest, OllamaEmbeddingsRequest, OllamaGenerateRequest, OllamaShowRequest,
    RerankRequest, ResponsesRequest, ScoreRequest, TokenizeRequest, parse_request,
};
use serde_json::Value;

const LIMITS: Limits =
    Limits { context_length: 100, prompt_length: 100, vocab_size: 1000, replicas: 2, images: 2 };

const DEFAULTS: GenerationDefaults = GenerationDefaults {
    temperature: Some(0.7),
    top_p: Some(0.9),
    top_k: Some(40),
    min_p: None,
    repetition_penalty: Some(1.1),
};

/// The result of parsing and validating a body.
struct Outcome {
    /// The validated request, or the error.
    result: Result<String, ApiError>,
    /// Names of parameters that have no effect.
    unread: Vec<String>,
    /// The number of values kept unparsed, and the bytes of embeddings and images.
    weight: String,
}

fn outcome<T: Limited, V: Debug>(
    body: &str,
    validate: impl FnOnce(T, &mut Vec<String>) -> Result<V, ApiError>,
) -> Outcome {
    let mut weight = String::new();
    let parsed = parse_request::<T>(body.as_bytes(), |found| {
        weight = format!("{}/{}", found.values, found.embeds);
        Ok(())
    });
    let (result, unread) = match parsed {
        Err(error) => (Err(error), Vec::new()),
        Ok(parsed) => {
            let mut unread = parsed.unread;
            let valid = validate(parsed.request, &mut unread);
            (valid.map(|valid| format!("{valid:#?}")), unread)
        }
    };
    Outcome { result, unread, weight }
}

/// Returns `text`, or for a long text its beginning, its length and a hash of the whole.
fn short(text: &str) -> String {
    const MOST: usize = 160;
    if text.len() <= MOST {
        return text.to_owned();
    }
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let end = (0..=MOST).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    format!("{}...{} {hash:016x}", &text[..end], text.len())
}

/// Returns the beginning of a body on one line, as its label.
fn beginning(label: &str) -> String {
    let line = short(label).replace('\n', "\\n");
    if line.chars().count() <= 60 {
        return line;
    }
    line.chars().take(57).chain("...".chars()).collect()
}

/// Returns the lines of `found` that differ from those of `base`, joined to one line.
fn difference(base: &str, found: &str) -> String {
    let (base, found): (Vec<&str>, Vec<&str>) = (base.lines().collect(), found.lines().collect());
    let same = |(a, b): &(&&str, &&str)| a == b;
    let head = base.iter().zip(&found).take_while(same).count();
    let rest = base.len().min(found.len()) - head;
    let tail = base.iter().rev().zip(found.iter().rev()).take(rest).take_while(same).count();
    let changed = &found[head..found.len() - tail];
    if changed.is_empty() && base.len() == found.len() {
        return "as the base".to_owned();
    }
    changed.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}

/// Returns `body` with `value` at a path such as `messages.0.role`.
fn with(mut body: Value, path: &str, value: Value) -> Value {
    let mut place = &mut body;
    for step in path.split('.') {
        place = match step.parse::<usize>() {
            Ok(index) => {
                if !place.is_array() {
                    *place = Value::Array(Vec::new());
                }
                let list = place.as_array_mut().expect("a list");
                while list.len() <= index {
                    list.push(Value::Null);
                }
                &mut list[index]
            }
            Err(_) => {
                if !place.is_object() {
                    *place = serde_json::json!({});
                }
                &mut place[step]
            }
        };
    }
    *place = value;
    body
}

fn check(name: &str, fields: &Fields, run: impl Fn(&str) -> Outcome) {
    let base_text = fields.base.to_string();
    let base = run(&base_text);
    let base = base.result.unwrap_or_else(|error| panic!("{name}: {error}"));
    let mut report = String::new();
    let mut line = |label: &str, body: &str| {
        let Outcome { result, unread, weight } = run(body);
        let is_valid = result.is_ok();
        let told = match result {
            Ok(valid) => short(&difference(&base, &valid)),
            Err(error) => {
                let shown = error.body().error;
                let param = shown.param.unwrap_or_default();
                let message = short(&shown.message);
                let reason = message.strip_prefix(&format!("`{param}`: ")).unwrap_or(&message);
                format!("{} {param} | {reason}", error.status())
            }
        };
        writeln!(report, "{} => {told}", beginning(label)).expect("a string");
        if !unread.is_empty() {
            writeln!(report, "    without effect: {}", unread.join(", ")).expect("a string");
        }
        if is_valid && !matches!(weight.as_str(), "" | "0/0" | "1/0") {
            writeln!(report, "    weight: {weight}").expect("a string");
        }
    };
    for (path, values) in &fields.fields {
        for value in faults().into_iter().chain(values.iter().cloned()) {
            let label = format!("{path}: {value}");
            line(&label, &with(fields.base.clone(), path, value).to_string());
        }
    }
    for body in &fields.bodies {
        line(body, body);
    }
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/recorded/{name}.txt"));
    if std::env::var_os("RECORD").is_some() {
        std::fs::write(&path, &report).expect("a recording");
    }
    let recorded = std::fs::read_to_string(&path).expect("a recording");
    let differences: Vec<String> = recorded
        .lines()
        .zip(report.lines())
        .filter(|(before, now)| before != now)
        .map(|(before, now)| format!("before {before}\n   now {now}"))
        .collect();
    assert!(
        differences.is_empty(),
        "{name}: {} lines\n{}",
        differences.len(),
        differences.join("\n")
    );
    assert_eq!(recorded.lines().count(), report.lines().count(), "{name}");
}

#[test]
fn chat() {
    check("chat", &corpus::chat(), |body| {
        outcome(body, |request: ChatRequest, _| request.validate(&DEFAULTS, LIMITS))
    });
}

#[test]
fn completions() {
    check("completions", &corpus::completions(), |body| {
        outcome(body, |request: CompletionRequest, _| request.validate(&DEFAULTS, LIMITS))
    });
}

#[test]
fn generate() {
    check("generate", &corpus::generate(), |body| {
        outcome(body, |request: GenerateRequest, _| request.validate(&DEFAULTS, LIMITS))
    });
}

#[test]
fn llama() {
    check("llama", &corpus::llama(), |body| {
        outcome(body, |request: LlamaRequest, _| request.validate(&DEFAULTS, LIMITS))
    });
}

#[test]
fn messages() {
    check("messages", &corpus::messages(), |body| {
        outcome(body, |request: MessagesRequest, ignored| {
            request.validate(&DEFAULTS, LIMITS, ignored)
        })
    });
}

#[test]
fn responses() {
    check("responses", &corpus::responses(), |body| {
        outcome(body, |request: ResponsesRequest, ignored| {
            request.validate(&[], &DEFAULTS, LIMITS, ignored)
        })
    });
}

#[test]
fn ollama_chat() {
    check("ollama_chat", &corpus::ollama_chat(), |body| {
        outcome(body, |request: OllamaChatRequest, _| request.validate(&DEFAULTS, LIMITS))
    });
}

#[test]
fn ollama_generate() {
    check("ollama_generate", &corpus::ollama_generate(), |body| {
        outcome(body, |request: OllamaGenerateRequest, _| request.validate(true, &DEFAULTS, LIMITS))
    });
}

#[test]
fn ollama_embed() {
    check("ollama_embed", &corpus::ollama_embed(), |body| {
        outcome(body, |request: OllamaEmbedRequest, _| {
            let model = request.model.clone();
            let request = request.in_openai();
            let valid = request.map(|request| request.validate(LIMITS, 8, true)).transpose()?;
            Ok((model, valid))
        })
    });
}

#[test]
fn ollama_embeddings() {
    check("ollama_embeddings", &corpus::ollama_embeddings(), |body| {
        outcome(body, |request: OllamaEmbeddingsRequest, _| {
            let model = request.model.clone();
            let request = request.in_openai();
            let valid = request.map(|request| request.validate(LIMITS, 8, true)).transpose()?;
            Ok((model, valid))
        })
    });
}

#[test]
fn ollama_show() {
    check("ollama_show", &corpus::ollama_show(), |body| {
        outcome(body, |request: OllamaShowRequest, _| Ok((request.model, request.name)))
    });
}

#[test]
fn embeddings() {
    check("embeddings", &corpus::embeddings(), |body| {
        outcome(body, |request: EmbeddingRequest, _| {
            let own = (request.model.clone(), request.task.clone());
            request.validate(LIMITS, 8, true).map(|valid| (own, valid))
        })
    });
}

#[test]
fn classify() {
    check("classify", &corpus::classify(), |body| {
        outcome(body, |request: ClassifyRequest, _| {
            let own = request.model.clone();
            request.validate(LIMITS, 3).map(|valid| (own, valid))
        })
    });
}

#[test]
fn rerank() {
    check("rerank", &corpus::rerank(), |body| {
        outcome(body, |request: RerankRequest, _| request.validate(LIMITS))
    });
}

#[test]
fn score() {
    check("score", &corpus::score(), |body| {
        outcome(body, |request: ScoreRequest, _| request.validate(LIMITS))
    });
}

#[test]
fn tokenize() {
    check("tokenize", &corpus::tokenize(), |body| {
        outcome(body, |request: TokenizeRequest, _| {
            let wanted = (request.return_token_strs, request.with_pieces);
            request.validate().map(|valid| (wanted, valid))
        })
    });
}

#[test]
fn detokenize() {
    check("detokenize", &corpus::detokenize(), |body| {
        outcome(body, |request: DetokenizeRequest, _| {
            let wanted = request.with_pieces;
            request.validate(1000).map(|valid| (wanted, valid))
        })
    });
}

/// Compares the schemas of all requests, as they are in `/openapi.json`.
#[test]
fn types() {
    use utoipa::ToSchema;
    use utoipa::openapi::RefOr;
    use utoipa::openapi::schema::Schema;

    fn add<T: ToSchema>(all: &mut Vec<(String, RefOr<Schema>)>) {
        all.push((T::name().into_owned(), T::schema()));
        T::schemas(all);
    }
    let mut all = Vec::new();
    add::<ChatRequest>(&mut all);
    add::<CompletionRequest>(&mut all);
    add::<GenerateRequest>(&mut all);
    add::<LlamaRequest>(&mut all);
    add::<MessagesRequest>(&mut all);
    add::<ResponsesRequest>(&mut all);
    add::<OllamaChatRequest>(&mut all);
    add::<OllamaGenerateRequest>(&mut all);
    add::<OllamaEmbedRequest>(&mut all);
    add::<OllamaEmbeddingsRequest>(&mut all);
    add::<OllamaShowRequest>(&mut all);
    add::<EmbeddingRequest>(&mut all);
    add::<ClassifyRequest>(&mut all);
    add::<RerankRequest>(&mut all);
    add::<ScoreRequest>(&mut all);
    add::<TokenizeRequest>(&mut all);
    add::<DetokenizeRequest>(&mut all);
    let found: serde_json::Map<String, Value> = all
        .into_iter()
        .map(|(name, schema)| {
            // Line breaks in descriptions do not matter.
            let text = serde_json::to_string(&schema).expect("JSON").replace("\\n", " ");
            (name, serde_json::from_str(&text).expect("JSON"))
        })
        .collect();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/recorded/types.json");
    if std::env::var_os("RECORD").is_some() {
        let mut text = Vec::new();
        let indent = serde_json::ser::PrettyFormatter::with_indent(b" ");
        let mut serializer = serde_json::Serializer::with_formatter(&mut text, indent);
        serde::Serialize::serialize(&found, &mut serializer).expect("JSON");
        text.push(b'\n');
        std::fs::write(path, text).expect("a recording");
    }
    let recorded = std::fs::read_to_string(path).expect("a recording");
    let recorded: serde_json::Map<String, Value> = serde_json::from_str(&recorded).expect("JSON");
    let names = |all: &serde_json::Map<String, Value>| {
        let mut names: Vec<String> = all.keys().cloned().collect();
        names.sort_unstable();
        names
    };
    assert_eq!(names(&recorded), names(&found));
    for (name, before) in &recorded {
        assert_eq!(before, &found[name], "{name}");
    }
}
