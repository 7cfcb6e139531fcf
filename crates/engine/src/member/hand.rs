//! A member's part of the hand's life: a scheduler when the facts are known, a new beginning after
//! a death.

use std::sync::atomic::Ordering;

use forebay_protocol::Ready;
use forebay_scheduler::{HostTier, STEP_WORDS, Scheduler, SchedulerConfig, Sparse, Tower};
use tracing::{error, warn};

use crate::member::Member;
use crate::types::{Facts, FinishReason, RequestError};

impl Member {
    /// The hand takes plans.
    pub(crate) fn ready(&mut self, facts: &Ready) {
        let pages = facts.page_count;
        let host = self.config.host.filter(|_| facts.host_page_count > 0);
        let row_pages = facts.hot_row_tokens.div_ceil(self.config.page_size);
        let sparse = host
            .filter(|_| row_pages > 0)
            .map(|host| Sparse { row_pages, save_rows: host.save_rows });
        // An answer may outgrow the device's pages where it goes on without them.
        let positions = if sparse.is_some() { facts.host_page_count } else { pages };
        let pool = positions.saturating_mul(self.config.page_size);
        self.page_bytes = facts.page_bytes;
        self.constrained.vocabulary = facts.vocab_size;
        if self.scheduler.is_some() {
            return self.carry_again();
        }
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

    /// The hand is gone; of a member of a group, that of all.
    pub(crate) fn hand_died(&mut self, was_up: bool, copies_hang: bool) {
        self.copying_us = None;
        self.arriving.clear();
        self.stats.deaths += 1;
        self.payloads.hand_died();
        self.notes.hand_died();
        self.forget_masks();
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
    }
}
