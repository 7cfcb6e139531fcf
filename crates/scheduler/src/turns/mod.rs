//! Turns: which request is admitted next, and which one is preempted.
//!
//! - `queue`: the order of waiting requests, by rank and by client (`fair`).
//! - `shares`: the running requests of each client.
//! - `claims`: the order in which prompts pass other prompts in a step.
//! - `pace`: the number of prompt tokens that a step may have while streams run.
//! - `background`: the time that background work may add to foreground steps.

pub(crate) mod background;
pub(crate) mod claims;
pub(crate) mod fair;
mod pace;
mod queue;
mod shares;

use std::collections::{BTreeMap, HashMap};

use crate::config::{Policy, SchedulerConfig};
use crate::entry::Entry;
use crate::mean::Mean;
use crate::memory::Memory;
use crate::request::{BACKGROUND_RANK, Key, Request, Ticket};
use crate::roster::Roster;
use crate::slab::Handle;
use background::Background;
use claims::Claims;
use pace::Pace;
use queue::{PROBE_RANK, Queue};
use shares::Shares;

/// The order in which requests get their turns.
#[derive(Debug)]
pub(crate) struct Turns {
    policy: Policy,
    fair: bool,
    token_budget: u32,
    /// The waiting requests, without the suspects.
    pub(crate) queue: Queue,
    pub(crate) shares: Shares,
    /// `None`: no prompt passes another.
    pub(crate) claims: Option<Claims>,
    /// The first waiting request, if it did not fit, and the number of returns to the pools at that
    /// time. Trying again is useless until slots or pages are returned.
    blocked: Option<(Key, u64)>,
    /// Like `blocked`, but for the waiting request that was the next to pass others.
    passing_blocked: Option<(Key, u64)>,
    /// Suspects of the hand's death, resident or waiting. While there are any, only the first has
    /// rows.
    suspects: BTreeMap<Key, Handle>,
    /// Microseconds per computed token.
    token_us: Mean,
    pub(crate) pace: Pace,
    pub(crate) background: Background,
}

impl Turns {
    pub(crate) fn new(config: &SchedulerConfig) -> Self {
        let SchedulerConfig { policy, fair, token_budget, step_shares, .. } = *config;
        Self {
            policy,
            fair,
            token_budget,
            queue: Queue::new(fair),
            shares: Shares::default(),
            claims: step_shares.then(|| Claims::new(fair)),
            blocked: None,
            passing_blocked: None,
            suspects: BTreeMap::new(),
            token_us: Mean::default(),
            pace: Pace::new(config.decode_gap),
            background: Background::new(config.background_share),
        }
    }

    /// The rank of a request; smaller ones go first.
    pub(crate) fn rank(&self, request: &Request) -> i64 {
        match self.policy {
            _ if request.probe => PROBE_RANK,
            _ if request.background => BACKGROUND_RANK,
            Policy::Fcfs => 0,
            Policy::Priority => -i64::from(request.priority),
            Policy::PriorityAscending => i64::from(request.priority),
        }
    }

    /// Puts a request that does not wait yet into the queue.
    pub(crate) fn line_up(&mut self, handle: Handle, entry: &Entry, memory: &Memory) {
        if entry.mark().is_some() {
            self.suspects.insert(entry.key, handle);
        } else {
            let ticket = entry.ticket(handle);
            self.queue.insert(ticket, entry.request.past.goes_first());
            if let Some(claims) = &mut self.claims {
                claims.insert(ticket, entry.goal().saturating_sub(memory.expected_prefix(entry)));
            }
            self.shares.settled = false;
        }
    }

    /// Removes a request that is admitted.
    pub(crate) fn admitted(&mut self, ticket: &Ticket) {
        self.queue.admitted(ticket);
        self.claims.iter_mut().for_each(|claims| claims.remove(ticket));
    }

    /// Removes a request from the queue, the claims, the shares and the suspects.
    pub(crate) fn leave(&mut self, ticket: &Ticket) {
        self.queue.remove(ticket);
        self.claims.iter_mut().for_each(|claims| claims.remove(ticket));
        self.shares.gone(ticket.handle);
        self.suspects.remove(&ticket.key);
    }

    /// Queues a request again after the hand's death, whether it is a suspect or not. The request
    /// may be in the queue already.
    pub(crate) fn line_up_again(&mut self, handle: Handle, entry: &Entry, memory: &Memory) {
        let ticket = entry.ticket(handle);
        if entry.mark().is_some() {
            self.queue.remove(&ticket);
            self.claims.iter_mut().for_each(|claims| claims.remove(&ticket));
        }
        if !self.queue.contains(&ticket) {
            self.line_up(handle, entry, memory);
        }
    }

    /// Ends the suspicion of a request.
    pub(crate) fn clear_suspect(&mut self, handle: Handle, entry: &mut Entry, memory: &Memory) {
        entry.request.past.suspect = None;
        self.suspects.remove(&entry.key);
        if entry.residence.is_none() && !entry.has_no_turn() {
            self.line_up(handle, entry, memory);
        }
    }

    /// The suspect whose turn it is.
    pub(crate) fn suspect(&self) -> Option<Handle> {
        self.suspects.first_key_value().map(|(_, &handle)| handle)
    }

    /// The waiting request whose turn it is. Only requests that pass prompts in a step
    /// ([`Self::passing`]) are admitted before this one.
    pub(crate) fn next(&self) -> Option<Ticket> {
        let first = self.queue.first();
        let is_before = |first: Ticket| !first.key.is_background();
        // A promise to background work holds only while no other request waits.
        let holds = |promised: &Ticket| is_before(*promised) || !first.is_some_and(is_before);
        self.shares.promised.filter(holds).or(first)
    }

    /// The waiting request that is the next to pass prompts in a step. The last slot is kept for
    /// the request that is first in turn. All requests that pass this one have together at most as
    /// many tokens as it has. So they cannot keep pages from it for ever.
    pub(crate) fn passing(&self, roster: &Roster) -> Option<Ticket> {
        let (claims, next) = (self.claims.as_ref()?, self.next()?);
        let first = claims.first().filter(|_| self.shares.promised.is_none());
        let may = |first: &Ticket| {
            let passed = roster[next.handle].passed.saturating_add(first.cost);
            first.key == next.key || roster.has_two_places() && passed <= next.cost
        };
        Some(first.filter(may).unwrap_or(next))
    }

    /// True if the request lacked pages at its last try and no page was freed since. `returns` is
    /// the number of frees so far.
    pub(crate) fn is_blocked(&self, key: Key, returns: u64) -> bool {
        [self.blocked, self.passing_blocked].contains(&Some((key, returns)))
    }

    /// The request whose turn it is, if it is blocked.
    pub(crate) fn next_blocked(&self, returns: u64) -> Option<Handle> {
        let (key, _) = self.blocked.filter(|&(_, then)| then == returns)?;
        self.next().filter(|next| next.key == key).map(|next| next.handle)
    }

    /// Notes that a request lacks pages.
    pub(crate) fn block(&mut self, key: Key, returns: u64) {
        let is_next = self.next().is_some_and(|next| next.key == key);
        let blocked = if is_next { &mut self.blocked } else { &mut self.passing_blocked };
        *blocked = Some((key, returns));
        self.shares.settled = false;
    }

    /// Makes the next request try again to lease pages.
    pub(crate) fn unblock(&mut self) {
        (self.blocked, self.passing_blocked) = (None, None);
        self.shares.settled = false;
    }

    /// Removes all waiting requests.
    pub(crate) fn clear(&mut self) {
        self.queue.clear();
        self.claims.iter_mut().for_each(Claims::clear);
        self.suspects.clear();
    }

    /// The resident to preempt, and the request that gets its room. Background work is preempted
    /// for any other request. Other residents are preempted by fair shares
    /// ([`Shares::who_gives_way`]), and the request is promised the next admission.
    ///
    /// This happens at most once per step. Between foreground requests it is so rare that
    /// recomputation takes only a small part of all steps. It runs before any request has a row,
    /// since the preempted resident must have none.
    pub(crate) fn who_gives_way(
        &mut self,
        roster: &Roster,
        step: u64,
        returns: u64,
    ) -> Option<(Handle, Ticket)> {
        if self.shares.settled {
            return None;
        }
        let next = self.next();
        if next.as_ref().is_some_and(|next| {
            let place = roster.has_place(roster[next.handle].request.probe);
            place && !self.is_blocked(next.key, returns)
        }) {
            return None;
        }
        if let Some(next) = next
            && let Some(victim) = in_background(&next, roster)
        {
            return Some((victim, next));
        }
        if !self.fair || !self.shares.may_change(step) {
            return None;
        }
        self.shares.settled = true;
        // Requests that were admitted before go first, but they must not starve a client with less
        // than its share.
        let fresh = || self.queue.first_fresh(next?.key.rank);
        let ticket = self.shares.promised.or_else(fresh)?;
        let victim = self.shares.who_gives_way(&ticket, roster)?;
        Some((victim, ticket))
    }

    /// Promises the next admission to a request for which a resident was preempted. The resident
    /// had computed `lost` positions.
    pub(crate) fn promise(&mut self, ticket: Ticket, step: u64, lost: u32) {
        self.blocked = None;
        self.shares.promise(ticket, step, lost, self.token_budget);
    }

    /// Learns from the time of a step that computed `positions` positions.
    pub(crate) fn learn(&mut self, positions: u32, device_us: u32) {
        if positions > 0 && device_us > 0 {
            self.token_us.learn(f64::from(device_us) / f64::from(positions));
        }
    }

    /// Charges a request's client for host time, as the number of tokens that the device computes
    /// in that time.
    pub(crate) fn charge(&mut self, ticket: &Ticket, us: u64) {
        self.queue.charge(ticket, self.tokens_in(us));
    }

    /// The number of tokens that the device computes in `us` microseconds; 0: not known yet.
    fn tokens_in(&self, us: u64) -> u64 {
        self.token_us.get().map_or(0, |token_us| (us as f64 / token_us) as u64)
    }

    /// Checks that each request is in the right queues, and that the counts of residents are right.
    pub(crate) fn check(&self, roster: &Roster) -> Result<(), String> {
        let mut counts = HashMap::new();
        for (handle, entry) in roster.requests.iter() {
            let (resident, held) = (entry.residence.is_some(), entry.has_no_turn());
            let suspect = entry.mark().is_some() && !held;
            let places = [
                (
                    "queue",
                    self.queue.contains(&entry.ticket(handle)),
                    !resident && !suspect && !held,
                ),
                (
                    "claims",
                    self.claims.as_ref().is_some_and(|claims| claims.contains(entry.key)),
                    self.claims.is_some() && !resident && !suspect && !held,
                ),
                ("suspects", self.suspects.get(&entry.key) == Some(&handle), suspect),
                ("held", held && resident, false),
            ];
            if let Some((place, is, _)) = places.iter().find(|(_, is, should)| is != should) {
                return Err(format!("request {} in {place}: {is}", entry.request.id));
            }
            if resident {
                *counts.entry(entry.request.client).or_default() += 1;
            }
        }
        let listed = &self.shares.residents;
        if *listed != counts {
            return Err(format!("shares: {listed:?} listed, {counts:?} exist"));
        }
        match self.shares.promised.filter(|ticket| !self.queue.contains(ticket)) {
            None => Ok(()),
            Some(ticket) => Err(format!("{ticket:?} does not wait")),
        }
    }
}

/// The background resident to preempt for a foreground request.
fn in_background(ticket: &Ticket, roster: &Roster) -> Option<Handle> {
    let (last, &handle) = roster.residents.last_key_value()?;
    (last.is_background() && !ticket.key.is_background()).then_some(handle)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DecodeGap;

    #[test]
    fn a_time_is_worth_as_many_tokens_as_the_device_computes_in_it() {
        let mut turns = Turns {
            policy: Policy::Fcfs,
            fair: true,
            token_budget: 1,
            queue: Queue::new(true),
            shares: Shares::default(),
            claims: None,
            blocked: None,
            passing_blocked: None,
            suspects: BTreeMap::new(),
            token_us: Mean::default(),
            pace: Pace::new(DecodeGap::Off),
            background: Background::new(100),
        };
        assert_eq!(turns.tokens_in(10), 0, "no step was seen");
        turns.learn(100, 250);
        assert_eq!((turns.tokens_in(10), turns.tokens_in(2)), (4, 0));
    }
}
