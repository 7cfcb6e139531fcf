//! The adapters that were announced to the hand. Each adapter is announced when it is loaded, and
//! all of them are announced to a new hand.

use std::collections::BTreeMap;

use forebay_protocol::AdapterOrder;

use crate::executor::Executor;

/// The adapters that requests may use.
#[derive(Default)]
pub(crate) struct Adapters {
    /// The load orders of the adapters, by adapter number.
    known: BTreeMap<u32, AdapterOrder>,
    /// Adapters that are to be dropped: no new request will use them. Each is dropped after its
    /// last request has ended.
    leaving: Vec<u32>,
    /// Orders that have not been sent to the hand yet.
    due: Vec<AdapterOrder>,
}

impl Adapters {
    /// Applies an adapter order.
    pub(crate) fn follow(&mut self, order: AdapterOrder) {
        match order {
            AdapterOrder::Know { id, .. } => {
                self.known.insert(id, order.clone());
                self.due.push(order);
            }
            AdapterOrder::Forget { id } => self.leaving.push(id),
        }
    }

    /// True if `adapter` is loaded, or if it is `None`.
    pub(crate) fn knows(&self, adapter: Option<u32>) -> bool {
        adapter.is_none_or(|id| self.known.contains_key(&id))
    }

    /// Queues the load orders of all adapters, for a new hand.
    pub(crate) fn know_again(&mut self) {
        self.due = self.known.values().cloned().collect();
    }

    /// Sends the pending orders to a member's hand. Without a hand the orders are discarded,
    /// because the next hand gets all adapters. `gone` makes the scheduler drop an adapter, and
    /// returns false if requests still use the adapter.
    pub(crate) fn send(
        &mut self,
        member: usize,
        hand: Option<&mut (dyn Executor + 'static)>,
        mut gone: impl FnMut(u32) -> bool,
    ) {
        for id in self.leaving.extract_if(.., |id| gone(*id)) {
            self.known.remove(&id);
            self.due.push(AdapterOrder::Forget { id });
        }
        let Some(hand) = hand else { return self.due.clear() };
        self.due.drain(..).for_each(|order| hand.adapter(member, &order));
    }
}
