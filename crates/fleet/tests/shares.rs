//! Fair shares of clients in model loads: random runs in virtual time. Each client has its own
//! models, so a load shows which client it is for. `FOREBAY_STORIES` sets the number of runs.

use std::collections::{BTreeMap, HashMap};

use forebay_fleet::{Fleet, FleetAction, FleetBounds, FleetEntry, FleetModel, ModelState, Ticket};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const LONGEST_LOAD: u64 = 2000;
const LONGEST_RUN: u64 = 400;
const END: u64 = 60_000;

#[derive(Debug, Clone, Copy)]
enum Timer {
    /// A client requests one of its models.
    Asks(usize),
    Loaded(usize),
    Left(usize),
    /// A running request for a model finishes.
    Ends(usize),
}

/// Clients that each keep a fixed number of requests: each finished request is followed by a new
/// one.
struct Story {
    rng: StdRng,
    fleet: Fleet,
    now: u64,
    serial: u64,
    timers: BTreeMap<(u64, u64), Timer>,
    /// The client of each model.
    clients: Vec<usize>,
    waiting: HashMap<Ticket, usize>,
    /// For each waiting client: the number of loads that have begun for each other client since the
    /// client waits.
    begun: Vec<Vec<usize>>,
    /// The number of loads for each client.
    loads: Vec<usize>,
}

impl Story {
    /// `models` is the number of models of each client, and also its number of requests at a time.
    /// `room` is the number of models that fit into memory.
    fn new(seed: u64, models: &[usize], room: usize) -> Self {
        let clients: Vec<usize> =
            models.iter().enumerate().flat_map(|(client, &count)| vec![client; count]).collect();
        let bounds = FleetBounds { models_max: room, stay_ms: 500, ..FleetBounds::default() };
        let count = models.len();
        let mut story = Self {
            rng: StdRng::seed_from_u64(seed),
            fleet: Fleet::new(bounds, vec![FleetModel::default(); clients.len()]),
            now: 0,
            serial: 0,
            timers: BTreeMap::new(),
            clients,
            waiting: HashMap::new(),
            begun: vec![vec![0; count]; count],
            loads: vec![0; count],
        };
        for client in story.clients.clone() {
            story.after(1000, Timer::Asks(client));
        }
        story
    }

    fn after(&mut self, longest: u64, timer: Timer) {
        let at = self.now + self.rng.random_range(1..=longest);
        self.serial += 1;
        self.timers.insert((at, self.serial), timer);
    }

    /// Returns for each client whether it waits for a model that could be loaded now.
    fn could_load(&self) -> Vec<bool> {
        let mut found = vec![false; self.loads.len()];
        for &model in self.waiting.values() {
            let state = self.fleet.state(model);
            let is_out = matches!(state, ModelState::Unloaded | ModelState::Asleep);
            found[self.clients[model]] |= is_out;
        }
        found
    }

    fn poll(&mut self) {
        let waited = self.could_load();
        for action in self.fleet.poll(self.now) {
            match action {
                FleetAction::Load { model, .. } => {
                    let of = self.clients[model];
                    self.loads[of] += 1;
                    self.begun[of].fill(0);
                    for other in (0..waited.len()).filter(|&it| it != of && waited[it]) {
                        let begun = &mut self.begun[other][of];
                        *begun += 1;
                        assert!(*begun <= 1, "client {other} waits for {begun} loads of {of}");
                    }
                    self.after(LONGEST_LOAD, Timer::Loaded(model));
                }
                FleetAction::Leave { model, .. } => self.after(100, Timer::Left(model)),
                FleetAction::Admit { ticket } => {
                    let model = self.waiting.remove(&ticket).expect("the request waits");
                    self.after(LONGEST_RUN, Timer::Ends(model));
                }
                FleetAction::Fail { .. } => panic!("a request failed"),
            }
        }
        for (client, waits) in self.could_load().into_iter().enumerate() {
            if !waits {
                self.begun[client].fill(0);
            }
        }
    }

    fn ask(&mut self, client: usize) {
        let own: Vec<usize> =
            (0..self.clients.len()).filter(|&model| self.clients[model] == client).collect();
        let model = own[self.rng.random_range(0..own.len())];
        match self.fleet.enter(model, client as u64, self.now) {
            Ok(FleetEntry::Running) => self.after(LONGEST_RUN, Timer::Ends(model)),
            Ok(FleetEntry::Waiting(ticket)) => drop(self.waiting.insert(ticket, model)),
            Err(refusal) => panic!("{refusal:?}"),
        }
    }

    /// Runs to the end, and returns the number of loads for each client.
    fn tell(mut self) -> Vec<usize> {
        while self.now < END {
            let timer = self.timers.first_key_value().map(|((at, _), _)| *at);
            let wake = self.fleet.next_wake(self.now);
            self.now = timer.into_iter().chain(wake).min().expect("an event or a timer is due");
            if timer == Some(self.now)
                && let Some((_, timer)) = self.timers.pop_first()
            {
                match timer {
                    Timer::Asks(client) => self.ask(client),
                    Timer::Loaded(model) => self.fleet.loaded(model, 0, self.now),
                    Timer::Left(model) => self.fleet.emptied(model),
                    Timer::Ends(model) => {
                        self.fleet.finish(model, self.now);
                        self.ask(self.clients[model]);
                    }
                }
            }
            self.poll();
        }
        self.loads
    }
}

fn stories() -> u64 {
    std::env::var("FOREBAY_STORIES").ok().and_then(|text| text.parse().ok()).unwrap_or(500)
}

#[test]
fn while_a_client_waits_each_other_one_begins_one_load_at_most() {
    for seed in 0..stories() {
        let told = std::panic::catch_unwind(|| {
            let mut rng = StdRng::seed_from_u64(seed);
            let clients = rng.random_range(2..=4);
            let models: Vec<usize> = (0..clients).map(|_| rng.random_range(1..=5)).collect();
            let room = rng.random_range(1..=3);
            Story::new(seed, &models, room).tell()
        });
        assert!(told.is_ok(), "seed {seed}");
    }
}

#[test]
fn a_client_of_many_models_makes_nobody_wait_for_more_than_its_share() {
    let loads = Story::new(7, &[5, 1], 1).tell();
    let (many, one) = (loads[0], loads[1]);
    assert!(one > 5 && many <= one + 1, "{many} loads beside {one}");
}
