//! The limits on requests.

use clap::Args;
use forebay_machine::MachineMemory;
use forebay_server::ServerConfig;

/// The least that all requests together get by default: a thousand chats, or some of the largest
/// bodies.
const LEAST: usize = 1 << 30;
/// The upper limit, for machines with much memory.
const MOST: usize = 16 << 30;
/// The share of the memory between the two.
const SHARE: usize = 8;
/// The largest share, also where that is less than the least: the weights and the pages of a hand
/// are in the same memory.
const LARGEST_SHARE: usize = 4;

#[derive(Debug, Args)]
#[command(next_help_heading = "Limits")]
pub(crate) struct LimitFlags {
    /// The largest request body in bytes; of one above --max-json-bytes the rest must be
    /// `prompt_embeds`.
    #[arg(long, default_value_t = ServerConfig::default().max_body_bytes)]
    pub(crate) max_body_bytes: usize,
    /// The largest request body in bytes, not counting `prompt_embeds`.
    #[arg(long, default_value_t = ServerConfig::default().max_json_bytes)]
    pub(crate) max_json_bytes: usize,
    /// Memory budget in bytes of all requests together, bodies and expected output included. Beyond
    /// it new requests get 429 [default: an eighth of the memory that the process may use, from 1
    /// to 16 GiB, and at most a quarter of it].
    #[arg(long)]
    max_request_bytes_in_flight: Option<usize>,
}

impl LimitFlags {
    /// The bytes as given, or a default that suits this machine.
    pub(crate) fn request_bytes(&self, memory: &MachineMemory) -> usize {
        let bytes = memory.usable().and_then(|bytes| usize::try_from(bytes).ok());
        self.max_request_bytes_in_flight.unwrap_or_else(|| share(bytes.unwrap_or(usize::MAX)))
    }
}

fn share(memory: usize) -> usize {
    (memory / SHARE).clamp(LEAST, MOST).min(memory / LARGEST_SHARE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_eighth_within_bounds() {
        assert_eq!(share(4 << 30), 1 << 30);
        assert_eq!(share(64 << 30), 8 << 30);
        assert_eq!(share(usize::MAX), 16 << 30);
    }

    #[test]
    fn little_memory_is_not_all_for_requests() {
        assert_eq!(share(600 << 20), 150 << 20);
        assert_eq!(share(2 << 30), 512 << 20);
    }
}
