//! Copies of pages between the device's memory and the host's.

use crate::columns::record;

/// The number of words of a record in a plan's `copies` column.
pub const COPY_WORDS: usize = CopyRecord::WORDS;
/// The longest wait of a plan without rows, in microseconds. The limit bounds the delay of a
/// request that arrives while the plan waits.
pub const MAX_WAIT_US: u32 = 1000;
/// The number of bytes per page that are stored after all pages of a host tier: the page's
/// checksum.
pub const PAGE_NOTE_BYTES: u64 = 4;
/// The number of bytes per state page that are stored after all state pages of a host tier: the
/// page's checksum, and the number of positions that the state covers.
pub const STATE_NOTE_BYTES: u64 = 8;
/// The size in bytes of the number of state pages, which is stored at the end of a host tier that
/// has state pages.
pub const STATE_COUNT_BYTES: u64 = 8;
/// The copy succeeded.
pub const COPY_OK: i32 = 0;
/// The copy failed.
pub const COPY_FAILED: i32 = 1;

/// The direction of a copy. The values are those in plans.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Direction {
    /// From the device to the host, after the rows of the same plan are computed.
    Save = 0,
    /// From the host to the device, at once, because no plan in flight uses the target.
    Restore = 1,
    /// Only index keys, from the host to the device, into the index page that has the same number
    /// as the host page.
    RestoreIndex = 2,
    /// A recurrent state, from a state page of the device to one of the host, after the state saves
    /// of the same plan.
    SaveState = 3,
    /// A recurrent state, from a state page of the host to one of the device, at once, because no
    /// plan in flight uses the target.
    RestoreState = 4,
}

impl Direction {
    /// All directions.
    pub const ALL: [Self; 5] =
        [Self::Save, Self::Restore, Self::RestoreIndex, Self::SaveState, Self::RestoreState];

    /// True if the copy goes to the host.
    #[must_use]
    pub fn is_save(self) -> bool {
        matches!(self, Self::Save | Self::SaveState)
    }

    /// True if the copy is between state pages.
    #[must_use]
    pub fn is_of_state(self) -> bool {
        matches!(self, Self::SaveState | Self::RestoreState)
    }
}

record! {
    /// A range of positions of a page.
    #[derive(Eq)]
    pub struct Span {
        /// The first position, counted from the beginning of the page.
        pub first: u32,
        /// The number of positions.
        pub count: u32,
    }
}

impl Span {
    /// The span that means the whole page, in a plan in which other copies have spans.
    pub(crate) const WHOLE: Self = Self { first: 0, count: 0 };
}

record! {
    /// A copy of a page, as plans encode it.
    pub(crate) struct CopyRecord {
        pub(crate) ticket: i32,
        pub(crate) direction: i32,
        pub(crate) hot: i32,
        pub(crate) host: i32,
    }
}

record! {
    /// Reports that a copy has ended.
    #[derive(Eq)]
    pub struct CopyEnd {
        /// The ticket of the copy.
        pub ticket: u32,
        /// [`COPY_OK`] or [`COPY_FAILED`].
        pub error: i32,
    }
}

record! {
    /// How long each direction's copy engine was busy since the last result, in microseconds.
    #[derive(Default, Eq)]
    pub struct CopyTiming {
        /// The time of saves.
        pub save_us: u32,
        /// The time of restores.
        pub restore_us: u32,
    }
}

/// A copy, over all layers, of one page of keys and values or of one state page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCopy {
    /// The ticket of the copy, which the report of its end repeats.
    pub ticket: u32,
    /// The direction of the copy.
    pub direction: Direction,
    /// The page or state page of the device; `None` if only index keys are restored.
    pub hot: Option<u32>,
    /// The page or state page of the host.
    pub host: u32,
    /// The positions of the page to copy; `None` for the whole page.
    pub span: Option<Span>,
    /// The replica whose host tier has the page; `None` for the hand's own tier. Only restores may
    /// have a lender.
    pub lender: Option<u32>,
}

impl PageCopy {
    /// Returns the lender as plans encode it: 0 for none, else the replica's number plus 1.
    pub(crate) fn source(self) -> i32 {
        self.lender.map_or(0, |lender| lender.cast_signed() + 1)
    }

    pub(crate) fn record(self) -> CopyRecord {
        CopyRecord {
            ticket: self.ticket.cast_signed(),
            direction: self.direction as i32,
            hot: self.hot.map_or(-1, u32::cast_signed),
            host: self.host.cast_signed(),
        }
    }

    /// Decodes a copy of a plan; `None` if the direction is unknown or does not fit the pages.
    /// `source` is 0 for the hand's own host tier, else the lender's number plus 1.
    pub(crate) fn new(record: CopyRecord, span: Option<Span>, source: i32) -> Option<Self> {
        let CopyRecord { ticket, direction, hot, host } = record;
        let direction = Direction::ALL.into_iter().find(|known| *known as i32 == direction)?;
        let [ticket, host] = [ticket, host].map(u32::try_from);
        let hot = match direction {
            Direction::RestoreIndex if hot == -1 => None,
            Direction::RestoreIndex => return None,
            Direction::Save
            | Direction::Restore
            | Direction::SaveState
            | Direction::RestoreState => Some(u32::try_from(hot).ok()?),
        };
        let lender = u32::try_from(source).ok()?.checked_sub(1);
        let lends = matches!(direction, Direction::Restore | Direction::RestoreState);
        if lender.is_some() && !lends || direction.is_of_state() && span.is_some() {
            return None;
        }
        Some(Self { ticket: ticket.ok()?, direction, hot, host: host.ok()?, span, lender })
    }
}
