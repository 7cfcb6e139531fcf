"""Prompts that come as embeddings give the same tokens as their text, however the request is served."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from forebay.runner.runner import ModelRunner
from forebay.state.slots import PlanError
from tests.hand.greedy import model_of
from tests.hand.support import (
    MiniBrain,
    PlanBuilder,
    Request,
    greedy_reference,
    runner_of,
)

COUNT = 10
DEVICES = pytest.mark.parametrize("device", ["cpu", "deferred"])


def prompts(count: int) -> list[list[int]]:
    random = np.random.default_rng(8)
    return [random.integers(0, 131, random.integers(1, 50)).tolist() for _ in range(count)]


@cache
def expected(family: str) -> list[list[int]]:
    return [greedy_reference(model_of(family), prompt, COUNT)[0] for prompt in prompts(10)]


def embedded(model: Any, dtype: torch.dtype) -> tuple[npt.NDArray[np.uint8], list[int]]:
    """An arena with the embeddings of all prompts and other bytes between them, and the byte offset of each."""
    table = model.get_input_embeddings().weight.detach().to(dtype)
    arena, offsets = bytearray(b"\xff" * 64), []
    for prompt in prompts(10):
        offsets.append(len(arena))
        arena += table[prompt].view(torch.uint8).numpy().tobytes() + b"\xff" * 64
    shared = np.frombuffer(arena, np.uint8)
    # The hand's mapping is read-only too.
    shared.flags.writeable = False
    return shared, offsets


def requests(offsets: list[int], every: int, kept: int = 0, family: str = "llama") -> list[Request]:
    """Every `every`-th prompt comes as embeddings, the others as tokens. All have `kept` tokens generated before."""
    return [
        Request(
            prompt,
            COUNT,
            arrival=2 * number,
            replayed=expected(family)[number][:kept],
            embeds_offset=offsets[number] if number % every == 0 else -1,
        )
        for number, prompt in enumerate(prompts(10))
    ]


def runner(family: str, device: str, dtype: torch.dtype = torch.float32) -> tuple[ModelRunner, list[int]]:
    arena, offsets = embedded(model_of(family), dtype)
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    return runner_of(model_of(family), arena, dtype=names[dtype], device=device), offsets


@DEVICES
@pytest.mark.parametrize("family", ["llama", "qwen3", "glm-dsa-shared"])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("every", [1, 2])
def test_embeddings_of_tokens_give_what_the_tokens_give(device: str, family: str, chunk: int, every: int) -> None:
    tested, offsets = runner(family, device)
    asked = requests(offsets, every)
    MiniBrain(tested, chunk, lookahead=device == "deferred").serve(asked, chunk)
    assert [request.tokens for request in asked] == expected(family)


@DEVICES
@pytest.mark.parametrize("kept", [1, COUNT - 1])
def test_a_replay_reads_the_same_embeddings(device: str, kept: int) -> None:
    tested, offsets = runner("llama", device)
    asked = requests(offsets, 2, kept)
    MiniBrain(tested, kept, lookahead=device == "deferred").serve(asked, chunk=16)
    assert [request.tokens for request in asked] == expected("llama")


@DEVICES
def test_the_same_in_bfloat16(device: str) -> None:
    given = []
    for every in (1, 100):
        tested, offsets = runner("qwen2", device, torch.bfloat16)
        asked = [Request(r.prompt, COUNT, embeds_offset=r.embeds_offset) for r in requests(offsets, every)]
        MiniBrain(tested).serve(asked, chunk=16)
        given.append([request.tokens for request in asked])
    assert given[0] == given[1]


@DEVICES
@pytest.mark.parametrize(("offset", "message"), [(1 << 20, "of an arena of"), (66, "bytes 66")])
def test_embeddings_that_are_not_there(device: str, offset: int, message: str) -> None:
    tested, _ = runner("llama", device)
    builder = PlanBuilder()
    builder.slot(0, [0, 0], embeds_offset=offset)
    builder.page_writes.append((0, 0, 0))
    builder.row(0, 0, 2)
    with pytest.raises(PlanError, match=message):
        tested.step(builder.build())
