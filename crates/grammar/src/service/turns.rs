//! The order in which sources are compiled: clients take turns, and the smallest source of a client
//! goes first.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::source::Source;

/// The waiting sources.
#[derive(Default)]
pub(super) struct Turns {
    /// The clients with waiting sources, in the order of their turns.
    order: VecDeque<u64>,
    /// The sources of each client, ordered by size, then by arrival.
    waiting: HashMap<u64, BTreeMap<(usize, u64), Source>>,
    arrivals: u64,
}

impl Turns {
    pub(super) fn push(&mut self, client: u64, source: Source) {
        let own = self.waiting.entry(client).or_default();
        if own.is_empty() {
            self.order.push_back(client);
        }
        own.insert((source.size(), self.arrivals), source);
        self.arrivals += 1;
    }

    /// Removes and returns the next source, and its client.
    pub(super) fn pop(&mut self) -> Option<(u64, Source)> {
        let client = self.order.pop_front()?;
        let own = self.waiting.get_mut(&client)?;
        let (_, source) = own.pop_first()?;
        if own.is_empty() {
            self.waiting.remove(&client);
        } else {
            self.order.push_back(client);
        }
        Some((client, source))
    }

    /// Returns the number of waiting sources of a client.
    pub(super) fn of(&self, client: u64) -> usize {
        self.waiting.get(&client).map_or(0, BTreeMap::len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Form;

    fn source(length: usize) -> Source {
        Form::Regex("a".repeat(length).into()).into()
    }

    #[test]
    fn clients_take_turns_and_small_sources_go_first() {
        let mut turns = Turns::default();
        for (client, length) in [(1, 9), (1, 3), (1, 5), (2, 8), (1, 3), (3, 1), (2, 2)] {
            turns.push(client, source(length));
        }
        assert_eq!((turns.of(1), turns.of(2), turns.of(4)), (4, 2, 0));
        let order = std::iter::from_fn(|| turns.pop());
        let order: Vec<_> = order.map(|(client, source)| (client, source.bytes())).collect();
        assert_eq!(order, [(1, 3), (2, 2), (3, 1), (1, 3), (2, 8), (1, 5), (1, 9)]);
        assert!(turns.waiting.is_empty() && turns.order.is_empty());
    }
}
