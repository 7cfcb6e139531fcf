//! A server that is started for one conversation, or for one file of requests.

use std::fs::File;
use std::io::{IsTerminal, Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{self, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use http::{Method, StatusCode};
use indicatif::{ProgressBar, ProgressStyle};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::time::{sleep, timeout};

use crate::link::Link;

/// The interval at which the health of a starting server is checked.
const POLL: Duration = Duration::from_millis(20);
/// How long a server may take to stop.
const PATIENCE: Duration = Duration::from_secs(10);
/// The number of bytes at the end of the log that are shown if a server fails to start.
const TAIL: u64 = 4096;

/// Environment variables with keys, which are not passed on. The keys are for other servers: only
/// this process can reach the started server.
const KEYS: [&str; 3] = ["FOREBAY_API_KEY", "FOREBAY_ADMIN_API_KEY", "FOREBAY_ROUTER_KEY"];

/// A server that was started, and stops with this process.
pub(crate) struct StartedServer {
    child: Child,
    link: Link,
    log: File,
    /// The folder of the server's socket and log.
    _folder: TempDir,
}

impl StartedServer {
    /// Starts a server for a model, and waits until it is ready.
    ///
    /// # Errors
    /// The server exits before it is ready; the error contains the end of its log.
    pub(crate) async fn start(program: PathBuf, model: &str, flags: &[String]) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("forebay-chat-").tempdir()?;
        let socket = folder.path().join("socket");
        let log = tempfile::tempfile_in(folder.path())?;
        let mut command = process::Command::new(program);
        command
            .args(["serve", model, "--no-webui", "--log-level", "warn"])
            .arg("--uds")
            .arg(&socket);
        command.arg("--parent").arg(process::id().to_string()).args(flags);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log.try_clone()?);
        // Ctrl-C stops the answer, not the server.
        command.process_group(0);
        for key in KEYS {
            command.env_remove(key);
        }
        let mut command = Command::from(command);
        let child = command.kill_on_drop(true).spawn().context("the server")?;
        let mut started = Self { child, link: Link::unix(socket), log, _folder: folder };
        started.ready(model).await?;
        Ok(started)
    }

    pub(crate) fn link(&self) -> Link {
        self.link.clone()
    }

    async fn ready(&mut self, model: &str) -> Result<()> {
        let bar = match std::io::stderr().is_terminal() {
            true => ProgressBar::new_spinner(),
            false => ProgressBar::hidden(),
        };
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
            bar.set_style(style);
        }
        bar.set_message(format!("starting {model}"));
        loop {
            bar.tick();
            if let Some(status) = self.child.try_wait()? {
                bar.finish_and_clear();
                bail!("the server did not start ({status}):\n{}", tail(&mut self.log)?);
            }
            let asked = self.link.ask(Method::GET, "/health").await;
            match asked {
                Ok((StatusCode::OK, _)) => {
                    bar.finish_and_clear();
                    return Ok(());
                }
                Ok((_, answer)) => {
                    if let Some(stage) = answer["error"]["message"].as_str() {
                        bar.set_message(format!("{model}: {stage}"));
                    }
                }
                // The server does not listen yet.
                Err(_) => {}
            }
            sleep(POLL).await;
        }
    }

    /// Waits until the server exits unexpectedly. The error contains the end of its log.
    pub(crate) async fn death(&mut self) -> anyhow::Error {
        match (self.child.wait().await, tail(&mut self.log)) {
            (Ok(status), Ok(log)) => anyhow!("the server has ended ({status}):\n{log}"),
            (Err(error), _) => anyhow!("the server is lost: {error}"),
            (_, Err(error)) => error.context("the server has ended, and its log is lost"),
        }
    }

    /// Stops the server.
    pub(crate) async fn stop(mut self) {
        let pid = self.child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        if let Some(pid) = pid {
            // If this fails, the process is killed below anyway.
            let _ = kill_process(pid, Signal::TERM);
        }
        if timeout(PATIENCE, self.child.wait()).await.is_err() {
            let _ = self.child.kill().await;
        }
    }
}

fn tail(log: &mut File) -> Result<String> {
    let length = log.metadata()?.len();
    log.seek(SeekFrom::Start(length.saturating_sub(TAIL)))?;
    let mut text = Vec::new();
    log.read_to_end(&mut text)?;
    Ok(String::from_utf8_lossy(&text).trim_end().to_owned())
}
