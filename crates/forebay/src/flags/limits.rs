//! The limits on requests.

use clap::Args;
use forebay_machine::MachineMemory;
use forebay_server::ServerConfig;

/// The smallest default of the memory budget: enough for a thousand chats, or for a few of the
/// largest bodies.
const LEAST: usize = 1 << 30;
/// The largest default, for machines with much memory.
const MOST: usize = 16 << 30;
/// Between `LEAST` and `MOST`, the default is the memory divided by this number.
const SHARE: usize = 8;
/// The default is at most the memory divided by this number, even if that is below `LEAST`: a
/// hand's weights and pages need the same memory.
const LARGEST_SHARE: usize = 4;

#[derive(Debug, Args)]
#[command(next_help_heading = "Limits")]
pub(crate) struct LimitFlags {
    /// Largest request body in bytes. Only `prompt_embeds` and images may exceed --max-json-bytes.
    #[arg(long, default_value_t = ServerConfig::default().max_body_bytes)]
    pub(crate) max_body_bytes: usize,
    /// Largest request body in bytes, without `prompt_embeds` and images.
    #[arg(long, default_value_t = ServerConfig::default().max_json_bytes)]
    pub(crate) max_json_bytes: usize,
    /// Memory budget in bytes for all requests together, including bodies and expected output.
    /// Requests beyond the budget get 429 [default: an eighth of the memory that the process may
    /// use, from 1 to 16 GiB, but at most a quarter of that memory].
    #[arg(long)]
    max_request_bytes_in_flight: Option<usize>,
}

impl LimitFlags {
    /// The given number of bytes, or a default that suits this machine.
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
