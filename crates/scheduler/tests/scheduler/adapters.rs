//! A worker with places for adapters, and rules for requests that wait for a place.

use forebay_protocol::{PLACE_FAILED_FILES, PLACE_OK, PlaceEnd, PlaceWrite, StepPlan, StepResult};
use forebay_scheduler::{Finish, Request, SchedulerConfig};

use crate::harness::{Harness, config, request};

/// Content of a place while an adapter is being written to it.
const GARBAGE: u32 = u32::MAX - 8;

/// The worker's places. Some writes take effect when the plan is executed, and some when the end is
/// reported, because the scheduler may rely on neither.
pub(crate) struct Adapters {
    places: Vec<u32>,
    coming: Vec<Coming>,
}

struct Coming {
    step: u64,
    write: PlaceWrite,
    /// Whether the write succeeded; `None`: it has not ended.
    ended: Option<bool>,
}

impl Adapters {
    pub(crate) fn new(places: u32) -> Self {
        Self { places: vec![GARBAGE; places as usize], coming: vec![] }
    }

    pub(crate) fn outstanding(&self) -> usize {
        self.coming.len()
    }

    /// The adapter in this place; `None` for a slot without a place.
    pub(crate) fn of(&self, place: Option<u32>) -> Option<u32> {
        place.map(|place| self.places[place as usize])
    }

    pub(crate) fn start(&mut self, plan: &StepPlan) {
        for &write in plan.place_writes() {
            let same = |other: &Coming| other.write.place == write.place;
            assert!(!self.coming.iter().any(same), "{write:?} to a place with a write under way");
            let there = self.places.iter().position(|&id| id == write.id);
            assert!(
                there.is_none_or(|at| at == write.place as usize),
                "{write:?} of an adapter that has another place"
            );
            let early = write.ticket.is_multiple_of(2);
            self.places[write.place as usize] = if early { write.id } else { GARBAGE };
            self.coming.push(Coming { step: plan.step(), write, ended: None });
        }
    }

    /// Marks the write with index `at`, modulo their number, as ended. `fine` is true if it
    /// succeeded.
    pub(crate) fn end(&mut self, at: usize, fine: bool) {
        let count = self.coming.len().max(1);
        if let Some(coming) = self.coming.get_mut(at % count) {
            coming.ended.get_or_insert(fine);
        }
    }

    pub(crate) fn report(&mut self, result: &mut StepResult) {
        for coming in std::mem::take(&mut self.coming) {
            let Coming { step, write, ended } = coming;
            match ended.filter(|_| step <= result.step) {
                None => self.coming.push(coming),
                Some(fine) => {
                    self.places[write.place as usize] = if fine { write.id } else { GARBAGE };
                    let error = if fine { PLACE_OK } else { PLACE_FAILED_FILES };
                    result.placed.push(PlaceEnd { ticket: write.ticket, error });
                }
            }
        }
    }
}

fn adapted(id: u64, adapter: u32, max_tokens: u32) -> Request {
    // Keys and values of one adapter are not shared with another.
    let cache_salt = 1 + u64::from(adapter);
    Request { adapter: Some(adapter), cache_salt, ..request(id, vec![3; 5], max_tokens) }
}

fn machine(places: u32) -> SchedulerConfig {
    SchedulerConfig { places, max_running: 6, slots: 9, pages: 60, ..config() }
}

/// Runs one step, before which the oldest write into a place ends.
fn turn(harness: &mut Harness) {
    harness.device.adapters.end(0, true);
    harness.plan();
    harness.apply();
}

#[test]
fn nobody_waits_for_who_waits_for_a_place() {
    let mut harness = Harness::new(machine(1), 2);
    harness.submit(adapted(0, 7, 4));
    harness.submit(request(1, vec![2; 5], 3));
    harness.submit(adapted(2, 8, 4));
    assert!(harness.plan() && harness.plan.place_writes().len() == 1, "one adapter is written");
    assert_eq!(harness.plan.new_slots().map(|new| new.place).collect::<Vec<_>>(), [None]);
    assert_eq!(harness.scheduler.stats().places.waiting, 2);
    harness.apply();
    while harness.clients[&1].end.is_none() {
        harness.plan();
        harness.apply();
    }
    assert_eq!(
        harness.scheduler.stats().places.coming,
        1,
        "the end of the write was never reported"
    );
    harness.drain();
    assert_eq!(harness.scheduler.stats().places.unused, 1);
}

#[test]
fn an_adapter_that_cannot_be_had_ends_its_requests_and_no_others() {
    let mut harness = Harness::new(machine(2), 1);
    harness.submit(adapted(0, 7, 4));
    harness.submit(adapted(1, 8, 4));
    harness.submit(adapted(2, 7, 4));
    harness.plan();
    harness.device.adapters.end(0, false);
    harness.apply();
    assert_eq!(harness.ended(0).1, Some(None));
    assert_eq!(harness.ended(2).1, Some(None));
    harness.drain();
    assert_eq!(harness.ended(1).1, Some(Some(Finish::Length)));
    harness.submit(adapted(3, 7, 4));
    harness.drain();
    assert_eq!(harness.ended(3).1, Some(Some(Finish::Length)), "the next request tries again");
}

#[test]
fn a_flood_for_one_adapter_keeps_no_other_waiting_for_ever() {
    let mut harness = Harness::new(machine(2), 2);
    harness.was_reset = true;
    // Keep requests for the two loaded adapters waiting, more than can run.
    let mut next = 0;
    let mut flood = |harness: &mut Harness| {
        while harness.scheduler.stats().waiting < 6 {
            harness.submit(adapted(next, (next % 2) as u32, 6));
            next += 1;
        }
    };
    for _ in 0..40 {
        flood(&mut harness);
        turn(&mut harness);
    }
    for other in 0..4 {
        harness.submit(adapted(10_000 + other, 50 + other as u32, 6));
    }
    let mut steps = 0;
    while (0..4).any(|other| harness.clients[&(10_000 + other)].end.is_none()) {
        flood(&mut harness);
        turn(&mut harness);
        steps += 1;
        assert!(steps < 4 * (64 + 30), "the other adapters' requests wait for ever");
    }
    harness.drain();
}

#[test]
fn an_adapter_is_forgotten_when_nobody_needs_it() {
    let mut harness = Harness::new(machine(2), 1);
    harness.submit(adapted(0, 7, 2));
    assert!(!harness.scheduler.forget_adapter(7), "a request waits for the adapter");
    turn(&mut harness);
    assert!(!harness.scheduler.forget_adapter(7), "the adapter is being written");
    while harness.clients[&0].end.is_none() {
        assert!(!harness.scheduler.forget_adapter(7), "the adapter is in use");
        turn(&mut harness);
    }
    harness.drain();
    assert_eq!(harness.scheduler.stats().places.unused, 1);
    assert!(harness.scheduler.forget_adapter(7) && harness.scheduler.forget_adapter(7));
    assert_eq!(harness.scheduler.stats().places.empty, 2);
}
