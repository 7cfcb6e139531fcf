//! Records the transfer parameters of vLLM's prefill servers, because they may be used only once.

use std::num::NonZeroUsize;

use lru::LruCache;
use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The largest number of parameters that are remembered. A prefill server keeps the KV cache for
/// half a minute to a few minutes.
const MOST: NonZeroUsize = NonZeroUsize::new(1 << 16).expect("not zero");

/// Parameters that were sent to a decode server. If they were sent again, the memory that they name
/// might hold another prompt's KV cache, and the answer would continue that prompt.
#[derive(Debug)]
pub(crate) struct Used {
    seed: u64,
    names: Mutex<LruCache<u64, ()>>,
}

impl Default for Used {
    fn default() -> Self {
        Self { seed: rand::random(), names: Mutex::new(LruCache::new(MOST)) }
    }
}

impl Used {
    /// Records that parameters are sent. Returns false if they were sent before.
    pub(crate) fn take(&self, params: &[u8]) -> bool {
        let name = xxh3_64_with_seed(params, self.seed);
        self.names.lock().put(name, ()).is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_taken_once() {
        let used = Used::default();
        assert!(used.take(b"{\"a\":1}") && used.take(b"{\"a\":2}"));
        assert!(!used.take(b"{\"a\":1}"));
    }
}
