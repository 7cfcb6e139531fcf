//! Starts the Python interpreter.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

use anyhow::{Context, Result};
use forebay_hand::without_keys;

/// Code that the interpreter runs before one of our modules.
const ISOLATED: &str = include_str!("isolated.py");
/// The exit status of an interpreter that does not find our package.
const NO_PACKAGE: i32 = 3;

/// Arguments with which the interpreter runs one of our modules. They are like `-m`, but isolated
/// (`-I`): a `json.py` in the current directory is not imported. The module's own arguments follow.
pub(crate) fn arguments(module: &str) -> Vec<OsString> {
    vec!["-I".into(), "-c".into(), ISOLATED.into(), module.into()]
}

/// The error that an interpreter lacks packages of the Python hand.
#[derive(Debug)]
pub(crate) struct Incomplete {
    python: String,
    missing: String,
}

impl fmt::Display for Incomplete {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { python, missing } = self;
        write!(
            f,
            "PyTorch's hand is needed, and {python} has no {missing}: run `pip install \
             'forebay[torch]'`, or `make setup` in a clone"
        )
    }
}

impl std::error::Error for Incomplete {}

/// Interpreters that are known to have all packages. A server checks twice, and each check takes as
/// long as starting the interpreter.
static COMPLETE: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Checks that a Python hand can run, before any model is loaded for it.
///
/// # Errors
/// The interpreter does not start ([`std::io::Error`]), or lacks packages ([`Incomplete`]).
pub(crate) fn check(python: &Path) -> Result<()> {
    if COMPLETE.lock().expect("no thread panics with it").iter().any(|known| known == python) {
        return Ok(());
    }
    ask(python)?;
    COMPLETE.lock().expect("no thread panics with it").push(python.to_owned());
    Ok(())
}

/// Runs [`check`] for an interpreter that was not checked before.
fn ask(python: &Path) -> Result<()> {
    let mut command = Command::new(python);
    without_keys(&mut command);
    let output = command
        .args(arguments("forebay.needs"))
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", python.display()))?;
    let missing = String::from_utf8_lossy(&output.stdout);
    let mut missing: Vec<&str> = missing.split_whitespace().collect();
    if output.status.code() == Some(NO_PACKAGE) {
        missing = vec!["forebay"];
    }
    if missing.is_empty() {
        // Other faults of the interpreter are reported when it runs a module.
        return Ok(());
    }
    let python = python.display().to_string();
    Err(Incomplete { python, missing: missing.join(", ") }.into())
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// A shell script that replaces the interpreter.
    ///
    /// A child process writes the script. If this process did, processes that parallel tests start
    /// could inherit the open file, and a file that is open for writing can't be executed.
    pub(crate) fn interpreter(folder: &Path, script: &str) -> PathBuf {
        let file = folder.join("python");
        let write = "printf '#!/bin/sh\n%s\n' \"$1\" > \"$0\" && chmod 755 \"$0\"";
        let written = Command::new("sh").args(["-c", write]).arg(&file).arg(script).status();
        assert!(written.expect("sh runs").success());
        file
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Output;

    use super::*;

    /// Runs a module of the package in a current folder whose files must not be imported.
    fn run(path: impl Fn(&str) -> String) -> Output {
        let folder = tempfile::tempdir().expect("a folder");
        let (traps, package) = (folder.path().join("traps"), folder.path().join("package"));
        fs::create_dir_all(&traps).expect("a folder");
        fs::create_dir_all(package.join("forebay")).expect("a folder");
        for name in ["json.py", "forebay.py", "sitecustomize.py", "usercustomize.py", "runpy.py"] {
            fs::write(traps.join(name), "print('trapped')\n").expect("a file");
        }
        let module = "import json, sys; print(json.dumps([__name__, sys.argv[1:]]))\n";
        fs::write(package.join("forebay/__init__.py"), "").expect("a file");
        fs::write(package.join("forebay/asked_for_by_a_test.py"), module).expect("a file");
        Command::new("python3")
            .args(["-S"])
            .args(arguments("forebay.asked_for_by_a_test"))
            .args(["one", "--two"])
            .env("PYTHONPATH", path(package.to_str().expect("UTF-8")))
            .current_dir(&traps)
            .output()
            .expect("python3 runs")
    }

    #[test]
    fn the_current_directory_is_not_imported_from() {
        for path in
            [|package: &str| package.to_owned(), |package: &str| format!(":.:../traps:{package}")]
        {
            let output = run(path);
            assert_eq!(
                String::from_utf8_lossy(&output.stdout),
                "[\"__main__\", [\"one\", \"--two\"]]\n",
                "{output:?}"
            );
        }
    }

    #[test]
    fn packages_that_are_not_there_are_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let script = folder.path().join("python");
        let run =
            |printed: &str| ask(&testing::interpreter(folder.path(), &format!("echo {printed}")));
        let error = run("; exit 3").unwrap_err().to_string();
        assert!(error.contains("has no forebay: run `pip install 'forebay[torch]'`"), "{error}");
        assert!(run("").is_ok());
        assert!(check(&script).is_ok());
        let error = run("numpy torch").unwrap_err();
        assert!(error.is::<Incomplete>());
        let said = error.to_string();
        assert!(said.contains("has no numpy, torch: run `pip install 'forebay[torch]'`"), "{said}");
        fs::remove_file(&script).expect("the file");
        assert!(check(&script).is_ok(), "the interpreter is asked only once");
        assert!(ask(&script).unwrap_err().is::<std::io::Error>());
    }

    #[test]
    fn a_relative_path_finds_nothing() {
        assert_eq!(run(|_| "../package".to_owned()).status.code(), Some(NO_PACKAGE));
    }
}
