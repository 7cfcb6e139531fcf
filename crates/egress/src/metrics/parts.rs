//! Current numbers of the server's parts, collected when metrics are read.

use forebay_grammar::GrammarStats;
use forebay_text::TextStats;

use super::adapters::AdapterCounts;
use super::pd::PdCounts;

/// Numbers of the server's parts other than replicas.
#[derive(Debug, Clone, Default)]
pub struct PartStats {
    /// The counts of the text pool.
    pub text: TextStats,
    /// The counters of the threads that compile grammars.
    pub grammars: GrammarStats,
    /// The counts of the way of large requests.
    pub intake: IntakeStats,
    /// Log lines that were dropped because the writer was behind.
    pub dropped: u64,
    /// The counts of adapters; `None`: there are none.
    pub adapters: Option<AdapterCounts>,
    /// The counts of prompts that another server computes, or this one for others; `None`: neither.
    pub pd: Option<PdCounts>,
}

/// Counts of waiting requests, and of bytes in the arena.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IntakeStats {
    /// Large bodies that wait to be parsed.
    pub unread: usize,
    /// Requests that wait for room in the arena.
    pub in_line: usize,
    /// Reserved bytes of the arena.
    pub arena_bytes: usize,
    /// Bytes that requests in flight are charged.
    pub request_bytes: usize,
}
