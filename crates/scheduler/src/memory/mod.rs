//! The memory of requests: pages of keys and values, the prefix cache in them, and the tiers.
//!
//! No other module depends on which kind of memory a model has. Without pages, nothing is kept
//! between steps. With pages, a request has pages for all its known tokens from the start. With
//! backed pages, each hot page has a corresponding host page, so a request can run while most of
//! its hot pages are dropped (`sparse`).
//!
//! - `prefix`: the blocks that a request finds at its admission, and new pages after them;
//!   `sparse`: the same for backed pages, and the pages that running requests drop.
//! - `copies`: saves, restores, and their ends; `loans`: host pages that other replicas read.
//! - `states`: recurrent states that are kept beside the blocks; `resident`: the states of a
//!   request.
//! - `window`: pages of sliding-window layers; `window_part`: their pool.
//! - `pages`: the leases of a request; `blocks`: the names of its blocks.

pub(crate) mod blocks;
mod check;
mod copies;
pub(crate) mod loans;
pub(crate) mod pages;
mod prefix;
mod rates;
mod resident;
mod sparse;
mod states;
mod window;
mod window_part;

use forebay_kvcache::{BlockEvent, BlockHash, Namer, Tiers};
use forebay_protocol::{COPY_WORDS, PAGE_WRITE_WORDS, STATE_COPY_WORDS, Span, StepPlan};

use crate::config::{HostTier, PageCounts, SavePolicy, SchedulerConfig, Sparse};
use crate::entry::{Entry, Residence};
use crate::event::{HostStats, SparseStats, StateStats, Stats, WindowStats};
use crate::retirement::Retirement;
use crate::roster::Roster;
use pages::Pages;
use rates::RestoreRates;
use states::StatePages;
use window_part::WindowPages;

pub(crate) use prefix::LeasedPages;

/// Additional plan words of a copy from a borrowed host page.
const SOURCE_WORDS: usize = 1;

/// The kind of data that is kept between steps.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// Nothing: every prompt is computed in one row.
    Nothing,
    /// Pages of keys and values.
    Paged,
    /// Each hot page has a corresponding page of the host tier.
    Backed(Sparse),
}

/// The pages of one replica, and the rules that give them to requests.
#[derive(Debug)]
pub(crate) struct Memory {
    kind: Kind,
    tiers: Tiers,
    pages: u32,
    page_size: u32,
    slots: u32,
    prefix_cache: bool,
    namer: Namer,
    host: Option<HostTier>,
    pub(crate) retired: Retirement<Pages>,
    rates: RestoreRates,
    /// Leading blocks of requests that ended before all their blocks were saved.
    unfinished: Vec<Vec<BlockHash>>,
    host_counters: HostStats,
    sparse_counters: SparseStats,
    /// The kept states, if the model has recurrent layers.
    states: Option<StatePages>,
    /// The page pool of sliding-window layers, if they have a separate one.
    windows: Option<WindowPages>,
}

/// Where room for another page can come from, when every page is leased.
pub(crate) enum Room {
    /// A page was dropped.
    Made,
    /// A page can be dropped once the copies in flight have ended.
    WithCopies,
    /// No request can drop a page.
    None,
}

impl Memory {
    /// # Panics
    /// Panics if the pages do not suffice for one sparse request.
    pub(crate) fn new(config: &SchedulerConfig) -> Self {
        let SchedulerConfig { pages, page_size, prefix_cache, states, windows, .. } = *config;
        debug_assert!(states.is_none() || config.sparse.is_none() && config.tokens_a_row == 1);
        let host = config.host.filter(|_| pages > 0 && prefix_cache);
        debug_assert!(windows.is_none() || host.is_none() && states.is_none() && pages > 0);
        let kind = match config.sparse.filter(|_| host.is_some()) {
            None if pages == 0 => Kind::Nothing,
            None => Kind::Paged,
            Some(sparse) => Kind::Backed(sparse),
        };
        let host = host.map(|host| match kind {
            Kind::Backed(_) => host.for_sparse(),
            Kind::Nothing | Kind::Paged => host,
        });
        let mut memory = Self {
            kind,
            tiers: Tiers::new(0, 0),
            pages,
            page_size,
            slots: config.slots,
            prefix_cache,
            namer: config.namer.clone(),
            host,
            retired: Retirement::default(),
            rates: RestoreRates::default(),
            unfinished: Vec::new(),
            host_counters: HostStats::default(),
            sparse_counters: SparseStats::default(),
            states: states.map(|states| StatePages::new(states, host, page_size)),
            windows: windows.map(|part| WindowPages::new(part, pages, page_size)),
        };
        memory.tiers = memory.empty_tiers();
        if config.block_events {
            memory.tiers.note_events();
        }
        memory
    }

    /// Tiers without blocks.
    fn empty_tiers(&self) -> Tiers {
        let host_pages = self.host.map_or(0, |host| host.pages);
        let Kind::Backed(sparse) = self.kind else { return Tiers::new(self.pages, host_pages) };
        let least = sparse.least_pages();
        assert!(self.pages >= least, "{} pages, but {least} are needed", self.pages);
        Tiers::backed(self.pages, host_pages, self.page_size)
    }

    /// Changes the page counts. All blocks and states are forgotten.
    pub(crate) fn resize(&mut self, counts: PageCounts) {
        // Borrowers have mapped the old memory, where nothing is saved any more.
        self.end_loans();
        self.pages = counts.pages;
        if let Some(host) = &mut self.host {
            host.pages = counts.host_pages;
        }
        self.forget();
        if let Some(states) = &mut self.states {
            let host_pages = if self.host.is_some() { counts.host_state_pages } else { 0 };
            states.begin_again(counts.state_pages, host_pages);
        }
        if let Some(windows) = &mut self.windows {
            windows.resize(counts.window_pages);
        }
    }

    /// Forgets all blocks and states of all tiers. Nothing may be leased.
    pub(crate) fn forget(&mut self) {
        let mut tiers = self.empty_tiers();
        tiers.go_on_from(&self.tiers);
        self.tiers = tiers;
        self.states.iter_mut().for_each(StatePages::forget_all);
        self.windows.iter_mut().for_each(WindowPages::forget_all);
    }

    /// True if a request of `positions` positions has room when it runs alone.
    pub(crate) fn fits(&self, positions: u64) -> bool {
        let pages = match (self.kind, self.host) {
            (Kind::Nothing, _) => return true,
            (Kind::Backed(_), Some(host)) => host.pages,
            (Kind::Backed(_) | Kind::Paged, _) => self.pages,
        };
        positions <= u64::from(pages) * u64::from(self.page_size)
    }

    /// The largest length of a row of a prompt with `total` tokens, with `budget` positions left.
    /// If nothing is kept between steps, a prompt is never split into several rows.
    pub(crate) fn row_limit(&self, total: u32, budget: u32) -> u32 {
        match self.kind {
            Kind::Nothing => total.max(budget),
            Kind::Paged | Kind::Backed(_) => budget,
        }
    }

    /// True if the next position of a resident begins a page that it does not have.
    pub(crate) fn lacks_page(&self, entry: &Entry) -> bool {
        let pages = entry.residence.as_ref().map_or(0, |residence| residence.pages.reach());
        entry.computed >= pages * self.page_size && !matches!(self.kind, Kind::Nothing)
    }

    /// True if a step before this one will free pages of the pool in which the resident lacks one.
    pub(crate) fn awaits_page(&self, entry: &Entry, step: u64) -> bool {
        let pages = entry.residence.as_ref().map_or(0, |residence| residence.pages.len() as u32);
        let of_window = entry.computed < pages * self.page_size;
        self.retired.awaited_before(step).any(|pages| match &pages.window {
            Some(window) if of_window => window.leases().next().is_some(),
            _ => pages.leases().next().is_some(),
        })
    }

    /// True if every row may have several positions. This is false with recurrent layers and with
    /// backed pages: a sparse slot's hot rows may lack room for the positions that several tokens
    /// choose.
    pub(crate) fn takes_drafts(&self) -> bool {
        matches!(self.kind, Kind::Paged) && self.states.is_none()
    }

    /// The number of available pages without content.
    pub(crate) fn free_pages(&self) -> u32 {
        let free = self.tiers.hot().counts().free;
        self.windows.as_ref().map_or(free, |windows| windows.spare().min(free))
    }

    /// Gives a resident a page, from the pool whose pages cover fewer of its positions. Returns
    /// false if every page is leased.
    pub(crate) fn add_page(&mut self, residence: &mut Residence, plan: &mut StepPlan) -> bool {
        if let (Some(windows), Residence { slot, pages, .. }) = (&mut self.windows, &mut *residence)
            && let (whole, Some(run)) = (pages.hot.len(), &mut pages.window)
            && (run.end() as usize) < whole
        {
            return windows.add(*slot, run, plan);
        }
        let (lease, host) = match self.kind {
            Kind::Nothing | Kind::Paged => (self.tiers.allocate(), None),
            Kind::Backed(_) => self.tiers.allocate_backed().unzip(),
        };
        let Some(lease) = lease else { return false };
        let Residence { slot, pages, .. } = residence;
        let index = pages.len() as u32;
        plan.write_page(*slot, index, lease.page());
        pages.hot.push(Some(lease));
        host.iter().for_each(|host| plan.write_host(*slot, index, host.page()));
        pages.host.extend(host);
        true
    }

    /// True if a request may share blocks with others.
    pub(crate) fn caches(&self, entry: &Entry) -> bool {
        // If the model has recurrent layers, but no states are kept, no request can continue after
        // cached blocks.
        let resumes = self.states.as_ref().is_none_or(StatePages::keeps_any);
        self.prefix_cache && self.pages > 0 && resumes && entry.request.spec.embeds.is_none()
    }

    pub(crate) fn namer(&self) -> &Namer {
        &self.namer
    }

    /// Offers a resident's blocks to the prefix cache, as far as their tokens are known and plans
    /// compute their keys and values.
    pub(crate) fn offer_blocks(&mut self, entry: &mut Entry) {
        let page_size = self.page_size;
        let by_rows = matches!(self.kind, Kind::Backed(sparse) if sparse.save_rows);
        let saves = self.host.is_some_and(|host| host.policy == SavePolicy::WriteThrough);
        let ready = entry.certain() / page_size;
        let named = entry.residence.as_ref().map_or(ready, |residence| residence.pages.named);
        if !self.caches(entry) {
            return;
        }
        if named >= ready {
            return self.offer_states(entry);
        }
        entry.name_blocks(ready as usize, page_size as usize, &self.namer);
        let Entry { residence: Some(Residence { pages, .. }), blocks, .. } = entry else { return };
        for block in named as usize..ready as usize {
            let name = blocks.names[block];
            let fresh = match (&pages.hot[block], pages.host.get(block)) {
                (Some(hot), None) => self.tiers.name(hot, name),
                (Some(hot), Some(host)) => self.tiers.name_backed(hot, host, name),
                (None, _) => false,
            };
            if fresh && saves && !by_rows {
                self.tiers.want_saved(name);
            }
            if let (Some(windows), Some(run)) = (&mut self.windows, &pages.window) {
                windows.name(run, block as u32, name);
            }
        }
        pages.named = ready;
        self.offer_states(entry);
    }

    /// Forgets all blocks of a request, also shared ones, because their content can't be trusted.
    pub(crate) fn forget_blocks(&mut self, entry: &Entry) {
        for &name in &entry.blocks.names {
            self.tiers.forget(name);
            self.states.iter_mut().for_each(|states| states.forget(name));
            self.windows.iter_mut().for_each(|windows| windows.forget(name));
        }
    }

    /// Notes that the result of this step has come.
    pub(crate) fn answered(&mut self, step: u64) {
        self.retired.answered(step);
        self.states.iter_mut().for_each(|states| states.retired.answered(step));
    }

    /// Retires pages and states until the result of `last_step` is applied.
    pub(crate) fn retire(&mut self, last_step: u64, mut pages: Pages) {
        self.retire_states(last_step, pages.state.take());
        if let Some(pages) = self.retired.retire(last_step, pages) {
            pages.free(&mut self.tiers, self.windows.as_mut());
        }
    }

    /// Frees the pages that no step in flight names.
    pub(crate) fn free_retired(&mut self) {
        for pages in self.retired.take_returned() {
            pages.free(&mut self.tiers, self.windows.as_mut());
        }
        self.states.iter_mut().for_each(StatePages::free_retired);
    }

    /// Forgets every cached block and kept state that no request uses, in all tiers. Returns true
    /// if the cache is empty now.
    pub(crate) fn flush(&mut self) -> bool {
        let stateless = self.states.as_mut().is_none_or(StatePages::flush);
        let windowless = self.windows.as_mut().is_none_or(WindowPages::flush);
        self.tiers.flush() && stateless && windowless
    }

    /// Forgets the device's memory. With `copies_to_blame`, also the blocks that were being
    /// restored.
    pub(crate) fn hand_died(&mut self, copies_to_blame: bool) {
        self.tiers.hand_died(copies_to_blame);
        self.states.iter_mut().for_each(|states| states.tiers.hand_died(copies_to_blame));
        self.windows.iter_mut().for_each(|windows| _ = windows.flush());
        self.unfinished.clear();
    }

    pub(crate) fn take_events(&mut self, into: &mut Vec<BlockEvent>) {
        self.tiers.take_events(into);
    }

    /// Fills in the statistics of pages and tiers.
    pub(crate) fn count(&self, roster: &Roster, stats: &mut Stats) {
        let pages = self.tiers.hot().counts();
        stats.pages_held = pages.held as usize;
        stats.pages_cached = pages.cached as usize;
        stats.pages_free = pages.free as usize;
        stats.host = HostStats { arriving: roster.arriving.len(), ..self.host_stats() };
        stats.sparse = self.sparse_counters;
        stats.states = self.states.as_ref().map_or_else(StateStats::default, StatePages::stats);
        stats.windows = self.windows.as_ref().map_or_else(WindowStats::default, WindowPages::stats);
        if let Kind::Backed(_) = self.kind {
            let residents = roster.residents.values();
            let residences = residents.filter_map(|&handle| roster[handle].residence.as_ref());
            stats.sparse.requests = residences.filter(|r| r.pages.is_sparse()).count();
        }
    }

    /// The largest number of words in a plan for a new request's pages and copies. Its prompt and
    /// answer have `total` tokens.
    pub(crate) fn words(&self, total: u32, token_budget: u32) -> usize {
        let pages = (total as usize + 1).div_ceil(self.page_size as usize);
        let copies = self.host.map_or(0, |host| host.copies_a_step as usize);
        match self.kind {
            Kind::Nothing => 0,
            Kind::Paged => {
                // One load of the new slot's state, and one save after its row.
                let states = if self.states.is_some() { 2 * STATE_COPY_WORDS } else { 0 };
                // Rows of other requests in the plan also get pages of the window part, and drop as
                // many.
                let step = token_budget.max(self.page_size) / self.page_size + 2 * self.slots;
                let window = if self.windows.is_some() { pages + 2 * step as usize } else { 0 };
                let tables = PAGE_WRITE_WORDS * (pages + window);
                tables + (COPY_WORDS + SOURCE_WORDS) * copies + states
            }
            Kind::Backed(sparse) => {
                // Host pages have a separate page table.
                let tables = PAGE_WRITE_WORDS * (2 * pages + sparse.row_pages as usize);
                if !sparse.save_rows {
                    return tables + COPY_WORDS * copies;
                }
                // Each page that the first row touches needs a separate copy. Every copy needs a
                // span.
                let touched = (token_budget.max(self.page_size) / self.page_size + 2) as usize;
                tables + (copies + touched) * (COPY_WORDS + Span::WORDS)
            }
        }
    }
}
