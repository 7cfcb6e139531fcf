//! Images in prompts: the needed images, their turns in the vision tower, and the lives of their
//! pages.
//!
//! An image that a resident needs and that is on no image page is *wanted*, and an event says so.
//! The caller then puts its patches where the hand reads them ([`Scheduler::image_placed`]). Then
//! it waits for the tower, which computes one image at a time, some layers a step
//! ([`Tower::budget`]). So no stream waits for a whole image. The last layers write the output to
//! image pages, which stay as long as there is room. The next request with that image needs neither
//! patches nor tower.
//!
//! A request has rows up to the first of its images that is not there yet. It leases the pages of
//! those ahead of it, and gives them back as soon as its rows are past them. If pages run short,
//! the image that a request waits for takes the pages of images that no request has reached yet. So
//! two requests never wait for each other.
//!
//! After the hand's death there is neither an image nor a page: all are wanted again.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_kvcache::{BlockHash, ImageId, ImageLease, ImagePool, Namer};
use forebay_protocol::{Grid, IMAGE_SPAN_WORDS, ImageSpan, StepPlan, TowerWork};

use crate::request::{Entry, Key, Residence};
use crate::{Event, FlightImage, Handle, ImageStats, Retired, Scheduler, Tower};

/// An image of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptImage {
    /// The identity of the image.
    pub id: ImageId,
    /// The positions at which the image stands.
    pub span: ImageSpan,
}

impl PromptImage {
    /// The images of a prompt in the order of their positions. Each comes with its first position
    /// and its grid. None overlaps another.
    #[must_use]
    pub fn place(images: impl IntoIterator<Item = (ImageId, u32, Grid)>) -> Arc<[Self]> {
        let mut saved = 0;
        let placed = images.into_iter().map(|(id, position, grid)| {
            let rope = position - saved;
            saved += grid.positions() - grid.reach();
            Self { id, span: ImageSpan { position, grid, rope } }
        });
        placed.collect()
    }

    /// The `images` that overlap the block of `size` positions from `start` on, in the form for
    /// block names.
    pub fn within(
        images: &[Self],
        start: u32,
        size: u32,
    ) -> impl Iterator<Item = (u32, ImageId, u32)> {
        let from = images.partition_point(|image| image.end() <= start);
        let met = images[from..].iter().take_while(move |image| image.span.position < start + size);
        met.map(move |image| {
            let first = image.span.position.max(start);
            (first - start, image.id, first - image.span.position)
        })
    }

    /// The names of the full blocks at the beginning of `tokens`, for requests with this salt.
    /// `images` are the images at these positions.
    #[must_use]
    pub fn chain(
        namer: &Namer,
        salt: u64,
        tokens: &[i32],
        images: &[Self],
        page_size: usize,
    ) -> Vec<BlockHash> {
        let mut parent = namer.root(salt);
        let name = |(number, block): (usize, &[i32])| {
            let within = Self::within(images, (number * page_size) as u32, page_size as u32);
            parent = namer.child_with(parent, block, within);
            parent
        };
        tokens.chunks_exact(page_size).enumerate().map(name).collect()
    }

    /// The position behind the image.
    #[must_use]
    pub fn end(&self) -> u32 {
        self.span.position + self.span.grid.positions()
    }
}

/// The largest number of words of a plan that names the places of images and their pages.
#[must_use]
pub fn image_words(images: &[PromptImage]) -> u64 {
    // A page has one position at least.
    let of = |image: &PromptImage| u64::from(image.span.grid.positions()) + IMAGE_SPAN_WORDS as u64;
    images.iter().map(of).sum()
}

/// Work that is left before a needed image is on pages.
#[derive(Debug)]
enum Work {
    /// The patches of the image are not there.
    Wanted,
    /// The patches of the image are at this byte of the arena.
    Placed { patches: u32 },
    /// The tower has computed some of its layers.
    Encoding { number: u32, end: u32, patches: u32, pages: ImageLease },
}

/// The images of a replica.
#[derive(Debug)]
pub(crate) struct Images {
    tower: Tower,
    pool: ImagePool,
    work: BTreeMap<ImageId, Work>,
    /// Residents that have images which are not behind them.
    seeing: BTreeMap<Key, Handle>,
    next_number: u32,
    /// Numbers of images that the hand can drop, and does not know yet.
    given_up: Vec<u32>,
    /// The places of patches that no plan will read.
    unread: Vec<u32>,
    counters: ImageStats,
}

impl Images {
    pub(crate) fn new(tower: Tower) -> Self {
        Self {
            pool: ImagePool::new(tower.pages),
            tower,
            work: BTreeMap::new(),
            seeing: BTreeMap::new(),
            next_number: 0,
            given_up: Vec::new(),
            unread: Vec::new(),
            counters: ImageStats::default(),
        }
    }

    fn pages_of(&self, grid: Grid) -> u32 {
        grid.positions().div_ceil(self.tower.page_tokens)
    }

    /// Forgets the device's state and each request's part of it. `read`: patches that plans in
    /// flight have named.
    pub(crate) fn hand_died(&mut self, read: impl Iterator<Item = u32>) {
        debug_assert!(self.work.is_empty() && self.seeing.is_empty(), "nobody needs anything");
        self.unread.extend(read);
        self.given_up.clear();
        self.pool.flush();
    }

    pub(crate) fn flush(&mut self) {
        self.pool.flush();
    }

    pub(crate) fn release(&mut self, lease: ImageLease) {
        self.pool.release(lease);
    }

    pub(crate) fn size(&self) -> u32 {
        self.pool.size()
    }

    pub(crate) fn leases(&self, page: u32) -> u32 {
        self.pool.leases(page)
    }

    /// The pages of the image in the tower.
    pub(crate) fn in_work(&self) -> impl Iterator<Item = &ImageLease> {
        self.work.values().filter_map(|work| match work {
            Work::Encoding { pages, .. } => Some(pages),
            Work::Wanted | Work::Placed { .. } => None,
        })
    }

    /// The number of residents with images that are not behind them.
    pub(crate) fn seeing(&self) -> usize {
        self.seeing.len()
    }

    fn want(&mut self, image: ImageId, id: u64, index: usize, events: &mut Vec<Event>) {
        self.work.insert(image, Work::Wanted);
        self.counters.wanted += 1;
        events.push(Event::ImageWanted { id, index, image });
    }

    /// The next layers of the image in the tower, at most so many. `None`: not one.
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

    /// The name for the next image in the tower. It fits into 31 bits, as everything in a plan
    /// does.
    fn number(&mut self) -> u32 {
        let number = self.next_number;
        self.next_number = (number + 1) & (u32::MAX >> 1);
        number
    }
}

/// A leased image in a plan, or none.
fn pages(lease: Option<&ImageLease>) -> impl ExactSizeIterator<Item = u32> {
    let pages: Vec<u32> = lease.into_iter().flat_map(ImageLease::pages).collect();
    pages.into_iter()
}

impl Entry {
    /// True if the request waits for an image.
    fn needs(&self, image: ImageId) -> bool {
        let lacks = |residence: &Residence| {
            let ahead = self.request.images.iter().zip(&residence.images).skip(residence.passed);
            ahead.into_iter().any(|(own, lease)| own.id == image && lease.is_none())
        };
        self.state.residence().is_some_and(lacks)
    }

    /// The position before which rows must end now: that of the first image that is not there.
    fn seen_until(&self) -> u32 {
        let images = &self.request.images;
        let residence = self.state.residence();
        let missing = residence.and_then(|residence| {
            let ahead = residence.images.iter().enumerate().skip(residence.passed);
            ahead.filter(|(_, lease)| lease.is_none()).map(|(at, _)| at).next()
        });
        missing.map_or(u32::MAX, |at| images[at].span.position)
    }
}

impl Scheduler {
    /// The largest number of positions that images allow for one row of a request now.
    pub(crate) fn visible(&self, handle: Handle) -> u32 {
        let entry = &self.requests[handle];
        if entry.request.images.is_empty() {
            return u32::MAX;
        }
        entry.seen_until().saturating_sub(entry.computed)
    }

    /// True if a resident has images that are not behind it.
    pub(crate) fn is_seeing(&self, handle: Handle) -> bool {
        let key = &self.requests[handle].key;
        self.images.as_ref().is_some_and(|images| images.seeing.contains_key(key))
    }

    /// Gives a resident's images to the plan. Images that are nowhere become wanted.
    pub(crate) fn see_images(
        &mut self,
        handle: Handle,
        residence: &mut Residence,
        plan: &mut StepPlan,
        events: &mut Vec<Event>,
    ) {
        let entry = &self.requests[handle];
        let Some(images) = self.images.as_mut().filter(|_| !entry.request.images.is_empty()) else {
            return;
        };
        for (index, image) in entry.request.images.iter().enumerate() {
            let behind = image.end() <= entry.computed;
            let count = images.pages_of(image.span.grid);
            let lease = if behind { None } else { images.pool.find(image.id, count) };
            plan.write_image_span(residence.slot, image.span, pages(lease.as_ref()));
            if behind {
                images.counters.in_prefix += 1;
                residence.passed += 1;
            } else if lease.is_some() {
                images.counters.in_pages += 1;
            } else if !images.work.contains_key(&image.id) {
                images.want(image.id, entry.request.id, index, events);
            }
            residence.images.push(lease);
        }
        if residence.passed < residence.images.len() {
            images.seeing.insert(entry.key, handle);
        }
    }

    /// Notes that the patches of a wanted image are in the arena. False: no request needs them any
    /// more.
    pub fn image_placed(&mut self, image: ImageId, patches: u32) -> bool {
        let Some(images) = &mut self.images else { return false };
        match images.work.get_mut(&image) {
            Some(work @ Work::Wanted) => {
                *work = Work::Placed { patches };
                true
            }
            Some(Work::Placed { .. } | Work::Encoding { .. }) | None => false,
        }
    }

    /// Ends every request that waits for an image, because the image can't be had. Ends come
    /// without an event. Gives the ids of the requests, and the number of the image among each
    /// request's.
    pub fn image_failed(&mut self, image: ImageId) -> Vec<(u64, usize)> {
        let needs = |handle: &&Handle| self.requests[**handle].needs(image);
        let Some(images) = self.images.as_ref().filter(|images| {
            // Somebody else may have placed it meanwhile.
            matches!(images.work.get(&image), Some(Work::Wanted))
        }) else {
            return Vec::new();
        };
        let waiting: Vec<Handle> = images.seeing.values().filter(needs).copied().collect();
        let ended = waiting.into_iter().map(|handle| {
            let request = &self.requests[handle].request;
            let index = request.images.iter().position(|own| own.id == image);
            let told = (request.id, index.unwrap_or_default());
            self.remove(handle);
            told
        });
        ended.collect()
    }

    /// Appends the places of patches that no plan will read any more, and for which
    /// [`Event::ImageRead`] never comes.
    pub fn take_unread_patches(&mut self, into: &mut Vec<u32>) {
        if let Some(images) = &mut self.images {
            into.append(&mut images.unread);
        }
    }

    /// Plans layers of the tower for those who need it, the most important first, or for one
    /// request alone. False: the image that is next has no room for its output.
    pub(crate) fn plan_images(
        &mut self,
        only: Option<Handle>,
        plan: &mut StepPlan,
        events: &mut Vec<Event>,
    ) -> bool {
        let Some(images) = &mut self.images else { return true };
        images.given_up.drain(..).for_each(|number| plan.give_up_image(number));
        let (layers, mut budget) = (images.tower.layers, images.tower.budget.max(1));
        self.look_again(plan, events);
        let mut first = true;
        while budget > 0 {
            let (handle, image) = match self.next_image(only) {
                Next::Image(handle, image) => (handle, image),
                Next::Nothing => return true,
                Next::NoRoom => return false,
            };
            let cost = u64::from(image.span.grid.positions());
            let fit = u32::try_from(budget / cost).unwrap_or(u32::MAX);
            // One layer is the least, however large the image is.
            let most = if first { fit.max(1) } else { fit };
            let work = self.images.as_mut().and_then(|images| images.advance(&image, most));
            let Some(work) = work else { return true };
            first = false;
            budget = budget.saturating_sub(u64::from(work.end - work.first) * cost);
            self.building.read.extend(work.patches);
            self.building.towers.push(FlightImage { handle, end: image.end() });
            if work.end == layers {
                self.image_done(work, image.id, plan);
            } else {
                plan.push_image(work, pages(None));
            }
        }
        true
    }

    /// Whoever has come to an image whose pages were given up meanwhile looks for it again.
    fn look_again(&mut self, plan: &mut StepPlan, events: &mut Vec<Event>) {
        let Some(images) = &mut self.images else { return };
        let seeing: Vec<Handle> = images.seeing.values().copied().collect();
        for handle in seeing {
            let entry = &mut self.requests[handle];
            let (id, prompt) = (entry.request.id, Arc::clone(&entry.request.images));
            let Some(residence) = entry.state.residence_mut() else { continue };
            let (at, slot) = (residence.passed, residence.slot);
            let (image, lease) = (&prompt[at], &mut residence.images[at]);
            if lease.is_some() || images.work.contains_key(&image.id) {
                continue;
            }
            *lease = images.pool.find(image.id, images.pages_of(image.span.grid));
            if lease.is_some() {
                plan.write_image_span(slot, image.span, pages(lease.as_ref()));
                residence.last_step = self.building.step;
            } else {
                images.want(image.id, id, at, events);
            }
        }
    }

    /// The image whose layers are next, for the request that needs it; it is in the tower then.
    fn next_image(&mut self, only: Option<Handle>) -> Next {
        let Some(images) = &self.images else { return Next::Nothing };
        let mut next = None;
        for &handle in images.seeing.values().filter(|&&handle| only.is_none_or(|o| o == handle)) {
            let entry = &self.requests[handle];
            let Some(residence) = entry.state.residence() else { continue };
            let ahead = entry.request.images.iter().zip(&residence.images).skip(residence.passed);
            for (nth, (&image, lease)) in ahead.enumerate() {
                match images.work.get(&image.id).filter(|_| lease.is_none()) {
                    Some(Work::Encoding { .. }) => return Next::Image(handle, image),
                    Some(Work::Placed { .. }) if next.is_none() => {
                        next = Some((handle, image, nth == 0));
                    }
                    Some(Work::Placed { .. } | Work::Wanted) | None => {}
                }
            }
        }
        let Some((handle, image, waits)) = next else { return Next::Nothing };
        if self.start_image(&image) {
            return Next::Image(handle, image);
        }
        if waits {
            self.free_images_ahead();
            return if self.start_image(&image) {
                Next::Image(handle, image)
            } else {
                Next::NoRoom
            };
        }
        Next::Nothing
    }

    /// Reserves pages for an image's output. An image that began without pages could wait for
    /// another that does the same.
    fn start_image(&mut self, image: &PromptImage) -> bool {
        let Some(images) = &mut self.images else { return false };
        let Some(pages) = images.pool.allocate(images.pages_of(image.span.grid)) else {
            return false;
        };
        let number = images.number();
        if let Some(work) = images.work.get_mut(&image.id)
            && let Work::Placed { patches } = *work
        {
            *work = Work::Encoding { number, end: 0, patches, pages };
            return true;
        }
        images.pool.release(pages);
        false
    }

    /// Notes that the last layers of an image are planned. Requests that need the image get its
    /// pages.
    fn image_done(&mut self, work: TowerWork, id: ImageId, plan: &mut StepPlan) {
        let Some(images) = &mut self.images else { return };
        let Some(Work::Encoding { pages: done, .. }) = images.work.remove(&id) else { return };
        images.counters.encoded += 1;
        images.pool.publish(&done, id);
        plan.push_image(work, pages(Some(&done)));
        for handle in images.seeing.values() {
            let entry = &mut self.requests[*handle];
            let prompt = Arc::clone(&entry.request.images);
            let Some(residence) = entry.state.residence_mut() else { continue };
            let slots = prompt.iter().zip(&mut residence.images).skip(residence.passed);
            for (image, lease) in slots.filter(|(image, lease)| image.id == id && lease.is_none()) {
                plan.write_image_span(residence.slot, image.span, pages(Some(&done)));
                *lease = Some(images.pool.join(&done));
                residence.last_step = self.building.step;
            }
        }
        images.pool.release(done);
    }

    /// Takes back the pages of all images except each request's next one. They stay in the pool
    /// until the room is needed.
    fn free_images_ahead(&mut self) {
        let Some(images) = &self.images else { return };
        let seeing: Vec<Handle> = images.seeing.values().copied().collect();
        for handle in seeing {
            let Some(residence) = self.requests[handle].state.residence_mut() else { continue };
            let last_step = residence.last_step;
            let ahead = residence.images.iter_mut().skip(residence.passed + 1);
            let images: Vec<ImageLease> = ahead.filter_map(Option::take).collect();
            if !images.is_empty() {
                self.retire_until(last_step, Retired { images, ..Retired::default() });
            }
        }
    }

    /// Notes that a row of the plan has reached the request's position `computed`. Images behind it
    /// are not needed after the step.
    pub(crate) fn pass_images(&mut self, handle: Handle) {
        let entry = &mut self.requests[handle];
        let Some(images) = self.images.as_mut().filter(|_| !entry.request.images.is_empty()) else {
            return;
        };
        let (certain, prompt) = (entry.certain(), Arc::clone(&entry.request.images));
        let Some(residence) = entry.state.residence_mut() else { return };
        while prompt.get(residence.passed).is_some_and(|image| image.end() <= certain) {
            let lease = residence.images[residence.passed].take();
            residence.passed += 1;
            let images = lease.into_iter().collect();
            self.building.retired.push(Retired { images, ..Retired::default() });
        }
        if residence.passed == prompt.len() {
            images.seeing.remove(&entry.key);
        }
    }

    /// A request loses its slot: what only it needed is not made any more.
    pub(crate) fn stop_seeing(&mut self, handle: Handle) {
        let entry = &self.requests[handle];
        let Some(images) = &mut self.images else { return };
        if images.seeing.remove(&entry.key).is_none() {
            return;
        }
        for image in entry.request.images.iter() {
            let needs = |other: &Handle| self.requests[*other].needs(image.id);
            if !images.seeing.values().any(needs) {
                images.drop_work(image.id);
            }
        }
    }

    /// Forgets the images of a request whose numbers were not finite: they may be the reason.
    pub(crate) fn forget_images(&mut self, handle: Handle) {
        let Some(images) = &mut self.images else { return };
        for image in self.requests[handle].request.images.iter() {
            let pages = images.pages_of(image.span.grid);
            images.pool.forget(image.id, pages);
        }
    }

    /// The least important request with image pages, or with an image in the tower. One request is
    /// excluded.
    pub(crate) fn holds_images(&self, except: Handle) -> Option<Handle> {
        let images = self.images.as_ref()?;
        let encoding =
            |image: &PromptImage| matches!(images.work.get(&image.id), Some(Work::Encoding { .. }));
        images.seeing.values().rev().copied().find(|&handle| {
            let entry = &self.requests[handle];
            let leases = entry.state.residence().map_or(&[][..], |residence| &residence.images);
            let holds = leases.iter().any(Option::is_some);
            handle != except && (holds || entry.request.images.iter().any(encoding))
        })
    }

    pub(crate) fn image_stats(&self) -> ImageStats {
        let Some(images) = &self.images else { return ImageStats::default() };
        let counts = images.pool.counts();
        ImageStats {
            pages: images.pool.size() as usize,
            pages_held: counts.held as usize,
            pages_cached: counts.cached as usize,
            waiting: images.work.len(),
            ..images.counters
        }
    }
}

/// The tower's next work.
enum Next {
    Image(Handle, PromptImage),
    Nothing,
    /// The next request waits, and too many pages are held.
    NoRoom,
}
