//! The adapters that the hand knows: told when they are loaded, and again to each new hand.

use std::collections::BTreeMap;

use forebay_protocol::AdapterOrder;

use crate::executor::Executor;
use crate::member::Member;

/// The adapters that requests may have.
#[derive(Default)]
pub(crate) struct Adapters {
    /// The orders that told of them, by their numbers.
    known: BTreeMap<u32, AdapterOrder>,
    /// Adapters that no further request will have. The hand forgets each when nobody needs it.
    leaving: Vec<u32>,
    /// Orders that the hand has not got yet.
    due: Vec<AdapterOrder>,
}

impl Member {
    pub(super) fn adapter(&mut self, order: AdapterOrder) {
        let adapters = &mut self.adapters;
        match order {
            AdapterOrder::Know { id, .. } => {
                adapters.known.insert(id, order.clone());
                adapters.due.push(order);
            }
            AdapterOrder::Forget { id } => adapters.leaving.push(id),
        }
    }

    /// True if a request with this adapter can be computed.
    pub(super) fn knows(&self, adapter: Option<u32>) -> bool {
        adapter.is_none_or(|id| self.adapters.known.contains_key(&id))
    }

    /// Tells a new hand of all adapters.
    pub(super) fn know_again(&mut self) {
        self.adapters.due = self.adapters.known.values().cloned().collect();
    }

    /// Sends the orders that are due. Without a hand there is nobody to tell, and the next one hears
    /// of all.
    pub(crate) fn send_adapters(&mut self, at: usize, hand: Option<&mut (dyn Executor + 'static)>) {
        let Self { adapters, scheduler, .. } = self;
        let gone = |id: &mut u32| scheduler.as_mut().is_none_or(|it| it.forget_adapter(*id));
        for id in adapters.leaving.extract_if(.., gone) {
            adapters.known.remove(&id);
            adapters.due.push(AdapterOrder::Forget { id });
        }
        let Some(hand) = hand else { return adapters.due.clear() };
        adapters.due.drain(..).for_each(|order| hand.adapter(at, &order));
    }
}
