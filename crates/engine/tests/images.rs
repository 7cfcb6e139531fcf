//! Images on the engine thread: patches are requested only when needed, and their memory is freed
//! in every case.

use std::collections::HashMap;
use std::io;
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::yield_now;
use std::time::Duration;

use forebay_engine::{
    EngineConfig, EngineRequest, FinishReason, Grid, ImageConfig, ImageId, Payload, Picture,
    PictureError, Placement, PromptImage, Request, RequestError, RequestId,
};
use forebay_sim::testing::{self, RigParts, VOCAB, text, wholes};
use forebay_sim::{DeviceModel, SimClock, SimConfig, SimTower, Timing};

const PAD: i32 = 5;
/// The text after an image.
const TAIL: [i32; 6] = [7; 6];
const GRID: Grid = Grid { rows: 5, columns: 7 };

/// A simulated arena: counts the images with patches in it, and records the images whose patches
/// were requested.
#[derive(Debug, Default)]
struct Arena {
    used: AtomicUsize,
    next: AtomicU32,
    asked: Mutex<Vec<ImageId>>,
    /// Placements that the test has not completed yet.
    waiting: Mutex<Vec<Placement>>,
}

#[derive(Debug)]
struct Room(Arc<Arena>, u32);

impl Payload for Room {
    fn offset(&self) -> u32 {
        self.1
    }
    fn write(&self, _: usize, _: &[u8]) -> io::Result<()> {
        Ok(())
    }
    fn read(&self, _: usize, _: &mut [u8]) -> io::Result<usize> {
        Ok(0)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.0.used.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Arena {
    fn room(self: &Arc<Self>) -> Arc<dyn Payload> {
        self.used.fetch_add(1, Ordering::SeqCst);
        Arc::new(Room(Arc::clone(self), 64 * self.next.fetch_add(1, Ordering::SeqCst)))
    }
}

/// How the test completes the placement of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Fine,
    Later,
    Broken,
    Forgotten,
}

#[derive(Debug)]
struct Shown {
    image: ImageId,
    fate: Fate,
    arena: Arc<Arena>,
}

impl Picture for Shown {
    fn place(&self, placement: Placement) {
        self.arena.asked.lock().expect("fine").push(self.image);
        match self.fate {
            Fate::Fine => placement.done(Ok(self.arena.room())),
            Fate::Later => self.arena.waiting.lock().expect("fine").push(placement),
            Fate::Broken => placement.done(Err(PictureError::Unreadable("it is cut off".into()))),
            Fate::Forgotten => drop(placement),
        }
    }
}

struct Rig {
    rig: testing::Rig,
    arena: Arc<Arena>,
}

impl Deref for Rig {
    type Target = testing::Rig;

    fn deref(&self) -> &testing::Rig {
        &self.rig
    }
}

impl Rig {
    fn new(lookahead: u32, image_pages: u32) -> Self {
        let clock = SimClock::virtual_time();
        let model = DeviceModel { step_us: 1000.0, tower_us: 10.0, ..DeviceModel::INSTANT };
        let sim = SimConfig {
            clock: clock.clone(),
            timing: Timing { model, ..Timing::default() },
            load_us: 1000,
            page_count: 500,
            vocab_size: VOCAB,
            text: text(),
            tower: Some(SimTower { layers: 6, pages: image_pages }),
            ..SimConfig::default()
        };
        let config = EngineConfig {
            max_running_requests: 16,
            slots: 24,
            page_size: 4,
            chunked_prefill_size: 32,
            lookahead,
            max_queued_requests: 1000,
            context_length: 1024,
            watchdog_timeout: Duration::from_secs(10),
            load_timeout: Duration::ZERO,
            mask_threads: 0,
            images: Some(ImageConfig {
                image_budget: 2 * u64::from(GRID.positions()),
                ..ImageConfig::default()
            }),
            ..EngineConfig::default()
        };
        let rig = testing::Rig::start(config, sim, RigParts::default()).held();
        Self { rig, arena: Arc::default() }
    }

    fn submit(&self, id: u64, images: &[(u128, Fate)]) {
        let (mut prompt, mut placed) = (vec![id as i32 + 10; 3], Vec::new());
        let mut pictures: Vec<Arc<dyn Picture>> = Vec::new();
        for &(image, fate) in images {
            let image = ImageId(image << 80);
            placed.push((image, prompt.len() as u32, GRID));
            prompt.extend(std::iter::repeat_n(PAD, GRID.positions() as usize));
            prompt.extend(TAIL);
            pictures.push(Arc::new(Shown { image, fate, arena: Arc::clone(&self.arena) }));
        }
        let images = PromptImage::place(placed);
        let request =
            Request { id, prompt: prompt.into(), images, max_tokens: 5, ..Request::default() };
        let request = EngineRequest { request, pictures, ..EngineRequest::default() };
        self.handle.submit(request).expect("room");
    }

    fn follow(&self, count: usize) -> HashMap<u64, (Vec<i32>, FinishReason)> {
        wholes(self.rig.follow(count))
    }

    fn asked(&self) -> usize {
        self.arena.asked.lock().expect("fine").len()
    }

    /// Checks that the arena is empty once the engine has ended.
    fn end(self) {
        self.rig.end();
        assert_eq!(self.arena.used.load(Ordering::SeqCst), 0, "patches of ended requests are left");
    }
}

/// The tokens that the simulated model generates for a request that runs alone.
fn alone(id: u64, images: usize) -> Vec<i32> {
    let mut tokens = vec![id as i32 + 10; 3];
    for _ in 0..images {
        tokens.extend(std::iter::repeat_n(PAD, GRID.positions() as usize));
        tokens.extend(TAIL);
    }
    testing::alone(tokens, 5)
}

#[test]
fn each_image_is_asked_for_once_and_goes_through_the_tower_once() {
    for lookahead in [0, 1] {
        let rig = Rig::new(lookahead, 16);
        for id in 0..12 {
            let first = u128::from(id % 3) + 1;
            rig.submit(id, &[(first, Fate::Fine), (9, Fate::Fine)]);
        }
        for (id, (tokens, finish)) in rig.follow(12) {
            assert_eq!((tokens, finish), (alone(id, 2), FinishReason::Length), "request {id}");
        }
        assert_eq!(rig.asked(), 4, "three images, and one that all requests share");
        let stats = rig.handle.stats().scheduler.images;
        assert_eq!((stats.encoded, stats.wanted, stats.waiting), (4, 4, 0));
        assert_eq!(stats.position_layers, 4 * 6 * u64::from(GRID.positions()));
        rig.end();
    }
}

#[test]
fn a_second_turn_asks_for_nothing() {
    let rig = Rig::new(1, 16);
    rig.submit(1, &[(1, Fate::Fine)]);
    rig.follow(1);
    rig.control.hold();
    // The same prompt: only the last position, which comes after the image, is computed.
    rig.submit(1, &[(1, Fate::Fine)]);
    // Another prompt with the same image: the image is still in image pages.
    rig.submit(2, &[(1, Fate::Fine)]);
    rig.follow(2);
    let stats = rig.handle.stats().scheduler.images;
    assert_eq!((rig.asked(), stats.encoded), (1, 1));
    assert_eq!((stats.in_prefix, stats.in_pages), (1, 1));
    rig.end();
}

#[test]
fn a_picture_that_fails_ends_those_who_need_it() {
    let rig = Rig::new(1, 16);
    rig.submit(1, &[(1, Fate::Fine), (2, Fate::Broken)]);
    rig.submit(2, &[(1, Fate::Fine)]);
    rig.submit(3, &[(3, Fate::Forgotten)]);
    let ends = rig.follow(3);
    let broken = PictureError::Unreadable("it is cut off".into());
    let image = |index, error| FinishReason::Error(RequestError::Image { index, error });
    assert_eq!(ends[&1].1, image(1, broken));
    assert_eq!(ends[&2], (alone(2, 1), FinishReason::Length));
    let forgotten = PictureError::Failed("the image was not prepared".into());
    assert_eq!(ends[&3].1, image(0, forgotten));
    rig.end();
}

#[test]
fn patches_that_come_too_late_are_given_back() {
    let rig = Rig::new(1, 16);
    rig.submit(1, &[(1, Fate::Later)]);
    rig.control.release();
    while rig.asked() == 0 {
        yield_now();
    }
    rig.handle.abort(RequestId(1));
    assert_eq!(rig.follow(1)[&1].1, FinishReason::Abort);
    let waiting = rig.arena.waiting.lock().expect("fine").pop().expect("one");
    waiting.done(Ok(rig.arena.room()));
    rig.control.hold();
    rig.submit(2, &[(1, Fate::Fine)]);
    assert_eq!(rig.follow(1)[&2], (alone(2, 1), FinishReason::Length));
    rig.end();
}

#[test]
fn a_dead_hand_costs_the_images_that_it_had() {
    let rig = Rig::new(1, 16);
    for id in 0..6 {
        rig.submit(id, &[(u128::from(id) + 1, Fate::Fine)]);
    }
    rig.control.release();
    while rig.asked() < 6 {
        yield_now();
    }
    rig.control.kill();
    for (id, (tokens, finish)) in rig.follow(6) {
        assert_eq!((tokens, finish), (alone(id, 1), FinishReason::Length), "request {id}");
    }
    rig.end();
}

#[test]
fn a_pool_for_one_image_at_a_time_is_enough() {
    let rig = Rig::new(1, 1);
    for id in 0..8 {
        let images: Vec<(u128, Fate)> =
            (0..4).map(|at| (u128::from((id + at) % 5) + 1, Fate::Fine)).collect();
        rig.submit(id, &images);
    }
    for (id, (tokens, finish)) in rig.follow(8) {
        assert_eq!((tokens, finish), (alone(id, 4), FinishReason::Length), "request {id}");
    }
    rig.end();
}
