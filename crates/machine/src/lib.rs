//! The resources of a machine that this process may use: memory and CPUs. Also counts processes
//! that were killed because memory ran out.
//!
//! The kernel divides a machine among control groups (cgroups), in two versions that may be mounted
//! at the same time. The process's group and each group above it may have a limit, and the tightest
//! limit applies. `doctor`, the brain and the hands all use this crate to read the limits.
//!
//! Every file is read at its usual path below a root folder. A missing or damaged file counts as no
//! limit.
//!
//! ```
//! let memory = forebay_machine::Machine::here().memory();
//! assert!(memory.available <= memory.usable());
//! ```

mod groups;
mod memory;
mod processors;

use std::fs;
use std::path::{Path, PathBuf};

pub use memory::MachineMemory;
pub use processors::{Processors, cpu_list, stand_back};

/// The environment variable that names the root folder of another machine's files, for tests. The
/// folder contains `proc` and `sys`, as `/` does.
pub const ROOT_VARIABLE: &str = "FOREBAY_MACHINE_ROOT";

/// The files in which the kernel describes the machine and this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    root: PathBuf,
}

impl Machine {
    /// Returns the machine on which this process runs, or the one in the folder that
    /// [`ROOT_VARIABLE`] names.
    #[must_use]
    pub fn here() -> Self {
        Self::at(std::env::var_os(ROOT_VARIABLE).map_or_else(|| "/".into(), PathBuf::from))
    }

    /// Returns the machine whose files are below `root`.
    #[must_use]
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Reads how much memory the process may use now.
    #[must_use]
    pub fn memory(&self) -> MachineMemory {
        memory::read(self)
    }

    /// Reads which CPUs the calling thread may use, and how much time on them.
    #[must_use]
    pub fn processors(&self) -> Processors {
        processors::read(self)
    }

    /// Reads the number of processes that the kernel has killed because memory ran out. Counts
    /// those in the process's cgroup if the kernel counts them there, otherwise those on the whole
    /// machine.
    #[must_use]
    pub fn memory_kills(&self) -> Option<u64> {
        memory::kills(self)
    }

    /// Reads the file at this absolute path.
    fn text(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.path(Path::new(path))?).ok()
    }

    /// Moves an absolute path below the root; `None` if the path contains `..`.
    fn path(&self, path: &Path) -> Option<PathBuf> {
        let inner = path.strip_prefix("/").ok()?;
        groups::stays_inside(inner).then(|| self.root.join(inner))
    }
}
