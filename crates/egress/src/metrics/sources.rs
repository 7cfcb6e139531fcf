//! Metrics that are read from snapshots: their names, help texts and sources.

use forebay_engine::Status;
use forebay_grammar::GrammarStats;
use forebay_replicas::{LocalReason, ReplicaReport, Role};
use forebay_text::TextStats;

use super::parts::IntakeStats;

/// Reads one value from a snapshot.
pub(super) type Read<S> = fn(&S) -> f64;
/// The name, help text and source of a metric.
pub(super) type Source<S> = (&'static str, &'static str, Read<S>);

macro_rules! accepted_at {
    ($place:literal) => {
        (
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            "Drafts that were generated, by their place behind the token before them.",
            stringify!($place),
            |r| r.stats.scheduler.drafts.accepted_at.0[$place] as f64,
        )
    };
}

macro_rules! pd_local {
    ($reason:ident, $name:literal) => {
        (
            "forebay:pd_local_total",
            "Requests that one replica serves alone although prefill is disaggregated.",
            $name,
            |r| r.local.of(LocalReason::$reason) as f64,
        )
    };
}

/// Requests that are not handed on, by reason: metric, help text, `reason`, source.
pub(super) const PD_LOCAL: &[(&str, &str, &str, Read<ReplicaReport>)] = &[
    pd_local!(Short, "short"),
    pd_local!(NoPrefill, "no_prefill"),
    pd_local!(NoDecode, "no_decode"),
    pd_local!(Kind, "kind"),
    pd_local!(Named, "named"),
    pd_local!(Both, "both"),
];

macro_rules! role {
    ($role:ident, $name:literal) => {
        (
            "forebay:replica_role",
            "1 for the replica's role: the part of requests that it computes.",
            $name,
            |r| f64::from(u8::from(r.role == Role::$role)),
        )
    };
}

/// 1 if the replica has the role with this name, otherwise 0.
pub(super) const ROLES: &[(&str, &str, &str, Read<ReplicaReport>)] =
    &[role!(Both, "both"), role!(Prefill, "prefill"), role!(Decode, "decode")];

/// The gauges of a replica in `/metrics`.
pub(super) const GAUGES: &[Source<ReplicaReport>] = &[
    ("vllm:num_requests_running", "Requests in model execution batches.", |r| {
        r.stats.scheduler.running as f64
    }),
    ("vllm:num_requests_waiting", "Requests waiting to be processed.", |r| {
        r.stats.scheduler.waiting as f64
    }),
    (
        "forebay:mask_budget_seconds",
        "The longest time that the last step could wait for masks.",
        |r| r.stats.hand.mask_budget_us as f64 / 1e6,
    ),
    ("forebay:replica_up", "Whether the replica's hand takes plans.", |r| {
        f64::from(u8::from(matches!(r.status, Status::Ready | Status::Draining)))
    }),
    ("forebay:replica_requests", "Requests sent to the replica that have not ended.", |r| {
        r.load.requests as f64
    }),
    ("forebay:replica_requests_peak", "Most of them at a time.", |r| r.load.peak as f64),
    ("vllm:kv_cache_usage_perc", "KV cache usage, 1 means 100 percent.", |r| {
        let s = &r.stats.scheduler;
        let pages = s.pages_held + s.pages_cached + s.pages_free;
        if pages == 0 { 0.0 } else { s.pages_held as f64 / pages as f64 }
    }),
    ("sglang:hicache_host_total_tokens", "Tokens that the host tier has room for.", |r| {
        r.stats.scheduler.host.tokens as f64
    }),
    ("sglang:hicache_host_used_tokens", "Tokens that the host tier holds.", |r| {
        r.stats.scheduler.host.tokens_used as f64
    }),
    ("forebay:lent_pages", "Host pages that other replicas may read.", |r| {
        r.stats.scheduler.host.lent_pages as f64
    }),
    (
        "forebay:pd_ahead_tokens",
        "Tokens of requests that were handed on to the replica and wait for its pages.",
        |r| r.ahead_tokens as f64,
    ),
    (
        "forebay:pd_holding",
        "Whether the prefill replica holds prompts back because decode replicas have no pages.",
        |r| f64::from(u8::from(r.holding)),
    ),
    ("forebay:copies_outstanding", "Copies between tiers under way.", |r| {
        r.stats.scheduler.host.copies_outstanding as f64
    }),
    (
        "forebay:requests_arriving",
        "Requests whose blocks are being copied back from the host tier.",
        |r| r.stats.scheduler.host.arriving as f64,
    ),
    ("forebay:requests_sparse", "Running requests of which most KV is in host memory only.", |r| {
        r.stats.scheduler.sparse.requests as f64
    }),
    ("vllm:hisparse_host_cache_usage_perc", "Share of the host tier's pages in use.", |r| {
        let host = &r.stats.scheduler.host;
        if host.pages == 0 { 0.0 } else { host.pages_used as f64 / host.pages as f64 }
    }),
    ("forebay:image_pages_used_perc", "Share of the image pages that hold an image.", |r| {
        let images = &r.stats.scheduler.images;
        let used = images.pages_held + images.pages_cached;
        if images.pages == 0 { 0.0 } else { used as f64 / images.pages as f64 }
    }),
    ("forebay:state_pages_used_perc", "Share of the state pages that hold a kept state.", |r| {
        let states = &r.stats.scheduler.states;
        let used = states.pages_held + states.pages_cached;
        if states.pages == 0 { 0.0 } else { used as f64 / states.pages as f64 }
    }),
    (
        "forebay:window_pages_used_perc",
        "Share of the window part's pages that running requests use.",
        |r| {
            let windows = &r.stats.scheduler.windows;
            let (held, all) = (windows.pages_held as f64, windows.pages as f64);
            if windows.pages == 0 { 0.0 } else { held / all }
        },
    ),
    ("forebay:host_state_pages_used_perc", "Share of the host tier's state pages in use.", |r| {
        let states = &r.stats.scheduler.states;
        let all = states.host_pages;
        if all == 0 { 0.0 } else { states.host_pages_used as f64 / all as f64 }
    }),
    ("forebay:lora_places_used", "Places whose adapter some request uses.", |r| {
        r.stats.scheduler.places.used as f64
    }),
    ("forebay:lora_places_unused", "Places whose adapter no request uses.", |r| {
        r.stats.scheduler.places.unused as f64
    }),
    ("forebay:lora_places_coming", "Places that an adapter comes to.", |r| {
        r.stats.scheduler.places.coming as f64
    }),
    ("forebay:lora_places_empty", "Places without an adapter.", |r| {
        r.stats.scheduler.places.empty as f64
    }),
    ("forebay:lora_requests_waiting", "Requests that wait for a place of their adapter.", |r| {
        r.stats.scheduler.places.waiting as f64
    }),
    ("forebay:images_waiting", "Images that requests wait for.", |r| {
        r.stats.scheduler.images.waiting as f64
    }),
    ("vllm:hisparse_pending_page_transfers", "Copies between tiers under way.", |r| {
        r.stats.scheduler.host.copies_outstanding as f64
    }),
];

pub(super) const COUNTERS: &[Source<ReplicaReport>] = &[
    ("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", |r| {
        r.stats.scheduler.prefix_queries as f64
    }),
    ("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", |r| {
        r.stats.scheduler.prefix_hits as f64
    }),
    ("vllm:prompt_tokens_cached_total", "Prompt tokens found in a tier.", |r| {
        (r.stats.scheduler.prefix_hits + r.stats.scheduler.host_hits) as f64
    }),
    ("vllm:mm_cache_queries_total", "Images of admitted requests.", |r| {
        let images = &r.stats.scheduler.images;
        (images.in_pages + images.in_prefix + images.wanted) as f64
    }),
    ("vllm:mm_cache_hits_total", "Images that were found, and not encoded again.", |r| {
        let images = &r.stats.scheduler.images;
        (images.in_pages + images.in_prefix) as f64
    }),
    ("vllm:num_preemptions_total", "Preemptions.", |r| r.stats.scheduler.preemptions as f64),
    (
        "forebay:recomputed_tokens_total",
        "Tokens computed again by requests that had lost their pages.",
        |r| r.stats.scheduler.recomputed_tokens as f64,
    ),
    ("vllm:spec_decode_num_drafts_total", "Rows whose drafts were verified.", |r| {
        r.stats.scheduler.drafts.rows as f64
    }),
    ("vllm:spec_decode_num_draft_tokens_total", "Drafts that were verified.", |r| {
        r.stats.scheduler.drafts.drafted as f64
    }),
    ("vllm:spec_decode_num_accepted_tokens_total", "Drafts that were generated.", |r| {
        r.stats.scheduler.drafts.accepted as f64
    }),
    (
        "forebay:spec_decode_shared_draft_tokens_total",
        "Drafts from the answers to other requests that were verified.",
        |r| r.stats.scheduler.drafts.shared_drafted as f64,
    ),
    (
        "forebay:spec_decode_shared_accepted_tokens_total",
        "Drafts from the answers to other requests that were generated.",
        |r| r.stats.scheduler.drafts.shared_accepted as f64,
    ),
    ("vllm:prompt_tokens_total", "Prefill tokens processed.", |r| {
        r.stats.scheduler.prompt_tokens as f64
    }),
    ("vllm:generation_tokens_total", "Generation tokens processed.", |r| {
        r.stats.scheduler.generated_tokens as f64
    }),
    (
        "forebay:device_gap_seconds_total",
        "Seconds between two steps of the device although there was work, and of waits for masks. A GPU is idle for longer: kernels of a step wait for each other, too.",
        |r| r.stats.hand.gap_us as f64 / 1e6,
    ),
    (
        "forebay:device_busy_seconds_total",
        "Seconds from the start of steps to their end, on the device.",
        |r| r.stats.hand.device_us as f64 / 1e6,
    ),
    ("forebay:steps_total", "Steps whose results were applied.", |r| {
        r.stats.scheduler.steps as f64
    }),
    ("forebay:hand_deaths_total", "Times a hand died.", |r| r.stats.hand.deaths as f64),
    (
        "forebay:hand_memory_kills_total",
        "Times the kernel killed a hand because memory ran out.",
        |r| r.stats.hand.memory_kills as f64,
    ),
    ("forebay:requests_replayed_total", "Requests replayed after a hand's death.", |r| {
        r.stats.hand.replayed as f64
    }),
    ("forebay:masks_total", "Masks made for rows whose answers are restricted.", |r| {
        r.stats.hand.masks as f64
    }),
    ("forebay:mask_seconds_total", "Seconds of CPU time that masks took, on all threads.", |r| {
        r.stats.hand.mask_us as f64 / 1e6
    }),
    (
        "forebay:mask_wait_seconds_total",
        "Seconds of the engine's thread for masks: its own, and waits for those of others.",
        |r| r.stats.hand.mask_wait_us as f64 / 1e6,
    ),
    (
        "forebay:rows_sat_out_total",
        "Rows that gave no token because their mask was not ready.",
        |r| r.stats.hand.sat_out as f64,
    ),
    (
        "forebay:pd_handed_total",
        "Requests that a decode replica went on with behind their first token.",
        |r| r.stats.hand.handed as f64,
    ),
    ("forebay:pd_holds_total", "Times that the replica began to hold prompts back.", |r| {
        r.holds as f64
    }),
    ("forebay:requests_dispatched_total", "Requests sent to the replica.", |r| {
        r.load.dispatched as f64
    }),
];

/// Accepted drafts by position in their row.
pub(super) const ACCEPTED_AT: &[(&str, &str, &str, Read<ReplicaReport>)] = &[
    accepted_at!(0),
    accepted_at!(1),
    accepted_at!(2),
    accepted_at!(3),
    accepted_at!(4),
    accepted_at!(5),
    accepted_at!(6),
    accepted_at!(7),
    accepted_at!(8),
    accepted_at!(9),
    accepted_at!(10),
    accepted_at!(11),
    accepted_at!(12),
    accepted_at!(13),
    accepted_at!(14),
    accepted_at!(15),
];

pub(super) const GRAMMAR_GAUGES: &[Source<GrammarStats>] = &[
    ("forebay:grammars_waiting", "Forms of answers that wait to be compiled, or are.", |s| {
        s.waiting as f64
    }),
    (
        "forebay:grammar_trie_seconds",
        "Seconds that the trie of the vocabulary took; 0: not yet.",
        |s| s.trie_us as f64 / 1e6,
    ),
    ("forebay:grammar_kept_bytes", "Bytes of the compiled forms of answers that are kept.", |s| {
        s.kept_bytes as f64
    }),
    (
        "forebay:grammars_running_on",
        "Compiles of forms of answers that were given up and still run.",
        |s| s.running_on as f64,
    ),
];

pub(super) const GRAMMAR_COUNTERS: &[Source<GrammarStats>] = &[
    (
        "forebay:grammars_compiled_total",
        "Forms of answers that were compiled, or refused then.",
        |s| s.compiled as f64,
    ),
    ("forebay:grammars_refused_total", "Forms of answers that the compiler refused.", |s| {
        s.refused as f64
    }),
    (
        "forebay:grammars_abandoned_total",
        "Compiles that were given up because they took too long.",
        |s| s.abandoned as f64,
    ),
    (
        "forebay:grammar_hits_total",
        "Requests whose form was compiled already, or about to be.",
        |s| s.hits as f64,
    ),
    ("forebay:grammar_compile_seconds_total", "Seconds that compiling took.", |s| {
        s.compile_us as f64 / 1e6
    }),
];

pub(super) const TEXT_GAUGES: &[Source<TextStats>] = &[
    ("forebay:text_inputs_waiting", "Prompts waiting for a text thread.", |s| s.waiting as f64),
    ("forebay:text_cache_bytes", "Bytes that the cache of encoded text uses.", |s| {
        s.cache_bytes as f64
    }),
];

pub(super) const TEXT_COUNTERS: &[Source<TextStats>] = &[
    ("forebay:text_inputs_total", "Prompts that were tokenised.", |s| s.inputs as f64),
    ("forebay:text_batches_total", "Times that a text thread took waiting prompts.", |s| {
        s.batches as f64
    }),
    ("forebay:text_inputs_cut_total", "Prompts that were cut into pieces.", |s| s.cut as f64),
    (
        "forebay:text_inputs_cancelled_total",
        "Prompts whose client had gone before they were tokenised.",
        |s| s.cancelled as f64,
    ),
    (
        "forebay:text_cache_queries_total",
        "Bytes of text looked up in the cache of encoded text.",
        |s| s.cache_queries as f64,
    ),
    ("forebay:text_cache_hits_total", "Bytes of text found in the cache of encoded text.", |s| {
        s.cache_hits as f64
    }),
];

pub(super) const INTAKE_GAUGES: &[Source<IntakeStats>] = &[
    ("forebay:intake_bodies_waiting", "Large bodies waiting to be parsed.", |s| s.unread as f64),
    ("forebay:intake_requests_waiting", "Requests waiting for room in the arena.", |s| {
        s.in_line as f64
    }),
    ("forebay:arena_used_bytes", "Bytes of the arena in use.", |s| s.arena_bytes as f64),
    (
        "forebay:request_bytes_in_flight",
        "Bytes that requests in flight are charged, from body to expected output.",
        |s| s.request_bytes as f64,
    ),
];

pub(super) const LOG_COUNTERS: &[Source<u64>] = &[(
    "forebay:log_lines_dropped_total",
    "Log lines dropped because they were not read in time.",
    |&dropped| dropped as f64,
)];

pub(super) const HOST_COUNTERS: &[Source<ReplicaReport>] = &[
    (
        "vllm:external_prefix_cache_queries_total",
        "Prompt tokens looked up in the host tier: those that the device's cache did not have.",
        |r| {
            let s = &r.stats.scheduler;
            if s.host.pages == 0 { 0.0 } else { (s.prefix_queries - s.prefix_hits) as f64 }
        },
    ),
    ("vllm:external_prefix_cache_hits_total", "Prompt tokens found in the host tier.", |r| {
        r.stats.scheduler.host_hits as f64
    }),
    ("sglang:load_back_tokens_total", "Tokens copied back from the host tier.", |r| {
        r.stats.scheduler.host.tokens_restored as f64
    }),
    (
        "forebay:copy_wait_seconds_total",
        "Seconds that requests waited for their blocks to come back from the host tier.",
        |r| r.stats.hand.copy_wait_us as f64 / 1e6,
    ),
    (
        "forebay:blocks_dropped_unsaved_total",
        "Blocks that the device gave up and the host tier did not have.",
        |r| r.stats.scheduler.host.dropped_unsaved as f64,
    ),
    ("forebay:saves_refused_total", "Blocks not saved because copies used every host page.", |r| {
        r.stats.scheduler.host.saves_refused as f64
    }),
    ("forebay:copies_failed_total", "Copies between tiers that could not be done.", |r| {
        r.stats.scheduler.host.copies_failed as f64
    }),
    (
        "forebay:restores_declined_total",
        "Times that blocks in the host tier were computed all the same, because that was sooner done.",
        |r| r.stats.scheduler.host.restores_declined as f64,
    ),
    ("forebay:restores_total", "Times that a request's blocks were restored.", |r| {
        r.stats.scheduler.host.restores_chosen as f64
    }),
    (
        "forebay:requests_made_sparse_total",
        "Times that a running request gave up its saved pages.",
        |r| r.stats.scheduler.sparse.conversions as f64,
    ),
    (
        "forebay:pages_dropped_total",
        "Pages that running requests gave up, whose content the host tier has.",
        |r| r.stats.scheduler.sparse.pages_dropped as f64,
    ),
    (
        "vllm:hisparse_cache_hits_total",
        "Positions that sparse requests chose and that were on the device, over layers.",
        |r| {
            let sparse = &r.stats.scheduler.sparse;
            (sparse.on_pages + sparse.in_rows) as f64
        },
    ),
    (
        "vllm:hisparse_cache_misses_total",
        "Positions that sparse requests chose and that were copied from host memory, over layers.",
        |r| r.stats.scheduler.sparse.missed as f64,
    ),
    (
        "forebay:rows_waited_for_copies_seconds_total",
        "Seconds that steps waited for saves; 0 with --kv-save-order behind.",
        |r| r.stats.scheduler.sparse.waited_us as f64 / 1e6,
    ),
    (
        "forebay:images_prepared_total",
        "Images whose patches were asked for, because no page had them.",
        |r| r.stats.scheduler.images.wanted as f64,
    ),
    ("forebay:images_encoded_total", "Images that went through the vision tower.", |r| {
        r.stats.scheduler.images.encoded as f64
    }),
    ("forebay:images_in_pages_total", "Images that were found on image pages.", |r| {
        r.stats.scheduler.images.in_pages as f64
    }),
    (
        "forebay:images_in_prefix_total",
        "Images all of whose positions were found in the prefix cache.",
        |r| r.stats.scheduler.images.in_prefix as f64,
    ),
    (
        "forebay:state_cache_queries_total",
        "Prompt tokens of models with recurrent layers that were looked up in the prefix cache.",
        |r| r.stats.scheduler.states.query_tokens as f64,
    ),
    (
        "forebay:state_cache_hits_total",
        "Prompt tokens that came from a kept recurrent state.",
        |r| r.stats.scheduler.states.hit_tokens as f64,
    ),
    (
        "forebay:state_cache_misses_total",
        "Prompt tokens whose keys and values were cached, and behind which no state was kept.",
        |r| r.stats.scheduler.states.missed_tokens as f64,
    ),
    (
        "forebay:window_cache_misses_total",
        "Prompt tokens whose blocks the main part of pages had, and the window part had not.",
        |r| r.stats.scheduler.windows.missed_tokens as f64,
    ),
    ("forebay:window_pages_passed_total", "Pages that a window had passed, given back.", |r| {
        r.stats.scheduler.windows.passed as f64
    }),
    ("forebay:state_loads_total", "Kept recurrent states that a request began with.", |r| {
        r.stats.scheduler.states.loads as f64
    }),
    ("forebay:state_saves_total", "Recurrent states that were saved to a page.", |r| {
        r.stats.scheduler.states.saves as f64
    }),
    ("forebay:state_evictions_total", "Kept recurrent states that gave way to others.", |r| {
        r.stats.scheduler.states.evictions as f64
    }),
    ("forebay:host_states_saved_total", "Recurrent states that reached the host tier.", |r| {
        r.stats.scheduler.states.copied as f64
    }),
    ("forebay:host_states_restored_total", "Recurrent states that came back from there.", |r| {
        r.stats.scheduler.states.restored as f64
    }),
];

/// Positions that sparse requests chose, by where they were found: metric, help text, `found`,
/// source.
pub(super) const SPARSE_ROWS: &[(&str, &str, &str, Read<ReplicaReport>)] = &[
    (SPARSE, SPARSE_HELP, "page", |r| r.stats.scheduler.sparse.on_pages as f64),
    (SPARSE, SPARSE_HELP, "row", |r| r.stats.scheduler.sparse.in_rows as f64),
    (SPARSE, SPARSE_HELP, "host", |r| r.stats.scheduler.sparse.missed as f64),
];
const SPARSE: &str = "forebay:sparse_rows_total";
const SPARSE_HELP: &str = "Positions that sparse requests chose, by where they were, over layers.";

/// Prompt tokens by source, with vLLM's names: metric, help text, `source`, source.
pub(super) const PROMPT_SOURCES: &[(&str, &str, &str, Read<ReplicaReport>)] = &[
    (BY_SOURCE, BY_SOURCE_HELP, "local_compute", |r| r.stats.scheduler.prompt_tokens as f64),
    (BY_SOURCE, BY_SOURCE_HELP, "local_cache_hit", |r| r.stats.scheduler.prefix_hits as f64),
    (BY_SOURCE, BY_SOURCE_HELP, "external_kv_transfer", |r| r.stats.scheduler.host_hits as f64),
    (CACHED, CACHED_HELP, "device", |r| r.stats.scheduler.prefix_hits as f64),
    (CACHED, CACHED_HELP, "host", |r| r.stats.scheduler.host_hits as f64),
];
const BY_SOURCE: &str = "vllm:prompt_tokens_by_source_total";
const BY_SOURCE_HELP: &str = "Prompt tokens by where their keys and values came from.";
const CACHED: &str = "vllm:prompt_tokens_cached_by_source_total";
const CACHED_HELP: &str = "Prompt tokens that were found, by the tier that had them.";

/// Waiting requests by reason, with vLLM's names: metric, help text, `reason`, source.
pub(super) const WAITING: &[(&str, &str, &str, Read<ReplicaReport>)] = &[
    (BY_REASON, BY_REASON_HELP, "capacity", |r| r.stats.scheduler.waiting as f64),
    (BY_REASON, BY_REASON_HELP, "deferred", |r| r.stats.scheduler.host.arriving as f64),
];
const BY_REASON: &str = "vllm:num_requests_waiting_by_reason";
const BY_REASON_HELP: &str =
    "Requests waiting for a slot and pages (capacity), or for blocks to come back (deferred).";

/// Bytes and seconds of copies by direction, with vLLM's names: metric, help text, `transfer_type`,
/// source.
pub(super) const TRANSFERS: &[(&str, &str, &str, Read<ReplicaReport>)] = &[
    (OFFLOAD_BYTES, "Bytes copied between tiers.", "GPU_to_CPU", |r| {
        r.stats.hand.saved_bytes as f64
    }),
    (OFFLOAD_BYTES, "Bytes copied between tiers.", "CPU_to_GPU", |r| {
        r.stats.hand.restored_bytes as f64
    }),
    (OFFLOAD_TIME, "Seconds that copies between tiers took.", "GPU_to_CPU", |r| {
        r.stats.scheduler.host.save_us as f64 / 1e6
    }),
    (OFFLOAD_TIME, "Seconds that copies between tiers took.", "CPU_to_GPU", |r| {
        r.stats.scheduler.host.restore_us as f64 / 1e6
    }),
];
pub(super) const OFFLOAD_BYTES: &str = "vllm:kv_offload_total_bytes_total";
pub(super) const OFFLOAD_TIME: &str = "vllm:kv_offload_total_time_total";
