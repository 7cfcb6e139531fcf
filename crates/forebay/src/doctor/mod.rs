//! `forebay doctor`: facts about this machine that matter for serving, in plain words, with advice.

mod machine;
mod software;

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use forebay_hub::Settings;
use serde::Serialize;
use serde_json::json;

use crate::model::find_python;

#[derive(Debug, Args)]
pub(crate) struct DoctorFlags {
    /// Print a JSON object: `version`, `serves`, and `findings` with `what`, `state` (ok, note or
    /// problem), `says` and `advice`.
    #[arg(long)]
    json: bool,
    /// Do not contact the hub.
    #[arg(long)]
    offline: bool,
    /// Folder for downloads [default: the hub's own cache].
    #[arg(long, value_name = "DIR")]
    download_dir: Option<PathBuf>,
    /// Python interpreter [default: the one beside this program, else the virtual environment's,
    /// else python3].
    #[arg(long, env = "FOREBAY_PYTHON", value_name = "FILE")]
    python: Option<PathBuf>,
}

/// A fact that was checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Finding {
    what: &'static str,
    state: State,
    says: String,
    /// The advice for the user.
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Ok,
    /// The machine can serve; other settings or components would be better.
    Note,
    /// The machine can't serve.
    Problem,
}

impl Finding {
    fn ok(what: &'static str, says: impl Into<String>) -> Self {
        Self { what, state: State::Ok, says: says.into(), advice: None }
    }

    fn note(what: &'static str, says: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { what, state: State::Note, says: says.into(), advice: Some(advice.into()) }
    }

    fn problem(what: &'static str, says: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { what, state: State::Problem, says: says.into(), advice: Some(advice.into()) }
    }
}

/// Checks the machine and prints the findings. Fails if a finding prevents serving.
pub(crate) fn run(flags: &DoctorFlags) -> Result<()> {
    let settings = Settings::from_env(flags.download_dir.as_deref(), flags.offline)?;
    let python = find_python(flags.python.as_deref());
    let mut findings = machine::findings();
    findings.extend(software::findings(&python, &settings));
    let problems = findings.iter().filter(|finding| finding.state == State::Problem).count();
    let mut out = io::stdout().lock();
    if flags.json {
        let version = env!("CARGO_PKG_VERSION");
        let all = json!({"version": version, "serves": problems == 0, "findings": findings});
        writeln!(out, "{}", serde_json::to_string_pretty(&all)?)?;
    } else {
        write!(out, "{}", text(&findings))?;
    }
    match problems {
        0 => Ok(()),
        1 => bail!("one thing prevents serving"),
        _ => bail!("{problems} things prevent serving"),
    }
}

/// Formats each finding as a line, followed by a line with its advice if there is any.
fn text(findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.what.len()).max().unwrap_or_default();
    let mut text = String::new();
    for finding in findings {
        let state = match finding.state {
            State::Ok => "ok  ",
            State::Note => "note",
            State::Problem => "FAIL",
        };
        text.push_str(&format!("{state}  {:width$}  {}\n", finding.what, finding.says));
        if let Some(advice) = &finding.advice {
            text.push_str(&format!("{:indent$}-> {advice}\n", "", indent = width + 8));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_stands_below_what_it_is_about() {
        let findings = [
            Finding::ok("memory", "7 GB"),
            Finding::problem("python", "there is none", "install it"),
        ];
        let expected = "\
ok    memory  7 GB
FAIL  python  there is none
              -> install it
";
        assert_eq!(text(&findings), expected);
    }
}
