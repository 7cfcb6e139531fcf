//! Tiers in which every hot page of a request has a page of the host tier from the start.
//!
//! Sparse decoding from host memory needs such tiers. A request can continue without most of its
//! hot pages, because index keys choose the few positions that each token reads. The number of a
//! host page names two things: room for a block in host memory, and the *index page* on the device
//! that holds the block's index keys. So a block is known in the hot tier only if it is known in
//! the host tier. The flag *saved* is true if host memory has its content.
//!
//! Rules beyond those of [`Tiers`]: a block that the hot tier evicts unsaved is forgotten
//! everywhere. Evicting a host page forgets the block in the hot tier too. Index keys are lost with
//! the device, and are restored from host memory before a block is used.

use std::collections::HashMap;

use forebay_protocol::{Direction, PageCopy, Span};

use super::Tiers;
use super::copies::HostPage;
use crate::hash::{BlockHash, BuildNameHasher};
use crate::pool::{Host, Hot, Lease};

/// The number of consecutive failed saves after which the next save is assumed to fail too.
const MOST_FAILED: u32 = 8;

/// State that only backed tiers need.
#[derive(Debug)]
pub(super) struct BackedTiers {
    page_size: u32,
    /// The number of positions of each hot page that [`Tiers::save_rows`] has saved since the page
    /// was allocated.
    rows_saved: Vec<u32>,
    /// For each hot page, the number of saves in flight of the page or of some of its rows.
    leaving: Vec<u32>,
    /// Host pages whose index keys are not on the device.
    unindexed: Vec<bool>,
    /// The number of saves that failed since the last successful one.
    failed: u32,
    /// The tickets of copies that restore index keys, by block.
    indexing: HashMap<BlockHash, u32, BuildNameHasher>,
}

impl BackedTiers {
    pub(super) fn indexing(&mut self) -> &mut HashMap<BlockHash, u32, BuildNameHasher> {
        &mut self.indexing
    }

    pub(super) fn indexed(&self) -> impl Iterator<Item = (&BlockHash, &u32)> {
        self.indexing.iter()
    }
}

/// A found block with its leases.
#[derive(Debug)]
pub struct BackedBlock {
    /// The block's page of the host tier.
    pub host: Lease<Host>,
    /// The block's hot page, or the hot page to which it is being restored.
    pub hot: Option<Lease<Hot>>,
    /// The ticket of the copy that has to end before the hot page may be read.
    pub pending: Option<u32>,
    /// True if the host's memory has the block's content.
    pub saved: bool,
    /// True if the block's index keys are on the device.
    pub indexed: bool,
}

impl Tiers {
    /// Creates tiers of `hot_pages` and `host_pages` free pages. A page has `page_size` positions.
    #[must_use]
    pub fn backed(hot_pages: u32, host_pages: u32, page_size: u32) -> Self {
        let backed = BackedTiers {
            page_size,
            rows_saved: vec![0; hot_pages as usize],
            leaving: vec![0; hot_pages as usize],
            unindexed: vec![false; host_pages as usize],
            failed: 0,
            indexing: HashMap::default(),
        };
        Self { backed: Some(backed), ..Self::new(hot_pages, host_pages) }
    }

    /// The number of host pages that can be leased.
    #[must_use]
    pub fn host_available(&self) -> u32 {
        self.host.available()
    }

    /// The number of current leases of a host page.
    #[must_use]
    pub fn host_leases(&self, page: u32) -> u32 {
        self.host.leases(page)
    }

    /// Leases a hot page and its host page, both without content. Returns `None` and leases nothing
    /// if one of the tiers has no page.
    #[must_use]
    pub fn allocate_backed(&mut self) -> Option<(Lease<Hot>, Lease<Host>)> {
        if self.hot.available() == 0 {
            return None;
        }
        let (host, evicted) = self.host.allocate()?;
        if let Some(evicted) = evicted {
            self.hot.forget(evicted.name);
        }
        if let Some(backed) = &mut self.backed {
            backed.unindexed[host.page() as usize] = false;
        }
        let Some(hot) = self.allocate() else {
            self.host.release(host);
            return None;
        };
        Some((hot, host))
    }

    /// Finds a block of backed tiers and leases its pages.
    pub fn find_backed(&mut self, name: BlockHash) -> Option<BackedBlock> {
        let host = self.host.share(name)?;
        let indexed = !self.backed.as_ref()?.unindexed[host.page() as usize];
        if let Some(hot) = self.hot.share(name) {
            let saved = self.hot.is_saved(name);
            return Some(BackedBlock { host, hot: Some(hot), pending: None, saved, indexed });
        }
        let restoring = self.under_way.get(&name).copied().and_then(|ticket| {
            let copy = self.copies.get(&ticket)?;
            (copy.direction == Direction::Restore).then_some((ticket, copy.hot.as_ref()?))
        });
        let (pending, hot) = match restoring {
            Some((ticket, hot)) => (Some(ticket), Some(self.hot.join(hot))),
            None => (None, None),
        };
        // The hot tier has evicted the block. Evicting an unsaved block would have forgotten it in
        // the host tier too, so this block is saved.
        Some(BackedBlock { host, hot, pending, saved: true, indexed })
    }

    /// Gives back the leases of a found block.
    pub fn release_backed(&mut self, block: BackedBlock) {
        let BackedBlock { host, hot, .. } = block;
        hot.into_iter().for_each(|hot| self.hot.release(hot));
        self.host.release(host);
    }

    /// Starts to restore a saved block to a hot page. `None`: every hot page is leased.
    pub fn restore_backed(
        &mut self,
        name: BlockHash,
        host: &Lease<Host>,
    ) -> Option<(Lease<Hot>, u32)> {
        let host = self.host.join(host);
        self.restore(name, host)
    }

    /// Returns the ticket of the copy that restores a saved block's index keys. The copy is already
    /// in flight, or is started now.
    pub fn restore_index(&mut self, name: BlockHash, host: &Lease<Host>) -> u32 {
        if let Some(&ticket) = self.moving(Direction::RestoreIndex).get(&name) {
            return ticket;
        }
        let host = self.host.join(host);
        let ticket = self.start(Direction::RestoreIndex, Some(name), None, HostPage::Own(host));
        self.unsent.push_back(ticket);
        ticket
    }

    /// Names the block of a hot page and of its host page. Returns false if other leased pages hold
    /// that block already. Unleased pages that hold the block lose the name. A page without a name
    /// is never saved, so its request could not give it up.
    pub fn name_backed(&mut self, hot: &Lease<Hot>, host: &Lease<Host>, name: BlockHash) -> bool {
        if self.hot.name_of(hot).is_none() && self.host.leases_of(name) == Some(0) {
            self.forget(name);
        }
        let free = !self.hot.contains(name) && !self.host.contains(name);
        if !free || !self.host.name(host, name) {
            return false;
        }
        if !self.hot.name(hot, name) {
            self.host.forget(name);
            return false;
        }
        self.note_rows(hot);
        true
    }

    /// True if host memory has the content of a hot page's block, so that the page can be given up.
    #[must_use]
    pub fn can_drop(&self, hot: &Lease<Hot>) -> bool {
        self.hot.is_page_saved(hot)
    }

    /// The block that a hot page holds.
    #[must_use]
    pub fn name_of(&self, hot: &Lease<Hot>) -> Option<BlockHash> {
        self.hot.name_of(hot)
    }

    /// Removes a hot page from the cache, so that its content may be overwritten. Only one request
    /// may lease it, and the host must have its content. Otherwise returns false and does nothing.
    pub fn take_over(&mut self, hot: &Lease<Hot>) -> bool {
        if self.hot.leases(hot.page()) > 1 || !self.can_drop(hot) {
            return false;
        }
        self.hot.unname(hot);
        self.begin_page(hot);
        true
    }

    /// Starts to save rows of a page that is not full. When all of its rows are saved, the page is
    /// saved.
    pub fn save_rows(
        &mut self,
        hot: &Lease<Hot>,
        host: &Lease<Host>,
        span: Span,
    ) -> Option<PageCopy> {
        let (hot, host) = (self.hot.join(hot), self.host.join(host));
        let ticket = self.start(Direction::Save, None, Some(hot), HostPage::Own(host));
        let copy = self.copies.get_mut(&ticket)?;
        copy.span = Some(span);
        if let (Some(hot), Some(backed)) = (&copy.hot, &mut self.backed) {
            backed.leaving[hot.page() as usize] += 1;
        }
        self.send(ticket)
    }

    /// True if blocks will be saved soon: saves are in flight or requested, and the last ones did
    /// not all fail.
    #[must_use]
    pub fn expects_saves(&self) -> bool {
        let failed = self.backed.as_ref().map_or(0, |backed| backed.failed);
        failed < MOST_FAILED && (self.saving > 0 || !self.wanted.is_empty())
    }

    pub(super) fn save_backed(&mut self, name: BlockHash) -> Option<PageCopy> {
        let hot = self.hot.share(name)?;
        let leaving = self.backed.as_ref().map_or(0, |b| b.leaving[hot.page() as usize]);
        // A whole page is saved only while no other save of it or of its rows is in flight. Of two
        // saves, one that fails later would spoil the content that the other has saved.
        let Some(host) = (leaving == 0).then(|| self.host.share(name)).flatten() else {
            self.hot.release(hot);
            return None;
        };
        self.saving += 1;
        self.backed.iter_mut().for_each(|backed| backed.leaving[hot.page() as usize] += 1);
        let ticket = self.start(Direction::Save, Some(name), Some(hot), HostPage::Own(host));
        self.send(ticket)
    }

    /// Records the end of a save of some rows, or, if `whole` is true, of a whole page. `fine`: the
    /// save succeeded.
    pub(super) fn note_save(&mut self, hot: &Lease<Hot>, whole: bool, fine: bool) {
        let Some(backed) = &mut self.backed else { return };
        backed.leaving[hot.page() as usize] -= 1;
        if whole {
            backed.failed = if fine { 0 } else { backed.failed + 1 };
        }
    }

    pub(super) fn begin_page(&mut self, hot: &Lease<Hot>) {
        if let Some(backed) = &mut self.backed {
            backed.rows_saved[hot.page() as usize] = 0;
        }
    }

    /// Records the end of a save of the rows `span`. `fine`: the save succeeded.
    pub(super) fn rows_left(&mut self, hot: &Lease<Hot>, span: Span, fine: bool) {
        if let Some(backed) = &mut self.backed {
            backed.rows_saved[hot.page() as usize] += if fine { span.count } else { 0 };
        }
        self.note_rows(hot);
    }

    /// Marks a page as saved if all its rows are saved and it has a name.
    fn note_rows(&mut self, hot: &Lease<Hot>) {
        let Some(backed) = &self.backed else { return };
        let whole = backed.rows_saved[hot.page() as usize] == backed.page_size;
        if whole && let Some(name) = self.hot.name_of(hot) {
            self.hot.set_saved(name, true);
        }
    }

    pub(super) fn lost_unsaved(&mut self, name: BlockHash) {
        if self.backed.is_some() {
            self.host.forget(name);
        }
    }

    /// Records the end of a block's copy into the hot tier.
    pub(super) fn came_back(&mut self, hot: &Lease<Hot>, name: BlockHash) {
        if self.backed.is_none() {
            self.name(hot, name);
        } else if self.host.contains(name) && self.hot.name(hot, name) {
            self.hot.set_saved(name, true);
        }
    }

    pub(super) fn index_is_there(&mut self, page: u32) {
        if let Some(backed) = &mut self.backed {
            backed.unindexed[page as usize] = false;
        }
    }

    /// Forgets the data that is lost with the device: all index keys, and every block that was not
    /// saved.
    pub(super) fn index_is_gone(&mut self) {
        let Some(backed) = &mut self.backed else { return };
        backed.unindexed.fill(true);
        backed.indexing.clear();
        backed.leaving.fill(0);
        let names: Vec<BlockHash> = self.hot.names().collect();
        for name in names.into_iter().filter(|&name| !self.hot.is_saved(name)) {
            self.host.forget(name);
        }
    }

    /// Forgets every block that no request uses. Blocks that only copies use are forgotten too, and
    /// their copies publish nothing.
    pub(super) fn flush_backed(&mut self) {
        let mut copies = vec![0_u32; self.host.size() as usize];
        for page in self.host_leased_by_copies() {
            copies[page as usize] += 1;
        }
        let unused: Vec<BlockHash> = self
            .copies
            .values()
            .filter(|copy| {
                let page = copy.host.own().map(Lease::page);
                page.is_some_and(|page| copies[page as usize] == self.host.leases(page))
            })
            .filter_map(|copy| copy.name.or_else(|| self.hot.name_of(copy.hot.as_ref()?)))
            .collect();
        unused.into_iter().for_each(|name| self.forget(name));
        self.hot.flush();
        self.host.flush();
        let hot = &self.hot;
        self.wanted.retain(|&name| hot.contains(name));
        self.is_wanted = self.wanted.iter().copied().collect();
    }
}
