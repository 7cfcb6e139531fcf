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
    `bias_count`, `arena_offset`): One record a new slot."""
    slot_floats: Float32s = floats(0, SLOT_FLOATS_WORDS)
    """(`temperature`, `top_p`, `min_p`, `repetition_penalty`, `presence_penalty`, `frequency_penalty`): One record a
    new slot."""
    tokens: Int32s = ints(0)
    """The `token_count` tokens of each new slot whose `arena_offset` is -1."""
    stop_ids: Int32s = ints(0)
    """`stop_count` ids a new slot."""
    bias_ids: Int32s = ints(0)
    """`bias_count` ids a new slot."""
    bias_values: Float32s = floats(0)
    """One a bias id."""
    page_writes: Int32s = ints(0, PAGE_WRITE_WORDS)
    """(`slot`, `index`, `page`): `page_table[slot, index] = page`; -1: these positions are on no page of the device."""
    rows: Int32s = ints(0, ROW_WORDS)
    """(`slot`, `start`, `length`, `flags`): One record a row."""
    row_tokens: Int32s = ints(0)
    """The most tokens of each row that samples, in row order; absent: 1 each."""
    segments: Int32s = ints(0, SLOT_VALUE_WORDS)
    """(`slot`, `value`): The segment of new slots whose prompt is a pair, in the order of `slots`."""
    embeds: Int32s = ints(0, SLOT_VALUE_WORDS)
    """(`slot`, `value`): The byte offset in the arena of the embeddings of new slots whose prompt came as such, in
    the order of `slots`."""
    allowed_counts: Int32s = ints(0, SLOT_VALUE_WORDS)
    """(`slot`, `value`): The number of ids of new slots that may sample some ids only, in the order of `slots`."""
    allowed_ids: Int32s = ints(0)
    """The ids of each of them, ascending."""
    copies: Int32s = ints(0, COPY_WORDS)
    """(`ticket`, `direction`, `hot`, `host`): Copy a page between the device's memory and the host's. `direction` 0
    saves, 1 restores, 2 restores index keys alone, and `hot` is -1; 3 saves and 4 restores a state page."""
    wait_us: Int32s = ints(0)
    """In a plan without rows: answer when a copy has ended, when another plan has come, or after this many
    microseconds (at most 1000)."""
    host_writes: Int32s = ints(0, PAGE_WRITE_WORDS)
    """(`slot`, `index`, `page`): `host_table[slot, index] = page`, a page of the host's tier."""
    hot_rows: Int32s = ints(0, PAGE_WRITE_WORDS)
    """(`slot`, `index`, `page`): `hot_rows[slot, index] = page`, a page whose rows are the slot's to keep single
    positions in."""
    copy_spans: Int32s = ints(0, SPAN_WORDS)
    """(`first`, `count`): Positions of the page of each copy; a count of 0: all; absent: all of each."""
    images: Int32s = ints(0, IMAGE_WORDS)
    """(`image`, `first_layer`, `end_layer`, `grid_h`, `grid_w`, `arena_offset`, `page_count`): Compute layers
    `first_layer .. end_layer` of the tower for an image."""
    image_pages: Int32s = ints(0)
    """The `page_count` image pages of each image, in order."""
    image_spans: Int32s = ints(0, IMAGE_SPAN_WORDS)
    """(`slot`, `position`, `grid_h`, `grid_w`, `rope`, `page_count`): An image stands in the slot from `position`
    on."""
    span_pages: Int32s = ints(0)
    """The `page_count` image pages of each span, in order."""
    prompt_logprobs: Int32s = ints(0, PROMPT_LOGPROBS_WANT_WORDS)
    """(`slot`, `first`, `count`, `most`): Log-probabilities of the slot's tokens at positions `first .. first +
    count`, in the order of `rows`, at most one a row."""
    group: Int32s = ints(0)
    """Tokens of each rank of a step group in this step, 2 to 256 of them; absent: there is no group."""
    draft_tokens: Int32s = ints(0)
    """Tokens that are expected of rows which may give several, `row_tokens - 1` of each row that samples, in row
    order; absent: the hand expects tokens by itself, or none."""
    state_loads: Int32s = ints(0, STATE_COPY_WORDS)
    """(`slot`, `page`): Before the rows: the slot's recurrent states become the content of the state page."""
    state_saves: Int32s = ints(0, STATE_COPY_WORDS)
    """(`slot`, `page`): After the rows: the slot's recurrent states are copied to the state page."""
    place_writes: Int32s = ints(0, PLACE_WRITE_WORDS)
    """(`ticket`, `place`, `id`): The place gets the adapter with this id, which the hand knows."""
    slot_places: Int32s = ints(0, SLOT_VALUE_WORDS)
    """(`slot`, `value`): The place of new slots whose rows an adapter changes, in the order of `slots`."""
    copy_sources: Int32s = ints(0)
    """The host tier of each copy: 0 the own, n the one with that place in `host_lenders` of the configuration;
    absent: the own. Only restores have others."""
    window_writes: Int32s = ints(0, PAGE_WRITE_WORDS)
    """(`slot`, `index`, `page`): `window_table[slot, index] = page`, a page of the window part; -1: no row reads
    these positions any more in layers with a window."""


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
    """Those of each row that samples and does not sit out, in row order."""
    row_errors: Int32s = ints(0)
    """One a row, in row order: 0 fine, 1 the logits, also those of a prompt's tokens, or the vector were not finite."""
    logprob_counts: Int32s = ints(0)
    """Absent if no request asked; else one a token: number of entries in the next two columns."""
    logprob_ids: Int32s = ints(0)
    """A token's entries: the sampled token, then the most likely, descending."""
    logprob_values: Float32s = floats(0)
    """Natural logarithms, one an entry."""
    timing: Int32s = ints(STEP_TIMING_WORDS)
    """(`device_us`, `gap_us`): Microseconds: the step's compute; from the end of the previous step's compute to the
    start of this one's, and the wait for masks within it."""
    pooled: Float32s = floats(0)
    """The vectors of the pooled rows, in row order, one after the other and all equally long."""
    token_counts: Int32s = ints(0)
    """Tokens of each row that samples and does not sit out, at least 1; absent: one each."""
    copied: Int32s = ints(0, COPY_END_WORDS)
    """(`ticket`, `error`): The copies that ended since the last result: `error` 0 done, 1 could not be done."""
    copy_timing: Int32s = ints(0)
    """(`save_us`, `restore_us`): Microseconds that saves and restores took since the last result; absent: none."""
    sparse_rows: Int32s = ints(0)
    """(`selected`, `on_pages`, `in_rows`, `missed`): Of the positions that the step's sparse slots chose, over all
    rows and layers: all; found on pages; found in hot rows; missed. Absent: none."""
    copy_wait_us: Int32s = ints(0)
    """Microseconds that rows waited for copies since the last result; absent: none."""
    prompt_ranks: Int32s = ints(0)
    """Of the tokens that the plan's `prompt_logprobs` name, in their order: 1, and 1 more for each token that is
    likelier."""
    prompt_ids: Int32s = ints(0)
    """Entries of these tokens, `1 + most` each: the token, then the most likely, descending."""
    prompt_values: Float32s = floats(0)
    """Natural logarithms, one an entry."""
    placed: Int32s = ints(0, PLACE_END_WORDS)
    """(`ticket`, `error`): The writes into places that ended since the last result. `error` 0: done; 1: the files
    can't be read; 2: they have other content than the brain has read; 3: no memory."""


SLOT_VALUES = ("segments", "embeds", "allowed_counts", "slot_places")
"""The columns of a plan with values of some of the new slots."""
