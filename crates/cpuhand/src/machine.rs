//! The machine's resources: cores that this process may run on, and memory that is free.

use std::collections::BTreeSet;
use std::fs;

use rustix::thread::{CpuSet, sched_getaffinity};

/// Cores that this process may run on; the hardware threads of one core count once.
pub(crate) fn physical_cores() -> usize {
    let Ok(set) = sched_getaffinity(None) else { return 1 };
    let available: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect();
    let siblings = |cpu: &usize| {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        fs::read_to_string(path).ok()
    };
    let cores: Option<BTreeSet<String>> = available.iter().map(siblings).collect();
    cores.map_or(available.len(), |cores| cores.len()).max(1)
}

/// Memory of the host that can still be allocated.
pub(crate) fn available_bytes() -> u64 {
    free().min(of_container())
}

fn free() -> u64 {
    let Ok(text) = fs::read_to_string("/proc/meminfo") else { return 0 };
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// The bytes that the container's limit leaves, if there is a limit (cgroup v2).
fn of_container() -> u64 {
    let number = |name: &str| {
        let text = fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?;
        text.trim().parse::<u64>().ok()
    };
    match (number("memory.max"), number("memory.current")) {
        (Some(limit), Some(used)) => limit.saturating_sub(used),
        _ => u64::MAX,
    }
}
