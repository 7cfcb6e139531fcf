//! Renders templates in separate processes with limits on memory and time.
//!
//! A template can create values of any size and depth: doubled strings, nested lists, namespaces
//! that contain themselves. No limit inside the interpreter covers all of this, but the operating
//! system's limits on a process do. Each process renders one chat at a time, while further chats
//! wait in its socket.

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
    ANSWER_HEAD, ERROR_BYTES, Setup, answer_from_bytes, fitting, read_frame, variables_to_bytes,
    write_frames,
};

/// The memory for rendering in bytes, in addition to the program's own.
const MEMORY: usize = 512 << 20;
/// The processor time for rendering one chat, in seconds.
const SECONDS: u64 = if cfg!(test) { 1 } else { 10 };
/// The time without a response after which a process is abandoned, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(120);
/// The environment variables that rendering may depend on. Others are removed, since they may be
/// secret.
const ENVIRONMENT: [&str; 3] = ["LD_LIBRARY_PATH", "TZ", "TZDIR"];

/// Creates the command of a new process.
type Start = Box<dyn Fn() -> Command + Send + Sync>;

/// The processes that render one template. Their number grows to the number of concurrent
/// renderings.
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
    /// [`TextError::Template`] if the source is not a valid template, [`TextError::Costly`] if it
    /// is too expensive to compile, [`TextError::Renderer`] if the process cannot be started.
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

    /// Renders chats to text, in order.
    pub(super) fn render_all(&self, chats: &[Variables<'_>]) -> Vec<Result<String, TextError>> {
        let messages: Vec<_> = chats.iter().map(variables_to_bytes).collect();
        let mut rendered = Vec::with_capacity(chats.len());
        while rendered.len() < chats.len() {
            let begin = rendered.len();
            let end = begin + fitting(&messages[begin..]);
            self.render_group(&chats[begin..end], &messages[begin..end], &mut rendered);
        }
        rendered
    }

    /// Appends the results of chats to `rendered`, up to the first chat that ended its process.
    /// Another process may render the rest.
    fn render_group(
        &self,
        chats: &[Variables<'_>],
        messages: &[Vec<u8>],
        rendered: &mut Vec<Result<String, TextError>>,
    ) {
        let asked = self.asked(messages).map_or_else(
            || {
                let mut process = self.started()?;
                process.ask(messages)?;
                Ok(process)
            },
            Ok,
        );
        let mut process = match asked {
            Ok(process) => process,
            Err(error) => return rendered.push(Err(error)),
        };
        for chat in chats {
            match process.answer(chat.most_output().max(ERROR_BYTES)) {
                Ok(answer) => rendered.push(answer),
                Err(error) => return rendered.push(Err(error)),
            }
        }
        self.idle.lock().push(process);
    }

    /// Sends the messages to an idle process and returns it; `None` if there is none. A process
    /// that was killed rejects messages and is dropped.
    fn asked(&self, messages: &[Vec<u8>]) -> Option<RenderProcess> {
        loop {
            let mut process = self.idle.lock().pop()?;
            if process.ask(messages).is_ok() {
                return Some(process);
            }
        }
    }

    fn started(&self) -> Result<RenderProcess, TextError> {
        let mut process = RenderProcess::spawn((self.start)())
            .map_err(|error| TextError::Renderer(error.to_string()))?;
        process.ask(std::slice::from_ref(&self.setup))?;
        process.answer(ERROR_BYTES)??;
        Ok(process)
    }
}

/// A rendering process, and the socket to it. Dropping the value kills the process.
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
        // Signals from the terminal should only reach the server, which may finish its chats first.
        command.process_group(0).stdin(OwnedFd::from(far));
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self { child: command.spawn()?, socket: BufReader::new(near) })
    }

    /// Sends messages. After an error the process is unusable.
    fn ask(&mut self, messages: &[Vec<u8>]) -> Result<(), TextError> {
        write_frames(self.socket.get_mut(), messages).map_err(|error| self.fault(&error))
    }

    /// Waits for the response to a message, of at most `most` bytes. After an error of the outer
    /// result the process is unusable.
    fn answer(&mut self, most: usize) -> Result<Result<String, TextError>, TextError> {
        match read_frame(&mut self.socket, ANSWER_HEAD + most) {
            Ok(Some(answer)) => answer_from_bytes(answer)
                .ok_or_else(|| TextError::Renderer("it gave no answer".to_owned())),
            Ok(None) => Err(self.end()),
            Err(error) => Err(self.fault(&error)),
        }
    }

    /// Returns the error of a chat after an error of the socket.
    fn fault(&mut self, error: &io::Error) -> TextError {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        match error.kind() {
            BrokenPipe | ConnectionReset | UnexpectedEof => self.end(),
            _ => TextError::Renderer(error.to_string()),
        }
    }

    /// Returns the error of a chat whose process has ended.
    fn end(&mut self) -> TextError {
        // The process has closed its socket, which only happens when it ends.
        match self.child.wait() {
            Ok(status) => description(status),
            Err(error) => TextError::Renderer(error.to_string()),
        }
    }
}

impl Drop for RenderProcess {
    fn drop(&mut self) {
        // The process may have ended already; then this has no effect.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the error for a process that ended while it rendered a chat.
fn description(status: ExitStatus) -> TextError {
    use rustix::process::Signal;
    let is = |signal: Signal| status.signal() == Some(signal.as_raw());
    if is(Signal::XCPU) {
        TextError::Costly(format!("it computes for more than {SECONDS} seconds"))
    } else if [Signal::ABORT, Signal::KILL, Signal::SEGV, Signal::BUS].into_iter().any(is) {
        // A stack overflow also ends in SIGABRT.
        TextError::Costly(format!(
            "it needs more than {} MiB of memory, or its values are nested too deep",
            MEMORY >> 20
        ))
    } else {
        TextError::Renderer(format!("it ended with {status}"))
    }
}
