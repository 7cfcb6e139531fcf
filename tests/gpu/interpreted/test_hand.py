"""A whole hand with interpreted kernels gives the tokens of the CPU's hand."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from forebay.attention.triton import TritonAttention
from forebay.compute.choose import Choice
from forebay.compute.paged import PagedSteps
from forebay.gpu import choose, kernels, reference
from forebay.gpu.choose import MAPPED, VARIABLE
from forebay.gpu.interface import Kernels
from forebay.gpu.ops import GpuOps
from forebay.layers.ops import Ops
from tests.gpu.support import BOTH, WATCHED
from tests.hand.support import FAMILIES, MiniBrain, Request, Sampling, reference_model, runner_of

# In order: grouped queries; heads rotated by half, with norms, and experts; latent rows; chosen rows.
FAMILIES_OF_ONE_LAYER = ["llama", "glm4-moe", "deepseek-v3", "glm-dsa"]
LATER = Sampling(temperature=0.8, top_p=0.9, top_k=50, seed=5)


def one_layer(family: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A random model of a family, with one layer, which is not one of the dense ones."""
    kind, config = FAMILIES[family]
    values = {**config.to_dict(), "num_hidden_layers": 1, "first_k_dense_replace": 0}
    for key in ("indexer_types", "mlp_layer_types", "layer_types"):
        if values.get(key):
            values[key] = values[key][-1:] if key == "mlp_layer_types" else values[key][:1]
    monkeypatch.setitem(FAMILIES, "one-layer", (kind, type(config)(**values)))
    return reference_model("one-layer")


def tokens_of(model: Any, **changes: Any) -> list[list[int]]:
    """The tokens of a long prompt in two chunks and of a short one. The second request's four tokens are drawn."""
    requests = [Request(list(range(20, 33)), 4), Request([7, 99, 3], 4, LATER, arrival=2)]
    # Some steps have a chunk beside a row of one token.
    MiniBrain(runner_of(model, device="deferred", slots=2, **changes), lookahead=1).serve(requests, chunk=9)
    return [request.tokens for request in requests]


def use(operators: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes hands compute with these operators."""
    ops: Ops = GpuOps(operators)
    monkeypatch.setattr(Choice, "ops", lambda choice: ops)
    monkeypatch.setattr(Choice, "attention", lambda choice: TritonAttention(operators, null_page=0))
    # As on a small device, a row of one token is read in few parts.
    monkeypatch.setattr(sys.modules["forebay.gpu.kernels.chosen"], "splits", lambda programs, fill: 2)
    monkeypatch.setattr(sys.modules["forebay.gpu.kernels.parts"], "programs_of", lambda fill, blocks, rows: 2 * rows)


@BOTH
@pytest.mark.parametrize("family", FAMILIES_OF_ONE_LAYER)
def test_a_hand_with_these_operators(operators: Kernels, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = one_layer(family, monkeypatch)
    expected = tokens_of(model)
    assert all(len(tokens) == 4 for tokens in expected)
    use(operators, monkeypatch)
    assert tokens_of(model) == expected


def test_steps_whose_plans_the_device_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries choose positions, penalties and log-probabilities are kept by slot, and kernels copy the plan's words."""
    model = one_layer("glm-dsa", monkeypatch)

    def served(**changes: Any) -> list[Request]:
        told = Sampling(repetition_penalty=1.4, frequency_penalty=0.3, logprobs=2)
        found = [Request(list(range(20, 31)), 3, told), Request([7, 99, 3], 2, LATER, arrival=2)]
        runner = runner_of(model, slots=2, **changes)
        assert isinstance(runner._steps, PagedSteps) == bool(changes)
        MiniBrain(runner).serve(found, chunk=9)
        return found

    expected = served()
    monkeypatch.setenv(MAPPED, "1")
    monkeypatch.setattr(sys.modules["forebay.gpu.kernels.parts"], "programs_of", lambda fill, blocks, rows: 2 * rows)
    monkeypatch.setattr(sys.modules["forebay.gpu.kernels.chosen"], "splits", lambda programs, fill: 2)
    monkeypatch.setattr(sys.modules["forebay.gpu.kernels.apply"], "_PROGRAMS", 2)
    sizes = {"max_running_requests": 2, "chunked_prefill_size": 16}
    found = served(device="deferred", attention_backend="triton", **sizes)
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        for (ids, values), (known, exact) in zip(one.logprobs, other.logprobs, strict=True):
            assert ids.tolist() == known.tolist()
            np.testing.assert_allclose(values, exact, atol=1e-4)


def test_a_hand_with_keys_and_values_of_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = one_layer("qwen3", monkeypatch)
    # Runs operators one by one, which takes fewer programs than steps whose plans the device reads.
    monkeypatch.setattr(Choice, "check_kv_format", lambda choice: None)
    found = []
    for operators in (kernels, WATCHED):
        use(operators, monkeypatch)
        found.append(tokens_of(model, kv_cache_dtype="fp8_e4m3"))
    assert found[0] == found[1]


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert choose.kernels() is kernels
    monkeypatch.setenv(VARIABLE, "reference")
    assert choose.kernels() is reference
    monkeypatch.setenv(VARIABLE, "cuda")
    with pytest.raises(ValueError, match="'cuda' is not known: use triton or reference"):
        choose.kernels()
