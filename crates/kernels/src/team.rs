//! The threads that share a step's work.
//!
//! PyTorch computes with OpenMP. A pool of our own would fight that one for the processors: its
//! threads spin for a while after each region. So the very same threads are used, through the entry
//! points that compilers call (the GNU OpenMP ABI). The program that loaded the library gives their
//! addresses. A process without OpenMP brings threads that stay ([`Threads`]); without those,
//! threads are started for each call.

use std::ffi::{c_int, c_uint, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};

use crate::pool::{Meeting as Turns, Threads};

type Entry = unsafe extern "C" fn(*mut c_void);
type Parallel = unsafe extern "C" fn(Entry, *mut c_void, c_uint, c_uint);
type Number = unsafe extern "C" fn() -> c_int;

/// Rows up to which every member prepares all of them for itself: that is quicker than to meet.
pub(crate) const FEW: usize = 16;

/// `GOMP_parallel`, `GOMP_barrier`, `omp_get_thread_num` and `omp_get_num_threads` of a running
/// OpenMP; null where there is none.
#[repr(C)]
pub struct TeamSpec {
    parallel: Option<Parallel>,
    barrier: Option<unsafe extern "C" fn()>,
    thread: Option<Number>,
    threads: Option<Number>,
}

impl TeamSpec {
    fn open_mp(&self) -> Option<OpenMp> {
        Some(OpenMp {
            parallel: self.parallel?,
            barrier: self.barrier?,
            thread: self.thread?,
            threads: self.threads?,
        })
    }
}

/// A [`TeamSpec`] whose parts are all there.
#[derive(Clone, Copy)]
pub(crate) struct OpenMp {
    parallel: Parallel,
    barrier: unsafe extern "C" fn(),
    thread: Number,
    threads: Number,
}

/// A team of `threads` threads.
#[derive(Clone)]
pub(crate) struct Team {
    pub(crate) threads: usize,
    pub(crate) kind: Kind,
}

/// The source of a team's threads.
#[derive(Clone)]
pub(crate) enum Kind {
    OpenMp(OpenMp),
    Kept(Arc<Threads>),
    /// The threads are started for each call.
    Started,
}

/// One thread of a running team.
pub(crate) struct Member<'a> {
    /// Below `members`, and no other's.
    pub(crate) index: usize,
    /// The members of this run. OpenMP may give fewer threads than requested.
    pub(crate) members: usize,
    meeting: Meeting<'a>,
}

enum Meeting<'a> {
    Alone,
    OpenMp(OpenMp),
    Kept(&'a Turns),
    Started(&'a Barrier),
}

impl Member<'_> {
    /// This member's part of `0 .. count`.
    #[inline]
    pub(crate) fn share(&self, count: usize) -> Range<usize> {
        self.index * count / self.members..(self.index + 1) * count / self.members
    }

    /// Waits until every member has come here.
    #[inline]
    pub(crate) fn meet(&self) {
        match &self.meeting {
            Meeting::Alone => {}
            // SAFETY: called by every member of a parallel region, as many times.
            Meeting::OpenMp(open_mp) => unsafe { (open_mp.barrier)() },
            Meeting::Kept(turns) => turns.wait(),
            Meeting::Started(barrier) => drop(barrier.wait()),
        }
    }
}

/// Work that members take part by part. A delayed member takes less.
#[derive(Default)]
pub(crate) struct Queue(AtomicUsize);

impl Queue {
    /// The next of `total` pieces; `None`: all are taken. At first a call takes many at a time,
    /// since a call costs the transfer of the counter between processors. At the end it takes one
    /// by one, so that all members end together.
    #[inline]
    pub(crate) fn take(&self, total: usize, members: usize) -> Range<usize> {
        let mut from = self.0.load(Ordering::Relaxed);
        loop {
            let until = from + total.saturating_sub(from).div_ceil(2 * members);
            match self.0.compare_exchange_weak(from, until, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return from..until,
                Err(now) => from = now,
            }
        }
    }

    pub(crate) fn reset(&mut self) {
        *self.0.get_mut() = 0;
    }
}

impl Team {
    /// A team of at least one thread: those of OpenMP where there is one, or started for each call.
    pub(crate) fn of(threads: u32, spec: &TeamSpec) -> Self {
        let kind = spec.open_mp().map_or(Kind::Started, Kind::OpenMp);
        Self { threads: threads.max(1) as usize, kind }
    }

    /// Runs `work` on every member and returns when all are done.
    pub(crate) fn run<F: Fn(Member<'_>) + Sync>(&self, work: F) {
        if self.threads == 1 {
            return work(Member { index: 0, members: 1, meeting: Meeting::Alone });
        }
        match &self.kind {
            Kind::OpenMp(open_mp) => {
                let region = (&work, *open_mp);
                let data = (&raw const region).cast_mut().cast();
                let threads = c_uint::try_from(self.threads).unwrap_or(1);
                // SAFETY: `enter` reads a region of this type, which outlives the call.
                unsafe { (open_mp.parallel)(enter::<F>, data, threads, 0) };
            }
            Kind::Kept(threads) => threads.run(|index| {
                let meeting = Meeting::Kept(threads.meeting());
                work(Member { index, members: threads.count(), meeting });
            }),
            Kind::Started => {
                let barrier = Barrier::new(self.threads);
                let member = |index| {
                    let meeting = Meeting::Started(&barrier);
                    work(Member { index, members: self.threads, meeting });
                };
                let member = &member;
                std::thread::scope(|scope| {
                    for index in 1..self.threads {
                        scope.spawn(move || member(index));
                    }
                    member(0);
                });
            }
        }
    }
}

unsafe extern "C" fn enter<F: Fn(Member<'_>) + Sync>(data: *mut c_void) {
    // SAFETY: `Team::run` passes a region of this type and waits for this function.
    let (work, open_mp) = unsafe { &*data.cast::<(&F, OpenMp)>() };
    // SAFETY: asked inside a parallel region, of it.
    let (index, members) = unsafe { ((open_mp.thread)(), (open_mp.threads)()) };
    let number = |n: c_int| usize::try_from(n).unwrap_or(0);
    let meeting = Meeting::OpenMp(*open_mp);
    work(Member { index: number(index), members: number(members), meeting });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_piece_is_taken_once(total in 0usize..500, members in 1usize..6, threads in 1usize..4) {
            let queue = Queue::default();
            let taken: Vec<AtomicUsize> = (0..total).map(|_| AtomicUsize::new(0)).collect();
            let team = Team { threads, kind: Kind::Started };
            team.run(|_| loop {
                let mine = queue.take(total, members);
                if mine.is_empty() {
                    break;
                }
                for piece in mine {
                    taken[piece].fetch_add(1, Ordering::Relaxed);
                }
            });
            prop_assert!(taken.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }
}
