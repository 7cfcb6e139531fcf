//! Random runs in virtual time: requests, loads, deaths, shrinking memory and administrators'
//! orders.
//!
//! `FOREBAY_STORIES` sets the number of runs.

use std::collections::{BTreeMap, HashMap};

use forebay_fleet::{
    Fleet, FleetAction, FleetBounds, FleetEntry, FleetModel, ModelState, SleepLevel, Ticket,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const STAY: u64 = 1000;
const PAUSE: u64 = 500;
const LONGEST_LOAD: u64 = 2000;
const LONGEST_RUN: u64 = 1500;
const LONGEST_LEAVE: u64 = 300;
const EVENTS: usize = 120;

#[derive(Debug, Clone, Copy)]
enum Timer {
    Loaded(usize),
    LoadFails(usize),
    Left(usize),
    Ends(usize),
    GivesUp(Ticket),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Waiting { since: u64 },
    Over,
}

/// A caller that follows the rules of the fleet's interface, and checks the fleet's decisions.
struct Story {
    rng: StdRng,
    fleet: Fleet,
    models: usize,
    clients: u64,
    now: u64,
    timers: BTreeMap<(u64, u64), Timer>,
    serial: u64,
    fates: HashMap<Ticket, (usize, Fate)>,
    running: Vec<usize>,
    memory: u64,
    /// The number of bytes of each model in memory, as the caller counts them.
    held: Vec<u64>,
    ready_since: Vec<Option<u64>>,
    pinned: Vec<bool>,
    models_max: usize,
    longest_wait: u64,
    loads: usize,
    faulty: bool,
}

impl Story {
    fn new(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let models = rng.random_range(1..=5);
        let bytes: Vec<u64> = (0..models).map(|_| rng.random_range(1..=60)).collect();
        let memory = rng.random_range(60..=140);
        let models_max = rng.random_range(1..=4);
        // A set of pinned models that leaves no room for others would be refused at the start.
        let pinned: Vec<bool> = (0..models)
            .map(|model| model == 0 && models_max > 1 && memory >= 120 && rng.random_bool(0.3))
            .collect();
        let each = |model: usize| FleetModel {
            bytes: bytes[model],
            pinned: pinned[model],
            idle_ms: [None, Some(0), Some(700), Some(5000)][model % 4],
        };
        let config = FleetBounds {
            memory_bytes: memory,
            models_max,
            queue: rng.random_range(1..=6),
            stay_ms: STAY,
            pause_ms: PAUSE,
        };
        let faulty = rng.random_bool(0.5);
        let clients = rng.random_range(1..=3);
        Self {
            fleet: Fleet::new(config, (0..models).map(each).collect()),
            rng,
            models,
            clients,
            now: 0,
            timers: BTreeMap::new(),
            serial: 0,
            fates: HashMap::new(),
            running: vec![0; models],
            memory,
            held: vec![0; models],
            ready_since: vec![None; models],
            pinned,
            models_max,
            longest_wait: 0,
            loads: 0,
            faulty,
        }
    }

    fn after(&mut self, longest: u64, timer: Timer) {
        let at = self.now + self.rng.random_range(0..=longest);
        self.serial += 1;
        self.timers.insert((at, self.serial), timer);
    }

    fn run(&mut self, model: usize) {
        self.running[model] += 1;
        self.after(LONGEST_RUN, Timer::Ends(model));
    }

    fn settle(&mut self, ticket: Ticket) -> usize {
        let (model, fate) = self.fates.get_mut(&ticket).expect("a known ticket");
        let Fate::Waiting { since } = *fate else { panic!("{ticket:?} ends twice") };
        self.longest_wait = self.longest_wait.max(self.now - since);
        *fate = Fate::Over;
        *model
    }

    fn poll(&mut self) {
        for action in self.fleet.poll(self.now) {
            match action {
                FleetAction::Load { model, bytes } => {
                    assert_eq!(self.held[model], 0, "the model is in memory already");
                    self.held[model] = bytes;
                    let all: u64 = self.held.iter().sum();
                    assert!(all <= self.memory, "{all} bytes of {}", self.memory);
                    let count = self.held.iter().filter(|&&bytes| bytes > 0).count();
                    assert!(count <= self.models_max, "{count} models");
                    self.loads += 1;
                    let fails = self.faulty && self.rng.random_bool(0.2);
                    let timer = if fails { Timer::LoadFails(model) } else { Timer::Loaded(model) };
                    self.after(LONGEST_LOAD, timer);
                }
                FleetAction::Leave { model, .. } => {
                    assert_eq!(self.running[model], 0, "a model leaves with running requests");
                    assert!(self.faulty || !self.pinned[model], "a pinned model leaves");
                    self.ready_since[model] = None;
                    self.after(LONGEST_LEAVE, Timer::Left(model));
                }
                FleetAction::Admit { ticket } => {
                    let model = self.settle(ticket);
                    assert!(
                        self.ready_since[model].is_some(),
                        "a request is admitted to a model that is not loaded"
                    );
                    self.run(model);
                }
                FleetAction::Fail { ticket } => drop(self.settle(ticket)),
            }
        }
        assert_eq!(self.fleet.used(), self.held.iter().sum::<u64>());
        let waiting =
            self.fates.values().filter(|(_, fate)| matches!(fate, Fate::Waiting { .. })).count();
        let theirs: usize = (0..self.models).map(|model| self.fleet.requests(model).1).sum();
        assert_eq!(waiting, theirs, "a request was lost");
    }

    fn fire(&mut self, timer: Timer) {
        match timer {
            Timer::Loaded(model) => {
                let measured = self.rng.random_range(1..=self.held[model]);
                self.held[model] = measured;
                self.ready_since[model] = Some(self.now);
                self.fleet.loaded(model, measured, self.now);
            }
            Timer::LoadFails(model) => {
                self.held[model] = 0;
                self.fleet.load_failed(model, self.now);
                assert_eq!(self.fleet.requests(model).1, 0, "a request waits for a failed load");
            }
            Timer::Left(model) => {
                self.held[model] = 0;
                self.fleet.emptied(model);
            }
            Timer::Ends(model) => {
                self.running[model] -= 1;
                self.fleet.finish(model, self.now);
            }
            Timer::GivesUp(ticket) => {
                let waits = matches!(self.fates[&ticket].1, Fate::Waiting { .. });
                assert_eq!(
                    self.fleet.give_up(ticket),
                    waits,
                    "the caller and the fleet disagree on a waiting request"
                );
                if waits {
                    self.settle(ticket);
                }
            }
        }
        self.poll();
    }

    fn request(&mut self, model: usize) {
        let client = self.rng.random_range(0..self.clients);
        match self.fleet.enter(model, client, self.now) {
            Ok(FleetEntry::Running) => {
                assert!(
                    self.ready_since[model].is_some(),
                    "a request runs on a model that is not loaded"
                );
                self.run(model);
            }
            Ok(FleetEntry::Waiting(ticket)) => {
                let fate = Fate::Waiting { since: self.now };
                assert!(self.fates.insert(ticket, (model, fate)).is_none());
                if self.rng.random_bool(0.1) {
                    self.after(3000, Timer::GivesUp(ticket));
                }
            }
            Err(_) => {}
        }
        self.poll();
    }

    fn fault(&mut self) {
        let model = self.rng.random_range(0..self.models);
        match self.rng.random_range(0..5) {
            0 if self.ready_since[model].is_some() => {
                self.held[model] = 0;
                self.ready_since[model] = None;
                self.fleet.died(model, self.now);
            }
            1 => {
                self.memory = self.rng.random_range(30..=140);
                self.fleet.set_memory(self.memory);
            }
            2 => self.fleet.dismiss(model, SleepLevel::Unloaded),
            3 => self.fleet.dismiss(model, SleepLevel::Asleep),
            _ => self.fleet.keep(model, [None, Some(None), Some(Some(0))][model % 3]),
        }
        self.poll();
    }

    /// Runs virtual time up to `until`, with all events before it.
    fn advance(&mut self, until: u64) {
        loop {
            let timer = self.timers.first_key_value().map(|((at, _), _)| *at);
            let wake = self.fleet.next_wake(self.now);
            let Some(next) = timer.into_iter().chain(wake).min().filter(|&at| at <= until) else {
                self.now = until;
                return;
            };
            self.now = next;
            if timer == Some(next)
                && let Some((_, timer)) = self.timers.pop_first()
            {
                self.fire(timer);
            } else {
                self.poll();
            }
        }
    }

    fn tell(&mut self) {
        for _ in 0..EVENTS {
            let pause = self.rng.random_range(0..=400);
            self.advance(self.now + pause);
            if self.faulty && self.rng.random_bool(0.1) {
                self.fault();
            } else {
                // One model is requested much more often than the others.
                let model = self.rng.random_range(0..self.models);
                let model = if self.rng.random_bool(0.5) { 0 } else { model };
                self.request(model);
            }
        }
        // No more requests arrive, so all waiting requests are served in the end.
        let turn = 2 * STAY + LONGEST_LOAD + LONGEST_RUN + LONGEST_LEAVE + PAUSE;
        self.advance(self.now + 4 * turn * self.models as u64);
        let waits = |(_, fate): &(usize, Fate)| matches!(fate, Fate::Waiting { .. });
        assert!(!self.fates.values().any(waits), "a request waits for ever");
        assert!(self.running.iter().all(|&running| running == 0));
        if !self.faulty {
            // At worst a request waits for the longest turn of every model, once per client.
            let most = turn * (self.models as u64 * self.clients + 1);
            assert!(self.longest_wait <= most, "{} of {most} ms", self.longest_wait);
        }
    }
}

fn stories() -> u64 {
    std::env::var("FOREBAY_STORIES").ok().and_then(|text| text.parse().ok()).unwrap_or(3000)
}

#[test]
fn every_request_ends_once_within_the_bounds() {
    for seed in 0..stories() {
        let told = std::panic::catch_unwind(|| {
            let mut story = Story::new(seed);
            story.tell();
            story.loads
        });
        assert!(told.is_ok(), "seed {seed}");
    }
}

/// Two models that do not fit together are requested in turn, as fast as they respond.
#[test]
fn alternating_requests_do_not_thrash() {
    let config = FleetBounds { memory_bytes: 10, stay_ms: STAY, ..FleetBounds::default() };
    let model = FleetModel { bytes: 10, ..FleetModel::default() };
    let mut fleet = Fleet::new(config, vec![model.clone(), model]);
    let (mut now, mut loads, mut answers) = (0, 0, 0);
    const LOAD: u64 = 3000;
    let mut events: Vec<(u64, Timer)> = Vec::new();
    let mut wanted: HashMap<Ticket, usize> = HashMap::new();
    // Each of two clients requests its own model again as soon as it has an answer.
    let mut asks = vec![0, 1];
    while now < 100_000 {
        for model in asks.drain(..) {
            match fleet.enter(model, model as u64, now).expect("room in the queue") {
                FleetEntry::Running => events.push((now + 10, Timer::Ends(model))),
                FleetEntry::Waiting(ticket) => drop(wanted.insert(ticket, model)),
            }
        }
        for action in fleet.poll(now) {
            match action {
                FleetAction::Load { model, .. } => {
                    loads += 1;
                    events.push((now + LOAD, Timer::Loaded(model)));
                }
                FleetAction::Leave { model, .. } => events.push((now + 1, Timer::Left(model))),
                FleetAction::Admit { ticket } => {
                    events.push((now + 10, Timer::Ends(wanted[&ticket])));
                }
                FleetAction::Fail { .. } => panic!("a request failed"),
            }
        }
        let timer = events.iter().map(|(at, _)| *at).min();
        now = timer
            .into_iter()
            .chain(fleet.next_wake(now))
            .min()
            .expect("an event or a timer is due");
        let due: Vec<Timer> = events.extract_if(.., |(at, _)| *at <= now).map(|(_, t)| t).collect();
        for timer in due {
            match timer {
                Timer::Loaded(model) => fleet.loaded(model, 10, now),
                Timer::Left(model) => fleet.emptied(model),
                Timer::Ends(model) => {
                    fleet.finish(model, now);
                    answers += 1;
                    asks.push(model);
                }
                Timer::LoadFails(_) | Timer::GivesUp(_) => {}
            }
        }
    }
    // A model stays at least as long as its load took, so about half of the time is spent on
    // answers.
    assert!(loads as u64 * LOAD <= 55_000, "{loads} loads");
    assert!(loads >= 10 && answers > 1000, "{loads} loads, {answers} answers");
}

#[test]
fn the_least_recently_used_leaves_and_what_cannot_fit_is_refused_with_numbers() {
    use forebay_fleet::FleetRefusal;
    let config = FleetBounds { memory_bytes: 100, stay_ms: 0, ..FleetBounds::default() };
    let model = |bytes| FleetModel { bytes, ..FleetModel::default() };
    let pinned = FleetModel { pinned: true, ..model(10) };
    let models = vec![pinned, model(40), model(40), model(40), model(95)];
    let mut fleet = Fleet::new(config, models);
    assert_eq!(fleet.enter(4, 0, 0), Err(FleetRefusal::TooLarge { bytes: 95, most: 90 }));
    for at in [0, 1, 2] {
        assert!(matches!(fleet.enter(at, 0, at as u64), Ok(FleetEntry::Waiting(_))));
        assert_eq!(fleet.poll(at as u64).len(), 1);
        fleet.loaded(at, if at == 0 { 10 } else { 40 }, at as u64);
        assert_eq!(fleet.poll(at as u64).len(), 1, "the waiting request is admitted");
        fleet.finish(at, at as u64);
    }
    // Model 1 is used again, so model 2 has to leave.
    assert_eq!(fleet.enter(1, 0, 5), Ok(FleetEntry::Running));
    fleet.finish(1, 6);
    assert!(fleet.enter(3, 0, 7).is_ok());
    let level = SleepLevel::Asleep;
    assert_eq!(fleet.poll(7), [FleetAction::Leave { model: 2, level }]);
    assert_eq!((fleet.state(2), fleet.held(2)), (ModelState::Leaving, 40));
    assert_eq!(fleet.poll(8), [], "a model's bytes are free only once it has left");
    fleet.emptied(2);
    assert_eq!(fleet.poll(9), [FleetAction::Load { model: 3, bytes: 40 }]);
    assert_eq!(fleet.state(2), ModelState::Asleep);
    fleet.dismiss(2, SleepLevel::Unloaded);
    assert_eq!(fleet.state(2), ModelState::Unloaded);
}

#[test]
fn a_small_model_does_not_pass_the_one_that_waits_longer() {
    let config = FleetBounds { memory_bytes: 10, ..FleetBounds::default() };
    let model = |bytes| FleetModel { bytes, ..FleetModel::default() };
    let mut fleet = Fleet::new(config, vec![model(6), model(6), model(4)]);
    assert!(fleet.enter(0, 0, 0).is_ok());
    assert_eq!(fleet.poll(0).len(), 1);
    fleet.loaded(0, 6, 1);
    // The second model waits for the first, which runs a request. The third would fit beside the
    // first.
    assert!(fleet.enter(1, 0, 2).is_ok() && fleet.enter(2, 0, 3).is_ok());
    assert!(!fleet.poll(3).iter().any(|action| matches!(action, FleetAction::Load { .. })));
    fleet.finish(0, 4);
    let level = SleepLevel::Asleep;
    assert_eq!(fleet.poll(5000), [FleetAction::Leave { model: 0, level }]);
    fleet.emptied(0);
    let load = |model, bytes| FleetAction::Load { model, bytes };
    assert_eq!(fleet.poll(5001), [load(1, 6), load(2, 4)]);
}
