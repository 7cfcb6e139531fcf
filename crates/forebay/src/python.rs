//! How the interpreter is started.

use std::ffi::OsString;

/// What the interpreter runs before the module.
const ISOLATED: &str = include_str!("isolated.py");

/// Arguments that have the interpreter run one of our modules, as `-m` would, but isolated (`-I`):
/// a `json.py` in the current directory is nobody's `json`. What the module is given comes behind.
pub(crate) fn arguments(module: &str) -> Vec<OsString> {
    vec!["-I".into(), "-c".into(), ISOLATED.into(), module.into()]
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::{Command, Output};

    use super::*;

    /// Runs a module of a package of our name, with a folder full of traps as the current one.
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
    fn a_relative_path_finds_nothing() {
        assert!(!run(|_| "../package".to_owned()).status.success());
    }
}
