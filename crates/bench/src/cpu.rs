//! The CPU time of this process, and of the measured servers.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::output::ProcessCpu;

/// The CPU time that this process has used.
pub(crate) fn own() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// A process as /proc describes it, with times in clock ticks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Process {
    name: String,
    parent: u32,
    user: u64,
    system: u64,
    /// The user time of child processes that have exited and were waited for.
    ended_user: u64,
    ended_system: u64,
}

/// The process trees of servers at one point in time.
#[derive(Debug, Clone, Default)]
pub(crate) struct Trees {
    roots: Vec<u32>,
    processes: BTreeMap<u32, Process>,
}

impl Trees {
    /// Reads the trees below `roots` from /proc.
    pub(crate) fn of(roots: &[u32]) -> Self {
        Self { roots: roots.to_vec(), processes: below(&scan(Path::new("/proc")), roots) }
    }

    /// The CPU time of each process since `self` was read, largest first. A process that started
    /// since counts completely. The time of a process that has exited counts for its parent, if the
    /// parent waited for it.
    pub(crate) fn used_since(&self) -> Vec<ProcessCpu> {
        // A process whose parent has exited is no longer below that parent, but is still counted.
        let known: Vec<u32> = self.roots.iter().chain(self.processes.keys()).copied().collect();
        let now = below(&scan(Path::new("/proc")), &known);
        self.difference(&now, rustix::param::clock_ticks_per_second())
    }

    fn difference(&self, now: &BTreeMap<u32, Process>, ticks_per_second: u64) -> Vec<ProcessCpu> {
        let mut used: Vec<ProcessCpu> = now
            .iter()
            .map(|(pid, process)| {
                let before = self.processes.get(pid).cloned().unwrap_or_default();
                // The parent's times include those of child processes that have exited.
                let ended = self
                    .processes
                    .iter()
                    .filter(|(child, then)| then.parent == *pid && !now.contains_key(child));
                let (ended_user, ended_system) = ended.fold((0, 0), |(user, system), (_, then)| {
                    (user + then.user + then.ended_user, system + then.system + then.ended_system)
                });
                let seconds = |now: u64, before: u64| {
                    now.saturating_sub(before) as f64 / ticks_per_second as f64
                };
                ProcessCpu {
                    pid: *pid,
                    name: process.name.clone(),
                    user_seconds: seconds(
                        process.user + process.ended_user,
                        before.user + before.ended_user + ended_user,
                    ),
                    system_seconds: seconds(
                        process.system + process.ended_system,
                        before.system + before.ended_system + ended_system,
                    ),
                }
            })
            .collect();
        used.sort_by(|one, other| other.seconds().total_cmp(&one.seconds()));
        used
    }
}

/// Returns all processes by id.
fn scan(proc: &Path) -> BTreeMap<u32, Process> {
    let Ok(entries) = std::fs::read_dir(proc) else { return BTreeMap::new() };
    entries
        .flatten()
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
            Some((pid, parse(&stat)?))
        })
        .collect()
}

/// Parses a line of `/proc/PID/stat`. The name may contain spaces and brackets.
fn parse(stat: &str) -> Option<Process> {
    let (_, rest) = stat.split_once('(')?;
    let (name, rest) = rest.rsplit_once(')')?;
    // proc(5) counts fields from 1; the first field here is number 3, the state.
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    Some(Process {
        name: name.to_owned(),
        parent: u32::try_from(field(4)?).ok()?,
        user: field(14)?,
        system: field(15)?,
        ended_user: field(16)?,
        ended_system: field(17)?,
    })
}

/// Returns the processes of `all` that are in `roots` or descend from them.
fn below(all: &BTreeMap<u32, Process>, roots: &[u32]) -> BTreeMap<u32, Process> {
    let mut found = BTreeMap::new();
    let mut open = roots.to_vec();
    while let Some(pid) = open.pop() {
        if let Some(process) = all.get(&pid)
            && found.insert(pid, process.clone()).is_none()
        {
            open.extend(all.iter().filter(|(_, child)| child.parent == pid).map(|(pid, _)| *pid));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(parent: u32, own: (u64, u64), ended: (u64, u64)) -> Process {
        Process {
            name: "p".into(),
            parent,
            user: own.0,
            system: own.1,
            ended_user: ended.0,
            ended_system: ended.1,
        }
    }

    #[test]
    fn a_stat_line_is_read() {
        let line = "42 (a (b) c) S 7 42 42 0 -1 4194560 2 0 0 0 11 12 13 14 20 0 1 0 5 6";
        let expected = Process { name: "a (b) c".into(), ..process(7, (11, 12), (13, 14)) };
        assert_eq!(parse(line), Some(expected));
        assert_eq!(parse("42 (cut) S 7"), None);
    }

    #[test]
    fn trees_are_whole_and_no_more() {
        let all: BTreeMap<u32, Process> = [(1, 0), (2, 1), (3, 2), (4, 3), (5, 1)]
            .map(|(pid, parent)| (pid, process(parent, (0, 0), (0, 0))))
            .into();
        let pids = |roots: &[u32]| below(&all, roots).into_keys().collect::<Vec<_>>();
        assert_eq!(pids(&[2]), [2, 3, 4]);
        assert_eq!(pids(&[3, 2, 5, 9]), [2, 3, 4, 5]);
    }

    #[test]
    fn ended_children_count_once_and_new_ones_whole() {
        let before = [(1, process(0, (100, 0), (10, 0))), (2, process(1, (50, 30), (0, 0)))];
        let before = Trees { roots: vec![1], processes: before.into() };
        // Process 2 used 7 more user ticks and 1 more system tick before it exited. Process 3 is
        // new.
        let now = [(1, process(0, (120, 5), (67, 31))), (3, process(1, (3, 0), (0, 0)))];
        let used = before.difference(&now.into(), 100);
        let used: Vec<_> =
            used.iter().map(|one| (one.pid, one.user_seconds, one.system_seconds)).collect();
        assert_eq!(used, [(1, 0.27, 0.06), (3, 0.03, 0.0)]);
    }

    #[test]
    fn this_process_is_found_and_its_time_grows() {
        let pid = std::process::id();
        let (trees, before) = (Trees::of(&[pid]), own());
        assert!(trees.processes.contains_key(&pid));
        let mut sum = 0_u64;
        while own() == before {
            sum = std::hint::black_box(sum.wrapping_mul(31).wrapping_add(7));
        }
        assert!(trees.used_since().iter().any(|used| used.pid == pid));
    }
}
