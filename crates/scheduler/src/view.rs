//! Read-only views of the scheduler: the newest plan, and the live requests.

use serde::Serialize;

use crate::Scheduler;
use crate::entry::Stage;
use crate::steps::PlannedStep;

/// The phase of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The request has no slot, or its blocks are still being restored from the host tier.
    Queued,
    /// The request computes its prompt, or tokens that were generated before.
    Prefill,
    /// The request generates tokens. Or it has generated the only token that it generates here, and
    /// is about to leave for another replica.
    Decode,
}

/// The counts of a live request at one moment, without its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestView {
    /// The id of the request.
    pub id: u64,
    /// The phase of the request.
    pub phase: Phase,
    /// Tokens of the request's prompt.
    pub prompt: u32,
    /// Positions that the request's last admission found in a tier.
    pub cached: u32,
    /// Positions that are computed, or will be after the steps in flight. Positions of unknown
    /// tokens do not count.
    pub computed: u32,
    /// Tokens that the request has generated.
    pub generated: u32,
    /// The largest number of tokens that the request may generate.
    pub max_tokens: u32,
    /// The time of arrival, in microseconds of the engine's clock.
    pub arrived_us: u64,
    /// The request whose prompt is first in turn, if this request's prompt is not completely
    /// computed. This request gets its rows after the first one, except when it passes the first.
    pub waits_for: Option<u64>,
    /// True if the request was never admitted and is no suspect of a hand's death, so its only
    /// state is its position in the queue.
    pub untouched: bool,
}

impl Scheduler {
    /// The work of the newest plan.
    #[must_use]
    pub fn planned(&self) -> PlannedStep {
        self.steps.planned
    }

    /// The live requests, those with a slot first.
    pub fn views(&self) -> impl Iterator<Item = RequestView> {
        let (first, then) = (self.views_of(true), self.views_of(false));
        first.chain(then)
    }

    fn views_of(&self, residents: bool) -> impl Iterator<Item = RequestView> {
        let entries = self.roster.requests.iter().map(|(_, entry)| entry);
        let entries = entries.filter(move |entry| entry.residence.is_some() == residents);
        let first = self.first_in_turn().map(|first| self.roster[first].request.id);
        entries.map(move |entry| RequestView {
            id: entry.request.id,
            phase: match entry.stage() {
                None if entry.leaving => Phase::Decode,
                None | Some(Stage::Arriving(_)) => Phase::Queued,
                Some(Stage::Prefill | Stage::Planned) => Phase::Prefill,
                Some(Stage::Decode { .. }) => Phase::Decode,
            },
            prompt: entry.prompt_len,
            cached: entry.cached,
            computed: entry.computed.min(entry.known()),
            generated: entry.known() - entry.prompt_len,
            max_tokens: entry.limit - entry.prompt_len,
            arrived_us: entry.request.arrived_us,
            waits_for: match entry.stage() {
                None | Some(Stage::Arriving(_) | Stage::Prefill) => {
                    first.filter(|&first| first != entry.request.id)
                }
                Some(Stage::Planned | Stage::Decode { .. }) => None,
            },
            untouched: entry.is_untouched(),
        })
    }
}
