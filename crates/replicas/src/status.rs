//! Combines the states of several replicas.

use forebay_balance::{Load, Role};
use forebay_engine::{Facts, Stats, Status};

use crate::roles::LocalCounts;

/// A report of one replica.
#[derive(Debug, Clone)]
pub struct ReplicaReport {
    /// The engine's status.
    pub status: Status,
    /// The statistics after the last step.
    pub stats: Stats,
    /// The present load according to the ledger.
    pub load: Load,
    /// True if the replica finishes its requests and gets no new ones.
    pub drained: bool,
    /// The number of requests that the replica serves alone although there are roles.
    pub local: LocalCounts,
    /// The role of the replica.
    pub role: Role,
    /// The number of tokens of requests that were handed on to the replica and wait for pages.
    pub ahead_tokens: u64,
    /// True if the replica holds back prompts that are to be handed on, because decode replicas
    /// lack pages.
    pub holding: bool,
    /// The number of times that the replica began to hold prompts back.
    pub holds: u64,
}

/// Combines the states of all replicas: ready as soon as one is. If none is ready, a recovering
/// replica takes precedence over one that loads for the first time, because requests may wait for
/// it. A failed replica counts only if all have failed, and a drained one only if all are drained.
#[must_use]
pub fn combined_status(all: Vec<Status>, drained: &[bool]) -> Status {
    let everyone = drained.iter().all(|&drained| drained);
    let counts = |at: usize| everyone || !drained.get(at).copied().unwrap_or(false);
    let rank = |status: &Status| match status {
        Status::Draining => 0,
        Status::Ready => 1,
        Status::Recovering(_) => 2,
        Status::Starting(_) => 3,
        Status::Failed(_) => 4,
    };
    let counted = all.into_iter().enumerate().filter(|&(at, _)| counts(at));
    let first = counted.map(|(_, status)| status).min_by_key(rank);
    first.unwrap_or_else(|| Status::Failed("there is no replica".into()))
}

/// Adds up the statistics of all engines.
#[must_use]
pub fn combined_stats(all: impl IntoIterator<Item = Stats>) -> Stats {
    let mut sum = Stats::default();
    all.into_iter().for_each(|one| sum += one);
    sum
}

/// Returns the facts of the replica with the shortest context length. A request within these limits
/// fits into any replica.
#[must_use]
pub fn combined_facts(all: impl IntoIterator<Item = Facts>) -> Option<Facts> {
    all.into_iter().reduce(|a, b| if b.context_length < a.context_length { b } else { a })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_ready_replica_is_enough() {
        let (loading, lost) = (Status::Starting("weights".into()), Status::Failed("no".into()));
        let again = Status::Recovering("killed".into());
        for (all, expected) in [
            (vec![loading.clone(), Status::Ready], Status::Ready),
            (vec![loading.clone(), again.clone()], again.clone()),
            (vec![lost.clone(), loading.clone()], loading),
            (vec![Status::Ready, lost.clone(), again.clone()], Status::Ready),
            (vec![lost.clone(), again.clone()], again),
            (vec![lost.clone(), lost.clone()], lost),
            (vec![Status::Draining, Status::Draining], Status::Draining),
        ] {
            assert_eq!(combined_status(all, &[false, false, false]), expected);
        }
        let all = || vec![Status::Ready, Status::Failed("no".into())];
        assert_eq!(combined_status(all(), &[true, false]), Status::Failed("no".into()));
        assert_eq!(combined_status(all(), &[true, true]), Status::Ready);
    }
}
