"""The columns of plans and results. Made from crates/protocol by `make columns`; a test compares the two."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.protocol.constants import (
    COPY_END_WORDS,
    COPY_WORDS,
    IMAGE_SPAN_WORDS,
    IMAGE_WORDS,
    PAGE_WRITE_WORDS,
    PLACE_END_WORDS,
    PLACE_WRITE_WORDS,
    PROMPT_LOGPROBS_WANT_WORDS,
    ROW_WORDS,
    SLOT_FLOATS_WORDS,
    SLOT_VALUE_WORDS,
    SLOT_WORDS,
    SPAN_WORDS,
    STATE_COPY_WORDS,
    STEP_TIMING_WORDS,
)
from forebay.protocol.frames import Column, Float32s, Int32s, floats, ints

PLAN = (
    Column(1, "slots", SLOT_WORDS),
    Column(2, "slot_floats", SLOT_FLOATS_WORDS, is_float=True),
    Column(3, "tokens"),
    Column(4, "stop_ids"),
    Column(5, "bias_ids"),
    Column(6, "bias_values", is_float=True),
    Column(7, "page_writes", PAGE_WRITE_WORDS),
    Column(8, "rows", ROW_WORDS),
    Column(9, "row_tokens"),
    Column(10, "segments", SLOT_VALUE_WORDS),
    Column(11, "embeds", SLOT_VALUE_WORDS),
    Column(12, "allowed_counts", SLOT_VALUE_WORDS),
    Column(13, "allowed_ids"),
    Column(14, "copies", COPY_WORDS),
    Column(15, "wait_us"),
    Column(16, "host_writes", PAGE_WRITE_WORDS),
    Column(17, "hot_rows", PAGE_WRITE_WORDS),
    Column(18, "copy_spans", SPAN_WORDS),
    Column(19, "images", IMAGE_WORDS),
    Column(20, "image_pages"),
    Column(21, "image_spans", IMAGE_SPAN_WORDS),
    Column(22, "span_pages"),
    Column(24, "prompt_logprobs", PROMPT_LOGPROBS_WANT_WORDS),
    Column(25, "group"),
    Column(26, "draft_tokens"),
    Column(27, "state_loads", STATE_COPY_WORDS),
    Column(28, "state_saves", STATE_COPY_WORDS),
    Column(29, "place_writes", PLACE_WRITE_WORDS),
    Column(30, "slot_places", SLOT_VALUE_WORDS),
    Column(32, "copy_sources"),
    Column(33, "window_writes", PAGE_WRITE_WORDS),
)
"""The columns of a plan's frame, by id."""


@dataclass
class PlanColumns:
    """The columns of a plan's frame."""

    step: int = 0
    slots: Int32s = ints(0, SLOT_WORDS)
    """(`slot`, `token_count`, `prompt_len`, `top_k`, `seed_lo`, `seed_hi`, `min_total`, `logprobs`, `stop_count`,
    `bias_count`, `arena_offset`): One record per new slot."""
    slot_floats: Float32s = floats(0, SLOT_FLOATS_WORDS)
    """(`temperature`, `top_p`, `min_p`, `repetition_penalty`, `presence_penalty`, `frequency_penalty`): One record
    per new slot."""
    tokens: Int32s = ints(0)
    """The `token_count` tokens of each new slot whose `arena_offset` is -1."""
    stop_ids: Int32s = ints(0)
    """The `stop_count` stop ids of each new slot."""
    bias_ids: Int32s = ints(0)
    """The `bias_count` token ids with a bias of each new slot."""
    bias_values: Float32s = floats(0)
    """One bias per id in `bias_ids`."""
    page_writes: Int32s = ints(0, PAGE_WRITE_WORDS)
    """(`slot`, `index`, `page`): Sets `page_table[slot, index] = page`; -1: these positions have no page on the
    device."""
    rows: Int32s = ints(0, ROW_WORDS)
    """(`slot`, `start`, `length`, `flags`): One record per row."""
    row_tokens: Int32s = ints(0)
    """The largest number of tokens of each row that samples, in row order; absent: 1 each."""
    segments: Int32s = ints(0, SLOT_VALUE_WORDS)
    """(`slot`, `value`): The start of the second text of each new slot whose prompt is a pair, in the order of
    `slots`."""
    embeds: Int32s = ints(0, SLOT_VALUE_WORDS)
    """(`slot`, `value`): The byte offset in the arena of each new slot whose prompt is given as embeddings, in the
    order of `slots`."""
    allowed_counts: Int32s = ints(0, SLOT_VALUE_WORDS)
    """(`slot`, `value`): The number of allowed token ids of each new slot that may sample only some ids, in the
    order of `slots`."""
    allowed_ids: Int32s = ints(0)
    """The allowed ids of each slot in `allowed_counts`, ascending."""
    copies: Int32s = ints(0, COPY_WORDS)
    """(`ticket`, `direction`, `hot`, `host`): Copies of pages between device and host. `direction` 0: save; 1:
    restore; 2: restore only index keys, and `hot` is -1; 3: save a state page; 4: restore a state page."""
    wait_us: Int32s = ints(0)
    """In a plan without rows: send the result when a copy has ended, when another plan has arrived, or after this
    many microseconds (at most 1000)."""
    host_writes: Int32s = ints(0, PAGE_WRITE_WORDS)
    """(`slot`, `index`, `page`): Sets `host_table[slot, index] = page`, a page of the host tier."""
    hot_rows: Int32s = ints(0, PAGE_WRITE_WORDS)
    """(`slot`, `index`, `page`): Sets `hot_rows[slot, index] = page`, a page in which the slot caches single
    positions."""
    copy_spans: Int32s = ints(0, SPAN_WORDS)
    """(`first`, `count`): The positions of the page that each copy copies. A count of 0: the whole page; absent:
    whole pages only."""
    images: Int32s = ints(0, IMAGE_WORDS)
    """(`image`, `first_layer`, `end_layer`, `grid_h`, `grid_w`, `arena_offset`, `page_count`): Computes layers
    `first_layer .. end_layer` of the vision tower for an image."""
    image_pages: Int32s = ints(0)
    """The `page_count` image pages of each image, in order."""
    image_spans: Int32s = ints(0, IMAGE_SPAN_WORDS)
    """(`slot`, `position`, `grid_h`, `grid_w`, `rope`, `page_count`): An image whose positions in the slot start at
    `position`."""
    span_pages: Int32s = ints(0)
    """The `page_count` image pages of each span, in order."""
    prompt_logprobs: Int32s = ints(0, PROMPT_LOGPROBS_WANT_WORDS)
    """(`slot`, `first`, `count`, `most`): Requests log-probabilities of the slot's tokens at positions `first ..
    first + count`, in the order of `rows`, at most one per row."""
    group: Int32s = ints(0)
    """The number of tokens of each rank of a step group in this step, for 2 to 256 ranks; absent: there is no group."""
    draft_tokens: Int32s = ints(0)
    """The draft tokens of the rows that sample, `row_tokens - 1` per row, in row order. Absent: the hand drafts by
    itself, or there are no drafts."""
    state_loads: Int32s = ints(0, STATE_COPY_WORDS)
    """(`slot`, `page`): Before the rows: copies the state page into the slot's recurrent states."""
    state_saves: Int32s = ints(0, STATE_COPY_WORDS)
    """(`slot`, `page`): After the rows: copies the slot's recurrent states to the state page."""
    place_writes: Int32s = ints(0, PLACE_WRITE_WORDS)
    """(`ticket`, `place`, `id`): Loads the adapter with this id, which was announced to the hand, into the place."""
    slot_places: Int32s = ints(0, SLOT_VALUE_WORDS)
    """(`slot`, `value`): The place of the adapter of each new slot that uses one, in the order of `slots`."""
    copy_sources: Int32s = ints(0)
    """The host tier of each copy. 0: the hand's own; n: the replica n - 1 in `host_lenders` of the configuration;
    absent: the hand's own. Only restores use other tiers."""
    window_writes: Int32s = ints(0, PAGE_WRITE_WORDS)
    """(`slot`, `index`, `page`): Sets `window_table[slot, index] = page`, a page of the window part; -1: layers with
    a sliding window no longer read these positions."""


RESULT = (
    Column(1, "tokens"),
    Column(2, "row_errors"),
    Column(3, "logprob_counts"),
    Column(4, "logprob_ids"),
    Column(5, "logprob_values", is_float=True),
    Column(6, "timing"),
    Column(7, "pooled", is_float=True),
    Column(8, "token_counts"),
    Column(9, "copied", COPY_END_WORDS),
    Column(10, "copy_timing"),
    Column(11, "sparse_rows"),
    Column(12, "copy_wait_us"),
    Column(13, "prompt_ranks"),
    Column(14, "prompt_ids"),
    Column(15, "prompt_values", is_float=True),
    Column(16, "placed", PLACE_END_WORDS),
)
"""The columns of a result's frame, by id."""


@dataclass
class ResultColumns:
    """The columns of a result's frame."""

    step: int = 0
    tokens: Int32s = ints(0)
    """The tokens of each row that samples and does not sit out, in row order."""
    row_errors: Int32s = ints(0)
    """One per row, in row order. 0: the row was computed. 1: the logits, those of prompt tokens, or the vector were
    not finite."""
    logprob_counts: Int32s = ints(0)
    """One per token: its number of entries in the next two columns. Absent if no request needs log-probabilities."""
    logprob_ids: Int32s = ints(0)
    """The entries of each token: the sampled token, then the most likely ones, descending."""
    logprob_values: Float32s = floats(0)
    """The natural logarithm of each entry's probability."""
    timing: Int32s = ints(STEP_TIMING_WORDS)
    """(`device_us`, `gap_us`): The step's compute time in microseconds. Then the time from the end of the previous
    step's compute to the start of this step's, plus the wait for masks within it."""
    pooled: Float32s = floats(0)
    """The vectors of the pooling rows, in row order, concatenated. All have the same length."""
    token_counts: Int32s = ints(0)
    """The number of tokens of each row that samples and does not sit out, at least 1; absent: one each."""
    copied: Int32s = ints(0, COPY_END_WORDS)
    """(`ticket`, `error`): The copies that ended since the last result. `error` 0: done; 1: failed."""
    copy_timing: Int32s = ints(0)
    """(`save_us`, `restore_us`): Microseconds that saves and restores took since the last result; absent: there were
    none."""
    sparse_rows: Int32s = ints(0)
    """(`selected`, `on_pages`, `in_rows`, `missed`): The positions that the step's sparse slots selected, summed
    over all rows and layers: all; found on pages; found in hot rows; missed. Absent: there were none."""
    copy_wait_us: Int32s = ints(0)
    """Microseconds that rows waited for copies since the last result; absent: they did not wait."""
    prompt_ranks: Int32s = ints(0)
    """The rank of each token that the plan's `prompt_logprobs` request, in their order: 1 plus the number of
    likelier tokens."""
    prompt_ids: Int32s = ints(0)
    """The entries of each of these tokens, `1 + most` of them: the token, then the most likely ones, descending."""
    prompt_values: Float32s = floats(0)
    """The natural logarithm of each entry's probability."""
    placed: Int32s = ints(0, PLACE_END_WORDS)
    """(`ticket`, `error`): The writes into places that ended since the last result. `error` 0: done; 1: the files
    cannot be read; 2: their content has changed since the brain read them; 3: no memory."""


SLOT_VALUES = ("segments", "embeds", "allowed_counts", "slot_places")
"""The columns of a plan with values of some of the new slots."""
