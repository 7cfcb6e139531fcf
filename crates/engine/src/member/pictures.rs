//! Images of requests: gets their patches into the arena, from which the hand reads them.

use std::collections::HashMap;
use std::sync::Arc;

use forebay_scheduler::ImageId;

use crate::handle::Order;
use crate::member::Member;
use crate::payload::Payload;
use crate::picture::{Picture, Placed, Placement};
use crate::types::{FinishReason, RequestError};

/// The images of live requests, and the patches that the hand has not read yet.
#[derive(Debug, Default)]
pub(crate) struct Pictures {
    live: HashMap<u64, Vec<Arc<dyn Picture>>>,
    /// The payloads with patches, by their arena offsets.
    placed: HashMap<u32, Arc<dyn Payload>>,
    /// A buffer for arena offsets, kept to reuse its memory.
    unread: Vec<u32>,
}

impl Pictures {
    pub(crate) fn hold(&mut self, request: u64, pictures: Vec<Arc<dyn Picture>>) {
        if !pictures.is_empty() {
            self.live.insert(request, pictures);
        }
    }

    /// Forgets a request, and returns its images.
    pub(crate) fn give(&mut self, request: u64) -> Vec<Arc<dyn Picture>> {
        self.live.remove(&request).unwrap_or_default()
    }

    /// Frees the patches at this arena offset. The hand has read them or never will.
    pub(crate) fn read(&mut self, patches: u32) {
        self.placed.remove(&patches);
    }
}

impl Member {
    /// Starts copying the patches of an image to the arena.
    pub(super) fn place(&mut self, request: u64, index: usize, image: ImageId) {
        let (orders, waker) = (self.orders.clone(), Arc::clone(&self.shared.waker));
        let placement = Placement::new(move |placed| {
            // A closed channel means that the thread has ended.
            if orders.send(Order::Placed { image, placed }).is_ok() {
                waker.wake();
            }
        });
        if let Some(picture) = self.pictures.live.get(&request).and_then(|all| all.get(index)) {
            picture.place(placement);
        }
    }

    /// Handles the outcome of a placement: the patches are in the arena, or could not be prepared.
    pub(super) fn placed(&mut self, image: ImageId, placed: Placed) {
        let Some(scheduler) = &mut self.scheduler else { return };
        match placed {
            Ok(payload) => self.give_patches(image, payload),
            Err(error) => {
                for (id, index) in scheduler.image_failed(image) {
                    let error = RequestError::Image { index, error: error.clone() };
                    self.end(id, FinishReason::Error(error));
                }
            }
        }
    }

    /// Informs the scheduler that the hand can read the patches of an image.
    pub(super) fn patches_there(&mut self, image: ImageId, payload: Arc<dyn Payload>) {
        let Some(scheduler) = &mut self.scheduler else { return };
        if scheduler.image_placed(image, payload.offset()) {
            self.pictures.placed.insert(payload.offset(), payload);
        }
    }

    /// Frees the arena space of patches that will not be read.
    pub(super) fn forget_unread(&mut self) {
        let mut unread = std::mem::take(&mut self.pictures.unread);
        if let Some(scheduler) = &mut self.scheduler {
            scheduler.take_unread_patches(&mut unread);
        }
        unread.drain(..).for_each(|patches| self.pictures.read(patches));
        self.pictures.unread = unread;
    }
}
