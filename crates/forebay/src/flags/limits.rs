//! The limits on requests.

use std::fs;

use clap::Args;

/// The least that all requests together get by default: a thousand chats, or some of the largest
/// bodies.
const LEAST: usize = 1 << 30;
/// The most: a machine with so much memory has it for something else.
const MOST: usize = 16 << 30;
/// The share of the machine's memory between the two.
const SHARE: usize = 8;

#[derive(Debug, Args)]
#[command(next_help_heading = "Limits")]
pub(crate) struct LimitFlags {
    /// Largest request body in bytes; of one above --max-json-bytes the rest must be
    /// `prompt_embeds`.
    #[arg(long, default_value_t = 64 << 20)]
    pub(crate) max_body_bytes: usize,
    /// Largest request body in bytes, not counting `prompt_embeds`.
    #[arg(long, default_value_t = 4 << 20)]
    pub(crate) max_json_bytes: usize,
    /// Most bytes that all requests take together, from their bodies to the output that is expected
    /// of them. Beyond that new ones get 429 [default: an eighth of the memory, from 1 to 16 GiB].
    #[arg(long)]
    max_request_bytes_in_flight: Option<usize>,
}

impl LimitFlags {
    /// As given, or what suits this machine.
    pub(crate) fn request_bytes(&self) -> usize {
        self.max_request_bytes_in_flight.unwrap_or_else(|| share(memory()))
    }
}

fn share(memory: usize) -> usize {
    (memory / SHARE).clamp(LEAST, MOST)
}

/// Bytes of memory that this process may use, as far as the system says.
fn memory() -> usize {
    let kib = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        line.split_whitespace().next()?.parse::<usize>().ok()
    });
    let machine = kib.map_or(usize::MAX, |kib| kib.saturating_mul(1024));
    let limit = fs::read_to_string("/sys/fs/cgroup/memory.max").ok();
    let limit = limit.and_then(|text| text.trim().parse().ok()).unwrap_or(usize::MAX);
    machine.min(limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_eighth_within_bounds() {
        assert_eq!(share(2 << 30), 1 << 30);
        assert_eq!(share(64 << 30), 8 << 30);
        assert_eq!(share(usize::MAX), 16 << 30);
    }
}
