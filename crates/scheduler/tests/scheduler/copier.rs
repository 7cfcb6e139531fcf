//! Copies between a device and the host's memory, which outlives the device.

use std::ops::Range;

use forebay_protocol::{COPY_FAILED, COPY_OK, CopyEnd, Direction, PageCopy, StepPlan, StepResult};
use forebay_scheduler::SchedulerConfig;

use crate::device::{Device, GARBAGE};

/// A fault in copies of recurrent states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyFault {
    /// A restore is reported as done, but copies nothing.
    NoRestores,
    /// A save copies the page's content from before the plan.
    EarlySaves,
    /// A save writes to the page of another save.
    MixedSaves,
    /// A restore reads the state of another page.
    MixedRestores,
}

/// Copies under way, and the host's memory, which outlives the device.
pub(crate) struct Copier {
    pub(crate) pages: Vec<Vec<u64>>,
    index: Vec<Vec<u64>>,
    states: Vec<u64>,
    under_way: Vec<Copy>,
    pub(crate) fault: Option<CopyFault>,
}

struct Copy {
    step: u64,
    copy: PageCopy,
    /// Whether the copy succeeded; `None`: it has not ended.
    ended: Option<bool>,
}

impl Copier {
    pub(crate) fn new(config: &SchedulerConfig) -> Self {
        let pages = config.host.map_or(0, |host| host.pages) as usize;
        let pages = vec![vec![GARBAGE; config.page_size as usize]; pages];
        let states = config.states.map_or(0, |states| states.host_pages) as usize;
        let (index, states) = (pages.clone(), vec![GARBAGE; states]);
        Self { index, pages, states, under_way: vec![], fault: None }
    }

    pub(crate) fn outstanding(&self) -> usize {
        self.under_way.len()
    }

    /// True if a copy in flight reads or writes this state page of the device.
    pub(crate) fn has_state_page(&self, page: u32) -> bool {
        let of_states = self.under_way.iter().filter(|other| other.copy.direction.is_of_state());
        of_states.into_iter().any(|other| other.copy.hot == Some(page))
    }

    /// Drops the copies under way, because the device died.
    pub(crate) fn device_died(&mut self) {
        self.under_way.clear();
    }

    /// Runs before a step. With the fault `EarlySaves`, saves of states are done here instead of
    /// after the rows.
    pub(crate) fn start_early(&mut self, plan: &StepPlan, device: &mut Device) {
        if self.fault == Some(CopyFault::EarlySaves) {
            for copy in plan.copies().filter(|copy| copy.direction == Direction::SaveState) {
                self.move_state(&copy, device);
            }
        }
    }

    /// The third phase of a step. Half of the copies are done at once, the others when they are
    /// reported, because the scheduler may rely on neither.
    pub(crate) fn start(&mut self, plan: &StepPlan, device: &mut Device) {
        for copy in plan.copies() {
            let targets = |other: &Copy| match copy.direction {
                Direction::Save => {
                    let whole = other.copy.span.is_none() || copy.span.is_none();
                    let saves = other.copy.direction == Direction::Save;
                    saves && other.copy.host == copy.host && (whole || other.copy.span == copy.span)
                }
                Direction::Restore => {
                    !other.copy.direction.is_of_state() && other.copy.hot == copy.hot
                }
                Direction::RestoreIndex | Direction::SaveState => {
                    other.copy.direction == copy.direction && other.copy.host == copy.host
                }
                Direction::RestoreState => {
                    other.copy.direction.is_of_state() && other.copy.hot == copy.hot
                }
            };
            assert!(
                !self.under_way.iter().any(targets),
                "{copy:?} writes to the target of another copy"
            );
            assert!(self.under_way.iter().all(|other| other.copy.ticket != copy.ticket));
            match copy.direction {
                _ if copy.ticket.is_multiple_of(2) => self.move_page(&copy, device),
                Direction::Save | Direction::SaveState => {}
                // The target has no valid content until the restore is done.
                Direction::Restore | Direction::RestoreIndex | Direction::RestoreState => {
                    spoil(&copy, device);
                }
            }
            self.under_way.push(Copy { step: plan.step(), copy, ended: None });
        }
    }

    /// Marks the copy with index `at`, modulo their number, as ended. `fine` is true if it
    /// succeeded.
    pub(crate) fn end(&mut self, at: usize, fine: bool) {
        let count = self.under_way.len().max(1);
        if let Some(copy) = self.under_way.get_mut(at % count) {
            copy.ended.get_or_insert(fine);
        }
    }

    /// Adds the ended copies to the result, except copies of later steps: the worker has not read
    /// the plans of those steps yet.
    pub(crate) fn report(&mut self, result: &mut StepResult, device: &mut Device) {
        for Copy { step, copy, ended } in std::mem::take(&mut self.under_way) {
            match ended.filter(|_| step <= result.step) {
                None => self.under_way.push(Copy { step, copy, ended }),
                Some(true) => {
                    if !copy.ticket.is_multiple_of(2) {
                        self.move_page(&copy, device);
                    }
                    result.copied.push(CopyEnd { ticket: copy.ticket, error: COPY_OK });
                    let timing = result.copy_timing.get_or_insert_default();
                    timing.save_us += 3;
                    timing.restore_us += 7;
                }
                Some(false) => {
                    match copy.direction {
                        Direction::Save => {
                            let positions = positions(&copy, device.page_size);
                            self.pages[copy.host as usize][positions].fill(GARBAGE);
                        }
                        Direction::SaveState => self.states[copy.host as usize] = GARBAGE,
                        Direction::Restore | Direction::RestoreIndex | Direction::RestoreState => {
                            spoil(&copy, device);
                        }
                    }
                    result.copied.push(CopyEnd { ticket: copy.ticket, error: COPY_FAILED });
                }
            }
        }
    }

    fn move_page(&mut self, copy: &PageCopy, device: &mut Device) {
        let host = copy.host as usize;
        match copy.direction {
            Direction::Save => {
                let positions = positions(copy, device.page_size);
                let hot = &device.pages[copy.hot.expect("a page") as usize];
                self.pages[host][positions.clone()].copy_from_slice(&hot[positions.clone()]);
                if let Some(index) = device.index.get(host) {
                    self.index[host][positions.clone()].copy_from_slice(&index[positions]);
                }
            }
            Direction::Restore => device.target(copy).clone_from(&self.pages[host]),
            Direction::RestoreIndex => device.target(copy).clone_from(&self.index[host]),
            Direction::SaveState if self.fault == Some(CopyFault::EarlySaves) => {}
            Direction::SaveState | Direction::RestoreState => self.move_state(copy, device),
        }
    }

    fn move_state(&mut self, copy: &PageCopy, device: &mut Device) {
        let (host, count) = (copy.host as usize, self.states.len());
        assert!(host < count, "{copy:?} is outside of the host's state pages");
        let page = state_page(copy, device);
        match (copy.direction, self.fault) {
            (Direction::SaveState, Some(CopyFault::MixedSaves)) => {
                self.states[(host + 1) % count] = *page;
            }
            (Direction::SaveState, _) => self.states[host] = *page,
            (_, Some(CopyFault::NoRestores)) => {}
            (_, Some(CopyFault::MixedRestores)) => *page = self.states[(host + 1) % count],
            (_, _) => *page = self.states[host],
        }
    }
}

/// The state page of a copy.
fn state_page<'a>(copy: &PageCopy, device: &'a mut Device) -> &'a mut u64 {
    let pages = device.states.as_mut().expect("a model with states");
    &mut pages[copy.hot.expect("a page") as usize]
}

/// Overwrites the target of a restore with garbage.
fn spoil(copy: &PageCopy, device: &mut Device) {
    match copy.direction {
        Direction::RestoreState => *state_page(copy, device) = GARBAGE,
        _ => device.target(copy).fill(GARBAGE),
    }
}

/// The positions of a page that a copy covers.
fn positions(copy: &PageCopy, page_size: usize) -> Range<usize> {
    copy.span.map_or(0..page_size, |span| span.first as usize..(span.first + span.count) as usize)
}
