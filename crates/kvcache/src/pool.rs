//! The pool of one tier: the block of each page, and the leases on it.

use std::collections::HashMap;
use std::marker::PhantomData;

use crate::hash::{BlockHash, BuildNameHasher};
use crate::lru::Lru;

/// The tier of the device's memory. Kernels read and write its pages.
#[derive(Debug, PartialEq, Eq)]
pub enum Hot {}

/// The tier of the host's memory. Copies read and write its pages.
#[derive(Debug, PartialEq, Eq)]
pub enum Host {}

/// The right to use one page of a tier. It cannot be copied, and must be given back to
/// [`PagePool::release`], which takes it by value. Dropping it would leak the page: debug builds
/// assert against that.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a lease that is not released leaks its page"]
pub struct Lease<T = Hot> {
    page: u32,
    tier: PhantomData<T>,
}

impl<T> Lease<T> {
    fn new(page: u32) -> Self {
        Self { page, tier: PhantomData }
    }

    /// The page's number in its tier.
    #[must_use]
    pub fn page(&self) -> u32 {
        self.page
    }

    fn into_page(self) -> u32 {
        let page = self.page;
        std::mem::forget(self);
        page
    }
}

impl<T> Drop for Lease<T> {
    fn drop(&mut self) {
        debug_assert!(std::thread::panicking(), "the lease of page {} was not released", self.page);
    }
}

/// A cached block that was evicted to make room for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Evicted {
    /// The name of the evicted block.
    pub name: BlockHash,
    /// True if another tier holds the block too.
    pub saved: bool,
}

/// The number of pages in each state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Pages without content.
    pub free: u32,
    /// Pages that hold a named block and have no lease.
    pub cached: u32,
    /// Pages with a lease.
    pub held: u32,
}

#[derive(Debug, Clone, Default)]
struct Page {
    leases: u32,
    name: Option<BlockHash>,
    /// True if another tier holds its block too.
    saved: bool,
}

/// All pages of one tier. Every operation is O(1) per page.
#[derive(Debug)]
pub struct PagePool<T = Hot> {
    pages: Vec<Page>,
    named: HashMap<BlockHash, u32, BuildNameHasher>,
    free: Vec<u32>,
    /// Cached pages, in two lists: those whose block no other tier holds, and those whose block
    /// another tier holds too.
    cached: [Lru; 2],
    /// Blocks that were added or lost; `None`: changes are not recorded.
    changed: Option<Vec<BlockHash>>,
    tier: PhantomData<T>,
}

impl<T> PagePool<T> {
    /// Creates a pool of `pages` free pages, numbered from 0.
    #[must_use]
    pub fn new(pages: u32) -> Self {
        Self {
            pages: vec![Page::default(); pages as usize],
            named: HashMap::default(),
            free: (0..pages).rev().collect(),
            cached: [Lru::new(pages), Lru::new(pages)],
            changed: None,
            tier: PhantomData,
        }
    }

    /// Starts recording which blocks the pool gets and loses. The caller has to take the changes.
    pub fn note_changes(&mut self) {
        self.changed.get_or_insert_default();
    }

    /// The blocks that were added or lost since the last call, in order. A block may appear several
    /// times.
    pub fn take_changes(&mut self) -> std::vec::Drain<'_, BlockHash> {
        self.changed.get_or_insert_default().drain(..)
    }

    /// Leases a page without content. A free page is used if there is one. Otherwise it is the
    /// least recently used page whose block another tier holds too, or else the least recently used
    /// page. Its block is then evicted, and is returned with the lease. `None`: every page is held.
    #[must_use]
    pub fn allocate(&mut self) -> Option<(Lease<T>, Option<Evicted>)> {
        let mut evicted = None;
        let page = self.free.pop().or_else(|| {
            let [only, saved] = &mut self.cached;
            let page = saved.pop_oldest().or_else(|| only.pop_oldest())?;
            let saved = std::mem::take(&mut self.pages[page as usize].saved);
            evicted = self.drop_name(page).map(|name| Evicted { name, saved });
            Some(page)
        })?;
        self.pages[page as usize].leases = 1;
        Some((Lease::new(page), evicted))
    }

    /// Leases the page that holds a block. Other owners may lease it too. `None`: no page holds the
    /// block.
    #[must_use]
    pub fn share(&mut self, name: BlockHash) -> Option<Lease<T>> {
        let page = *self.named.get(&name)?;
        let entry = &mut self.pages[page as usize];
        if entry.leases == 0 {
            self.cached[usize::from(entry.saved)].remove(page);
        }
        entry.leases += 1;
        Some(Lease::new(page))
    }

    /// Returns another lease of a leased page.
    pub fn join(&mut self, lease: &Lease<T>) -> Lease<T> {
        self.pages[lease.page as usize].leases += 1;
        Lease::new(lease.page)
    }

    /// True if a page holds this block.
    #[must_use]
    pub fn contains(&self, name: BlockHash) -> bool {
        self.named.contains_key(&name)
    }

    /// Records whether another tier holds a block too. Pages of such blocks are evicted before
    /// other pages. Does nothing if no page of this tier holds the block.
    pub fn set_saved(&mut self, name: BlockHash, saved: bool) {
        let Some(&page) = self.named.get(&name) else { return };
        let entry = &mut self.pages[page as usize];
        if entry.saved != saved {
            entry.saved = saved;
            if entry.leases == 0 {
                self.cached[usize::from(!saved)].remove(page);
                self.cached[usize::from(saved)].push_newest(page);
            }
        }
    }

    /// True if both this tier and another tier hold a block.
    #[must_use]
    pub fn is_saved(&self, name: BlockHash) -> bool {
        self.named.get(&name).is_some_and(|&page| self.pages[page as usize].saved)
    }

    /// The block that a leased page holds.
    #[must_use]
    pub fn name_of(&self, lease: &Lease<T>) -> Option<BlockHash> {
        self.pages[lease.page as usize].name
    }

    /// The number of current leases of the page that holds a block; `None`: no page holds the
    /// block.
    #[must_use]
    pub fn leases_of(&self, name: BlockHash) -> Option<u32> {
        self.named.get(&name).map(|&page| self.pages[page as usize].leases)
    }

    /// True if another tier holds the block of a leased page too.
    #[must_use]
    pub fn is_page_saved(&self, lease: &Lease<T>) -> bool {
        self.pages[lease.page as usize].saved
    }

    /// Makes the pool forget the content of a leased page. The lease stays valid.
    pub fn unname(&mut self, lease: &Lease<T>) {
        if self.drop_name(lease.page).is_some() {
            self.pages[lease.page as usize].saved = false;
        }
    }

    /// Notes that no other tier holds any block any more. O(pages).
    pub fn unsave_all(&mut self) {
        let names: Vec<BlockHash> = self.names().filter(|&name| self.is_saved(name)).collect();
        names.into_iter().for_each(|name| self.set_saved(name, false));
    }

    /// The blocks that pages hold, in the order of the pages.
    pub fn names(&self) -> impl Iterator<Item = BlockHash> {
        self.pages.iter().filter_map(|page| page.name)
    }

    /// Makes an unused block the most recently used one.
    pub fn touch(&mut self, name: BlockHash) {
        if let Some(&page) = self.named.get(&name)
            && let Page { leases: 0, saved, .. } = self.pages[page as usize]
        {
            let list = &mut self.cached[usize::from(saved)];
            list.remove(page);
            list.push_newest(page);
        }
    }

    /// The block that the next allocation evicts, if it evicts one.
    #[must_use]
    pub fn next_evicted(&self) -> Option<BlockHash> {
        let [only, saved] = &self.cached;
        let page = saved.oldest().or_else(|| only.oldest()).filter(|_| self.free.is_empty())?;
        self.pages[page as usize].name
    }

    /// The least recently used block that no other tier holds.
    #[must_use]
    pub fn oldest_unsaved(&self) -> Option<BlockHash> {
        self.pages[self.cached[0].oldest()? as usize].name
    }

    /// Names the block that a full page holds. False, and nothing is done, if the page has a name
    /// already, or another page holds that block. The older page keeps the name, since it may be
    /// shared.
    pub fn name(&mut self, lease: &Lease<T>, name: BlockHash) -> bool {
        let entry = &mut self.pages[lease.page as usize];
        if entry.name.is_some() || self.named.contains_key(&name) {
            return false;
        }
        entry.name = Some(name);
        self.named.insert(name, lease.page);
        self.changed.iter_mut().for_each(|changed| changed.push(name));
        true
    }

    /// Gives one lease of a page back. After its last lease a page stays cached as the most
    /// recently used one, or becomes free if it holds no named block.
    pub fn release(&mut self, lease: Lease<T>) {
        let page = lease.into_page();
        let entry = &mut self.pages[page as usize];
        entry.leases -= 1;
        if entry.leases > 0 {
            return;
        }
        if entry.name.is_some() {
            self.cached[usize::from(entry.saved)].push_newest(page);
        } else {
            self.free.push(page);
        }
    }

    /// Gives back the leases of one request and empties the vector. `leases` are in the order of
    /// their positions. The last page is released first, so it is also evicted first: a block is of
    /// no use without the blocks before it.
    pub fn release_all(&mut self, leases: &mut Vec<Lease<T>>) {
        while let Some(lease) = leases.pop() {
            self.release(lease);
        }
    }

    /// Makes the pool forget the page of a block, because its content cannot be trusted. A lease of
    /// the page stays valid. Returns false if no page holds it.
    pub fn forget(&mut self, name: BlockHash) -> bool {
        let Some(&page) = self.named.get(&name) else {
            return false;
        };
        self.drop_name(page);
        let entry = &mut self.pages[page as usize];
        let saved = std::mem::take(&mut entry.saved);
        if entry.leases == 0 {
            self.cached[usize::from(saved)].remove(page);
            self.free.push(page);
        }
        true
    }

    /// Forgets every block without a lease. O(cached pages).
    pub fn flush(&mut self) {
        for list in 0..self.cached.len() {
            while let Some(page) = self.cached[list].pop_oldest() {
                self.pages[page as usize].saved = false;
                self.drop_name(page);
                self.free.push(page);
            }
        }
    }

    /// The number of pages that [`Self::allocate`] can lease: the free and the cached ones.
    #[must_use]
    pub fn available(&self) -> u32 {
        self.free.len() as u32 + self.unleased()
    }

    /// The number of available pages without content, or with a block that another tier holds too.
    #[must_use]
    pub fn spare(&self) -> u32 {
        self.free.len() as u32 + self.cached[1].len()
    }

    fn unleased(&self) -> u32 {
        self.cached.iter().map(Lru::len).sum()
    }

    /// The number of all pages.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.pages.len() as u32
    }

    /// The number of pages in each state.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let (free, cached) = (self.free.len() as u32, self.unleased());
        Counts { free, cached, held: self.pages.len() as u32 - free - cached }
    }

    /// The number of blocks that have a page, leased or not.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.named.len()
    }

    /// The number of current leases of a page.
    #[must_use]
    pub fn leases(&self, page: u32) -> u32 {
        self.pages[page as usize].leases
    }

    /// Checks that each page is in exactly one state, and that names and pages agree. For idle
    /// moments and tests.
    ///
    /// # Errors
    /// A description of the fault.
    pub fn check_integrity(&self) -> Result<(), String> {
        let mut unleased = vec![0_u8; self.pages.len()];
        for &page in &self.free {
            unleased[page as usize] += 1;
            if self.pages[page as usize].name.is_some() {
                return Err(format!("free page {page} has a name"));
            }
        }
        for (list, saved) in self.cached.iter().zip([false, true]) {
            for page in list.checked_pages()? {
                unleased[page as usize] += 1;
                let entry = &self.pages[page as usize];
                if entry.name.is_none() || entry.saved != saved {
                    return Err(format!("cached page {page} is in the wrong list: {entry:?}"));
                }
            }
        }
        let mut names = 0;
        for (number, (page, &lists)) in self.pages.iter().zip(&unleased).enumerate() {
            if lists != u8::from(page.leases == 0) {
                return Err(format!("page {number}: {} leases, in {lists} lists", page.leases));
            }
            if page.saved && page.name.is_none() {
                return Err(format!("page {number} holds nothing, and that is saved"));
            }
            if let Some(name) = page.name {
                names += 1;
                if self.named.get(&name) != Some(&(number as u32)) {
                    return Err(format!("page {number} is not where its name leads"));
                }
            }
        }
        if names != self.named.len() {
            return Err(format!("{names} pages have a name, {} names a page", self.named.len()));
        }
        Ok(())
    }

    fn drop_name(&mut self, page: u32) -> Option<BlockHash> {
        let name = self.pages[page as usize].name.take()?;
        self.named.remove(&name);
        self.changed.iter_mut().for_each(|changed| changed.push(name));
        Some(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::Namer;

    fn names(count: usize) -> Vec<BlockHash> {
        Namer::open().chain(0, &vec![1; count], 1)
    }

    #[test]
    fn the_tail_of_a_request_is_evicted_before_its_prefix() {
        let names = names(3);
        let mut pool = PagePool::<Hot>::new(4);
        let mut leases: Vec<Lease> = (0..3).map(|_| pool.allocate().unwrap().0).collect();
        for (lease, &name) in leases.iter().zip(&names) {
            assert!(pool.name(lease, name));
        }
        pool.release_all(&mut leases);
        assert_eq!(pool.counts(), Counts { free: 1, cached: 3, held: 0 });
        let mut taken = vec![pool.allocate().unwrap().0, pool.allocate().unwrap().0];
        let kept: Vec<bool> = names.iter().map(|n| pool.named.contains_key(n)).collect();
        assert_eq!(kept, [true, true, false]);
        pool.release_all(&mut taken);
    }

    #[test]
    fn the_older_page_keeps_a_name() {
        let name = names(1)[0];
        let mut pool = PagePool::<Hot>::new(2);
        let (a, b) = (pool.allocate().unwrap().0, pool.allocate().unwrap().0);
        assert!(pool.name(&a, name));
        assert!(!pool.name(&b, name));
        let shared = pool.share(name).unwrap();
        assert_eq!(shared.page(), a.page());
        for lease in [a, b, shared] {
            pool.release(lease);
        }
        assert_eq!(pool.counts(), Counts { free: 1, cached: 1, held: 0 });
    }

    #[test]
    fn a_forgotten_block_is_not_shared_but_its_page_stays_leased() {
        let name = names(1)[0];
        let mut pool = PagePool::<Hot>::new(1);
        let lease = pool.allocate().unwrap().0;
        assert!(pool.name(&lease, name));
        assert!(pool.forget(name));
        assert!(!pool.forget(name));
        assert_eq!(pool.share(name), None);
        assert_eq!(pool.allocate(), None);
        pool.release(lease);
        assert_eq!(pool.counts(), Counts { free: 1, cached: 0, held: 0 });
    }

    #[test]
    fn flush_leaves_what_is_leased() {
        let names = names(2);
        let mut pool = PagePool::<Hot>::new(2);
        let (a, b) = (pool.allocate().unwrap().0, pool.allocate().unwrap().0);
        assert!(pool.name(&a, names[0]) && pool.name(&b, names[1]));
        pool.release(b);
        pool.flush();
        assert_eq!(pool.counts(), Counts { free: 1, cached: 0, held: 1 });
        assert_eq!(pool.blocks(), 1);
        pool.release(a);
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "was not released")]
    fn a_dropped_lease_is_noticed() {
        drop(PagePool::<Hot>::new(1).allocate());
    }
}
