//! An allocator that counts the allocated bytes, and their peak.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// Counts every byte of this process. A test measures only while no other test of this binary runs.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn grow(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Relaxed) + bytes;
    PEAK.fetch_max(live, Relaxed);
}

#[expect(
    unsafe_code,
    reason = "there is no other way to count allocations; it only passes calls on"
)]
// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        unsafe { System.dealloc(at, layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if size > layout.size() {
            grow(size - layout.size());
        } else {
            LIVE.fetch_sub(layout.size() - size, Relaxed);
        }
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        unsafe { System.realloc(at, layout, size) }
    }
}

/// Returns the number of bytes that are allocated at present.
pub(crate) fn live() -> usize {
    LIVE.load(Relaxed)
}

/// Begins a measurement; returns the number of bytes that are allocated at present.
pub(crate) fn mark() -> usize {
    let live = LIVE.load(Relaxed);
    PEAK.store(live, Relaxed);
    live
}

/// Returns the peak of allocated bytes since `mark`, less those that were allocated at that time.
pub(crate) fn peak(mark: usize) -> usize {
    PEAK.load(Relaxed).saturating_sub(mark)
}
