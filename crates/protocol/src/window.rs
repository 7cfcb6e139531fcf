//! The number of pages of the window part, whose layers read only the last positions of a request.

/// Returns the smallest number of window pages with which a request that runs alone can continue.
/// These are the pages that one position reads, the page to which the position is written, and a
/// page that the window has passed but that is not free yet.
#[must_use]
pub fn least_window_pages(window: u32, page_size: u32) -> u32 {
    window.saturating_sub(1).div_ceil(page_size.max(1)) + 2
}

/// Returns the number of window pages for `pages` of the main part: `ratio` times as many, at least
/// [`least_window_pages`], and never more than `pages`.
#[must_use]
pub fn window_page_count(pages: u32, ratio: f64, window: u32, page_size: u32) -> u32 {
    let wanted = (f64::from(pages) * ratio).ceil() as u32;
    wanted.max(least_window_pages(window, page_size)).min(pages)
}

/// Returns how many pages of the main part, at most `most`, fit into `bytes` together with their
/// window pages. A page takes `main_bytes` or `window_bytes`.
#[must_use]
pub fn main_page_count(
    bytes: u64,
    most: u32,
    (main_bytes, window_bytes): (u64, u64),
    window_pages: impl Fn(u32) -> u32,
) -> u32 {
    let taken =
        |pages: u32| u64::from(pages) * main_bytes + u64::from(window_pages(pages)) * window_bytes;
    let (mut fits, mut too_many) = (0, most.saturating_add(1));
    while too_many - fits > 1 {
        let middle = fits + (too_many - fits) / 2;
        if taken(middle) <= bytes { fits = middle } else { too_many = middle }
    }
    fits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_part_has_a_share_and_never_too_little() {
        let count = |pages, ratio| window_page_count(pages, ratio, 33, 16);
        assert_eq!(least_window_pages(33, 16), 4);
        assert_eq!((least_window_pages(1, 16), least_window_pages(34, 16)), (2, 5));
        assert_eq!((count(100, 0.5), count(101, 0.5), count(100, 1.0)), (50, 51, 100));
        assert_eq!((count(6, 0.5), count(3, 0.5), count(100, 0.0)), (4, 3, 4));
    }

    #[test]
    fn both_parts_have_room_and_one_page_more_has_not() {
        for bytes in [0, 99, 5_000, 123_456] {
            for (main, window) in [(100, 500), (0, 300), (700, 1)] {
                let count = |pages| window_page_count(pages, 0.5, 33, 16);
                let pages = main_page_count(bytes, 4000, (main, window), count);
                let taken = |pages: u32| u64::from(pages) * main + u64::from(count(pages)) * window;
                assert!(taken(pages) <= bytes);
                assert!(pages == 4000 || taken(pages + 1) > bytes, "{bytes} {main} {window}");
            }
        }
    }
}
