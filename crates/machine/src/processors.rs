//! CPUs: those on which a thread may run, and the CPU time that control groups allow.

use std::collections::BTreeSet;

use rustix::thread::{CpuSet, sched_getaffinity};

use crate::Machine;
use crate::groups::{Group, Version, find};

/// The niceness of threads with lowered priority.
const NICENESS: i32 = 10;

/// The CPUs that a thread may use.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Processors {
    /// CPU numbers, grouped by core: hardware threads share a core.
    pub cores: Vec<Vec<usize>>,
    /// The tightest control group limit on CPU time, in CPUs; `None` if there is no limit.
    pub quota: Option<f64>,
}

impl Processors {
    /// The number of threads to compute with: one per core, and at most the CPU quota, rounded up.
    /// More threads would only take CPU time from each other, and at every barrier all threads wait
    /// for the slowest.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads_on(&[])
    }

    /// Like [`Self::threads`], for a thread that may run only on the CPUs in `cpus`; on any CPU if
    /// `cpus` is empty.
    #[must_use]
    pub fn threads_on(&self, cpus: &[usize]) -> usize {
        let on = |core: &&Vec<usize>| cpus.is_empty() || core.iter().any(|cpu| cpus.contains(cpu));
        let cores = self.cores.iter().filter(on).count();
        let paid = self.quota.map_or(usize::MAX, |quota| quota.ceil() as usize);
        cores.min(paid).max(1)
    }
}

/// Lowers the calling thread's priority, so that it waits if all CPUs are busy. Used for long
/// computations, which must not delay threads that pass messages.
pub fn stand_back() {
    // Every process is allowed to do this. If it fails anyway, nothing else can be done.
    let _ = rustix::process::nice(NICENESS);
}

/// Parses a list of CPUs: `0-3,8` means 0, 1, 2, 3 and 8.
///
/// # Errors
/// The text is not a list of CPUs.
pub fn cpu_list(text: &str) -> Result<Vec<usize>, String> {
    let wrong = || format!("`{text}` is not a list of processors such as 0-3,8");
    let number = |text: &str| text.trim().parse::<usize>().map_err(|_| wrong());
    let mut cpus = BTreeSet::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if first > last || last >= CpuSet::MAX_CPU {
            return Err(wrong());
        }
        cpus.extend(first..=last);
    }
    Ok(cpus.into_iter().collect())
}

pub(crate) fn read(machine: &Machine) -> Processors {
    let groups = find(machine, "cpu");
    let quota = groups.iter().filter_map(quota_of).min_by(f64::total_cmp);
    Processors { cores: cores(machine, &allowed(machine)), quota }
}

fn quota_of(group: &Group) -> Option<f64> {
    let (quota, period) = match group.version {
        Version::One => (group.number("cpu.cfs_quota_us")?, group.number("cpu.cfs_period_us")?),
        Version::Two => {
            let text = group.text("cpu.max")?;
            let (quota, period) = text.trim().split_once(' ')?;
            (quota.parse::<u64>().ok()?, period.parse::<u64>().ok()?)
        }
    };
    (quota > 0 && period > 0).then(|| quota as f64 / period as f64)
}

/// Returns the CPUs on which the calling thread may run.
fn allowed(machine: &Machine) -> Vec<usize> {
    let status = machine.text("/proc/thread-self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let listed = list.and_then(|list| cpu_list(list.trim()).ok());
    let asked = || {
        let set = sched_getaffinity(None).ok()?;
        Some((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
    };
    listed.or_else(asked).unwrap_or_else(|| vec![0])
}

fn cores(machine: &Machine, cpus: &[usize]) -> Vec<Vec<usize>> {
    let siblings = |cpu: usize| {
        let file = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        cpu_list(machine.text(&file)?.trim()).ok()
    };
    let mut cores: Vec<Vec<usize>> = Vec::new();
    let mut seen: BTreeSet<usize> = BTreeSet::new();
    for &cpu in cpus {
        if !seen.insert(cpu) {
            continue;
        }
        let others = siblings(cpu).unwrap_or_default().into_iter();
        let others = others.filter(|other| cpus.contains(other) && !seen.contains(other));
        let mut core: Vec<usize> = others.collect();
        seen.extend(&core);
        core.push(cpu);
        core.sort_unstable();
        cores.push(core);
    }
    cores
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_taskset_reads_them() {
        assert_eq!(cpu_list("0-2,5"), Ok(vec![0, 1, 2, 5]));
        assert_eq!(cpu_list("3,3"), Ok(vec![3]));
        for wrong in ["", "x", "1;", "3-1", "0-99999", "-1"] {
            assert!(cpu_list(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn threads_have_a_core_and_time() {
        let cores = vec![vec![0, 4], vec![1, 5], vec![2, 6], vec![3, 7]];
        let with = |quota| Processors { cores: cores.clone(), quota };
        for (quota, threads) in [
            (None, 4),
            (Some(0.5), 1),
            (Some(1.0), 1),
            (Some(1.5), 2),
            (Some(3.0), 3),
            (Some(9.0), 4),
        ] {
            assert_eq!(with(quota).threads(), threads, "{quota:?}");
        }
        assert_eq!(with(None).threads_on(&[1, 5, 6]), 2);
        assert_eq!(with(Some(0.1)).threads_on(&[1, 5, 6]), 1);
        assert_eq!(with(None).threads_on(&[99]), 1, "at least one thread");
    }
}
