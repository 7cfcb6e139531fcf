//! The vision tower: the next image, and which of its layers a plan computes.

use std::sync::Arc;

use forebay_kvcache::{ImageId, ImageLease};
use forebay_protocol::TowerWork;

use super::prompt::PromptImage;
use super::{Images, Work, pages};
use crate::roster::Roster;
use crate::slab::Handle;
use crate::steps::{FlightImage, NewStep};

/// The tower's next work.
enum Next {
    Image(Handle, PromptImage),
    Nothing,
    /// The next request has to wait: too many image pages are held.
    NoRoom,
}

impl Images {
    /// Plans layers of the tower for the images that requests need, the most important request
    /// first. If `only` is set, plans images of that request only. Returns false if there are too
    /// few free pages for the output of the next image.
    pub(crate) fn plan(
        &mut self,
        roster: &mut Roster,
        only: Option<Handle>,
        step: &mut NewStep<'_>,
    ) -> bool {
        self.given_up.drain(..).for_each(|number| step.plan.give_up_image(number));
        self.look_again(roster, step);
        let mut budget = self.tower.budget.max(1);
        let mut first = true;
        while budget > 0 {
            let (handle, image) = match self.next_image(roster, only) {
                Next::Image(handle, image) => (handle, image),
                Next::Nothing => return true,
                Next::NoRoom => return false,
            };
            let cost = u64::from(image.span.grid.positions());
            let fit = u32::try_from(budget / cost).unwrap_or(u32::MAX);
            // Plan at least one layer, however large the image is.
            let most = if first { fit.max(1) } else { fit };
            let Some(work) = self.advance(&image, most) else { return true };
            first = false;
            budget = budget.saturating_sub(u64::from(work.end - work.first) * cost);
            step.flight.read.extend(work.patches);
            step.flight.towers.push(FlightImage { handle, end: image.end() });
            if work.end == self.tower.layers {
                self.finish(roster, work, image.id, step);
            } else {
                step.plan.push_image(work, pages(None));
            }
        }
        true
    }

    /// For each request without pages of its next image, checks again whether the image is on pages
    /// by now. If not, the image becomes wanted.
    fn look_again(&mut self, roster: &mut Roster, step: &mut NewStep<'_>) {
        let seeing: Vec<Handle> = self.seeing.values().copied().collect();
        for handle in seeing {
            let entry = &mut roster[handle];
            let (id, prompt) = (entry.request.id, Arc::clone(&entry.request.images));
            let Some(residence) = entry.residence.as_mut() else { continue };
            let (at, slot) = (residence.passed, residence.slot);
            let (image, lease) = (&prompt[at], &mut residence.images[at]);
            if lease.is_some() || self.work.contains_key(&image.id) {
                continue;
            }
            *lease = self.pool.find(image.id, self.pages_of(image.span.grid));
            if lease.is_some() {
                step.plan.write_image_span(slot, image.span, pages(lease.as_ref()));
                residence.last_step = step.flight.step;
            } else {
                self.want(image.id, id, at, step.events);
            }
        }
    }

    /// The next image for the tower, and the request that needs the image. Starts the image if the
    /// tower is idle.
    fn next_image(&mut self, roster: &mut Roster, only: Option<Handle>) -> Next {
        let mut next = None;
        for &handle in self.seeing.values().filter(|&&handle| only.is_none_or(|o| o == handle)) {
            let entry = &roster[handle];
            let Some(residence) = entry.residence.as_ref() else { continue };
            let ahead = entry.request.images.iter().zip(&residence.images).skip(residence.passed);
            for (nth, (&image, lease)) in ahead.enumerate() {
                match self.work.get(&image.id).filter(|_| lease.is_none()) {
                    Some(Work::Encoding { .. }) => return Next::Image(handle, image),
                    Some(Work::Placed { .. }) if next.is_none() => {
                        next = Some((handle, image, nth == 0));
                    }
                    Some(Work::Placed { .. } | Work::Wanted) | None => {}
                }
            }
        }
        let Some((handle, image, waits)) = next else { return Next::Nothing };
        if self.start(&image) {
            return Next::Image(handle, image);
        }
        if !waits {
            return Next::Nothing;
        }
        self.free_ahead(roster);
        if self.start(&image) { Next::Image(handle, image) } else { Next::NoRoom }
    }

    /// Moves an image into the tower, and reserves pages for its output. Returns false if there are
    /// too few free pages. Without this reservation, two images in progress could wait for each
    /// other's pages.
    fn start(&mut self, image: &PromptImage) -> bool {
        let Some(pages) = self.pool.allocate(self.pages_of(image.span.grid)) else {
            return false;
        };
        let number = self.number();
        if let Some(work) = self.work.get_mut(&image.id)
            && let Work::Placed { patches } = *work
        {
            *work = Work::Encoding { number, end: 0, patches, pages };
            return true;
        }
        self.pool.release(pages);
        false
    }

    /// Advances the image in the tower by up to `most` layers. `None`: not even one fits.
    fn advance(&mut self, image: &PromptImage, most: u32) -> Option<TowerWork> {
        let Some(Work::Encoding { number, end, patches, .. }) = self.work.get_mut(&image.id) else {
            return None;
        };
        let (first, grid) = (*end, image.span.grid);
        *end = first.saturating_add(most).min(self.tower.layers);
        let work = TowerWork {
            image: *number,
            first,
            end: *end,
            grid,
            patches: (first == 0).then_some(*patches),
        };
        self.counters.position_layers +=
            u64::from(grid.positions()) * u64::from(work.end - work.first);
        (work.end > first).then_some(work)
    }

    /// A new number for the next image in the tower. It fits into 31 bits, because plans hold
    /// signed words.
    fn number(&mut self) -> u32 {
        let number = self.next_number;
        self.next_number = (number + 1) & (u32::MAX >> 1);
        number
    }

    /// Notes that the last layers of an image are planned. Requests that need the image get its
    /// pages.
    fn finish(
        &mut self,
        roster: &mut Roster,
        work: TowerWork,
        id: ImageId,
        step: &mut NewStep<'_>,
    ) {
        let Some(Work::Encoding { pages: done, .. }) = self.work.remove(&id) else { return };
        self.counters.encoded += 1;
        self.pool.publish(&done, id);
        step.plan.push_image(work, pages(Some(&done)));
        for handle in self.seeing.values() {
            let entry = &mut roster[*handle];
            let prompt = Arc::clone(&entry.request.images);
            let Some(residence) = entry.residence.as_mut() else { continue };
            let slots = prompt.iter().zip(&mut residence.images).skip(residence.passed);
            for (image, lease) in slots.filter(|(image, lease)| image.id == id && lease.is_none()) {
                step.plan.write_image_span(residence.slot, image.span, pages(Some(&done)));
                *lease = Some(self.pool.join(&done));
                residence.last_step = step.flight.step;
            }
        }
        self.pool.release(done);
    }

    /// Frees the pages of all images except each request's next one. Their content stays until the
    /// room is needed.
    fn free_ahead(&mut self, roster: &mut Roster) {
        let seeing: Vec<Handle> = self.seeing.values().copied().collect();
        for handle in seeing {
            let Some(residence) = roster[handle].residence.as_mut() else { continue };
            let last_step = residence.last_step;
            let ahead = residence.images.iter_mut().skip(residence.passed + 1);
            let images: Vec<ImageLease> = ahead.filter_map(Option::take).collect();
            images.into_iter().for_each(|lease| self.retire(last_step, lease));
        }
    }
}
