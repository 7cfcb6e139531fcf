//! Events of the hand: start, facts, timeouts and death.

use forebay_protocol::Ready;
use forebay_scheduler::Scheduler;
use tracing::{error, info, warn};

use crate::config::micros;
use crate::member::{Cause, Member, Pool};
use crate::owner::Owner;
use crate::recovery::Verdict;
use crate::types::Status;

/// The idle time after which an engine checks its integrity, in microseconds.
const IDLE_CHECK_US: u64 = 100_000;
/// The share of its pages that a hand keeps each time that memory runs out, as (numerator,
/// denominator).
const KEPT_PAGES: (u32, u32) = (3, 4);
/// The number of times that a hand may come back with fewer pages. About a sixth of its pages is
/// then left.
const MOST_SHRINKS: u32 = 6;

impl Owner {
    pub(super) fn start(&mut self) {
        self.loading_us = Some(self.clock.now_us());
        self.executor.start();
    }

    pub(super) fn timeout(&self) -> Option<u64> {
        let now = self.clock.now_us();
        let hand = if self.restart_at.is_some() {
            self.restart_at
        } else if let Some(since) = self.loading_us {
            let limit = micros(self.config.load_timeout);
            (limit > 0).then(|| since.saturating_add(limit))
        } else if self.in_flight() > 0 {
            Some(self.progress_us.saturating_add(micros(self.config.watchdog_timeout)))
        } else {
            (self.unchecked && self.up).then_some(now.saturating_add(IDLE_CHECK_US))
        };
        let queues = self.members.iter().filter_map(Member::first_deadline);
        let next = hand.into_iter().chain(queues).min()?;
        Some(next.saturating_sub(now))
    }

    pub(super) fn timed_out(&mut self) {
        if let Some(since) = self.loading_us {
            let limit = micros(self.config.load_timeout);
            let silent = self.clock.now_us().saturating_sub(since);
            if limit > 0 && silent >= limit {
                self.executor.kill();
                self.died(&format!(
                    "no sign of life for {} s while it started",
                    silent / 1_000_000
                ));
            }
            return;
        }
        if !self.up {
            return;
        }
        if self.in_flight() == 0 {
            self.unchecked = false;
            let mut schedulers = self.members.iter().filter_map(|member| member.scheduler.as_ref());
            if let Err(broken) = schedulers.try_for_each(Scheduler::check_integrity) {
                error!("the scheduler's accounting is inconsistent, please report this: {broken}");
                debug_assert!(false, "inconsistent accounting: {broken}");
            }
            return;
        }
        let silent = self.clock.now_us().saturating_sub(self.progress_us);
        if silent >= micros(self.config.watchdog_timeout) {
            self.executor.kill();
            self.died(&format!("no result for {} s", silent / 1_000_000));
        }
    }

    pub(super) fn loading(&mut self, stage: String) {
        self.loading_us = Some(self.clock.now_us());
        for member in &self.members {
            let mut status = member.shared.status.lock();
            *status = match &*status {
                Status::Recovering(_) => Status::Recovering(stage.clone()),
                _ => Status::Starting(stage.clone()),
            };
        }
    }

    pub(super) fn ready(&mut self, facts: Ready) {
        let Ready {
            page_count,
            host_page_count,
            hot_row_tokens,
            graphs,
            weight_bytes,
            kv_bytes,
            ..
        } = facts;
        info!(device = %facts.device, pages = page_count, host_pages = host_page_count, hot_rows = hot_row_tokens, graphs, weight_bytes, kv_bytes, seconds = facts.load_seconds, "hand ready");
        self.members.iter_mut().for_each(|member| member.ready(&facts));
        self.recovery.ready(self.clock.now_us());
        self.loading_us = None;
        self.up = true;
        self.rested = true;
        self.reloaded_now();
        // The set of serving replicas is updated before the status: code that reads a ready status
        // may rely on that member being in the set.
        for peers in self.members.iter().filter_map(|member| member.peers.as_ref()) {
            peers.up(true);
        }
        self.say(&Status::Ready);
    }

    /// Handles the death of the hand, such as a crash. The hand is respawned, or given up after
    /// failed starts ([`crate::recovery`]).
    pub(super) fn died(&mut self, reason: &str) {
        if self.go_back(reason) {
            return;
        }
        let copies_hang = std::mem::take(&mut self.copies_hang);
        let computing = self.up && self.members.iter().any(Member::computes) && !copies_hang;
        self.lose_hand(if copies_hang { Cause::Copies } else { Cause::Requests });
        let verdict = self.recovery.died(self.clock.now_us(), computing);
        self.obey(&verdict, reason);
    }

    /// Handles a hand that the operating system killed for lack of memory. No request is to blame.
    /// The hand comes back with fewer pages, or is given up if it can't work with fewer.
    pub(super) fn out_of_memory(&mut self, reason: &str) {
        if self.go_back(reason) {
            return;
        }
        self.copies_hang = false;
        self.lose_hand(Cause::Memory);
        let now = self.clock.now_us();
        let pool = self.members.first().and_then(Member::pool);
        let (verdict, what) = match pool.map(|pool| self.smaller(pool)) {
            // The first start has failed, so no page count is known that could be lowered.
            None => (self.recovery.died(now, false), String::new()),
            Some(Err(why)) => (self.recovery.give_up(now), format!("; {why}")),
            Some(Ok(what)) => (Verdict::RestartAt(now), format!("; {what}")),
        };
        self.obey(&verdict, &format!("{reason}{what}"));
    }

    /// Limits the next hand to fewer pages than `pool`. Returns an error text if that is
    /// impossible.
    fn smaller(&mut self, pool: Pool) -> Result<String, String> {
        let Pool { pages, host_pages, least, host_least, context_length } = pool;
        if pages == 0 {
            return Err("the model keeps no KV pages that it could give up".into());
        }
        let part = |pages: u32| {
            let (kept, of) = KEPT_PAGES;
            u32::try_from(u64::from(pages) * u64::from(kept) / u64::from(of)).unwrap_or(pages)
        };
        let fewer = part(pages).max(least).min(pages);
        let fewer_host = part(host_pages).max(host_least).min(host_pages);
        if (fewer, fewer_host) == (pages, host_pages) {
            return Err(format!(
                "it can't do with fewer than {pages} KV pages, because a request may have \
                 {context_length} tokens: give it more memory, or lower --context-length"
            ));
        }
        if self.shrunk == MOST_SHRINKS {
            return Err(format!(
                "memory has run out {} times, the last time with {pages} KV pages: give it more \
                 memory, or lower --max-total-tokens",
                self.shrunk + 1
            ));
        }
        self.shrunk += 1;
        self.executor.limit_pages(fewer, fewer_host);
        let host = if host_pages > 0 {
            format!(", and {fewer_host} host pages in place of {host_pages}")
        } else {
            String::new()
        };
        Ok(format!("it comes back with {fewer} KV pages in place of {pages}{host}"))
    }

    pub(super) fn lose_hand(&mut self, cause: Cause) {
        let was_up = std::mem::take(&mut self.up);
        self.loading_us = None;
        self.unchecked = true;
        for member in &mut self.members {
            member.hand_died(was_up, cause);
        }
        for peers in self.members.iter().filter_map(|member| member.peers.as_ref()) {
            peers.up(false);
        }
    }

    /// Carries out the decision about the next start.
    fn obey(&mut self, verdict: &Verdict, reason: &str) {
        match *verdict {
            Verdict::RestartAt(at) => {
                warn!("the hand died ({reason}); it is respawned and requests are replayed");
                self.say(&Status::Recovering(reason.to_owned()));
                self.restart_at = Some(at);
            }
            Verdict::GiveUp { again_at } => {
                error!("the hand cannot start: {reason}");
                self.say(&Status::Failed(reason.to_owned()));
                let live = |member: &Member| {
                    member.peers.as_ref().is_some_and(|peers| peers.others_live())
                };
                self.over = !self.members.iter().any(live);
                self.restart_at = (!self.over).then_some(again_at);
            }
        }
        let over = self.over;
        self.members.iter_mut().for_each(|member| member.give_away(over));
    }

    pub(super) fn restart_if_due(&mut self) {
        if self.restart_at.is_some_and(|at| at <= self.clock.now_us()) {
            self.restart_at = None;
            for member in &self.members {
                let mut status = member.shared.status.lock();
                if let Status::Failed(reason) = &*status {
                    let again = format!("another try after: {reason}");
                    *status = match member.scheduler {
                        Some(_) => Status::Recovering(again),
                        None => Status::Starting(again),
                    };
                }
            }
            self.start();
        }
    }

    pub(super) fn say(&self, status: &Status) {
        for member in &self.members {
            status.clone_into(&mut member.shared.status.lock());
        }
    }
}
