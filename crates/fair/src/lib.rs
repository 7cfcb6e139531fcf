//! Fair shares of a resource that all clients use: places in a queue, or bytes.
//!
//! ```
//! use forebay_fair::{Holdings, Shares};
//!
//! let (shares, mut held) = (Shares::of_places(8), Holdings::default());
//! assert!(held.take(1, 8, shares), "alone, a client may have all");
//! assert!(!held.take(1, 1, shares) && held.take(2, 1, shares), "the reserve is for others");
//! ```

use std::collections::HashMap;

/// The rule by which clients share a limited amount: places, or bytes.
///
/// A client that is alone may have all of it. As soon as other clients need some, each client gets
/// at most half. Beyond the limit there is a reserve for clients that hold little. So only the
/// clients that fill the limit are refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shares {
    /// The amount for all clients together.
    pub limit: usize,
    /// The amount beyond the limit for clients that hold little.
    pub reserve: usize,
    /// The largest amount of a client that may use the reserve.
    pub little: usize,
}

impl Shares {
    /// Creates the rule for `limit` places. The reserve is a quarter of `limit`, and is for clients
    /// with at most a sixteenth of `limit`.
    #[must_use]
    pub fn of_places(limit: usize) -> Self {
        Self { limit, reserve: (limit / 4).max(1), little: (limit / 16).max(1) }
    }

    /// The largest amount that a client may hold while other clients hold some.
    #[must_use]
    pub fn half(self) -> usize {
        (self.limit / 2).max(1)
    }

    /// True if a client that holds `own` may have `more`. `all`: the amount that all clients hold;
    /// `alone`: whether no other client needs any.
    #[must_use]
    pub fn admits(self, own: usize, all: usize, more: usize, alone: bool) -> bool {
        let own = own.saturating_add(more);
        let share = if alone { self.limit } else { self.half() };
        let few = !alone && own <= self.little;
        let room = if few { self.limit.saturating_add(self.reserve) } else { self.limit };
        own <= share && all.saturating_add(more) <= room
    }
}

/// The reason why a client gets no more bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The bytes would not fit even if nothing else were held.
    TooLarge {
        /// The requested bytes.
        bytes: usize,
        /// The bytes that a client alone may have.
        limit: usize,
    },
    /// The clients hold too much now.
    Full {
        /// The bytes that all clients hold.
        all: usize,
        /// The bytes that this client holds.
        own: usize,
        /// The requested bytes.
        more: usize,
        /// The bytes that a client alone may have.
        limit: usize,
    },
}

/// The amounts that clients hold, under the rule of [`Shares`].
#[derive(Debug, Default)]
pub struct Holdings {
    all: usize,
    clients: HashMap<u64, usize>,
}

impl Holdings {
    /// The amount that all clients hold.
    #[must_use]
    pub fn all(&self) -> usize {
        self.all
    }

    /// Adds `more` to the amount of `client`, if the rule admits that, and returns whether it did.
    /// A client is alone if no other client holds anything.
    #[must_use]
    pub fn take(&mut self, client: u64, more: usize, shares: Shares) -> bool {
        let own = self.clients.get(&client).copied().unwrap_or(0);
        if !shares.admits(own, self.all, more, own == self.all) {
            return false;
        }
        self.all += more;
        *self.clients.entry(client).or_default() += more;
        true
    }

    /// Releases an amount that `client` holds.
    pub fn give_back(&mut self, client: u64, less: usize) {
        self.all = self.all.saturating_sub(less);
        if let Some(own) = self.clients.get_mut(&client) {
            *own = own.saturating_sub(less);
            if *own == 0 {
                self.clients.remove(&client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// In any order and with any amounts: no client gets more than half while others hold some,
        /// and only clients that hold little get the reserve.
        #[test]
        fn no_order_of_clients_breaks_the_rule(
            moves in prop::collection::vec((0..4_u64, 1..300_usize, any::<bool>()), 1..200),
        ) {
            let shares = Shares { limit: 1000, reserve: 100, little: 20 };
            let mut held = Holdings::default();
            let mut model = [0_usize; 4];
            for (client, amount, gives) in moves {
                let at = client as usize;
                if gives {
                    let less = amount.min(model[at]);
                    held.give_back(client, less);
                    model[at] -= less;
                    continue;
                }
                let (own, all) = (model[at], model.iter().sum::<usize>());
                if held.take(client, amount, shares) {
                    model[at] += amount;
                    let (own, all) = (own + amount, all + amount);
                    prop_assert!(own == all && own <= 1000 || own <= 500);
                    prop_assert!(all <= 1000 || all <= 1100 && own <= 20);
                } else {
                    // A small request of a client that holds little is refused only if nothing is
                    // left.
                    prop_assert!(own + amount > 20 || all + amount > 1000);
                }
                prop_assert_eq!(held.all(), model.iter().sum::<usize>());
            }
        }
    }
}
