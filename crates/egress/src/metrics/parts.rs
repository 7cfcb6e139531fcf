//! The numbers of the server's parts, as they are when metrics are read.

use std::fmt::Write as _;

use forebay_grammar::GrammarStats;
use forebay_text::TextStats;

/// Numbers of the server's parts beside the replicas.
#[derive(Debug, Clone, Default)]
pub struct PartStats {
    /// The counts of the text pool.
    pub text: TextStats,
    /// The counts of the threads that compile forms of answers.
    pub grammars: GrammarStats,
    /// The counts of the way of large requests.
    pub intake: IntakeStats,
    /// Log lines that were dropped because the writer was behind.
    pub dropped: u64,
    /// The counts of adapters; `None`: there are none.
    pub adapters: Option<AdapterCounts>,
}

/// Counts of adapters, which only grow while an adapter is loaded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AdapterCounts {
    /// Requests by the name of their adapter, in the order of names.
    pub requests: Vec<(String, u64)>,
    /// Adapters that clients had read.
    pub reads: u64,
    /// Adapters among them that were refused.
    pub failed_reads: u64,
}

/// The largest number of adapters with a number of their own. Others are counted together.
const MOST_ADAPTERS: usize = 64;

impl AdapterCounts {
    /// Appends the counts in Prometheus' text format. Names have no characters that are escaped.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        let Self { requests, reads, failed_reads } = self;
        let mut text = String::from(
            "# HELP forebay:adapter_requests_total Choices submitted for an adapter.\n\
             # TYPE forebay:adapter_requests_total counter\n",
        );
        let (named, others) = requests.split_at(requests.len().min(MOST_ADAPTERS));
        for (name, count) in named {
            let _ = writeln!(text, "forebay:adapter_requests_total{{adapter=\"{name}\"}} {count}");
        }
        if !others.is_empty() {
            let count: u64 = others.iter().map(|(_, count)| count).sum();
            let _ = writeln!(text, "forebay:adapter_requests_total{{adapter=\"other\"}} {count}");
        }
        text += "# HELP forebay:lora_reads_total Adapters that clients had read.\n\
                 # TYPE forebay:lora_reads_total counter\n";
        let fine = reads - failed_reads;
        let _ = writeln!(text, "forebay:lora_reads_total{{result=\"done\"}} {fine}");
        let _ = writeln!(text, "forebay:lora_reads_total{{result=\"refused\"}} {failed_reads}");
        out.extend_from_slice(text.as_bytes());
    }
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
