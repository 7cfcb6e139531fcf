//! The layout of a host tier's memory, as hands use it (docs/protocol.md): all pages, then a note
//! for each page. State pages and their notes follow, then the number of state pages.

use std::io;
use std::sync::Arc;

use forebay_engine::{Facts, PAGE_NOTE_BYTES, STATE_COUNT_BYTES, STATE_NOTE_BYTES, TierMemory};

/// The kind of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageKind {
    /// Keys and values of a block.
    Block,
    /// The recurrent state after a block.
    State,
}

/// The bytes of a page of keys and values, and of a state; 0: the model has no states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageSizes {
    pub(crate) page: u64,
    pub(crate) state: u64,
}

impl PageSizes {
    pub(crate) fn new(facts: &Facts) -> Self {
        Self { page: facts.hand.page_bytes, state: facts.hand.state_bytes }
    }

    /// Returns the bytes of a page, and of its note.
    fn parts(self, kind: PageKind) -> [u64; 2] {
        match kind {
            PageKind::Block => [self.page, PAGE_NOTE_BYTES],
            PageKind::State => [self.state, STATE_NOTE_BYTES],
        }
    }

    /// Returns the bytes of a page together with its note.
    pub(crate) fn record(self, kind: PageKind) -> u64 {
        self.parts(kind).iter().sum()
    }
}

/// The pages of a host tier.
#[derive(Debug, Clone)]
pub(crate) struct TierPages {
    memory: Arc<dyn TierMemory>,
    sizes: PageSizes,
    pages: u64,
    states: u64,
}

impl TierPages {
    /// Opens the pages in memory that a hand has already created.
    ///
    /// # Errors
    /// The memory has no pages of these sizes.
    pub(crate) fn open(memory: Arc<dyn TierMemory>, sizes: PageSizes) -> io::Result<Self> {
        let bytes = memory.bytes()?;
        let strange = || io::Error::other(format!("{bytes} bytes are no pages of {sizes:?}"));
        let (mut rest, mut states) = (bytes, 0);
        if sizes.state > 0 {
            let end = bytes.checked_sub(STATE_COUNT_BYTES).ok_or_else(strange)?;
            let mut count = [0; STATE_COUNT_BYTES as usize];
            memory.read(end, &mut count)?;
            states = u64::from_ne_bytes(count);
            let taken = states.checked_mul(sizes.record(PageKind::State));
            rest = taken.and_then(|taken| end.checked_sub(taken)).ok_or_else(strange)?;
        }
        let record = sizes.record(PageKind::Block);
        if sizes.page == 0 || rest == 0 || !rest.is_multiple_of(record) {
            return Err(strange());
        }
        Ok(Self { memory, sizes, pages: rest / record, states })
    }

    /// Creates `pages` pages and `states` state pages in empty memory.
    ///
    /// # Errors
    /// The system can't provide the memory.
    pub(crate) fn create(
        memory: Arc<dyn TierMemory>,
        sizes: PageSizes,
        [pages, states]: [u32; 2],
    ) -> io::Result<Self> {
        let states = if sizes.state > 0 { u64::from(states) } else { 0 };
        let mut bytes = u64::from(pages) * sizes.record(PageKind::Block);
        if sizes.state > 0 {
            bytes += states * sizes.record(PageKind::State);
            memory.grow(bytes + STATE_COUNT_BYTES)?;
            memory.write(bytes, &states.to_ne_bytes())?;
        }
        memory.grow(bytes)?;
        Ok(Self { memory, sizes, pages: pages.into(), states })
    }

    /// Returns the bytes of a page and of a state.
    pub(crate) fn sizes(&self) -> PageSizes {
        self.sizes
    }

    /// Reads a page followed by its note, from byte `at` on.
    ///
    /// # Errors
    /// There is no such page.
    pub(crate) fn read(
        &self,
        (kind, page): (PageKind, u32),
        at: u64,
        into: &mut [u8],
    ) -> io::Result<()> {
        let [content, note, split] = self.places(kind, page)?;
        let (first, second) = into.split_at_mut(before(at, split, into.len()));
        if !first.is_empty() {
            self.memory.read(content + at, first)?;
        }
        if !second.is_empty() {
            self.memory.read(note + at + first.len() as u64 - split, second)?;
        }
        Ok(())
    }

    /// Writes to a page followed by its note, from byte `at` on. Nobody may read the page yet.
    ///
    /// # Errors
    /// There is no such page, or the system has no memory for it.
    pub(crate) fn write(
        &self,
        (kind, page): (PageKind, u32),
        at: u64,
        bytes: &[u8],
    ) -> io::Result<()> {
        let [content, note, split] = self.places(kind, page)?;
        let (first, second) = bytes.split_at(before(at, split, bytes.len()));
        if !first.is_empty() {
            self.memory.write(content + at, first)?;
        }
        if !second.is_empty() {
            self.memory.write(note + at + first.len() as u64 - split, second)?;
        }
        Ok(())
    }

    /// Returns the offsets of a page and of its note, and the bytes of the page.
    fn places(&self, kind: PageKind, page: u32) -> io::Result<[u64; 3]> {
        let of_blocks = self.pages * self.sizes.record(PageKind::Block);
        let (first, count) = match kind {
            PageKind::Block => (0, self.pages),
            PageKind::State => (of_blocks, self.states),
        };
        let page = u64::from(page);
        if page >= count {
            return Err(io::Error::other(format!("{kind:?} page {page} of {count}")));
        }
        let [bytes, note] = self.sizes.parts(kind);
        Ok([first + page * bytes, first + count * bytes + page * note, bytes])
    }
}

/// Returns how many of `length` bytes from `at` on come before `split`.
fn before(at: u64, split: u64, length: usize) -> usize {
    usize::try_from(split.saturating_sub(at)).unwrap_or(usize::MAX).min(length)
}

#[cfg(test)]
pub(crate) mod tests {
    use parking_lot::Mutex;

    use super::*;

    /// A tier in the memory of this process.
    #[derive(Debug, Default)]
    pub(crate) struct Heap(Mutex<Vec<u8>>);

    impl TierMemory for Heap {
        fn bytes(&self) -> io::Result<u64> {
            Ok(self.0.lock().len() as u64)
        }
        fn grow(&self, bytes: u64) -> io::Result<()> {
            let mut memory = self.0.lock();
            let bytes = memory.len().max(bytes as usize);
            memory.resize(bytes, 0);
            Ok(())
        }
        fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
            let memory = self.0.lock();
            let from = memory.get(at as usize..at as usize + into.len());
            into.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
            Ok(())
        }
        fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
            let mut memory = self.0.lock();
            let to = memory.get_mut(at as usize..at as usize + bytes.len());
            to.ok_or(io::ErrorKind::WriteZero)?.copy_from_slice(bytes);
            Ok(())
        }
    }

    #[test]
    fn pages_and_states_are_where_hands_have_them() {
        let sizes = PageSizes { page: 5, state: 7 };
        let memory: Arc<dyn TierMemory> = Arc::new(Heap::default());
        assert!(TierPages::open(Arc::clone(&memory), sizes).is_err(), "no worker has started");
        let pages = TierPages::create(Arc::clone(&memory), sizes, [3, 2]).expect("memory");
        pages.write((PageKind::Block, 2), 0, &[1, 2, 3]).expect("there");
        pages.write((PageKind::Block, 2), 3, &[4, 5, 6, 7, 8, 9]).expect("there");
        pages.write((PageKind::State, 1), 0, &[10; 15]).expect("there");
        let mut all = vec![0; memory.bytes().expect("a size") as usize];
        memory.read(0, &mut all).expect("all");
        assert_eq!(all.len(), 3 * 9 + 2 * 15 + 8);
        assert_eq!(all[10..15], [1, 2, 3, 4, 5]);
        assert_eq!(all[15 + 8..27], [6, 7, 8, 9], "the note is behind all pages");
        assert_eq!((&all[27 + 7..27 + 14], &all[27 + 14 + 8..57]), (&[10; 7][..], &[10; 8][..]));
        assert_eq!(all[57..], 2_u64.to_ne_bytes());
        let again = TierPages::open(memory, sizes).expect("pages");
        let mut record = [0; 9];
        again.read((PageKind::Block, 2), 0, &mut record).expect("there");
        assert_eq!(record, [1, 2, 3, 4, 5, 6, 7, 8, 9]);
        again.read((PageKind::Block, 2), 6, &mut record[..3]).expect("there");
        assert_eq!(record[..3], [7, 8, 9]);
        for wrong in [(PageKind::Block, 3), (PageKind::State, 2)] {
            assert!(again.read(wrong, 0, &mut record).is_err());
            assert!(again.write(wrong, 0, &record).is_err());
        }
    }
}
