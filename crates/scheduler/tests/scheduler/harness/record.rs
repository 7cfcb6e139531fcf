//! A digest of all plans, events and states of a scheduler, to compare two runs.

use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash, Hasher};

use forebay_protocol::StepPlan;
use forebay_scheduler::Scheduler;

use super::Harness;

/// The digest so far.
#[derive(Default)]
pub(crate) struct Record {
    digest: DefaultHasher,
    text: String,
}

impl Record {
    pub(super) fn note(&mut self, said: impl Debug) {
        use std::fmt::Write;
        self.text.clear();
        write!(self.text, "{said:?}").expect("into memory");
        self.text.hash(&mut self.digest);
    }

    pub(super) fn plan(&mut self, plan: &StepPlan) {
        let mut bytes = Vec::new();
        plan.encode(&mut bytes).expect("within the limit");
        bytes.hash(&mut self.digest);
    }

    pub(super) fn state(&mut self, scheduler: &mut Scheduler) {
        let mut blocks = vec![];
        scheduler.take_block_events(&mut blocks);
        let held: Vec<u64> = scheduler.held().collect();
        let views: Vec<_> = scheduler.views().collect();
        let work = (scheduler.planned(), scheduler.computes(), scheduler.is_suspected());
        self.note((blocks, scheduler.stats(), held, views, work));
    }
}

impl Harness {
    /// Records from now on.
    pub(crate) fn record(mut self) -> Self {
        self.record = Some(Record::default());
        self
    }

    /// The digest of all plans, events and states so far.
    pub(crate) fn digest(&self) -> u64 {
        self.record.as_ref().map_or(0, |record| record.digest.finish())
    }
}
