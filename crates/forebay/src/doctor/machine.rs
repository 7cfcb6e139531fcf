//! Processor, memory, limits, GPUs: what the system says about itself.

use std::fs;
use std::path::Path;

use forebay_hub::size;
use rustix::process::{Resource, getrlimit};

use super::Finding;
use crate::gpus::Gpus;
use crate::{affinity, descriptors};

/// Less than this is for tiny models only.
const LITTLE_MEMORY: u64 = 2_000_000_000;
/// Fewer connections than this are soon used up.
const FEW_CONNECTIONS: usize = 256;
/// Instruction sets that the kernels have loops for, by the kernel's names for them: best first.
const INSTRUCTIONS: [(&str, &str); 8] = [
    ("amx_bf16", "AMX"),
    ("avx512_bf16", "AVX-512 with bfloat16"),
    ("avx512_vnni", "AVX-512 VNNI"),
    ("avx512f", "AVX-512"),
    ("avx_vnni", "AVX VNNI"),
    ("avx2", "AVX2"),
    ("bf16", "NEON with bfloat16"),
    ("asimd", "NEON"),
];

/// Everything about the machine.
pub(super) fn findings() -> Vec<Finding> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let limits = Limits::find(&read("/proc/self/cgroup"), Path::new("/sys/fs/cgroup"));
    let cores = affinity::core_count().unwrap_or(1);
    vec![
        system(&read("/proc/version")),
        processor(&read("/proc/cpuinfo"), cores),
        share_of_processors(&limits, cores),
        memory(&read("/proc/meminfo"), limits.memory),
        huge_pages(&read("/sys/kernel/mm/transparent_hugepage/enabled")),
        gpu(
            &Gpus::find(),
            &read("/proc/driver/nvidia/version"),
            &gpu_names(Path::new("/proc/driver/nvidia/gpus")),
        ),
        open_files(),
    ]
}

fn system(version: &str) -> Finding {
    let mut words = version.split_whitespace();
    let (name, release) = (words.next().unwrap_or("Linux"), words.nth(1).unwrap_or("?"));
    let forebay = env!("CARGO_PKG_VERSION");
    Finding::ok(
        "system",
        format!("Forebay {forebay}, {name} {release}, {}", std::env::consts::ARCH),
    )
}

fn processor(info: &str, cores: usize) -> Finding {
    const WHAT: &str = "processor";
    let field = |names: &[&str]| {
        info.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            names.contains(&name.trim()).then(|| value.trim())
        })
    };
    let flags: Vec<&str> =
        field(&["flags", "Features"]).unwrap_or_default().split_whitespace().collect();
    let has: Vec<&str> = INSTRUCTIONS
        .iter()
        .filter(|(flag, _)| flags.contains(flag))
        .map(|(_, name)| *name)
        .collect();
    let model = field(&["model name"]).unwrap_or("processor");
    let plural = if cores == 1 { "" } else { "s" };
    let instructions =
        if has.is_empty() { "no vector instructions".to_owned() } else { has.join(", ") };
    let says = format!("{model}, {cores} core{plural}; {instructions}");
    if flags.is_empty() || has.iter().any(|name| !name.starts_with("NEON")) {
        return Finding::ok(WHAT, says);
    }
    Finding::note(
        WHAT,
        says,
        "the fast loops are for AVX2 and AVX-512: models run here, and slowly",
    )
}

/// The part of the machine that the control groups of this process leave to it.
#[derive(Debug, Default, PartialEq)]
struct Limits {
    /// Bytes.
    memory: Option<u64>,
    /// Processors' worth of time.
    processors: Option<f64>,
}

impl Limits {
    /// `groups` is `/proc/self/cgroup`, `root` the place where they are mounted.
    fn find(groups: &str, root: &Path) -> Self {
        let mut limits = Self::default();
        let unified = groups.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or("/");
        // Any folder on the way up may have a limit. In a container, the path may be the host's:
        // then the root is its own.
        for folder in Path::new(unified.trim_start_matches('/')).ancestors() {
            let read = |name: &str| fs::read_to_string(root.join(folder).join(name)).ok();
            let memory = read("memory.max").and_then(|text| text.trim().parse().ok());
            limits.memory = least(limits.memory, memory);
            let processors = read("cpu.max").and_then(|text| {
                let (quota, period) = text.trim().split_once(' ')?;
                Some(quota.parse::<f64>().ok()? / period.parse::<f64>().ok()?)
            });
            limits.processors = least(limits.processors, processors);
        }
        // The first version of control groups, where it still is.
        let read = |name: &str| {
            let text = fs::read_to_string(root.join(name)).ok()?;
            text.trim().parse::<i64>().ok().filter(|value| *value > 0)
        };
        let memory = read("memory/memory.limit_in_bytes").map(|bytes| bytes as u64);
        limits.memory = least(limits.memory, memory.filter(|bytes| *bytes < 1 << 60));
        let quota = read("cpu/cpu.cfs_quota_us").zip(read("cpu/cpu.cfs_period_us"));
        let processors = quota.map(|(quota, period)| quota as f64 / period as f64);
        limits.processors = least(limits.processors, processors);
        limits
    }
}

fn least<T: PartialOrd>(one: Option<T>, other: Option<T>) -> Option<T> {
    match (one, other) {
        (Some(one), Some(other)) => Some(if other < one { other } else { one }),
        (one, other) => one.or(other),
    }
}

fn share_of_processors(limits: &Limits, cores: usize) -> Finding {
    const WHAT: &str = "cgroup limits";
    match limits.processors {
        Some(share) if share < cores as f64 => {
            let threads = (share as usize).max(1);
            Finding::note(
                WHAT,
                format!("{share:.1} processors' worth of time on {cores} cores"),
                format!(
                    "threads that wait for each other lose their turns: serve with --threads {threads}"
                ),
            )
        }
        _ => Finding::ok(
            WHAT,
            match limits.memory {
                None => "none".to_owned(),
                Some(bytes) => format!("{} of memory, all cores", size(bytes)),
            },
        ),
    }
}

fn memory(info: &str, limit: Option<u64>) -> Finding {
    const WHAT: &str = "memory";
    let bytes = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
    };
    let (Some(total), Some(available)) = (bytes("MemTotal"), bytes("MemAvailable")) else {
        return Finding::note(WHAT, "unknown", "/proc/meminfo can't be read: is /proc mounted?");
    };
    let mut says = format!("{}, {} of it available", size(total), size(available));
    if let Some(limit) = limit.filter(|limit| *limit < total) {
        says += &format!(", at most {} for this control group", size(limit));
    }
    if limit.unwrap_or(u64::MAX).min(available) < LITTLE_MEMORY {
        let advice = "a model needs its weights' size and room for its KV cache: end other programs, raise the limit, or take a smaller or quantised model";
        return Finding::note(WHAT, says, advice);
    }
    Finding::ok(WHAT, says)
}

fn huge_pages(enabled: &str) -> Finding {
    const WHAT: &str = "huge pages";
    let chosen = enabled.split(['[', ']']).nth(1);
    match chosen {
        Some(how @ ("always" | "madvise")) => {
            Finding::ok(WHAT, format!("{how}: large weights get them"))
        }
        Some(how) => Finding::note(
            WHAT,
            format!("{how}: a step on a CPU is up to a tenth slower"),
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        None => Finding::ok(WHAT, "this kernel has no switch for them"),
    }
}

fn gpu(gpus: &Gpus, driver: &str, names: &[String]) -> Finding {
    const WHAT: &str = "GPU";
    // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar ..."
    let version = driver.lines().next().unwrap_or_default();
    let is_version =
        |word: &&str| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit());
    let version = version.split_whitespace().find(is_version);
    match (gpus.any(), version) {
        (true, Some(version)) => {
            let names = if names.is_empty() { "NVIDIA".to_owned() } else { names.join(", ") };
            Finding::ok(WHAT, format!("{names}; driver {version}"))
        }
        (true, None) => Finding::note(
            WHAT,
            "there are device files, and no driver answers",
            "see what `nvidia-smi` says; --device cpu serves without it",
        ),
        (false, Some(version)) => Finding::note(
            WHAT,
            format!("driver {version}, and no GPU is visible"),
            "look at CUDA_VISIBLE_DEVICES; a container needs --gpus all",
        ),
        (false, None) => Finding::ok(WHAT, "none: models run on the processor"),
    }
}

/// The driver's names of the GPUs.
fn gpu_names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let name = |path: &Path| {
        let text = fs::read_to_string(path.join("information")).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("Model:"))?;
        Some(line.trim().to_owned())
    };
    entries.filter_map(|entry| name(&entry.path())).collect()
}

fn open_files() -> Finding {
    const WHAT: &str = "open files";
    let limit = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    let connections = descriptors::connections(None, limit, 1).unwrap_or_default();
    let says = match limit {
        u64::MAX => format!("no limit, {connections} connections"),
        _ => format!("at most {limit}, which leaves {connections} connections"),
    };
    if connections < FEW_CONNECTIONS {
        return Finding::note(WHAT, says, "raise the hard limit: `ulimit -Hn` shows it");
    }
    Finding::ok(WHAT, says)
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    const INTEL: &str = "processor\t: 0\nmodel name\t: Some Xeon\nflags\t\t: fpu avx2 avx512f avx512_bf16\n\nprocessor\t: 1\n";

    #[test]
    fn instructions_are_named() {
        let found = processor(INTEL, 2);
        assert_eq!(found.state, State::Ok);
        assert_eq!(found.says, "Some Xeon, 2 cores; AVX-512 with bfloat16, AVX-512, AVX2");
        let old = processor("model name : Old\nflags : fpu sse2\n", 1);
        assert_eq!(old.state, State::Note);
        assert_eq!(old.says, "Old, 1 core; no vector instructions");
        assert_eq!(processor("Features : fp asimd bf16\n", 4).state, State::Note);
        assert_eq!(processor("", 4).state, State::Ok, "nothing is known");
    }

    #[test]
    fn the_tightest_group_counts() {
        let root = tempfile::tempdir().unwrap();
        let inner = root.path().join("a/b");
        fs::create_dir_all(&inner).unwrap();
        fs::write(root.path().join("a/memory.max"), "1000\n").unwrap();
        fs::write(inner.join("memory.max"), "max\n").unwrap();
        fs::write(inner.join("cpu.max"), "150000 100000\n").unwrap();
        fs::write(root.path().join("a/cpu.max"), "max 100000\n").unwrap();
        let limits = Limits::find("0::/a/b\n", root.path());
        assert_eq!(limits, Limits { memory: Some(1000), processors: Some(1.5) });
        let note = share_of_processors(&limits, 4);
        assert_eq!(note.says, "1.5 processors' worth of time on 4 cores");
        assert!(note.advice.unwrap().ends_with("--threads 1"));
        assert_eq!(share_of_processors(&limits, 1).state, State::Ok);
        assert_eq!(Limits::find("0::/elsewhere\n", root.path()), Limits::default());
    }

    #[test]
    fn old_control_groups_count_too() {
        let root = tempfile::tempdir().unwrap();
        for (file, text) in [
            ("memory/memory.limit_in_bytes", "2000"),
            ("cpu/cpu.cfs_quota_us", "200000"),
            ("cpu/cpu.cfs_period_us", "100000"),
        ] {
            fs::create_dir_all(root.path().join(file).parent().unwrap()).unwrap();
            fs::write(root.path().join(file), text).unwrap();
        }
        let limits = Limits::find("4:memory:/x\n", root.path());
        assert_eq!(limits, Limits { memory: Some(2000), processors: Some(2.0) });
        fs::write(root.path().join("cpu/cpu.cfs_quota_us"), "-1").unwrap();
        fs::write(root.path().join("memory/memory.limit_in_bytes"), "9223372036854771712").unwrap();
        assert_eq!(Limits::find("", root.path()), Limits::default());
    }

    #[test]
    fn memory_is_what_is_left() {
        let info = "MemTotal:       16000000 kB\nMemFree: 1 kB\nMemAvailable:    8000000 kB\n";
        let found = memory(info, None);
        assert_eq!(
            (found.state, found.says.as_str()),
            (State::Ok, "16 GB, 8.2 GB of it available")
        );
        let limited = memory(info, Some(1 << 30));
        assert_eq!(limited.state, State::Note);
        assert!(
            limited.says.ends_with("at most 1.1 GB for this control group"),
            "{}",
            limited.says
        );
        assert_eq!(memory("", None).state, State::Note);
    }

    #[test]
    fn huge_pages_are_advised_where_they_are_off() {
        assert_eq!(huge_pages("always [madvise] never\n").state, State::Ok);
        assert_eq!(huge_pages("always madvise [never]\n").state, State::Note);
        assert_eq!(huge_pages("").state, State::Ok);
    }

    #[test]
    fn a_gpu_needs_its_driver() {
        let version =
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\nGCC version: 12.2.0\n";
        let (here, none) = (Gpus::of(1), Gpus::of(0));
        let names = ["NVIDIA H100".to_owned()];
        assert_eq!(gpu(&here, version, &names).says, "NVIDIA H100; driver 550.54.15");
        assert_eq!(gpu(&here, "", &[]).state, State::Note);
        assert_eq!(gpu(&none, version, &[]).state, State::Note);
        assert_eq!(gpu(&none, "", &[]).state, State::Ok);
    }
}
