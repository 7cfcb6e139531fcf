//! The request metrics of adapters.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// The largest number of adapters that metrics list by name. Further adapters are counted together.
const MOST_ADAPTERS: usize = 64;

/// The request counts of an adapter.
#[derive(Debug, Default)]
pub struct AdapterLoad {
    name: String,
    submitted: AtomicU64,
    /// Requests that have not had their first step.
    waiting: AtomicUsize,
    running: AtomicUsize,
}

impl AdapterLoad {
    /// Creates the counts of an adapter. `name` must not contain characters that metrics escape.
    #[must_use]
    pub fn new(name: String) -> Self {
        Self { name, ..Self::default() }
    }

    /// Counts submitted choices.
    pub fn submitted(&self, count: u32) {
        self.submitted.fetch_add(count.into(), Ordering::Relaxed);
    }
}

/// Counts a request of an adapter as waiting or running until it is dropped.
pub(crate) struct AdapterUse {
    load: Arc<AdapterLoad>,
    runs: bool,
}

impl AdapterUse {
    /// Counts a request as waiting for its first step.
    pub(crate) fn new(load: Arc<AdapterLoad>) -> Self {
        load.waiting.fetch_add(1, Ordering::Relaxed);
        Self { load, runs: false }
    }

    /// Records that the request has had its first step.
    pub(crate) fn runs(&mut self) {
        if !std::mem::replace(&mut self.runs, true) {
            self.load.running.fetch_add(1, Ordering::Relaxed);
            self.load.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for AdapterUse {
    fn drop(&mut self) {
        let count = if self.runs { &self.load.running } else { &self.load.waiting };
        count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The counts of all adapters. An adapter's counters never decrease while it is loaded.
#[derive(Debug, Clone, Default)]
pub struct AdapterCounts {
    /// The request counts of each adapter, in the order of names.
    pub loads: Vec<Arc<AdapterLoad>>,
    /// The number of adapters that the server read because a client requested them.
    pub reads: u64,
    /// The number of adapters that the server read but rejected.
    pub failed_reads: u64,
}

impl AdapterCounts {
    /// Appends the counts in Prometheus' text format. `places` is the number of places of a hand.
    pub(super) fn write(&self, places: usize, out: &mut Vec<u8>) {
        let Self { loads, reads, failed_reads } = self;
        let mut text = String::from(
            "# HELP forebay:adapter_requests_total Choices submitted for an adapter.\n\
             # TYPE forebay:adapter_requests_total counter\n",
        );
        let (named, others) = loads.split_at(loads.len().min(MOST_ADAPTERS));
        let submitted = |load: &AdapterLoad| load.submitted.load(Ordering::Relaxed);
        for load in named {
            let (name, count) = (&load.name, submitted(load));
            let _ = writeln!(text, "forebay:adapter_requests_total{{adapter=\"{name}\"}} {count}");
        }
        if !others.is_empty() {
            let count: u64 = others.iter().map(|load| submitted(load)).sum();
            let _ = writeln!(text, "forebay:adapter_requests_total{{adapter=\"other\"}} {count}");
        }
        text += "# HELP forebay:lora_reads_total Adapters that clients had read.\n\
                 # TYPE forebay:lora_reads_total counter\n";
        let fine = reads - failed_reads;
        let _ = writeln!(text, "forebay:lora_reads_total{{result=\"done\"}} {fine}");
        let _ = writeln!(text, "forebay:lora_reads_total{{result=\"refused\"}} {failed_reads}");
        let running = names(loads, |load| &load.running);
        let waiting = names(loads, |load| &load.waiting);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        // As in vLLM, the adapter names are labels, and the value is a timestamp.
        text += "# HELP vllm:lora_requests_info Running stats on lora requests.\n\
                 # TYPE vllm:lora_requests_info gauge\n";
        let _ = writeln!(
            text,
            "vllm:lora_requests_info{{max_lora=\"{places}\",running_lora_adapters=\"{running}\",waiting_lora_adapters=\"{waiting}\"}} {now}"
        );
        out.extend_from_slice(text.as_bytes());
    }
}

/// Joins, with commas, the names of the adapters whose `count` is above 0.
fn names(loads: &[Arc<AdapterLoad>], count: impl Fn(&AdapterLoad) -> &AtomicUsize) -> String {
    let has = |load: &&Arc<AdapterLoad>| count(load).load(Ordering::Relaxed) > 0;
    let names = loads.iter().filter(has).map(|load| load.name.as_str()).take(MOST_ADAPTERS);
    names.collect::<Vec<_>>().join(",")
}
