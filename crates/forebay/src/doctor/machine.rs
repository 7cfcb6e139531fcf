//! Findings about processor, memory, limits and GPUs, as the system reports them.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use forebay_cpuhand::{Levels, levels};
use forebay_hub::size;
use forebay_machine::{Machine, MachineMemory, Processors};
use rustix::fs::{Access, access};
use rustix::process::{Resource, getrlimit};

use super::Finding;
use crate::descriptors;
use crate::gpus::Gpus;

/// With less memory than this (in bytes), only tiny models can be served.
const LITTLE_MEMORY: u64 = 2_000_000_000;
/// A limit on connections below this number gets a note, because it is soon reached.
const FEW_CONNECTIONS: usize = 256;
/// Instruction sets for which there are separate kernels, by the Linux kernel's names, best first.
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

/// Findings about the machine.
pub(super) fn findings() -> Vec<Finding> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let machine = Machine::here();
    let (found, processors) = (machine.memory(), machine.processors());
    vec![
        system(&read("/proc/version")),
        processor(&read("/proc/cpuinfo"), processors.cores.len()),
        kernels(&levels()),
        limits(&found, &processors),
        memory(&found),
        huge_pages(&read("/sys/kernel/mm/transparent_hugepage/enabled")),
        gpu(
            &Gpus::find(),
            &read("/proc/driver/nvidia/version"),
            &gpu_names(Path::new("/proc/driver/nvidia/gpus")),
            has_c_compiler(env::var_os("CC").as_deref(), &env::var_os("PATH").unwrap_or_default()),
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

/// Reports the instruction sets for which `make build` has compiled kernels.
fn kernels(levels: &Levels) -> Finding {
    const WHAT: &str = "CPU kernels";
    let says = format!("{}; this program has {}", levels.used, levels.built.join(", "));
    let Some(missing) = levels.missing else { return Finding::ok(WHAT, says) };
    Finding::note(
        WHAT,
        format!("{says}; the processor has {missing}"),
        "this program was built on another machine: wheels and tarballs have all kernels, or run `make build` here",
    )
}

/// The memory and CPU time that the control groups of this process allow.
fn limits(memory: &MachineMemory, processors: &Processors) -> Finding {
    const WHAT: &str = "cgroup limits";
    let of_memory = memory.limit.map(|bytes| format!("{} of memory", size(bytes)));
    let (cores, threads) = (processors.cores.len(), processors.threads());
    let of_time = processors.quota.filter(|&quota| quota < cores as f64).map(|quota| {
        let plural = if threads == 1 { "" } else { "s" };
        let threads = format!("{threads} thread{plural} of a hand on {cores} cores");
        format!("{quota:.1} processors' worth of time: {threads}")
    });
    let all: Vec<String> = of_memory.into_iter().chain(of_time).collect();
    Finding::ok(WHAT, if all.is_empty() { "none".to_owned() } else { all.join(", ") })
}

fn memory(memory: &MachineMemory) -> Finding {
    const WHAT: &str = "memory";
    let (Some(total), Some(available)) = (memory.total, memory.available) else {
        return Finding::note(WHAT, "unknown", "/proc/meminfo can't be read: is /proc mounted?");
    };
    let mut says = format!("{}, {} of it available", size(total), size(available));
    if let Some(limit) = memory.limit {
        says += &format!(", at most {} for this control group", size(limit));
    }
    if available < LITTLE_MEMORY {
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

fn gpu(gpus: &Gpus, driver: &str, names: &[String], compiler: bool) -> Finding {
    const WHAT: &str = "GPU";
    // Example: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar ..."
    let version = driver.lines().next().unwrap_or_default();
    let is_version =
        |word: &&str| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit());
    let version = version.split_whitespace().find(is_version);
    match (gpus.any(), version) {
        (true, Some(version)) => {
            let names = if names.is_empty() { "NVIDIA".to_owned() } else { names.join(", ") };
            let says = format!("{names}; driver {version}");
            if compiler {
                return Finding::ok(WHAT, says);
            }
            Finding::note(
                WHAT,
                format!("{says}; there is no C compiler"),
                "Triton builds the launches of its kernels with one: install gcc or clang, or set CC",
            )
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

/// True if Triton finds a C compiler: `CC`, or one in the folders of `path`.
fn has_c_compiler(cc: Option<&OsStr>, path: &OsStr) -> bool {
    let runs = |file: PathBuf| access(file, Access::EXEC_OK).is_ok();
    cc.is_some_and(|name| !name.is_empty())
        || env::split_paths(path)
            .any(|folder| ["clang", "gcc"].map(|name| folder.join(name)).into_iter().any(runs))
}

/// The names of the GPUs as the driver reports them.
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
    use std::os::unix::fs::PermissionsExt;

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
    fn kernels_that_the_program_lacks_are_named() {
        let built = vec!["avx512bf16", "baseline"];
        let native = Levels { used: "avx512bf16", built, missing: None };
        let found = kernels(&native);
        assert_eq!(found.state, State::Ok);
        assert_eq!(found.says, "avx512bf16; this program has avx512bf16, baseline");
        let elsewhere = Levels { used: "baseline", missing: Some("avx2"), ..native };
        let found = kernels(&elsewhere);
        assert_eq!(found.state, State::Note);
        assert!(found.says.ends_with("; the processor has avx2"), "{}", found.says);
    }

    #[test]
    fn limits_of_groups_are_told() {
        let processors = |quota| Processors { cores: vec![vec![0], vec![1]], quota };
        let says = |limit, quota| {
            let memory = MachineMemory { limit, ..MachineMemory::default() };
            limits(&memory, &processors(quota)).says
        };
        assert_eq!(says(None, None), "none");
        assert_eq!(says(None, Some(2.0)), "none", "as much as there is");
        let half = "0.5 processors' worth of time: 1 thread of a hand on 2 cores";
        assert_eq!(says(None, Some(0.5)), half);
        assert_eq!(says(Some(600 << 20), Some(0.5)), format!("629 MB of memory, {half}"));
        assert!(says(None, Some(1.5)).contains(": 2 threads of a hand"));
    }

    #[test]
    fn memory_is_what_is_left() {
        let found = |available, limit| {
            memory(&MachineMemory { total: Some(16 << 30), limit, available: Some(available) })
        };
        let free = found(8 << 30, None);
        assert_eq!((free.state, free.says.as_str()), (State::Ok, "17 GB, 8.6 GB of it available"));
        let limited = found(8 << 30, Some(9 << 30));
        assert_eq!(limited.state, State::Ok);
        assert!(limited.says.ends_with("at most 9.7 GB for this control group"));
        assert_eq!(found(1 << 30, Some(9 << 30)).state, State::Note, "the rest is used");
        assert_eq!(memory(&MachineMemory::default()).state, State::Note);
    }

    #[test]
    fn huge_pages_are_advised_where_they_are_off() {
        assert_eq!(huge_pages("always [madvise] never\n").state, State::Ok);
        assert_eq!(huge_pages("always madvise [never]\n").state, State::Note);
        assert_eq!(huge_pages("").state, State::Ok);
    }

    #[test]
    fn a_c_compiler_is_named_or_found() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().as_os_str();
        assert!(!has_c_compiler(None, path));
        assert!(!has_c_compiler(Some(OsStr::new("")), path));
        assert!(has_c_compiler(Some(OsStr::new("icx")), path));
        let gcc = folder.path().join("gcc");
        fs::write(&gcc, "").expect("a file");
        fs::set_permissions(&gcc, fs::Permissions::from_mode(0o755)).expect("permissions");
        assert!(has_c_compiler(None, path));
    }

    #[test]
    fn a_gpu_needs_its_driver() {
        let version =
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\nGCC version: 12.2.0\n";
        let (here, none) = (Gpus::of(1), Gpus::of(0));
        let names = ["NVIDIA H100".to_owned()];
        assert_eq!(gpu(&here, version, &names, true).says, "NVIDIA H100; driver 550.54.15");
        assert_eq!(gpu(&here, version, &names, true).state, State::Ok);
        assert_eq!(gpu(&here, version, &names, false).state, State::Note);
        assert_eq!(gpu(&here, "", &[], true).state, State::Note);
        assert_eq!(gpu(&none, version, &[], true).state, State::Note);
        assert_eq!(gpu(&none, "", &[], false).state, State::Ok);
    }
}
