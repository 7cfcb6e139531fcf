//! The process of one rank: its start, with a socket and an arena, and its end.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use command_fds::{CommandFdExt, FdMapping};
use forebay_machine::Machine;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, kill_process_group, pidfd_open, set_parent_process_death_signal,
};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::arena::Arena;

/// The file descriptor of the hand's socket.
const SOCKET_FD: i32 = 3;
/// The file descriptor of the arena.
const ARENA_FD: i32 = 4;
/// How long to wait for the exit after SIGKILL. A process that is blocked in the kernel, in a
/// driver or a hung file system, does not exit even then.
const LAST_PATIENCE: Duration = Duration::from_secs(5);
/// How long to wait for the exit status of a rank that closed its socket.
const LAST_BREATH: Duration = Duration::from_millis(500);

/// Removes secrets from a command's environment. Variables such as `FOREBAY_API_KEY` and `HF_TOKEN`
/// are only for this process.
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

/// How a rank ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exit {
    /// A description for the user.
    pub text: String,
    /// True if the kernel killed the rank because memory ran out.
    pub out_of_memory: bool,
}

impl From<String> for Exit {
    fn from(text: String) -> Self {
        Self { text, out_of_memory: false }
    }
}

impl From<&str> for Exit {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

/// The number of the kernel's out-of-memory kills that have been attributed to hands.
static EXPLAINED: AtomicU64 = AtomicU64::new(0);

/// Attributes one of the kills between `before` and `now` to a hand. Returns false if all are
/// attributed already.
fn explains(explained: &AtomicU64, before: u64, now: u64) -> bool {
    let take = |earlier: u64| {
        let earlier = earlier.max(before);
        (now > earlier).then(|| earlier + 1)
    };
    explained.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
}

/// The environment variable with the number of bytes that a hand may allocate. The brain computes
/// the number from the limits of control groups. The Python hand does not read these limits itself.
const AVAILABLE: &str = "FOREBAY_AVAILABLE_BYTES";
/// The environment variable with the number of OpenMP threads.
const THREADS: &str = "OMP_NUM_THREADS";

/// Sets the environment variables with a hand's limits on this machine. A number of threads that
/// the user has set is kept.
fn limit(command: &mut Command, machine: &Machine, cpus: &[usize]) {
    if let Some(bytes) = machine.memory().available {
        command.env(AVAILABLE, bytes.to_string());
    }
    let is_set = command.get_envs().any(|(name, value)| name == THREADS && value.is_some());
    if !is_set && std::env::var_os(THREADS).is_none() {
        command.env(THREADS, OsString::from(machine.processors().threads_on(cpus).to_string()));
    }
}

/// The process of a rank, and its process group. Dropping it kills the group.
#[derive(Debug)]
pub struct RankProcess {
    child: Child,
    pid: Pid,
    pidfd: OwnedFd,
    /// True if the process did not exit even after SIGKILL.
    stuck: bool,
    machine: Machine,
    /// The number of out-of-memory kills before this process started; `None`: unknown.
    kills: Option<u64>,
}

impl RankProcess {
    /// Spawns `command` with a new socket as file descriptor 3, the arena as 4, and the memory of
    /// host tiers as the given descriptors. The process runs only on the CPUs in `cpus`; empty: it
    /// is not restricted. Returns the process, and the brain's end of the socket, which never
    /// blocks.
    ///
    /// # Errors
    /// The program can't be run, or the operating system refuses a socket.
    pub fn spawn(
        mut command: Command,
        arena: &Arena,
        memories: &[(i32, BorrowedFd<'_>)],
        cpus: &[usize],
    ) -> io::Result<(Self, UnixStream)> {
        let (near, far) = UnixStream::pair()?;
        near.set_nonblocking(true)?;
        let log = Stdio::from(io::stderr().as_fd().try_clone_to_owned()?);
        command.stdin(Stdio::null()).stdout(log).process_group(0);
        without_keys(&mut command);
        let machine = Machine::here();
        limit(&mut command, &machine, cpus);
        let kills = machine.memory_kills();
        let mut mappings = vec![
            FdMapping { parent_fd: far.into(), child_fd: SOCKET_FD },
            FdMapping { parent_fd: arena.fd().try_clone_to_owned()?, child_fd: ARENA_FD },
        ];
        for &(child_fd, memory) in memories {
            mappings.push(FdMapping { parent_fd: memory.try_clone_to_owned()?, child_fd });
        }
        command.fd_mappings(mappings).map_err(io::Error::other)?;
        let mut set = CpuSet::new();
        cpus.iter().for_each(|&cpu| set.set(cpu));
        let pinned = !cpus.is_empty();
        #[expect(unsafe_code, reason = "pre_exec runs between fork and exec")]
        // SAFETY: prctl and sched_setaffinity are async-signal-safe system calls, and the closure
        // owns the data that it reads.
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
            Ok((pid, pidfd)) => {
                Ok((Self { child, pid, pidfd, stuck: false, machine, kills }, near))
            }
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(error)
            }
        }
    }

    /// Waits until the process has exited, for at most `limit`. Returns true if it has exited.
    pub(crate) fn ended_within(&self, limit: Duration) -> bool {
        let limit =
            Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&limit)), Ok(1))
    }

    /// Ends a rank whose connection failed. Returns how the rank ended.
    #[must_use]
    pub fn bury(mut self) -> Exit {
        let by_itself = self.ended_within(LAST_BREATH);
        let status = self.kill();
        match status {
            Ok(status) if by_itself && status.signal() == Some(9) && self.is_explained() => {
                let usable = self.machine.memory().usable();
                let most = usable.map(|bytes| format!(" ({} MiB are all there is)", bytes >> 20));
                let most = most.unwrap_or_default();
                let text = format!("the kernel killed it because memory ran out{most}");
                Exit { text, out_of_memory: true }
            }
            Ok(status) if by_itself => describe(status).into(),
            Ok(_) => "it closed its connection and had to be killed".into(),
            Err(error) => format!("its exit status is unknown: {error}").into(),
        }
    }

    /// Returns the number of out-of-memory kills in the process's control group, at its start and
    /// now.
    fn kills(&self) -> Option<(u64, u64)> {
        self.kills.zip(self.machine.memory_kills())
    }

    /// True if an out-of-memory kill explains the end of the process. Each kill explains the end of
    /// only one process.
    fn is_explained(&self) -> bool {
        self.kills().is_some_and(|(before, now)| explains(&EXPLAINED, before, now))
    }

    /// True if the process has exited and memory ran out. Other ranks of its group then fail
    /// because of its end.
    pub(crate) fn starved(&self) -> bool {
        let ran_out = self.kills().is_some_and(|(before, now)| now > before);
        ran_out && self.ended_within(LAST_BREATH)
    }

    /// Sends SIGKILL to the whole process group, without waiting.
    pub(crate) fn doom(&self) {
        self.signal(Signal::KILL);
    }

    /// Sends a signal to the whole process group.
    pub(crate) fn signal(&self, signal: Signal) {
        let _ = kill_process_group(self.pid, signal);
    }

    /// Sends SIGKILL to the whole process group, even if its leader has exited, because the
    /// leader's children may still run. Waits for the exit, but not for ever.
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
        let (process, _socket) = RankProcess::spawn(command, &arena, &[], &[]).expect("a shell");
        assert_eq!(process.bury(), "exit status 0".into());
    }

    /// Writes the files of a machine on which `kills` processes of the control group were killed.
    fn write(root: &std::path::Path, kills: u32) {
        let files = [
            ("proc/meminfo", "MemTotal: 2048000 kB\nMemAvailable: 1024000 kB\n".to_owned()),
            ("proc/self/cgroup", "0::/a\n".to_owned()),
            ("sys/fs/cgroup/a/memory.max", "629145600\n".to_owned()),
            ("sys/fs/cgroup/a/memory.current", "104857600\n".to_owned()),
            ("sys/fs/cgroup/a/memory.events", format!("oom 9\noom_kill {kills}\n")),
            ("sys/fs/cgroup/a/cpu.max", "50000 100000\n".to_owned()),
        ];
        for (name, text) in files {
            let path = root.join(name);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
            std::fs::write(path, text).expect("a file");
        }
    }

    #[test]
    fn a_kill_explains_the_end_of_one_hand() {
        let explained = AtomicU64::new(0);
        assert!(!explains(&explained, 2, 2));
        assert!(
            explains(&explained, 2, 4) && explains(&explained, 2, 4),
            "two deaths at a time are explained"
        );
        assert!(!explains(&explained, 2, 4), "a third process died for another reason");
        assert!(!explains(&explained, 4, 4) && explains(&explained, 4, 5));
        assert!(explains(&explained, 9, 10), "other processes were killed in between");
    }

    #[test]
    fn a_hand_is_told_what_it_may_use() {
        let root = tempfile::tempdir().expect("a folder");
        write(root.path(), 0);
        let told = |mut command: Command| {
            limit(&mut command, &Machine::at(root.path()), &[]);
            let value = |name: &str| {
                let mut all = command.get_envs();
                all.find(|(other, _)| *other == name).and_then(|(_, value)| value?.to_str())
            };
            (value(AVAILABLE).map(str::to_owned), value(THREADS).map(str::to_owned))
        };
        let bytes = (500_u64 << 20).to_string();
        assert_eq!(told(Command::new("sh")), (Some(bytes.clone()), Some("1".into())));
        let mut given = Command::new("sh");
        given.env(THREADS, "7");
        assert_eq!(told(given), (Some(bytes), Some("7".into())));
    }

    #[test]
    fn a_kill_of_the_kernel_is_known_by_its_count() {
        let root = tempfile::tempdir().expect("a folder");
        let end = |script: &str, kills: u32| {
            write(root.path(), 3);
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            let arena = crate::Arena::new(0).expect("an arena");
            let (mut process, socket) =
                RankProcess::spawn(command, &arena, &[], &[]).expect("a shell");
            process.machine = Machine::at(root.path());
            process.kills = process.machine.memory_kills();
            write(root.path(), kills);
            let exit = process.bury();
            drop(socket);
            exit
        };
        let text = "the kernel killed it because memory ran out (600 MiB are all there is)";
        assert_eq!(end("kill -9 $$", 4), Exit { text: text.into(), out_of_memory: true });
        assert_eq!(
            end("kill -9 $$", 3),
            "killed by signal 9".into(),
            "killed by another process than the kernel"
        );
        assert_eq!(end("exit 3", 4), "exit status 3".into(), "another was killed");
    }
}
