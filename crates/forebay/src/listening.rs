//! Opens the listening sockets, before any slow part of the start.

use std::fs;
use std::io;
use std::net::{IpAddr, TcpListener};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result, bail};
use forebay_server::Listener;

use crate::flags::ListenFlags;

/// Connections that may wait to be accepted, if the system allows as many. Further ones are
/// dropped, and clients retry a second later. The standard library requests only 128.
const BACKLOG: i32 = 65_535;

/// Listens on an address and port.
pub(crate) fn tcp(host: &str, port: u16) -> Result<TcpListener> {
    let listener = TcpListener::bind((host, port)).map_err(|error| {
        let taken = error.kind() == io::ErrorKind::AddrInUse;
        let advice = if taken { ": another program has this port, choose another" } else { "" };
        anyhow::Error::new(error).context(format!("cannot listen on {host}:{port}{advice}"))
    })?;
    rustix::net::listen(&listener, BACKLOG)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// The address, if it is a loopback address, which only this machine can reach.
pub(crate) fn loopback(address: IpAddr) -> Option<String> {
    address.to_canonical().is_loopback().then(|| address.to_string())
}

/// The address that `serve` listens on.
pub(crate) enum Bound {
    Tcp(TcpListener),
    Unix(UnixListener, SocketFile),
}

impl Bound {
    /// Listens at the addresses of the flags.
    pub(crate) fn open(flags: &ListenFlags) -> Result<Self> {
        let Some(path) = &flags.uds else { return Ok(Self::Tcp(tcp(&flags.host, flags.port)?)) };
        let (listener, file) =
            unix(path).with_context(|| format!("cannot listen on {}", path.display()))?;
        Ok(Self::Unix(listener, file))
    }

    /// The TCP address, if it is a loopback address, which only this machine can reach.
    pub(crate) fn loopback(&self) -> Result<Option<String>> {
        let Self::Tcp(listener) = self else { return Ok(None) };
        Ok(loopback(listener.local_addr()?.ip()))
    }

    /// The URL of the server, and further arguments that curl needs.
    pub(crate) fn url(&self, encrypted: bool) -> Result<(String, String)> {
        Ok(match self {
            Self::Tcp(listener) => {
                let scheme = if encrypted { "https" } else { "http" };
                (format!("{scheme}://{}", listener.local_addr()?), String::new())
            }
            Self::Unix(_, file) => {
                ("http://localhost".into(), format!("--unix-socket {} ", file.path.display()))
            }
        })
    }

    /// Creates the server's listener. The socket file is removed when the returned `SocketFile` is
    /// dropped.
    pub(crate) fn listener(self) -> io::Result<(Listener, Option<SocketFile>)> {
        Ok(match self {
            Self::Tcp(listener) => (tokio::net::TcpListener::from_std(listener)?.into(), None),
            Self::Unix(listener, file) => {
                (tokio::net::UnixListener::from_std(listener)?.into(), Some(file))
            }
        })
    }
}

/// The file of a Unix socket. Dropping this removes the file, unless another process has replaced
/// it.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    identity: Identity,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|now| now == self.identity) {
            // A file that can't be removed is replaced by the next process.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The identity of a file: device, inode and creation time, because inode numbers are reused.
type Identity = (u64, u64, Option<SystemTime>);

fn identity(path: &Path) -> io::Result<Identity> {
    let found = fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino(), found.created().ok()))
}

fn unix(path: &Path) -> Result<(UnixListener, SocketFile)> {
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => bail!("there is a file that isn't a socket"),
        Ok(_) => match UnixStream::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                fs::remove_file(path)?;
            }
            Ok(_) => bail!("another process listens there"),
            Err(error) => return Err(error.into()),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error.into()),
    }
    let listener = UnixListener::bind(path)?;
    rustix::net::listen(&listener, BACKLOG)?;
    listener.set_nonblocking(true)?;
    Ok((listener, SocketFile { path: path.to_owned(), identity: identity(path)? }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_replaced_only_if_nobody_listens() {
        let folder = std::env::temp_dir().join(format!("forebay-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("socket");
        let (listener, file) = unix(&path).unwrap();
        assert!(unix(&path).unwrap_err().to_string().contains("another process listens"));
        // Leave the socket file in place, as a killed process does.
        drop(listener);
        let (_listener, next) = unix(&path).unwrap();
        // Dropping the first `SocketFile` must not remove the second one's file.
        drop(file);
        assert!(path.exists());
        drop(next);
        assert!(!path.exists());
        fs::write(&path, "precious").unwrap();
        assert!(unix(&path).is_err() && fs::read(&path).unwrap() == b"precious");
        fs::remove_dir_all(&folder).unwrap();
    }
}
