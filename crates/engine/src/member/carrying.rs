//! Payloads that are being copied to a hand on another machine.
//!
//! A request that needs a payload is held until the payload has arrived. If only patches of an
//! image are missing, the request is scheduled up to the image. Copies are lost when the hand dies.
//! So the payloads of all live requests are copied again to the next hand.

use std::collections::HashMap;
use std::sync::Arc;

use forebay_scheduler::ImageId;

use crate::executor::Executor;
use crate::handle::Order;
use crate::member::Member;
use crate::payload::Payload;

/// The payloads that are being copied or are to be copied.
#[derive(Debug, Default)]
pub(crate) struct Carrying {
    /// True if the hand reads payloads in the memory in which they were written, so none is copied.
    near: bool,
    /// The number of deaths of the hand so far. It identifies the hand to which a payload was
    /// copied: a copy to an earlier hand is useless.
    life: u64,
    /// The number of payloads that each held request still waits for.
    left: HashMap<u64, usize>,
    /// Copies that [`Member::send_off`] is to start.
    due: Vec<Cargo>,
}

impl Carrying {
    pub(crate) fn new(near: bool) -> Self {
        Self { near, ..Self::default() }
    }

    pub(crate) fn hand_died(&mut self) {
        self.life += 1;
        self.left.clear();
        self.due.clear();
    }

    /// True if a payload of the request is being copied, or will be.
    pub(crate) fn brings(&self, request: u64) -> bool {
        let is_due = |cargo: &Cargo| matches!(cargo, Cargo::Of(id) if *id == request);
        self.left.contains_key(&request) || self.due.iter().any(is_due)
    }

    /// Forgets a request that has left this member.
    pub(crate) fn forget(&mut self, request: u64) {
        self.left.remove(&request);
    }
}

/// A report that a payload has reached the hand.
#[derive(Debug)]
pub(crate) struct PayloadDelivery {
    life: u64,
    cargo: Cargo,
}

/// What to copy: all payloads of a request, or the patches of an image.
#[derive(Debug, Clone)]
enum Cargo {
    Of(u64),
    Patches(ImageId, Arc<dyn Payload>),
}

impl Member {
    /// True if a request with these payloads has to wait until they are copied to the hand.
    pub(super) fn has_to_wait(&self, payloads: &[Arc<dyn Payload>]) -> bool {
        !payloads.is_empty() && !self.carrying.near
    }

    /// Queues all payloads of a held request for copying.
    pub(super) fn carry_for(&mut self, request: u64) {
        self.carrying.due.push(Cargo::Of(request));
    }

    /// Queues the payloads of all held requests again, for a new hand.
    pub(super) fn carry_again(&mut self) {
        let held = self.scheduler.iter().flat_map(|scheduler| scheduler.held());
        self.carrying.due.extend(held.map(Cargo::Of));
    }

    /// Lets the hand read the patches of an image: at once, or after they have been copied to its
    /// machine.
    pub(super) fn give_patches(&mut self, image: ImageId, patches: Arc<dyn Payload>) {
        if self.carrying.near {
            self.patches_there(image, patches);
        } else {
            self.carrying.due.push(Cargo::Patches(image, patches));
        }
    }

    /// Starts copying every queued payload to the hand; `at` is the member's index in its group.
    /// Without a hand nothing is copied: requests wait for the next hand, and images become wanted
    /// again.
    pub(crate) fn send_off(&mut self, at: usize, hand: Option<&mut (dyn Executor + 'static)>) {
        let Some(hand) = hand else { return self.carrying.due.clear() };
        for cargo in std::mem::take(&mut self.carrying.due) {
            let payloads = match &cargo {
                Cargo::Of(request) => {
                    let payloads = self.payloads.of(*request).to_vec();
                    // A request that has ended since the copy was queued has no payloads.
                    if !payloads.is_empty() {
                        self.carrying.left.insert(*request, payloads.len());
                    }
                    payloads
                }
                Cargo::Patches(_, patches) => vec![Arc::clone(patches)],
            };
            for payload in payloads {
                let (orders, waker) = (self.orders.clone(), Arc::clone(&self.shared.waker));
                let carried = PayloadDelivery { life: self.carrying.life, cargo: cargo.clone() };
                let there = Box::new(move || {
                    // A closed channel means that the thread has ended.
                    if orders.send(Order::Carried(carried)).is_ok() {
                        waker.wake();
                    }
                });
                hand.carry(at, &payload, there);
            }
        }
    }

    /// Handles a payload that has reached the hand, unless that hand has died since.
    pub(super) fn carried(&mut self, carried: PayloadDelivery) {
        if carried.life != self.carrying.life {
            return;
        }
        match carried.cargo {
            Cargo::Of(request) => {
                let Some(left) = self.carrying.left.get_mut(&request) else { return };
                *left -= 1;
                if *left == 0 {
                    self.carrying.left.remove(&request);
                    if self.pause.as_ref().is_some_and(|pause| pause.has_kept_back(request)) {
                        return;
                    }
                    self.scheduler.iter_mut().for_each(|scheduler| _ = scheduler.release(request));
                }
            }
            Cargo::Patches(image, patches) => self.patches_there(image, patches),
        }
    }

    /// Holds all requests with payloads after the hand's death, until the payloads are copied to
    /// the next hand.
    pub(super) fn hold_embedded(&mut self) {
        self.carrying.hand_died();
        if self.carrying.near {
            return;
        }
        if let Some(scheduler) = &mut self.scheduler {
            self.payloads.owners().for_each(|request| scheduler.hold(request));
        }
    }
}
