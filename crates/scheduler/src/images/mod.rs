//! Images in prompts: the needed images, their turns in the vision tower, and the lifetimes of
//! their pages.
//!
//! An image is *wanted* if a resident needs it and it is on no image page. An event reports this.
//! The caller then puts its patches where the hand reads them ([`crate::Scheduler::image_placed`]).
//! The image then waits for the tower. The tower computes one image at a time, some layers per step
//! ([`Tower::budget`]), so no stream waits for a whole image. The last layers write the output to
//! image pages, which stay as long as there is room. The next request with that image needs neither
//! patches nor tower.
//!
//! A request has rows up to its first image that is not ready. It leases the pages of its next
//! images, and gives them back as soon as its rows are past them. If pages run short, the image
//! that a request waits for takes the pages of images that no request has reached yet. So two
//! requests never wait for each other.
//!
//! After the hand's death no image is on a page: all are wanted again.
//!
//! - `prompt`: the images of a prompt; `tower`: the next layers.

pub(crate) mod prompt;
mod tower;

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_kvcache::{ImageId, ImageLease, ImagePool};
use forebay_protocol::Grid;

use crate::config::Tower;
use crate::entry::{Entry, Residence};
use crate::event::{Event, ImageStats};
use crate::request::Key;
use crate::retirement::{Retirement, check_leases};
use crate::roster::Roster;
use crate::slab::Handle;
use crate::steps::NewStep;
use prompt::PromptImage;

/// The tower settings of a model without a tower.
const NONE: Tower = Tower { layers: 0, pages: 0, page_tokens: 1, budget: 0, whole: false };

/// The state of a needed image that is not on pages yet.
#[derive(Debug)]
enum Work {
    /// The patches of the image are not in the arena yet.
    Wanted,
    /// The patches of the image are at this offset in the arena.
    Placed { patches: u32 },
    /// The image is in the tower. Plans have been made for the layers before `end`.
    Encoding { number: u32, end: u32, patches: u32, pages: ImageLease },
}

/// The images of a replica.
#[derive(Debug)]
pub(crate) struct Images {
    tower: Tower,
    pool: ImagePool,
    work: BTreeMap<ImageId, Work>,
    /// Residents with images that their rows have not passed yet.
    seeing: BTreeMap<Key, Handle>,
    next_number: u32,
    /// The numbers under which the hand knows images that the next plan discards.
    given_up: Vec<u32>,
    /// Arena offsets of patches that no plan will read.
    unread: Vec<u32>,
    pub(crate) retired: Retirement<ImageLease>,
    counters: ImageStats,
}

impl Images {
    /// Creates the state without images. `None`: the model takes no images.
    pub(crate) fn new(tower: Option<Tower>) -> Self {
        let tower = tower.unwrap_or(NONE);
        Self {
            pool: ImagePool::new(tower.pages),
            tower,
            work: BTreeMap::new(),
            seeing: BTreeMap::new(),
            next_number: 0,
            given_up: Vec::new(),
            unread: Vec::new(),
            retired: Retirement::default(),
            counters: ImageStats::default(),
        }
    }

    fn pages_of(&self, grid: Grid) -> u32 {
        grid.positions().div_ceil(self.tower.page_tokens)
    }

    /// Forgets all images on pages, because the hand died. No request may need an image. `read`
    /// contains the arena offsets of the patches that plans in flight have named.
    pub(crate) fn hand_died(&mut self, read: Vec<u32>) {
        debug_assert!(self.work.is_empty() && self.seeing.is_empty(), "nobody needs anything");
        self.unread.extend(read);
        self.given_up.clear();
        self.pool.flush();
    }

    /// Forgets the images on unused pages.
    pub(crate) fn flush(&mut self) {
        self.pool.flush();
    }

    fn want(&mut self, image: ImageId, id: u64, index: usize, events: &mut Vec<Event>) {
        self.work.insert(image, Work::Wanted);
        self.counters.wanted += 1;
        events.push(Event::ImageWanted { id, index, image });
    }

    /// Drops the work for an image that is not on pages and that no request needs any more.
    fn drop_work(&mut self, image: ImageId) {
        match self.work.remove(&image) {
            Some(Work::Placed { patches }) => self.unread.push(patches),
            Some(Work::Encoding { number, end, patches, pages }) => {
                if end == 0 {
                    self.unread.push(patches);
                } else {
                    self.given_up.push(number);
                }
                // No plan has named the pages.
                self.pool.release(pages);
            }
            Some(Work::Wanted) | None => {}
        }
    }

    /// True if a resident has not passed all its images.
    pub(crate) fn are_ahead(&self, entry: &Entry) -> bool {
        self.seeing.contains_key(&entry.key)
    }

    /// Registers a resident's images. Those that are neither on pages nor in progress become
    /// wanted.
    pub(crate) fn begin(&mut self, handle: Handle, entry: &mut Entry, step: &mut NewStep<'_>) {
        let Some(residence) = &mut entry.residence else { return };
        for (index, image) in entry.request.images.iter().enumerate() {
            let behind = image.end() <= entry.computed;
            let count = self.pages_of(image.span.grid);
            let lease = if behind { None } else { self.pool.find(image.id, count) };
            step.plan.write_image_span(residence.slot, image.span, pages(lease.as_ref()));
            if behind {
                self.counters.in_prefix += 1;
                residence.passed += 1;
            } else if lease.is_some() {
                self.counters.in_pages += 1;
            } else if !self.work.contains_key(&image.id) {
                self.want(image.id, entry.request.id, index, step.events);
            }
            residence.images.push(lease);
        }
        if residence.passed < residence.images.len() {
            self.seeing.insert(entry.key, handle);
        }
    }

    /// Records that the patches of a wanted image are in the arena. Returns false if no request
    /// needs them any more.
    pub(crate) fn placed(&mut self, image: ImageId, patches: u32) -> bool {
        match self.work.get_mut(&image) {
            Some(work @ Work::Wanted) => {
                *work = Work::Placed { patches };
                true
            }
            Some(Work::Placed { .. } | Work::Encoding { .. }) | None => false,
        }
    }

    /// The requests that wait for the patches of an image, each with the index of the image in that
    /// request.
    pub(crate) fn who_wants(&self, image: ImageId, roster: &Roster) -> Vec<(Handle, usize)> {
        // The patches may have arrived for another request meanwhile.
        if !matches!(self.work.get(&image), Some(Work::Wanted)) {
            return Vec::new();
        }
        let wants = |&handle: &Handle| {
            let entry = &roster[handle];
            let index = entry.request.images.iter().position(|own| own.id == image);
            needs(entry, image).then_some((handle, index.unwrap_or_default()))
        };
        self.seeing.values().filter_map(wants).collect()
    }

    /// Appends the arena offsets of patches that no plan will read any more.
    pub(crate) fn take_unread(&mut self, into: &mut Vec<u32>) {
        into.append(&mut self.unread);
    }

    /// The image that contains the position, which may be the image's first; `None`: there is no
    /// such image, or rows may end inside images.
    fn whole_at<'a>(&self, entry: &'a Entry, position: u32) -> Option<&'a PromptImage> {
        let images = if self.tower.whole { &entry.request.images[..] } else { &[] };
        let next = images.partition_point(|image| image.end() <= position);
        images.get(next).filter(|image| image.span.position <= position)
    }

    /// The largest length of a request's next row if `budget` tokens are left. If the row begins
    /// with an image that must lie in one row, it may contain the whole image, even beyond
    /// `budget`.
    pub(crate) fn row_limit(&self, entry: &Entry, budget: u32) -> u32 {
        let image = self.whole_at(entry, entry.computed);
        image.map_or(budget, |image| budget.max(image.end() - entry.computed))
    }

    /// The largest length, at most `length`, with which the next row does not end inside an image.
    pub(crate) fn length_to_image(&self, entry: &Entry, length: u32) -> u32 {
        let end = entry.computed + length;
        let image = self.whole_at(entry, end).filter(|image| image.span.position < end);
        image.map_or(length, |image| image.span.position.saturating_sub(entry.computed))
    }

    /// Notes that a row of the step under construction has reached the request's position
    /// `computed`. Images before that position are not needed after the step.
    pub(crate) fn pass(&mut self, entry: &mut Entry, step: u64) {
        if entry.request.images.is_empty() {
            return;
        }
        let (certain, prompt) = (entry.certain(), Arc::clone(&entry.request.images));
        let Some(residence) = entry.residence.as_mut() else { return };
        while prompt.get(residence.passed).is_some_and(|image| image.end() <= certain) {
            let lease = residence.images[residence.passed].take();
            residence.passed += 1;
            lease.into_iter().for_each(|lease| self.retire(step, lease));
        }
        if residence.passed == prompt.len() {
            self.seeing.remove(&entry.key);
        }
    }

    /// Stops the work that only this request needed, because the request has lost its slot.
    pub(crate) fn stop(&mut self, entry: &Entry, roster: &Roster) {
        if self.seeing.remove(&entry.key).is_none() {
            return;
        }
        for image in entry.request.images.iter() {
            let needs = |other: &Handle| needs(&roster[*other], image.id);
            if !self.seeing.values().any(needs) {
                self.drop_work(image.id);
            }
        }
    }

    /// Forgets the images of a request whose logits were not finite: the images may be the cause.
    pub(crate) fn forget(&mut self, entry: &Entry) {
        for image in entry.request.images.iter() {
            let pages = self.pages_of(image.span.grid);
            self.pool.forget(image.id, pages);
        }
    }

    /// The least important request, other than `except`, with image pages or with an image in the
    /// tower.
    pub(crate) fn holder(&self, except: Handle, roster: &Roster) -> Option<Handle> {
        let encoding =
            |image: &PromptImage| matches!(self.work.get(&image.id), Some(Work::Encoding { .. }));
        self.seeing.values().rev().copied().find(|&handle| {
            let entry = &roster[handle];
            let leases = entry.residence.as_ref().map_or(&[][..], |residence| &residence.images);
            let holds = leases.iter().any(Option::is_some);
            handle != except && (holds || entry.request.images.iter().any(encoding))
        })
    }

    /// Retires a lease until the result of `last_step` is applied.
    pub(crate) fn retire(&mut self, last_step: u64, lease: ImageLease) {
        if let Some(lease) = self.retired.retire(last_step, lease) {
            self.pool.release(lease);
        }
    }

    /// Frees the image pages that no step in flight names.
    pub(crate) fn free_retired(&mut self) {
        self.retired.take_returned().into_iter().for_each(|lease| self.pool.release(lease));
    }

    pub(crate) fn stats(&self) -> ImageStats {
        let counts = self.pool.counts();
        ImageStats {
            pages: self.pool.size() as usize,
            pages_held: counts.held as usize,
            pages_cached: counts.cached as usize,
            waiting: self.work.len(),
            ..self.counters
        }
    }

    /// Checks that each lease of image pages belongs to a resident or to an image in the tower, or
    /// is retired.
    pub(crate) fn check(&self, roster: &Roster) -> Result<(), String> {
        let residents = || roster.requests.iter().filter_map(|(_, entry)| entry.residence.as_ref());
        let in_work = self.work.values().filter_map(|work| match work {
            Work::Encoding { pages, .. } => Some(pages),
            Work::Wanted | Work::Placed { .. } => None,
        });
        let owned = residents()
            .flat_map(|residence| residence.images.iter().flatten())
            .chain(self.retired.iter())
            .chain(in_work);
        let owned = owned.flat_map(ImageLease::pages);
        check_leases("image page", owned, self.pool.size(), |page| self.pool.leases(page))?;
        let ahead = |residence: &&Residence| residence.passed < residence.images.len();
        let (listed, seeing) = (self.seeing.len(), residents().filter(ahead).count());
        if listed == seeing {
            Ok(())
        } else {
            Err(format!("seeing: {listed} listed, {seeing} exist"))
        }
    }
}

/// The pages of a leased image, in the form for a plan; empty if `lease` is `None`.
fn pages(lease: Option<&ImageLease>) -> impl ExactSizeIterator<Item = u32> {
    let pages: Vec<u32> = lease.into_iter().flat_map(ImageLease::pages).collect();
    pages.into_iter()
}

/// True if the request waits for an image.
fn needs(entry: &Entry, image: ImageId) -> bool {
    let lacks = |residence: &Residence| {
        let ahead = entry.request.images.iter().zip(&residence.images).skip(residence.passed);
        ahead.into_iter().any(|(own, lease)| own.id == image && lease.is_none())
    };
    entry.residence.as_ref().is_some_and(lacks)
}

/// The largest number of positions that a request's next row may have because of its images.
pub(crate) fn visible(entry: &Entry) -> u32 {
    // Rows end before the first image that is not on pages.
    let missing = entry.residence.as_ref().and_then(|residence| {
        let ahead = residence.images.iter().enumerate().skip(residence.passed);
        ahead.filter(|(_, lease)| lease.is_none()).map(|(at, _)| at).next()
    });
    missing.map_or(u32::MAX, |at| {
        entry.request.images[at].span.position.saturating_sub(entry.computed)
    })
}
