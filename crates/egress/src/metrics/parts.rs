//! The current values of the server's components, collected when metrics are scraped.

use forebay_grammar::GrammarStats;
use forebay_text::TextStats;

use super::adapters::AdapterCounts;
use super::pd::PdCounts;

/// The values of the server's components other than replicas.
#[derive(Debug, Clone, Default)]
pub struct PartStats {
    /// The counts of the text pool.
    pub text: TextStats,
    /// The counters of the threads that compile grammars.
    pub grammars: GrammarStats,
    /// The counts of the request path of large requests.
    pub intake: IntakeStats,
    /// Log lines that were dropped because the log writer could not keep up.
    pub dropped: u64,
    /// The counts of adapters; `None` if adapters are not served.
    pub adapters: Option<AdapterCounts>,
    /// The counts of disaggregated prefill; `None` if this server is neither a prefill nor a decode
    /// server.
    pub pd: Option<PdCounts>,
}

/// The counts of large requests that wait, and of bytes in the arena.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IntakeStats {
    /// The number of large bodies that wait to be parsed.
    pub unread: usize,
    /// The number of requests that wait for free bytes in the arena.
    pub in_line: usize,
    /// Reserved bytes of the arena.
    pub arena_bytes: usize,
    /// Bytes that requests in flight are charged for.
    pub request_bytes: usize,
}
