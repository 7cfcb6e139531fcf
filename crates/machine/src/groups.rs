//! The folders of the control groups (cgroups) of a process: its own group and all groups above it
//! that are mounted.

use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::Machine;

/// The version of a cgroup hierarchy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Version {
    /// Version 1: a hierarchy with one or several controllers.
    One,
    /// Version 2: the unified hierarchy.
    Two,
}

/// The process's control group, or a group above it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) version: Version,
    pub(crate) folder: PathBuf,
}

impl Group {
    pub(crate) fn text(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.folder.join(name)).ok()
    }

    /// Reads a file that contains one number. Returns `None` if there is no number, and for `max`
    /// and -1, which mean no limit.
    pub(crate) fn number(&self, name: &str) -> Option<u64> {
        self.text(name)?.trim().parse().ok()
    }

    /// Returns the number after `name` at the beginning of a line of a file.
    pub(crate) fn field(&self, file: &str, name: &str) -> Option<u64> {
        field(&self.text(file)?, name)
    }
}

/// Returns the number after `name` at the beginning of a line.
pub(crate) fn field(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().map(str::split_whitespace);
    lines
        .find_map(|mut words| if words.next()? == name { words.next()?.parse().ok() } else { None })
}

/// True if a relative path contains only names, without `..`.
pub(crate) fn stays_inside(path: &Path) -> bool {
    path.components().all(|part| matches!(part, Component::Normal(_)))
}

/// A cgroup mount, from a line of `/proc/self/mountinfo`.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    version: Version,
    /// The options of the file system. For version 1, they include the hierarchy's controllers.
    options: Vec<String>,
    /// The path of the group whose folder is mounted.
    top: PathBuf,
    /// The path at which the folder is mounted.
    at: PathBuf,
}

/// Finds the process's groups with this controller, in both versions: its own group first, then
/// each group above it.
pub(crate) fn find(machine: &Machine, controller: &str) -> Vec<Group> {
    let own = machine.text("/proc/self/cgroup").unwrap_or_default();
    let mounts = mounts(&machine.text("/proc/self/mountinfo").unwrap_or_default());
    [Version::One, Version::Two]
        .into_iter()
        .flat_map(|version| {
            let path = path_of(&own, version, controller);
            let usual = usual(version, controller);
            let has = |mount: &&Mount| {
                mount.version == version
                    && (version == Version::Two || mount.options.iter().any(|o| o == controller))
            };
            let mut found: Vec<&Mount> = mounts.iter().filter(has).collect();
            if mounts.is_empty() {
                found = usual.iter().filter(|mount| is_folder(machine, &mount.at)).collect();
            }
            let folders = best(&found, &path).map(|mount| folders(machine, mount, &path));
            folders.unwrap_or_default().into_iter().map(move |folder| Group { version, folder })
        })
        .collect()
}

fn is_folder(machine: &Machine, at: &Path) -> bool {
    machine.path(at).is_some_and(|path| path.is_dir())
}

/// Returns the path of the process's group in a hierarchy, from `/proc/self/cgroup`.
fn path_of(text: &str, version: Version, controller: &str) -> PathBuf {
    let path = text.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let found = match version {
            Version::One => controllers.split(',').any(|name| name == controller),
            Version::Two => number == "0" && controllers.is_empty(),
        };
        found.then(|| PathBuf::from(path))
    });
    path.unwrap_or_else(|| "/".into())
}

fn mounts(text: &str) -> Vec<Mount> {
    let mount = |line: &str| {
        let (own, of_system) = line.split_once(" - ")?;
        let mut own = own.split(' ').skip(3).map(unescape);
        let (top, at) = (own.next()?, own.next()?);
        let mut of_system = of_system.split(' ');
        let version = match of_system.next()? {
            "cgroup" => Version::One,
            "cgroup2" => Version::Two,
            _ => return None,
        };
        let options = of_system.nth(1).unwrap_or_default().split(',').map(str::to_owned);
        Some(Mount { version, options: options.collect(), top: top.into(), at: at.into() })
    };
    text.lines().filter_map(mount).collect()
}

/// Returns where distributions usually mount cgroups, for systems without a list of mounts.
fn usual(version: Version, controller: &str) -> Vec<Mount> {
    let names = match version {
        Version::One => vec![
            controller.to_owned(),
            format!("{controller},cpuacct"),
            format!("cpuacct,{controller}"),
        ],
        Version::Two => vec!["unified".to_owned(), String::new()],
    };
    let mount = |name: String| Mount {
        version,
        options: Vec::new(),
        top: "/".into(),
        at: Path::new("/sys/fs/cgroup").join(name),
    };
    names.into_iter().map(mount).collect()
}

/// Returns the mount that contains the most groups above the process. If no mount contains the
/// process, because the process's path belongs to another namespace, returns any mount. The top of
/// such a mount is a group above the process.
fn best<'a>(mounts: &[&'a Mount], path: &Path) -> Option<&'a Mount> {
    let above = mounts.iter().filter(|mount| path.starts_with(&mount.top));
    let widest = above.min_by_key(|mount| mount.top.components().count());
    widest.or_else(|| mounts.first()).copied()
}

/// Returns the folders of the group with this path and of all groups above it that are mounted.
fn folders(machine: &Machine, mount: &Mount, path: &Path) -> Vec<PathBuf> {
    let Some(top) = machine.path(&mount.at) else { return Vec::new() };
    let inner = path.strip_prefix(&mount.top).ok().filter(|inner| stays_inside(inner));
    inner.unwrap_or(Path::new("")).ancestors().map(|folder| top.join(folder)).collect()
}

/// Decodes a field of a list of mounts, in which white space and similar characters are octal
/// escapes.
fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let code = part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code.filter(u8::is_ascii) {
            Some(code) => {
                plain.push(code.into());
                plain.push_str(&part[3..]);
            }
            None => {
                plain.push('\\');
                plain.push_str(part);
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(version: Version, top: &str, at: &str) -> Mount {
        Mount { version, options: vec!["rw".into()], top: top.into(), at: at.into() }
    }

    #[test]
    fn mounts_are_those_of_control_groups() {
        let text = "22 27 0:21 / /proc rw - proc proc rw\n\
            30 23 0:28 /a\\040b /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n\
            31 23 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\nnonsense\n";
        let expected = [
            mount(Version::Two, "/a b", "/sys/fs/cgroup"),
            Mount {
                options: vec!["rw".into(), "memory".into()],
                ..mount(Version::One, "/", "/sys/fs/cgroup/memory")
            },
        ];
        assert_eq!(mounts(text), expected);
    }

    #[test]
    fn the_widest_mount_above_the_process_is_taken() {
        let all = [
            mount(Version::Two, "/other", "/elsewhere"),
            mount(Version::Two, "/a/b", "/narrow"),
            mount(Version::Two, "/", "/wide"),
        ];
        let all: Vec<&Mount> = all.iter().collect();
        let at = |mounts: &[&Mount], path: &str| {
            best(mounts, Path::new(path)).map(|mount| mount.at.display().to_string())
        };
        assert_eq!(at(&all, "/a/b/c").as_deref(), Some("/wide"));
        assert_eq!(at(&all[..2], "/a/b/c").as_deref(), Some("/narrow"));
        assert_eq!(at(&all[..1], "/a/b/c").as_deref(), Some("/elsewhere"));
        assert_eq!(at(&[], "/"), None);
    }

    #[test]
    fn folders_lead_up_to_the_mount_and_never_out_of_it() {
        let machine = Machine::at("/base");
        let of = |mount: &Mount, path: &str| {
            let all = folders(&machine, mount, Path::new(path));
            all.iter().map(|folder| folder.display().to_string()).collect::<Vec<_>>()
        };
        let whole = mount(Version::Two, "/", "/cg");
        assert_eq!(of(&whole, "/a/b"), ["/base/cg/a/b", "/base/cg/a", "/base/cg/"]);
        assert_eq!(of(&whole, "/../../x"), ["/base/cg/"], "a path of another namespace");
        let part = mount(Version::Two, "/docker/1", "/cg");
        assert_eq!(of(&part, "/docker/1/c"), ["/base/cg/c", "/base/cg/"]);
        assert_eq!(of(&part, "/"), ["/base/cg/"]);
        assert!(of(&mount(Version::Two, "/", "/../cg"), "/a").is_empty());
    }
}
