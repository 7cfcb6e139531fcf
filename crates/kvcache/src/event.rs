//! What others may want to know of a pool: which blocks it holds.

use crate::hash::BlockHash;

/// A change of what a pool holds. Who applies all of them in order knows its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockEvent {
    /// A page holds this block from now on, or will when the steps that are planned by now are done.
    Stored(BlockHash),
    /// No page holds it any more.
    Dropped(BlockHash),
    /// No page holds any block.
    Cleared,
}

/// Events since they were taken last; nothing, where nobody takes them.
#[derive(Debug, Default)]
pub(crate) struct Journal(Option<Vec<BlockEvent>>);

impl Journal {
    /// From now on somebody takes the events.
    pub(crate) fn begin(&mut self) {
        self.0.get_or_insert_default();
    }

    pub(crate) fn note(&mut self, event: BlockEvent) {
        if let Some(events) = &mut self.0 {
            events.push(event);
        }
    }

    /// Nothing is left, whatever was noted before.
    pub(crate) fn cleared(&mut self) {
        if let Some(events) = &mut self.0 {
            events.clear();
            events.push(BlockEvent::Cleared);
        }
    }

    pub(crate) fn take(&mut self, into: &mut Vec<BlockEvent>) {
        if let Some(events) = &mut self.0 {
            into.append(events);
        }
    }
}
