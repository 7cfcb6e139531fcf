//! A memory budget in bytes for all requests in flight.
//!
//! Each queue has a bound, but requests differ in size: a thousand texts may be gigabytes. So each
//! request is charged for its memory before the memory is allocated. A request that does not fit is
//! rejected at once.
//!
//! Clients share the budget by the same rule as the queue ([`Shares`]). While less than half of it
//! is used, a charge is two atomic additions. Beyond that, a charge needs a lock.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use forebay_fair::{Refusal, Shares};
use parking_lot::Mutex;
use rustc_hash::FxBuildHasher;
use tokio::time::Instant;

use crate::client::ClientId;

/// The step in bytes by which a charge grows if a response is longer than was charged in advance.
const GROWTH: usize = 256 << 10;

/// The part of the budget that is reserved for clients that hold little is 1 / `RESERVE`.
const RESERVE: usize = 8;
/// A client holds little if its charges are at most the budget divided by `LITTLE`, or
/// `LEAST_LITTLE`, the size of a few chats. The limit is at most a quarter of the reserve.
const LITTLE: usize = 1024;
const LEAST_LITTLE: usize = 256 << 10;
/// How long a client counts as active after a request.
const ASKING: Duration = Duration::from_secs(10);
/// The number of maps over which clients are spread, each with its own lock.
const SHARDS: usize = 16;

/// The budget. Clones share it and are cheap.
#[derive(Debug, Clone)]
pub struct ByteBudget(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    shares: Shares,
    used: AtomicUsize,
    /// The clients with charges.
    accounts: [Mutex<HashMap<ClientId, Weak<Account>, FxBuildHasher>>; SHARDS],
    askers: Mutex<Askers>,
}

/// The last two clients that requested bytes while more than half of the budget was used.
#[derive(Debug, Default)]
struct Askers([Option<(ClientId, Instant)>; 2]);

impl Askers {
    /// Records that a client requests bytes. Returns true if another client has requested bytes
    /// recently.
    fn ask(&mut self, client: ClientId, now: Instant) -> bool {
        let [last, before] = &mut self.0;
        if last.is_some_and(|(asker, _)| asker != client) {
            *before = *last;
        }
        *last = Some((client, now));
        before.is_some_and(|(asker, at)| asker != client && now < at + ASKING)
    }
}

/// The bytes that a client holds.
#[derive(Debug)]
struct Account {
    client: ClientId,
    bytes: AtomicUsize,
    budget: Arc<Inner>,
}

impl Drop for Account {
    fn drop(&mut self) {
        let mut shard = self.budget.shard(self.client).lock();
        // Another account may have replaced this one in the meantime.
        if shard.get(&self.client).is_some_and(|account| account.strong_count() == 0) {
            shard.remove(&self.client);
        }
    }
}

impl Inner {
    fn shard(&self, client: ClientId) -> &Mutex<HashMap<ClientId, Weak<Account>, FxBuildHasher>> {
        // Client ids are hashes, so they spread evenly.
        &self.accounts[(client.0 % SHARDS as u64) as usize]
    }
}

impl ByteBudget {
    /// Creates a budget of `limit` bytes. A part of it is reserved for clients that hold little.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        let reserve = limit / RESERVE;
        let shares = Shares {
            limit: limit - reserve,
            reserve,
            little: (limit / LITTLE).max(LEAST_LITTLE).min(reserve / 4),
        };
        let accounts = std::array::from_fn(|_| Mutex::default());
        let (used, askers) = (AtomicUsize::new(0), Mutex::default());
        Self(Arc::new(Inner { shares, used, accounts, askers }))
    }

    /// Returns the number of bytes that are charged at present.
    #[must_use]
    pub fn used(&self) -> usize {
        self.0.used.load(Ordering::Relaxed)
    }

    /// Creates an empty charge to `client`.
    #[must_use]
    pub fn open(&self, client: ClientId) -> Charge {
        let mut shard = self.0.shard(client).lock();
        let account = shard.get(&client).and_then(Weak::upgrade).unwrap_or_else(|| {
            let budget = Arc::clone(&self.0);
            let account = Arc::new(Account { client, bytes: AtomicUsize::new(0), budget });
            shard.insert(client, Arc::downgrade(&account));
            account
        });
        Charge { account, bytes: AtomicUsize::new(0) }
    }

    /// Creates a charge of `bytes` bytes to `client`.
    ///
    /// # Errors
    /// As [`Charge::set`].
    pub fn charge(&self, client: ClientId, bytes: usize) -> Result<Charge, Refusal> {
        let charge = self.open(client);
        charge.set(bytes)?;
        Ok(charge)
    }
}

/// The charge of a request, until it is dropped.
pub struct Charge {
    account: Arc<Account>,
    bytes: AtomicUsize,
}

impl fmt::Debug for Charge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.bytes())
    }
}

impl Charge {
    /// Returns the client that is charged.
    #[must_use]
    pub fn client(&self) -> ClientId {
        self.account.client
    }

    /// Creates another, empty charge to the same client.
    #[must_use]
    pub fn beside(&self) -> Self {
        Self { account: Arc::clone(&self.account), bytes: AtomicUsize::new(0) }
    }

    /// Returns the bytes of the charge.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Sets the charge to `bytes`.
    ///
    /// # Errors
    /// The budget or the client's share of it is used up, or the charge could never fit. Then the
    /// charge stays unchanged.
    pub fn set(&self, bytes: usize) -> Result<(), Refusal> {
        let before = self.bytes();
        if bytes <= before {
            self.give_back(before - bytes);
        } else {
            self.check(bytes)?;
            self.take(bytes - before)?;
        }
        self.bytes.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Increases the charge by `bytes`.
    ///
    /// # Errors
    /// As [`Charge::set`].
    pub fn add(&self, bytes: usize) -> Result<(), Refusal> {
        self.set(self.bytes.load(Ordering::Relaxed).saturating_add(bytes))
    }

    /// Raises the charge to `bytes`, if it is lower.
    ///
    /// # Errors
    /// As [`Charge::set`].
    pub fn at_least(&self, bytes: usize) -> Result<(), Refusal> {
        if bytes > self.bytes() { self.set(bytes) } else { Ok(()) }
    }

    /// Raises the charge for a response with `bytes` unsent bytes, in steps.
    ///
    /// # Errors
    /// As [`Charge::set`].
    pub fn answer(&self, bytes: usize) -> Result<(), Refusal> {
        if bytes <= self.bytes() {
            return Ok(());
        }
        self.set(bytes.next_multiple_of(GROWTH)).or_else(|_| self.set(bytes))
    }

    /// Lowers the charge to at most `bytes`.
    pub fn shrink(&self, bytes: usize) {
        let more = self.bytes().saturating_sub(bytes);
        self.give_back(more);
        self.bytes.fetch_sub(more, Ordering::Relaxed);
    }

    /// Rejects a size that would not fit even if no other request were in flight.
    ///
    /// # Errors
    /// The size can never fit.
    pub fn check(&self, bytes: usize) -> Result<(), Refusal> {
        let limit = self.account.budget.shares.limit;
        if bytes > limit { Err(Refusal::TooLarge { bytes, limit }) } else { Ok(()) }
    }

    fn take(&self, more: usize) -> Result<(), Refusal> {
        let Account { client, bytes, budget } = &*self.account;
        let all = budget.used.fetch_add(more, Ordering::Relaxed);
        let own = bytes.fetch_add(more, Ordering::Relaxed);
        // At most half of the budget is used, so no client has more than half.
        if all.saturating_add(more) <= budget.shares.half() {
            return Ok(());
        }
        let others = budget.askers.lock().ask(*client, Instant::now());
        let alone = own >= all && !others;
        if budget.shares.admits(own, all, more, alone) {
            return Ok(());
        }
        self.give_back(more);
        let Shares { limit, .. } = budget.shares;
        Err(Refusal::Full { all, own, more, limit })
    }

    fn give_back(&self, less: usize) {
        self.account.budget.used.fetch_sub(less, Ordering::Relaxed);
        self.account.bytes.fetch_sub(less, Ordering::Relaxed);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.give_back(self.bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ClientId = ClientId(1);
    const B: ClientId = ClientId(2);
    const MIB: usize = 1 << 20;

    #[test]
    fn what_is_charged_is_given_back_however_it_ends() {
        let budget = ByteBudget::new(800);
        let (first, second) = (budget.charge(A, 400).unwrap(), budget.charge(A, 300).unwrap());
        assert_eq!(budget.used(), 700);
        let refused = budget.charge(A, 1).unwrap_err();
        assert_eq!(refused, Refusal::Full { all: 700, own: 700, more: 1, limit: 700 });
        first.set(100).unwrap();
        assert_eq!(budget.used(), 400);
        assert!(first.set(401).is_err(), "the charge stays as it was");
        assert_eq!(budget.used(), 400);
        first.shrink(50);
        first.shrink(60);
        assert_eq!(budget.used(), 350);
        drop((first, second));
        assert_eq!(budget.used(), 0);
        let clients: usize = budget.0.accounts.iter().map(|shard| shard.lock().len()).sum();
        assert_eq!(clients, 0, "nothing is remembered of clients without charges");
    }

    #[test]
    fn what_never_fits_is_not_told_to_come_again() {
        let refused = ByteBudget::new(800).charge(A, 701).unwrap_err();
        assert_eq!(refused, Refusal::TooLarge { bytes: 701, limit: 700 });
    }

    /// Makes charges of one MiB each, until one is rejected.
    fn fill(budget: &ByteBudget, client: ClientId) -> Vec<Charge> {
        std::iter::from_fn(|| budget.charge(client, MIB).ok()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn one_client_has_half_while_another_asks() {
        let budget = ByteBudget::new(64 * MIB);
        let mut first = fill(&budget, A);
        assert_eq!(first.len(), 56, "a client alone has all but the reserve");
        assert!(budget.charge(B, MIB).is_err(), "the other client finds no room");
        first.truncate(20);
        first.extend(fill(&budget, A));
        assert_eq!(first.len(), 28, "half, as another client was refused lately");
        let second = fill(&budget, B);
        assert_eq!(second.len(), 28);
        tokio::time::advance(ASKING).await;
        assert!(budget.charge(A, MIB).is_err(), "the other client holds its half");
        drop(second);
        first.extend(fill(&budget, A));
        assert_eq!(first.len(), 56, "no other client asks now");
    }

    #[tokio::test(start_paused = true)]
    async fn small_requests_find_room_whoever_holds_the_rest() {
        let budget = ByteBudget::new(64 * MIB);
        let _most = fill(&budget, A);
        let small = 60 << 10;
        let mut held = Vec::new();
        for client in 2..30 {
            let own: Vec<_> =
                (0..4).map(|_| budget.charge(ClientId(client), small).unwrap()).collect();
            assert!(
                budget.charge(ClientId(client), small).is_err(),
                "the client no longer holds little"
            );
            held.push(own);
        }
        assert!(
            budget.charge(A, small).is_err(),
            "the reserve is not for the client with the rest"
        );
    }

    #[test]
    fn a_longer_answer_than_expected_is_charged_as_it_comes() {
        let budget = ByteBudget::new(64 * MIB);
        let charge = budget.charge(A, 100).unwrap();
        charge.answer(90).unwrap();
        assert_eq!(budget.used(), 100);
        for bytes in (0..20 * MIB).step_by(1000) {
            charge.answer(bytes).unwrap();
            assert!((bytes..=bytes + GROWTH + 100).contains(&budget.used()));
        }
        assert!(charge.answer(64 * MIB).is_err());
    }
}
