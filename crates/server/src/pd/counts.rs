//! Statistics of prompts that one server computes for another.

use std::sync::atomic::{AtomicU64, Ordering};

use forebay_egress::{FetchCounts, PdCounts, SentCounts};

/// The outcome of a decode server's attempt to fetch a prompt's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Blocks were received, and nothing failed.
    Came,
    /// Only a small part of the prompt is not cached.
    Short,
    /// The kind of the request is not supported: it has images, embeddings, an adapter, several
    /// prompts, or log-probabilities of its prompt.
    Kind,
    /// No usable prefill server is configured, or all have just failed.
    NoServer,
    /// There is no room for the blocks at present.
    Full,
    /// The prefill server accepts no more requests at present.
    Busy,
    /// The prefill server has no blocks to send.
    Nothing,
    /// No connection to the prefill server could be opened.
    Unreachable,
    /// The prefill server rejects the request: its model, pages or key differ.
    Refused,
    /// The connection broke before the last frame.
    Broken,
    /// The prefill server took too long.
    Late,
    /// The prefill server sent data that was not requested.
    Wrong,
}

impl Outcome {
    /// All outcomes, with their labels in metrics.
    const ALL: [(Self, &'static str); 12] = [
        (Self::Came, "came"),
        (Self::Short, "short"),
        (Self::Kind, "kind"),
        (Self::NoServer, "no_server"),
        (Self::Full, "full"),
        (Self::Busy, "busy"),
        (Self::Nothing, "nothing"),
        (Self::Unreachable, "unreachable"),
        (Self::Refused, "refused"),
        (Self::Broken, "broken"),
        (Self::Late, "late"),
        (Self::Wrong, "wrong"),
    ];

    /// True if the outcome is the prefill server's fault.
    pub(crate) fn is_failure(self) -> bool {
        match self {
            Self::Unreachable | Self::Refused | Self::Broken | Self::Late | Self::Wrong => true,
            Self::Came | Self::Short | Self::Kind | Self::NoServer => false,
            Self::Full | Self::Busy | Self::Nothing => false,
        }
    }
}

/// Statistics of a decode server.
#[derive(Debug, Default)]
pub(crate) struct FetchCounters {
    outcomes: [AtomicU64; Outcome::ALL.len()],
    blocks: AtomicU64,
    bytes: AtomicU64,
}

impl FetchCounters {
    pub(crate) fn ended(&self, outcome: Outcome) {
        self.outcomes[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn came(&self, blocks: usize, bytes: u64) {
        self.blocks.fetch_add(blocks as u64, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn counts(&self) -> PdCounts {
        let outcomes = Outcome::ALL.map(|(outcome, label)| {
            (label, self.outcomes[outcome as usize].load(Ordering::Relaxed))
        });
        PdCounts::Decode(FetchCounts {
            outcomes: outcomes.to_vec(),
            blocks: self.blocks.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
        })
    }
}

/// Statistics of a prefill server.
#[derive(Debug, Default)]
pub(crate) struct SentCounters {
    prompts: AtomicU64,
    blocks: AtomicU64,
    bytes: AtomicU64,
}

impl SentCounters {
    pub(crate) fn prompt(&self) {
        self.prompts.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn block(&self, bytes: u64) {
        self.blocks.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn counts(&self) -> PdCounts {
        PdCounts::Prefill(SentCounts {
            prompts: self.prompts.load(Ordering::Relaxed),
            blocks: self.blocks.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_stand_in_the_order_of_outcomes() {
        for (at, (outcome, _)) in Outcome::ALL.into_iter().enumerate() {
            assert_eq!(outcome as usize, at);
        }
    }
}
