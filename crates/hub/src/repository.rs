//! One revision of a repository: lists its files, and downloads some of them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use futures_util::{StreamExt, TryStreamExt, stream};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use serde::Deserialize;

use crate::cache::{RepositoryFolder, is_inside, is_name};
use crate::client::{Client, Trouble};
use crate::download::{Downloader, NoFile, RemoteFile, free, full};
use crate::error::HubError;
use crate::name::HubName;
use crate::progress::Progress;
use crate::settings::Settings;

/// The size limit of a list of files, in bytes.
const LONGEST_LIST: usize = 64 << 20;
/// The number of concurrent requests for file descriptions.
const QUESTIONS: usize = 8;
/// The characters that are escaped in a URL, because they have a special meaning or are not
/// allowed.
const UNSAFE: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'#')
    .add(b'%')
    .add(b'<')
    .add(b'>')
    .add(b'?')
    .add(b'[')
    .add(b']')
    .add(b'^')
    .add(b'`')
    .add(b'{')
    .add(b'|')
    .add(b'}')
    .add(b'\\');
const UNSAFE_OR_SLASH: &AsciiSet = &UNSAFE.add(b'/');

/// A repository at a commit.
#[derive(Debug)]
pub(crate) struct Repository {
    name: HubName,
    folder: RepositoryFolder,
    commit: String,
    /// The paths of the repository's files. If offline, only the paths of files in the cache.
    pub(crate) names: Vec<String>,
    /// The client for requests to the hub; `None` if offline.
    client: Option<Client>,
    at_a_time: usize,
}

impl Repository {
    /// Requests the list of files from the hub. If offline, reads only the cache.
    pub(crate) async fn open(
        name: &HubName,
        settings: &Settings,
        progress: &Progress,
    ) -> Result<Self, HubError> {
        let folder = RepositoryFolder::new(&settings.hub_cache, &name.repository);
        if !is_inside(name.revision()) {
            let (repository, revision) = (name.repository.clone(), name.revision().to_owned());
            return Err(HubError::Revision { repository, revision });
        }
        let cached = || Self::cached(name, &folder, settings.at_a_time);
        if settings.offline {
            return cached();
        }
        let client = Client::new(settings);
        match list(name, &client).await {
            Ok((commit, names)) => {
                let name = name.clone();
                let at_a_time = settings.at_a_time;
                Ok(Self { name, folder, commit, names, client: Some(client), at_a_time })
            }
            Err(trouble) => {
                let error = explain(name, &client.endpoint, None, trouble);
                if !error.is_of_the_network() {
                    return Err(error);
                }
                progress.say(&format!("{error}; looking for it in the cache"));
                cached().map_err(|_| error)
            }
        }
    }

    fn cached(
        name: &HubName,
        folder: &RepositoryFolder,
        at_a_time: usize,
    ) -> Result<Self, HubError> {
        let commit = folder.commit_of(name.revision());
        let commit = commit.ok_or_else(|| HubError::NotCached(name.what()))?;
        let mut names = Vec::new();
        let snapshot = folder.snapshot(&commit);
        files_below(&snapshot, "", &mut names)
            .map_err(|error| HubError::disk(&snapshot, "read", &error))?;
        names.sort();
        Ok(Self {
            name: name.clone(),
            folder: folder.clone(),
            commit,
            names,
            client: None,
            at_a_time,
        })
    }

    /// True if offline: only files in the cache are used.
    pub(crate) fn offline(&self) -> bool {
        self.client.is_none()
    }

    pub(crate) fn commit(&self) -> &str {
        &self.commit
    }

    /// The local folder with this commit's files.
    pub(crate) fn directory(&self) -> PathBuf {
        self.folder.snapshot(&self.commit)
    }

    /// True if all of these files are in the cache.
    pub(crate) fn has(&self, names: &[String]) -> bool {
        let directory = self.directory();
        names.iter().all(|name| directory.join(name).is_file())
    }

    /// Downloads those of these files that are missing.
    pub(crate) async fn get(&self, names: &[String], progress: &Progress) -> Result<(), HubError> {
        let directory = self.directory();
        let wanted: Vec<&String> =
            names.iter().filter(|name| !directory.join(name).is_file()).collect();
        if let Some(missing) = wanted.first() {
            let Some(client) = &self.client else {
                return Err(self.incomplete(format!("{missing} is not there")));
            };
            self.download(client, &wanted, progress).await?;
        }
        self.folder.keep_commit(self.name.revision(), &self.commit)?;
        touch(&directory, names);
        Ok(())
    }

    /// Returns the error for a model of which only a part is in the cache.
    pub(crate) fn incomplete(&self, lacks: String) -> HubError {
        HubError::Incomplete { repository: self.name.repository.clone(), lacks }
    }

    async fn download(
        &self,
        client: &Client,
        wanted: &[&String],
        progress: &Progress,
    ) -> Result<(), HubError> {
        let downloader = Downloader { client, folder: &self.folder, progress };
        let explained =
            |name: &str, trouble| explain(&self.name, &client.endpoint, Some(name), trouble);
        let announced: Vec<(&String, RemoteFile)> = stream::iter(wanted.iter().copied())
            .map(|name| async move {
                let announced = downloader.announced(&self.path(name)).await;
                announced.map(|announced| (name, announced)).map_err(|e| explained(name, e))
            })
            .buffered(QUESTIONS)
            .try_collect()
            .await?;
        // Several files may have the same content.
        let mut contents: BTreeMap<String, (RemoteFile, Vec<&String>)> = BTreeMap::new();
        for (name, file) in announced {
            let content = contents.entry(file.etag.clone());
            content.or_insert_with(|| (file, Vec::new())).1.push(name);
        }
        let blobs = self.folder.blobs();
        let lacks: u64 = contents.values().map(|(file, _)| downloader.lacks(file)).sum();
        if free(&blobs).is_some_and(|free| free < lacks) {
            let largest = contents.values().max_by_key(|(file, _)| file.size);
            return Err(full(&blobs, largest.map_or("", |(_, names)| names[0]), lacks));
        }
        let done = stream::iter(contents.into_values())
            .map(|(announced, names)| async move {
                let first = names[0];
                let got = downloader.download(&self.path(first), first, announced).await;
                let got = got.map_err(|error| match error {
                    NoFile::Trouble(trouble) => explained(first, trouble),
                    NoFile::Hub(error) => error,
                })?;
                names.iter().try_for_each(|name| self.folder.link(&self.commit, name, &got.etag))
            })
            .buffer_unordered(self.at_a_time.max(1))
            .try_collect::<()>()
            .await;
        progress.finish();
        done
    }

    /// Returns the path of a file in the hub's URL.
    fn path(&self, name: &str) -> String {
        format!(
            "/{}/resolve/{}/{}",
            self.name.repository,
            utf8_percent_encode(&self.commit, UNSAFE_OR_SLASH),
            utf8_percent_encode(name, UNSAFE)
        )
    }
}

/// Requests the commit of the revision, and the paths of its files.
async fn list(name: &HubName, client: &Client) -> Result<(String, Vec<String>), Trouble> {
    #[derive(Deserialize)]
    struct Info {
        sha: String,
        #[serde(default)]
        siblings: Vec<Sibling>,
    }
    #[derive(Deserialize)]
    struct Sibling {
        rfilename: String,
    }
    let mut path = format!("/api/models/{}", name.repository);
    if let Some(revision) = &name.revision {
        path += &format!("/revision/{}", utf8_percent_encode(revision, UNSAFE_OR_SLASH));
    }
    // There is only one attempt: without a network, the cache should be used immediately.
    let (response, _) = client.get(&path, 0).await?;
    let body = client.body(response, LONGEST_LIST).await?;
    let info: Info = serde_json::from_slice(&body).map_err(|_| {
        Trouble::Broken("the response is not that of a Hugging Face hub".to_owned())
    })?;
    if !is_name(&info.sha) {
        return Err(Trouble::Lie(format!("{:?} as a commit", info.sha)));
    }
    let mut names: Vec<String> = info.siblings.into_iter().map(|file| file.rfilename).collect();
    if let Some(bad) = names.iter().find(|name| !is_inside(name)) {
        return Err(Trouble::Lie(format!("{bad:?} as a file's path")));
    }
    names.sort();
    Ok((info.sha, names))
}

/// Converts a failed request for `name` or its `file` to an error for the user.
fn explain(name: &HubName, endpoint: &str, file: Option<&str>, trouble: Trouble) -> HubError {
    let (repository, endpoint, what) = (name.repository.clone(), endpoint.to_owned(), name.what());
    let refusal = match trouble {
        Trouble::Broken(cause) => return HubError::Unreachable { what, endpoint, cause },
        Trouble::Lie(cause) => {
            let file = file.unwrap_or("the list of files").to_owned();
            return HubError::Lie { what, file, endpoint, cause };
        }
        Trouble::Status(refusal) => refusal,
    };
    match (refusal.code.as_deref(), refusal.status) {
        (Some("GatedRepo"), _) => HubError::Gated { repository, endpoint },
        (Some("RevisionNotFound"), _) => {
            HubError::Revision { repository, revision: name.revision().to_owned() }
        }
        (Some("EntryNotFound"), _) | (None, 404) if file.is_some() => {
            HubError::Repository(format!("{what} has no {} any more", file.unwrap_or_default()))
        }
        (Some("RepoNotFound"), _) | (None, 404) => HubError::NotThere { repository, endpoint },
        (_, status @ (401 | 403)) => HubError::Refused { what, endpoint, status },
        (_, status) => {
            let message = refusal.message.map(|message| format!(": {}", one_line(&message)));
            let cause = format!("it answers {status}{}", message.unwrap_or_default());
            HubError::Unreachable { what, endpoint, cause }
        }
    }
}

/// Returns a server's text as one line.
fn one_line(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}

/// Collects the paths of all files in `directory` and its subfolders.
fn files_below(directory: &Path, prefix: &str, into: &mut Vec<String>) -> std::io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let path = format!("{prefix}{name}");
        if entry.file_type()?.is_dir() {
            files_below(&entry.path(), &format!("{path}/"), into)?;
        } else if entry.path().is_file() {
            into.push(path);
        }
    }
    Ok(())
}

/// Sets the files' access times to the current time, because the file system may not update them at
/// each read.
fn touch(directory: &Path, names: &[String]) {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    let as_it_is = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
    let times = Timestamps { last_access: now, last_modification: as_it_is };
    for name in names {
        // Errors are ignored: the cache may belong to another user.
        let _ = rustix::fs::utimensat(CWD, directory.join(name), &times, AtFlags::empty());
    }
}
