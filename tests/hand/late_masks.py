"""A sequence of steps with late masks: a row without its mask gives no token, and is computed again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import pytest

from forebay.protocol.masks import EVERYTHING, INLINE, Masks, UInt32s
from forebay.protocol.plan import Plan
from forebay.protocol.result import StepResult
from tests.hand.support import TINY, PlanBuilder, Sampling

Step: TypeAlias = Callable[[Plan, Masks], StepResult]
"""Runs a plan with these masks, which apply only to its masked rows."""
Late: TypeAlias = Callable[[int, int], bool]
"""True if the mask of this slot is not ready in this step."""
Drafted: TypeAlias = Callable[[int, int], list[int]]
"""Drafts for a slot that has generated this many tokens."""
Said: TypeAlias = list[tuple[int, list[int], list[float]]]
"""Tokens, each with the ids and values of its log-probabilities."""

PENALISED = Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3)
SLOTS = (
    PENALISED,
    replace(PENALISED, temperature=1.0, seed=3, logprobs=2),
    replace(PENALISED, temperature=1.0, seed=4, logprobs=1),
    Sampling(),
    Sampling(temperature=0.8, top_k=9, seed=5, stop_ids=(3, 4), min_total=50),
)
"""The parameters of the slots. All but `FREE` have masks, and those of `LOOSE` allow everything."""
FREE = 2
LOOSE = (3, 4)
COUNTS = (8, 8, 3, 8, 8)
PATTERNS: dict[str, Late] = {
    "all at once": lambda step, _: step % 3 != 1,
    "one after the other": lambda step, slot: (step + slot) % 3 == 0,
    "always one": lambda step, slot: step < 14 and slot == 1,
}
PATTERN = pytest.mark.parametrize("late", PATTERNS.values(), ids=PATTERNS)


def mask_of(slot: int, position: int, vocabulary: int) -> UInt32s | None:
    """The tokens that are allowed at a position of a slot. None allows all."""
    if slot in LOOSE:
        return None
    words = -(-vocabulary // 32)
    return np.random.default_rng((slot, position)).integers(0, 1 << 32, words, np.uint64).astype(np.uint32)


def tell(
    step_of: Step, late: Late, vocabulary: int = TINY["vocab_size"], drafted: Drafted = lambda *_: []
) -> tuple[list[Said], int]:
    """Runs all requests. Returns the tokens of each slot, and the number of steps. Masks of drafts may be late too."""
    said: list[Said] = [[] for _ in SLOTS]
    prompt, pages = 5, 4
    step, begun = 0, False
    while any(len(tokens) < count for tokens, count in zip(said, COUNTS, strict=True)):
        step += 1
        builder = PlanBuilder(step)
        words: list[UInt32s] = []
        places: list[int] = []
        missing: list[int] = []
        giving: list[int] = []
        drafts: list[int] = []
        row_tokens: list[int] = []
        for slot, sampling in enumerate(SLOTS):
            if len(said[slot]) == COUNTS[slot]:
                continue
            end = prompt + len(said[slot])
            if not begun:
                builder.slot(slot, [7 + slot, 8, 9, 10, 11], sampling)
                builder.page_writes += [(slot, index, pages * slot + index) for index in range(pages)]
            builder.row(slot, end - 1 if begun else 0, 1 if begun else end, masked=slot != FREE)
            expected = drafted(slot, len(said[slot]))[: COUNTS[slot] - len(said[slot]) - 1] if begun else []
            drafts += expected
            row_tokens.append(1 + len(expected))
            ready = [slot == FREE or not late(step + 5 * nth, slot) for nth in range(row_tokens[-1])]
            if ready[0]:
                giving.append(slot)
            if slot == FREE:
                continue
            for nth in range(row_tokens[-1]):
                mask = mask_of(slot, end + nth, vocabulary)
                fine = all(ready[: nth + 1])
                missing += [] if fine else [len(places)]
                places.append(EVERYTHING if mask is None or not fine else INLINE)
                words += [] if mask is None or not fine else [mask]
        begun = True
        if drafts:
            builder.row_tokens, builder.draft_tokens = row_tokens, drafts
        inline = np.concatenate(words).view(np.int32) if words else np.zeros(0, np.int32)
        masks = Masks(step, np.array(places, np.int32), inline, np.array(missing, np.int32))
        result = step_of(builder.build(), masks)
        assert not result.row_errors.any()
        of_rows = result.token_counts.tolist() or [1] * len(giving)
        givers = [slot for slot, count in zip(giving, of_rows, strict=True) for _ in range(count)]
        assert len(result.tokens) == len(givers)
        counts = result.logprob_counts.tolist() or [0] * len(givers)
        assert len(counts) == len(givers)
        at = 0
        for slot, token, count in zip(givers, result.tokens.tolist(), counts, strict=True):
            ids, values = result.logprob_ids[at : at + count], result.logprob_values[at : at + count]
            said[slot].append((token, ids.tolist(), values.tolist()))
            at += count
        assert step < 200, "the requests must end"
    return said, step


def check_late(step_of: Callable[[], Step], late: Late, vocabulary: int = TINY["vocab_size"]) -> None:
    """Compares a sequence of steps with one in which all masks are ready. `step_of` starts a new hand."""
    expected, _ = tell(step_of(), lambda *_: False, vocabulary)
    found, _ = tell(step_of(), late, vocabulary)
    compare(found, expected)


def check_drafted(step_of: Callable[[], Step], late: Late, vocabulary: int = TINY["vocab_size"]) -> int:
    """As `check_late`, with drafts that are right with several probabilities.

    Returns the number of steps that drafts save if all are right.
    """
    expected, _ = tell(step_of(), lambda *_: False, vocabulary)
    _, steps = tell(step_of(), late, vocabulary)
    saved = 0
    for right in (0, 0.7, 1):
        random = np.random.default_rng(5)

        def drafted(slot: int, count: int, right: float = right, random: np.random.Generator = random) -> list[int]:
            tokens = [token for token, *_ in expected[slot][count : count + int(random.integers(0, 6))]]
            return [token if random.random() < right else (token + 1) % vocabulary for token in tokens]

        found, fewer = tell(step_of(), late, vocabulary, drafted)
        compare(found, expected)
        saved = steps - fewer
    return saved


def compare(found: list[Said], expected: list[Said]) -> None:
    """Compares tokens and log-probabilities."""
    for slot, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert [token for token, *_ in ours] == [token for token, *_ in theirs], slot
        for (_, ids, values), (_, other_ids, other_values) in zip(ours, theirs, strict=True):
            assert ids == other_ids
            np.testing.assert_allclose(values, other_values, atol=1e-4)
