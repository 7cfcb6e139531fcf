//! Copies pages between hot memory and host memory, in parallel with the steps.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_protocol::{
    COPY_FAILED, COPY_OK, CopyEnd, CopyTiming, HandConfig, PageCopy, StepPlan, StepResult,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::descriptors::PageMemory;
use crate::host::{HostCounts, HostTier};
use crate::states::{StateMemory, StateSteps, States};
use crate::tables::{PlanError, wrong};

/// Copies pages on a separate thread, and reports finished copies.
///
/// Saves are submitted once the rows of their plan have been computed. A restore can start at once,
/// because no plan in flight names its target. Restores take precedence over saves, because
/// requests wait for restores.
pub(crate) struct Copier {
    queue: Arc<Queue>,
    hot_pages: u32,
    host: HostCounts,
    lenders: usize,
    /// The number of copies that have not been reported as finished yet.
    outstanding: usize,
}

/// Queued copies, and finished copies.
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    /// Readable when a copy has finished.
    news: OwnedFd,
}

/// A copy to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Job {
    copy: PageCopy,
    /// The number of positions in the state, if the copy saves a state.
    seen: u32,
}

#[derive(Default)]
struct State {
    saves: VecDeque<Job>,
    restores: VecDeque<Job>,
    ended: Vec<CopyEnd>,
    /// State pages to which a state was restored, with the number of positions in each state.
    brought: Vec<(u32, u32)>,
    /// The time spent on saves, and on restores, since the last report.
    busy: [Duration; 2],
    /// True if the copier was dropped: no more copies are done.
    over: bool,
}

/// The state of the copying thread.
struct Copying {
    memory: PageMemory,
    states: Option<StateMemory>,
    tier: HostTier,
    checksums: bool,
    /// The limit in bytes per second, for tests.
    rate: Option<f64>,
}

/// Checks that a plan has no copies, for a hand without a host tier.
pub(crate) fn check_no_copies(plan: &StepPlan) -> Result<(), PlanError> {
    match plan.copies().len() {
        0 => Ok(()),
        _ => wrong("copies of pages in a plan for a hand without a host tier"),
    }
}

impl Copier {
    /// Starts copying between `memory`, which has `hot_pages` pages, and `tier`. `states` are the
    /// state pages, if the model has recurrent layers.
    pub(crate) fn start(
        config: &HandConfig,
        memory: PageMemory,
        hot_pages: usize,
        states: Option<StateMemory>,
        tier: HostTier,
    ) -> io::Result<Self> {
        let (host, lenders) = (tier.counts(), tier.lenders());
        let news = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let state = Mutex::new(State::default());
        let queue = Arc::new(Queue { state, changed: Condvar::new(), news });
        let rate = config.copy_gbps.map(|gbps| gbps * 1e9);
        let checksums = config.kv_checksum;
        let mut copying = Copying { memory, states, tier, checksums, rate };
        let of_thread = queue.clone();
        // When the `Copier` is dropped, the thread ends after its current copy.
        std::thread::Builder::new().name("copier".into()).spawn(move || {
            while let Some(job) = of_thread.next() {
                let begun = Instant::now();
                let done = copying.copy(&job);
                if let Err(error) = &done {
                    // The brain recomputes a block that can't be restored.
                    eprintln!("a page was not copied: {error}");
                }
                copying.slow_down(&job.copy, begun.elapsed());
                of_thread.end(&job.copy, done.ok(), begun.elapsed());
            }
        })?;
        let hot_pages = u32::try_from(hot_pages).unwrap_or(u32::MAX);
        Ok(Self { queue, hot_pages, host, lenders, outstanding: 0 })
    }

    /// Checks the copies of a plan, and submits its restores.
    pub(crate) fn restore(&mut self, plan: &StepPlan) -> Result<(), PlanError> {
        plan.copies().try_for_each(|copy| self.check(&copy))?;
        let restores = plan.copies().filter(|copy| !copy.direction.is_save());
        self.submit(restores.map(|copy| Job { copy, seen: 0 }), |state| &mut state.restores);
        Ok(())
    }

    /// Submits the saves of a plan whose rows are computed and whose states are in their pages.
    pub(crate) fn save(&mut self, plan: &StepPlan, states: &StateSteps) {
        let mut seen = states.to_host.iter().copied();
        let saves = plan.copies().filter(|copy| copy.direction.is_save());
        let jobs = saves.map(|copy| {
            let seen = if copy.direction.is_of_state() { seen.next() } else { None };
            Job { copy, seen: seen.unwrap_or(0) }
        });
        self.submit(jobs, |state| &mut state.saves);
    }

    fn submit(
        &mut self,
        jobs: impl Iterator<Item = Job>,
        of: impl Fn(&mut State) -> &mut VecDeque<Job>,
    ) {
        let mut state = self.queue.lock();
        let waiting = of(&mut state);
        let before = waiting.len();
        waiting.extend(jobs);
        self.outstanding += waiting.len() - before;
        drop(state);
        self.queue.changed.notify_one();
    }

    fn check(&self, copy: &PageCopy) -> Result<(), PlanError> {
        let &Self { hot_pages, host, lenders, .. } = self;
        let Some(hot) = copy.hot.filter(|_| copy.span.is_none()) else {
            return wrong("a copy of a part of a page, for a hand that copies whole pages");
        };
        if let Some(lender) = copy.lender.filter(|&lender| lender as usize >= lenders) {
            return wrong(format!("a copy from lender {} of {lenders}", u64::from(lender) + 1));
        }
        // `States::read` has checked the state pages of the device.
        let is_of_state = copy.direction.is_of_state();
        let host_pages = if is_of_state { host.state_pages } else { host.pages };
        // A lender's pages are checked when they are read.
        if !is_of_state && hot >= hot_pages || copy.lender.is_none() && copy.host >= host_pages {
            return wrong(format!(
                "a copy outside of {hot_pages} pages and {host_pages} of the host"
            ));
        }
        Ok(())
    }

    /// True if any copy has not been reported as finished yet.
    pub(crate) fn is_busy(&self) -> bool {
        self.outstanding > 0
    }

    /// Waits until a copy finishes, up to this many microseconds, or until `socket` is readable.
    /// Returns at once if there are no copies in flight.
    pub(crate) fn wait(&self, us: u32, socket: BorrowedFd<'_>) {
        let mut count = [0; 8];
        // The read fails if no copy has finished since the last call.
        let _ = rustix::io::read(&self.queue.news, &mut count);
        if !self.is_busy() || !self.queue.lock().ended.is_empty() {
            return;
        }
        let mut fds =
            [PollFd::new(&self.queue.news, PollFlags::IN), PollFd::new(&socket, PollFlags::IN)];
        let limit = Timespec {
            tv_sec: i64::from(us / 1_000_000),
            tv_nsec: i64::from(us % 1_000_000) * 1000,
        };
        // A signal ends the wait early, just as the next plan does.
        let _ = poll(&mut fds, Some(&limit));
    }

    /// Adds the copies that finished since the last call to a result, and records the positions of
    /// restored states.
    pub(crate) fn report(&mut self, result: &mut StepResult, states: Option<&mut States>) {
        let mut state = self.queue.lock();
        if state.ended.is_empty() {
            return;
        }
        let brought = std::mem::take(&mut state.brought);
        if let Some(states) = states {
            brought.into_iter().for_each(|(page, seen)| states.has_come(page, seen));
        }
        result.copied = std::mem::take(&mut state.ended);
        self.outstanding -= result.copied.len();
        let [save_us, restore_us] = state.busy.each_mut().map(|busy| {
            let us = u32::try_from(busy.as_micros()).unwrap_or(u32::MAX);
            // Fractions of a microsecond are carried over to the next report.
            *busy -= Duration::from_micros(us.into());
            us
        });
        result.copy_timing = Some(CopyTiming { save_us, restore_us });
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        self.queue.lock().over = true;
        self.queue.changed.notify_one();
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next copy; `None` if the copier was dropped.
    fn next(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if state.over {
                return None;
            }
            if let Some(job) = state.restores.pop_front().or_else(|| state.saves.pop_front()) {
                return Some(job);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Records a finished copy. `done` is `None` if the copy failed. Its inner value is the number
    /// of positions in a restored state.
    fn end(&self, copy: &PageCopy, done: Option<Option<u32>>, taken: Duration) {
        let error = if done.is_some() { COPY_OK } else { COPY_FAILED };
        let mut state = self.lock();
        state.ended.push(CopyEnd { ticket: copy.ticket, error });
        state.brought.extend(copy.hot.zip(done.flatten()));
        state.busy[usize::from(!copy.direction.is_save())] += taken;
        drop(state);
        // The write fails only if the counter of the eventfd is full. `news` is readable then too.
        let _ = rustix::io::write(&self.news, &1_u64.to_ne_bytes());
    }
}

impl Copying {
    /// Copies a page. Returns the number of positions in a restored state.
    fn copy(&mut self, &Job { copy, seen }: &Job) -> io::Result<Option<u32>> {
        let no_page = || io::Error::other("no such page");
        let is_of_state = copy.direction.is_of_state();
        let pages = match (copy.lender, is_of_state) {
            (None, false) => self.tier.own(),
            (None, true) => self.tier.own_states(),
            (Some(lender), false) => self.tier.of(lender)?,
            (Some(lender), true) => self.tier.states_of(lender)?,
        };
        let hot = copy.hot.ok_or_else(no_page)?;
        let (memory, hot) = match &mut self.states {
            Some(states) if is_of_state => {
                let row = states.row(hot);
                (&mut states.rows, row)
            }
            None if is_of_state => return Err(no_page()),
            _ => (&mut self.memory, hot),
        };
        if copy.direction.is_save() {
            let parts = memory.read(hot).ok_or_else(no_page)?;
            pages.write(copy.host, &parts)?;
            if is_of_state {
                pages.note_seen(copy.host, seen)?;
            }
            if self.checksums {
                pages.seal(copy.host, checksum(&parts))?;
            }
            return Ok(None);
        }
        pages.read(copy.host, memory.write(hot).ok_or_else(no_page)?)?;
        if self.checksums {
            let parts = memory.read(hot).ok_or_else(no_page)?;
            if pages.sum(copy.host)? != checksum(&parts) {
                let what = format!("host page {} is not as it was saved", copy.host);
                return Err(io::Error::other(what));
            }
        }
        if is_of_state { pages.seen(copy.host).map(Some) } else { Ok(None) }
    }

    /// Sleeps until a copy that took `taken` has lasted as long as the rate limit requires.
    fn slow_down(&self, copy: &PageCopy, taken: Duration) {
        let Some(rate) = self.rate else { return };
        let bytes = match &self.states {
            Some(states) if copy.direction.is_of_state() => states.rows.page_bytes(),
            _ => self.memory.page_bytes(),
        };
        let least = Duration::try_from_secs_f64(bytes as f64 / rate);
        std::thread::sleep(least.unwrap_or(Duration::MAX).saturating_sub(taken));
    }
}

/// The CRC32 of a page.
fn checksum(parts: &[&[u8]]) -> u32 {
    let mut sum = crc32fast::Hasher::new();
    parts.iter().for_each(|part| sum.update(part));
    sum.finalize()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use forebay_kernels::Room;
    use forebay_protocol::Direction;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;
    use crate::descriptors::HostFiles;
    use crate::host::PageSizes;

    const PAGES: usize = 4;
    /// The number of slots. In memory, their states precede the state pages.
    const ROWS: usize = 2;
    const STATE: usize = 16;

    /// Hot pages in two parts, state pages, a tier with as many pages of both kinds, and both ends
    /// of a socket.
    struct Hand {
        rooms: Vec<Room>,
        table: Room,
        states: States,
        host: OwnedFd,
        copier: Copier,
        brain: UnixStream,
        socket: UnixStream,
        ends: Vec<CopyEnd>,
    }

    fn memory() -> OwnedFd {
        memfd_create("host", MemfdFlags::CLOEXEC).expect("a file")
    }

    fn copy(ticket: u32, direction: Direction, hot: u32, host: u32) -> PageCopy {
        PageCopy { ticket, direction, hot: Some(hot), host, span: None, lender: None }
    }

    fn plan(copies: &[PageCopy]) -> StepPlan {
        let mut plan = StepPlan::default();
        plan.begin(1);
        copies.iter().for_each(|&copy| plan.push_copy(copy));
        plan
    }

    impl Hand {
        fn new(host: OwnedFd, lenders: Vec<Option<OwnedFd>>, config: &HandConfig) -> Self {
            let mut rooms = Room::parts([PAGES * 8, PAGES * 24, 0]).expect("memory");
            let kept = rooms.pop().expect("the last one");
            let own = host.try_clone().expect("a copy");
            let counts = HostCounts { pages: PAGES as u32, state_pages: PAGES as u32 };
            let sizes = PageSizes { page: 32, state: STATE as u64 };
            let tier = HostTier::open(HostFiles { own, lenders }, counts, sizes).expect("a tier");
            let memory = PageMemory::new(&mut rooms, PAGES, kept);
            let mut table = Room::new((ROWS + PAGES) * STATE).expect("memory");
            let keeper = table.keeper();
            let rows = PageMemory::new([&mut table], ROWS + PAGES, keeper);
            let of_states = Some(StateMemory { rows, first: ROWS as u32 });
            let copier = Copier::start(config, memory, PAGES, of_states, tier).expect("a thread");
            let (brain, socket) = UnixStream::pair().expect("a socket");
            let states = States::new(ROWS / 2, PAGES);
            Self { rooms, table, states, host, copier, brain, socket, ends: Vec::new() }
        }

        fn checked() -> Self {
            let config = HandConfig { kv_checksum: true, ..HandConfig::default() };
            Self::new(memory(), Vec::new(), &config)
        }

        fn step(&mut self, copies: &[PageCopy]) {
            let plan = plan(copies);
            self.copier.restore(&plan).expect("a good plan");
            let states = self.states.read(&plan).expect("good copies");
            self.copier.save(&plan, &states);
        }

        fn state(&mut self, page: usize) -> &mut [u8] {
            &mut self.table[(ROWS + page) * STATE..][..STATE]
        }

        /// Waits for the next `count` finished copies, and returns their tickets and errors.
        fn ended(&mut self, count: usize) -> Vec<(u32, i32)> {
            while self.ends.len() < count {
                self.copier.wait(1000, self.socket.as_fd());
                let mut result = StepResult::default();
                self.copier.report(&mut result, Some(&mut self.states));
                assert_eq!(result.copied.is_empty(), result.copy_timing.is_none());
                self.ends.append(&mut result.copied);
            }
            let mut ends: Vec<_> = self.ends.drain(..).map(|it| (it.ticket, it.error)).collect();
            ends.sort_unstable();
            ends
        }

        fn fill(&mut self, page: usize, value: u8) {
            self.rooms[0][page * 8..][..8].fill(value);
            self.rooms[1][page * 24..][..24].fill(value + 1);
        }

        fn page(&self, page: usize) -> [u8; 32] {
            let parts = [&self.rooms[0][page * 8..][..8], &self.rooms[1][page * 24..][..24]];
            parts.concat().try_into().expect("32 bytes")
        }
    }

    #[test]
    fn what_is_restored_is_what_was_saved_also_by_another_hand() {
        let mut hand = Hand::checked();
        hand.fill(1, 7);
        hand.fill(3, 9);
        let [first, other] = [hand.page(1), hand.page(3)];
        hand.step(&[copy(5, Direction::Save, 1, 2), copy(6, Direction::Save, 3, 0)]);
        assert_eq!(hand.ended(2), [(5, COPY_OK), (6, COPY_OK)]);
        hand.step(&[copy(7, Direction::Restore, 0, 2)]);
        assert_eq!(hand.ended(1), [(7, COPY_OK)]);
        assert_eq!(hand.page(0), first);
        let config = HandConfig { kv_checksum: true, ..HandConfig::default() };
        let Hand { host, .. } = hand;
        let mut next = Hand::new(host, Vec::new(), &config);
        next.step(&[copy(1, Direction::Restore, 2, 0)]);
        assert_eq!(next.ended(1), [(1, COPY_OK)]);
        assert_eq!(next.page(2), other);
    }

    #[test]
    fn a_page_that_is_not_as_it_was_saved_and_one_that_is_gone_are_failures() {
        let mut hand = Hand::checked();
        hand.fill(1, 7);
        hand.step(&[copy(1, Direction::Save, 1, 2), copy(2, Direction::Save, 1, 3)]);
        hand.ended(2);
        rustix::io::pwrite(&hand.host, &[1], 2 * 32 + 31).expect("written");
        hand.step(&[copy(3, Direction::Restore, 0, 2), copy(4, Direction::Restore, 2, 3)]);
        assert_eq!(hand.ended(2), [(3, COPY_FAILED), (4, COPY_OK)]);
        ftruncate(&hand.host, 3 * 32).expect("shorter");
        hand.step(&[copy(5, Direction::Restore, 0, 3)]);
        assert_eq!(hand.ended(1), [(5, COPY_FAILED)]);
    }

    #[test]
    fn a_state_comes_back_with_its_positions_also_to_another_hand_and_a_borrower() {
        let mut hand = Hand::checked();
        hand.fill(2, 7);
        hand.state(1).fill(3);
        hand.states.has_come(1, 48);
        let save = copy(6, Direction::SaveState, 1, 2);
        hand.step(&[copy(5, Direction::Save, 2, 2), save]);
        assert_eq!(hand.ended(2), [(5, COPY_OK), (6, COPY_OK)]);
        let config = HandConfig { kv_checksum: true, ..HandConfig::default() };
        let Hand { host, .. } = hand;
        let lenders = vec![Some(host.try_clone().expect("a copy"))];
        let next = Hand::new(host, Vec::new(), &config);
        let borrower = Hand::new(memory(), lenders, &config);
        for (mut hand, lender) in [(next, None), (borrower, Some(0))] {
            let restore = PageCopy { lender, ..copy(1, Direction::RestoreState, 3, 2) };
            hand.step(&[restore]);
            // The state page cannot be loaded before the copy has finished.
            let mut loads = plan(&[]);
            loads.load_state(0, 3);
            assert!(hand.states.read(&loads).is_err());
            assert_eq!(hand.ended(1), [(1, COPY_OK)]);
            assert_eq!(hand.state(3), [3; STATE]);
            hand.states.read(&loads).expect("the page has a state");
            let goes_on = |start| {
                let mut rows = plan(&[]);
                let want = forebay_protocol::Want::TOKEN;
                rows.push_row(forebay_protocol::Row { slot: 0, start, length: 1, want });
                rows
            };
            assert!(hand.states.read(&goes_on(32)).is_err(), "the state covers 48 positions");
            hand.states.read(&goes_on(48)).expect("the row starts after the state");
        }
    }

    #[test]
    fn a_state_that_is_not_as_it_was_saved_cannot_be_loaded() {
        let mut hand = Hand::checked();
        hand.states.has_come(1, 48);
        hand.step(&[copy(6, Direction::SaveState, 1, 2)]);
        hand.ended(1);
        let states = PAGES as u64 * (32 + 4);
        rustix::io::pwrite(&hand.host, &[1], states + 2 * STATE as u64).expect("written");
        hand.step(&[copy(7, Direction::RestoreState, 1, 2)]);
        assert_eq!(hand.ended(1), [(7, COPY_FAILED)]);
        let mut loads = plan(&[]);
        loads.load_state(0, 1);
        assert!(hand.states.read(&loads).is_err());
    }

    #[test]
    fn pages_are_borrowed_from_a_file_that_stays_as_it_is() {
        let mut lender = Hand::checked();
        lender.fill(1, 7);
        lender.step(&[copy(1, Direction::Save, 1, 2)]);
        lender.ended(1);
        let lenders = vec![None, Some(lender.host.try_clone().expect("a copy"))];
        let config = HandConfig { kv_checksum: true, ..HandConfig::default() };
        let mut hand = Hand::new(memory(), lenders, &config);
        let lent = |ticket, host, lender| PageCopy {
            lender: Some(lender),
            ..copy(ticket, Direction::Restore, 0, host)
        };
        hand.step(&[lent(2, 2, 1)]);
        assert_eq!(hand.ended(1), [(2, COPY_OK)]);
        assert_eq!(hand.page(0), lender.page(1));
        // A restore of a page that the lender does not have, and a restore from a replica that
        // lends nothing.
        hand.step(&[lent(3, 4, 1), lent(4, 2, 0)]);
        assert_eq!(hand.ended(2), [(3, COPY_FAILED), (4, COPY_FAILED)]);
        assert!(hand.copier.restore(&plan(&[lent(5, 2, 2)])).is_err());
    }

    #[test]
    fn restores_go_before_saves() {
        let queue = Queue {
            state: Mutex::default(),
            changed: Condvar::new(),
            news: eventfd(0, EventfdFlags::NONBLOCK).expect("a counter"),
        };
        let [save, restore] =
            [(1, Direction::Save), (2, Direction::Restore)].map(|(at, way)| copy(at, way, 0, 0));
        let [save, restore] = [save, restore].map(|copy| Job { copy, seen: 0 });
        queue.lock().saves.extend([save, save]);
        assert_eq!(queue.next(), Some(save));
        queue.lock().restores.push_back(restore);
        assert_eq!([queue.next(), queue.next()], [Some(restore), Some(save)]);
        queue.lock().over = true;
        assert_eq!(queue.next(), None);
    }

    #[test]
    fn a_frame_of_the_brain_ends_a_wait_and_so_does_an_end() {
        // At this rate a copy takes hours.
        let config = HandConfig { copy_gbps: Some(1e-12), ..HandConfig::default() };
        let mut hand = Hand::new(memory(), Vec::new(), &config);
        let forever = u32::MAX;
        // With no copy in flight, the wait returns at once.
        hand.copier.wait(forever, hand.socket.as_fd());
        hand.step(&[copy(1, Direction::Save, 0, 0)]);
        rustix::io::write(&hand.brain, b"a plan").expect("written");
        hand.copier.wait(forever, hand.socket.as_fd());
        let mut result = StepResult::default();
        hand.copier.report(&mut result, None);
        assert_eq!(result, StepResult::default());
        let (restore, taken) = (copy(9, Direction::Restore, 0, 0), Duration::from_millis(2));
        hand.copier.queue.end(&restore, Some(None), taken);
        hand.copier.wait(forever, hand.socket.as_fd());
        hand.copier.report(&mut result, None);
        assert_eq!(result.copied, [CopyEnd { ticket: 9, error: COPY_OK }]);
        assert_eq!(result.copy_timing, Some(CopyTiming { save_us: 0, restore_us: 2000 }));
    }

    #[test]
    fn copies_of_what_is_not_there_are_refused() {
        let mut hand = Hand::checked();
        let whole = copy(1, Direction::Save, 0, 0);
        let span = Some(forebay_protocol::Span { first: 0, count: 1 });
        for wrong in [
            PageCopy { hot: Some(4), ..whole },
            PageCopy { host: 4, ..whole },
            PageCopy { direction: Direction::RestoreIndex, hot: None, ..whole },
            PageCopy { span, ..whole },
            copy(1, Direction::SaveState, 0, 4),
        ] {
            assert!(hand.copier.restore(&plan(&[wrong])).is_err(), "{wrong:?}");
        }
        hand.states.has_come(1, 16);
        for wrong in [copy(1, Direction::SaveState, 0, 0), copy(1, Direction::RestoreState, 4, 0)] {
            assert!(hand.states.read(&plan(&[wrong])).is_err(), "no state, or no such page");
        }
        assert!(check_no_copies(&plan(&[whole])).is_err());
        assert!(check_no_copies(&plan(&[])).is_ok());
    }
}
