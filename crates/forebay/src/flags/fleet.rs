//! Flags of a server with several models. They concern the whole server, not one of its models.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Command};

use super::duration::seconds;
use super::{AccessFlags, LimitFlags, ListenFlags, LogFlags, ResponseFlags};

#[derive(Debug, Args)]
#[command(next_help_heading = "Several models")]
pub(crate) struct FleetFlags {
    /// Also serve every model in this folder: each .gguf file, and each folder with a config.json.
    /// A model is named after its file or folder.
    #[arg(long, value_name = "DIR")]
    pub(crate) models_dir: Option<PathBuf>,
    /// Also serve the models of this TOML or JSON list. Each entry has `source`, and optionally
    /// `name`, `aliases`, `flags`, `pinned` and `idle_seconds`. See docs/models.md.
    #[arg(long, value_name = "FILE")]
    pub(crate) models_config: Option<PathBuf>,
    /// Largest number of models in memory [default: as many as fit; on a GPU 1].
    #[arg(long, value_name = "MODELS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) models_max: Option<u32>,
    /// Memory for the weights and KV pages of all models together, in GB (10^9 bytes) [default: the
    /// share of free memory given by --mem-fraction-static].
    #[arg(long, value_name = "GB", value_parser = gigabytes)]
    pub(crate) models_memory: Option<u64>,
    /// Largest number of requests that wait for one model to load. Further requests are answered
    /// 503.
    #[arg(long, value_name = "REQUESTS", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) models_queue: u32,
    /// Seconds for which a loaded model stays in memory before another may replace it; at least the
    /// time that loading took.
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = seconds)]
    pub(crate) models_min_stay: Duration,
    /// Seconds without a request after which a model sleeps: its hands exit, and the next request
    /// starts them again [default: never].
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) sleep_idle_seconds: Option<Duration>,
}

/// The ids of the flags in this module, which are about several models.
pub(crate) fn fleet_flags() -> BTreeSet<String> {
    ids(&FleetFlags::augment_args(Command::new("serve")))
}

fn ids(command: &Command) -> BTreeSet<String> {
    command.get_arguments().map(|argument| argument.get_id().to_string()).collect()
}

/// The ids of the server's flags: whole groups, and single flags of other groups. All other flags
/// belong to a model.
pub(crate) fn server_flags() -> BTreeSet<String> {
    const SINGLE: [&str; 11] = [
        "receive_timeout",
        "send_timeout",
        "drain_timeout",
        "max_unread_bytes",
        "http_threads",
        "no_webui",
        "queue_while_loading",
        "strict_params",
        "hide_cached_tokens",
        "parent",
        "python",
    ];
    let groups: [fn(Command) -> Command; 6] = [
        ListenFlags::augment_args,
        AccessFlags::augment_args,
        LimitFlags::augment_args,
        ResponseFlags::augment_args,
        LogFlags::augment_args,
        FleetFlags::augment_args,
    ];
    let command = groups.iter().fold(Command::new("serve"), |command, add| add(command));
    ids(&command).into_iter().chain(SINGLE.map(str::to_owned)).collect()
}

fn gigabytes(text: &str) -> Result<u64, String> {
    let given: Option<f64> = text.parse().ok().filter(|gb| (0.001..=1e6).contains(gb));
    given.map(|gb| (gb * 1e9) as u64).ok_or_else(|| "expected GB from 0.001 to 1000000".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::command::Flags;

    #[test]
    fn every_flag_of_the_server_is_one_of_serve() {
        let mut command = Flags::command();
        command.build();
        let serve = command.find_subcommand("serve").expect("a command");
        let known = ids(serve);
        let server = server_flags();
        assert!(server.is_subset(&known), "{:?}", server.difference(&known));
        for (flag, is_the_server_s) in
            [("port", true), ("api_key", true), ("log_level", true), ("context_length", false)]
        {
            assert_eq!(server.contains(flag), is_the_server_s, "{flag}");
        }
    }
}
