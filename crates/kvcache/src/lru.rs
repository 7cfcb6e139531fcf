//! A doubly linked list threaded through an array: O(1) push, pop and removal from the middle, no
//! allocation.

/// The value in place of a page number where there is no page.
const NIL: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Links {
    previous: u32,
    next: u32,
}

/// Pages from the least to the most recently used. A page is in the list at most once.
#[derive(Debug)]
pub(crate) struct Lru {
    links: Vec<Links>,
    oldest: u32,
    newest: u32,
    len: u32,
}

impl Lru {
    /// Creates an empty list, for pages with numbers below `pages`.
    pub(crate) fn new(pages: u32) -> Self {
        let links = vec![Links { previous: NIL, next: NIL }; pages as usize];
        Self { links, oldest: NIL, newest: NIL, len: 0 }
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// The least recently used page.
    pub(crate) fn oldest(&self) -> Option<u32> {
        (self.oldest != NIL).then_some(self.oldest)
    }

    /// Adds a page that is not in the list, as the most recently used one.
    pub(crate) fn push_newest(&mut self, page: u32) {
        self.links[page as usize] = Links { previous: self.newest, next: NIL };
        match self.newest {
            NIL => self.oldest = page,
            newest => self.links[newest as usize].next = page,
        }
        self.newest = page;
        self.len += 1;
    }

    /// Removes a page that is in the list.
    pub(crate) fn remove(&mut self, page: u32) {
        let Links { previous, next } = self.links[page as usize];
        match previous {
            NIL => self.oldest = next,
            previous => self.links[previous as usize].next = next,
        }
        match next {
            NIL => self.newest = previous,
            next => self.links[next as usize].previous = previous,
        }
        self.len -= 1;
    }

    /// Removes and returns the least recently used page.
    pub(crate) fn pop_oldest(&mut self) -> Option<u32> {
        if self.oldest == NIL {
            return None;
        }
        let page = self.oldest;
        self.remove(page);
        Some(page)
    }

    /// The pages from the least recently used on. Checks both directions against each other and
    /// against the length.
    pub(crate) fn checked_pages(&self) -> Result<Vec<u32>, String> {
        let (mut pages, mut previous, mut at) = (Vec::new(), NIL, self.oldest);
        while at != NIL {
            if pages.len() == self.len as usize {
                return Err(format!("the LRU list is longer than its length {}", self.len));
            }
            if self.links[at as usize].previous != previous {
                return Err(format!("page {at} has a wrong neighbour in the LRU list"));
            }
            pages.push(at);
            (previous, at) = (at, self.links[at as usize].next);
        }
        if previous != self.newest || pages.len() != self.len as usize {
            return Err("the LRU list ends in the wrong place".into());
        }
        Ok(pages)
    }
}
