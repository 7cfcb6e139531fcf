//! The rendering process: it limits its own resources, compiles its template, and responds to
//! messages until the stream ends.

use std::io::{self, BufReader};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Zoned;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};

use super::super::program::Program;
use super::wire::{ReceivedVariables, Setup, answer_to_bytes, read_frame, write_frame};
use super::{MEMORY, SECONDS};
use crate::error::TextError;

/// The stack size of the rendering thread. Only used pages take physical memory.
const STACK_BYTES: usize = 8 << 20;
/// The time after which the limit on processor time is extended for the next chat. Extending it for
/// each chat would cost system calls.
const SLACK: Duration = Duration::from_secs(1);

/// Renders chats for the server at the other end of standard input, which is a socket, until the
/// server closes it.
///
/// The process limits its own memory, and its processor time per chat.
///
/// # Errors
/// The socket fails, or the system rejects a limit.
pub fn render_templates() -> io::Result<()> {
    limit_memory()?;
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let thread = std::thread::Builder::new().name("render".to_owned()).stack_size(STACK_BYTES);
    let ended = thread.spawn(move || answer_all(socket))?.join();
    ended.unwrap_or_else(|_| Err(io::Error::other("the thread that renders panicked")))
}

fn answer_all(mut socket: UnixStream) -> io::Result<()> {
    let mut limited = limit_time()?;
    let mut requests = BufReader::new(socket.try_clone()?);
    let Some(setup) = read_frame(&mut requests, usize::MAX)? else { return Ok(()) };
    let setup = Setup::from_bytes(&setup).ok_or_else(malformed)?;
    let compiled = Program::compile(&setup.source, setup.special_tokens, Arc::new(Zoned::now));
    let program = match compiled {
        Ok(program) => {
            write_frame(&mut socket, &answer_to_bytes(&Ok(String::new())))?;
            program
        }
        Err(error) => return write_frame(&mut socket, &answer_to_bytes(&Err(error))),
    };
    while let Some(chat) = read_frame(&mut requests, usize::MAX)? {
        // The process has only one working thread, so it has used at most the elapsed time as
        // processor time.
        if limited.elapsed() >= SLACK {
            limited = limit_time()?;
        }
        let chat = ReceivedVariables::from_bytes(&chat).ok_or_else(malformed)?;
        let rendered: Result<String, TextError> = program.render(&chat.variables());
        write_frame(&mut socket, &answer_to_bytes(&rendered))?;
    }
    Ok(())
}

fn malformed() -> io::Error {
    io::Error::other("a message that is none")
}

/// Limits the process to [`MEMORY`] additional bytes of address space, and disables core dumps.
fn limit_memory() -> io::Result<()> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    let size = size.and_then(|size| size.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    let size = size.ok_or_else(|| io::Error::other("/proc/self/status has no VmSize"))?;
    limit(Resource::As, (size << 10) + MEMORY as u64)?;
    limit(Resource::Core, 0)
}

/// Allows [`SECONDS`] of processor time from now on, plus [`SLACK`]. Returns the current time.
fn limit_time() -> io::Result<Instant> {
    let now = Instant::now();
    let used = clock_gettime(ClockId::ProcessCPUTime).tv_sec.unsigned_abs() + 1;
    limit(Resource::Cpu, used + SECONDS + SLACK.as_secs())?;
    Ok(now)
}

/// Sets a soft limit, bounded by the hard limit.
fn limit(resource: Resource, to: u64) -> io::Result<()> {
    let maximum = getrlimit(resource).maximum;
    let current = Some(maximum.map_or(to, |maximum| maximum.min(to)));
    Ok(setrlimit(resource, Rlimit { current, maximum })?)
}
