//! Requests by index, with generations. A step in flight stores the index and generation of each
//! row's request. So a lookup detects in O(1), without hashing, that a request was removed.

use std::ops::{Index, IndexMut};

/// A reference to an entry. After the entry is removed, the reference is invalid for ever, even if
/// another entry gets the same index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Handle {
    index: u32,
    generation: u32,
}

#[derive(Debug)]
struct Place<T> {
    generation: u32,
    entry: Option<T>,
}

#[derive(Debug)]
pub(crate) struct Slab<T> {
    places: Vec<Place<T>>,
    vacant: Vec<u32>,
}

impl<T> Slab<T> {
    pub(crate) fn new() -> Self {
        Self { places: Vec::new(), vacant: Vec::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len() - self.vacant.len()
    }

    pub(crate) fn insert(&mut self, entry: T) -> Handle {
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.places.push(Place { generation: 0, entry: None });
            self.places.len() as u32 - 1
        });
        let place = &mut self.places[index as usize];
        place.entry = Some(entry);
        Handle { index, generation: place.generation }
    }

    pub(crate) fn remove(&mut self, handle: Handle) -> Option<T> {
        let place = &mut self.places[handle.index as usize];
        if place.generation != handle.generation {
            return None;
        }
        let entry = place.entry.take()?;
        place.generation = place.generation.wrapping_add(1);
        self.vacant.push(handle.index);
        Some(entry)
    }

    pub(crate) fn get(&self, handle: Handle) -> Option<&T> {
        let place = &self.places[handle.index as usize];
        if place.generation == handle.generation { place.entry.as_ref() } else { None }
    }

    pub(crate) fn get_mut(&mut self, handle: Handle) -> Option<&mut T> {
        let place = &mut self.places[handle.index as usize];
        if place.generation == handle.generation { place.entry.as_mut() } else { None }
    }

    /// Entries in index order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Handle, &T)> {
        self.places.iter().enumerate().filter_map(|(index, place)| {
            let handle = Handle { index: index as u32, generation: place.generation };
            place.entry.as_ref().map(|entry| (handle, entry))
        })
    }

    /// Entries in index order.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (Handle, &mut T)> {
        self.places.iter_mut().enumerate().filter_map(|(index, place)| {
            let handle = Handle { index: index as u32, generation: place.generation };
            place.entry.as_mut().map(|entry| (handle, entry))
        })
    }
}

#[expect(clippy::expect_used, reason = "indexing is for handles that the caller knows to be alive")]
impl<T> Index<Handle> for Slab<T> {
    type Output = T;

    fn index(&self, handle: Handle) -> &T {
        self.get(handle).expect("every queue and list holds handles of live requests only")
    }
}

#[expect(clippy::expect_used, reason = "indexing is for handles that the caller knows to be alive")]
impl<T> IndexMut<Handle> for Slab<T> {
    fn index_mut(&mut self, handle: Handle) -> &mut T {
        self.get_mut(handle).expect("every queue and list holds handles of live requests only")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_never_finds_the_next_tenant() {
        let mut slab = Slab::new();
        let a = slab.insert('a');
        assert_eq!(slab.remove(a), Some('a'));
        let b = slab.insert('b');
        assert_eq!(a.index, b.index);
        assert_eq!(slab.get(a), None);
        assert_eq!(slab.get_mut(a), None);
        assert_eq!(slab.remove(a), None);
        assert_eq!((slab[b], slab.len()), ('b', 1));
    }
}
