//! The hand's life: its start, its facts, its silence, its death.

use std::sync::atomic::Ordering;

use forebay_protocol::Ready;
use forebay_scheduler::{HostTier, STEP_WORDS, Scheduler, SchedulerConfig, Sparse, Tower};
use tracing::{error, info, warn};

use crate::owner::Owner;
use crate::recovery::Verdict;
use crate::types::{Facts, FinishReason, RequestError, Status};

/// Quiet time after which an idle engine checks its books.
const IDLE_CHECK_US: u64 = 100_000;

impl Owner {
    pub(super) fn start(&mut self) {
        self.loading_us = Some(self.shared.clock.now_us());
        self.executor.start();
    }

    pub(super) fn timeout(&self) -> Option<u64> {
        let now = self.shared.clock.now_us();
        let in_flight = self.scheduler.as_ref().is_some_and(|s| s.in_flight() > 0);
        let hand = if self.restart_at.is_some() {
            self.restart_at
        } else if let Some(since) = self.loading_us {
            let limit = self.config.load_timeout_us;
            (limit > 0).then(|| since.saturating_add(limit))
        } else if in_flight {
            Some(self.progress_us.saturating_add(self.config.watchdog_us))
        } else {
            (self.unchecked && self.up).then_some(now.saturating_add(IDLE_CHECK_US))
        };
        let queue = self.deadlines.first().map(|&(at, _)| at);
        let next = hand.into_iter().chain(queue).min()?;
        Some(next.saturating_sub(now))
    }

    pub(super) fn timed_out(&mut self) {
        if let Some(since) = self.loading_us {
            let limit = self.config.load_timeout_us;
            let silent = self.shared.clock.now_us().saturating_sub(since);
            if limit > 0 && silent >= limit {
                self.executor.stop();
                self.died(&format!(
                    "no sign of life for {} s while it started",
                    silent / 1_000_000
                ));
            }
            return;
        }
        let Some(scheduler) = &self.scheduler else {
            return;
        };
        if !self.up {
            return;
        }
        if scheduler.in_flight() == 0 {
            self.unchecked = false;
            if let Err(broken) = scheduler.check_integrity() {
                error!("the books do not balance: {broken}");
                debug_assert!(false, "the books do not balance: {broken}");
            }
            return;
        }
        let silent = self.shared.clock.now_us().saturating_sub(self.progress_us);
        if silent >= self.config.watchdog_us {
            self.executor.stop();
            self.died(&format!("no result for {} s", silent / 1_000_000));
        }
    }

    pub(super) fn loading(&mut self, stage: String) {
        self.loading_us = Some(self.shared.clock.now_us());
        let mut status = self.shared.status.lock();
        *status = match &*status {
            Status::Recovering(_) => Status::Recovering(stage),
            _ => Status::Starting(stage),
        };
    }

    pub(super) fn ready(&mut self, facts: Ready) {
        let pages = facts.page_count;
        let host = self.config.host.filter(|_| facts.host_page_count > 0);
        let row_pages = facts.hot_row_tokens.div_ceil(self.config.page_size);
        let sparse = host
            .filter(|_| row_pages > 0)
            .map(|host| Sparse { row_pages, save_rows: host.save_rows });
        // An answer may outgrow the device's pages where it goes on without them.
        let positions = if sparse.is_some() { facts.host_page_count } else { pages };
        let pool = positions.saturating_mul(self.config.page_size);
        let host_pages = facts.host_page_count;
        let hot_rows = facts.hot_row_tokens;
        let graphs = facts.graphs;
        info!(device = %facts.device, pages, host_pages, hot_rows, graphs, seconds = facts.load_seconds, "hand ready");
        self.page_bytes = facts.page_bytes;
        self.constrained.vocabulary = facts.vocab_size;
        if self.scheduler.is_none() {
            let longest = if pages == 0 { u32::MAX } else { pool };
            let context_length = self.config.context_length.min(longest);
            if context_length < self.config.context_length {
                warn!(context_length, "the KV pool is smaller than the context length");
            }
            self.shared.room.store(context_length, Ordering::Release);
            let page_size = self.config.page_size;
            let hot = if pages == 0 { u32::MAX } else { pages.saturating_mul(page_size) };
            // A prompt is computed with all of its pages on the device, and one more for the first
            // token.
            let prompt_length = context_length.min(hot.saturating_sub(u32::from(sparse.is_some())));
            *self.shared.facts.lock() =
                Some(Facts { context_length, prompt_length, page_size, hand: facts.clone() });
            self.scheduler = Some(Scheduler::new(SchedulerConfig {
                slots: self.config.slots,
                max_running: self.config.max_running,
                pages,
                page_size: self.config.page_size,
                token_budget: self.config.token_budget,
                prefix_cache: self.config.prefix_cache,
                namer: self.config.namer.clone(),
                block_events: self.blocks.is_some(),
                policy: self.config.policy,
                fair: self.config.fair,
                step_words: STEP_WORDS,
                vector_size: facts.hidden_size,
                tokens_a_row: facts.tokens_a_row.max(1),
                sparse,
                tower: (facts.tower_layers > 0).then_some(Tower {
                    layers: facts.tower_layers,
                    pages: facts.image_page_count,
                    page_tokens: facts.image_page_tokens.max(1),
                    budget: self.config.image_budget,
                }),
                host: host.map(|host| HostTier {
                    pages: facts.host_page_count,
                    policy: host.policy,
                    copies_a_step: host.copies_a_step,
                    prefetch: host.prefetch,
                    restore_preempted: host.restore_preempted,
                }),
            }));
        }
        self.recovery.ready(self.shared.clock.now_us());
        self.loading_us = None;
        self.up = true;
        self.rested = true;
        // Whoever sees that it is ready may rely on its being in the set.
        if let Some(peers) = &self.peers {
            peers.up(true);
        }
        *self.shared.status.lock() = Status::Ready;
        self.carry_again();
    }

    pub(super) fn died(&mut self, reason: &str) {
        let was_up = std::mem::take(&mut self.up);
        let copies_hang = std::mem::take(&mut self.copies_hang);
        let computes = self.scheduler.as_ref().is_some_and(Scheduler::computes);
        let computing = was_up && computes && !copies_hang;
        self.loading_us = None;
        self.copying_us = None;
        self.arriving.clear();
        self.stats.deaths += 1;
        self.payloads.hand_died();
        self.notes.hand_died();
        self.forget_masks();
        self.unchecked = true;
        if was_up && let Some(scheduler) = self.scheduler.as_mut() {
            let poisoned = if copies_hang {
                scheduler.reset_for_copies();
                Vec::new()
            } else {
                scheduler.reset()
            };
            for id in poisoned {
                error!(request = id, "a request brought the hand down twice");
                self.end(id, FinishReason::Error(RequestError::Poisoned));
            }
        }
        self.hold_embedded();
        if let Some(peers) = &self.peers {
            peers.up(false);
        }
        match self.recovery.died(self.shared.clock.now_us(), computing) {
            Verdict::RestartAt(at) => {
                warn!("the hand died ({reason}); it is respawned and requests are replayed");
                *self.shared.status.lock() = Status::Recovering(reason.to_owned());
                self.restart_at = Some(at);
            }
            Verdict::GiveUp { again_at } => {
                error!("the hand cannot start: {reason}");
                *self.shared.status.lock() = Status::Failed(reason.to_owned());
                self.over = self.peers.as_ref().is_none_or(|peers| !peers.others_live());
                self.restart_at = (!self.over).then_some(again_at);
            }
        }
        self.give_away();
    }

    pub(super) fn restart_if_due(&mut self) {
        if self.restart_at.is_some_and(|at| at <= self.shared.clock.now_us()) {
            self.restart_at = None;
            {
                let mut status = self.shared.status.lock();
                if let Status::Failed(reason) = &*status {
                    let again = format!("another try after: {reason}");
                    *status = match self.scheduler {
                        Some(_) => Status::Recovering(again),
                        None => Status::Starting(again),
                    };
                }
            }
            self.start();
        }
    }
}
