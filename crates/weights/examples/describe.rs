//! Prints the description of a model in one line of JSON, as `python -m forebay.weights.describe`
//! does: for the test that compares them.
//!
//! `describe PATH CACHE [--embedding]`

use std::path::Path;
use std::process::ExitCode;

use forebay_weights::{Source, describe};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (embedding, arguments) = match arguments.split_last() {
        Some((last, rest)) if last == "--embedding" => (true, rest),
        _ => (false, &arguments[..]),
    };
    let [path, cache] = arguments else {
        eprintln!("describe PATH CACHE [--embedding]");
        return ExitCode::FAILURE;
    };
    let (path, cache) = (Path::new(path), Path::new(cache));
    match describe(Source { path, name: None, cache, weights: true, embedding }) {
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
