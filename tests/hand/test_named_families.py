"""Families that differ in names, factors and small parts: the hand in Rust against transformers."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.described import described, handshake_model
from forebay.weights.config import config_of
from forebay.weights.load import iter_weights, weight_shapes
from tests.hand import image_models
from tests.hand.gguf_models import Form
from tests.hand.named_files import ARCHITECTURES, write_gguf
from tests.hand.named_models import NAMED, model_of, save
from tests.hand.support import MiniBrain, PlanBuilder, Request, Sampling, greedy_reference, hub_weights
from tests.hand.test_families import own_names, table
from tests.hand.test_rust_hand import brain_of, rust, settings, torch_runner
from tests.hand.test_rust_hand import check as check_same
from tests.hand.torch_models import TORCH_NAMED

ALL = NAMED | TORCH_NAMED
COUNT = 8
VOCABULARY = 131
Q8_0 = gguf.GGMLQuantizationType.Q8_0
ROWS = table()
COMPILED = [name for name, (kind, _) in ALL.items() if any(ROWS[own].compiled for own in own_names(kind) & ROWS.keys())]
"""Families that the hand in Rust serves."""
OF_MANY_PARTS = ["gemma4-wide", "gemma4-keys", "gemma4-experts", "llama4", "mistral4", "deepseek-v3-heads"]
"""Families with many special parts.

These are shared keys, per-layer inputs and factors, keys that are also values, chunks, both kinds of experts, and
latent rows, also shared by 64 heads.
"""


def prompts() -> list[list[int]]:
    """Prompts longer than the original contexts of `named_models`, where transformers changes its frequencies."""
    random = np.random.default_rng(5)
    return [random.integers(3, VOCABULARY, length).tolist() for length in (17, 23, 40, 61)]


@cache
def expected(family: str) -> list[tuple[list[int], torch.Tensor]]:
    return [greedy_reference(model_of(family), prompt, COUNT) for prompt in prompts()]


def check(family: str, requests: list[Request]) -> None:
    for request, (tokens, logprobs) in zip(requests, expected(family), strict=True):
        assert request.tokens == tokens
        for (ids, values), token, distribution in zip(request.logprobs, tokens, logprobs, strict=False):
            assert ids[0] == token
            top = distribution.topk(5)
            assert ids[1:].tolist() == top.indices.tolist()
            np.testing.assert_allclose(values[1:], top.values, atol=1e-4)


def serve_in_pieces(runner: Any, family: str) -> None:
    """Serves prompts in chunks of several sizes, beside decode rows of others, and after a preemption."""
    for chunk in (1, 3, 7, 16, 17, 1000):
        requests = [
            Request(prompt, COUNT, Sampling(logprobs=5), arrival=2 * number) for number, prompt in enumerate(prompts())
        ]
        MiniBrain(runner, chunk).serve(requests, chunk)
        check(family, requests)
    for kept in (1, COUNT - 1):
        again = [
            Request(prompt, COUNT, replayed=tokens[:kept])
            for prompt, (tokens, _) in zip(prompts(), expected(family), strict=True)
        ]
        MiniBrain(runner, kept).serve(again, 5)
        assert [request.tokens for request in again] == [tokens for tokens, _ in expected(family)]


@pytest.mark.parametrize("family", COMPILED)
def test_safetensors_are_computed_as_transformers_does(tmp_path: Path, family: str) -> None:
    model = save(tmp_path / "model", family)
    with rust(tmp_path, settings(model, max_total_tokens=1 << 13)) as runner:
        serve_in_pieces(runner, family)


@pytest.mark.parametrize("family", ALL)
def test_pytorchs_hand_computes_as_transformers_does(tmp_path: Path, family: str) -> None:
    values = settings(save(tmp_path / "model", family), max_total_tokens=1 << 13)
    serve_in_pieces(torch_runner(values), family)


@pytest.mark.parametrize("turned", [True, False])
def test_stacks_of_qwen3_vl_are_read_either_way(tmp_path: Path, turned: bool) -> None:
    """Its experts are two tensors in each layer. The hub stores columns first, and transformers 5 saves rows first."""
    model = image_models.model_of("qwen3-vl-moe")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if turned:
        path = tmp_path / "model.safetensors"
        tensors = load_file(path)
        stacks = [name for name in tensors if ".mlp.experts." in name]
        assert len(stacks) == 4
        save_file(tensors | {name: tensors[name].transpose(1, 2).contiguous() for name in stacks}, path)
    images = image_models.PREPROCESSING.to_dict()
    stored = handshake_model(config, [tmp_path / "model.safetensors"], images=images)
    read = config_of(stored["shape"])
    found = dict(iter_weights(stored, read))
    wanted = {image_models.own_name(name): tensor for name, tensor in hub_weights(model).items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert weight_shapes(stored) == {name: tuple(tensor.shape) for name, tensor in wanted.items()}


@pytest.mark.parametrize("family", [name for name in ARCHITECTURES if name in COMPILED])
def test_gguf_files_are_computed_as_transformers_does(tmp_path: Path, family: str) -> None:
    save(tmp_path / "model", family)
    path = write_gguf(tmp_path / "m.gguf", family, tmp_path / "model")
    with rust(tmp_path, settings(described(path, tmp_path), max_total_tokens=1 << 13)) as runner:
        requests = [Request(prompt, COUNT, Sampling(logprobs=5)) for prompt in prompts()]
        brain_of(runner).serve(requests, 17)
        check(family, requests)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_pytorchs_hand_reads_gguf_files_that_the_brain_has_described(tmp_path: Path, family: str) -> None:
    save(tmp_path / "model", family)
    path = write_gguf(tmp_path / "m.gguf", family, tmp_path / "model")
    requests = [Request(prompt, COUNT, Sampling(logprobs=5)) for prompt in prompts()]
    MiniBrain(torch_runner(settings(described(path, tmp_path)))).serve(requests, 17)
    check(family, requests)


@pytest.mark.parametrize("family", OF_MANY_PARTS)
def test_every_level_computes_as_transformers_does(tmp_path: Path, family: str, instructions: str) -> None:
    with rust(tmp_path, settings(save(tmp_path / "model", family), max_total_tokens=1 << 13)) as runner:
        requests = [Request(prompt, COUNT, Sampling(logprobs=5)) for prompt in prompts()]
        brain_of(runner).serve(requests, 17)
        check(family, requests)


@pytest.mark.parametrize("family", OF_MANY_PARTS)
@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"quantization": "w8a8_int8"}], ids=str)
def test_a_request_gets_the_same_bits_in_any_company(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    if "quantization" in changes and family not in ("gemma4-wide", "gemma4-keys"):
        pytest.skip("codes need multiples of 32 elements")
    model, found = save(tmp_path / "model", family), []
    for threads, chunk, together in ((1, 1 << 10, 1), (2, 17, 4), (3, 5, 2)):
        with rust(tmp_path, settings(model, threads=threads, **changes)) as runner:
            requests = [Request(prompt, COUNT, Sampling(logprobs=5)) for prompt in prompts()]
            for first in range(0, len(requests), together):
                brain_of(runner).serve(requests[first : first + together], chunk)
        found.append(requests)
    for other in found[1:]:
        check_same(found[0], other, atol=0)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_rows_of_layers_stay_in_their_blocks(tmp_path: Path, kind: str) -> None:
    """Per-layer embeddings are most of a small Gemma 4. All other weights are floats, so nothing else is rounded."""
    save(tmp_path / "model", "gemma4-wide")
    form = Form(others={"per_layer_token_embd.weight": getattr(gguf.GGMLQuantizationType, kind)})
    model = described(write_gguf(tmp_path / "m.gguf", "gemma4-wide", tmp_path / "model", form), tmp_path)
    served = []
    with rust(tmp_path, settings(model, quantization="gguf")) as runner:
        kept = runner.facts["weight_bytes"]
        for hand in (runner, torch_runner(settings(model))):
            served.append([Request(prompt, COUNT, Sampling(logprobs=5)) for prompt in prompts()])
            brain_of(hand).serve(served[-1], 17)
    with rust(tmp_path, settings(model)) as runner:
        assert kept < runner.facts["weight_bytes"]
    check_same(served[0], served[1], atol=1e-4)


@pytest.mark.parametrize("family", ["gemma4-wide", "gemma4-experts"])
def test_blocks_of_gemma_4_are_near_to_what_is_multiplied_out(tmp_path: Path, family: str) -> None:
    """Random weights amplify rounding, which may also change the choice of experts. So this checks the median."""
    save(tmp_path / "model", family)
    path = write_gguf(tmp_path / "m.gguf", family, tmp_path / "model", Form(kind=Q8_0))
    model, served = described(path, tmp_path), []
    with rust(tmp_path, settings(model, quantization="gguf")) as runner:
        for hand in (runner, torch_runner(settings(model))):
            served.append([Request(prompt, 1, prompt_logprobs=0) for prompt in prompts()])
            brain_of(hand).serve(served[-1], 17)
    assert "computing with blocks of the file" in (tmp_path / "stderr").read_text()
    found, wanted = (
        np.array([float(values[0]) for request in requests for _, _, values in request.of_prompt])
        for requests in served
    )
    # Unrelated numbers would differ by about one standard deviation.
    assert np.median(np.abs(found - wanted)) < 0.4 * wanted.std()


@pytest.mark.parametrize("family", ["phi3", "mixtral", "ernie4_5-moe", "llama4-usual"])
def test_fused_and_stacked_matrices_stay_in_their_blocks(tmp_path: Path, family: str) -> None:
    save(tmp_path / "model", family)
    path = write_gguf(tmp_path / "m.gguf", family, tmp_path / "model", Form(kind=Q8_0))
    values = settings(described(path, tmp_path), quantization="gguf", dtype="bfloat16")
    with rust(tmp_path, values) as runner:
        requests = [Request(prompt, COUNT, Sampling(logprobs=5)) for prompt in prompts()]
        brain_of(runner).serve(requests, 17)
        assert all(len(request.tokens) == COUNT for request in requests)
    told = (tmp_path / "stderr").read_text()
    assert "computing with blocks of the file" in told
    # Rounding to 8 bits changes few tokens, so nearly all first tokens are still those of transformers.
    same = [request.tokens[0] == tokens[0] for request, (tokens, _) in zip(requests, expected(family), strict=True)]
    assert sum(same) >= len(same) - 1


@pytest.mark.parametrize(
    "family",
    [
        *("phi3-long", "mixtral", "qwen2-moe", "ministral3", "gemma3", "olmo3", "cohere2", "granite", "smollm3"),
        *("gemma4", "gemma4-keys", "gemma4-experts", "llama4", "mistral4"),
    ],
)
def test_a_prefix_shared_by_pages_is_not_computed_again(tmp_path: Path, family: str) -> None:
    model = save(tmp_path / "model", family)
    prefix = prompts()[2][:32]
    with rust(tmp_path, settings(model)) as runner:
        first = PlanBuilder(1)
        first.slot(0, prefix)
        first.page_writes += [(0, 0, 40), (0, 1, 17)]
        first.row(0, 0, 32, sample=False)
        assert runner.launch(first.build()).collect().tokens.tolist() == []
        tails = [[9, 100, 3], [77]]
        second = PlanBuilder(2)
        for slot, tail in enumerate(tails, start=1):
            second.slot(slot, prefix + tail)
            second.page_writes += [(slot, 0, 40), (slot, 1, 17), (slot, 2, 50 + slot)]
            second.row(slot, 32, len(tail))
        found = runner.launch(second.build()).collect().tokens.tolist()
    assert found == [greedy_reference(model_of(family), prefix + tail, 1)[0][0] for tail in tails]


@pytest.mark.parametrize("family", ["gemma4", "gemma4-keys", "gemma4-experts", "llama4"])
def test_pytorchs_hand_reads_a_prefix_from_pages_of_any_order(tmp_path: Path, family: str) -> None:
    runner = torch_runner(settings(save(tmp_path / "model", family), page_size=4, max_total_tokens=1 << 10))
    prefix, pages = prompts()[2][:32], [40, 17, 3, 99, 4, 250, 7, 60]
    first = PlanBuilder(1)
    first.slot(0, prefix)
    first.page_writes += [(0, index, page) for index, page in enumerate(pages)]
    first.row(0, 0, 32, sample=False)
    runner.step(first.build())
    tails = [[9, 100, 3], [77]]
    second = PlanBuilder(2)
    for slot, tail in enumerate(tails, start=1):
        second.slot(slot, prefix + tail)
        second.page_writes += [(slot, index, page) for index, page in enumerate([*pages, 200 + slot])]
        second.row(slot, 32, len(tail))
    found = runner.step(second.build()).tokens.tolist()
    assert found == [greedy_reference(model_of(family), prefix + tail, 1)[0][0] for tail in tails]


def test_layers_that_read_the_keys_of_others_have_no_pages(tmp_path: Path) -> None:
    runner = torch_runner(settings(save(tmp_path / "model", "gemma4"), page_size=4, max_total_tokens=1 << 8))
    # Four layers have two key-value heads: two layers of size 24 and two of 40. Three more layers share these pages.
    assert runner.kv.page_bytes == 4 * 4 * 2 * 2 * (2 * 24 + 2 * 40)
    assert [runner.kv.layers[layer].keys.data_ptr() for layer in (4, 5, 6)] == [
        runner.kv.layers[layer].keys.data_ptr() for layer in (2, 3, 3)
    ]


@pytest.mark.parametrize("hand", ["torch", "rust"])
def test_inputs_in_place_of_tokens_have_the_own_inputs_of_padding(tmp_path: Path, hand: str) -> None:
    """As transformers does for images: embeddings have no token id, so layers use the per-layer inputs of padding."""
    model, count = model_of("gemma4"), 9
    embeds = torch.randn(count, model.config.hidden_size, generator=torch.Generator().manual_seed(4))
    arena = np.frombuffer(embeds.numpy().tobytes(), np.uint8).copy()
    values = settings(save(tmp_path / "model", "gemma4"), max_total_tokens=1 << 8, arena_bytes=len(arena))
    plan = PlanBuilder(1)
    plan.slot(0, [5] * count, embeds_offset=0)
    plan.page_writes.append((0, 0, 3))
    plan.row(0, 0, count)
    with ExitStack() as open_hands:
        if hand == "torch":
            runner: Any = torch_runner(values, arena)
        else:
            runner = open_hands.enter_context(rust(tmp_path, values))
            os.pwrite(runner.arena, arena.tobytes(), 0)
        found = runner.step(plan.build()).tokens.tolist()
    own = model.model.get_per_layer_inputs(torch.zeros(1, count, dtype=torch.long), None)
    with torch.inference_mode():
        logits = model(inputs_embeds=embeds[None], per_layer_inputs=own).logits[0, -1]
    assert found == [int(logits.argmax())]
