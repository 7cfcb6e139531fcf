//! The part of a machine that this process may use: memory, processors, and kills for lack of
//! memory.
//!
//! The kernel divides a machine among control groups, in two versions that may be mounted beside
//! each other. Each group from the process upwards may have a limit, and the tightest one counts.
//! Only this crate reads these files, for `doctor`, the brain and the hands.
//!
//! Every file is read below a folder given by the caller, at its usual path. Files that are missing
//! or damaged count as no limit.
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

/// Names a folder with another machine's files, for tests: `proc` and `sys` as below `/`.
pub const ROOT_VARIABLE: &str = "FOREBAY_MACHINE_ROOT";

/// The files in which the kernel describes the machine and this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    root: PathBuf,
}

impl Machine {
    /// The machine that this process runs on, or the one in the folder that [`ROOT_VARIABLE`]
    /// names.
    #[must_use]
    pub fn here() -> Self {
        Self::at(std::env::var_os(ROOT_VARIABLE).map_or_else(|| "/".into(), PathBuf::from))
    }

    /// A machine whose files are below `root`.
    #[must_use]
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The memory that the process may use, as it is now.
    #[must_use]
    pub fn memory(&self) -> MachineMemory {
        memory::read(self)
    }

    /// The processors that the calling thread may use, and the time on them.
    #[must_use]
    pub fn processors(&self) -> Processors {
        processors::read(self)
    }

    /// The number of processes that the kernel has killed for lack of memory: in this process's
    /// control group if it counts them, otherwise on the machine.
    #[must_use]
    pub fn memory_kills(&self) -> Option<u64> {
        memory::kills(self)
    }

    /// The text of the file at this absolute path.
    fn text(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.path(Path::new(path))?).ok()
    }

    /// An absolute path moved below the root. `None`: it would lead out of there.
    fn path(&self, path: &Path) -> Option<PathBuf> {
        let inner = path.strip_prefix("/").ok()?;
        groups::stays_inside(inner).then(|| self.root.join(inner))
    }
}
