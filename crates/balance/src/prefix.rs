//! The blocks that each target holds.

use std::collections::HashMap;
use std::hash::Hash;

use rustc_hash::FxBuildHasher;

/// The state of a block at a target. An entry exists only while `stored` is true or `expected` is
/// not 0.
#[derive(Debug, Clone, Copy)]
struct Place {
    target: usize,
    stored: bool,
    /// The number of dispatched requests that will compute the block.
    expected: u32,
}

/// The blocks of each target. They are known from the target's events, and from the requests that
/// were sent to it. `N` is the name of a block, which identifies everything up to its end.
#[derive(Debug, Clone)]
pub struct PrefixIndex<N> {
    targets: usize,
    places: HashMap<N, Vec<Place>, FxBuildHasher>,
}

impl<N: Copy + Eq + Hash> PrefixIndex<N> {
    /// Creates an index of `targets` targets without blocks.
    #[must_use]
    pub fn new(targets: usize) -> Self {
        Self { targets, places: HashMap::default() }
    }

    /// Records that a target holds a block.
    pub fn stored(&mut self, target: usize, name: N) {
        self.change(target, name, |place| place.stored = true);
    }

    /// Records that a target no longer holds a block.
    pub fn dropped(&mut self, target: usize, name: N) {
        self.change(target, name, |place| place.stored = false);
    }

    /// Records that a target holds no blocks. O(blocks of all targets).
    pub fn cleared(&mut self, target: usize) {
        self.places.retain(|_, places| {
            for place in places.iter_mut().filter(|place| place.target == target) {
                place.stored = false;
            }
            places.retain(|place| place.stored || place.expected > 0);
            !places.is_empty()
        });
    }

    /// Records that a request with these blocks was sent to a target.
    pub fn expect(&mut self, target: usize, names: &[N]) {
        for &name in names {
            self.change(target, name, |place| place.expected += 1);
        }
    }

    /// Records that the expected blocks of a request are settled: the target has reported them, or
    /// it will never compute them.
    pub fn settled(&mut self, target: usize, names: &[N]) {
        for &name in names {
            self.change(target, name, |place| place.expected = place.expected.saturating_sub(1));
        }
    }

    /// For each target: how many of the first blocks of `names` it holds or will hold.
    #[must_use]
    pub fn lookup(&self, names: &[N]) -> Vec<u64> {
        let mut blocks = vec![0; self.targets];
        let places = |name: &N| self.places.get(name).map_or(&[][..], Vec::as_slice);
        let first = names.first().map_or(&[][..], places);
        let mut left: Vec<usize> = first.iter().map(|place| place.target).collect();
        for (depth, name) in (1..).zip(names) {
            let places = places(name);
            left.retain(|&target| places.iter().any(|place| place.target == target));
            if left.is_empty() {
                break;
            }
            left.iter().for_each(|&target| blocks[target] = depth);
        }
        blocks
    }

    /// The number of names that some target holds or will hold.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// True if the index has no names.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    fn change(&mut self, target: usize, name: N, change: impl FnOnce(&mut Place)) {
        let places = self.places.entry(name).or_default();
        let at = places.iter().position(|place| place.target == target).unwrap_or_else(|| {
            places.push(Place { target, stored: false, expected: 0 });
            places.len() - 1
        });
        change(&mut places[at]);
        if !places[at].stored && places[at].expected == 0 {
            places.swap_remove(at);
        }
        if places.is_empty() {
            self.places.remove(&name);
        }
    }
}
