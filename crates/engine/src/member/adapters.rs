//! The adapters that the hand has been told of. Each is announced when it is loaded, and all are
//! announced to a new hand.

use std::collections::BTreeMap;

use forebay_protocol::AdapterOrder;

use crate::executor::Executor;

/// The adapters that requests may have.
#[derive(Default)]
pub(crate) struct Adapters {
    /// The load orders of the adapters, by adapter number.
    known: BTreeMap<u32, AdapterOrder>,
    /// Adapters that no new request will use. The hand drops each after its last request.
    leaving: Vec<u32>,
    /// Orders that the hand has not got yet.
    due: Vec<AdapterOrder>,
}

impl Adapters {
    /// Follows an order.
    pub(crate) fn follow(&mut self, order: AdapterOrder) {
        match order {
            AdapterOrder::Know { id, .. } => {
                self.known.insert(id, order.clone());
                self.due.push(order);
            }
            AdapterOrder::Forget { id } => self.leaving.push(id),
        }
    }

    /// True if a request with this adapter can be computed.
    pub(crate) fn knows(&self, adapter: Option<u32>) -> bool {
        adapter.is_none_or(|id| self.known.contains_key(&id))
    }

    /// Sends a new hand all adapters.
    pub(crate) fn know_again(&mut self) {
        self.due = self.known.values().cloned().collect();
    }

    /// Sends the orders that are due to the hand of a member. Without a hand they are dropped, and
    /// the next one gets all adapters. `gone` drops an adapter; it returns false while the adapter
    /// is in use.
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
