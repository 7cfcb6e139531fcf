//! A member's response to events of the hand: creates a scheduler once the hand's facts are known,
//! and resets it after the hand's death.

use std::sync::atomic::Ordering;

use forebay_protocol::Ready;
use forebay_scheduler::{
    Drafts, HostTier, PageCounts, STEP_WORDS, Scheduler, SchedulerConfig, Sparse, StateCache,
    Tower, WindowPart,
};
use tracing::{error, info, warn};

use crate::config::{ImageConfig, Preemption, SaveUnit};
use crate::member::Member;
use crate::types::{Facts, FinishReason, RequestError};

/// The cause of a hand's death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// A request in flight may have caused the death.
    Requests,
    /// The hand was killed because no page copy or adapter load ended for too long.
    Copies,
    /// Memory ran out.
    Memory,
    /// The hand was stopped, to start again with other weights.
    Weights,
}

/// The number of pages of a hand, and the fewest pages with which every allowed request can still
/// be computed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pool {
    /// The number of pages on the device; 0: the model keeps no KV cache.
    pub(crate) pages: u32,
    /// The number of pages in the host tier; 0 without a host tier.
    pub(crate) host_pages: u32,
    /// The fewest pages that the device may have.
    pub(crate) least: u32,
    /// The fewest pages that the host tier may have.
    pub(crate) host_least: u32,
    /// The largest number of positions of a request.
    pub(crate) context_length: u32,
}

impl Member {
    /// Returns the page counts of the hand; `None`: no hand was ready yet.
    pub(crate) fn pool(&self) -> Option<Pool> {
        let facts = self.shared.facts.lock();
        let Facts { context_length, prompt_length, page_size, ref hand } = *facts.as_ref()?;
        let row_pages = hand.hot_row_tokens.div_ceil(page_size);
        let context = context_length.div_ceil(page_size);
        // A prompt needs all its pages on the device, and one more for the next token.
        let least = match (row_pages, self.config.host_tier) {
            (1.., Some(host)) if hand.host_page_count > 0 => {
                let sparse = Sparse { row_pages, save_rows: host.kv_save == SaveUnit::Token };
                sparse.least_pages().max(prompt_length.div_ceil(page_size).saturating_add(1))
            }
            _ => context,
        };
        let (pages, host_pages) = (hand.page_count, hand.host_page_count);
        Some(Pool { pages, host_pages, least, host_least: context, context_length })
    }

    /// Handles a hand that is ready for plans.
    pub(crate) fn ready(&mut self, facts: &Ready) {
        let drafts = self.drafts(facts);
        let facts = &Ready { verifies_drafts: drafts.is_some(), ..facts.clone() };
        let pages = facts.page_count;
        let host = self.config.host_tier.filter(|_| facts.host_page_count > 0);
        let row_pages = facts.hot_row_tokens.div_ceil(self.config.page_size);
        let is_recurrent = self.config.is_recurrent || facts.state_bytes > 0;
        let states = is_recurrent.then_some(StateCache {
            pages: facts.state_page_count,
            interval: self.config.state_interval,
            host_pages: facts.host_state_page_count,
            weight: StateCache::weight_of(facts.state_bytes, facts.page_bytes),
        });
        // No model has both sparse attention and recurrent layers.
        let sparse = host
            .filter(|_| row_pages > 0 && !is_recurrent)
            .map(|host| Sparse { row_pages, save_rows: host.kv_save == SaveUnit::Token });
        // With sparse decoding, an answer may need more pages than the device has.
        let positions = if sparse.is_some() { facts.host_page_count } else { pages };
        let pool = positions.saturating_mul(self.config.page_size);
        self.adapters.know_again();
        (self.page_bytes, self.state_bytes) = (facts.page_bytes, facts.state_bytes);
        self.constrained.vocabulary = facts.vocab_size;
        if let Some(scheduler) = &mut self.scheduler {
            let mut known = self.shared.facts.lock();
            if let Some(known) = known.as_mut().filter(|known| counts(&known.hand) != counts(facts))
            {
                scheduler.resize(counts(facts));
                known.hand = facts.clone();
            }
            drop(known);
            return self.carry_again();
        }
        let longest = if pages == 0 { u32::MAX } else { pool };
        let context_length = self.config.context_length.min(longest);
        if context_length < self.config.context_length {
            warn!(context_length, "the KV pool is smaller than the context length");
        }
        if states.is_some_and(|states| states.pages == 0) && self.config.prefix_cache {
            info!("the prefix cache is not used: no recurrent states are cached");
        }
        self.shared.room.store(context_length, Ordering::Release);
        let page_size = self.config.page_size;
        let hot = if pages == 0 { u32::MAX } else { pages.saturating_mul(page_size) };
        // All positions of a prompt have to fit on the device; with sparse decoding, the position
        // of the first generated token too.
        let prompt_length = context_length.min(hot.saturating_sub(u32::from(sparse.is_some())));
        *self.shared.facts.lock() =
            Some(Facts { context_length, prompt_length, page_size, hand: facts.clone() });
        self.scheduler = Some(Scheduler::new(SchedulerConfig {
            slots: self.config.slots,
            max_running: self.config.max_running_requests,
            pages,
            page_size: self.config.page_size,
            token_budget: self.config.chunked_prefill_size,
            prefix_cache: self.config.prefix_cache,
            namer: self.config.namer.clone(),
            block_events: self.blocks.is_some(),
            policy: self.config.schedule_policy,
            fair: self.config.fair_queueing,
            step_shares: self.config.step_shares,
            decode_gap: self.config.decode_gap_ms,
            background_share: self.config.background_share,
            step_words: STEP_WORDS,
            vector_size: facts.hidden_size,
            tokens_a_row: if is_recurrent { 1 } else { facts.tokens_a_row.max(1) },
            states,
            windows: (facts.window_page_count > 0)
                .then_some(WindowPart { pages: facts.window_page_count, window: facts.window }),
            drafts,
            sparse,
            tower: (facts.tower_layers > 0).then_some(Tower {
                layers: facts.tower_layers,
                pages: facts.image_page_count,
                page_tokens: facts.image_page_tokens.max(1),
                budget: self.config.images.map_or(1, ImageConfig::position_layers),
                whole: self.config.images.is_some_and(|images| images.whole),
            }),
            places: if facts.lora_bytes > 0 { self.config.places } else { 0 },
            host: host.map(|host| HostTier {
                pages: facts.host_page_count,
                policy: host.hicache_write_policy,
                copies_a_step: host.kv_copy_pages_per_step,
                prefetch: host.hicache_prefetch_requests,
                restore_preempted: host.preemption == Preemption::Restore,
            }),
        }));
    }

    /// Returns the settings of drafts; `None`: drafts are off, or the hand can't verify them.
    fn drafts(&self, facts: &Ready) -> Option<Drafts> {
        let drafts = self.config.drafts?;
        if !facts.verifies_drafts {
            warn!(
                "speculation is off: this hand verifies no drafts, or not for this model and these settings"
            );
            return None;
        }
        let most = drafts.speculative_num_draft_tokens;
        Some(Drafts { most, priced: !drafts.speculative_unpriced })
    }

    /// Handles the death of the hand, or of the whole group's hands.
    pub(crate) fn hand_died(&mut self, was_up: bool, cause: Cause) {
        self.copying_us = None;
        self.arriving.clear();
        self.stats.deaths += u64::from(cause != Cause::Weights);
        self.stats.memory_kills += u64::from(cause == Cause::Memory);
        self.payloads.hand_died();
        self.notes.hand_died();
        self.forget_masks();
        if was_up && let Some(scheduler) = self.scheduler.as_mut() {
            let poisoned = match cause {
                Cause::Requests => scheduler.reset(),
                Cause::Copies => {
                    scheduler.reset_for_copies();
                    Vec::new()
                }
                Cause::Memory | Cause::Weights => {
                    scheduler.reset_without_blame();
                    Vec::new()
                }
            };
            for id in poisoned {
                error!(request = id, "a request brought the hand down twice");
                self.end(id, FinishReason::Error(RequestError::Poisoned));
            }
        }
        if cause == Cause::Weights
            && let Some(scheduler) = self.scheduler.as_mut()
        {
            scheduler.forget_blocks();
        }
        self.hold_embedded();
    }
}

/// Returns the page counts of a hand.
fn counts(facts: &Ready) -> PageCounts {
    PageCounts {
        pages: facts.page_count,
        host_pages: facts.host_page_count,
        state_pages: facts.state_page_count,
        host_state_pages: facts.host_state_page_count,
        window_pages: facts.window_page_count,
    }
}
