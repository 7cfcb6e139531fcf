//! Requests that borrow blocks before they go to their replica, and requests that are handed on
//! after their first token.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use forebay_balance::{LocalReason, lender};
use forebay_engine::{Entrant, Loan, LoanReply, Orphan, SubmitError};

use crate::dispatch::{Dispatch, RequestProfile};
use crate::replicas::Shared;

/// The replica that is to lend blocks, and the index of the first block to borrow.
pub(crate) struct Lender {
    at: usize,
    first: usize,
}

impl Shared {
    /// Returns the replica that can lend blocks which replica `at` lacks for a request. `None`: the
    /// request may not borrow, or no replica has more of its blocks than `at`.
    pub(crate) fn lender(&self, asked: &RequestProfile<'_>, at: usize) -> Option<Lender> {
        if !asked.borrows {
            return None;
        }
        let lender = lender(&asked.ask(), at)?;
        let own = asked.cached.get(at).copied().unwrap_or(0);
        Some(Lender { at: lender, first: self.blocks_in(own) })
    }

    /// Sends a request to replica `at`, with a loan if there is a lender.
    pub(crate) fn enter(
        self: &Arc<Self>,
        at: usize,
        lender: Option<Lender>,
        entrant: Entrant,
    ) -> Result<(), SubmitError> {
        let engines = self.engines();
        let Some(Lender { at: lender, first }) = lender else { return engines[at].send(entrant) };
        let (id, names) = (entrant.request.id().0, &entrant.request.request.names);
        let names = names.get(first..).unwrap_or_default().to_vec();
        self.dispatch.lock().borrowing.insert(id, false);
        let shared = Arc::clone(self);
        // The lender's engine thread replies, or drops the closure when it ends.
        let reply = LoanReply::new(move |loan| shared.enter_with(at, entrant, loan));
        engines[lender].lend(names, reply);
        Ok(())
    }

    fn enter_with(&self, at: usize, mut entrant: Entrant, loan: Option<Arc<Loan>>) {
        let id = entrant.request.id();
        entrant.request.request.loan = loan;
        let mut dispatch = self.dispatch.lock();
        let aborted = dispatch.borrowing.remove(&id.0).unwrap_or(false);
        let engine = &self.engines()[at];
        // If the engine thread has ended, the request ends too, like all other requests at that
        // engine.
        let _ = engine.send(entrant);
        // The request is sent under the lock, so that no abort overtakes it.
        if aborted {
            engine.abort(id);
        }
    }

    /// Sends a request that has left its prefill replica to a decode replica. Returns the request
    /// if no decode replica is up, or if its own replica decodes by now.
    pub(crate) fn hand_on(&self, from: usize, orphan: Orphan) -> Option<Orphan> {
        if self.pd.is_none() || self.dispatch.lock().roles[from].decodes() {
            return Some(orphan);
        }
        let fits: Vec<bool> =
            self.engines().iter().map(|engine| engine.fits(&orphan.request)).collect();
        let may = |at: usize, dispatch: &Dispatch| {
            dispatch.roles[at].decodes() && dispatch.open(at) && fits[at]
        };
        let left = self.hand_to(orphan, false, may);
        if left.is_some() {
            self.dispatch.lock().local[from].count(LocalReason::NoDecode);
        }
        left
    }

    /// Records how many tokens fit into the free and cached pages of replica `at`, as of its last
    /// step.
    pub(crate) fn note_room(&self, dispatch: &mut Dispatch, at: usize) {
        if self.pd.is_some()
            && let Some(engine) = self.engines().get(at)
        {
            let stats = engine.stats().scheduler;
            let pages = (stats.pages_free + stats.pages_cached) as u64;
            dispatch.pressure.set_room(at, pages * u64::from(engine.size().page_size));
        }
    }

    /// Makes prefill replicas hold prompts back or resume, depending on the free pages of decode
    /// replicas.
    pub(crate) fn press(&self, dispatch: &mut Dispatch) {
        if self.pd.is_none() {
            return;
        }
        let pressed = dispatch.is_pressed();
        for (at, holding) in self.holding.iter().enumerate() {
            // Prompts at a replica that decodes are not handed on, so they need no pages of other
            // replicas.
            let holds = pressed && !dispatch.roles[at].decodes();
            if holding.swap(holds, Ordering::AcqRel) == holds {
                continue;
            }
            if holds {
                dispatch.holds[at] += 1;
            } else if let Some(engine) = self.engines().get(at) {
                engine.wake();
            }
        }
    }
}
