//! Payloads on their way to a hand that does not read them where they were written.
//!
//! Whoever needs one waits outside of every plan until it is there: a request is held, an image
//! stays wanted. What was there dies with the hand, or may have, so everything alive is carried to
//! the next one.

use std::collections::HashMap;
use std::sync::Arc;

use forebay_scheduler::ImageId;

use crate::handle::Order;
use crate::owner::Owner;
use crate::payload::Payload;

/// The payloads that are on their way.
#[derive(Debug, Default)]
pub(crate) struct Carrying {
    /// Deaths of the hand: what has reached an earlier one is of no use to this one.
    life: u64,
    /// Payloads that each held request still waits for.
    left: HashMap<u64, usize>,
}

impl Carrying {
    pub(crate) fn hand_died(&mut self) {
        self.life += 1;
        self.left.clear();
    }

    /// The request is here no more.
    pub(crate) fn forget(&mut self, request: u64) {
        self.left.remove(&request);
    }
}

/// A payload has reached the hand.
#[derive(Debug)]
pub(crate) struct Carried {
    life: u64,
    cargo: Cargo,
}

/// The owner of a payload, which waits for it.
#[derive(Debug)]
enum Cargo {
    Of(u64),
    Patches(ImageId, Arc<dyn Payload>),
}

impl Owner {
    /// True if a request with these payloads has to wait until they are brought to the hand.
    pub(super) fn has_to_wait(&self, payloads: &[Arc<dyn Payload>]) -> bool {
        !payloads.is_empty() && !self.executor.is_near()
    }

    /// Has everything brought to the hand that a held request needs. Without a hand it waits for
    /// the next one.
    pub(super) fn carry_for(&mut self, request: u64) {
        if !self.up {
            return;
        }
        let payloads = self.payloads.of(request).to_vec();
        self.carrying.left.insert(request, payloads.len());
        for payload in payloads {
            self.carry(&payload, Cargo::Of(request));
        }
    }

    /// The same for all of them: there is a new hand.
    pub(super) fn carry_again(&mut self) {
        let held = self.scheduler.iter().flat_map(|scheduler| scheduler.held());
        for request in held.collect::<Vec<_>>() {
            self.carry_for(request);
        }
    }

    /// Has patches brought to the hand before it hears of them.
    pub(super) fn carry_patches(&mut self, image: ImageId, patches: Arc<dyn Payload>) {
        // After a death the image is wanted again.
        if self.up {
            self.carry(&Arc::clone(&patches), Cargo::Patches(image, patches));
        }
    }

    fn carry(&mut self, payload: &Arc<dyn Payload>, cargo: Cargo) {
        let (orders, waker) = (self.orders.clone(), Arc::clone(&self.shared.waker));
        let carried = Carried { life: self.carrying.life, cargo };
        let there = Box::new(move || {
            // A closed lane means that the thread has ended.
            if orders.send(Order::Carried(carried)).is_ok() {
                waker.wake();
            }
        });
        self.executor.carry(payload, there);
    }

    /// A payload is where the hand reads it, if it is still the same hand.
    pub(super) fn carried(&mut self, carried: Carried) {
        if carried.life != self.carrying.life {
            return;
        }
        match carried.cargo {
            Cargo::Of(request) => {
                let Some(left) = self.carrying.left.get_mut(&request) else { return };
                *left -= 1;
                if *left == 0 {
                    self.carrying.left.remove(&request);
                    self.scheduler.iter_mut().for_each(|scheduler| _ = scheduler.release(request));
                }
            }
            Cargo::Patches(image, patches) => self.patches_there(image, patches),
        }
    }

    /// The hand has died: whoever has a payload waits until it is at the next one.
    pub(super) fn hold_embedded(&mut self) {
        self.carrying.hand_died();
        if self.executor.is_near() {
            return;
        }
        if let Some(scheduler) = &mut self.scheduler {
            self.payloads.owners().for_each(|request| scheduler.hold(request));
        }
    }
}
