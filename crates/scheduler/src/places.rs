//! Places for adapters: the adapters in the hand's memory, and the requests that wait for one.
//!
//! A request with an adapter is scheduled only while the adapter is in a place. Until then it
//! *waits for a place*, and delays no other request. Once its adapter is in a place, a request
//! *uses* the place until the request ends.
//!
//! Adapters wait in a queue, by the best rank of their requests and then by arrival in the queue.
//! The first gets the least recently used of the unused places. If there is none for [`PATIENCE`]
//! plans, the place with the fewest running requests is *vacated*. Requests that use it but have no
//! slot wait again, at the end of the queue. No further requests may use it. So the first adapter
//! in the queue waits at most for the longest answer of that place, however many requests arrive
//! for loaded adapters.

use std::collections::{BTreeMap, BTreeSet};

use forebay_protocol::{PLACE_OK, PlaceEnd, PlaceWrite, StepPlan};

use crate::entry::{Entry, Seat};
use crate::request::Key;
use crate::slab::Handle;
use crate::{Event, Finish, PlaceStats, Scheduler};

/// The number of plans that the first adapter in the queue waits before a place is vacated for it.
const PATIENCE: u32 = 64;

/// The content of a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    Empty,
    /// The hand is loading this adapter into the place.
    Coming {
        id: u32,
        ticket: u32,
    },
    Holds {
        id: u32,
    },
}

#[derive(Debug)]
struct Place {
    content: Content,
    /// Requests that use this place: those that run, and those that are queued to run.
    users: u32,
    /// True if no further request may use the place.
    vacated: bool,
    /// The last step that may name the place; 0: no plan has named it since its adapter was loaded.
    last_step: u64,
}

impl Place {
    /// True if a plan has named the place since its adapter was loaded.
    fn was_named(&self) -> bool {
        self.last_step > 0
    }
}

/// The requests that wait for an adapter.
#[derive(Debug)]
struct Line {
    /// The number of this line. Lines are numbered in the order in which they began to wait.
    since: u64,
    waiting: BTreeSet<(Key, Handle)>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Places {
    places: Vec<Place>,
    /// Adapters that requests wait for, by their ids.
    lines: BTreeMap<u32, Line>,
    /// The number of lines created so far.
    begun: u64,
    /// The adapter that is first in the queue, and the number of plans for which it has been first.
    first: Option<(u32, u32)>,
    next_ticket: u32,
}

impl Places {
    pub(crate) fn new(places: u32) -> Self {
        let empty = |_| Place { content: Content::Empty, users: 0, vacated: false, last_step: 0 };
        Self { places: (0..places).map(empty).collect(), ..Self::default() }
    }

    fn place_of(&self, id: u32) -> Option<usize> {
        self.places.iter().position(|place| match place.content {
            Content::Empty => false,
            Content::Coming { id: other, .. } | Content::Holds { id: other } => other == id,
        })
    }

    /// Makes a request use the place of its adapter, or wait for one. Returns true if it may be
    /// scheduled.
    pub(crate) fn enter(&mut self, handle: Handle, entry: &mut Entry) -> bool {
        let Some(id) = entry.request.adapter else { return true };
        if let Seat::Place(at) = entry.seat {
            if !self.places[at as usize].vacated {
                return true;
            }
            self.leave(handle, entry);
        }
        let place = self.place_of(id);
        if let Some(at) = place
            && let Place { content: Content::Holds { .. }, vacated: false, .. } = self.places[at]
        {
            self.places[at].users += 1;
            entry.seat = Seat::Place(at as u32);
            return true;
        }
        let begun = &mut self.begun;
        let line = self.lines.entry(id).or_insert_with(|| {
            *begun += 1;
            Line { since: *begun, waiting: BTreeSet::new() }
        });
        line.waiting.insert((entry.key, handle));
        entry.seat = Seat::Waits;
        false
    }

    /// Ends a request's use of a place, or its wait for one.
    pub(crate) fn leave(&mut self, handle: Handle, entry: &mut Entry) {
        match std::mem::take(&mut entry.seat) {
            Seat::None => {}
            Seat::Place(at) => self.places[at as usize].users -= 1,
            Seat::Waits => {
                let Some(id) = entry.request.adapter else { return };
                if let Some(line) = self.lines.get_mut(&id) {
                    line.waiting.remove(&(entry.key, handle));
                    if line.waiting.is_empty() {
                        self.lines.remove(&id);
                    }
                }
            }
        }
    }

    /// Notes that the plan of this step names a place.
    pub(crate) fn named(&mut self, seat: Seat, step: u64) {
        if let Seat::Place(at) = seat {
            self.places[at as usize].last_step = step;
        }
    }

    /// Waiting adapters that are not being loaded, in queue order.
    fn in_line(&self) -> Vec<u32> {
        let order = |line: &Line| (line.waiting.first().map(|(key, _)| key.rank), line.since);
        let mut found: Vec<_> = self.lines.iter().map(|(&id, line)| (order(line), id)).collect();
        found.retain(|&(_, id)| {
            let place = self.place_of(id).map(|at| self.places[at].content);
            !matches!(place, Some(Content::Coming { .. }))
        });
        found.sort_unstable();
        found.into_iter().map(|(_, id)| id).collect()
    }

    /// Finds a place that no request uses and no plan in flight names: an empty one, or else the
    /// least recently used one.
    fn unused(&self, answered: u64) -> Option<usize> {
        let places = self.places.iter().enumerate();
        let free = places.filter(|(_, place)| {
            let coming = matches!(place.content, Content::Coming { .. });
            !coming && place.users == 0 && place.last_step <= answered
        });
        let age = |place: &Place| (place.content != Content::Empty, place.last_step);
        free.min_by_key(|&(at, place)| (age(place), at)).map(|(at, _)| at)
    }

    /// Gives unused places to adapters in the queue: adds a load of each such adapter to the plan.
    /// `answered` is the last step whose result has come. Returns true if the first adapter without
    /// a place has waited too long.
    fn assign(&mut self, plan: &mut StepPlan, answered: u64) -> bool {
        for id in self.in_line() {
            let own = self.place_of(id);
            let free =
                |at: &usize| self.places[*at].users == 0 && self.places[*at].last_step <= answered;
            // A place that was vacated, and is unused now, still contains this adapter.
            if let Some(at) = own.filter(free) {
                self.places[at].content = Content::Empty;
            } else if own.is_some() {
                continue;
            }
            let Some(at) = self.unused(answered) else {
                let plans = self.first.filter(|&(first, _)| first == id).map_or(0, |(_, n)| n);
                self.first = Some((id, plans + 1));
                return plans + 1 >= PATIENCE;
            };
            let ticket = self.next_ticket;
            self.next_ticket = (ticket + 1) & i32::MAX.cast_unsigned();
            let content = Content::Coming { id, ticket };
            self.places[at] = Place { content, users: 0, vacated: false, last_step: 0 };
            plan.write_place(PlaceWrite { ticket, place: at as u32, id });
        }
        self.first = None;
        false
    }

    /// Chooses the place with the fewest running requests, unless half of the places are being
    /// vacated. It skips places that no plan has named since their adapter was loaded, or two
    /// adapters would evict each other for ever.
    fn vacate(&mut self, running: impl Fn(u32) -> usize) -> Option<u32> {
        let vacated = self.places.iter().filter(|place| place.vacated).count();
        if vacated >= self.places.len().div_ceil(2) {
            return None;
        }
        let held = self.places.iter().enumerate().filter(|(_, place)| {
            let holds = matches!(place.content, Content::Holds { .. });
            holds && place.was_named() && !place.vacated && place.users > 0
        });
        let (at, _) = held.min_by_key(|&(at, _)| (running(at as u32), at))?;
        self.places[at].vacated = true;
        Some(at as u32)
    }

    /// Applies the end of an adapter load. Returns the requests that waited for the adapter.
    fn ended(&mut self, end: PlaceEnd) -> Vec<Handle> {
        let found = self.places.iter_mut().find_map(|place| match place.content {
            Content::Coming { id, ticket } if ticket == end.ticket => Some((place, id)),
            _ => None,
        });
        let Some((place, id)) = found else { return Vec::new() };
        let fine = end.error == PLACE_OK;
        place.content = if fine { Content::Holds { id } } else { Content::Empty };
        let line = self.lines.get(&id);
        line.map_or(Vec::new(), |line| line.waiting.iter().map(|&(_, handle)| handle).collect())
    }

    /// The number of adapter loads whose ends have not been reported yet.
    pub(crate) fn coming(&self) -> usize {
        let coming = |place: &&Place| matches!(place.content, Content::Coming { .. });
        self.places.iter().filter(coming).count()
    }

    /// True if the ticket belongs to an adapter load whose end has not been reported yet.
    pub(crate) fn awaits(&self, ticket: u32) -> bool {
        let awaited = |place: &Place| matches!(place.content, Content::Coming { ticket: own, .. } if own == ticket);
        self.places.iter().any(awaited)
    }

    /// Empties the place of an adapter that no request needs and that no plan in flight names.
    /// Returns false if a request or a plan in flight still needs it.
    pub(crate) fn forget(&mut self, id: u32, answered: u64) -> bool {
        if self.lines.contains_key(&id) {
            return false;
        }
        let Some(at) = self.place_of(id) else { return true };
        let Place { content, users, last_step, .. } = self.places[at];
        let free = matches!(content, Content::Holds { .. }) && users == 0 && last_step <= answered;
        if free {
            self.places[at].content = Content::Empty;
            self.places[at].vacated = false;
        }
        free
    }

    /// Forgets the content of all places, because the hand died. No request may use a place or wait
    /// for one.
    fn hand_died(&mut self) {
        let count = self.places.len() as u32;
        *self = Self { next_ticket: self.next_ticket, ..Self::new(count) };
    }

    pub(crate) fn stats(&self) -> PlaceStats {
        let mut stats = PlaceStats::default();
        for place in &self.places {
            *match place.content {
                Content::Empty => &mut stats.empty,
                Content::Coming { .. } => &mut stats.coming,
                Content::Holds { .. } if place.users == 0 => &mut stats.unused,
                Content::Holds { .. } => &mut stats.used,
            } += 1;
        }
        stats.waiting = self.lines.values().map(|line| line.waiting.len()).sum();
        stats
    }

    /// Checks the users of places and the queue against the live requests.
    pub(crate) fn check<'a>(
        &self,
        entries: impl Iterator<Item = (Handle, &'a Entry)>,
    ) -> Result<(), String> {
        let mut users = vec![0; self.places.len()];
        let mut waiting = 0;
        for (handle, entry) in entries {
            let (request, seat) = (&entry.request, entry.seat);
            let (id, adapter) = (request.id, request.adapter);
            let fine = match (seat, adapter) {
                (Seat::None, adapter) => adapter.is_none() || request.held || entry.leaving,
                (Seat::Place(at), Some(adapter)) => {
                    users[at as usize] += 1;
                    self.places[at as usize].content == Content::Holds { id: adapter }
                }
                (Seat::Waits, Some(adapter)) => {
                    waiting += 1;
                    let line = self.lines.get(&adapter);
                    let there = line.is_some_and(|it| it.waiting.contains(&(entry.key, handle)));
                    there && entry.residence.is_none()
                }
                (_, None) => false,
            };
            if !fine {
                return Err(format!("request {id} of adapter {adapter:?} has {seat:?}"));
            }
        }
        let counted: Vec<u32> = self.places.iter().map(|place| place.users).collect();
        let all: usize = self.lines.values().map(|line| line.waiting.len()).sum();
        if users == counted && all == waiting {
            return Ok(());
        }
        Err(format!(
            "places: {users:?} use them, {counted:?} are counted; {waiting} and {all} wait"
        ))
    }
}

impl Scheduler {
    /// Puts a request without a slot into the queue, or makes it wait for a place for its adapter
    /// first.
    pub(crate) fn line_up(&mut self, handle: Handle) {
        let entry = &mut self.roster[handle];
        if self.places.enter(handle, entry) {
            self.turns.line_up(handle, entry, &self.memory);
        }
    }

    /// Gives places to adapters that requests wait for.
    pub(crate) fn plan_places(&mut self, plan: &mut StepPlan) {
        let answered = self.steps.answered();
        // Assign again: if the vacated place has no running requests, it is unused at once. No
        // later result might then trigger another plan.
        if self.places.assign(plan, answered) && self.vacate_place() {
            self.places.assign(plan, answered);
        }
    }

    /// Vacates the place with the fewest running requests. Requests that use the place but have no
    /// slot wait for a place again, because they would keep this place in use. Returns false if
    /// none can be vacated.
    fn vacate_place(&mut self) -> bool {
        let roster = &self.roster;
        let running = |at| {
            let residents = roster.residents.values().map(|&handle| &roster[handle]);
            residents.filter(|entry| entry.seat == Seat::Place(at)).count()
        };
        let Some(at) = self.places.vacate(running) else { return false };
        let requests = self.roster.requests.iter();
        let queued = requests
            .filter(|(_, entry)| entry.seat == Seat::Place(at) && entry.residence.is_none());
        let queued: Vec<Handle> = queued.map(|(handle, _)| handle).collect();
        for handle in queued {
            self.turns.leave(&self.roster[handle].ticket(handle));
            let entry = &mut self.roster[handle];
            let may = self.places.enter(handle, entry);
            debug_assert!(!may, "the place was vacated");
        }
        true
    }

    /// Applies the ends of adapter loads. If an adapter can't be loaded, its requests end.
    pub(crate) fn places_ended(&mut self, ends: &[PlaceEnd], events: &mut Vec<Event>) {
        for &end in ends {
            for handle in self.places.ended(end) {
                if end.error != PLACE_OK {
                    let reason = Finish::NoAdapter { error: end.error };
                    events.push(Event::Finished { id: self.roster[handle].request.id, reason });
                    self.remove(handle);
                    continue;
                }
                self.places.leave(handle, &mut self.roster[handle]);
                self.line_up(handle);
            }
        }
    }

    /// Makes every request leave its place, because the hand died.
    pub(crate) fn empty_places(&mut self) {
        for (handle, entry) in self.roster.requests.iter_mut() {
            self.places.leave(handle, entry);
        }
        self.places.hand_died();
    }

    /// Empties the place of an unused adapter. Returns false if a request or a plan in flight still
    /// needs it.
    pub fn forget_adapter(&mut self, id: u32) -> bool {
        self.places.forget(id, self.steps.answered())
    }
}
