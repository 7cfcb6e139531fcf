//! Findings about Python, the caches and the hub.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use forebay_hand::without_keys;
use forebay_hub::{Settings, Token, free, size};
use serde::Deserialize;

use super::Finding;
use crate::gpus::Gpus;
use crate::{models, python};

/// With less free disk space than this (in bytes), few models can be stored.
const LITTLE_ROOM: u64 = 2_000_000_000;
/// The longest time to wait for the hub's response.
const PATIENCE: Duration = Duration::from_secs(5);
/// The packages that the PyTorch hand imports.
const NEEDED: &str = "torch, numpy, safetensors, tokenizers, gguf";

/// The output of `python -m forebay.installed`.
#[derive(Debug, Deserialize)]
struct Installed {
    python: String,
    torch: Option<String>,
    numpy: Option<String>,
    safetensors: Option<String>,
    tokenizers: Option<String>,
    gguf: Option<String>,
}

/// Findings about installed packages, the caches, and the hub.
pub(super) fn findings(python: &Path, settings: &Settings) -> Vec<Finding> {
    let mut findings = interpreter(python, Gpus::find().any());
    findings.push(cache("models", &settings.hub_cache, "HF_HOME"));
    findings.push(cache("cache", &settings.cache, "FOREBAY_CACHE"));
    findings.push(hub(settings, python));
    findings
}

/// Returns the finding that Python or a package is missing or too old. The finding is a problem if
/// there is a GPU, which needs the PyTorch hand. Otherwise it is a note, because the Rust hand
/// serves on CPUs.
fn lacking(what: &'static str, says: &str, advice: impl Into<String>, gpu: bool) -> Finding {
    if gpu {
        return Finding::problem(what, says, advice);
    }
    Finding::note(what, format!("{says}; the Rust hand serves without it"), advice)
}

fn interpreter(path: &Path, gpu: bool) -> Vec<Finding> {
    const WHAT: &str = "Python";
    let mut command = Command::new(path);
    without_keys(&mut command);
    command.args(python::arguments("forebay.installed")).stdin(Stdio::null());
    let shown = path.display();
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => {
            let says = format!("{shown} can't be run: {error}");
            let advice = "install Python 3.10 or newer, or name one with --python";
            return vec![lacking(WHAT, &says, advice, gpu)];
        }
    };
    match serde_json::from_slice(&output.stdout) {
        Ok(installed) if output.status.success() => packages(&installed, &shown.to_string(), gpu),
        _ => {
            let errors = String::from_utf8_lossy(&output.stderr);
            let last = errors.lines().last().unwrap_or("no answer").to_owned();
            let says = format!("{shown} does not find Forebay's package: {last}");
            let advice =
                "install Forebay with the pip of this Python, or name another one with --python";
            vec![lacking(WHAT, &says, advice, gpu)]
        }
    }
}

fn packages(installed: &Installed, python: &str, gpu: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    let version = &installed.python;
    let mut numbers = version.split('.').map(|part| part.parse::<u32>().unwrap_or_default());
    let old = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default()) < (3, 10);
    findings.push(if old {
        let advice = "PyTorch's hand needs Python 3.10 or newer: name one with --python";
        lacking("Python", &format!("{version} ({python})"), advice, gpu)
    } else {
        Finding::ok("Python", format!("{version} ({python})"))
    });
    let others = [&installed.numpy, &installed.safetensors, &installed.tokenizers, &installed.gguf];
    findings.push(match &installed.torch {
        Some(torch) if others.iter().all(|version| version.is_some()) => {
            Finding::ok("PyTorch", torch.clone())
        }
        torch => {
            let says = match torch {
                None => "it is not installed".to_owned(),
                Some(torch) => format!("{torch}, and a package beside it is missing"),
            };
            let advice =
                format!("PyTorch's hand needs {NEEDED}: `{python} -m pip install` what is missing");
            lacking("PyTorch", &says, advice, gpu)
        }
    });
    findings
}

fn cache(what: &'static str, folder: &Path, variable: &str) -> Finding {
    let shown = folder.display();
    let there = folder.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let writable = rustix::fs::access(there, rustix::fs::Access::WRITE_OK).is_ok();
    let room = free(folder).unwrap_or_default();
    let says = format!("{shown}, {} free", size(room));
    let elsewhere = format!("set {variable} to a folder of yours, or give --download-dir");
    if !writable {
        let says = format!("{shown} can't be written: nothing can be downloaded or kept there");
        return Finding::note(what, says, elsewhere);
    }
    if room < LITTLE_ROOM {
        return Finding::note(
            what,
            says,
            format!("make room (`forebay ls`, `forebay rm`), or {elsewhere}"),
        );
    }
    Finding::ok(what, says)
}

fn hub(settings: &Settings, python: &Path) -> Finding {
    const WHAT: &str = "hub";
    let endpoint = &settings.endpoint;
    if settings.offline {
        return Finding::ok(WHAT, format!("{endpoint} is not asked: offline"));
    }
    let settings = Settings { patience: PATIENCE, ..settings.clone() };
    let asked = models::hub(settings.clone(), python)
        .and_then(|hub| hub.token().map_err(anyhow::Error::from));
    match asked {
        Ok(Token::Unset) => Finding::ok(WHAT, format!("{endpoint} answers; no HF_TOKEN is set")),
        Ok(Token::Taken) => Finding::ok(WHAT, format!("{endpoint} answers, and takes HF_TOKEN")),
        Ok(Token::Unknown) => Finding::ok(WHAT, format!("{endpoint} answers")),
        Ok(Token::Refused) => Finding::note(
            WHAT,
            format!("{endpoint} answers, and does not take HF_TOKEN"),
            "private and gated models can't be downloaded: make a new token, or unset it",
        ),
        Err(error) => Finding::note(
            WHAT,
            error.to_string(),
            "only models that are on this machine can be served: `forebay ls` shows them",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    fn installed(python: &str, torch: Option<&str>, gguf: Option<&str>, gpu: bool) -> Vec<State> {
        let version = || Some("1".to_owned());
        let installed = Installed {
            python: python.to_owned(),
            torch: torch.map(str::to_owned),
            numpy: version(),
            safetensors: version(),
            tokenizers: version(),
            gguf: gguf.map(str::to_owned),
        };
        packages(&installed, "python3", gpu).iter().map(|finding| finding.state).collect()
    }

    #[test]
    fn a_gpu_needs_packages_and_a_processor_does_not() {
        for (gpu, bad) in [(true, State::Problem), (false, State::Note)] {
            let ok = State::Ok;
            assert_eq!(installed("3.12.1", Some("2.9.1"), Some("1"), gpu), [ok, ok]);
            assert_eq!(installed("3.9.1", Some("2.9.1"), Some("1"), gpu), [bad, ok]);
            assert_eq!(installed("3.12.1", None, Some("1"), gpu), [ok, bad]);
            assert_eq!(installed("3.12.1", Some("2.9.1"), None, gpu), [ok, bad]);
        }
    }

    #[test]
    fn an_interpreter_that_is_none_is_a_problem() {
        for path in ["/nowhere/python3", "/bin/false"] {
            let found = interpreter(Path::new(path), true);
            assert_eq!(found[0].state, State::Problem, "{found:?}");
        }
    }

    #[test]
    fn a_cache_may_be_made_later() {
        let folder = tempfile::tempdir().unwrap();
        assert!(cache("models", &folder.path().join("a/b"), "HF_HOME").says.contains(" free"));
    }
}
