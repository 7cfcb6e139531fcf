//! Drafts: tokens that requests are expected to generate, computed together with their last token.
//!
//! A row has drafts only if all tokens of its request are known, and no further plan is made before
//! its result. So the counters of a request are always certain (ADR 86). While drafts are likely to
//! pay off, plans wait for results. Otherwise plans run ahead as usual.
//!
//! Drafts never displace other work. They take pages and positions that no other work needs.

use forebay_draft::{DraftMatch, DraftSource};
use forebay_protocol::Want;

use crate::config::Drafts;
use crate::drafting::{Drafting, MAX_DRAFTED};
use crate::entry::{Entry, Residence};
use crate::expected::RowDrafts;
use crate::steps::{FlightRow, NewStep};
use crate::{Event, Handle, Scheduler};

/// The number of steps without drafts for which plans still wait for a request's results.
const PATIENCE: u8 = 8;

impl Scheduler {
    /// True if the next plan waits for the results in flight, because its drafts or the beginnings
    /// of its rows depend on them.
    pub(crate) fn awaits_tokens(&self) -> bool {
        if self.config.drafts.is_none() || self.in_flight() == 0 {
            return false;
        }
        let waits = |row: &FlightRow| {
            let entry = self.roster.requests.get(row.handle);
            entry.is_some_and(|entry| entry.expected.patience > 0)
        };
        let mut flights = self.steps.in_flight.iter();
        flights.any(|flight| flight.drafts > 0 || flight.rows.iter().any(waits))
    }

    /// Gives drafts to some of a step's first `decodes` rows.
    pub(crate) fn plan_drafts(&mut self, decodes: usize, step: &mut NewStep<'_>) {
        let Some(Drafts { most, priced }) = self.config.drafts else { return };
        let sampled = step.flight.sampled as u32;
        let positions = step.flight.positions();
        let room = self.config.token_budget.saturating_sub(positions);
        let mut room = room.min(MAX_DRAFTED.saturating_sub(sampled));
        let Drafting { budget, offers, rows, counts, .. } = &mut self.drafting;
        offers.clear();
        rows.clear();
        for (at, row) in step.flight.rows[..decodes].iter().enumerate() {
            let entry = &self.roster[row.handle];
            // Draft only if the newest token is known and the request does not end with the next
            // one.
            let fits = matches!(row.want, Want::TOKEN | Want::MASKED) && entry.known() == row.end;
            let most = entry.expected.offered(most).min(entry.limit - row.end - 1);
            if fits && most > 0 {
                rows.push(at);
                offers.push(entry.expected.offer(most));
            }
        }
        if offers.is_empty() || room == 0 {
            return;
        }
        if priced {
            budget.buy(sampled, offers, room, counts);
        } else {
            counts.clear();
            counts.extend(offers.iter().map(|offer| {
                let count = offer.most.min(room);
                room -= count;
                count
            }));
        }
        for place in 0..self.drafting.rows.len() {
            let (at, count) = (self.drafting.rows[place], self.drafting.counts[place]);
            if count > 0 {
                self.push_drafts(at, count, step);
            }
        }
    }

    /// Gives a row up to `count` drafts, but no more than its request has pages for.
    fn push_drafts(&mut self, at: usize, count: u32, step: &mut NewStep<'_>) {
        let row = &mut step.flight.rows[at];
        // Reserve a page for each resident, which may need one for its next certain token.
        let spare = self.roster.residents.len() as u32;
        let entry = &mut self.roster[row.handle];
        let Some(residence) = entry.residence.as_mut() else { return };
        let page_size = self.config.page_size;
        let end = row.end;
        let room = |residence: &Residence| residence.pages.reach() * page_size - end;
        while room(residence) < count
            && self.memory.free_pages() > spare
            && self.memory.add_page(residence, step.plan)
        {}
        let count = count.min(room(residence));
        let Some(found) = entry.expected.found.filter(|_| count > 0) else { return };
        row.want = match row.want {
            Want::Masked(_) => Want::Masked(1 + count),
            _ => Want::Tokens(1 + count),
        };
        let (id, forced) = (entry.request.id, entry.expected.forced);
        row.drafts = Some(RowDrafts { count, id, found, forced });
        step.flight.drafts += count;
        step.plan.push_drafts(at, &entry.expected.tokens[..count as usize]);
    }

    /// Applies the outcome of a row's drafts. The row returned `count` tokens. `events[before..]`
    /// reports those that the request keeps.
    pub(crate) fn drafts_ended(
        &mut self,
        row: &FlightRow,
        (count, before): (usize, usize),
        events: &mut Vec<Event>,
    ) {
        // A hand that drafts by itself is assumed to use its full number of drafts.
        let drafted = row.drafts.map_or(row.want.most().saturating_sub(1), |own| own.count);
        if drafted == 0 {
            return;
        }
        let accepted = (count as u32).saturating_sub(1);
        let tokens = events[before..].iter().filter(|event| matches!(event, Event::Token { .. }));
        let given = (tokens.count() as u32).saturating_sub(1);
        let counters = &mut self.counters.drafts;
        counters.rows += 1;
        counters.drafted += u64::from(drafted);
        counters.accepted += u64::from(given);
        for counter in counters.accepted_at.iter_mut().take(given as usize) {
            *counter += 1;
        }
        let Some(RowDrafts { id, found, forced, .. }) = row.drafts else { return };
        // Forced drafts are always accepted, so they are left out of the acceptance rate.
        let outcome = (drafted > forced && accepted >= forced).then(|| {
            let (drafted, accepted) = (drafted - forced, accepted - forced);
            (self.drafting.budget.drafts_ended(found, drafted, accepted), accepted)
        });
        if found.source == DraftSource::Shared {
            let counters = &mut self.counters.drafts;
            counters.shared_drafted += u64::from(drafted);
            counters.shared_accepted += u64::from(given);
        }
        if found.source == DraftSource::Prediction {
            let rejected = drafted - given;
            events.insert(before, Event::Predicted { id, accepted: given, rejected });
        }
        let priced = self.config.drafts.is_some_and(|drafts| drafts.priced);
        let Some(entry) = self.roster.requests.get_mut(row.handle) else { return };
        entry.expected.end_comparison();
        if let Some((share, accepted)) = outcome.filter(|_| priced) {
            entry.expected.learn(share);
            entry.expected.row_ended(accepted);
        }
    }

    /// Compares a request's newest token with the expected token, if the request's row had no
    /// drafts.
    pub(crate) fn compare_expected(&mut self, row: &FlightRow) {
        let alone = row.drafts.is_none() && self.config.drafts.is_some();
        let Some(entry) = self.roster.requests.get_mut(row.handle).filter(|_| alone) else {
            return;
        };
        let Some(&token) = entry.tokens.last() else { return };
        if let Some((found, drafted, right)) = entry.expected.compare(token) {
            let share = self.drafting.budget.drafts_ended(found, drafted, right);
            entry.expected.learn(share);
        }
    }

    /// Records the expected next tokens of a request, after a step with `rows` sampling rows
    /// returned new tokens. A masked request tries its forced tokens first
    /// ([`Self::expect_masked`]).
    pub(crate) fn expect(&mut self, handle: Handle, rows: u32) {
        if self.config.drafts.is_none() {
            return;
        }
        self.drafting.sampled = rows;
        if self.roster[handle].request.masked {
            self.roster[handle].expected.forget();
        } else {
            self.expect_within(handle, |_, _| 0);
        }
    }

    /// The largest number of drafts per row; 0: rows have no drafts.
    #[must_use]
    pub fn most_drafts(&self) -> u32 {
        self.config.drafts.map_or(0, |drafts| drafts.most)
    }

    /// Records the expected next tokens of a masked request, after new tokens. `restrict` gets the
    /// largest number of drafts, and the proposer's drafts. It keeps the drafts that the mask
    /// allows, and returns how many of the first ones are certain.
    pub fn expect_masked(&mut self, id: u64, restrict: impl FnOnce(u32, &mut Vec<i32>) -> u32) {
        if let Some(handle) = self.roster.find(id).filter(|_| self.config.drafts.is_some()) {
            self.expect_within(handle, restrict);
        }
    }

    fn expect_within(&mut self, handle: Handle, restrict: impl FnOnce(u32, &mut Vec<i32>) -> u32) {
        let Some(Drafts { most, priced }) = self.config.drafts else { return };
        let Drafting { budget, sampled: rows, .. } = &self.drafting;
        let entry = &mut self.roster[handle];
        let Entry { request, expected, .. } = entry;
        let proposer = request.proposer.as_ref();
        expected.forget();
        expected.found = proposer.and_then(|it| it.propose(most as usize, &mut expected.tokens));
        expected.forced = restrict(most, &mut expected.tokens);
        if expected.tokens.is_empty() {
            expected.found = None;
        } else if expected.forced as usize == expected.tokens.len() {
            let found = DraftMatch { length: expected.forced, source: DraftSource::Form };
            expected.found.get_or_insert(found);
        }
        let room = most.min(MAX_DRAFTED.saturating_sub(*rows));
        let offered = expected.offered(most);
        let pays = offered > 0 && room > 0 && {
            let mut count = Vec::new();
            budget.buy(*rows, &[expected.offer(offered)], room, &mut count);
            !priced || count[0] > 0
        };
        expected.patience = if pays { PATIENCE } else { expected.patience.saturating_sub(1) };
        if priced {
            expected.begin_comparison();
        }
    }
}
