"""The measured memory of steps: the largest steps run before pages are allocated, and their peak is kept free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from forebay.device import Device, DeviceError
from forebay.protocol.constants import FLAG_SAMPLE, PROMPT_LOGPROBS_WANT_WORDS, SLOT_WORDS, SlotFloats, SlotRecord
from forebay.protocol.frames import Float32s, Int32s
from forebay.protocol.plan import Plan
from forebay.state.config import RunnerConfig

GATHERED = 1 << 19
"""Positions of all rows of a measured decode step. Attention gathers at most half as many positions at a time."""
_LOGPROBS = 20
"""The largest number of log-probabilities in OpenAI's API."""


def largest_plans(config: RunnerConfig, flag: int) -> Iterator[Plan]:
    """Yields plans for empty tables and a pool of one page, which all positions share.

    The first has prompt rows with the largest number of tokens of a step, each ending at the full context length. The
    second has decode rows with all options of a sampler. `flag` is the flag of the rows.
    """
    context = config.context_length
    length = min(config.prompt_tokens, context)
    prompts = min(config.slots, -(-config.prompt_tokens // context))
    yield _plan(config, flag, prompts, context - length, length)
    rows = min(config.slots, config.max_running_requests)
    yield _plan(config, flag, rows, min(context, max(1, GATHERED // rows)) - 1, 1)


def _plan(config: RunnerConfig, flag: int, rows: int, start: int, length: int) -> Plan:
    numbers = np.arange(rows)
    slots: Int32s = np.zeros((rows, SLOT_WORDS), np.int32)
    slots[:, SlotRecord.SLOT] = numbers
    slots[:, SlotRecord.ARENA_OFFSET] = -1
    slots[:, SlotRecord.LOGPROBS] = _LOGPROBS
    # Half of the rows have `top_k`, which limits the number of candidates, and half have only `top_p`.
    slots[: rows // 2, SlotRecord.TOP_K] = 50
    floats: Float32s = np.ones((rows, len(SlotFloats)), np.float32)
    floats[:, SlotFloats.TOP_P] = 0.9
    floats[:, SlotFloats.MIN_P] = 0.01
    floats[:, SlotFloats.REPETITION_PENALTY] = 1.1
    # Without a bias, the device would sample the rows by slot, which takes less memory.
    biases = rows if flag == FLAG_SAMPLE else 0
    slots[:biases, SlotRecord.BIAS_COUNT] = 1
    pages = -(-(start + length) // config.page_size)
    writes: Int32s = np.zeros((rows * pages, 3), np.int32)
    writes[:, 0], writes[:, 1] = np.repeat(numbers, pages), np.tile(np.arange(pages), rows)
    most = min(_LOGPROBS, config.model_config.vocab_size)
    wants: Int32s = np.zeros((rows if flag == FLAG_SAMPLE and length > 1 else 0, PROMPT_LOGPROBS_WANT_WORDS), np.int32)
    wants[:] = np.stack((numbers, *(np.full(rows, word) for word in (start + 1, length, most))), axis=1)[: len(wants)]
    row = np.stack((numbers, np.full(rows, start), np.full(rows, length), np.full(rows, flag)), axis=1)
    return Plan(
        slots=slots,
        slot_floats=floats,
        bias_ids=np.zeros(biases, np.int32),
        bias_values=np.ones(biases, np.float32),
        page_writes=writes,
        rows=row.astype(np.int32),
        prompt_logprobs=wants,
    )


@contextmanager
def telling_of_memory(device: Device) -> Iterator[None]:
    """Turns a failed allocation of device memory into a `DeviceError` with a message of one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        asked = ". ".join(str(error).split(". ")[1:3])
        raise DeviceError(
            f"{device.name} has too little memory: {asked or error}; end what else uses it, or choose a smaller model, "
            "--chunked-prefill-size, --max-running-requests or --context-length"
        ) from error
