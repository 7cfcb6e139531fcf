//! Downloads a file of a repository from the hub into the cache. Downloads are resumed and
//! verified, and a file appears only when it is complete.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper::Response;
use hyper::body::Incoming;
use hyper::header::{CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderName};
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

use crate::cache::{RepositoryFolder, is_name};
use crate::client::{Client, LINKED_ETAG, Trouble, header};
use crate::error::{HubError, size};
use crate::progress::{FileProgress, Progress};

const LINKED_SIZE: HeaderName = HeaderName::from_static("x-linked-size");
/// The number of consecutive failed attempts after which a download is given up.
const ATTEMPTS: u32 = 5;
/// An attempt that transfers at least this many bytes does not count as failed.
const WORTH: u64 = 1 << 20;
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The hub's description of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RemoteFile {
    /// The ETag of the file's content: a SHA-256 or Git's SHA-1 on the hub, any text on mirrors.
    pub(crate) etag: String,
    /// The size in bytes.
    pub(crate) size: u64,
}

/// Why an attempt failed.
enum Failure {
    Trouble(Trouble),
    /// The bytes differ from the announced ones. `fresh` is true if no byte comes from an earlier
    /// run.
    Other {
        cause: String,
        fresh: bool,
    },
    Disk(HubError),
}

impl From<Trouble> for Failure {
    fn from(trouble: Trouble) -> Self {
        Self::Trouble(trouble)
    }
}

/// Why a file could not be downloaded.
pub(crate) enum NoFile {
    Trouble(Trouble),
    Hub(HubError),
}

impl From<Trouble> for NoFile {
    fn from(trouble: Trouble) -> Self {
        Self::Trouble(trouble)
    }
}

impl From<HubError> for NoFile {
    fn from(error: HubError) -> Self {
        Self::Hub(error)
    }
}

/// Downloads files of one repository.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Downloader<'a> {
    pub(crate) client: &'a Client,
    pub(crate) folder: &'a RepositoryFolder,
    pub(crate) progress: &'a Progress,
}

impl Downloader<'_> {
    /// Requests the hub's description of the file at `path`.
    pub(crate) async fn announced(&self, path: &str) -> Result<RemoteFile, Trouble> {
        let mut pauses = Pauses::default();
        loop {
            match self.announcement(path).await {
                Err(trouble) => pauses.after(trouble).await?,
                announced => return announced,
            }
        }
    }

    async fn announcement(&self, path: &str) -> Result<RemoteFile, Trouble> {
        let response = self.client.head(path).await?;
        let etag = announced_etag(&response)?;
        let size = match announced_size(&response) {
            Some(size) => size,
            None => self.counted_size(path).await?,
        };
        Ok(RemoteFile { etag, size })
    }

    /// Returns the size of a file whose description has no size, as on some mirrors: from a range
    /// response, or by counting the bytes.
    async fn counted_size(&self, path: &str) -> Result<u64, Trouble> {
        let response = match self.client.get(path, 1).await {
            // The file has at most one byte.
            Err(Trouble::Status(refusal)) if refusal.status == 416 => {
                self.client.get(path, 0).await
            }
            response => response,
        };
        let (mut response, _) = response?;
        let range = header(&response, CONTENT_RANGE).and_then(|range| range.rsplit_once('/'));
        let whole = || header(&response, CONTENT_LENGTH)?.parse().ok();
        let partial = response.status().as_u16() == 206;
        let size = if partial { range.and_then(|(_, size)| size.parse().ok()) } else { whole() };
        if let Some(size) = size {
            return Ok(size);
        }
        if partial {
            return Err(Trouble::Lie("a file without a length".to_owned()));
        }
        let mut size = 0;
        while let Some(data) = self.client.next(&mut response).await? {
            size += data.len() as u64;
        }
        Ok(size)
    }

    /// True if the whole content is in the cache.
    pub(crate) fn is_here(&self, announced: &RemoteFile) -> bool {
        let blob = self.folder.blobs().join(&announced.etag);
        fs::metadata(blob).is_ok_and(|found| found.is_file() && found.len() == announced.size)
    }

    /// The number of bytes that are not in the cache yet.
    pub(crate) fn lacks(&self, announced: &RemoteFile) -> u64 {
        if self.is_here(announced) {
            return 0;
        }
        let here = fs::metadata(self.partial(announced)).map_or(0, |partial| partial.len());
        announced.size.checked_sub(here).unwrap_or(announced.size)
    }

    /// Downloads the announced content into the cache. `file` is the name for messages. Returns the
    /// description of the downloaded content, because the file may have changed at the hub in the
    /// meantime.
    pub(crate) async fn download(
        &self,
        path: &str,
        file: &str,
        announced: RemoteFile,
    ) -> Result<RemoteFile, NoFile> {
        let mut announced = announced;
        loop {
            match self.content(path, file, &announced).await {
                Ok(()) => return Ok(announced),
                Err(Failure::Trouble(trouble)) => {
                    if matches!(trouble, Trouble::Lie(_)) {
                        let _ = fs::remove_file(self.partial(&announced));
                    }
                    return Err(trouble.into());
                }
                Err(Failure::Disk(error)) => return Err(error.into()),
                Err(Failure::Other { cause, fresh }) => {
                    // Either the part from an earlier run is damaged, or the remote file has
                    // changed.
                    let _ = fs::remove_file(self.partial(&announced));
                    let again = self.announced(path).await?;
                    if fresh && again == announced {
                        return Err(Trouble::Lie(cause).into());
                    }
                    announced = again;
                }
            }
        }
    }

    async fn content(&self, path: &str, file: &str, announced: &RemoteFile) -> Result<(), Failure> {
        let lock = self.folder.lock(&announced.etag).map_err(Failure::Disk)?;
        if !lock.try_take() {
            self.progress.say(&format!("another process downloads {file}; waiting for it"));
        }
        // Wait for the lock on another thread, because other downloads run on this thread.
        let lock = tokio::task::spawn_blocking(move || {
            lock.take();
            lock
        });
        let _lock = lock.await;
        if self.is_here(announced) {
            return Ok(());
        }
        let partial = Partial::open(self.partial(announced), file).map_err(Failure::Disk)?;
        let mut pauses = Pauses::default();
        let mut state = State::of(partial, announced, self.progress, file).await?;
        loop {
            let before = state.position;
            match self.attempt(path, announced, &mut state).await {
                Ok(()) => break,
                Err(Failure::Trouble(trouble)) => {
                    if state.position >= before + WORTH {
                        pauses = Pauses::default();
                    }
                    pauses.after(trouble).await?;
                }
                other => return other,
            }
        }
        state.check(announced)?;
        let blob = self.folder.blobs().join(&announced.etag);
        let finished = tokio::task::spawn_blocking(move || state.partial.finish(&blob));
        finished.await.unwrap_or(Ok(())).map_err(Failure::Disk)
    }

    /// Requests the missing bytes and writes them.
    async fn attempt(
        &self,
        path: &str,
        announced: &RemoteFile,
        state: &mut State<'_>,
    ) -> Result<(), Failure> {
        if state.position == announced.size {
            return Ok(());
        }
        let response = match self.client.get(path, state.position).await {
            // 416: the local part is longer than the remote file.
            Err(Trouble::Status(refusal)) if refusal.status == 416 => {
                return Err(state.other("it has no such bytes".to_owned()));
            }
            response => response?,
        };
        let (mut response, own) = response;
        let etag =
            header(&response, LINKED_ETAG).or_else(|| header(&response, ETAG).filter(|_| own));
        // The ETag is compared only if the announced ETag is not a hash. With a hash, the content
        // itself is checked, which is stronger.
        if let Some(etag) = etag.map(plain)
            && state.hashes.contexts.is_empty()
            && etag != announced.etag
        {
            return Err(state.other(format!("its ETag became {etag:?}")));
        }
        if response.status().as_u16() == 206 {
            let range = header(&response, CONTENT_RANGE).unwrap_or_default().to_owned();
            let wanted =
                format!("bytes {}-{}/{}", state.position, announced.size - 1, announced.size);
            if range != wanted {
                return Err(state.other(format!("asked for {wanted:?}, it sends {range:?}")));
            }
        } else {
            // A server without range support sends the file from its beginning.
            state.restart();
        }
        let length =
            header(&response, CONTENT_LENGTH).and_then(|length| length.parse::<u64>().ok());
        let wanted = announced.size - state.position;
        if let Some(length) = length.filter(|length| *length != wanted) {
            return Err(state.other(format!("{} announced, {} sent", size(wanted), size(length))));
        }
        while let Some(data) = self.client.next(&mut response).await? {
            if data.len() as u64 > announced.size - state.position {
                return Err(state
                    .other(format!("more was sent than the announced {}", size(announced.size))));
            }
            state.write(&data).map_err(Failure::Disk)?;
        }
        if state.position < announced.size {
            let (here, all) = (size(state.position), size(announced.size));
            return Err(Trouble::Broken(format!("the connection ended at {here} of {all}")).into());
        }
        Ok(())
    }

    fn partial(&self, announced: &RemoteFile) -> PathBuf {
        self.folder.blobs().join(format!("{}.incomplete", announced.etag))
    }
}

/// A file that is not completely downloaded.
struct Partial {
    path: PathBuf,
    file: File,
    /// The name of the file, for messages.
    name: String,
}

impl Partial {
    fn open(path: PathBuf, name: &str) -> Result<Self, HubError> {
        let folder = path.parent().unwrap_or(Path::new("/"));
        let opened = fs::create_dir_all(folder).and_then(|()| {
            File::options().create(true).truncate(false).read(true).write(true).open(&path)
        });
        let file = opened.map_err(|error| HubError::disk(&path, "written", &error))?;
        Ok(Self { file, path, name: name.to_owned() })
    }

    /// Renames the finished file to `blob`.
    fn finish(self, blob: &Path) -> Result<(), HubError> {
        // Without this, the name could reach the disk before the data.
        let done = self.file.sync_all().and_then(|()| match fs::rename(&self.path, blob) {
            // On file systems without locks, another process may have finished the same file.
            Err(error) if error.kind() == io::ErrorKind::NotFound && blob.is_file() => Ok(()),
            other => other,
        });
        done.map_err(|error| HubError::disk(blob, "written", &error))
    }
}

/// The state of a partially downloaded file.
struct State<'a> {
    partial: Partial,
    hashes: Hashes,
    position: u64,
    /// True if no byte of the file comes from an earlier run.
    fresh: bool,
    progress: FileProgress<'a>,
}

impl<'a> State<'a> {
    /// Reads and hashes the part that an earlier run has downloaded.
    async fn of(
        partial: Partial,
        announced: &RemoteFile,
        progress: &'a Progress,
        name: &str,
    ) -> Result<Self, Failure> {
        let mut hashes = Hashes::of(announced);
        let whole = announced.size;
        let read = tokio::task::spawn_blocking(move || {
            let mut buffer = vec![0; 1 << 20];
            let mut here = 0;
            loop {
                match (&partial.file).read(&mut buffer) {
                    Ok(0) => break,
                    Ok(count) => {
                        here += count as u64;
                        hashes.update(&buffer[..count]);
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(HubError::disk(&partial.path, "read", &error)),
                }
                if here > whole {
                    break;
                }
            }
            Ok((partial, hashes, here))
        });
        let read = read.await.map_err(|error| Trouble::Broken(error.to_string()))?;
        let (partial, hashes, here) = read.map_err(Failure::Disk)?;
        let position = if here > whole { 0 } else { here };
        let progress = progress.file(name, whole, position);
        let mut state = Self { partial, hashes, position: here, fresh: here == 0, progress };
        if here > whole {
            state.restart();
        }
        Ok(state)
    }

    fn restart(&mut self) {
        if self.position > 0 {
            self.hashes.restart();
            self.progress.restart();
            self.position = 0;
            // Truncating is safe: no other process has the file open. Without locks, another
            // process may have it open, but that process writes the same bytes.
            let _ = self.partial.file.set_len(0);
        }
        self.fresh = true;
    }

    /// Writes the next bytes at their offset rather than by appending, because without locks two
    /// processes may write the same file.
    fn write(&mut self, data: &[u8]) -> Result<(), HubError> {
        let written = self.partial.file.write_all_at(data, self.position);
        written.map_err(|error| match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                let folder = self.partial.path.parent().unwrap_or(Path::new("/"));
                full(folder, &self.partial.name, self.progress.left())
            }
            _ => HubError::disk(&self.partial.path, "written", &error),
        })?;
        self.hashes.update(data);
        self.position += data.len() as u64;
        self.progress.add(data.len() as u64);
        Ok(())
    }

    fn other(&self, cause: String) -> Failure {
        Failure::Other { cause, fresh: self.fresh }
    }

    fn check(&self, announced: &RemoteFile) -> Result<(), Failure> {
        self.hashes.check(announced).map_err(|cause| self.other(cause))
    }
}

/// The running hashes, one of which the announced ETag may be; empty if the ETag is not a hash.
#[derive(Clone)]
struct Hashes {
    contexts: Vec<Context>,
    at_start: Vec<Context>,
}

impl Hashes {
    fn of(announced: &RemoteFile) -> Self {
        let hexadecimal = announced.etag.bytes().all(|byte| byte.is_ascii_hexdigit());
        let contexts = match announced.etag.len() {
            64 if hexadecimal => vec![Context::new(&SHA256)],
            40 if hexadecimal => {
                let mut git = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                git.update(format!("blob {}\0", announced.size).as_bytes());
                // Git's hash, as on the hub, or the plain hash of the content, as on some mirrors.
                vec![git, Context::new(&SHA1_FOR_LEGACY_USE_ONLY)]
            }
            _ => Vec::new(),
        };
        Self { at_start: contexts.clone(), contexts }
    }

    fn update(&mut self, data: &[u8]) {
        self.contexts.iter_mut().for_each(|context| context.update(data));
    }

    fn restart(&mut self) {
        self.contexts.clone_from(&self.at_start);
    }

    /// Compares the file's hash with the announced ETag. The error states both values.
    fn check(&self, announced: &RemoteFile) -> Result<(), String> {
        let found: Vec<String> =
            self.contexts.iter().map(|context| hex(context.clone().finish().as_ref())).collect();
        if found.is_empty() || found.iter().any(|hash| hash.eq_ignore_ascii_case(&announced.etag)) {
            return Ok(());
        }
        Err(format!("its hash is {} and not {}", found[0], announced.etag))
    }
}

/// Increasing pauses between attempts.
#[derive(Debug, Default)]
struct Pauses {
    made: u32,
}

impl Pauses {
    /// Waits before the next attempt. Returns the error if there should be no further attempt.
    async fn after(&mut self, trouble: Trouble) -> Result<(), Trouble> {
        self.made += 1;
        if self.made >= ATTEMPTS || !trouble.may_pass() {
            return Err(trouble);
        }
        let asked = match &trouble {
            Trouble::Status(refusal) => refusal.retry_after,
            _ => None,
        };
        let pause = asked.unwrap_or(FIRST_PAUSE * 2_u32.pow(self.made - 1));
        if pause > LONGEST_PAUSE {
            return Err(trouble);
        }
        tokio::time::sleep(pause).await;
        Ok(())
    }
}

/// Returns the error for a disk without room for `needed` more bytes.
pub(crate) fn full(folder: &Path, file: &str, needed: u64) -> HubError {
    HubError::Full {
        folder: folder.display().to_string(),
        file: file.to_owned(),
        free: size(free(folder).unwrap_or_default()),
        needed: size(needed),
    }
}

/// Returns the number of bytes that the user may still write below `folder`, which may not exist
/// yet.
#[must_use]
pub fn free(folder: &Path) -> Option<u64> {
    let there = folder.ancestors().find(|path| path.exists())?;
    let found = rustix::fs::statvfs(there).ok()?;
    Some(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Returns the ETag of a file's content.
fn announced_etag(response: &Response<Incoming>) -> Result<String, Trouble> {
    let etag = header(response, LINKED_ETAG).or_else(|| header(response, ETAG));
    let etag = plain(etag.ok_or_else(|| Trouble::Lie("a file without an ETag".to_owned()))?);
    if !is_name(etag) {
        return Err(Trouble::Lie(format!("{etag:?} as an ETag")));
    }
    Ok(etag.to_owned())
}

fn announced_size(response: &Response<Incoming>) -> Option<u64> {
    let length = header(response, LINKED_SIZE).or_else(|| header(response, CONTENT_LENGTH));
    length.and_then(|length| length.parse().ok())
}

/// Removes the quotes and the weak mark `W/` from an ETag.
fn plain(etag: &str) -> &str {
    etag.trim().trim_start_matches("W/").trim_matches('"')
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
