//! The vision tower of the fake worker. Its output for an image contains the image's id. So the
//! tests find a row that reads a wrong, stale or not yet computed image page.

use std::collections::BTreeMap;

use forebay_protocol::{Grid, ImageSpan, StepPlan};
use forebay_scheduler::{ImageId, PromptImage, Request, SchedulerConfig, Tower};

use crate::device::{Death, VOCAB};
use crate::harness::{Harness, config, request};

/// An image that kills the worker.
pub(crate) const KILL_IMAGE: ImageId = ImageId(1 << 100);

/// The token that the worker reads in place of a position of an image.
fn read_image(image: ImageId, position: u32) -> i32 {
    let hash = image.0.wrapping_mul(31).wrapping_add(u128::from(position)) % 97;
    VOCAB + 100 + hash as i32
}

/// Replaces the prompt's tokens at images by tokens that depend on the image.
pub(crate) fn read_images(tokens: &mut [i32], images: &[PromptImage]) {
    for image in images {
        let start = image.span.position as usize;
        for (position, token) in (0..).zip(&mut tokens[start..image.end() as usize]) {
            *token = read_image(image.id, position);
        }
    }
}

/// Patches by their offset in the arena, and the images that the scheduler requested.
#[derive(Default)]
pub(crate) struct Arena {
    pub(crate) wanted: Vec<ImageId>,
    placed: BTreeMap<u32, ImageId>,
    next: u32,
}

impl Arena {
    pub(crate) fn put(&mut self, image: ImageId) -> u32 {
        self.next += 4;
        self.placed.insert(self.next, image);
        self.next
    }

    /// Frees the arena space of an image's patches. Each offset may be freed once.
    pub(crate) fn free(&mut self, offset: u32) {
        assert!(self.placed.remove(&offset).is_some(), "nothing is at {offset}");
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.placed.is_empty()
    }
}

/// The images of a slot.
#[derive(Clone, Default)]
pub(crate) struct SlotImages {
    /// The images of the request, as it was submitted.
    truth: Vec<PromptImage>,
    /// The images that plans named for this slot.
    spans: BTreeMap<u32, (ImageSpan, Vec<u32>)>,
}

impl SlotImages {
    pub(crate) fn new(images: &[PromptImage]) -> Self {
        Self { truth: images.to_vec(), spans: BTreeMap::new() }
    }

    pub(crate) fn truth(&self) -> &[PromptImage] {
        &self.truth
    }

    pub(crate) fn write(&mut self, span: ImageSpan, pages: &[i32]) {
        assert!(
            self.truth.iter().any(|image| image.span == span),
            "{span:?} belongs to no image of the request"
        );
        let pages = pages.iter().map(|page| page.cast_unsigned()).collect();
        self.spans.insert(span.position, (span, pages));
    }

    /// Image pages of the images that overlap the positions from `start` to `end`.
    pub(crate) fn pages(&self, start: u32, end: u32) -> Vec<u32> {
        let met =
            self.truth.iter().filter(|image| image.span.position < end && image.end() > start);
        met.flat_map(|image| self.spans[&image.span.position].1.iter().copied()).collect()
    }
}

/// The tower and the image pages.
pub(crate) struct Eyes {
    config: Tower,
    pages: Vec<Option<(ImageId, usize)>>,
    towers: BTreeMap<u32, (ImageId, Grid, u32)>,
}

impl Eyes {
    pub(crate) fn new(config: Tower) -> Self {
        Self { config, pages: vec![None; config.pages as usize], towers: BTreeMap::new() }
    }

    /// Computes a plan's layers of images, in order.
    pub(crate) fn compute(&mut self, plan: &StepPlan, arena: &Arena) -> Result<(), Death> {
        for (work, pages) in plan.images() {
            if work.end == 0 {
                assert!(
                    self.towers.remove(&work.image).is_some(),
                    "{work:?} drops an image that was not begun"
                );
                continue;
            }
            assert!(work.first < work.end && work.end <= self.config.layers, "{work:?}");
            if let Some(patches) = work.patches {
                assert_eq!(work.first, 0);
                let image = arena.placed[&patches];
                let before = self.towers.insert(work.image, (image, work.grid, 0));
                assert!(before.is_none(), "{work:?} begins twice");
            }
            let (image, grid, end) = self.towers.get_mut(&work.image).expect("the image was begun");
            assert_eq!((work.first, work.grid), (*end, *grid), "layers come in order");
            *end = work.end;
            let image = *image;
            if image == KILL_IMAGE {
                return Err(Death);
            }
            if work.end < self.config.layers {
                assert!(pages.is_empty(), "{work:?} has no output");
                continue;
            }
            assert_eq!(pages.len() as u32, work.grid.positions().div_ceil(self.config.page_tokens));
            for (number, &page) in pages.iter().enumerate() {
                self.pages[page as usize] = Some((image, number));
            }
            self.towers.remove(&work.image);
        }
        Ok(())
    }

    /// The images whose layers a plan computes. Call it before the plan is executed.
    pub(crate) fn images<'a>(
        &'a self,
        plan: &'a StepPlan,
        arena: &'a Arena,
    ) -> impl Iterator<Item = ImageId> + 'a {
        plan.images().filter(|(work, _)| work.end > 0).map(|(work, _)| match work.patches {
            Some(patches) => arena.placed[&patches],
            None => self.towers.get(&work.image).map_or(KILL_IMAGE, |tower| tower.0),
        })
    }

    /// Checks the image pages that a row reads.
    pub(crate) fn check_reads(&self, slot: &SlotImages, start: u32, end: u32) {
        for image in &slot.truth {
            let span = &image.span;
            for position in start.max(span.position)..end.min(image.end()) {
                let number = ((position - span.position) / self.config.page_tokens) as usize;
                let pages = &slot.spans[&span.position].1;
                assert!(!pages.is_empty(), "position {position} of {image:?} has no pages");
                let found = self.pages[pages[number] as usize];
                assert_eq!(found, Some((image.id, number)), "position {position} of {image:?}");
            }
            let cut = span.position < end && end < image.end();
            assert!(!(self.config.whole && cut), "a row {start}..{end} ends within {image:?}");
        }
    }
}

/// Returns the ends of the rows of a prompt. Its image begins at position 3 and has 9 positions,
/// and steps have 4 tokens.
fn ends_of_rows(whole: bool) -> Vec<u32> {
    let tower = Tower { layers: 1, pages: 4, page_tokens: 4, budget: 1, whole };
    let config = SchedulerConfig { tower: Some(tower), token_budget: 4, ..config() };
    let mut harness = Harness::new(config, 1);
    let images = PromptImage::place([(ImageId(5), 3, Grid { rows: 3, columns: 3 })]);
    harness.submit(Request { images, ..request(1, vec![1; 18], 1) });
    assert!(harness.plan() && harness.apply());
    harness.place(0, true);
    let mut ends = vec![];
    while harness.plan() {
        ends.extend(harness.plan.rows().map(|row| row.start + row.length));
        assert!(harness.apply());
    }
    ends
}

#[test]
fn an_image_whose_positions_see_each_other_is_in_one_row() {
    assert_eq!(ends_of_rows(false), [7, 11, 15, 18]);
    assert_eq!(ends_of_rows(true), [12, 16, 18]);
}

#[test]
fn patches_in_flight_outlive_those_who_wanted_them() {
    let tower = Tower { layers: 4, pages: 4, page_tokens: 4, budget: 1, whole: false };
    let mut harness = Harness::new(SchedulerConfig { tower: Some(tower), ..config() }, 2);
    let seen = |id| {
        let images = PromptImage::place([(ImageId(5), 1, Grid { rows: 2, columns: 2 })]);
        Request { images, ..request(id, vec![1, 0, 0, 0, 0, 2], 3) }
    };
    harness.submit(seen(1));
    assert!(harness.plan() && harness.apply());
    harness.place(0, true);
    assert!(harness.plan(), "no plan for the first layer, which reads the patches");
    harness.abort(1);
    harness.submit(seen(2));
    assert!(harness.plan());
    // The same image is placed again while its first patches are being read.
    harness.place(0, true);
    assert!(harness.apply());
    harness.drain();
    assert_eq!(harness.scheduler.stats().images.encoded, 1);
}
