//! The metrics of disaggregated prefill, where one server computes prompts for another.

use std::fmt::Write as _;

/// The counts of a prefill server or a decode server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PdCounts {
    /// The counts of a prefill server.
    Prefill(SentCounts),
    /// The counts of a decode server.
    Decode(FetchCounts),
}

/// The counts of a prefill server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SentCounts {
    /// Prompts that were computed for decode servers.
    pub prompts: u64,
    /// Blocks that were sent.
    pub blocks: u64,
    /// Bytes of these blocks.
    pub bytes: u64,
}

/// The counts of a decode server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FetchCounts {
    /// The number of requests by the outcome of fetching their blocks.
    pub outcomes: Vec<(&'static str, u64)>,
    /// Blocks that were received.
    pub blocks: u64,
    /// Bytes of these blocks.
    pub bytes: u64,
}

impl PdCounts {
    /// Appends the counts in Prometheus' text format.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        let mut text = String::new();
        let begin = |name: &str, help: &str| {
            format!("# HELP forebay:{name} {help}\n# TYPE forebay:{name} counter\n")
        };
        let plain =
            |head: String, name: &str, count: u64| format!("{head}forebay:{name} {count}\n");
        match self {
            Self::Prefill(SentCounts { prompts, blocks, bytes }) => {
                for (name, help, count) in [
                    ("pd_prefills_total", "Prompts computed for decode servers.", prompts),
                    ("pd_sent_blocks_total", "Blocks sent to decode servers.", blocks),
                    ("pd_sent_bytes_total", "Bytes of blocks sent to decode servers.", bytes),
                ] {
                    text += &plain(begin(name, help), name, *count);
                }
            }
            Self::Decode(FetchCounts { outcomes, blocks, bytes }) => {
                let name = "pd_fetches_total";
                text += &begin(name, "Prompts by the outcome of the question to a prefill server.");
                for (outcome, count) in outcomes {
                    // Writing to a String cannot fail.
                    let _ = writeln!(text, "forebay:{name}{{outcome=\"{outcome}\"}} {count}");
                }
                for (name, help, count) in [
                    ("pd_received_blocks_total", "Blocks that came from prefill servers.", blocks),
                    ("pd_received_bytes_total", "Bytes of these blocks.", bytes),
                ] {
                    text += &plain(begin(name, help), name, *count);
                }
            }
        }
        out.extend_from_slice(text.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_of_each_kind_has_its_counts() {
        let written = |counts: PdCounts| {
            let mut out = Vec::new();
            counts.write(&mut out);
            String::from_utf8(out).expect("text")
        };
        let prefill = written(PdCounts::Prefill(SentCounts { prompts: 1, blocks: 2, bytes: 3 }));
        assert!(prefill.contains("\nforebay:pd_prefills_total 1\n"), "{prefill}");
        assert!(prefill.ends_with("forebay:pd_sent_bytes_total 3\n"), "{prefill}");
        let counts = FetchCounts { outcomes: vec![("came", 4), ("late", 0)], blocks: 5, bytes: 6 };
        let decode = written(PdCounts::Decode(counts));
        assert!(decode.contains("forebay:pd_fetches_total{outcome=\"came\"} 4\n"), "{decode}");
        assert_eq!(decode.matches("# TYPE").count(), 3);
    }
}
