//! The queue of clients whose requests wait for a load.

use std::collections::{BTreeMap, HashMap};

/// The clients with waiting requests, in the order in which loads are started for them.
///
/// A client joins the end of the queue when its first request starts to wait, and moves to the end
/// when a load has been started for it. So while a client waits, at most one load starts for each
/// other client, however many models the others request.
#[derive(Debug, Default)]
pub(crate) struct Line {
    /// The clients, by their position in the queue.
    places: BTreeMap<u64, u64>,
    /// For each client: its position in the queue, and the number of its waiting requests.
    clients: HashMap<u64, (u64, usize)>,
    next: u64,
}

impl Line {
    /// The clients, first to last.
    pub(crate) fn clients(&self) -> impl Iterator<Item = u64> + '_ {
        self.places.values().copied()
    }

    /// Adds a waiting request of a client.
    pub(crate) fn enter(&mut self, client: u64) {
        if let Some((_, waiting)) = self.clients.get_mut(&client) {
            *waiting += 1;
        } else {
            let place = self.take_place(client);
            self.clients.insert(client, (place, 1));
        }
    }

    /// Removes a waiting request of a client.
    pub(crate) fn leave(&mut self, client: u64) {
        let Some((place, waiting)) = self.clients.get_mut(&client) else { return };
        *waiting -= 1;
        if *waiting == 0 {
            self.places.remove(place);
            self.clients.remove(&client);
        }
    }

    /// Moves a client to the end of the queue, because a load was started for it.
    pub(crate) fn serve(&mut self, client: u64) {
        let last = self.take_place(client);
        if let Some((place, _)) = self.clients.get_mut(&client) {
            self.places.remove(&std::mem::replace(place, last));
        }
    }

    fn take_place(&mut self, client: u64) -> u64 {
        let place = self.next;
        self.next += 1;
        self.places.insert(place, client);
        place
    }
}
