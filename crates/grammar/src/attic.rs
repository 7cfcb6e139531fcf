//! State that all matchers share: a count of their growth, and a thread that frees matchers and
//! templates. The engine thread may own the last reference to a large matcher, and freeing it there
//! would take too long.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, unbounded};

use crate::growth::Growth;

/// The queue of values to free, and the growth of the live matchers.
#[derive(Clone)]
pub(crate) struct Attic {
    values: Sender<Box<dyn Send>>,
    pub(crate) growth: Arc<Growth>,
}

impl Attic {
    /// Creates an attic, and the function for its thread to run. The function returns when the
    /// attic's last clone is dropped. All matchers together may grow by `growth` bytes.
    pub(crate) fn new(growth: usize) -> (Self, impl FnMut() + Send + 'static) {
        let (values, received): (_, Receiver<Box<dyn Send>>) = unbounded();
        let attic = Self { values, growth: Growth::new(growth) };
        (attic, move || received.iter().for_each(drop))
    }

    pub(crate) fn free(&self, value: impl Send + 'static) {
        // If the thread has ended, the value is freed here.
        let _ = self.values.send(Box::new(value));
    }
}
