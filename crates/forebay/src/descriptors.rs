//! The limit on open files and sockets, and the number of connections that it allows.

use anyhow::{Result, bail};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::warn;

/// The largest default number of connections. More connections would need several front-end
/// processes.
const MOST_CONNECTIONS: u64 = 65_536;
/// Descriptors for files, logs and thread wake-ups, for connections over the limit until they get
/// their error, and for new connections that are not counted yet.
const OTHERS: u64 = 192;
/// Descriptors for a hand: those of its socket and its process, doubled because of restarts.
const PER_HAND: u64 = 8;

/// Raises the limit on open files as far as this user may, and returns it.
pub(crate) fn raise() -> u64 {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        warn!(%error, "the limit of open files stays as it is");
        return current.unwrap_or(u64::MAX);
    }
    maximum.unwrap_or(u64::MAX)
}

/// Returns the largest number of connections if `limit` files may be open and `hands` hands run.
///
/// # Errors
/// `wanted` is more than the limit leaves.
pub(crate) fn connections(wanted: Option<u32>, limit: u64, hands: u32) -> Result<usize> {
    let others = OTHERS + PER_HAND * u64::from(hands);
    let room = limit.saturating_sub(others).max(limit / 2);
    let connections = match wanted.map(u64::from) {
        Some(wanted) if wanted > room => bail!(
            "--max-connections {wanted}: of the {limit} files that may be open (ulimit -n), {room} can be connections"
        ),
        Some(wanted) => wanted,
        None => room.min(MOST_CONNECTIONS),
    };
    Ok(usize::try_from(connections)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_descriptors_for_the_rest() {
        assert_eq!(connections(None, 1 << 20, 1).unwrap(), 65_536);
        assert_eq!(connections(None, 1024, 2).unwrap(), 1024 - 192 - 16);
        assert_eq!(connections(None, 300, 1).unwrap(), 150);
        assert_eq!(connections(Some(100), 1024, 1).unwrap(), 100);
        assert_eq!(connections(Some(1 << 17), u64::MAX, 1).unwrap(), 1 << 17);
        assert!(connections(Some(1000), 1024, 1).is_err());
    }

    #[test]
    fn the_limit_is_the_most_there_is() {
        let limit = raise();
        let now = getrlimit(Resource::Nofile);
        assert_eq!((now.current, now.current.unwrap_or(u64::MAX)), (now.maximum, limit));
    }
}
