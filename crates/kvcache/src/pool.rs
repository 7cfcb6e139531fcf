//! The pool: which page holds which block, and who uses it.

use std::collections::HashMap;

use crate::event::{BlockEvent, Journal};
use crate::hash::{BlockHash, BuildNameHasher};
use crate::lru::Lru;

/// The right to use one page, and the duty to give it back: it cannot be copied, and [`PagePool::release`] takes it by value. Dropping it
/// instead would leak the page, which debug builds assert against.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a lease that is not released leaks its page"]
pub struct Lease(u32);

impl Lease {
    /// The page's number on the device.
    #[must_use]
    pub fn page(&self) -> u32 {
        self.0
    }

    fn into_page(self) -> u32 {
        let page = self.0;
        std::mem::forget(self);
        page
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        debug_assert!(std::thread::panicking(), "the lease of page {} was not released", self.0);
    }
}

/// How many pages are in which state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Pages that hold nothing.
    pub free: u32,
    /// Pages that hold a named block and are leased to nobody.
    pub cached: u32,
    /// Leased pages.
    pub held: u32,
}

#[derive(Debug, Clone, Default)]
struct Page {
    leases: u32,
    name: Option<BlockHash>,
}

/// All pages of a replica's device memory. Every operation is O(1) a page.
#[derive(Debug)]
pub struct PagePool {
    pages: Vec<Page>,
    named: HashMap<BlockHash, u32, BuildNameHasher>,
    free: Vec<u32>,
    cached: Lru,
    journal: Journal,
}

impl PagePool {
    /// A pool of `pages` free pages, numbered from 0.
    #[must_use]
    pub fn new(pages: u32) -> Self {
        Self {
            pages: vec![Page::default(); pages as usize],
            named: HashMap::default(),
            free: (0..pages).rev().collect(),
            cached: Lru::new(pages),
            journal: Journal::default(),
        }
    }

    /// Has the pool note from now on which blocks it gets and loses. Whoever asks must take them.
    pub fn note_events(&mut self) {
        self.journal.begin();
    }

    /// Appends what was noted since the last time.
    pub fn take_events(&mut self, into: &mut Vec<BlockEvent>) {
        self.journal.take(into);
    }

    /// Leases a page whose content is nobody's: a free one, else the one whose block was unused the longest, which is forgotten.
    /// `None`: every page is held.
    #[must_use]
    pub fn allocate(&mut self) -> Option<Lease> {
        let page = self.free.pop().or_else(|| {
            let page = self.cached.pop_oldest()?;
            self.drop_name(page);
            Some(page)
        })?;
        self.pages[page as usize].leases = 1;
        Some(Lease(page))
    }

    /// Leases the page that holds a block, beside everybody who has it leased already. `None`: no page holds it.
    #[must_use]
    pub fn share(&mut self, name: BlockHash) -> Option<Lease> {
        let page = *self.named.get(&name)?;
        let entry = &mut self.pages[page as usize];
        if entry.leases == 0 {
            self.cached.remove(page);
        }
        entry.leases += 1;
        Some(Lease(page))
    }

    /// Says what a page holds, once it is full. False, and nothing is done, where another page holds that block already (the older
    /// one stays, it is the one that others share) or the page has a name already.
    pub fn name(&mut self, lease: &Lease, name: BlockHash) -> bool {
        let entry = &mut self.pages[lease.0 as usize];
        if entry.name.is_some() || self.named.contains_key(&name) {
            return false;
        }
        entry.name = Some(name);
        self.named.insert(name, lease.0);
        self.journal.note(BlockEvent::Stored(name));
        true
    }

    /// Gives a lease back. With its last lease a page becomes the latest used of the cached ones, or free if it holds no named block.
    pub fn release(&mut self, lease: Lease) {
        let page = lease.into_page();
        let entry = &mut self.pages[page as usize];
        entry.leases -= 1;
        if entry.leases > 0 {
            return;
        }
        if entry.name.is_some() {
            self.cached.push_newest(page);
        } else {
            self.free.push(page);
        }
    }

    /// Gives back the leases of one request, in the order of their positions, and empties the vector. The deepest goes first, so that
    /// it is also evicted first: a block is of no use without everything before it.
    pub fn release_all(&mut self, leases: &mut Vec<Lease>) {
        while let Some(lease) = leases.pop() {
            self.release(lease);
        }
    }

    /// Makes the pool forget which page holds a block, because its content cannot be trusted. Who leases the page keeps it. False: no
    /// page holds it.
    pub fn forget(&mut self, name: BlockHash) -> bool {
        let Some(&page) = self.named.get(&name) else {
            return false;
        };
        self.drop_name(page);
        if self.pages[page as usize].leases == 0 {
            self.cached.remove(page);
            self.free.push(page);
        }
        true
    }

    /// Forgets every block that nobody leases. O(cached pages).
    pub fn flush(&mut self) {
        while let Some(page) = self.cached.pop_oldest() {
            self.drop_name(page);
            self.free.push(page);
        }
        if self.named.is_empty() {
            self.journal.cleared();
        }
    }

    /// How many pages [`Self::allocate`] can give: the free and the cached ones.
    #[must_use]
    pub fn available(&self) -> u32 {
        self.free.len() as u32 + self.cached.len()
    }

    /// How many pages are in which state.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let (free, cached) = (self.free.len() as u32, self.cached.len());
        Counts { free, cached, held: self.pages.len() as u32 - free - cached }
    }

    /// How many blocks have a page, leased or not.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.named.len()
    }

    /// How many leases of a page are out.
    #[must_use]
    pub fn leases(&self, page: u32) -> u32 {
        self.pages[page as usize].leases
    }

    /// Walks over everything: each page in exactly one state, names and pages in agreement. For idle moments and tests.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check_integrity(&self) -> Result<(), String> {
        let mut unleased = vec![0_u8; self.pages.len()];
        for &page in &self.free {
            unleased[page as usize] += 1;
            if self.pages[page as usize].name.is_some() {
                return Err(format!("free page {page} has a name"));
            }
        }
        for page in self.cached.checked_pages()? {
            unleased[page as usize] += 1;
            if self.pages[page as usize].name.is_none() {
                return Err(format!("cached page {page} has no name"));
            }
        }
        let mut names = 0;
        for (number, (page, &lists)) in self.pages.iter().zip(&unleased).enumerate() {
            if lists != u8::from(page.leases == 0) {
                return Err(format!("page {number}: {} leases, in {lists} lists", page.leases));
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

    fn drop_name(&mut self, page: u32) {
        if let Some(name) = self.pages[page as usize].name.take() {
            self.named.remove(&name);
            self.journal.note(BlockEvent::Dropped(name));
        }
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
        let mut pool = PagePool::new(4);
        let mut leases: Vec<Lease> = (0..3).map(|_| pool.allocate().unwrap()).collect();
        for (lease, &name) in leases.iter().zip(&names) {
            assert!(pool.name(lease, name));
        }
        pool.release_all(&mut leases);
        assert_eq!(pool.counts(), Counts { free: 1, cached: 3, held: 0 });
        let mut taken = vec![pool.allocate().unwrap(), pool.allocate().unwrap()];
        let kept: Vec<bool> = names.iter().map(|n| pool.named.contains_key(n)).collect();
        assert_eq!(kept, [true, true, false]);
        pool.release_all(&mut taken);
    }

    #[test]
    fn the_older_page_keeps_a_name() {
        let name = names(1)[0];
        let mut pool = PagePool::new(2);
        let (a, b) = (pool.allocate().unwrap(), pool.allocate().unwrap());
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
        let mut pool = PagePool::new(1);
        let lease = pool.allocate().unwrap();
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
        let mut pool = PagePool::new(2);
        let (a, b) = (pool.allocate().unwrap(), pool.allocate().unwrap());
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
        drop(PagePool::new(1).allocate());
    }
}
