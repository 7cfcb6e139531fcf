//! Injects faults into a running simulation.

use std::sync::Arc;

use forebay_engine::{Signal, Wake};
use parking_lot::{Condvar, Mutex};

use crate::copies::CopyFault;

/// Injects faults into a running simulation, from any thread.
#[derive(Clone, Default)]
pub struct SimControl {
    pub(crate) shared: Arc<Shared>,
}

#[derive(Default)]
pub(crate) struct Shared {
    pub(crate) faults: Mutex<Faults>,
    pub(crate) changed: Condvar,
}

#[derive(Default)]
pub(crate) struct Faults {
    pub(crate) woken: bool,
    /// The signal with which the group is to die; `None` if it is not to die.
    pub(crate) kill: Option<Signal>,
    /// A group with more than this many pages runs out of memory as soon as it computes; `None` for
    /// no limit.
    pub(crate) starves_from: Option<u32>,
    /// The rank whose next result is wrong; `None` if results are right.
    pub(crate) lie: Option<usize>,
    pub(crate) fail_starts: u32,
    pub(crate) hang_starts: u32,
    pub(crate) poison: Option<i32>,
    pub(crate) hang: bool,
    pub(crate) held: bool,
    pub(crate) fail_copies: u32,
    pub(crate) hang_copies: bool,
}

impl SimControl {
    /// Kills the group as `kill -9` would.
    pub fn kill(&self) {
        self.change(|faults| faults.kill = Some(Signal::Died("killed by signal 9".into())));
    }

    /// Kills one rank of a step group. The other ranks end with it.
    pub fn kill_rank(&self, rank: usize) {
        let why = format!("rank {rank}: killed by signal 9");
        self.change(|faults| faults.kill = Some(Signal::Died(why)));
    }

    /// Makes groups with more than `pages` pages run out of memory in every later step.
    pub fn starve(&self, pages: u32) {
        self.change(|faults| faults.starves_from = Some(pages));
    }

    /// Makes a rank of a step group return one token too many in its next result.
    pub fn lie(&self, rank: usize) {
        self.change(|faults| faults.lie = Some(rank));
    }

    /// Makes the next `count` starts fail.
    pub fn fail_starts(&self, count: u32) {
        self.change(|faults| faults.fail_starts = count);
    }

    /// Makes the next `count` starts hang: they neither fail nor finish.
    pub fn hang_starts(&self, count: u32) {
        self.change(|faults| faults.hang_starts = count);
    }

    /// Makes each later step kill the group if it computes a slot that was written with this token.
    pub fn poison(&self, token: i32) {
        self.change(|faults| faults.poison = Some(token));
    }

    /// Makes steps submitted from now on never end, until the group is started again.
    pub fn hang(&self) {
        self.change(|faults| faults.hang = true);
    }

    /// Makes the next `count` copies fail.
    pub fn fail_copies(&self, count: u32) {
        self.change(|faults| faults.fail_copies = count);
    }

    /// Makes copies started from now on never end, until the group is started again.
    pub fn hang_copies(&self) {
        self.change(|faults| faults.hang_copies = true);
    }

    /// Stops the time: until [`release`](Self::release), only wake-ups are handled.
    pub fn hold(&self) {
        self.change(|faults| faults.held = true);
    }

    /// Lets the time continue.
    pub fn release(&self) {
        self.change(|faults| faults.held = false);
    }

    /// Returns how the next copy ends.
    pub(crate) fn copy_fault(&self) -> CopyFault {
        let mut faults = self.shared.faults.lock();
        if faults.hang_copies {
            CopyFault::Hangs
        } else if faults.fail_copies > 0 {
            faults.fail_copies -= 1;
            CopyFault::Fails
        } else {
            CopyFault::None
        }
    }

    fn change(&self, with: impl FnOnce(&mut Faults)) {
        with(&mut self.shared.faults.lock());
        self.shared.changed.notify_all();
    }
}

impl Wake for SimControl {
    fn wake(&self) {
        self.change(|faults| faults.woken = true);
    }
}
