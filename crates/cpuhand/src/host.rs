//! The host's tier: pages in a file that outlives this process, and those of other replicas.
//!
//! The brain makes the file, which lies in memory, and the first hand makes it as long as its pages
//! need. A page is one piece: each layer's keys and then its values, in the order of the kernels.
//! Behind the pages there is a checksum for each.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};

use forebay_protocol::HandConfig;
use rustix::fs::{fstat, ftruncate};
use rustix::io::{Errno, preadv, pwritev};

use crate::descriptors::HostFiles;
use crate::runner::HandError;

/// Bytes of a page's checksum.
const CHECKSUM_BYTES: u64 = 4;

/// The number of host pages that a configuration asks for, with so many hot pages of `page_bytes`
/// each; 0: there is no tier. `free` are the bytes beside weights and hot pages; `None`: nobody
/// knows.
///
/// # Errors
/// The model keeps nothing on pages, less than a page is asked for, or more than there is.
pub(crate) fn host_page_count(
    config: &HandConfig,
    hot_pages: usize,
    page_bytes: u64,
    free: Option<u64>,
) -> Result<u32, HandError> {
    let refused = |why: String| Err(HandError::Config(why));
    let &HandConfig { host_pages, host_bytes, host_ratio, host_share, .. } = config;
    if host_pages.is_none() && host_bytes.is_none() && host_ratio.is_none() {
        return Ok(0);
    }
    if page_bytes == 0 {
        return refused(
            "the model keeps no keys and values, so a host tier has nothing to hold: leave it off"
                .into(),
        );
    }
    if let Some(pages) = host_pages {
        // What an earlier hand was given: its blocks are there.
        return Ok(pages);
    }
    let (pages, wanted) = match (host_bytes, host_ratio.unwrap_or(0.0)) {
        (Some(bytes), _) => (bytes / page_bytes, format!("{bytes} bytes")),
        (None, ratio) => ((ratio * hot_pages as f64) as u64, format!("{ratio} of the pages")),
    };
    if pages < 1 {
        return refused(format!("a host tier of {wanted} holds no page of {page_bytes} bytes"));
    }
    let bytes = pages.saturating_mul(page_bytes);
    if let Some(free) = free.filter(|&free| bytes as f64 > host_share * free as f64) {
        return refused(format!(
            "a host tier of {:.1} GB does not fit: {:.1} GB are available beside weights and KV pool, of which it may take \
             {:.0}%; choose --hicache-size or a smaller KV pool",
            bytes as f64 / 1e9,
            free as f64 / 1e9,
            100.0 * host_share
        ));
    }
    Ok(u32::try_from(pages).unwrap_or(u32::MAX).min(i32::MAX.cast_unsigned()))
}

/// The pages of a hand's own tier, and of those that lend to it.
pub(crate) struct HostTier {
    files: HostFiles,
    pages: u32,
    page_bytes: u64,
}

impl HostTier {
    /// A tier of so many pages. The file grows if it is too short.
    pub(crate) fn open(files: HostFiles, pages: u32, page_bytes: u64) -> io::Result<Self> {
        let bytes = u64::from(pages) * (page_bytes + CHECKSUM_BYTES);
        if size(files.own.as_fd())? < bytes {
            ftruncate(&files.own, bytes)?;
        }
        Ok(Self { files, pages, page_bytes })
    }

    /// The number of the hand's own pages.
    pub(crate) fn pages(&self) -> u32 {
        self.pages
    }

    /// The number of replicas that may lend pages.
    pub(crate) fn lenders(&self) -> usize {
        self.files.lenders.len()
    }

    /// The hand's own pages.
    pub(crate) fn own(&self) -> HostPages<'_> {
        let (pages, page_bytes) = (self.pages.into(), self.page_bytes);
        HostPages { file: self.files.own.as_fd(), pages, page_bytes }
    }

    /// The pages of a lender, whose hand has made its file as long as they are.
    pub(crate) fn of(&self, lender: u32) -> io::Result<HostPages<'_>> {
        let Some(Some(file)) = self.files.lenders.get(lender as usize) else {
            return Err(io::Error::other(format!("replica {lender} lends nothing to this one")));
        };
        let page_bytes = self.page_bytes;
        let (bytes, each) = (size(file.as_fd())?, page_bytes + CHECKSUM_BYTES);
        if bytes == 0 || !bytes.is_multiple_of(each) {
            return Err(io::Error::other(format!(
                "{bytes} bytes of a lender are no pages of {page_bytes}"
            )));
        }
        Ok(HostPages { file: file.as_fd(), pages: bytes / each, page_bytes })
    }
}

/// The pages of a file.
pub(crate) struct HostPages<'a> {
    file: BorrowedFd<'a>,
    pages: u64,
    page_bytes: u64,
}

impl HostPages<'_> {
    /// Writes a page, which are `parts` one after the other.
    pub(crate) fn write(&self, page: u32, parts: &[&[u8]]) -> io::Result<()> {
        let mut parts: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        self.write_at(self.place(page)?, &mut parts)
    }

    /// Reads a page to `parts`.
    pub(crate) fn read(&self, page: u32, parts: Vec<&mut [u8]>) -> io::Result<()> {
        let mut parts: Vec<IoSliceMut<'_>> = parts.into_iter().map(IoSliceMut::new).collect();
        self.read_at(self.place(page)?, &mut parts)
    }

    /// Notes the checksum of a page.
    pub(crate) fn seal(&self, page: u32, sum: u32) -> io::Result<()> {
        self.write_at(self.seal_place(page)?, &mut [IoSlice::new(&sum.to_ne_bytes())])
    }

    /// The checksum of a page.
    pub(crate) fn sum(&self, page: u32) -> io::Result<u32> {
        let mut sum = [0; size_of::<u32>()];
        self.read_at(self.seal_place(page)?, &mut [IoSliceMut::new(&mut sum)])?;
        Ok(u32::from_ne_bytes(sum))
    }

    fn place(&self, page: u32) -> io::Result<u64> {
        match u64::from(page) < self.pages {
            true => Ok(u64::from(page) * self.page_bytes),
            false => Err(io::Error::other(format!("host page {page} of {}", self.pages))),
        }
    }

    fn seal_place(&self, page: u32) -> io::Result<u64> {
        self.place(page)?;
        Ok(self.pages * self.page_bytes + u64::from(page) * CHECKSUM_BYTES)
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

/// Bytes of a file.
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
            host_page_count(&config, 10, 100, free).map_err(|error| error.to_string())
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
        let nothing = host_page_count(&asked(Some(99), None, None), 0, 0, None);
        assert!(nothing.is_err_and(|why| why.to_string().contains("keeps no keys and values")));
    }

    #[test]
    fn a_page_comes_back_in_parts_of_any_size() {
        let files = HostFiles { own: file(), lenders: Vec::new() };
        let tier = HostTier::open(files, 3, 5).expect("a tier");
        let pages = tier.own();
        pages.write(1, &[&[1, 2], &[3, 4, 5]]).expect("written");
        pages.seal(2, 77).expect("written");
        let (mut first, mut last) = ([0; 4], [0; 1]);
        pages.read(1, vec![&mut first[..], &mut last[..]]).expect("read");
        assert_eq!((first, last), ([1, 2, 3, 4], [5]));
        assert_eq!((pages.sum(1).expect("there"), pages.sum(2).expect("there")), (0, 77));
        assert!(pages.write(3, &[&[0; 5]]).is_err() && pages.sum(3).is_err());
        // Whoever has the file now has made it shorter.
        ftruncate(&tier.files.own, 7).expect("shorter");
        assert!(pages.read(1, vec![&mut first[..], &mut last[..]]).is_err());
    }

    #[test]
    fn lenders_have_as_many_pages_as_their_file() {
        let lender = file();
        ftruncate(&lender, 2 * 9).expect("longer");
        let files = HostFiles { own: file(), lenders: vec![None, Some(lender), Some(file())] };
        let tier = HostTier::open(files, 1, 5).expect("a tier");
        let mut part = [1; 5];
        tier.of(1).expect("it lends").read(1, vec![&mut part[..]]).expect("its last page");
        assert_eq!(part, [0; 5]);
        assert!(tier.of(1).is_ok_and(|pages| pages.sum(2).is_err()));
        // One that lends nothing, one whose hand has not begun, and one that is not there.
        assert!([0, 2, 3].into_iter().all(|lender| tier.of(lender).is_err()));
    }
}
