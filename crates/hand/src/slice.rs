//! Gives short time slices to threads for which other threads wait.

use std::io;

use rustix::thread::Pid;

/// The shortest slice that Linux allows, in nanoseconds. The default slice is ten to thirty times
/// as long.
const NANOSECONDS: u64 = 100_000;

/// Gives `thread` short slices, so that the kernel schedules it sooner. When `thread` wakes up, it
/// preempts a thread in the middle of a long slice (EEVDF; requests for slices need Linux 6.12).
/// Its share of CPU time does not change, so it starves no other thread, and no privilege is
/// needed.
///
/// # Errors
/// The thread does not exist. Kernels without this feature return no error.
pub fn take_short_turns(thread: Pid) -> io::Result<()> {
    let niceness = rustix::process::getpriority_process(Some(thread))?;
    let attributes = libc::sched_attr {
        size: size_of::<libc::sched_attr>() as u32,
        sched_policy: libc::SCHED_OTHER as u32,
        // Threads that this thread starts, such as the hand's, get slices of the default length.
        sched_flags: libc::SCHED_FLAG_RESET_ON_FORK as u64,
        sched_nice: niceness,
        sched_priority: 0,
        sched_runtime: NANOSECONDS,
        sched_deadline: 0,
        sched_period: 0,
    };
    #[expect(unsafe_code, reason = "there is no safe call for it")]
    // SAFETY: the kernel reads `size` bytes at the address of `attributes`, which is a valid value
    // of this size.
    let result = unsafe {
        libc::syscall(
            libc::SYS_sched_setattr,
            thread.as_raw_nonzero().get(),
            &raw const attributes,
            0,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use rustix::thread::gettid;

    use super::*;

    #[test]
    fn everybody_may_ask_and_only_for_threads_that_are_there() {
        take_short_turns(gettid()).unwrap();
        // No thread has this id.
        let nobody = Pid::from_raw(i32::MAX).unwrap();
        assert_eq!(take_short_turns(nobody).unwrap_err().raw_os_error(), Some(libc::ESRCH));
    }
}
