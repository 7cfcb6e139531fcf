//! Copies of pages between the device's memory and the host's.

/// Words of a record of a plan's `copies` column.
pub const COPY_WORDS: usize = 4;
/// Words of a record of a result's `copied` column.
pub(crate) const COPIED_WORDS: usize = 2;
/// Longest wait of a plan without rows, in microseconds: a request that comes meanwhile waits that long at most.
pub const MAX_WAIT_US: u32 = 1000;
/// The end of a copy that was done.
pub const COPY_OK: i32 = 0;
/// The end of a copy that could not be done.
pub const COPY_FAILED: i32 = 1;

/// Which way a page is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the device to the host, behind the rows of the plan that names it.
    Save,
    /// From the host to the device, at once: nothing in flight names the target.
    Restore,
}

/// A copy of one page, all layers of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCopy {
    /// Its number, which its end is reported with.
    pub ticket: u32,
    /// Which way.
    pub direction: Direction,
    /// The page of the device.
    pub hot: u32,
    /// The page of the host.
    pub host: u32,
}

impl PageCopy {
    pub(crate) fn words(self) -> [i32; COPY_WORDS] {
        let direction = i32::from(self.direction == Direction::Restore);
        let [ticket, hot, host] = [self.ticket, self.hot, self.host].map(u32::cast_signed);
        [ticket, direction, hot, host]
    }

    pub(crate) fn of(&[ticket, direction, hot, host]: &[i32; COPY_WORDS]) -> Option<Self> {
        let direction = match direction {
            0 => Direction::Save,
            1 => Direction::Restore,
            _ => return None,
        };
        let [ticket, hot, host] = [ticket, hot, host].map(u32::try_from);
        Some(Self { ticket: ticket.ok()?, direction, hot: hot.ok()?, host: host.ok()? })
    }
}

/// Microseconds that each direction's engine was busy, since the last result.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CopyTiming {
    /// With saves.
    pub save_us: u32,
    /// With restores.
    pub restore_us: u32,
}
