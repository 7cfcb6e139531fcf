//! Templates that run in processes of their own, with a limit of memory and time.
//!
//! A template can make values of any size and depth: doubled strings, lists in lists, namespaces
//! that contain themselves. No bound inside an interpreter covers all of it, so the system's limits
//! for a process do. Each process serves one chat at a time.

mod serve;
#[cfg(test)]
mod tests;
mod wire;

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use parking_lot::Mutex;

use super::program::Variables;
use crate::error::TextError;
pub use serve::render_templates;
use wire::{
    ANSWER_HEAD, ERROR_BYTES, Setup, answer_from_bytes, read_frame, variables_to_bytes, write_frame,
};

/// Bytes of memory for a rendering, besides those of the program.
const MEMORY: usize = 512 << 20;
/// Seconds of processor time for a rendering.
const SECONDS: u64 = if cfg!(test) { 1 } else { 10 };
/// The time without an answer after which a process is given up, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(120);
/// The variables of this process that a rendering may depend on. The others may be secret.
const ENVIRONMENT: [&str; 3] = ["LD_LIBRARY_PATH", "TZ", "TZDIR"];

/// The command of a new process.
type Start = Box<dyn Fn() -> Command + Send + Sync>;

/// Processes that render one template. There are as many as chats were rendered at one time.
pub(super) struct RenderPool {
    start: Start,
    setup: Vec<u8>,
    idle: Mutex<Vec<RenderProcess>>,
}

impl fmt::Debug for RenderPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RenderPool").field("idle", &self.idle).finish_non_exhaustive()
    }
}

impl RenderPool {
    /// Starts the first process, which compiles the template.
    ///
    /// # Errors
    /// [`TextError::Template`] if the source is not a template, [`TextError::Costly`] if it is too
    /// expensive to compile, [`TextError::Renderer`] if the process can't be started.
    pub(super) fn new(
        start: Start,
        source: &str,
        special_tokens: &BTreeMap<String, String>,
    ) -> Result<Self, TextError> {
        let setup = Setup { source: source.to_owned(), special_tokens: special_tokens.clone() };
        let pool = Self { start, setup: setup.to_bytes(), idle: Mutex::new(Vec::new()) };
        let first = pool.started()?;
        pool.idle.lock().push(first);
        Ok(pool)
    }

    /// The text of a chat.
    pub(super) fn render(&self, chat: &Variables<'_>) -> Result<String, TextError> {
        let message = variables_to_bytes(chat);
        let mut process = match self.asked(&message) {
            Some(process) => process,
            None => {
                let mut process = self.started()?;
                process.ask(&message)?;
                process
            }
        };
        let rendered = process.answer(chat.most_output().max(ERROR_BYTES))?;
        self.idle.lock().push(process);
        rendered
    }

    /// An idle process that has taken a message. One that others have ended takes none.
    fn asked(&self, message: &[u8]) -> Option<RenderProcess> {
        loop {
            let mut process = self.idle.lock().pop()?;
            if process.ask(message).is_ok() {
                return Some(process);
            }
        }
    }

    fn started(&self) -> Result<RenderProcess, TextError> {
        let mut process = RenderProcess::spawn((self.start)())
            .map_err(|error| TextError::Renderer(error.to_string()))?;
        process.ask(&self.setup)?;
        process.answer(ERROR_BYTES)??;
        Ok(process)
    }
}

/// A process that renders, and the socket to it. To drop it kills the process.
#[derive(Debug)]
struct RenderProcess {
    child: Child,
    socket: BufReader<UnixStream>,
}

impl RenderProcess {
    fn spawn(mut command: Command) -> io::Result<Self> {
        let (near, far) = UnixStream::pair()?;
        near.set_read_timeout(Some(PATIENCE))?;
        near.set_write_timeout(Some(PATIENCE))?;
        let given: Vec<_> = command
            .get_envs()
            .filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned())))
            .collect();
        let kept = ENVIRONMENT.iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
        command.env_clear().envs(kept).envs(given);
        // A signal of the terminal is for the server, which may finish chats first.
        command.process_group(0).stdin(OwnedFd::from(far));
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self { child: command.spawn()?, socket: BufReader::new(near) })
    }

    /// Sends a message. After an error the process is of no further use.
    fn ask(&mut self, message: &[u8]) -> Result<(), TextError> {
        write_frame(self.socket.get_mut(), message).map_err(|error| self.fault(&error))
    }

    /// Waits for the answer to a message, of at most `most` bytes. After an outer error the process
    /// is of no further use.
    fn answer(&mut self, most: usize) -> Result<Result<String, TextError>, TextError> {
        match read_frame(&mut self.socket, ANSWER_HEAD + most) {
            Ok(Some(answer)) => answer_from_bytes(answer)
                .ok_or_else(|| TextError::Renderer("it gave no answer".to_owned())),
            Ok(None) => Err(self.end()),
            Err(error) => Err(self.fault(&error)),
        }
    }

    /// The error of a chat for which the socket failed.
    fn fault(&mut self, error: &io::Error) -> TextError {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        match error.kind() {
            BrokenPipe | ConnectionReset | UnexpectedEof => self.end(),
            _ => TextError::Renderer(error.to_string()),
        }
    }

    /// The error of a chat for which the process ended.
    fn end(&mut self) -> TextError {
        // It has closed its socket, which it only does at its end.
        match self.child.wait() {
            Ok(status) => description(status),
            Err(error) => TextError::Renderer(error.to_string()),
        }
    }
}

impl Drop for RenderProcess {
    fn drop(&mut self) {
        // It may have ended already, which is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The meaning of a process's end during a rendering.
fn description(status: ExitStatus) -> TextError {
    use rustix::process::Signal;
    let is = |signal: Signal| status.signal() == Some(signal.as_raw());
    if is(Signal::XCPU) {
        TextError::Costly(format!("it computes for more than {SECONDS} seconds"))
    } else if [Signal::ABORT, Signal::KILL, Signal::SEGV, Signal::BUS].into_iter().any(is) {
        // A full stack ends in SIGABRT too.
        TextError::Costly(format!(
            "it needs more than {} MiB of memory, or its values are nested too deep",
            MEMORY >> 20
        ))
    } else {
        TextError::Renderer(format!("it ended with {status}"))
    }
}
