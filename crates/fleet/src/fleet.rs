//! The state machine of the fleet. The crate's documentation describes its rules.

use std::collections::{BTreeMap, HashMap};

use crate::line::Line;
use crate::model::{FleetModel, Member, ModelState, Phase, SleepLevel};

/// The limits of a fleet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetBounds {
    /// The largest number of bytes of all models in memory.
    pub memory_bytes: u64,
    /// The largest number of models in memory.
    pub models_max: usize,
    /// The largest number of requests that wait for one model.
    pub queue: usize,
    /// The minimum stay of a model in memory, in milliseconds. Also, a request must have waited
    /// this long before busy models are closed for it.
    pub stay_ms: u64,
    /// The time after a failure during which a model is not loaded again, in milliseconds.
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

/// A handle to a waiting request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

/// The outcome for a new request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FleetEntry {
    /// The request runs, until the caller reports its end with [`Fleet::finish`].
    Running,
    /// The request waits until [`FleetAction::Admit`], [`FleetAction::Fail`], or
    /// [`Fleet::give_up`].
    Waiting(Ticket),
}

/// The reason why a request is refused without waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FleetRefusal {
    /// The model's queue is full.
    QueueFull {
        /// The number of waiting requests.
        waiting: usize,
    },
    /// The model can never fit into memory together with the pinned models.
    TooLarge {
        /// The number of bytes that the model is expected to take.
        bytes: u64,
        /// The largest number of bytes that the model may take.
        most: u64,
    },
    /// The number of pinned models has already reached the limit on models in memory.
    NoPlace,
    /// The last load failed, or the model died, a short while ago.
    Paused {
        /// Milliseconds until the model may be loaded again.
        remaining_ms: u64,
    },
}

/// An action that the caller has to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FleetAction {
    /// Load the model, then call [`Fleet::loaded`] or [`Fleet::load_failed`].
    Load {
        /// The index of the model.
        model: usize,
        /// The number of bytes that the model may take.
        bytes: u64,
    },
    /// Remove the model from memory, then call [`Fleet::emptied`].
    Leave {
        /// The index of the model.
        model: usize,
        /// The sleep level of the model after that.
        level: SleepLevel,
    },
    /// Run the waiting request.
    Admit {
        /// The request.
        ticket: Ticket,
    },
    /// Fail the waiting request with an error.
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

/// Several models, some of which are in memory.
#[derive(Debug)]
pub struct Fleet {
    config: FleetBounds,
    members: Vec<Member>,
    /// The waiting requests, in the order of arrival.
    queue: BTreeMap<Ticket, Waiter>,
    /// The clients with waiting requests, in the order of their turns.
    line: Line,
    next_ticket: u64,
    /// The actions that the next poll returns.
    decided: Vec<FleetAction>,
}

impl Fleet {
    /// Creates a fleet in which no model is loaded.
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

    /// Returns the counts of running and of waiting requests of a model.
    #[must_use]
    pub fn requests(&self, model: usize) -> (usize, usize) {
        (self.members[model].running, self.members[model].waiting)
    }

    /// The number of bytes that a model takes in memory; 0: it is not in memory.
    #[must_use]
    pub fn held(&self, model: usize) -> u64 {
        self.members[model].held
    }

    /// The number of bytes that all models take in memory.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.members.iter().map(|member| member.held).sum()
    }

    /// The time at which a model leaves if no request arrives; `None`: it stays, or is busy.
    #[must_use]
    pub fn idle_until_ms(&self, model: usize) -> Option<u64> {
        self.members[model].idle_until_ms()
    }

    /// Sets the memory limit. If necessary, models leave until the rest fits.
    pub fn set_memory(&mut self, bytes: u64) {
        self.config.memory_bytes = bytes;
    }

    /// Sets the number of bytes that the next load of a model may take.
    pub fn set_plan(&mut self, model: usize, bytes: u64) {
        self.members[model].model.bytes = bytes;
    }

    /// Enters a request of a client for a model. Any number can identify a client.
    ///
    /// # Errors
    /// The request is refused without waiting.
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

    /// Checks that a model fits into memory together with the pinned models.
    ///
    /// # Errors
    /// The model never fits.
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

    /// Removes a request that gives up waiting. Returns false if it was already admitted or failed.
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

    /// Records that a model has been loaded and takes `bytes` bytes.
    pub fn loaded(&mut self, model: usize, bytes: u64, now_ms: u64) {
        let stay = self.config.stay_ms;
        let member = &mut self.members[model];
        let Phase::Loading { began_ms } = member.phase else { return };
        let stay_ms = stay.max(now_ms.saturating_sub(began_ms));
        member.phase = Phase::In { since_ms: now_ms, stay_ms, closed: None };
        (member.held, member.used_ms) = (bytes, now_ms);
        // Admit the waiting requests before the model can be closed again.
        self.admit(model, now_ms);
    }

    /// Records that a model could not be loaded. All requests that wait for it fail.
    pub fn load_failed(&mut self, model: usize, now_ms: u64) {
        let member = &mut self.members[model];
        if !matches!(member.phase, Phase::Loading { .. }) {
            return;
        }
        self.lost(model, now_ms);
        self.fail_waiting(model);
    }

    /// Records that a model in memory has died. Requests that wait for it keep waiting.
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

    /// Sets the idle time in milliseconds after which a model leaves. Inner `None`: it never
    /// leaves. Outer `None`: the model's own setting applies. The new value is forgotten once the
    /// model has left.
    pub fn keep(&mut self, model: usize, idle_ms: Option<Option<u64>>) {
        self.members[model].keep = idle_ms;
    }

    /// Returns the actions to take now.
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

    /// Reopens all models that were closed to make room for others: each poll decides anew which to
    /// close for that. Closes dismissed and idle models.
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

    /// Returns the models that may leave for another one, in order: idle ones by last use, then
    /// busy ones by load time, oldest first. Pinned models come last.
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
    /// not fit, closes other models; later loads wait.
    fn load(&mut self, now_ms: u64) {
        while let Some(Waiter { model, client, since_ms }) = self.next_load(now_ms) {
            // The memory limit may have been lowered since the request arrived.
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

    /// Returns the request whose model is loaded next. It belongs to the first client in the queue
    /// that waits for a loadable model, and is that client's oldest such request.
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

    /// True if a model of `bytes` bytes does not fit, after `left` models have left and freed
    /// `freed` bytes.
    fn lacks(&self, bytes: u64, freed: u64, left: usize) -> bool {
        let inside = self.members.iter().filter(|member| !matches!(member.phase, Phase::Out(_)));
        let used = self.used().saturating_sub(freed);
        used.saturating_add(bytes) > self.config.memory_bytes
            || inside.count().saturating_sub(left) >= self.config.models_max
    }

    /// Closes models to make room for a model of `bytes` bytes, if that frees enough. The request
    /// for that model has waited since `since_ms`.
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

    /// Returns the next time at which [`Fleet::poll`] may have an action even if nothing else
    /// happens.
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
