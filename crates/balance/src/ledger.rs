//! The outstanding work of every target: requests that were sent there and have not ended.

use std::collections::HashMap;

use rustc_hash::FxBuildHasher;

/// The work of one request, in tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Tokens to compute before the first output token: the prompt's uncached tokens.
    pub prefill: u64,
    /// An estimate of the tokens to generate.
    pub decode: u64,
}

impl Work {
    /// The tokens of prefill and decode together.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.prefill + self.decode
    }
}

/// The work of one target.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests that have not ended.
    pub requests: u64,
    /// The work that these requests have left.
    pub work: Work,
    /// The number of requests that have not begun to generate.
    pub in_prefill: u64,
    /// The largest number of simultaneous requests so far.
    pub peak: u64,
    /// The number of requests ever sent to the target.
    pub dispatched: u64,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    target: usize,
    work: Work,
    started: bool,
}

/// Exact loads. A request counts from the time at which it is sent until it ends, and its work
/// decreases as tokens are generated. Every operation is O(1).
#[derive(Debug, Clone)]
pub struct Ledger {
    loads: Vec<Load>,
    entries: HashMap<u64, Entry, FxBuildHasher>,
}

impl Ledger {
    /// Creates a ledger of `targets` idle targets.
    #[must_use]
    pub fn new(targets: usize) -> Self {
        Self { loads: vec![Load::default(); targets], entries: HashMap::default() }
    }

    /// The loads, by target.
    #[must_use]
    pub fn loads(&self) -> &[Load] {
        &self.loads
    }

    /// The target of a request; `None` once the request has ended.
    #[must_use]
    pub fn target(&self, id: u64) -> Option<usize> {
        self.entries.get(&id).map(|entry| entry.target)
    }

    /// The requests of a target, in no order.
    pub fn requests(&self, target: usize) -> impl Iterator<Item = u64> {
        self.entries.iter().filter(move |(_, entry)| entry.target == target).map(|(&id, _)| id)
    }

    /// Records that a request is sent to a target, and removes it from an earlier one.
    pub fn sent(&mut self, id: u64, target: usize, work: Work) {
        self.ended(id);
        let load = &mut self.loads[target];
        load.requests += 1;
        load.in_prefill += 1;
        load.work.prefill += work.prefill;
        load.work.decode += work.decode;
        load.peak = load.peak.max(load.requests);
        load.dispatched += 1;
        self.entries.insert(id, Entry { target, work, started: false });
    }

    /// Notes `tokens` more generated tokens of a request. Returns true if they are the first since
    /// the request was sent.
    pub fn generated(&mut self, id: u64, tokens: u64) -> bool {
        let Some(entry) = self.entries.get_mut(&id) else { return false };
        let load = &mut self.loads[entry.target];
        let left = entry.work.decode.saturating_sub(tokens);
        load.work.decode -= entry.work.decode - left;
        entry.work.decode = left;
        if std::mem::replace(&mut entry.started, true) {
            return false;
        }
        load.in_prefill -= 1;
        load.work.prefill -= std::mem::take(&mut entry.work.prefill);
        true
    }

    /// Records the end of a request. Returns its target, or `None` if it had ended before.
    pub fn ended(&mut self, id: u64) -> Option<usize> {
        let entry = self.entries.remove(&id)?;
        let load = &mut self.loads[entry.target];
        load.requests -= 1;
        load.in_prefill -= u64::from(!entry.started);
        load.work.prefill -= entry.work.prefill;
        load.work.decode -= entry.work.decode;
        Some(entry.target)
    }
}
