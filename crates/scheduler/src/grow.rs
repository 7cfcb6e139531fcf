//! Pages for running requests.

use forebay_protocol::StepPlan;

use crate::entry::Entry;
use crate::memory::Room;
use crate::steps::NewStep;
use crate::{Handle, Scheduler};

impl Scheduler {
    /// Gives a page to each decoding request whose next position begins a new page, the most
    /// important request first.
    pub(crate) fn grow_decodes(&mut self, step: &mut NewStep<'_>) {
        let mut needy = std::mem::take(&mut self.needy);
        let roster = &self.roster;
        let decodes = roster.decodes.iter().filter(|&&handle| roster[handle].plannable());
        let grows = |entry: &Entry| entry.grows_in_prefill() && entry.longest_row() > 0;
        let prefills = roster.prefills.values().filter(|&&handle| grows(&roster[handle]));
        for &handle in decodes.chain(prefills) {
            let entry = &roster[handle];
            if self.memory.lacks_page(entry) {
                needy.push((entry.key, handle));
            }
        }
        needy.sort_unstable();
        for (_, handle) in needy.drain(..) {
            // A more important request may have preempted this one for a page.
            if self.roster[handle].residence.is_some() {
                self.grow(handle, step);
            }
        }
        self.needy = needy;
    }

    /// Gives a page to a resident if it lacks one, preempting the least important residents for it,
    /// and itself as the last resort. If retired pages will be free soon, or if only copies hold
    /// pages, the resident skips this step instead.
    pub(crate) fn grow(&mut self, handle: Handle, step: &mut NewStep<'_>) {
        if !self.memory.lacks_page(&self.roster[handle]) {
            return;
        }
        self.memory.pass_window(&mut self.roster[handle], step.plan);
        while self.memory.lacks_page(&self.roster[handle]) {
            let Some(residence) = self.roster[handle].residence.as_mut() else { return };
            if self.memory.add_page(residence, step.plan) {
                continue;
            }
            if self.awaits_retired(handle) {
                return;
            }
            let Some((_, &victim)) = self.roster.residents.last_key_value() else { return };
            match self.memory.make_room(&mut self.roster, step.plan) {
                Room::Made => continue,
                Room::WithCopies => return,
                Room::None => {}
            }
            if victim == handle && self.memory.expects_pages() {
                return;
            }
            if let Some(residence) = self.roster[victim].residence.as_ref() {
                step.plan.forget_slot(residence.slot);
            }
            self.preempt(victim, step.events);
        }
    }

    /// True if a step in flight will free image pages, or pages of the pool in which the resident
    /// lacks one.
    fn awaits_retired(&self, handle: Handle) -> bool {
        let next = self.steps.next();
        self.memory.awaits_page(&self.roster[handle], next)
            || self.images.retired.is_awaited_before(next)
    }

    /// Keeps pages free for growth and for the next request, by dropping pages of running requests.
    pub(crate) fn keep_pages_ready(&mut self, plan: &mut StepPlan) {
        self.memory.drop_saved(&mut self.roster, plan);
        let total = self.lacking_pages().map_or(0, |next| self.roster[next].total);
        self.memory.keep_ready(&mut self.roster, total, plan);
    }

    /// The next request to admit, if it lacks nothing but pages.
    fn lacking_pages(&self) -> Option<Handle> {
        let next = self.turns.next_blocked(self.returns())?;
        let place = self.roster.has_place(self.roster[next].request.probe);
        (place && !self.roster.free_slots.is_empty()).then_some(next)
    }
}
