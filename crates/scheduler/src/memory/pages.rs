//! The pages of a request.

use forebay_kvcache::{Host, Lease, Tiers};
use forebay_protocol::StepPlan;

use super::resident::ResidentState;
use super::window_part::{WindowPages, WindowRun};

/// The leases of a request's pages.
#[derive(Debug, Default)]
pub(crate) struct Pages {
    /// Hot pages by position; `None`: the page was dropped, and only its host page has the content.
    pub(super) hot: Vec<Option<Lease>>,
    /// The host page of each hot page; empty unless requests can be sparse.
    pub(super) host: Vec<Lease<Host>>,
    /// The leases for hot rows; empty unless the request is sparse.
    pub(super) rows: Vec<Lease>,
    /// The number of leading pages that a sparse request has dropped already, or never will drop.
    pub(super) settled: u32,
    /// The number of leading blocks that were found in the cache or offered to it.
    pub(super) named: u32,
    /// The states of a request that shares blocks, if the model has recurrent layers.
    pub(super) state: Option<ResidentState>,
    /// The request's pages of the window part, if sliding-window layers have a separate pool.
    pub(super) window: Option<WindowRun>,
}

impl Pages {
    pub(crate) fn len(&self) -> usize {
        self.hot.len()
    }

    /// The number of leading pages that all layers have now, or had before they were dropped.
    pub(crate) fn reach(&self) -> u32 {
        let all = self.len() as u32;
        self.window.as_ref().map_or(all, |window| window.end().min(all))
    }

    pub(super) fn is_sparse(&self) -> bool {
        !self.rows.is_empty()
    }

    /// The largest number of positions of one row.
    pub(crate) fn longest_row(&self) -> u32 {
        // Hot rows have room for the positions that one token chooses, but perhaps not for several
        // tokens.
        if self.is_sparse() { 1 } else { u32::MAX }
    }

    /// True if prefill gets pages one by one, as decoding does. Otherwise a request has all pages
    /// from the start.
    pub(crate) fn grow_in_prefill(&self) -> bool {
        self.is_sparse() || self.window.is_some()
    }

    /// Leases of hot pages.
    pub(crate) fn leases(&self) -> impl Iterator<Item = &Lease> {
        self.hot.iter().flatten().chain(&self.rows)
    }

    /// Writes the pages of a new resident into its page tables.
    pub(crate) fn write_tables(&self, slot: u32, plan: &mut StepPlan) {
        for (index, lease) in self.hot.iter().enumerate() {
            match lease {
                Some(lease) => plan.write_page(slot, index as u32, lease.page()),
                None => plan.drop_page(slot, index as u32),
            }
        }
        for (index, lease) in self.host.iter().enumerate() {
            plan.write_host(slot, index as u32, lease.page());
        }
        for (index, lease) in self.rows.iter().enumerate() {
            plan.write_hot_rows(slot, index as u32, lease.page());
        }
        self.window.iter().for_each(|window| window.write_table(slot, plan));
    }

    /// Frees all pages, the last one first.
    pub(super) fn free(mut self, tiers: &mut Tiers, windows: Option<&mut WindowPages>) {
        if let (Some(window), Some(windows)) = (self.window.take(), windows) {
            windows.free(window);
        }
        self.rows.drain(..).for_each(|lease| tiers.release(lease));
        while let Some(hot) = self.hot.pop() {
            hot.into_iter().for_each(|lease| tiers.release(lease));
        }
        while let Some(host) = self.host.pop() {
            tiers.release_host(host);
        }
    }
}
