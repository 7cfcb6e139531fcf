"""Tokens that transformers generates, one request at a time, with the margin of each choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from tests.e2e.models import Model
from tests.e2e.server import ROOT

CLEAR = 1e-3
"""If logits are closer than this, the order of additions decides even in float32: no token is right or wrong."""


@dataclass(frozen=True)
class Case:
    """A prompt, and the greedy answer to it."""

    prompt: list[int]
    tokens: list[int]
    logprobs: torch.Tensor
    """Log-probabilities [tokens, vocabulary], float32."""


def prompts(model: Model, count: int, longest: int, seed: int) -> list[list[int]]:
    """Pieces of English text, 1 to `longest` tokens; every third has the same beginning."""
    text = model.encode((ROOT / "LICENSE").read_text())
    generator = torch.Generator().manual_seed(seed)

    def below(most: int) -> int:
        return int(torch.randint(most, (1,), generator=generator))

    found = []
    for number in range(count):
        length = 1 + below(longest)
        start = below(len(text) - length)
        tail = text[start : start + length]
        found.append(text[: longest // 2] + tail[: max(1, length // 2)] if number % 3 == 0 else tail)
    return found


def greedy(model: Any, prompt: list[int], count: int) -> Case:
    """Generates `count` tokens with transformers' `generate`; end-of-sequence does not stop it."""
    model.generation_config.eos_token_id = None
    made: Any = GenerationConfig
    config = made(
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    tokens = output.sequences[0, len(prompt) :].tolist()
    assert len(tokens) == count
    return Case(prompt, tokens, torch.cat(output.logits).float().log_softmax(-1))


def clear_cases(model: Model, count: int, longest_prompt: int, output: range, seed: int) -> list[Case]:
    """`count` cases of mixed lengths in which the margin of each token exceeds `CLEAR`."""
    found: list[Case] = []
    lengths = list(output)
    for number, prompt in enumerate(prompts(model, 2 * count, longest_prompt, seed)):
        case = greedy(model.reference, prompt, lengths[number * 7 % len(lengths)])
        first, second = case.logprobs.topk(2).values.unbind(-1)
        if bool((first - second > CLEAR).all()):
            found.append(case)
        if len(found) == count:
            return found
    raise AssertionError("too many of the model's choices are not clear")


def logits_along(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """The logits [tokens, vocabulary], float32, from which each of `tokens` is chosen."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([prompt + tokens[:-1]])).logits[0].float()
    return logits[len(prompt) - 1 :]
