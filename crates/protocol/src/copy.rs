//! Copies of pages between the device's memory and the host's.

/// Words of a record of a plan's `copies` column.
pub const COPY_WORDS: usize = 4;
/// Words of a record of a plan's `copy_spans` column.
pub const SPAN_WORDS: usize = 2;
/// Words of a record of a result's `copied` column.
pub(crate) const COPIED_WORDS: usize = 2;
/// The longest wait of a plan without rows, in microseconds. A request that comes meanwhile waits
/// that long at most.
pub const MAX_WAIT_US: u32 = 1000;
/// The report of a copy that succeeded.
pub const COPY_OK: i32 = 0;
/// The report of a copy that failed.
pub const COPY_FAILED: i32 = 1;

/// The direction in which a page is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// The page goes from the device to the host, behind the rows of the plan that names it.
    Save,
    /// The page goes from the device to the host, at once: no plan in flight names the target.
    Restore,
    /// Index keys alone are restored, to the index page with the number of the host's page.
    RestoreIndex,
}

/// Positions of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The first position, counted from the beginning of the page.
    pub first: u32,
    /// The number of positions.
    pub count: u32,
}

/// A copy of one page, over all layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCopy {
    /// The number of the copy, which the report of its end names.
    pub ticket: u32,
    /// The direction of the copy.
    pub direction: Direction,
    /// The page of the device; `None` if index keys come back.
    pub hot: Option<u32>,
    /// The page of the host.
    pub host: u32,
    /// The positions of the page to copy; `None`: all of it.
    pub span: Option<Span>,
}

impl PageCopy {
    pub(crate) fn words(self) -> [i32; COPY_WORDS] {
        let direction = match self.direction {
            Direction::Save => 0,
            Direction::Restore => 1,
            Direction::RestoreIndex => 2,
        };
        let hot = self.hot.map_or(-1, u32::cast_signed);
        [self.ticket.cast_signed(), direction, hot, self.host.cast_signed()]
    }

    pub(crate) fn of(
        &[ticket, direction, hot, host]: &[i32; COPY_WORDS],
        span: Option<Span>,
    ) -> Option<Self> {
        let (direction, hot) = match (direction, u32::try_from(hot)) {
            (0, Ok(hot)) => (Direction::Save, Some(hot)),
            (1, Ok(hot)) => (Direction::Restore, Some(hot)),
            (2, Err(_)) if hot == -1 => (Direction::RestoreIndex, None),
            _ => return None,
        };
        let [ticket, host] = [ticket, host].map(u32::try_from);
        Some(Self { ticket: ticket.ok()?, direction, hot, host: host.ok()?, span })
    }
}

impl Span {
    /// The span; `None` for a whole page, or for invalid numbers.
    pub(crate) fn of(&[first, count]: &[i32; SPAN_WORDS]) -> Option<Self> {
        let (first, count) = (u32::try_from(first).ok()?, u32::try_from(count).ok()?);
        (count > 0).then_some(Self { first, count })
    }
}

/// Microseconds for which each direction's engine was busy, and for which rows waited, since the
/// last result.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CopyTiming {
    /// The time of saves.
    pub save_us: u32,
    /// The time of restores.
    pub restore_us: u32,
    /// Microseconds that rows waited for copies.
    pub waited_us: u32,
}
