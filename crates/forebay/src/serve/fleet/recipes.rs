//! The models that a command line names, each with its own flags.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Error, Result, bail, ensure};
use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, CommandFactory, FromArgMatches};
use serde::Deserialize;

use crate::command::{Command, Flags};
use crate::flags::{FleetFlags, ServeFlags, fleet_flags, foreign, server_flags};

/// A model, with the flags for serving it.
#[derive(Debug)]
pub(super) struct Recipe {
    /// The model as typed.
    pub(super) source: String,
    pub(super) flags: ServeFlags,
    pub(super) aliases: Vec<String>,
    pub(super) pinned: bool,
    pub(super) idle: Option<Duration>,
    /// True if the model was found in a folder, which may also contain models that can't be served.
    pub(super) is_found: bool,
}

/// The content of the `--models-config` file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ConfigFile {
    models: Vec<Entry>,
}

/// A model in the `--models-config` file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    /// The name for requests [default: the model's own name, and the source].
    name: Option<String>,
    /// The model, as on the command line.
    source: String,
    #[serde(default)]
    aliases: Vec<String>,
    /// Flags of `serve`, which are appended to those of the command line.
    #[serde(default)]
    flags: Vec<String>,
    #[serde(default)]
    pinned: bool,
    idle_seconds: Option<f64>,
    #[serde(skip)]
    is_found: bool,
}

/// Returns all models of the command line `arguments`, from which `flags` was parsed.
///
/// # Errors
/// A file cannot be read, or flags are invalid.
pub(super) fn read(flags: &ServeFlags, arguments: &[OsString]) -> Result<Vec<Recipe>> {
    let mut entries: Vec<Entry> = flags
        .named()
        .map(|source| Entry { source: source.to_owned(), ..Entry::default() })
        .collect();
    if let Some(file) = &flags.fleet.models_config {
        let read = config(file).with_context(|| format!("--models-config {}", file.display()))?;
        entries.extend(read);
    }
    if let Some(folder) = &flags.fleet.models_dir {
        let found = in_folder(folder).with_context(|| format!("--models-dir {}", folder.display()));
        entries.extend(found?);
    }
    ensure!(!entries.is_empty(), "there is no model to serve");
    if flags.adapters.is_enabled() {
        bail!("--enable-lora: adapters are of one model, and several are served; leave it off");
    }
    if entries.len() > 1 && !flags.http.served_model_name.is_empty() {
        bail!("--served-model-name names one model: `name` in --models-config names each");
    }
    let common = common(arguments)?;
    entries.into_iter().map(|entry| recipe(entry, &common, &flags.fleet)).collect()
}

fn config(file: &Path) -> Result<Vec<Entry>> {
    let text = fs::read_to_string(file)?;
    let read: ConfigFile = match file.extension().and_then(OsStr::to_str) {
        Some("json") => serde_json::from_str(&text)?,
        Some("toml") => toml::from_str(&text)?,
        _ => bail!("expected a name that ends in .toml or .json"),
    };
    Ok(read.models)
}

/// Returns the models in a folder, sorted by name.
fn in_folder(folder: &Path) -> Result<Vec<Entry>> {
    let is_gguf = |path: &Path| path.extension().is_some_and(|kind| kind == "gguf");
    let mut found: Vec<PathBuf> = Vec::new();
    for path in listed(folder)? {
        if path.is_dir() && path.join("config.json").is_file() {
            found.push(path);
        } else if path.is_dir() {
            found.extend(listed(&path)?.into_iter().filter(|path| is_gguf(path)));
        } else if is_gguf(&path) {
            found.push(path);
        }
    }
    let entry = |path: PathBuf| {
        let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
        let name = name.and_then(OsStr::to_str).map(str::to_owned);
        let source = path.to_str().map(str::to_owned).context("a path that is no text")?;
        Ok(Entry { name, source, is_found: true, ..Entry::default() })
    };
    found.into_iter().map(entry).collect()
}

fn listed(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    paths.sort();
    Ok(paths)
}

/// Returns the flags of the command line that apply to every model, in a form that can be parsed
/// again. The server's flags are included, because its limits apply to every model.
fn common(arguments: &[OsString]) -> Result<Vec<OsString>> {
    let mut command = Flags::command();
    command.build();
    let serve = command.find_subcommand("serve").context("no such command")?.clone();
    let all = command.try_get_matches_from(arguments)?;
    let matches = all.subcommand_matches("serve").context("another command")?;
    let of_fleet = fleet_flags();
    let mut flags = Vec::new();
    for argument in serve.get_arguments().filter(|argument| !argument.is_positional()) {
        let id = argument.get_id().as_str();
        let is_typed = matches.value_source(id) == Some(ValueSource::CommandLine);
        let is_common = is_typed && !of_fleet.contains(id) && id != "model_path";
        let Some(long) = argument.get_long().filter(|_| is_common) else { continue };
        let flag = OsString::from(format!("--{long}"));
        if matches!(argument.get_action(), ArgAction::SetTrue | ArgAction::SetFalse) {
            flags.push(flag);
            continue;
        }
        for values in matches.get_raw_occurrences(id).into_iter().flatten() {
            let values: Vec<&OsStr> = values.collect();
            let delimiter = argument.get_value_delimiter();
            if delimiter.is_none() && values.len() > 1 {
                flags.push(flag.clone());
                flags.extend(values.into_iter().map(OsStr::to_owned));
                continue;
            }
            let delimiter = delimiter.map_or_else(String::new, String::from);
            let mut flag = flag.clone();
            flag.push("=");
            flag.push(values.join(OsStr::new(&delimiter)));
            flags.push(flag);
        }
    }
    Ok(flags)
}

fn recipe(entry: Entry, common: &[OsString], fleet: &FleetFlags) -> Result<Recipe> {
    let Entry { name, source, aliases, flags, pinned, idle_seconds, is_found } = entry;
    let wrong = || format!("the model {source}");
    let idle = match idle_seconds {
        None => fleet.sleep_idle_seconds,
        Some(seconds) => {
            let time = Duration::try_from_secs_f64(seconds);
            Some(time.with_context(|| format!("idle_seconds {seconds} of the model {source}"))?)
        }
    };
    let start = ["forebay", "serve", &*source].map(OsString::from).into_iter();
    let translated = foreign::translate(start.clone().chain(flags.into_iter().map(OsString::from)))
        .map_err(Error::msg)
        .with_context(wrong)?;
    check_own(&translated.arguments).with_context(wrong)?;
    let own = translated.arguments.into_iter().skip(3);
    let name = name.map(|name| OsString::from(format!("--served-model-name={name}")));
    let line = start.chain(common.iter().cloned()).chain(own).chain(name);
    let matches = Flags::command().try_get_matches_from(line).with_context(wrong)?;
    let Command::Serve(flags) = Flags::from_arg_matches(&matches)?.command else {
        bail!("the model {source}: another command than serve");
    };
    ensure!(
        !(pinned && idle_seconds.is_some()),
        "the model {source}: a pinned model is never idle"
    );
    check_supported(&flags).with_context(wrong)?;
    let idle = idle.filter(|_| !pinned);
    Ok(Recipe { source, flags: *flags, aliases, pinned, idle, is_found })
}

/// Checks that an entry contains only flags of a model.
fn check_own(arguments: &[OsString]) -> Result<()> {
    let all = Flags::command().try_get_matches_from(arguments)?;
    let matches: &ArgMatches = all.subcommand_matches("serve").context("another command")?;
    let typed = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
    let server: BTreeSet<String> = server_flags();
    match server.iter().find(|id| typed(id)) {
        Some(id) => bail!("--{} belongs to the server, and not to one model", id.replace('_', "-")),
        None => Ok(()),
    }
}

/// Refuses flags that only a server with a single model supports.
fn check_supported(flags: &ServeFlags) -> Result<()> {
    let refused = [
        ("--listen-hands", flags.replicas.listen_hands.is_some()),
        ("--placement", flags.replicas.placement.is_some()),
        ("--enable-dp-attention", flags.replicas.ranks.enable_dp_attention),
        ("--cpu-affinity", flags.replicas.cpu_affinity.is_some()),
        ("--pd", flags.replicas.pd.pd.is_some()),
        ("--disaggregation-mode", flags.replicas.pd.apart()),
        ("--record-steps", flags.run.record_steps.is_some()),
        ("--batch-dir", flags.batches.batch_dir.is_some()),
        ("--router-key", flags.sharing.router_key.is_some()),
    ];
    match refused.iter().find(|(_, given)| *given) {
        Some((flag, _)) => bail!("{flag} is for a server of one model"),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn recipes(line: &[&str]) -> Result<Vec<Recipe>> {
        let line = ["forebay", "serve"].iter().chain(line).map(OsString::from);
        let arguments: Vec<OsString> = line.collect();
        let Command::Serve(flags) = Flags::try_parse_from(&arguments)?.command else {
            bail!("another command")
        };
        read(&flags, &arguments)
    }

    fn error(line: &[&str]) -> String {
        format!("{:#}", recipes(line).expect_err("an error"))
    }

    #[test]
    fn each_model_has_the_common_flags_and_its_own() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("models.toml");
        let text = r#"
            [[models]]
            name = "coder"
            source = "org/coder:Q4_K_M"
            aliases = ["small"]
            flags = ["--max-model-len", "1024", "--seed=7"]
            pinned = true
            [[models]]
            source = "b"
            idle_seconds = 1.5
        "#;
        fs::write(&file, text).expect("a file");
        let file = file.to_str().expect("text");
        let line = [
            "a",
            "--context-length",
            "512",
            "--port",
            "1",
            "--drain-timeout=7",
            "--is-embedding",
            "--sim-profile",
            "x,y",
            "--sleep-idle-seconds",
            "9",
            "--models-config",
            file,
        ];
        let recipes = recipes(&line).expect("models");
        let sources: Vec<&str> = recipes.iter().map(|recipe| &*recipe.source).collect();
        assert_eq!(sources, ["a", "org/coder:Q4_K_M", "b"]);
        let lengths: Vec<_> =
            recipes.iter().map(|recipe| recipe.flags.loading.context_length).collect();
        assert_eq!(lengths, [Some(512), Some(1024), Some(512)], "the model's own flags go first");
        assert!(recipes.iter().all(|recipe| recipe.flags.loading.is_embedding));
        let limit = Duration::from_secs(7);
        assert!(recipes.iter().all(|recipe| recipe.flags.http.drain_timeout == limit));
        assert!(recipes.iter().all(|recipe| recipe.flags.sim.sim_profile == ["x", "y"]));
        let coder = &recipes[1];
        assert_eq!(coder.flags.http.served_model_name, ["coder"]);
        assert_eq!((coder.flags.loading.seed, coder.pinned, coder.idle), (7, true, None));
        assert_eq!(coder.aliases, ["small"]);
        assert_eq!(recipes[0].idle, Some(Duration::from_secs(9)));
        assert_eq!(recipes[2].idle, Some(Duration::from_millis(1500)));
    }

    #[test]
    fn what_is_the_server_s_or_not_supported_is_refused_in_one_line() {
        let folder = tempfile::tempdir().expect("a folder");
        let config = |text: &str| {
            let file = folder.path().join("models.json");
            fs::write(&file, text).expect("a file");
            error(&["--models-config", file.to_str().expect("text")])
        };
        let own = config(r#"{"models": [{"source": "a", "flags": ["--port", "1"]}]}"#);
        assert_eq!(own, "the model a: --port belongs to the server, and not to one model");
        assert!(config(r#"{"models": [{"sauce": "a"}]}"#).contains("unknown field `sauce`"));
        assert!(config(r#"{"models": []}"#).contains("there is no model to serve"));
        assert!(
            config(r#"{"models": [{"source": "a", "flags": ["--no-such"]}]}"#)
                .contains("--no-such")
        );
        let several = error(&["a", "b", "--record-steps", "x"]);
        assert_eq!(several, "the model a: --record-steps is for a server of one model");
        assert!(error(&["a", "b", "--served-model-name", "x"]).contains("names one model"));
    }

    #[test]
    fn a_folder_has_the_models_of_its_files_and_folders() {
        let folder = tempfile::tempdir().expect("a folder");
        let make = |path: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
            fs::write(path, "").expect("a file");
        };
        for path in ["b/config.json", "b/model.gguf", "a.gguf", "notes.txt", "c/x.gguf", "d/y.txt"]
        {
            make(path);
        }
        let found = in_folder(folder.path()).expect("models");
        let names: Vec<_> = found.iter().map(|entry| entry.name.as_deref()).collect();
        assert_eq!(names, [Some("a"), Some("b"), Some("x")]);
    }
}
