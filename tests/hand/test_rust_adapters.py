"""Adapters in the hand in Rust: the results of a model with the adapter in its weights, and equal bits in any batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.described import described
from forebay.protocol.constants import PLACE_FAILED_DIGEST, PLACE_FAILED_FILES, PLACE_OK
from tests.hand import recurrent_models
from tests.hand.gguf_models import Form
from tests.hand.gguf_models import write as write_gguf
from tests.hand.greedy import COUNT, model_of, prompts
from tests.hand.support import PlanBuilder, Request, Sampling, greedy_reference, random_model
from tests.hand.test_adapters import ATTENTION, LORA, bring, manifest, write
from tests.hand.test_gguf_experts import MODELS
from tests.hand.test_rust_hand import (
    RustRunner,
    brain_of,
    check,
    in_safetensors,
    requests,
    rust,
    settings,
    torch_runner,
)

Q = gguf.GGMLQuantizationType


def base_of(family: str) -> Any:
    """The model that `in_safetensors` saves."""
    return random_model(*MODELS[family]) if family in MODELS else model_of(family)


def asked(count: int = 8) -> list[Request]:
    """Requests of the base and of three adapters in turn."""
    return [Request(prompt, COUNT, Sampling(logprobs=5), place=at % 4 - 1) for at, prompt in enumerate(prompts(count))]


def told(runner: RustRunner, manifests: Sequence[dict[str, Any]], first: int = 0) -> list[int]:
    """Calls `bring` for a hand in Rust."""
    return bring(runner, manifests, first)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "llama-untied-biases", "qwen2-tied", "qwen3-bias", "gemma2", "gemma3"])
def test_a_step_of_three_adapters_and_the_base_is_that_of_four_models(family: str, tmp_path: Path) -> None:
    base = base_of(family)
    made = [write(tmp_path, base, number) for number in (1, 2, 3)]
    check_models(tmp_path, base, made, in_safetensors(tmp_path, family))


def test_layers_of_one_part_and_parts_without_gates_have_adapters(tmp_path: Path) -> None:
    def named(name: str) -> str:
        return name.replace(".mixer.", ".self_attn." if name.endswith(ATTENTION) else ".mlp.")

    base = recurrent_models.model_of("nemotron-h-biases")
    made = [write(tmp_path, base, number, named=named) for number in (1, 2, 3)]
    check_models(tmp_path, base, made, recurrent_models.save(tmp_path / "model", "nemotron-h-biases"))


def check_models(folder: Path, base: Any, made: Sequence[tuple[dict[str, Any], Any]], model: dict[str, Any]) -> None:
    """Serves requests of a saved base and of its adapters, and compares each with its merged model."""
    models = [base, *(merged for _, merged in made)]
    found = asked()
    with rust(folder, settings(model, lora=LORA)) as runner:
        assert told(runner, [of for of, _ in made]) == [PLACE_OK] * 3
        brain_of(runner).serve(found, chunk=16)
    differ = 0
    for request in found:
        tokens, logprobs = greedy_reference(models[request.place + 1], request.prompt, COUNT)
        assert request.tokens == tokens
        for (ids, values), distribution in zip(request.logprobs, logprobs, strict=True):
            np.testing.assert_allclose(values, distribution[torch.from_numpy(ids).long()], atol=1e-4)
        differ += tokens != greedy_reference(base, request.prompt, COUNT)[0]
    assert differ >= 4, "the adapters change tokens"


def test_both_hands_give_the_same_numbers_with_adapters(tmp_path: Path) -> None:
    manifests = [write(tmp_path, model_of("llama"), number)[0] for number in (1, 2, 3)]
    values = settings(in_safetensors(tmp_path, "llama"), lora=LORA)
    ours, theirs = requests(), requests()
    for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        one.place = other.place = at % 4 - 1
    with rust(tmp_path, values) as runner:
        told(runner, manifests)
        brain_of(runner).serve(ours, 17)
        facts = runner.facts
    torch_ = torch_runner(values)
    bring(torch_, manifests)
    brain_of(torch_).serve(theirs, 17)
    check(ours, theirs, atol=1e-4)
    assert facts["lora_modules"] == torch_.facts()["lora_modules"]
    # Packed matrices are padded to whole panels.
    assert torch_.facts()["lora_bytes"] <= facts["lora_bytes"] < 2 * torch_.facts()["lora_bytes"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "plain"), ("llama", "int8"), ("gemma3", "plain"), ("gemma3", "Q4_1"), ("qwen3-moe", "Q4_0")],
)
def test_a_request_gets_the_same_bits_in_any_mixture(tmp_path: Path, family: str, kind: str, dtype: str) -> None:
    base = base_of(family)
    if kind.startswith("Q"):
        path = write_gguf(tmp_path / "model.gguf", base, Form(kind=getattr(Q, kind)))
        model = described(path, tmp_path / "cache")
    else:
        model = in_safetensors(tmp_path, family)
    quantization = {"plain": None, "int8": "w8a8_int8"}.get(kind, "gguf")
    # Experts have no adapters, so this family uses adapter 1, which changes attention only.
    numbers = (1, 1, 1) if "moe" in family else (1, 2, 3)
    manifests = [write(tmp_path / str(at), base, number)[0] for at, number in enumerate(numbers)]
    found = []
    for threads, chunk, together in ((1, 1 << 10, 1), (2, 17, 24), (3, 5, 7)):
        values = settings(model, dtype=dtype, quantization=quantization, threads=threads, lora=LORA)
        with rust(tmp_path, values) as runner:
            assert told(runner, manifests) == [PLACE_OK] * 3
            mixed, brain = requests(count=24), brain_of(runner)
            for at, request in enumerate(mixed):
                request.place = at % 4 - 1
            for first in range(0, len(mixed), together):
                brain.serve(mixed[first : first + together], chunk)
        found.append(mixed)
    for other in found[1:]:
        check(found[0], other, atol=0)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_adapters_of_a_base_in_blocks_change_its_numbers_as_those_of_a_base_that_is_multiplied_out(
    tmp_path: Path, kind: str
) -> None:
    base = random_model(*MODELS["gemma3"])
    path = write_gguf(tmp_path / "model.gguf", base, Form(kind=getattr(Q, kind)))
    manifests = [write(tmp_path, base, number)[0] for number in (1, 2, 3)]

    def told_of(quantization: str | None, places: Sequence[int]) -> list[npt.NDArray[np.float32]]:
        values = settings(described(path, tmp_path / "cache"), quantization=quantization, lora=LORA)
        served = [
            Request(prompt, 1, Sampling(logprobs=0), prompt_logprobs=0, place=place)
            for prompt, place in zip(prompts(9), places, strict=True)
        ]
        with rust(tmp_path, values) as runner:
            told(runner, manifests)
            brain_of(runner).serve(served, 17)
        return [np.concatenate([values for _, _, values in of.of_prompt]) for of in served if of.of_prompt]

    places = [at % 3 for at in range(9)]
    blocks, floats, without = told_of("gguf", places), told_of(None, places), told_of(None, [-1] * 9)
    for one, other, base_ in zip(blocks, floats, without, strict=True):
        # 8-bit activations change the values much less than the adapters do.
        assert np.abs(one - other).mean() < np.abs(other - base_).mean() / 4


def test_an_adapter_of_zeros_is_the_base_to_the_bit(tmp_path: Path) -> None:
    base = model_of("llama")
    found, _ = write(tmp_path, base, 2)
    path = Path(found["files"][0])
    tensors = {name: tensor * ("lora_A" in name) for name, tensor in load_file(path).items()}
    save_file(tensors, path)
    scales = {module["name"]: module["scale"] for module in found["modules"]}
    ours, alone = asked(), asked()
    for one, other in zip(ours, alone, strict=True):
        one.place, other.place = 0, -1
    with rust(tmp_path, settings(in_safetensors(tmp_path, "llama"), dtype="bfloat16", lora=LORA)) as runner:
        assert told(runner, [manifest(path, scales)]) == [PLACE_OK]
        brain_of(runner).serve(ours, 16)
        brain_of(runner).serve(alone, 16)
    check(ours, alone, atol=0)


def test_a_place_gets_another_adapter_and_a_slot_another_place(tmp_path: Path) -> None:
    base = model_of("llama")
    made = [write(tmp_path, base, number) for number in (1, 2, 3)]
    prompt = prompts(1)[0]
    with rust(tmp_path, settings(in_safetensors(tmp_path, "llama"), lora={**LORA, "places": 1, "kept": 0})) as runner:
        for turn, number in enumerate((0, 1, 2, 0)):
            found, merged = made[number]
            assert told(runner, [found], first=10 * turn) == [PLACE_OK]
            for place, model in ((0, merged), (-1, base)):
                request = Request(prompt, COUNT, place=place)
                brain_of(runner).serve([request], slots=[0])
                assert request.tokens == greedy_reference(model, prompt, COUNT)[0]


def test_files_that_are_gone_or_changed_are_reported(tmp_path: Path) -> None:
    base = model_of("llama")
    first, second, third, other = (write(tmp_path / str(at), base, 1 + at % 3)[0] for at in range(4))
    Path(first["files"][0]).unlink()
    path = Path(second["files"][0])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    third = copy.deepcopy(third)
    third["modules"][0]["name"] = "model.layers.0.mlp.gate_proj"
    values = settings(in_safetensors(tmp_path, "llama"), lora={**LORA, "places": 4})
    with rust(tmp_path, values) as runner:
        ended = told(runner, [first, second, third, other])
        assert ended == [PLACE_FAILED_FILES, PLACE_FAILED_DIGEST, PLACE_FAILED_DIGEST, PLACE_OK]
        request = Request(prompts(1)[0], COUNT, place=3)
        brain_of(runner).serve([request])
        with pytest.raises(AssertionError, match="a row of place 0, which has no adapter"):
            brain_of(runner).serve([Request(prompts(1)[0], COUNT, place=0)])


@pytest.mark.parametrize("write_", [(1, 0, 0), (1, 3, 0), (1, 0, 7)])
def test_what_nobody_knows_has_no_place(tmp_path: Path, write_: tuple[int, int, int]) -> None:
    found, _ = write(tmp_path, model_of("llama"), 1)
    with rust(tmp_path, settings(in_safetensors(tmp_path, "llama"), lora=LORA)) as runner:
        assert told(runner, [found]) == [PLACE_OK]
        runner.know({"op": "forget", "id": 0})
        plan = PlanBuilder(step=5, place_writes=[write_], wait_us=[1]).build()
        with pytest.raises(AssertionError, match="it is not known, or there is no such place"):
            runner.step(plan)


def test_a_hand_without_places_takes_no_adapters(tmp_path: Path) -> None:
    with rust(tmp_path, settings(in_safetensors(tmp_path, "llama"))) as runner:
        assert runner.facts["lora_bytes"] == 0
        with pytest.raises(AssertionError, match="without places"):
            runner.step(PlanBuilder(step=5, place_writes=[(1, 0, 0)], wait_us=[1]).build())
