//! `forebay worker`: runs hands on this machine for a brain on another machine.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use clap::Args;
use forebay_hand::{Arena, RankProcess};
use forebay_outpost::{Credentials, HandOrder, JoinToken, Spawn, WorkSettings, work};

use crate::collectives;
use crate::gpus::{self, Gpus};
use crate::hands;
use crate::logs;
use crate::model::find_python;
use crate::parent;
use crate::signals;

/// Flags of `forebay worker`.
#[derive(Debug, Args)]
pub(crate) struct WorkerFlags {
    /// Address of the server's --listen-hands.
    #[arg(
        long,
        value_name = "HOST:PORT",
        required_unless_present = "make_token",
        requires = "token_file"
    )]
    join: Option<String>,
    /// Token file, a copy of the server's --join-token-file.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Only create FILE and FILE.key, then exit. The server needs both (--join-token-file); workers
    /// need only FILE.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["join", "token_file", "hands", "name", "collective_interface", "parent"])]
    make_token: Option<PathBuf>,
    /// Largest number of hands that run here at the same time [default: one for each GPU, otherwise
    /// 1].
    #[arg(long, value_name = "HANDS", value_parser = clap::value_parser!(u32).range(1..=256))]
    hands: Option<u32>,
    /// Name of this machine in the server's log [default: its host name].
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Python interpreter of hands that compute with PyTorch [default: the one beside this program,
    /// else the virtual environment's, else python3].
    #[arg(long, value_name = "FILE", env = "FOREBAY_PYTHON")]
    python: Option<PathBuf>,
    /// This machine's network interface for replicas with ranks on several machines. Their traffic
    /// is not encrypted [default: the server's --collective-interface].
    #[arg(long, value_name = "NAME", value_parser = collectives::interface)]
    collective_interface: Option<String>,
    /// Id of the parent process. This process exits when the parent does.
    #[arg(long, value_name = "PID", hide = true)]
    parent: Option<i32>,
}

/// Runs until a signal stops it, or the server refuses this machine.
pub(crate) fn run(flags: &WorkerFlags) -> Result<()> {
    if let Some(file) = &flags.make_token {
        if file.exists() {
            bail!("--make-token: {} is there already", file.display());
        }
        Credentials::open(file).context("--make-token")?;
        return Ok(());
    }
    let (Some(brain), Some(file)) = (&flags.join, &flags.token_file) else {
        bail!("--join and --token-file are needed");
    };
    let shown = file.display();
    let line = std::fs::read_to_string(file).with_context(|| format!("--token-file {shown}"))?;
    let token: JoinToken = line.parse().with_context(|| format!("--token-file {shown}"))?;
    if !brain.contains(':') {
        bail!("--join {brain}: the address ends with a port, such as :7711");
    }
    if let Some(interface) = &flags.collective_interface {
        collectives::check(interface).map_err(anyhow::Error::msg)?;
    }
    if let Some(parent) = flags.parent {
        parent::end_with(parent)?;
    }
    logs::init_plain()?;
    let gpus = Gpus::find();
    let hands = flags.hands.unwrap_or_else(|| u32::try_from(gpus.count()).unwrap_or(1).max(1));
    let name = flags.name.clone().unwrap_or_else(host_name);
    let settings = WorkSettings { brain: brain.clone(), token, name, hands };
    let interface = flags.collective_interface.clone();
    let spawn = spawn(find_python(flags.python.as_deref()), gpus, interface);
    // The kernel terminates hands when the thread that started them ends, so all work stays on this
    // thread.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let told = signals::count()?;
        work(settings, spawn, signals::another(told)).await.context("--join")
    })
}

/// Returns the function that starts a hand for an order of the server, like `serve` starts its own.
fn spawn(python: PathBuf, gpus: Gpus, interface: Option<String>) -> Spawn {
    Arc::new(move |order: &HandOrder, arena: &Arena| {
        let (program, arguments) = program(&order.hand, &python)?;
        let mut command = Command::new(&program);
        command.args(arguments).envs(hands::environment());
        if let Some(gpu) = gpus.name(order.place as usize) {
            command.env(gpus::VISIBLE, gpu);
        }
        command.envs(order.env.iter().map(|(name, value)| (name, value)));
        let (collectives, own) = (&order.collectives, interface.as_deref());
        let is_set = |name: &str| std::env::var_os(name).is_some();
        for (variable, interface) in collectives::environment(collectives, own, is_set) {
            collectives::check(&interface).map_err(io::Error::other)?;
            command.env(variable, interface);
        }
        RankProcess::spawn(command, arena, &[], &[]).map_err(|error| {
            io::Error::new(error.kind(), format!("cannot run {}: {error}", program.display()))
        })
    })
}

/// Returns the program and arguments that start a hand, or an error if the hand can't run here.
fn program(hand: &str, python: &Path) -> io::Result<(PathBuf, Vec<std::ffi::OsString>)> {
    if hand == "torch" {
        crate::python::check(python).map_err(|error| io::Error::other(format!("{error:#}")))?;
    }
    Ok(hands::program(hand, python))
}

/// The host name of this machine.
pub(crate) fn host_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if name.is_empty() { "worker".into() } else { name }
}
