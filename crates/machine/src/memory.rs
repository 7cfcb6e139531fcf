//! The memory of the machine, and the memory limits of the control groups above the process.

use crate::Machine;
use crate::groups::{Group, Version, field, find};

/// Sizes of memory in bytes; `None` if the system does not report the size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MachineMemory {
    /// The memory of the machine.
    pub total: Option<u64>,
    /// The tightest limit of a control group; `None` if no limit is below the total.
    pub limit: Option<u64>,
    /// Memory that can still be allocated before the kernel kills or throttles the process. Files
    /// in the page cache count as free, because the kernel drops them when memory is needed.
    pub available: Option<u64>,
}

impl MachineMemory {
    /// The largest amount of memory that the process can ever use.
    #[must_use]
    pub fn usable(&self) -> Option<u64> {
        least(self.total, self.limit)
    }
}

pub(crate) fn read(machine: &Machine) -> MachineMemory {
    let info = machine.text("/proc/meminfo").unwrap_or_default();
    let bytes = |name: &str| field(&info, name)?.checked_mul(1024);
    let total = bytes("MemTotal:");
    let (mut limit, mut left) = (None, bytes("MemAvailable:"));
    for group in charged(machine) {
        // A limit that is not below the machine's memory is ignored.
        let Some(of_group) = limit_of(&group).filter(|limit| total.is_none_or(|all| *limit < all))
        else {
            continue;
        };
        limit = least(limit, Some(of_group));
        left = least(left, Some(of_group.saturating_sub(used_by(&group))));
    }
    let mut memory = MachineMemory { total, limit, available: None };
    memory.available = left.map(|left| memory.usable().map_or(left, |usable| left.min(usable)));
    memory
}

pub(crate) fn kills(machine: &Machine) -> Option<u64> {
    const NAME: &str = "oom_kill";
    let of_group = |group: &Group| {
        let file = match group.version {
            Version::One => "memory.oom_control",
            Version::Two => "memory.events",
        };
        group.field(file, NAME)
    };
    let counted = find(machine, "memory").iter().find_map(of_group);
    counted.or_else(|| field(&machine.text("/proc/vmstat")?, NAME))
}

/// Returns the groups to which the kernel charges the process's memory.
fn charged(machine: &Machine) -> Vec<Group> {
    let mut charged: Vec<Group> = Vec::new();
    for group in find(machine, "memory") {
        let below = charged.last().filter(|below| below.version == group.version);
        // In version 1, a group may be configured not to count towards its parent.
        let apart = group.number("memory.use_hierarchy") == Some(0);
        if below.is_some() && group.version == Version::One && apart {
            continue;
        }
        charged.push(group);
    }
    charged
}

fn limit_of(group: &Group) -> Option<u64> {
    match group.version {
        // `hierarchical_memory_limit` includes the limits of groups above that are not mounted
        // here.
        Version::One => least(
            group.number("memory.limit_in_bytes"),
            group.field("memory.stat", "hierarchical_memory_limit"),
        ),
        // Above `memory.high` no process is killed, but every allocation is throttled.
        Version::Two => least(group.number("memory.max"), group.number("memory.high")),
    }
}

/// Returns the memory that a group uses, without files that the kernel can drop.
fn used_by(group: &Group) -> u64 {
    let (usage, files) = match group.version {
        Version::One => ("memory.usage_in_bytes", ["total_inactive_file", "total_active_file"]),
        Version::Two => ("memory.current", ["inactive_file", "active_file"]),
    };
    let stat = group.text("memory.stat").unwrap_or_default();
    let files = files.iter().filter_map(|name| field(&stat, name)).fold(0, u64::saturating_add);
    group.number(usage).unwrap_or(0).saturating_sub(files)
}

fn least(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    [one, other].into_iter().flatten().min()
}
