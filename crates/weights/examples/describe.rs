//! Prints the JSON descriptions that hands get, for tests and benchmarks in Python.
//!
//! `describe PATH CACHE [--embedding] [--text-alone]` prints the description of the model in
//! `PATH`, with the manifest of its weights. `describe --configs` reads lines, each a JSON object
//! `{"config", "headless", "text_alone", "format", "files"}`. For each it prints `{"shape",
//! "manifest"}` or `{"error", "kind"}`. Without `files`, the manifest is null.

use std::io::{self, BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use forebay_weights::{
    Manifest, ModelError, ModelShape, Source, VectorLayer, describe, read_json, weight_files,
};
use serde_json::{Map, Value, json};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments == ["--configs"] {
        return answer_configs();
    }
    let (flags, arguments): (Vec<String>, Vec<String>) =
        arguments.into_iter().partition(|argument| argument.starts_with("--"));
    let given = |flag: &str| flags.iter().any(|given| given == flag);
    let [path, cache] = &arguments[..] else {
        eprintln!("describe PATH CACHE [--embedding] [--text-alone], or describe --configs");
        return ExitCode::FAILURE;
    };
    let (embedding, text_alone) = (given("--embedding"), given("--text-alone"));
    match described(Path::new(path), Path::new(cache), embedding, text_alone) {
        Ok(description) => {
            println!("{description}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn described(
    path: &Path,
    cache: &Path,
    embedding: bool,
    text_alone: bool,
) -> Result<Value, ModelError> {
    let (name, tokenizer, called) = (None, None, None);
    let source =
        Source { path, name, cache, weights: true, embedding, text_alone, tokenizer, called };
    let mut description = describe(source)?;
    let shape = serde_json::from_value(description["shape"].clone()).expect("it was just written");
    let format = description["format"].as_str().unwrap_or_default();
    let (scores, layers) = pooled(&description["pooling"]);
    let files = files(&description);
    let manifest = Manifest::new(format, &files, &shape, scores, &layers)?;
    description["manifest"] = manifest.to_json();
    description["files"] = json!(weight_files(&files, &layers));
    Ok(description)
}

/// Returns whether an encoder has layers that compute scores, and the layers after pooling.
fn pooled(pooling: &Value) -> (bool, Vec<VectorLayer>) {
    let scores = pooling["task"] == "score" || pooling["task"] == "classify";
    (scores, serde_json::from_value(pooling["layers"].clone()).unwrap_or_default())
}

fn files(model: &Value) -> Vec<PathBuf> {
    let files = model["files"].as_array().into_iter().flatten();
    files.filter_map(Value::as_str).map(PathBuf::from).collect()
}

fn answer_configs() -> ExitCode {
    let mut out = io::stdout().lock();
    for line in io::stdin().lock().lines() {
        let asked = line.ok().and_then(|line| read_json(line.as_bytes()).ok());
        let Some(asked) = asked else { return ExitCode::FAILURE };
        let answer = resolved(&asked).unwrap_or_else(|error| {
            let kind = match error {
                ModelError::Broken(_) => "broken",
                ModelError::Elsewhere(_) => "elsewhere",
                ModelError::Unserved(_) => "unserved",
            };
            json!({"error": error.to_string(), "kind": kind})
        });
        if writeln!(out, "{answer}").and_then(|()| out.flush()).is_err() {
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn resolved(asked: &Value) -> Result<Value, ModelError> {
    let empty = Map::new();
    let config = asked["config"].as_object().unwrap_or(&empty);
    let text_alone = asked["text_alone"] == true;
    let read = if text_alone { ModelShape::of_text } else { ModelShape::from_config };
    let shape = read(config, asked["headless"] == true)?;
    let files = files(asked);
    if files.is_empty() {
        return Ok(json!({"shape": shape, "manifest": null}));
    }
    let format = asked["format"].as_str().unwrap_or("safetensors");
    let manifest = Manifest::new(format, &files, &shape, asked["scores"] == true, &[])?;
    Ok(json!({"shape": shape, "manifest": manifest.to_json()}))
}
