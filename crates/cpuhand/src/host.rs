//! The host tier: pages in a file that outlives this process, and pages lent by other replicas.
//!
//! The brain creates the file in memory, and the first hand sets its length. A page is contiguous:
//! each layer's keys and then its values, in the kernels' layout. After the pages comes one
//! checksum per page. If the model has states, the state pages follow, and then a checksum and a
//! number of positions for each of them. The last 8 bytes are then the number of state pages.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};

use forebay_protocol::{HandConfig, PAGE_NOTE_BYTES, STATE_COUNT_BYTES, STATE_NOTE_BYTES};
use rustix::fs::{fstat, ftruncate};
use rustix::io::{Errno, preadv, pwritev};

use crate::descriptors::HostFiles;
use crate::runner::HandError;

/// Pages of one kind on the device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolSize {
    /// The number of pages.
    pub(crate) count: u64,
    /// Bytes of a page.
    pub(crate) bytes: u64,
}

impl PoolSize {
    fn all(self) -> u64 {
        self.count.saturating_mul(self.bytes)
    }
}

/// How many pages and state pages a host tier has; both counts are 0 if there is no tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct HostCounts {
    pub(crate) pages: u32,
    pub(crate) state_pages: u32,
}

/// Returns the page counts of the host tier that the configuration requests, given the pages of the
/// device. Pages and state pages share the tier in the proportion in which they share the device's
/// memory. `free`: bytes that weights and hot pages leave; `None` if unknown.
///
/// # Errors
/// If the model has no pages, if the requested tier is smaller than a page, or if it is larger than
/// the available memory.
pub(crate) fn host_counts(
    config: &HandConfig,
    pages: PoolSize,
    states: PoolSize,
    free: Option<u64>,
) -> Result<HostCounts, HandError> {
    let refused = |why: String| Err(HandError::Config(why));
    let &HandConfig { host_pages, host_state_pages, host_bytes, host_ratio, host_share, .. } =
        config;
    if host_pages.is_none() && host_bytes.is_none() && host_ratio.is_none() {
        return Ok(HostCounts::default());
    }
    if pages.all() == 0 {
        return refused(
            "the model keeps no keys and values, so a host tier has nothing to hold: leave it off"
                .into(),
        );
    }
    if let Some(pages) = host_pages {
        // An earlier hand had this many pages, and its blocks are still in the file.
        return Ok(HostCounts { pages, state_pages: host_state_pages.unwrap_or(0) });
    }
    let device = pages.all().saturating_add(states.all());
    let most = free.map(|free| (host_share * free as f64) as u64);
    let ratio = host_ratio.unwrap_or(0.0);
    let too_large = |&most: &u64| config.host_fits && ratio * device as f64 > most as f64;
    let fitting = most.filter(too_large);
    if let Some(most) = fitting {
        eprintln!(
            "the host tier has {:.2} pages for each page of the device: more do not fit into the {:.1} GB that it may take",
            most as f64 / device as f64,
            most as f64 / 1e9
        );
    }
    let (bytes, wanted) = match host_bytes.or(fitting) {
        Some(bytes) => (Some(bytes), format!("{bytes} bytes")),
        None => (None, format!("{ratio} of the pages")),
    };
    let part = |of: PoolSize| match bytes {
        Some(bytes) => {
            let share = u128::from(bytes) * u128::from(of.count) / u128::from(device);
            u64::try_from(share).unwrap_or(u64::MAX)
        }
        None => (ratio * of.count as f64) as u64,
    };
    let (host_pages, host_states) = (part(pages), part(states));
    if host_pages < 1 {
        let page = pages.bytes;
        return refused(format!("a host tier of {wanted} holds no page of {page} bytes"));
    }
    if host_states < 1 && states.count > 0 {
        let state = states.bytes;
        return refused(format!("a host tier of {wanted} holds no state of {state} bytes"));
    }
    let taken = host_pages.saturating_mul(pages.bytes) + host_states.saturating_mul(states.bytes);
    if let (Some(free), Some(most)) = (free, most)
        && taken > most
    {
        return refused(format!(
            "a host tier of {:.1} GB does not fit: {:.1} GB are available beside weights and KV pool, of which it may take \
             {:.0}%; choose --hicache-size or a smaller KV pool",
            taken as f64 / 1e9,
            free as f64 / 1e9,
            100.0 * host_share
        ));
    }
    let number =
        |count: u64| u32::try_from(count).unwrap_or(u32::MAX).min(i32::MAX.cast_unsigned());
    Ok(HostCounts { pages: number(host_pages), state_pages: number(host_states) })
}

/// Bytes of a page of keys and values, and of a state; the latter is 0 if the model has no states.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageSizes {
    pub(crate) page: u64,
    pub(crate) state: u64,
}

impl PageSizes {
    /// The size in bytes of a file with `counts` pages.
    fn file(self, counts: HostCounts) -> u64 {
        let pages = u64::from(counts.pages) * (self.page + PAGE_NOTE_BYTES);
        match self.state {
            0 => pages,
            state => {
                pages
                    + u64::from(counts.state_pages) * (state + STATE_NOTE_BYTES)
                    + STATE_COUNT_BYTES
            }
        }
    }
}

/// The tier of this hand, and the tiers of replicas that lend to it.
pub(crate) struct HostTier {
    files: HostFiles,
    counts: HostCounts,
    sizes: PageSizes,
}

impl HostTier {
    /// Opens a tier of this many pages. The file is extended if it is too short.
    pub(crate) fn open(files: HostFiles, counts: HostCounts, sizes: PageSizes) -> io::Result<Self> {
        let bytes = sizes.file(counts);
        if size(files.own.as_fd())? < bytes {
            ftruncate(&files.own, bytes)?;
        }
        let tier = Self { files, counts, sizes };
        if sizes.state > 0 {
            let own = tier.own();
            let end = size(own.file)? - STATE_COUNT_BYTES;
            let count = u64::from(counts.state_pages).to_ne_bytes();
            own.write_at(end, &mut [IoSlice::new(&count)])?;
        }
        Ok(tier)
    }

    /// The page counts of this hand's tier.
    pub(crate) fn counts(&self) -> HostCounts {
        self.counts
    }

    /// The number of replicas that may lend pages.
    pub(crate) fn lenders(&self) -> usize {
        self.files.lenders.len()
    }

    /// The pages of this hand's tier.
    pub(crate) fn own(&self) -> HostPages<'_> {
        HostPages {
            file: self.files.own.as_fd(),
            first: 0,
            pages: self.counts.pages.into(),
            page_bytes: self.sizes.page,
            note_bytes: PAGE_NOTE_BYTES,
        }
    }

    /// The state pages of this hand's tier.
    pub(crate) fn own_states(&self) -> HostPages<'_> {
        self.own().states(self.sizes.state, self.counts.state_pages.into())
    }

    /// The pages of a lender, whose hand has set the length of its file.
    pub(crate) fn of(&self, lender: u32) -> io::Result<HostPages<'_>> {
        Ok(self.read_lender(lender)?.0)
    }

    /// The state pages of a lender.
    pub(crate) fn states_of(&self, lender: u32) -> io::Result<HostPages<'_>> {
        let (pages, states) = self.read_lender(lender)?;
        Ok(pages.states(self.sizes.state, states))
    }

    /// Returns a lender's pages, and its number of state pages.
    fn read_lender(&self, lender: u32) -> io::Result<(HostPages<'_>, u64)> {
        let Some(Some(file)) = self.files.lenders.get(lender as usize) else {
            return Err(io::Error::other(format!("replica {lender} lends nothing to this one")));
        };
        let PageSizes { page, state } = self.sizes;
        let mut pages = HostPages {
            file: file.as_fd(),
            first: 0,
            pages: 0,
            page_bytes: page,
            note_bytes: PAGE_NOTE_BYTES,
        };
        let bytes = size(file.as_fd())?;
        let strange = || {
            let what = format!("{bytes} bytes of a lender are no pages of {page} and {state}");
            io::Error::other(what)
        };
        let (mut of_pages, mut states) = (Some(bytes), 0);
        if state > 0 {
            let end = bytes.checked_sub(STATE_COUNT_BYTES).ok_or_else(strange)?;
            let mut count = [0; STATE_COUNT_BYTES as usize];
            pages.read_at(end, &mut [IoSliceMut::new(&mut count)])?;
            states = u64::from_ne_bytes(count);
            let of_states = states.checked_mul(state + STATE_NOTE_BYTES);
            of_pages = of_states.and_then(|of_states| end.checked_sub(of_states));
        }
        let each = page + PAGE_NOTE_BYTES;
        let whole = |&bytes: &u64| bytes > 0 && bytes.is_multiple_of(each);
        pages.pages = of_pages.filter(whole).ok_or_else(strange)? / each;
        Ok((pages, states))
    }
}

/// The pages of one kind in a file, followed by a note (checksum, and positions of a state) for
/// each page.
pub(crate) struct HostPages<'a> {
    file: BorrowedFd<'a>,
    /// The offset of the first page in the file.
    first: u64,
    pages: u64,
    page_bytes: u64,
    note_bytes: u64,
}

impl<'a> HostPages<'a> {
    /// The state pages that follow these pages.
    fn states(&self, page_bytes: u64, pages: u64) -> HostPages<'a> {
        let first = self.first + self.pages * (self.page_bytes + self.note_bytes);
        HostPages { file: self.file, first, pages, page_bytes, note_bytes: STATE_NOTE_BYTES }
    }

    /// Writes a page, whose content is the concatenation of `parts`.
    pub(crate) fn write(&self, page: u32, parts: &[&[u8]]) -> io::Result<()> {
        let mut parts: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        self.write_at(self.place(page)?, &mut parts)
    }

    /// Reads a page into `parts`.
    pub(crate) fn read(&self, page: u32, parts: Vec<&mut [u8]>) -> io::Result<()> {
        let mut parts: Vec<IoSliceMut<'_>> = parts.into_iter().map(IoSliceMut::new).collect();
        self.read_at(self.place(page)?, &mut parts)
    }

    /// Stores the checksum of a page.
    pub(crate) fn seal(&self, page: u32, sum: u32) -> io::Result<()> {
        self.write_at(self.seal_place(page)?, &mut [IoSlice::new(&sum.to_ne_bytes())])
    }

    /// Reads the checksum of a page.
    pub(crate) fn sum(&self, page: u32) -> io::Result<u32> {
        let mut sum = [0; size_of::<u32>()];
        self.read_at(self.seal_place(page)?, &mut [IoSliceMut::new(&mut sum)])?;
        Ok(u32::from_ne_bytes(sum))
    }

    fn place(&self, page: u32) -> io::Result<u64> {
        match u64::from(page) < self.pages {
            true => Ok(self.first + u64::from(page) * self.page_bytes),
            false => Err(io::Error::other(format!("host page {page} of {}", self.pages))),
        }
    }

    /// The offset of a page's checksum.
    fn seal_place(&self, page: u32) -> io::Result<u64> {
        self.place(page)?;
        Ok(self.first + self.pages * self.page_bytes + u64::from(page) * self.note_bytes)
    }

    /// Stores the number of positions in the state on a page.
    pub(crate) fn note_seen(&self, page: u32, seen: u32) -> io::Result<()> {
        let at = self.seal_place(page)? + PAGE_NOTE_BYTES;
        self.write_at(at, &mut [IoSlice::new(&seen.to_ne_bytes())])
    }

    /// Reads the number of positions in the state on a page.
    pub(crate) fn seen(&self, page: u32) -> io::Result<u32> {
        let mut seen = [0; size_of::<u32>()];
        let at = self.seal_place(page)? + PAGE_NOTE_BYTES;
        self.read_at(at, &mut [IoSliceMut::new(&mut seen)])?;
        Ok(u32::from_ne_bytes(seen))
    }

    fn write_at(&self, mut at: u64, mut parts: &mut [IoSlice<'_>]) -> io::Result<()> {
        while !parts.is_empty() {
            match pwritev(self.file, parts, at) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => {
                    at += written as u64;
                    IoSlice::advance_slices(&mut parts, written);
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn read_at(&self, mut at: u64, mut parts: &mut [IoSliceMut<'_>]) -> io::Result<()> {
        while !parts.is_empty() {
            match preadv(self.file, parts, at) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => {
                    at += read as u64;
                    IoSliceMut::advance_slices(&mut parts, read);
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// The size of a file in bytes.
fn size(file: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(u64::try_from(fstat(file)?.st_size).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    fn file() -> OwnedFd {
        memfd_create("host", MemfdFlags::CLOEXEC).expect("a file")
    }

    const NONE: PoolSize = PoolSize { count: 0, bytes: 0 };
    const SIZES: PageSizes = PageSizes { page: 5, state: 0 };

    fn counts(pages: u32, state_pages: u32) -> HostCounts {
        HostCounts { pages, state_pages }
    }

    fn asked(bytes: Option<u64>, ratio: Option<f64>, pages: Option<u32>) -> HandConfig {
        HandConfig {
            host_bytes: bytes,
            host_ratio: ratio,
            host_pages: pages,
            host_share: 0.8,
            ..HandConfig::default()
        }
    }

    #[test]
    fn a_tier_has_a_size_in_pages_or_a_reason() {
        let count = |config: HandConfig, free| {
            let pages = PoolSize { count: 10, bytes: 100 };
            let counts = host_counts(&config, pages, NONE, free);
            counts.map(|counts| counts.pages).map_err(|error| error.to_string())
        };
        assert_eq!(count(asked(None, None, None), Some(0)), Ok(0));
        assert_eq!(count(asked(Some(399), None, None), Some(10_000)), Ok(3));
        assert_eq!(count(asked(None, Some(0.55), None), None), Ok(5));
        assert_eq!(count(asked(None, Some(8.0), Some(7)), Some(0)), Ok(7));
        assert_eq!(count(asked(None, Some(8.0), None), Some(10_000)), Ok(80));
        let why = count(asked(None, Some(8.1), None), Some(10_000)).expect_err("more than 80 %");
        assert!(why.contains("does not fit") && why.contains("take 80%"), "{why}");
        for config in [asked(Some(99), None, None), asked(None, Some(0.05), None)] {
            let why = count(config, None).expect_err("less than a page");
            assert!(why.ends_with("holds no page of 100 bytes"), "{why}");
        }
        let nothing = host_counts(&asked(Some(99), None, None), NONE, NONE, None);
        assert!(nothing.is_err_and(|why| why.to_string().contains("keeps no keys and values")));
    }

    #[test]
    fn pages_and_states_divide_the_tier_as_they_divide_the_device() {
        let pages = PoolSize { count: 10, bytes: 100 };
        let states = PoolSize { count: 4, bytes: 250 };
        let count = |config: &HandConfig, free| {
            let counts = host_counts(config, pages, states, free);
            let numbers = counts.map(|counts| [counts.pages, counts.state_pages]);
            numbers.map_err(|error| error.to_string())
        };
        assert_eq!(count(&asked(None, Some(1.5), None), None), Ok([15, 6]));
        assert_eq!(count(&asked(Some(1000), None, None), None), Ok([5, 2]));
        let why = count(&asked(Some(400), None, None), None).expect_err("0.8 of a state");
        assert!(why.ends_with("holds no state of 250 bytes"), "{why}");
        let kept = HandConfig { host_state_pages: Some(3), ..asked(None, Some(2.0), Some(7)) };
        assert_eq!(count(&kept, Some(0)), Ok([7, 3]));
        // 80 % of the free bytes are 2800.
        let asks = asked(None, Some(2.0), None);
        assert!(count(&asks, Some(3500)).is_err_and(|why| why.contains("does not fit")));
        let fits = HandConfig { host_fits: true, ..asks };
        assert_eq!(count(&fits, Some(3500)), Ok([14, 5]));
        assert_eq!(count(&fits, Some(50_000)), Ok([20, 8]));
        assert!(count(&fits, Some(100)).is_err(), "no page fits");
    }

    #[test]
    fn a_page_comes_back_in_parts_of_any_size() {
        let files = HostFiles { own: file(), lenders: Vec::new() };
        let tier = HostTier::open(files, counts(3, 0), SIZES).expect("a tier");
        let pages = tier.own();
        pages.write(1, &[&[1, 2], &[3, 4, 5]]).expect("written");
        pages.seal(2, 77).expect("written");
        let (mut first, mut last) = ([0; 4], [0; 1]);
        pages.read(1, vec![&mut first[..], &mut last[..]]).expect("read");
        assert_eq!((first, last), ([1, 2, 3, 4], [5]));
        assert_eq!((pages.sum(1).expect("there"), pages.sum(2).expect("there")), (0, 77));
        assert!(pages.write(3, &[&[0; 5]]).is_err() && pages.sum(3).is_err());
        // Simulates another process that truncates the file.
        ftruncate(&tier.files.own, 7).expect("shorter");
        assert!(pages.read(1, vec![&mut first[..], &mut last[..]]).is_err());
    }

    #[test]
    fn lenders_have_as_many_pages_as_their_file() {
        let lender = file();
        ftruncate(&lender, 2 * 9).expect("longer");
        let files = HostFiles { own: file(), lenders: vec![None, Some(lender), Some(file())] };
        let tier = HostTier::open(files, counts(1, 0), SIZES).expect("a tier");
        let mut part = [1; 5];
        tier.of(1)
            .expect("replica 1 lends its pages")
            .read(1, vec![&mut part[..]])
            .expect("the last page is readable");
        assert_eq!(part, [0; 5]);
        assert!(tier.of(1).is_ok_and(|pages| pages.sum(2).is_err()));
        // A replica that lends nothing, one whose hand has not started, and one that does not
        // exist.
        assert!([0, 2, 3].into_iter().all(|lender| tier.of(lender).is_err()));
    }
    #[test]
    fn states_lie_behind_the_pages_with_their_positions() {
        let sizes = PageSizes { page: 5, state: 7 };
        let lender = file();
        let open = |own: OwnedFd, lenders, at| {
            let tier = HostTier::open(HostFiles { own, lenders }, at, sizes);
            tier.expect("a tier")
        };
        let own = lender.try_clone().expect("a copy");
        let first = open(own, Vec::new(), counts(3, 2));
        first.own().write(2, &[&[9; 5]]).expect("written");
        first.own().seal(2, 1).expect("written");
        let states = first.own_states();
        states.write(1, &[&[1, 2, 3], &[4, 5, 6, 7]]).expect("written");
        states.seal(1, 77).expect("written");
        states.note_seen(1, 4096).expect("written");
        assert!(states.write(2, &[&[0; 7]]).is_err() && states.seen(2).is_err());
        // The next hand finds the states, and so does a borrower.
        let next = open(lender.try_clone().expect("a copy"), Vec::new(), counts(3, 2));
        let borrower = open(file(), vec![Some(lender), Some(file())], counts(1, 9));
        for states in
            [next.own_states(), borrower.states_of(0).expect("replica 0 lends its states")]
        {
            let mut state = [0; 7];
            states.read(1, vec![&mut state[..]]).expect("there");
            assert_eq!(state, [1, 2, 3, 4, 5, 6, 7]);
            assert_eq!((states.sum(1).expect("there"), states.seen(1).expect("there")), (77, 4096));
            assert!(states.seen(2).is_err());
        }
        let mut page = [0; 5];
        borrower
            .of(0)
            .expect("replica 0 lends its pages")
            .read(2, vec![&mut page[..]])
            .expect("there");
        assert_eq!(page, [9; 5]);
        assert!(borrower.of(0).is_ok_and(|pages| pages.sum(3).is_err()));
        assert!(borrower.states_of(1).is_err(), "the lender's worker has not started");
    }
}
