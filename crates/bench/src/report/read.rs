//! Reads result files: ours, and those of `bench_serving` and `vllm bench serve`.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde_json::Value;

use super::Run;

/// Reads the runs of several files, in order.
///
/// # Errors
/// A file can't be read, is not a sequence of JSON values, or contains a value that is not the
/// result of a serving benchmark.
pub(super) fn read_all(files: &[PathBuf]) -> anyhow::Result<Vec<Run>> {
    let mut runs = Vec::new();
    for file in files {
        runs.extend(read(file).with_context(|| format!("cannot use {}", file.display()))?);
    }
    Ok(runs)
}

fn read(file: &Path) -> anyhow::Result<Vec<Run>> {
    let text = std::fs::read_to_string(file)?;
    let name = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy();
    parse(&text, &name)
}

/// Parses the runs in the text of a file with the name `name`.
fn parse(text: &str, name: &str) -> anyhow::Result<Vec<Run>> {
    let text = without_python_numbers(text);
    let mut values = Vec::new();
    for value in serde_json::Deserializer::from_str(&text).into_iter::<Value>() {
        match value.context("not the JSON of a result file")? {
            Value::Array(list) => values.extend(list),
            value => values.push(value),
        }
    }
    if values.is_empty() {
        bail!("the file is empty");
    }
    let several = values.len() > 1;
    let runs = values.into_iter().enumerate().map(|(index, value)| {
        let number = index + 1;
        let source = if several { format!("{name} #{number}") } else { name.to_owned() };
        let run = Run::new(source, value);
        if !run.is_result() {
            bail!("value {number} is not the result of a serving benchmark: it has no output_throughput");
        }
        Ok(run)
    });
    runs.collect()
}

/// Replaces Python's values that JSON lacks: `NaN` by `null`, `Infinity` by the text `inf`.
fn without_python_numbers(text: &str) -> Cow<'_, str> {
    const NAMES: [(&str, &str); 3] =
        [("NaN", "null"), ("-Infinity", "\"-inf\""), ("Infinity", "\"inf\"")];
    if !NAMES.iter().any(|(name, _)| text.contains(name)) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        if let Some((name, json)) = NAMES.iter().find(|(name, _)| rest.starts_with(name)) {
            out.push_str(json);
            rest = &rest[name.len()..];
            continue;
        }
        let length = if rest.starts_with('"') {
            string_length(rest)
        } else {
            rest.chars().next().map_or(1, char::len_utf8)
        };
        out.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    Cow::Owned(out)
}

/// The length in bytes of the JSON string at the start of `text`, including quotes. An unclosed
/// string extends to the end.
fn string_length(text: &str) -> usize {
    let mut escaped = false;
    for (index, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return index + 1,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RUN: &str = r#"{"label": "one", "output_throughput": 5.0}"#;

    #[test]
    fn one_value_lines_of_values_and_lists_are_read() {
        let labels = |text: &str| -> Vec<String> {
            parse(text, "x.jsonl").unwrap().iter().map(|run| run.source().to_owned()).collect()
        };
        assert_eq!(labels(RUN), ["x.jsonl"]);
        assert_eq!(labels(&format!("{RUN}\n{RUN}\n\n")), ["x.jsonl #1", "x.jsonl #2"]);
        assert_eq!(labels(&format!("[{RUN},\n {RUN}]")), ["x.jsonl #1", "x.jsonl #2"]);
        assert_eq!(labels("{\n \"output_throughput\":\n 5\n}\n"), ["x.jsonl"]);
    }

    #[test]
    fn what_is_no_result_is_refused() {
        for text in ["", "\n", "{\"output_throughput\": 5", "3", "[]", "{\"time\": 5}", "<html>"] {
            assert!(parse(text, "x").is_err(), "{text}");
        }
        let error = parse(&format!("{RUN}\n{{\"a\":1}}"), "x").unwrap_err().to_string();
        assert!(error.contains("value 2"), "{error}");
    }

    #[test]
    fn numbers_of_python_are_understood() {
        let text = r#"{"output_throughput": 1, "request_rate": Infinity, "low": -Infinity, "mean_ttft_ms": NaN,
            "label": "NaN \" Infinity \\", "é": "NaN"}"#;
        let runs = parse(text, "x").unwrap();
        let setting = |key: &str| runs[0].setting(key).unwrap();
        assert_eq!(setting("request_rate"), "inf");
        assert_eq!(setting("low"), "-inf");
        assert_eq!(runs[0].get("mean_ttft_ms"), None);
        assert_eq!(setting("label"), "NaN \" Infinity \\");
        assert_eq!(setting("é"), "NaN");
    }

    proptest! {
        #[test]
        fn json_stays_as_it_is(text in any::<String>(), number in any::<i32>()) {
            let json = serde_json::json!({text: [number, "NaN", "-Infinity\\"]}).to_string();
            let read = without_python_numbers(&json).into_owned();
            prop_assert_eq!(read, json);
        }

        #[test]
        fn no_text_is_too_broken(text in "[\"\\\\NaInfinity{é-]{0,40}") {
            without_python_numbers(&text);
        }
    }
}
