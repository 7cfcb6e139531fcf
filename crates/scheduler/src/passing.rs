//! Divides a step's tokens between prompts.
//!
//! Half of a step's prompt tokens are given in the order of turns. So the first prompt in turn has
//! at least half of every step, and takes at most twice as long as if no prompt passed it. The
//! other half goes to prompts that *pass* it: first to the client that has received the least, and
//! among its prompts to the one that ends soonest ([`crate::turns::claims`]). Tokens that those
//! prompts do not need are given in the order of turns too. So a prompt that is alone has the whole
//! step.
//!
//! Priorities are respected: a prompt never passes one of a better rank, and a waiting prompt goes
//! before the residents of a worse rank. A prompt that must be computed in one row passes as a
//! whole or not at all. If this also holds for the first prompt in turn, no passing prompt takes
//! its room.

use crate::entry::{Entry, Stage};
use crate::images::visible;
use crate::request::Key;
use crate::steps::NewStep;
use crate::turns::claims::Claim;
use crate::{Handle, Scheduler};

impl Scheduler {
    /// Plans rows of prompts that pass the first in turn. Prompts that were not admitted yet are
    /// admitted. Requests that get a row are added to `passed`, and get no second row in this step.
    /// Returns the number of tokens in these rows, at most half of `budget`.
    pub(crate) fn plan_passing(
        &mut self,
        budget: u32,
        passed: &mut Vec<Handle>,
        step: &mut NewStep<'_>,
    ) -> u32 {
        if self.turns.claims.is_none() {
            return 0;
        }
        let Some(first) = self.first_in_turn() else { return 0 };
        if self.waits_for_others(self.roster[first].key) {
            return 0;
        }
        self.advance_claims(self.roster[first].key.rank);
        let half = budget.div_ceil(2);
        let soon = budget.saturating_sub(self.memory.row_limit(self.roster[first].total, half));
        let (mut left, mut admits, mut all_have_rows) = (soon, true, true);
        while left > 0 {
            let resident = self.resident_claim(first, passed, step);
            let waiting = if admits { self.waiting_claim() } else { None };
            let Some((claim, handle)) = resident.into_iter().chain(waiting).min() else { break };
            if self.claim(first).is_none_or(|first| first <= claim) {
                break;
            }
            if self.roster[handle].residence.is_none() {
                admits = self.passes(handle, left, step);
                if !admits {
                    continue;
                }
            } else if self.roster[handle].has_arrived() {
                self.arrive(handle, step);
            }
            passed.push(handle);
            if let Some(Stage::Prefill) = self.roster[handle].stage() {
                let planned = self.push_row(handle, left, step);
                left -= planned;
                self.count_received(handle, planned);
                all_have_rows &= planned > 0;
            }
        }
        if !all_have_rows {
            // The tokens left may be too few for an image that must lie in one row. A prompt that
            // got no row for this reason may get one later in this step. Otherwise the first prompt
            // in turn could wait for ever for memory that this prompt holds.
            let rows = &step.flight.rows;
            passed.retain(|&handle| rows.iter().any(|row| row.handle == handle));
        }
        soon - left
    }

    /// True if the next waiting request has a better rank than `key`, so that it goes before
    /// residents with `key` or a later key.
    pub(crate) fn goes_before(&self, key: Key) -> bool {
        let claims = self.turns.claims.is_some();
        claims && self.turns.next().is_some_and(|next| next.key.rank < key.rank)
    }

    /// Counts tokens that a prompt's client has received.
    pub(crate) fn count_received(&mut self, handle: Handle, tokens: u32) {
        let (entry, claims) = (&self.roster[handle], &mut self.turns.claims);
        if let Some(claims) = claims.as_mut().filter(|_| tokens > 0) {
            claims.receive(entry.key.rank, entry.request.client, tokens);
        }
    }

    /// Advances the virtual time of a rank.
    fn advance_claims(&mut self, rank: i64) {
        let (roster, Some(claims)) = (&self.roster, &mut self.turns.claims) else { return };
        let computing = |rank| {
            let (first, last) = (Key { rank, arrival: i64::MIN }, Key { rank, arrival: i64::MAX });
            roster.prefills.range(first..=last).map(|(_, &handle)| roster[handle].request.client)
        };
        claims.advance(rank, computing(rank));
        claims.sweep(|rank| computing(rank).next().is_some());
    }

    /// The prompt whose turn it is: a resident's, or that of a waiting request of a better rank.
    pub(crate) fn first_in_turn(&self) -> Option<Handle> {
        let resident = self.roster.prefills.first_key_value();
        let waiting = self.turns.next();
        match (resident, waiting) {
            (Some((key, _)), Some(next)) if next.key.rank < key.rank => Some(next.handle),
            (Some((_, &handle)), _) => Some(handle),
            (None, next) => next.map(|next| next.handle),
        }
    }

    /// The resident in prefill that passes `first` next, with its claim to the step's tokens.
    /// Requests in `passed` have already passed in this step.
    fn resident_claim(
        &self,
        first: Handle,
        passed: &[Handle],
        step: &NewStep<'_>,
    ) -> Option<(Claim, Handle)> {
        let arriving = self.roster.arriving.values().copied();
        let arrived = arriving.filter(|&handle| {
            self.roster[handle].has_arrived() && self.has_room_in_plan(handle, step)
        });
        let residents = self.roster.prefills.values().copied().chain(arrived);
        let others = residents.filter(|&handle| {
            handle != first && !passed.contains(&handle) && self.room_for(handle) > 0
        });
        others.filter_map(|handle| Some((self.claim(handle)?, handle))).min()
    }

    /// The waiting request that passes next.
    fn waiting_claim(&self) -> Option<(Claim, Handle)> {
        let handle = self.turns.passing(&self.roster)?.handle;
        Some((self.claim(handle)?, handle))
    }

    fn claim(&self, handle: Handle) -> Option<Claim> {
        let entry = &self.roster[handle];
        let work = entry.goal() - entry.computed;
        Some(self.turns.claims.as_ref()?.place(entry.key, entry.request.client, work))
    }

    /// Admits a waiting request that passes others, if it fits. Returns false if it was not
    /// admitted.
    fn passes(&mut self, handle: Handle, left: u32, step: &mut NewStep<'_>) -> bool {
        let entry = &self.roster[handle];
        let ticket = entry.ticket(handle);
        let next = self.turns.next().filter(|next| next.handle != handle);
        if self.memory.row_limit(entry.total, left) > left || !self.try_admit(&ticket, step) {
            return false;
        }
        if let Some(next) = next {
            self.roster[next.handle].passed += ticket.cost;
        }
        true
    }

    /// The number of positions that a resident's next row may have.
    fn room_for(&self, handle: Handle) -> u32 {
        let entry = &self.roster[handle];
        let in_parts = entry.grows_in_prefill() || self.images.are_ahead(entry);
        if in_parts && self.memory.lacks_page(entry) { 0 } else { entry.longest_row() }
    }
}

impl Entry {
    /// The longest row that a resident could have if no other request needed room.
    pub(crate) fn longest_row(&self) -> u32 {
        let pages = self.residence.as_ref().map_or(0, |residence| residence.pages.longest_row());
        let left = self.goal() - self.computed;
        left.min(visible(self)).min(self.permitted()).min(pages)
    }
}
