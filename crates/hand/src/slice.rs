//! Short turns on the processor, for threads that other threads wait for.

use std::io;

use rustix::thread::Pid;

/// The shortest turn that Linux gives, in nanoseconds. Its default is ten to thirty times as long.
const NANOSECONDS: u64 = 100_000;

/// Makes the kernel give `thread` short turns, which come sooner. A thread that wakes with less to
/// do goes before one in the middle of a long turn (EEVDF; slices can be requested since Linux
/// 6.12). Its share of the processor does not change. So it starves no other thread, and every
/// thread may request it.
///
/// # Errors
/// The thread is not there. Kernels without slices give no error.
pub fn take_short_turns(thread: Pid) -> io::Result<()> {
    let niceness = rustix::process::getpriority_process(Some(thread))?;
    let attributes = libc::sched_attr {
        size: size_of::<libc::sched_attr>() as u32,
        sched_policy: libc::SCHED_OTHER as u32,
        // Threads of the hand, which this thread starts, get slices of the usual length.
        sched_flags: libc::SCHED_FLAG_RESET_ON_FORK as u64,
        sched_nice: niceness,
        sched_priority: 0,
        sched_runtime: NANOSECONDS,
        sched_deadline: 0,
        sched_period: 0,
    };
    #[expect(unsafe_code, reason = "there is no safe call for it")]
    // SAFETY: the kernel reads `size` bytes at the address, and they are there.
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
        // Numbers of threads do not go so far.
        let nobody = Pid::from_raw(i32::MAX).unwrap();
        assert_eq!(take_short_turns(nobody).unwrap_err().raw_os_error(), Some(libc::ESRCH));
    }
}
