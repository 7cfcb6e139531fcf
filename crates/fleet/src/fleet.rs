//! The state machine of the fleet: see the crate.

use std::collections::{BTreeMap, HashMap};

use crate::line::Line;
use crate::model::{FleetModel, Member, ModelState, Phase, SleepLevel};

/// The bounds of a fleet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetBounds {
    /// The largest number of bytes of all models in memory.
    pub memory_bytes: u64,
    /// The largest number of models in memory.
    pub models_max: usize,
    /// The largest number of requests that wait for one model.
    pub queue: usize,
    /// The minimum stay of a model, in milliseconds. Busy models are not closed for a request that
    /// has waited less than this.
    pub stay_ms: u64,
    /// For this many milliseconds after a failure a model is not loaded again.
    pub pause_ms: u64,
}

impl Default for FleetBounds {
    fn default() -> Self {
        Self {
            memory_bytes: u64::MAX,
            models_max: usize::MAX,
            queue: 256,
            stay_ms: 2000,
            pause_ms: 5000,
        }
    }
}

/// A place in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

/// The answer to a new request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FleetEntry {
    /// The request runs, until [`Fleet::finish`].
    Running,
    /// The request waits for [`FleetAction::Admit`] or [`FleetAction::Fail`], or until its client
    /// gives up.
    Waiting(Ticket),
}

/// The reason why a request cannot even wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FleetRefusal {
    /// The maximum number of requests is waiting for the model already.
    QueueFull {
        /// The number of waiting requests.
        waiting: usize,
    },
    /// The model never fits with the pinned ones.
    TooLarge {
        /// The planned bytes of the model.
        bytes: u64,
        /// The bytes that the model may take.
        most: u64,
    },
    /// Pinned models take all places.
    NoPlace,
    /// The last load has failed, or the model has died, a short while ago.
    Paused {
        /// Milliseconds until it may be loaded again.
        remaining_ms: u64,
    },
}

/// The caller's next action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FleetAction {
    /// Load the model. Then [`Fleet::loaded`] or [`Fleet::load_failed`].
    Load {
        /// The model's place in the list of models.
        model: usize,
        /// Bytes that the model may take.
        bytes: u64,
    },
    /// Take the model out of memory. Then [`Fleet::emptied`].
    Leave {
        /// The model's place in the list of models.
        model: usize,
        /// The sleep level afterwards.
        level: SleepLevel,
    },
    /// Have the waiting request run.
    Admit {
        /// The request.
        ticket: Ticket,
    },
    /// End the waiting request with an error.
    Fail {
        /// The request.
        ticket: Ticket,
    },
}

#[derive(Debug, Clone, Copy)]
struct Waiter {
    model: usize,
    client: u64,
    since_ms: u64,
}

/// Several models, of which some are in memory.
#[derive(Debug)]
pub struct Fleet {
    config: FleetBounds,
    members: Vec<Member>,
    /// The waiting requests, in the order of arrival.
    queue: BTreeMap<Ticket, Waiter>,
    /// The clients of these requests, in the order of their turns.
    line: Line,
    next_ticket: u64,
    /// Decisions that the next poll returns.
    decided: Vec<FleetAction>,
}

impl Fleet {
    /// A fleet of models, none of which is loaded.
    #[must_use]
    pub fn new(config: FleetBounds, models: Vec<FleetModel>) -> Self {
        let members = models.into_iter().map(Member::new).collect();
        let (queue, line) = (BTreeMap::new(), Line::default());
        Self { config, members, queue, line, next_ticket: 0, decided: Vec::new() }
    }

    /// The state of a model.
    #[must_use]
    pub fn state(&self, model: usize) -> ModelState {
        self.members[model].state()
    }

    /// Running and waiting requests of a model.
    #[must_use]
    pub fn requests(&self, model: usize) -> (usize, usize) {
        (self.members[model].running, self.members[model].waiting)
    }

    /// Bytes that a model has in memory; 0: it is not in memory.
    #[must_use]
    pub fn held(&self, model: usize) -> u64 {
        self.members[model].held
    }

    /// Bytes of all models in memory.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.members.iter().map(|member| member.held).sum()
    }

    /// When a model leaves if no request comes; `None`: it stays, or is busy.
    #[must_use]
    pub fn idle_until_ms(&self, model: usize) -> Option<u64> {
        self.members[model].idle_until_ms()
    }

    /// Sets the memory limit. Models leave until the rest fits.
    pub fn set_memory(&mut self, bytes: u64) {
        self.config.memory_bytes = bytes;
    }

    /// Sets the bytes that the next load of a model may take.
    pub fn set_plan(&mut self, model: usize, bytes: u64) {
        self.members[model].model.bytes = bytes;
    }

    /// A client, given by any number, requests a model.
    ///
    /// # Errors
    /// It cannot even wait.
    pub fn enter(
        &mut self,
        model: usize,
        client: u64,
        now_ms: u64,
    ) -> Result<FleetEntry, FleetRefusal> {
        let member = &self.members[model];
        if member.is_open() && member.waiting == 0 {
            let member = &mut self.members[model];
            member.running += 1;
            member.used_ms = now_ms;
            return Ok(FleetEntry::Running);
        }
        if member.paused_until_ms > now_ms {
            return Err(FleetRefusal::Paused { remaining_ms: member.paused_until_ms - now_ms });
        }
        if matches!(member.phase, Phase::Out(_)) {
            self.fits(model)?;
        }
        let waiting = self.members[model].waiting;
        if waiting >= self.config.queue {
            return Err(FleetRefusal::QueueFull { waiting });
        }
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        self.queue.insert(ticket, Waiter { model, client, since_ms: now_ms });
        self.line.enter(client);
        self.members[model].waiting += 1;
        Ok(FleetEntry::Waiting(ticket))
    }

    /// Checks that a model fits together with the pinned ones.
    ///
    /// # Errors
    /// It never does.
    pub fn fits(&self, model: usize) -> Result<(), FleetRefusal> {
        let others = self.members.iter().enumerate().filter(|(other, _)| *other != model);
        let pinned = others.filter(|(_, member)| member.model.pinned);
        let (mut bytes, mut count) = (0u64, 0usize);
        for (_, member) in pinned {
            bytes = bytes.saturating_add(member.held.max(member.model.bytes));
            count += 1;
        }
        if count >= self.config.models_max {
            return Err(FleetRefusal::NoPlace);
        }
        let most = self.config.memory_bytes.saturating_sub(bytes);
        let bytes = self.members[model].model.bytes;
        if bytes > most { Err(FleetRefusal::TooLarge { bytes, most }) } else { Ok(()) }
    }

    /// Gives up a waiting request. False: it was admitted or has failed already.
    pub fn give_up(&mut self, ticket: Ticket) -> bool {
        let waiter = self.queue.remove(&ticket);
        if let Some(waiter) = waiter {
            self.members[waiter.model].waiting -= 1;
            self.line.leave(waiter.client);
        }
        waiter.is_some()
    }

    /// Records that a running request has ended.
    pub fn finish(&mut self, model: usize, now_ms: u64) {
        let member = &mut self.members[model];
        member.running -= 1;
        member.used_ms = now_ms;
    }

    /// Records that a model has been loaded, and takes `bytes` bytes.
    pub fn loaded(&mut self, model: usize, bytes: u64, now_ms: u64) {
        let stay = self.config.stay_ms;
        let member = &mut self.members[model];
        let Phase::Loading { began_ms } = member.phase else { return };
        let stay_ms = stay.max(now_ms.saturating_sub(began_ms));
        member.phase = Phase::In { since_ms: now_ms, stay_ms, closed: None };
        (member.held, member.used_ms) = (bytes, now_ms);
        // The waiting request runs first, before the model can be closed again.
        self.admit(model, now_ms);
    }

    /// Records that a model could not be loaded. All requests waiting for it fail.
    pub fn load_failed(&mut self, model: usize, now_ms: u64) {
        let member = &mut self.members[model];
        if !matches!(member.phase, Phase::Loading { .. }) {
            return;
        }
        self.lost(model, now_ms);
        self.fail_waiting(model);
    }

    /// Records that a model in memory has died. Requests waiting for it keep waiting.
    pub fn died(&mut self, model: usize, now_ms: u64) {
        if matches!(self.members[model].phase, Phase::In { .. }) {
            self.lost(model, now_ms);
        }
    }

    fn lost(&mut self, model: usize, now_ms: u64) {
        let pause = self.config.pause_ms;
        let member = &mut self.members[model];
        member.phase = Phase::Out(SleepLevel::Unloaded);
        (member.held, member.keep, member.dismissed) = (0, None, None);
        member.paused_until_ms = now_ms.saturating_add(pause);
    }

    /// Records that a model is no longer in memory.
    pub fn emptied(&mut self, model: usize) {
        let member = &mut self.members[model];
        if let Phase::Leaving(level) = member.phase {
            member.phase = Phase::Out(level);
            (member.held, member.keep, member.dismissed) = (0, None, None);
        }
    }

    /// Makes a model leave, even if it is pinned, once its running requests have finished.
    pub fn dismiss(&mut self, model: usize, level: SleepLevel) {
        let member = &mut self.members[model];
        match &mut member.phase {
            Phase::Out(now) if level == SleepLevel::Unloaded => *now = level,
            Phase::Out(_) | Phase::Leaving(_) => {}
            Phase::Loading { .. } | Phase::In { .. } => member.dismissed = Some(level),
        }
    }

    /// Sets after how many milliseconds without a request a model leaves, until it has left once;
    /// inner `None`: never. Outer `None`: its own setting.
    pub fn keep(&mut self, model: usize, idle_ms: Option<Option<u64>>) {
        self.members[model].keep = idle_ms;
    }

    /// The actions to take now.
    #[must_use]
    pub fn poll(&mut self, now_ms: u64) -> Vec<FleetAction> {
        self.close_and_open(now_ms);
        self.shrink();
        self.load(now_ms);
        for model in 0..self.members.len() {
            if self.members[model].is_open() {
                self.admit(model, now_ms);
            }
        }
        // Closed models without running requests leave.
        for (model, member) in self.members.iter_mut().enumerate() {
            if let Phase::In { closed: Some(level), .. } = member.phase
                && member.running == 0
            {
                member.phase = Phase::Leaving(level);
                self.decided.push(FleetAction::Leave { model, level });
            }
        }
        std::mem::take(&mut self.decided)
    }

    /// Reopens all models that were closed for another one, and decides again. Closes dismissed and
    /// idle ones.
    fn close_and_open(&mut self, now_ms: u64) {
        for member in &mut self.members {
            let dismissed = member.dismissed;
            if let Phase::In { closed, .. } = &mut member.phase {
                *closed = dismissed;
            }
            if member.idle_until_ms().is_some_and(|until| until <= now_ms) {
                member.close(SleepLevel::Asleep);
            }
        }
    }

    /// Removes the waiting requests of a model from the queue.
    fn take_waiting(&mut self, model: usize) -> Vec<Ticket> {
        if self.members[model].waiting == 0 {
            return Vec::new();
        }
        let theirs = self.queue.iter().filter(|(_, waiter)| waiter.model == model);
        let theirs: Vec<Ticket> = theirs.map(|(ticket, _)| *ticket).collect();
        for ticket in &theirs {
            if let Some(waiter) = self.queue.remove(ticket) {
                self.line.leave(waiter.client);
            }
        }
        self.members[model].waiting = 0;
        theirs
    }

    fn admit(&mut self, model: usize, now_ms: u64) {
        let theirs = self.take_waiting(model);
        if !theirs.is_empty() {
            self.members[model].running += theirs.len();
            self.members[model].used_ms = now_ms;
        }
        self.decided.extend(theirs.into_iter().map(|ticket| FleetAction::Admit { ticket }));
    }

    fn fail_waiting(&mut self, model: usize) {
        let theirs = self.take_waiting(model).into_iter();
        self.decided.extend(theirs.map(|ticket| FleetAction::Fail { ticket }));
    }

    fn bytes_given_back(&self) -> u64 {
        self.members.iter().filter(|member| member.gives_back()).map(|member| member.held).sum()
    }

    fn shrink(&mut self) {
        let excess = self.used().saturating_sub(self.config.memory_bytes);
        let excess = excess.saturating_sub(self.bytes_given_back());
        let mut freed = 0;
        for model in self.victims(|_| true, true) {
            if freed >= excess {
                break;
            }
            freed += self.members[model].held;
            self.members[model].close(SleepLevel::Asleep);
        }
    }

    /// Models that may leave for another one, in order: idle ones by last use, then busy ones by
    /// how long they have been loaded.
    fn victims(&self, may: impl Fn(&Member) -> bool, busy: bool) -> Vec<usize> {
        let open = self.members.iter().enumerate().filter(|(_, member)| member.is_open());
        let open = open.filter(|(_, member)| may(member) && (busy || member.running == 0));
        let key = |member: &Member| match member.phase {
            Phase::In { since_ms, .. } if member.running > 0 => (member.model.pinned, 1, since_ms),
            _ => (member.model.pinned, 0, member.used_ms),
        };
        let mut found: Vec<_> = open.map(|(model, member)| (key(member), model)).collect();
        found.sort_unstable();
        found.into_iter().map(|(_, model)| model).collect()
    }

    /// Starts the loads that fit, in the order of the clients' turns. For the first load that does
    /// not fit, other models are closed, and later loads wait.
    fn load(&mut self, now_ms: u64) {
        while let Some(Waiter { model, client, since_ms }) = self.next_load(now_ms) {
            // The memory may have shrunk since the request came.
            if self.fits(model).is_err() {
                self.fail_waiting(model);
                continue;
            }
            let bytes = self.members[model].model.bytes;
            if self.lacks(bytes, 0, 0) {
                self.make_room(bytes, since_ms, now_ms);
                return;
            }
            let member = &mut self.members[model];
            member.phase = Phase::Loading { began_ms: now_ms };
            member.held = bytes;
            self.decided.push(FleetAction::Load { model, bytes });
            self.line.serve(client);
        }
    }

    /// The request whose model is loaded next: the oldest one of the first client in the queue that
    /// has such a request.
    fn next_load(&self, now_ms: u64) -> Option<Waiter> {
        let mut oldest = HashMap::new();
        for &waiter in self.queue.values() {
            let member = &self.members[waiter.model];
            if matches!(member.phase, Phase::Out(_)) && member.paused_until_ms <= now_ms {
                oldest.entry(waiter.client).or_insert(waiter);
            }
        }
        self.line.clients().find_map(|client| oldest.get(&client).copied())
    }

    /// True if `bytes` bytes do not fit after `left` models have freed `freed` bytes.
    fn lacks(&self, bytes: u64, freed: u64, left: usize) -> bool {
        let inside = self.members.iter().filter(|member| !matches!(member.phase, Phase::Out(_)));
        let used = self.used().saturating_sub(freed);
        used.saturating_add(bytes) > self.config.memory_bytes
            || inside.count().saturating_sub(left) >= self.config.models_max
    }

    /// Closes models for one of `bytes` bytes whose oldest request has waited since `since_ms`, if
    /// that frees enough.
    fn make_room(&mut self, bytes: u64, since_ms: u64, now_ms: u64) {
        let mut freed = self.bytes_given_back();
        let mut left = self.members.iter().filter(|member| member.gives_back()).count();
        let has_waited = now_ms.saturating_sub(since_ms) >= self.config.stay_ms;
        let may = |member: &Member| {
            !member.model.pinned && member.stays_until_ms().is_some_and(|until| until <= now_ms)
        };
        let mut chosen = Vec::new();
        for model in self.victims(may, has_waited) {
            if !self.lacks(bytes, freed, left) {
                break;
            }
            freed += self.members[model].held;
            left += 1;
            chosen.push(model);
        }
        if self.lacks(bytes, freed, left) {
            return;
        }
        for model in chosen {
            self.members[model].close(SleepLevel::Asleep);
        }
    }

    /// When [`Fleet::poll`] may next have an action although nothing happens before.
    #[must_use]
    pub fn next_wake(&self, now_ms: u64) -> Option<u64> {
        let idle = self.members.iter().filter_map(Member::idle_until_ms);
        let stays = self.members.iter().filter_map(Member::stays_until_ms);
        let stays = stays.filter(|_| !self.queue.is_empty());
        let stay = self.config.stay_ms;
        let patience = self.queue.values().map(|waiter| waiter.since_ms.saturating_add(stay));
        let waited_for = self.members.iter().filter(|member| member.waiting > 0);
        let pauses = waited_for.map(|member| member.paused_until_ms);
        idle.chain(stays).chain(patience).chain(pauses).filter(|&time| time > now_ms).min()
    }
}
