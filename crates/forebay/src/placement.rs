//! `--placement ray`: Ray runs the outposts. A Python process requests them and keeps them running
//! as long as this process runs: the Python process exits when its stdin is closed.

use std::io::{self, BufRead, BufReader, Write};
use std::net::IpAddr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use forebay_hand::without_keys;
use forebay_server::Guard;
use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};
use tracing::warn;

/// The pause before the Python process is started again.
const PAUSE: Duration = Duration::from_secs(5);
/// How long Ray may take to release all resources before the Python process is abandoned.
const PATIENCE: Duration = Duration::from_secs(15);

/// The hands to request from Ray, in the form that `forebay.place.ray` reads.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Asked {
    pub(crate) replicas: u32,
    pub(crate) ranks: u32,
    pub(crate) cuda: bool,
    /// True if the ranks of a replica may be on several nodes.
    pub(crate) apart: bool,
    /// The path of this program, which may exist on the nodes too.
    pub(crate) program: PathBuf,
}

/// The address and token with which outposts join.
#[derive(Clone, Serialize)]
pub(crate) struct Door {
    /// `HOST:PORT`.
    pub(crate) join: String,
    pub(crate) token: String,
}

/// The first line that the Python process writes.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    /// The address at which Ray's nodes reach this machine.
    Address(IpAddr),
    Error(String),
}

/// A Python process that has joined the cluster and waits for a `Door`.
struct Joined {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

/// A cluster that was joined, but in which no outposts are requested yet.
pub(crate) struct Placer {
    python: PathBuf,
    asked: Asked,
    joined: Joined,
    /// The address at which Ray's nodes reach this machine.
    pub(crate) address: IpAddr,
}

/// Outposts that Ray runs until this is dropped.
pub(crate) struct Placed {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// True once no process may be started any more.
    over: bool,
    /// True once the thread has ended.
    ended: bool,
    /// The Python process, and the pipe that keeps it running.
    running: Option<(Child, ChildStdin)>,
}

impl Placer {
    /// Joins the cluster.
    ///
    /// # Errors
    /// There is no cluster, or the interpreter lacks Ray.
    pub(crate) fn new(python: &Path, asked: Asked) -> Result<Self> {
        let (joined, address) = join(python, &asked).context("--placement ray")?;
        Ok(Self { python: python.to_owned(), asked, joined, address })
    }

    /// Starts outposts that join at `door`. Starts them again whenever the Python process ends.
    ///
    /// # Errors
    /// The system can't start a thread.
    pub(crate) fn open(self, door: Door, guard: &Guard) -> Result<Placed> {
        let shared = Arc::new(Shared::default());
        let placed = Placed { shared: Arc::clone(&shared) };
        let Self { python, asked, joined, .. } = self;
        let mut next = Some(joined);
        guard.spawn("placement", move || {
            let ended = Ended(Arc::clone(&shared));
            loop {
                let lost = match next.take().map_or_else(|| Ok(join(&python, &asked)?.0), Ok) {
                    Ok(joined) => watch(joined, &door, &shared),
                    Err(error) => error,
                };
                let mut state = shared.state.lock();
                if state.over {
                    break;
                }
                warn!("Ray runs no outposts any more: {lost:#}; trying again in {PAUSE:?}");
                shared.changed.wait_while_for(&mut state, |state| !state.over, PAUSE);
                if state.over {
                    break;
                }
            }
            drop(ended);
        })?;
        Ok(placed)
    }
}

/// Records that the thread has ended, for whatever reason.
struct Ended(Arc<Shared>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.state.lock().ended = true;
        self.0.changed.notify_all();
    }
}

/// Starts the Python process and waits until it has joined the cluster.
fn join(python: &Path, asked: &Asked) -> Result<(Joined, IpAddr)> {
    let mut command = Command::new(python);
    command.args(crate::python::arguments("forebay.place.ray"));
    without_keys(&mut command);
    // Terminal signals should only reach this process, which stops outposts after draining
    // requests.
    command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped());
    let shown = python.display();
    let mut child = command.spawn().with_context(|| format!("cannot run {shown}"))?;
    let (Some(mut orders), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
        bail!("{shown} has no pipes");
    };
    let mut answers = BufReader::new(answers);
    // A failed write means that the process has ended; the missing response below reports it.
    let _ = send(&mut orders, asked);
    let mut line = String::new();
    answers.read_line(&mut line)?;
    match serde_json::from_str(&line) {
        Ok(Answer::Address(address)) => Ok((Joined { child, orders, answers }, address)),
        Ok(Answer::Error(error)) => {
            child.wait()?;
            bail!("{error}")
        }
        Err(_) => {
            let _ = child.kill();
            let status = child.wait()?;
            bail!(
                "{shown} said nothing of a cluster ({status}): Ray comes with `pip install \
                 'forebay[ray]'`"
            )
        }
    }
}

/// Waits until a Python process has exited, and returns the reason.
fn watch(joined: Joined, door: &Door, shared: &Shared) -> anyhow::Error {
    let Joined { child, mut orders, mut answers } = joined;
    if let Err(error) = send(&mut orders, door) {
        warn!("the process that asks Ray takes no orders: {error}");
    }
    let mut state = shared.state.lock();
    // A process whose stdin is closed exits at once.
    state.running = Some((child, orders)).filter(|_| !state.over);
    drop(state);
    // Stdout is closed when the process exits.
    let read = io::copy(&mut answers, &mut io::sink());
    let running = shared.state.lock().running.take();
    let status = running.map(|(mut child, _)| child.wait()).transpose();
    match (read, status) {
        (Ok(_), Ok(Some(status))) => anyhow::anyhow!("its process ended ({status})"),
        (Err(error), _) | (_, Err(error)) => error.into(),
        (_, Ok(None)) => anyhow::anyhow!("its process was ended"),
    }
}

fn send(orders: &mut ChildStdin, message: &impl Serialize) -> io::Result<()> {
    let line = serde_json::to_string(message)?;
    orders.write_all(format!("{line}\n").as_bytes())?;
    orders.flush()
}

impl Drop for Placed {
    fn drop(&mut self) {
        let Shared { state, changed } = &*self.shared;
        let mut state = state.lock();
        state.over = true;
        changed.notify_all();
        let Some((child, orders)) = state.running.take() else { return };
        drop(orders);
        state.running = None;
        let mut child = child;
        changed.wait_while_for(&mut state, |state| !state.ended, PATIENCE);
        if !state.ended {
            let _ = child.kill();
        }
        let _ = child.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Instant;

    use super::*;
    use crate::python::testing::interpreter;

    fn asked() -> Asked {
        Asked { replicas: 2, ranks: 1, cuda: false, apart: false, program: "/bin/forebay".into() }
    }

    fn eventually(mut is_so: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !is_so() {
            assert!(Instant::now() < deadline, "never");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn the_process_is_told_what_is_wanted_and_lives_as_long_as_this() {
        let folder = tempfile::tempdir().expect("a folder");
        let shown = folder.path().display().to_string();
        let script = format!(
            "read asked; echo '{{\"address\": \"10.1.2.3\"}}'; read door; echo \"$asked $door $*\" > \
             {shown}/told.new; mv {shown}/told.new {shown}/told; cat; touch {shown}/ended"
        );
        let python = interpreter(folder.path(), &script);
        let placer = Placer::new(&python, asked()).expect("the placer has joined");
        assert_eq!(placer.address.to_string(), "10.1.2.3");
        let door = Door { join: "10.1.2.3:7".into(), token: "secret".into() };
        let placed = placer.open(door, &Guard::default()).expect("a thread");
        eventually(|| folder.path().join("told").exists());
        let told = fs::read_to_string(folder.path().join("told")).expect("a file");
        assert!(told.contains("\"replicas\":2") && told.contains("\"token\":\"secret\""), "{told}");
        let (_, arguments) = told.rsplit_once('}').expect("JSON");
        assert!(arguments.contains("forebay.place.ray") && !arguments.contains("secret"), "{told}");
        drop(placed);
        assert!(
            folder.path().join("ended").exists(),
            "the script ends by itself, and is waited for"
        );
    }

    #[test]
    fn a_process_that_cannot_join_says_why() {
        let folder = tempfile::tempdir().expect("a folder");
        let of = |script: &str| {
            let python = interpreter(folder.path(), script);
            let error = Placer::new(&python, asked()).err().expect("there is no cluster");
            format!("{error:#}")
        };
        let told = of("read asked; echo '{\"error\": \"no cluster\"}'; exit 1");
        assert_eq!(told, "--placement ray: no cluster");
        let told = of("exit 3");
        assert!(told.contains("(exit status: 3)") && told.contains("forebay[ray]"), "{told}");
    }
}
