//! Simulates the copy engines, one per direction and independent of the steps, and the bus that all
//! copies of a machine share.

use std::sync::Arc;

use forebay_protocol::{COPY_FAILED, COPY_OK, CopyEnd, Direction, PageCopy, StepResult};
use parking_lot::Mutex;

use crate::profile::CopyModel;

#[derive(Debug, Clone, Copy)]
struct Copying {
    ticket: u32,
    direction: Direction,
    /// When the copy ends; `None` if it never ends.
    end_us: Option<u64>,
    took_us: u32,
    fine: bool,
}

/// How a copy ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CopyFault {
    /// The copy succeeds.
    #[default]
    None,
    /// The copy takes its normal time and fails.
    Fails,
    /// The copy never ends.
    Hangs,
}

/// The size of a page in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PageBytes {
    /// The keys and values that attention reads, over all layers.
    pub main: u64,
    /// The index keys.
    pub index: u64,
    /// The number of positions of a page; 0 if only whole pages are copied.
    pub page_size: u32,
    /// True if index keys are in separate pages, so that positions are restored without them.
    pub apart: bool,
    /// A recurrent state, over all layers.
    pub state: u64,
}

impl PageBytes {
    /// Returns the size of a page with its index keys.
    #[must_use]
    pub fn all(self) -> u64 {
        self.main + self.index
    }

    fn of(self, copy: PageCopy) -> u64 {
        let page = match copy.direction {
            Direction::RestoreIndex => self.index,
            Direction::Restore if self.apart => self.main,
            Direction::Save | Direction::Restore => self.all(),
            Direction::SaveState | Direction::RestoreState => self.state,
        };
        match copy.span {
            None => page,
            Some(span) => page * u64::from(span.count) / u64::from(self.page_size.max(1)),
        }
    }
}

/// The bus between the devices and the host memory of a machine. Clones share the same bus.
///
/// Copies use the bus in the order in which plans list them, each from the time at which it may
/// start.
#[derive(Debug, Clone, Default)]
pub struct Bus(Arc<Mutex<f64>>);

impl Bus {
    /// Occupies the bus for `us` microseconds, starting at `from_us` or later. Returns the time at
    /// which the bus is free again.
    fn take(&self, from_us: u64, us: f64) -> u64 {
        let mut busy_until = self.0.lock();
        *busy_until = busy_until.max(from_us as f64) + us;
        busy_until.round() as u64
    }
}

/// The copy engines of both directions. The caller passes the current time.
#[derive(Debug, Default)]
pub struct CopyEngines {
    model: CopyModel,
    bytes: PageBytes,
    /// When the engine of each direction has finished its copies.
    busy_until: [u64; 2],
    under_way: Vec<Copying>,
    bus: Bus,
}

impl CopyEngines {
    /// Creates copy engines for pages of this size.
    #[must_use]
    pub fn new(model: CopyModel, bytes: PageBytes) -> Self {
        Self { model, bytes, ..Self::default() }
    }

    /// Makes the copies share `bus` with those of other devices.
    #[must_use]
    pub fn on(self, bus: Bus) -> Self {
        Self { bus, ..self }
    }

    /// Returns when the last save ends. A save that hangs counts as if it ended after its normal
    /// time.
    #[must_use]
    pub fn saves_end(&self) -> u64 {
        self.busy_until[0]
    }

    /// Delays restores by `us` microseconds, because other data is copied from the host to the
    /// device.
    pub fn delay_restores(&mut self, us: u64) {
        self.busy_until[1] += us;
    }

    /// Starts a copy that may begin at `from_us`. Copies of one direction run one after the other.
    pub fn start(&mut self, copy: PageCopy, from_us: u64, fault: CopyFault) {
        let lane = usize::from(!copy.direction.is_save());
        let begin = self.busy_until[lane].max(from_us);
        let bytes = self.bytes.of(copy);
        let alone = begin + self.model.copy_us(copy.direction, bytes);
        let shared = self.model.bus_us(bytes).map_or(0, |us| self.bus.take(from_us, us));
        let took = alone.max(shared) - begin;
        let end_us = (fault != CopyFault::Hangs).then_some(begin + took);
        self.busy_until[lane] = begin + took;
        self.under_way.push(Copying {
            ticket: copy.ticket,
            direction: copy.direction,
            end_us,
            took_us: u32::try_from(took).unwrap_or(u32::MAX),
            fine: fault == CopyFault::None,
        });
    }

    /// Returns when the next copy ends; `None` if no copy is in progress, or all of them hang.
    #[must_use]
    pub fn next_end(&self) -> Option<u64> {
        self.under_way.iter().filter_map(|copy| copy.end_us).min()
    }

    /// Adds the copies that have ended by `now_us` to `result`, in the order in which they were
    /// started.
    pub fn report(&mut self, now_us: u64, result: &mut StepResult) {
        self.under_way.retain(|copy| {
            if copy.end_us.is_none_or(|end| end > now_us) {
                return true;
            }
            let error = if copy.fine { COPY_OK } else { COPY_FAILED };
            result.copied.push(CopyEnd { ticket: copy.ticket, error });
            let timing = result.copy_timing.get_or_insert_default();
            let time = match copy.direction.is_save() {
                true => &mut timing.save_us,
                false => &mut timing.restore_us,
            };
            *time += copy.took_us;
            false
        });
    }
}

#[cfg(test)]
mod tests {
    use forebay_protocol::CopyTiming;

    use super::*;

    fn copy(ticket: u32, direction: Direction) -> PageCopy {
        PageCopy { ticket, direction, hot: Some(0), host: 0, span: None, lender: None }
    }

    #[test]
    fn each_direction_has_an_engine_and_takes_one_after_the_other() {
        let (save_gbps, restore_gbps) = (Some(1.0), Some(2.0));
        let model = CopyModel { save_gbps, restore_gbps, latency_us: 10.0, ..CopyModel::default() };
        let mut engines =
            CopyEngines::new(model, PageBytes { main: 100_000, ..PageBytes::default() });
        engines.start(copy(0, Direction::Save), 50, CopyFault::None);
        engines.start(copy(1, Direction::Save), 0, CopyFault::Fails);
        engines.start(copy(2, Direction::Restore), 0, CopyFault::None);
        engines.start(copy(3, Direction::Restore), 0, CopyFault::Hangs);
        assert_eq!(engines.next_end(), Some(60));
        let mut result = StepResult::default();
        engines.report(160, &mut result);
        let ended = |ticket, error| CopyEnd { ticket, error };
        assert_eq!(result.copied, [ended(0, COPY_OK), ended(2, COPY_OK)]);
        let took = CopyTiming { save_us: 110, restore_us: 60 };
        assert_eq!(result.copy_timing, Some(took));
        assert_eq!(engines.next_end(), Some(270));
        engines.report(u64::MAX, &mut result);
        assert_eq!(result.copied[2..], [ended(1, COPY_FAILED)]);
        assert_eq!(engines.next_end(), None, "the other copy never ends");
    }

    #[test]
    fn copies_of_all_devices_share_the_bus() {
        // A page occupies the bus for 50 us, and its copy takes 100 us if the bus is free.
        let model = CopyModel {
            save_gbps: Some(1.0),
            restore_gbps: Some(1.0),
            bus_gbps: Some(2.0),
            ..CopyModel::default()
        };
        let bus = Bus::default();
        let bytes = PageBytes { main: 100_000, ..PageBytes::default() };
        let device = || CopyEngines::new(model, bytes).on(bus.clone());
        let (mut first, mut second, mut third) = (device(), device(), device());
        first.start(copy(0, Direction::Save), 0, CopyFault::None);
        second.start(copy(0, Direction::Restore), 0, CopyFault::None);
        third.start(copy(0, Direction::Restore), 0, CopyFault::None);
        let ends = [&first, &second, &third].map(CopyEngines::next_end);
        assert_eq!(ends, [Some(100), Some(100), Some(150)], "two copies run at the same time");
        third.start(copy(1, Direction::Save), 1000, CopyFault::None);
        let mut result = StepResult::default();
        third.report(u64::MAX, &mut result);
        let took = CopyTiming { save_us: 100, restore_us: 150 };
        assert_eq!(result.copy_timing, Some(took), "the engine was idle in between");
        let mut alone = CopyEngines::new(model, bytes);
        alone.start(copy(0, Direction::Save), 0, CopyFault::None);
        assert_eq!(alone.next_end(), Some(100), "copies on another bus do not delay");
    }
}
