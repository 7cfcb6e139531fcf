//! Tests with machines that are simulated by folders of files: cgroup versions, mounts, nested
//! groups, namespaces, damaged files.

use std::fs;
use std::path::Path;

use forebay_machine::{Machine, MachineMemory};
use proptest::prelude::*;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// A machine with 16 GiB of memory, of which 12 GiB are available, and two cores with two threads
/// each.
const BASE: [(&str, &str); 6] = [
    ("proc/meminfo", "MemTotal:       16777216 kB\nMemFree: 9 kB\nMemAvailable:   12582912 kB\n"),
    ("proc/thread-self/status", "Name:\tx\nCpus_allowed_list:\t0-3\n"),
    ("sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0,2\n"),
    ("sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "1,3\n"),
    ("sys/devices/system/cpu/cpu2/topology/thread_siblings_list", "0,2\n"),
    ("sys/devices/system/cpu/cpu3/topology/thread_siblings_list", "1,3\n"),
];
const UNIFIED: &str =
    "proc/self/mountinfo|30 23 0:28 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw\n";
/// Cgroups of version 1, with the CPU controllers mounted together.
const FIRST: &str = "proc/self/mountinfo|31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
    32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
    35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
    41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
const UNLIMITED: &str = "9223372036854771712";

fn write(root: &Path, file: &str, content: impl AsRef<[u8]>) {
    let path = root.join(file);
    fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
    fs::write(path, content).expect("a file");
}

/// Creates the base machine with more files, each given as `path|content`.
fn machine(files: &[&str]) -> (TempDir, Machine) {
    let root = tempfile::tempdir().expect("a folder");
    for (file, content) in BASE {
        write(root.path(), file, content);
    }
    for file in files {
        let (file, content) = file.split_once('|').expect("path|content");
        write(root.path(), file, content);
    }
    let machine = Machine::at(root.path());
    (root, machine)
}

fn memory(files: &[&str]) -> MachineMemory {
    machine(files).1.memory()
}

/// Returns the memory limit and the available memory.
fn limits(files: &[&str]) -> (Option<u64>, u64) {
    let MachineMemory { limit, available, .. } = memory(files);
    (limit, available.expect("known"))
}

fn threads(files: &[&str]) -> (Option<f64>, usize) {
    let processors = machine(files).1.processors();
    (processors.quota, processors.threads())
}

#[test]
fn without_groups_the_machine_is_the_limit() {
    let found = memory(&[]);
    let expected = MachineMemory { total: Some(16 * GIB), limit: None, available: Some(12 * GIB) };
    assert_eq!(found, expected);
    assert_eq!(found.usable(), Some(16 * GIB));
    let (_root, machine) = machine(&[]);
    let cores = machine.processors().cores;
    assert_eq!(cores, [vec![0, 2], vec![1, 3]], "hardware threads of a core count once");
    assert_eq!(machine.memory_kills(), None);
}

#[test]
fn the_tightest_of_a_unit_and_its_slices_counts() {
    let unit = "proc/self/cgroup|0::/system.slice/forebay.service\n";
    let slice = "sys/fs/cgroup/system.slice/memory.max|1073741824\n";
    let files = [
        UNIFIED,
        unit,
        slice,
        "sys/fs/cgroup/system.slice/memory.current|268435456\n",
        "sys/fs/cgroup/system.slice/forebay.service/memory.max|max\n",
        "sys/fs/cgroup/system.slice/forebay.service/memory.current|104857600\n",
    ];
    assert_eq!(
        limits(&files),
        (Some(GIB), 768 * MIB),
        "the slice's limit, less the use of all in it"
    );
    let tight = "sys/fs/cgroup/system.slice/forebay.service/memory.max|314572800\n";
    let files = [&files[..4], &[tight, files[5]]].concat();
    assert_eq!(limits(&files), (Some(300 * MIB), 200 * MIB));
}

#[test]
fn above_the_high_mark_memory_is_no_use() {
    let files = [
        UNIFIED,
        "proc/self/cgroup|0::/a\n",
        "sys/fs/cgroup/a/memory.max|2147483648\n",
        "sys/fs/cgroup/a/memory.high|1073741824\n",
        "sys/fs/cgroup/a/memory.current|1610612736\n",
    ];
    assert_eq!(limits(&files), (Some(GIB), 0));
}

#[test]
fn files_in_the_page_cache_are_not_used_memory() {
    let unified = [
        UNIFIED,
        "proc/self/cgroup|0::/a\n",
        "sys/fs/cgroup/a/memory.max|1073741824\n",
        "sys/fs/cgroup/a/memory.current|1072693248\n",
        "sys/fs/cgroup/a/memory.stat|anon 100\nfile 9\ninactive_file 734003200\nactive_file 209715200\n",
    ];
    assert_eq!(limits(&unified), (Some(GIB), GIB - 123 * MIB));
    let first = [
        FIRST,
        "proc/self/cgroup|4:memory:/a\n",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes|1073741824\n",
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes|1072693248\n",
        "sys/fs/cgroup/memory/a/memory.stat|inactive_file 1\ntotal_inactive_file 734003200\ntotal_active_file 209715200\n",
    ];
    assert_eq!(limits(&first), (Some(GIB), GIB - 123 * MIB));
}

#[test]
fn a_group_of_the_first_version_is_found_where_it_is_mounted() {
    let files = [
        FIRST,
        "proc/self/cgroup|9:name=systemd:/\n4:memory:/api/x\n1:cpu,cpuacct:/api\n0::/\n",
        "sys/fs/cgroup/memory/api/x/memory.limit_in_bytes|629145600\n",
        "sys/fs/cgroup/memory/api/x/memory.usage_in_bytes|104857600\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes|9223372036854771712\n",
        "sys/fs/cgroup/cpu,cpuacct/api/cpu.cfs_quota_us|50000\n",
        "sys/fs/cgroup/cpu,cpuacct/api/cpu.cfs_period_us|100000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us|-1\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us|100000\n",
    ];
    assert_eq!(limits(&files), (Some(600 * MIB), 500 * MIB));
    assert_eq!(threads(&files), (Some(0.5), 1), "half a processor computes with one thread");
}

#[test]
fn groups_that_are_not_mounted_are_in_the_hierarchical_limit() {
    let stat = format!(
        "sys/fs/cgroup/memory/memory.stat|cache 1\nhierarchical_memory_limit {}\n",
        2 * GIB
    );
    let own = format!("sys/fs/cgroup/memory/memory.limit_in_bytes|{UNLIMITED}\n");
    let used = "sys/fs/cgroup/memory/memory.usage_in_bytes|1073741824\n";
    assert_eq!(limits(&[FIRST, &own, &stat, used]), (Some(2 * GIB), GIB));
}

#[test]
fn a_parent_without_hierarchy_does_not_pay() {
    let group = "proc/self/cgroup|4:memory:/a/b\n";
    let own = "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes|2147483648\n";
    let above = "sys/fs/cgroup/memory/a/memory.limit_in_bytes|1073741824\n";
    assert_eq!(limits(&[FIRST, group, own, above]).0, Some(GIB));
    let apart = "sys/fs/cgroup/memory/a/memory.use_hierarchy|0\n";
    assert_eq!(limits(&[FIRST, group, own, above, apart]).0, Some(2 * GIB));
}

#[test]
fn hybrid_mounts_count_in_both_versions() {
    // On older distributions with systemd, the memory controller is in version 1 by default.
    let files = [
        FIRST,
        "proc/self/cgroup|4:memory:/user.slice\n0::/user.slice/user-0.slice\n",
        "sys/fs/cgroup/memory/user.slice/memory.limit_in_bytes|2147483648\n",
        "sys/fs/cgroup/unified/user.slice/memory.max|1073741824\n",
        "sys/fs/cgroup/unified/user.slice/cpu.max|150000 100000\n",
    ];
    assert_eq!(limits(&files).0, Some(GIB));
    assert_eq!(threads(&files), (Some(1.5), 2));
}

#[test]
fn containers_have_their_limits_at_the_top() {
    let limit = "sys/fs/cgroup/memory.max|1073741824\n";
    let half = "sys/fs/cgroup/cpu.max|50000 100000\n";
    // Paths of a group: as seen in its own cgroup namespace, as seen after it was moved from
    // outside (two forms), and without a namespace.
    for group in ["0::/\n", "0::/../..\n", "0::/../other\n", "0::/docker/0123\n"] {
        let group = format!("proc/self/cgroup|{group}");
        let files = [UNIFIED, &group, limit, half];
        assert_eq!(limits(&files).0, Some(GIB), "{group}");
        assert_eq!(threads(&files), (Some(0.5), 1), "{group}");
    }
    // Version 1 in a container: only the folder of the container's group is mounted.
    let files = [
        "proc/self/mountinfo|9 8 0:1 /docker/0123 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        "proc/self/cgroup|4:memory:/docker/0123/inner\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes|2147483648\n",
        "sys/fs/cgroup/memory/inner/memory.limit_in_bytes|1073741824\n",
        // A wrong path: the mounted folder already is `/docker/0123`.
        "sys/fs/cgroup/memory/docker/0123/inner/memory.limit_in_bytes|1\n",
    ];
    assert_eq!(limits(&files).0, Some(GIB));
}

#[test]
fn groups_that_are_mounted_elsewhere_are_found_there() {
    let files = [
        "proc/self/mountinfo|9 8 0:1 / /var/my\\040groups rw - cgroup2 none rw\n",
        "proc/self/cgroup|0::/a\n",
        "var/my groups/a/memory.max|1073741824\n",
        "sys/fs/cgroup/a/memory.max|1\n",
    ];
    assert_eq!(limits(&files).0, Some(GIB));
}

#[test]
fn without_a_list_of_mounts_the_usual_places_are_read() {
    let group = "proc/self/cgroup|4:memory:/a\n3:cpu,cpuacct:/a\n0::/b\n";
    let first = [
        group,
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes|1073741824\n",
        "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us|100000\n",
        "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us|100000\n",
    ];
    assert_eq!(limits(&first).0, Some(GIB));
    assert_eq!(threads(&first), (Some(1.0), 1));
    assert_eq!(limits(&[group, "sys/fs/cgroup/b/memory.max|1073741824\n"]).0, Some(GIB));
}

#[test]
fn a_limit_beyond_the_machine_is_none() {
    for limit in [UNLIMITED, "17179869184", "max", "-1", "", "nonsense"] {
        let file = format!("sys/fs/cgroup/memory.max|{limit}\n");
        assert_eq!(limits(&[UNIFIED, &file]), (None, 12 * GIB), "{limit}");
    }
}

#[test]
fn no_more_is_available_than_there_is() {
    let info = "proc/meminfo|MemTotal: 1048576 kB\nMemAvailable: 2097152 kB\n";
    assert_eq!(limits(&[info]), (None, GIB));
}

#[test]
fn quotas_follow_the_chain() {
    let group = "proc/self/cgroup|0::/a/b\n";
    let own = "sys/fs/cgroup/a/b/cpu.max|max 100000\n";
    for (above, expected) in [
        ("max 100000", (None, 2)),
        ("100000 100000", (Some(1.0), 1)),
        ("5000 100000", (Some(0.05), 1)),
        ("400000 100000", (Some(4.0), 2)),
        ("100000 0", (None, 2)),
        ("0 100000", (None, 2)),
        ("-5 100000", (None, 2)),
        ("100000", (None, 2)),
        ("", (None, 2)),
    ] {
        let above = format!("sys/fs/cgroup/a/cpu.max|{above}\n");
        assert_eq!(threads(&[UNIFIED, group, own, &above]), expected, "{above}");
    }
}

#[test]
fn processors_are_those_that_the_thread_may_use() {
    let (_root, machine) = machine(&["proc/thread-self/status|Cpus_allowed_list:\t1,3\n"]);
    let processors = machine.processors();
    assert_eq!((processors.cores.clone(), processors.threads()), (vec![vec![1, 3]], 1));
    assert_eq!(processors.threads_on(&[3]), 1);
}

#[test]
fn kills_are_those_of_the_own_group() {
    let vmstat = "proc/vmstat|nr_free_pages 1\noom_kill 7\n";
    let group = "proc/self/cgroup|4:memory:/a\n0::/a\n";
    let second = "sys/fs/cgroup/a/memory.events|low 0\noom 4\noom_kill 3\n";
    let first = "sys/fs/cgroup/memory/a/memory.oom_control|oom_kill_disable 0\noom_kill 2\n";
    assert_eq!(
        machine(&[vmstat]).1.memory_kills(),
        Some(7),
        "without a group, the machine's count is read"
    );
    assert_eq!(machine(&[vmstat, group, UNIFIED, second]).1.memory_kills(), Some(3));
    assert_eq!(machine(&[vmstat, group, FIRST, first]).1.memory_kills(), Some(2));
}

#[test]
fn a_folder_with_nothing_is_a_machine_without_facts() {
    let root = tempfile::tempdir().expect("a folder");
    let machine = Machine::at(root.path());
    assert_eq!(machine.memory(), MachineMemory::default());
    assert_eq!(machine.memory_kills(), None);
    let processors = machine.processors();
    assert!(
        processors.quota.is_none() && !processors.cores.is_empty(),
        "without files, the system is asked"
    );
}

/// All files that this crate reads, with valid content.
const WHOLE: [(&str, &str); 16] = [
    ("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 12582912 kB\n"),
    ("proc/vmstat", "oom_kill 7\n"),
    ("proc/thread-self/status", "Cpus_allowed_list:\t0-3\n"),
    ("proc/self/cgroup", "4:memory:/a/b\n1:cpu,cpuacct:/a\n0::/a/b\n"),
    (
        "proc/self/mountinfo",
        "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
         35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
         41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
    ),
    ("sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0,2\n"),
    ("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "1073741824\n"),
    ("sys/fs/cgroup/memory/a/b/memory.usage_in_bytes", "73741824\n"),
    ("sys/fs/cgroup/memory/a/b/memory.oom_control", "oom_kill 2\n"),
    (
        "sys/fs/cgroup/memory/a/b/memory.stat",
        "hierarchical_memory_limit 1073741824\ntotal_inactive_file 1\ntotal_active_file 5\n",
    ),
    ("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "50000\n"),
    ("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000\n"),
    ("sys/fs/cgroup/unified/a/memory.max", "2147483648\n"),
    ("sys/fs/cgroup/unified/a/memory.current", "73741824\n"),
    ("sys/fs/cgroup/unified/a/b/memory.stat", "inactive_file 5\nactive_file 99\n"),
    ("sys/fs/cgroup/unified/a/b/cpu.max", "150000 100000\n"),
];

/// A change to one file: the file's index, the position and number of the replaced bytes, and the
/// new bytes.
fn damage() -> impl Strategy<Value = (usize, usize, usize, Vec<u8>)> {
    let numbers =
        prop::sample::select(vec!["18446744073709551615", "-1", "/../..", " - ", "4294967295"]);
    let bytes = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..20),
        numbers.prop_map(|text| text.as_bytes().to_vec())
    ];
    (0..WHOLE.len(), 0..120_usize, 0..120_usize, bytes)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn damaged_files_give_numbers_within_bounds(all in prop::collection::vec(damage(), 1..6)) {
        let mut files: Vec<Vec<u8>> =
            WHOLE.iter().map(|(_, text)| text.as_bytes().to_vec()).collect();
        for (file, at, length, with) in all {
            let content = &mut files[file];
            let at = at.min(content.len());
            let end = (at + length).min(content.len());
            content.splice(at..end, with);
        }
        let root = tempfile::tempdir().expect("a folder");
        for ((name, _), content) in WHOLE.iter().zip(&files) {
            write(root.path(), name, content);
        }
        let machine = Machine::at(root.path());
        let memory = machine.memory();
        prop_assert!(memory.limit.is_none_or(|limit| memory.total.is_none_or(|all| limit < all)));
        let within = memory.available.zip(memory.usable());
        prop_assert!(within.is_none_or(|(available, usable)| available <= usable));
        let processors = machine.processors();
        let threads = processors.threads();
        prop_assert!((1..=processors.cores.len()).contains(&threads), "{processors:?}");
        let _ = machine.memory_kills();
    }
}

#[test]
fn this_machine_has_memory_and_processors() {
    let machine = Machine::at("/");
    let memory = machine.memory();
    assert!(memory.available.is_some_and(|bytes| bytes > MIB), "{memory:?}");
    assert!(machine.processors().threads() >= 1);
}
