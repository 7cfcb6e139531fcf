//! The allocator of the arena's bytes.

use std::collections::BTreeMap;

/// Ranges start at multiples of this many bytes, the size of a cache line.
const ALIGN: usize = 64;

/// A reserved range of the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

/// A first-fit allocator. Free ranges are merged with their neighbours.
#[derive(Debug)]
pub(crate) struct Space {
    /// The length of each free range, by offset.
    free: BTreeMap<usize, usize>,
}

impl Space {
    pub(crate) fn new(bytes: usize) -> Self {
        Self { free: (bytes > 0).then_some((0, bytes)).into_iter().collect() }
    }

    /// The number of free bytes.
    pub(crate) fn free(&self) -> usize {
        self.free.values().sum()
    }

    /// Reserves a range of at least `bytes` bytes; `None`: no free range is large enough.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<Range> {
        let rounded = bytes.max(1).checked_next_multiple_of(ALIGN)?;
        let (offset, length) = self.find(rounded).or_else(|| self.find(bytes.max(1)))?;
        // The arena's size need not be a multiple of the alignment, so its last range may be
        // shorter than the rounded size.
        let bytes = rounded.min(length);
        self.free.remove(&offset);
        if length > bytes {
            self.free.insert(offset + bytes, length - bytes);
        }
        Some(Range { offset, bytes })
    }

    fn find(&self, bytes: usize) -> Option<(usize, usize)> {
        let mut free = self.free.iter().map(|(&offset, &length)| (offset, length));
        free.find(|&(_, length)| length >= bytes)
    }

    pub(crate) fn give(&mut self, range: Range) {
        let Range { mut offset, mut bytes } = range;
        if let Some((&before, &length)) = self.free.range(..offset).next_back() {
            debug_assert!(before + length <= offset, "a range was given back twice");
            if before + length == offset {
                self.free.remove(&before);
                offset = before;
                bytes += length;
            }
        }
        if let Some(length) = self.free.remove(&(offset + bytes)) {
            bytes += length;
        }
        self.free.insert(offset, bytes);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ranges_never_overlap_and_everything_comes_back(
            total in 1_usize..70_000,
            steps in proptest::collection::vec((any::<bool>(), 1_usize..5000, any::<usize>()), 1..200)
        ) {
            let mut space = Space::new(total);
            let mut held: Vec<Range> = Vec::new();
            for (take, bytes, pick) in steps {
                if take {
                    if let Some(new) = space.take(bytes) {
                        prop_assert!(new.bytes >= bytes && new.offset + new.bytes <= total);
                        prop_assert_eq!(new.offset % ALIGN, 0);
                        for old in &held {
                            let apart = new.offset + new.bytes <= old.offset
                                || old.offset + old.bytes <= new.offset;
                            prop_assert!(apart, "{new:?} overlaps {old:?}");
                        }
                        held.push(new);
                    }
                } else if !held.is_empty() {
                    let range = held.swap_remove(pick % held.len());
                    space.give(range);
                }
            }
            for range in held {
                space.give(range);
            }
            prop_assert_eq!(&space.free, &BTreeMap::from([(0, total)]));
            prop_assert!(space.take(total).is_some(), "the whole space can be taken at once");
        }
    }
}
