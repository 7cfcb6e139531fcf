//! The permanent threads that compute steps.
//!
//! Members wait for each other hundreds of times per step, some microseconds apart, so a waiting
//! member spins at first. After 150 microseconds it sleeps, since other programs need the
//! processors too.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a member spins before it sleeps.
const LOOKS_FOR: Duration = Duration::from_micros(150);
/// The number of polls between two readings of the clock.
const LOOKS: u32 = 64;

/// A barrier at which `members` threads wait for each other, any number of times.
pub(crate) struct Meeting {
    members: usize,
    /// The number of members that have arrived in this round.
    come: AtomicUsize,
    /// The number of completed rounds.
    turn: AtomicUsize,
    asleep: AtomicUsize,
    lock: Mutex<()>,
    over: Condvar,
}

impl Meeting {
    fn new(members: usize) -> Self {
        Self {
            members,
            come: AtomicUsize::new(0),
            turn: AtomicUsize::new(0),
            asleep: AtomicUsize::new(0),
            lock: Mutex::new(()),
            over: Condvar::new(),
        }
    }

    /// Returns when all members have arrived.
    pub(crate) fn wait(&self) {
        let turn = self.turn.load(Ordering::Acquire);
        if self.come.fetch_add(1, Ordering::AcqRel) + 1 == self.members {
            self.come.store(0, Ordering::Relaxed);
            self.turn.store(turn.wrapping_add(1), Ordering::SeqCst);
            if self.asleep.load(Ordering::SeqCst) > 0 {
                // A member holds the lock from its last check of `turn` until it sleeps. Taking the
                // lock ensures that no member misses the notification.
                drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
                self.over.notify_all();
            }
            return;
        }
        let mut since = None;
        loop {
            for _ in 0..LOOKS {
                if self.turn.load(Ordering::Acquire) != turn {
                    return;
                }
                std::hint::spin_loop();
            }
            if since.get_or_insert_with(Instant::now).elapsed() > LOOKS_FOR {
                break;
            }
        }
        self.asleep.fetch_add(1, Ordering::SeqCst);
        let mut held = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        while self.turn.load(Ordering::SeqCst) == turn {
            held = self.over.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
        drop(held);
        self.asleep.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The work of all members, called with each member's index.
type Job = *const (dyn Fn(usize) + Sync);

/// The state that the threads and their owner share.
struct Common {
    meeting: Meeting,
    /// Written by the owner before a barrier, and read by the other members after it.
    job: UnsafeCell<Option<Job>>,
}

// SAFETY: `job` is written before a barrier and read after it, and any thread may call the job.
unsafe impl Sync for Common {}
// SAFETY: as above.
unsafe impl Send for Common {}

/// Permanent threads that wait for work. Their caller is also a member of the team.
pub struct Threads {
    common: Arc<Common>,
    others: Vec<JoinHandle<()>>,
    /// Held while a job runs: only one job runs at a time.
    busy: Mutex<()>,
}

impl Threads {
    /// Creates a team of `members` threads, including the caller of [`Self::run`].
    ///
    /// # Errors
    /// If the system refuses to create a thread.
    pub fn new(members: usize) -> std::io::Result<Self> {
        let members = members.max(1);
        let common =
            Arc::new(Common { meeting: Meeting::new(members), job: UnsafeCell::new(None) });
        let mut threads = Self { common: common.clone(), others: Vec::new(), busy: Mutex::new(()) };
        for index in 1..members {
            let common = common.clone();
            let work = move || member(&common, index);
            let started = std::thread::Builder::new().name(format!("compute-{index}")).spawn(work);
            match started {
                Ok(thread) => threads.others.push(thread),
                Err(error) => {
                    // The threads that were started would wait for ever, so they and their shared
                    // state are leaked.
                    std::mem::forget(threads);
                    return Err(error);
                }
            }
        }
        Ok(threads)
    }

    /// The number of threads.
    #[must_use]
    pub fn count(&self) -> usize {
        self.common.meeting.members
    }

    pub(crate) fn meeting(&self) -> &Meeting {
        &self.common.meeting
    }

    /// Makes every member call `work` with its index. Returns when all members are done. A panic in
    /// `work` aborts the process.
    pub fn run(&self, work: impl Fn(usize) + Sync) {
        if self.count() == 1 {
            return work(0);
        }
        let _one = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        let job: &(dyn Fn(usize) + Sync) = &work;
        // SAFETY: the other members no longer use the reference after the second barrier, and
        // `work` lives until then.
        let job: Job = unsafe {
            std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(job)
        };
        // SAFETY: the other members read the job only after the barrier.
        unsafe { *self.common.job.get() = Some(job) };
        self.common.meeting.wait();
        let guard = Abort;
        work(0);
        std::mem::forget(guard);
        self.common.meeting.wait();
    }

    /// Calls `work` once for each of `0 .. count`; the next free member takes each index.
    pub fn each(&self, count: usize, work: impl Fn(usize) + Sync) {
        let next = AtomicUsize::new(0);
        if count == 1 {
            return work(0);
        }
        self.run(|_| {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= count {
                    break;
                }
                work(index);
            }
        });
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if self.others.is_empty() {
            return;
        }
        // SAFETY: the other members read the job only after the barrier.
        unsafe { *self.common.job.get() = None };
        self.common.meeting.wait();
        for thread in self.others.drain(..) {
            // A panicked thread has already printed its message.
            let _ = thread.join();
        }
    }
}

fn member(common: &Common, index: usize) {
    loop {
        common.meeting.wait();
        // SAFETY: the job was written before this barrier, and is not written again until the next
        // barrier has passed.
        let Some(job) = (unsafe { *common.job.get() }) else { return };
        let guard = Abort;
        // SAFETY: the owner keeps the job until the next barrier has passed.
        unsafe { (*job)(index) };
        std::mem::forget(guard);
        common.meeting.wait();
    }
}

/// Aborts the process when dropped. If a member panicked inside a job, the others would wait for it
/// for ever.
struct Abort;

impl Drop for Abort {
    fn drop(&mut self) {
        eprintln!("a thread that computes has panicked");
        std::process::abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_member_has_its_turn_and_all_meet() {
        for members in [1, 2, 5] {
            let threads = Threads::new(members).expect("threads");
            for _ in 0..200 {
                let counts: Vec<AtomicUsize> = (0..3).map(|_| AtomicUsize::new(0)).collect();
                threads.run(|_| {
                    for count in &counts {
                        count.fetch_add(1, Ordering::Relaxed);
                        if members > 1 {
                            threads.meeting().wait();
                        }
                        assert_eq!(count.load(Ordering::Relaxed), members);
                    }
                });
            }
        }
    }

    #[test]
    fn whoever_sleeps_is_woken() {
        let threads = Threads::new(3).expect("threads");
        for _ in 0..5 {
            let done = AtomicUsize::new(0);
            threads.run(|index| {
                std::thread::sleep(Duration::from_millis(index as u64));
                done.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(done.into_inner(), 3);
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    #[test]
    fn each_piece_is_done_once() {
        let threads = Threads::new(3).expect("threads");
        let pieces: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
        threads.each(pieces.len(), |index| {
            pieces[index].fetch_add(1, Ordering::Relaxed);
        });
        assert!(pieces.iter().all(|count| count.load(Ordering::Relaxed) == 1));
    }
}
