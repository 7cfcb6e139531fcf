//! State shared by all matchers: a count of their growth, and a thread that frees matchers and
//! templates. Freeing a large one takes longer than a step may wait, and its last owner may be the
//! engine's thread.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, unbounded};

use crate::growth::Growth;

/// The queue of values to be freed, and the growth of the live ones.
#[derive(Clone)]
pub(crate) struct Attic {
    values: Sender<Box<dyn Send>>,
    pub(crate) growth: Arc<Growth>,
}

impl Attic {
    /// An attic, and the work of its thread, which ends with the attic's last clone. All matchers
    /// together may grow by `growth` bytes.
    pub(crate) fn new(growth: usize) -> (Self, impl FnMut() + Send + 'static) {
        let (values, received): (_, Receiver<Box<dyn Send>>) = unbounded();
        let attic = Self { values, growth: Growth::new(growth) };
        (attic, move || received.iter().for_each(drop))
    }

    pub(crate) fn free(&self, value: impl Send + 'static) {
        // Without the thread the value is freed here.
        let _ = self.values.send(Box::new(value));
    }
}
