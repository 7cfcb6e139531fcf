//! Finds GPUs by the system's files, for the default of `--device` and for the GPU of each rank.
//!
//! Only the hand can find out whether PyTorch works on a GPU. To ask the hand would add the seconds
//! of PyTorch's import to every start, and defaults that depend on the device are needed earlier.

use std::path::Path;

use anyhow::{Result, ensure};

/// The variable that restricts the GPUs that CUDA uses.
pub(crate) const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// The GPUs, by their names in `CUDA_VISIBLE_DEVICES`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Gpus {
    /// The GPUs that the user restricts this process to, as numbers or identifiers; `None`: no
    /// restriction.
    named: Option<Vec<String>>,
    /// The number of GPU device files; 0 also if the driver uses other files, as in WSL.
    files: usize,
}

impl Gpus {
    /// Finds the GPUs that this process may use.
    pub(crate) fn find() -> Self {
        Self::look(std::env::var(VISIBLE).ok().as_deref(), Path::new("/dev"))
    }

    /// The GPUs of a machine with `files` device files, all of them visible.
    #[cfg(test)]
    pub(crate) fn of(files: usize) -> Self {
        Self { named: None, files }
    }

    fn look(named: Option<&str>, devices: &Path) -> Self {
        let is_gpu = |name: &str| {
            name.strip_prefix("nvidia")
                .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
        };
        let entries = devices.read_dir().into_iter().flatten().flatten();
        let files = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_gpu)).count();
        let named = named.map(|names| {
            // As in CUDA, the first entry that is not a number hides those after it: `-1` hides all
            // GPUs.
            let names = names.split(',').map(str::trim);
            names.take_while(|name| !name.is_empty() && *name != "-1").map(str::to_owned).collect()
        });
        Self { named, files }
    }

    /// True if there is a GPU, so that `--device auto` chooses it.
    pub(crate) fn any(&self) -> bool {
        self.files > 0 && self.named.as_ref().is_none_or(|named| !named.is_empty())
    }

    /// The number of GPUs.
    pub(crate) fn count(&self) -> usize {
        self.named.as_ref().map_or(self.files, |named| named.len().min(self.files))
    }

    /// The name of the GPU with this index in `CUDA_VISIBLE_DEVICES`; `None`: there is no such GPU.
    pub(crate) fn name(&self, place: usize) -> Option<String> {
        match &self.named {
            _ if place >= self.count() => None,
            Some(named) => named.get(place).cloned(),
            None => Some(place.to_string()),
        }
    }

    /// Returns one GPU for each rank, ordered by replica.
    ///
    /// # Errors
    /// There are fewer GPUs than ranks.
    pub(crate) fn each(&self, replicas: u32, ranks: u32) -> Result<Vec<String>> {
        let count = replicas.saturating_mul(ranks) as usize;
        let (asked, who) = match ranks {
            1 => (format!("--dp-size {replicas}"), "replica"),
            _ => (format!("--dp-size {replicas} and --tp-size {ranks}"), "rank"),
        };
        let all = match (&self.named, self.files) {
            (Some(named), _) => named.clone(),
            // The number of GPUs is unknown. The hand will report a missing one.
            (None, 0) => (0..count).map(|number| number.to_string()).collect(),
            (None, files) => (0..files).map(|number| number.to_string()).collect(),
        };
        ensure!(
            all.len() >= count,
            "{asked}: {} GPUs are visible, and each {who} needs one{}",
            all.len(),
            if self.named.is_some() { " (CUDA_VISIBLE_DEVICES says which)" } else { "" }
        );
        Ok(all.into_iter().take(count).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus(named: Option<&str>, files: &[&str]) -> Gpus {
        let folder = std::env::temp_dir().join(format!(
            "forebay-gpus-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        files.iter().for_each(|file| std::fs::write(folder.join(file), "").unwrap());
        let found = Gpus::look(named, &folder);
        std::fs::remove_dir_all(&folder).unwrap();
        found
    }

    const TWO: &[&str] = &["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"];

    #[test]
    fn device_files_are_gpus_and_others_are_not() {
        assert!(gpus(None, TWO).any());
        assert!(!gpus(None, &["nvidiactl", "nvidia-uvm", "nvidia"]).any());
        assert!(!Gpus::look(None, Path::new("/no/such/folder")).any());
    }

    #[test]
    fn hands_of_a_worker_get_one_each() {
        let names = |found: &Gpus| (0..4).map_while(|place| found.name(place)).collect::<Vec<_>>();
        assert_eq!(names(&gpus(None, TWO)), ["0", "1"]);
        assert_eq!(names(&gpus(Some("GPU-a,1"), TWO)), ["GPU-a", "1"]);
        assert_eq!(names(&gpus(Some("1"), TWO)), ["1"]);
        assert_eq!(gpus(Some(""), TWO).count(), 0);
        assert_eq!(gpus(Some("0,1"), &[]).count(), 0);
    }

    #[test]
    fn the_variable_hides_them() {
        for hidden in ["", "-1", "-1,0", " "] {
            assert!(!gpus(Some(hidden), TWO).any(), "{hidden:?}");
        }
        assert!(gpus(Some("1"), TWO).any());
        assert!(!gpus(Some("1"), &[]).any(), "a variable makes no GPU");
    }

    #[test]
    fn each_replica_gets_its_own() {
        let each = |named, files, replicas| gpus(named, files).each(replicas, 1);
        assert_eq!(each(None, TWO, 2).unwrap(), ["0", "1"]);
        assert_eq!(each(None, TWO, 1).unwrap(), ["0"]);
        assert_eq!(each(Some("3, GPU-a1,5"), TWO, 2).unwrap(), ["3", "GPU-a1"]);
        assert_eq!(each(Some("3,-1,5"), TWO, 1).unwrap(), ["3"]);
        assert_eq!(
            each(None, &[], 2).unwrap(),
            ["0", "1"],
            "without device files the worker decides"
        );
        let error = each(None, TWO, 3).unwrap_err().to_string();
        assert_eq!(error, "--dp-size 3: 2 GPUs are visible, and each replica needs one");
        assert!(each(Some("7"), TWO, 2).unwrap_err().to_string().contains(VISIBLE));
    }
}
