//! One rank's process: its start with a socket and an arena, and its end.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use command_fds::{CommandFdExt, FdMapping};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, kill_process_group, pidfd_open, set_parent_process_death_signal,
};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::arena::Arena;

/// The descriptor of the hand's socket.
const SOCKET_FD: i32 = 3;
/// The descriptor of the arena.
const ARENA_FD: i32 = 4;
/// The descriptor of the memory of the host's tier, if there is one.
const HOST_FD: i32 = 5;
/// The time from SIGKILL to the end. A process that the kernel holds, in a driver or on a file
/// system that hangs, does not end by that either.
const LAST_PATIENCE: Duration = Duration::from_secs(5);
/// The time that a rank that closed its socket may take to leave an exit status.
const LAST_BREATH: Duration = Duration::from_millis(500);

/// Keeps keys from a program before it is run. Variables such as `FOREBAY_API_KEY` and `HF_TOKEN`
/// are for this process alone.
pub fn without_keys(command: &mut Command) {
    let given = command.get_envs().map(|(name, _)| name.to_owned());
    let names: Vec<_> = given.chain(std::env::vars_os().map(|(name, _)| name)).collect();
    for name in names {
        if name.to_str().is_some_and(is_key) {
            command.env_remove(name);
        }
    }
}

fn is_key(name: &str) -> bool {
    let has = |word| name.contains(word);
    let own = name.starts_with("FOREBAY_");
    let hub = matches!(name, "HF_TOKEN" | "HUGGING_FACE_HUB_TOKEN");
    hub || own && ["KEY", "SECRET", "TOKEN", "PASSWORD"].into_iter().any(has)
}

/// A spawned rank and its process group. To drop it kills the group.
#[derive(Debug)]
pub struct RankProcess {
    child: Child,
    pid: Pid,
    pidfd: OwnedFd,
    /// True if the process did not end when it was killed.
    stuck: bool,
}

impl RankProcess {
    /// Spawns `command` with a new socket as descriptor 3, the arena as 4, and the host's memory as
    /// 5 if there is any. The process runs on the given processors, if any. Gives the process and
    /// the near end of its socket, which never blocks.
    ///
    /// # Errors
    /// The program can't be run, or the system refuses a socket.
    pub fn spawn(
        mut command: Command,
        arena: &Arena,
        host: Option<BorrowedFd<'_>>,
        cpus: &[usize],
    ) -> io::Result<(Self, UnixStream)> {
        let (near, far) = UnixStream::pair()?;
        near.set_nonblocking(true)?;
        let log = Stdio::from(io::stderr().as_fd().try_clone_to_owned()?);
        command.stdin(Stdio::null()).stdout(log).process_group(0);
        without_keys(&mut command);
        let mut mappings = vec![
            FdMapping { parent_fd: far.into(), child_fd: SOCKET_FD },
            FdMapping { parent_fd: arena.fd().try_clone_to_owned()?, child_fd: ARENA_FD },
        ];
        if let Some(host) = host {
            mappings.push(FdMapping { parent_fd: host.try_clone_to_owned()?, child_fd: HOST_FD });
        }
        command.fd_mappings(mappings).map_err(io::Error::other)?;
        let mut set = CpuSet::new();
        cpus.iter().for_each(|&cpu| set.set(cpu));
        let pinned = !cpus.is_empty();
        #[expect(unsafe_code, reason = "pre_exec runs between fork and exec")]
        // SAFETY: prctl and sched_setaffinity are system calls and async-signal-safe; the closure
        // owns what it reads.
        unsafe {
            command.pre_exec(move || {
                if pinned {
                    sched_setaffinity(None, &set)?;
                }
                Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
            });
        }
        let mut child = command.spawn()?;
        let raw = child.id().cast_signed();
        let opened = Pid::from_raw(raw)
            .ok_or_else(|| io::Error::other("no process id"))
            .and_then(|pid| Ok((pid, pidfd_open(pid, PidfdFlags::empty())?)));
        match opened {
            Ok((pid, pidfd)) => Ok((Self { child, pid, pidfd, stuck: false }, near)),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(error)
            }
        }
    }

    /// Waits until the process has ended, at most `limit`.
    pub(crate) fn ended_within(&self, limit: Duration) -> bool {
        let limit =
            Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&limit)), Ok(1))
    }

    /// Ends a rank whose connection broke. Gives a description of its end.
    #[must_use]
    pub fn bury(mut self) -> String {
        let by_itself = self.ended_within(LAST_BREATH);
        let status = self.kill();
        match status {
            Ok(status) if by_itself => describe(status),
            Ok(_) => "it closed its connection and had to be killed".into(),
            Err(error) => format!("its exit status is unknown: {error}"),
        }
    }

    /// Sends SIGKILL to the whole group, and waits for nothing.
    pub(crate) fn doom(&self) {
        self.signal(Signal::KILL);
    }

    /// Sends a signal to the whole group.
    pub(crate) fn signal(&self, signal: Signal) {
        let _ = kill_process_group(self.pid, signal);
    }

    /// Sends SIGKILL to the whole group, also if its leader has ended, because the leader's
    /// children may still run. It does not wait for a process that does not end, since others can
    /// be served meanwhile.
    fn kill(&mut self) -> io::Result<ExitStatus> {
        let _ = kill_process_group(self.pid, Signal::KILL);
        if self.stuck || !self.ended_within(LAST_PATIENCE) {
            self.stuck = true;
            return Err(io::Error::other("it does not end, the kernel holds it"));
        }
        self.child.wait()
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(9), _) => "killed (signal 9; the kernel does that when memory runs out)".into(),
        (Some(signal), _) => format!("killed by signal {signal}"),
        (None, Some(code)) => format!("exit status {code}"),
        (None, None) => "ended".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hand_gets_no_keys() {
        let kept = "FOREBAY_KERNELS";
        let keys =
            ["FOREBAY_API_KEY", "FOREBAY_ADMIN_API_KEY", "FOREBAY_CACHE_SECRET_FILE", "HF_TOKEN"];
        let check = keys.map(|key| format!("[ -z \"${key}\" ]")).join(" && ");
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{check} && [ \"${kept}\" = yes ]")]).env(kept, "yes");
        command.envs(keys.map(|key| (key, "a key")));
        let arena = crate::Arena::new(0).expect("an arena");
        let (process, _socket) = RankProcess::spawn(command, &arena, None, &[]).expect("a shell");
        assert_eq!(process.bury(), "exit status 0");
    }
}
