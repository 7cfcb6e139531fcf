"""Adapters give the results of a model with the adapter merged into its weights, in any mixture.

The files may also be damaged or missing. The reference is transformers' model with `W + B A * scale` in float32 for
each changed matrix, which is what PEFT's `merge_and_unload` computes. The tests do not need PEFT itself.
"""

from __future__ import annotations

import copy
import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from forebay.protocol.constants import PLACE_FAILED_DIGEST, PLACE_FAILED_FILES, PLACE_OK
from forebay.runner.runner import ModelRunner
from forebay.state.config import ConfigError
from forebay.state.slots import PlanError
from tests.hand.greedy import COUNT, model_of, prompts
from tests.hand.support import DEVICES, MiniBrain, PlanBuilder, Request, Sampling, greedy_reference, runner_of

LORA = {"places": 3, "rank": 32, "kept": 1}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED = ("gate_proj", "up_proj", "down_proj")
SOME = {1: ("q_proj", "v_proj"), 2: (*ATTENTION, *FEED), 3: ("k_proj", "down_proj", "up_proj")}
RANKS = {1: 1, 2: 8, 3: 32}


def write(
    folder: Path,
    model: Any,
    number: int,
    dtype: torch.dtype = torch.float32,
    named: Callable[[str], str] = str,
) -> tuple[dict[str, Any], Any]:
    """Writes an adapter of a model. Returns its manifest, and the model with the adapter merged.

    `named` maps a module's name in transformers to its name in Forebay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(number)
    merged = copy.deepcopy(model)
    tensors: dict[str, torch.Tensor] = {}
    scales: dict[str, float] = {}
    for name, module in merged.named_modules():
        if name.split(".")[-1] not in SOME[number]:
            continue
        # The matrices of one adapter have different ranks and factors.
        rank, scale = RANKS[number] - (number == 3 and "up_proj" in name), 1.5 if "layers.1" in name else 0.5
        outputs, inputs = module.weight.shape
        a = (torch.randn(rank, inputs, generator=random) * 0.2).to(dtype)
        b = (torch.randn(outputs, rank, generator=random) * 0.2).to(dtype)
        tensors |= {f"{named(name)}.lora_A": a, f"{named(name)}.lora_B": b}
        scales[named(name)] = scale
        with torch.no_grad():
            module.weight += b.float() @ a.float() * scale
    path = folder / f"{number}.safetensors"
    save_file(tensors, path)
    return manifest(path, scales), merged


def manifest(path: Path, scales: dict[str, float]) -> dict[str, Any]:
    """The brain's manifest of the file."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, digest, modules = json.loads(content[8 : 8 + length]), hashlib.blake2b(digest_size=16), []
    for name, scale in scales.items():
        digest.update(name.encode() + struct.pack("<f", scale))
        places = {}
        for half, end in (("a", "lora_A"), ("b", "lora_B")):
            tensor = header[f"{name}.{end}"]
            first, end_ = (8 + length + offset for offset in tensor["data_offsets"])
            digest.update(f" {tensor['dtype']} {end_ - first} 0 ".encode() + content[first:end_])
            place = {"file": 0, "offset": first, "bytes": end_ - first}
            places[half] = {**place, "format": tensor["dtype"], "shape": tensor["shape"]}
        modules.append({"name": name, "scale": scale, **places})
    return {"files": [str(path)], "digest": digest.hexdigest(), "rank": 32, "modules": modules}


def bring(runner: ModelRunner, manifests: Sequence[dict[str, Any]], first: int = 0) -> list[int]:
    """Loads adapters with ids `first`, `first` + 1, ... into places 0, 1, .... Returns the status codes, by place."""
    step = PlanBuilder(step=1000 + first, wait_us=[1000])
    for place, found in enumerate(manifests):
        runner.know({"op": "know", "id": first + place, "manifest": found})
        step.place_writes.append((first + place, place, first + place))
    result = runner.step(step.build())
    ended = dict(result.placed.tolist())
    while len(ended) < len(manifests):
        ended |= dict(runner.step(PlanBuilder(step=2000 + first, wait_us=[1000]).build()).placed.tolist())
    return [ended[first + place] for place in range(len(manifests))]


@DEVICES
@pytest.mark.parametrize("family", ["llama", "llama-untied-biases", "qwen2", "qwen3", "gemma2"])
def test_a_step_of_three_adapters_and_the_base_is_that_of_four_models(
    family: str, device: str, lookahead: int, tmp_path: Path
) -> None:
    base = model_of(family)
    made = [write(tmp_path, base, number) for number in (1, 2, 3)]
    models = [base, *(merged for _, merged in made)]
    runner = runner_of(base, device=device, lora=LORA)
    assert bring(runner, [found for found, _ in made]) == [PLACE_OK] * 3
    requests = [Request(prompt, COUNT, Sampling(logprobs=5), place=at % 4 - 1) for at, prompt in enumerate(prompts(8))]
    MiniBrain(runner, lookahead=lookahead).serve(requests, chunk=16)
    differ = 0
    for request in requests:
        tokens, logprobs = greedy_reference(models[request.place + 1], request.prompt, COUNT)
        assert request.tokens == tokens
        for (ids, values), distribution in zip(request.logprobs, logprobs, strict=True):
            np.testing.assert_allclose(values, distribution[torch.from_numpy(ids).long()], atol=1e-4)
        differ += tokens != greedy_reference(base, request.prompt, COUNT)[0]
    assert differ >= 4, "the adapters change tokens"


def test_a_mixture_gives_the_tokens_of_each_alone(tmp_path: Path) -> None:
    base = model_of("llama")
    runner = runner_of(base, lora=LORA)
    bring(runner, [write(tmp_path, base, number)[0] for number in (1, 2, 3)])

    def requests() -> list[Request]:
        return [Request(p, COUNT, place=at % 4 - 1, arrival=at) for at, p in enumerate(prompts(12))]

    together, alone = requests(), requests()
    MiniBrain(runner).serve(together, chunk=5)
    for request in alone:
        request.arrival = 0
        MiniBrain(runner).serve([request])
    assert [request.tokens for request in together] == [request.tokens for request in alone]


def test_numbers_are_those_of_the_file_whatever_its_type(tmp_path: Path) -> None:
    base = model_of("llama")
    found, merged = write(tmp_path, base, 2, torch.bfloat16)
    runner = runner_of(base, lora=LORA)
    assert bring(runner, [found]) == [PLACE_OK]
    request = Request(prompts(1)[0], COUNT, place=0)
    MiniBrain(runner).serve([request])
    assert request.tokens == greedy_reference(merged, request.prompt, COUNT)[0]


def test_a_place_gets_another_adapter_and_a_slot_another_place(tmp_path: Path) -> None:
    base = model_of("llama")
    made = [write(tmp_path, base, number) for number in (1, 2, 3)]
    runner = runner_of(base, lora=LORA)
    prompt = prompts(1)[0]
    for turn, number in enumerate((0, 1, 2, 0)):
        found, merged = made[number]
        assert bring(runner, [found], first=10 * turn) == [PLACE_OK]
        for place, model in ((0, merged), (-1, base)):
            request = Request(prompt, COUNT, place=place)
            MiniBrain(runner, seed=turn).serve([request], slots=[0])
            assert request.tokens == greedy_reference(model, prompt, COUNT)[0]


def test_files_that_are_gone_or_changed_are_reported(tmp_path: Path) -> None:
    base = model_of("llama")
    first, second, third = (write(tmp_path, base, number)[0] for number in (1, 2, 3))
    runner = runner_of(base, lora=LORA)
    Path(first["files"][0]).unlink()
    path = Path(second["files"][0])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert bring(runner, [first, second, third]) == [PLACE_FAILED_FILES, PLACE_FAILED_DIGEST, PLACE_OK]
    request = Request(prompts(1)[0], COUNT, place=2)
    MiniBrain(runner).serve([request])
    with pytest.raises(PlanError, match=r"rows of places \[0\], which have no adapter"):
        MiniBrain(runner).serve([Request(prompts(1)[0], COUNT, place=0)])


def test_what_nobody_knows_has_no_place(tmp_path: Path) -> None:
    base = model_of("llama")
    found, _ = write(tmp_path, base, 1)
    runner = runner_of(base, lora=LORA)
    assert bring(runner, [found]) == [PLACE_OK]
    runner.know({"op": "forget", "id": 0})
    for places in ([(1, 0, 0)], [(1, 3, 0)], [(1, 0, 7)]):
        with pytest.raises(PlanError, match="it is not known, or there is no such place"):
            runner.step(PlanBuilder(step=5, place_writes=places, wait_us=[1]).build())
    with pytest.raises(PlanError, match="which have no adapter"):
        MiniBrain(runner).serve([Request([1, 2], 2, place=0)])
    without = runner_of(base)
    with pytest.raises(PlanError, match="without places"):
        without.step(PlanBuilder(step=5, place_writes=[(1, 0, 0)], wait_us=[1]).build())
    with pytest.raises(PlanError, match="without places"):
        without.know({"op": "forget", "id": 0})
    assert "lora_bytes" not in without.facts()


def test_the_facts_count_the_largest_adapters() -> None:
    facts = runner_of(model_of("llama"), lora=LORA).facts()
    # Three layers of the projections q, k, v, o, gate, up and down.
    sizes = (64 + 64) + (64 + 32) + (64 + 32) + (64 + 64) + 3 * (64 + 96)
    assert facts["lora_bytes"] == 3 * 32 * 3 * sizes * 4
    assert facts["lora_modules"] == sorted(
        [*(f"self_attn.{name}" for name in ATTENTION), *(f"mlp.{name}" for name in FEED)]
    )


@pytest.mark.parametrize(
    "changes", [{"lora": {"places": 0, "rank": 1, "kept": 0}}, {"hot_row_tokens": 0, "lora": LORA}]
)
def test_configurations_without_adapters_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        runner_of(model_of("llama"), **changes)
