"""Quantised products of the hand in Rust: against PyTorch with the same rounding, and with the blocks of files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from benchmarks.described import described
from forebay.layers.attention import Attention
from forebay.layers.decoder import Decoder
from forebay.layers.mlp import DenseFeed
from forebay.layers.moe import MixtureOfExperts
from forebay.layers.ops import Biases, HostOps
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from tests.hand.gguf_models import MIXED, WITHOUT_KERNELS, Form, tiny, write
from tests.hand.levels import built
from tests.hand.support import FAMILIES, MiniBrain, Request, Sampling, hf_config, random_model, wire_config
from tests.hand.test_gguf_experts import MODELS
from tests.hand.test_rust_hand import in_safetensors, rust, settings, torch_runner
from tests.weights.support import COMPUTED_AS, smollm2

Q = gguf.GGMLQuantizationType
Numbers = npt.NDArray[np.float32]


def rounded(x: torch.Tensor, shared: int) -> torch.Tensor:
    """Rounds x to 8 bits, with a scale for each group of `shared` elements."""
    parts = x.float().unflatten(-1, (-1, shared))
    scale = parts.abs().amax(-1, keepdim=True) / 127
    return (scale * (parts / scale.clamp_min(1e-30)).round()).flatten(-2)


def quantised_torch(monkeypatch: pytest.MonkeyPatch, shared: Callable[[torch.Tensor], int | None]) -> None:
    """Rounds the inputs of PyTorch's products as the kernels do.

    `shared`: the number of elements per scale, by weight.
    """
    exact = torch.nn.functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        count = shared(weight)
        return exact(x if count is None else rounded(x, count).to(x.dtype), weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)


class RoundedOps(HostOps):
    """Rounds the inputs of experts to 8 bits, with one scale for `shared` elements. None: one scale per row."""

    def __init__(self, shared: int | None) -> None:
        self._shared = shared

    def _products(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        biases: Biases | None,
        activation: str,
    ) -> torch.Tensor:
        products = torch.empty_like(rows)
        for row, expert in enumerate(ids.tolist()):
            of_gates, of_outputs = (0, 0) if biases is None else (bias[expert] for bias in biases)
            inner = self.gate(self._round(rows[row : row + 1]) @ gate_up[expert].T + of_gates, activation)
            products[row] = (self._round(inner) @ down[expert].T + of_outputs)[0]
        return products

    def _round(self, x: torch.Tensor) -> torch.Tensor:
        return rounded(x, self._shared or x.shape[-1]).to(x.dtype)


def routers(decoder: Decoder) -> set[int]:
    """The addresses of the routers, which are not quantised."""
    mixtures = [block.mlp for block in decoder.blocks if isinstance(block.mlp, MixtureOfExperts)]
    return {mixture.router.weight.data_ptr() for mixture in mixtures}


def round_weights(decoder: Decoder) -> None:
    """Rounds all matrices to 8 bits, with one scale per row."""
    for block in decoder.blocks:
        assert isinstance(block.attention, Attention)
        matrices = [block.attention.qkv.weight, block.attention.output.weight]
        dense: object = block.mlp
        if isinstance(dense, MixtureOfExperts):
            matrices += dense.stacks or ()
            dense = dense.shared
        if isinstance(dense, DenseFeed):
            matrices += [dense.gate_up.weight, dense.down.weight]
        for matrix in matrices:
            matrix.copy_(rounded(matrix, matrix.shape[-1]))
    # The head is quantised, but the embedding is not.
    decoder.head = rounded(decoder.head, decoder.head.shape[1])


def asked(vocabulary: int) -> list[Request]:
    random = np.random.default_rng(5)
    prompts = [random.integers(0, vocabulary, length).tolist() for length in (37, 1, 50, 80)]
    return [Request(prompt, 1, Sampling(logprobs=5), prompt_logprobs=0) for prompt in prompts]


def told(runner: Any, chunk: int = 23) -> Numbers:
    """The log-probabilities of the prompts' tokens."""
    found = asked(runner.config.model["config"]["vocab_size"])
    MiniBrain(runner, seed=2).serve(found, chunk)
    return np.concatenate([values[:1] for request in found for _, _, values in request.of_prompt])


def distance(found: Numbers, wanted: Numbers) -> float:
    """The root mean square of the differences, divided by the standard deviation of the wanted values."""
    return float(np.sqrt(np.square(found - wanted).mean()) / wanted.std())


def of_rust(folder: Path, values: dict[str, Any]) -> Numbers:
    with rust(folder, values) as runner:
        return told(runner)


def of_torch(values: dict[str, Any]) -> ModelRunner:
    """A runner that dequantises all matrices."""
    return torch_runner({**values, "quantization": None, "kv_cache_dtype": None})


def checkpoint(folder: Path, family: str, **changes: Any) -> dict[str, Any]:
    return settings(in_safetensors(folder, family), **changes)


def of_file(path: Path, **changes: Any) -> dict[str, Any]:
    return settings(described(path, path.parent / "cache"), **changes)


def check_int8(folder: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = checkpoint(folder, family, quantization="w8a8_int8")
    found = of_rust(folder, values)
    other = of_torch(values)
    exact = told(other)
    plain = routers(other.decoder)
    round_weights(other.decoder)
    other.decoder.ops = RoundedOps(None)
    quantised_torch(monkeypatch, lambda weight: None if weight.data_ptr() in plain else weight.shape[1])
    # Codes may differ by one if a number is halfway between two. So the bound is on the typical difference.
    assert distance(found, told(other)) < 0.02
    assert distance(found, exact) > 0.002, "int8 rounds"


@pytest.mark.parametrize("family", ["llama", "llama-untied-biases", "llama-mha", "qwen2-tied", "glm4-moe", "gemma3"])
def test_int8_is_that_of_torch_that_rounds(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_int8(tmp_path, family, monkeypatch)


def test_int8_at_every_level(tmp_path: Path, instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_int8(tmp_path, "qwen3-moe", monkeypatch)


def check_blocks(path: Path, types: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    values = of_file(path, quantization="gguf")
    found = of_rust(path.parent, values)
    other = of_torch(values)
    # A matrix whose type has no blocks is computed as without quantisation.
    attentions = [block.attention for block in other.decoder.blocks]
    plain = [of.output for of in attentions if isinstance(of, Attention) and types.get("attn_output") == Q.F16]
    addresses = {of.weight.data_ptr() for of in plain}
    for block in other.decoder.blocks if types.get("ffn_down") == Q.Q5_1 else ():
        # Q8_0 stores no minimum, so these weights become the nearest values of Q8_0.
        assert isinstance(block.mlp, DenseFeed)
        block.mlp.down.weight.copy_(rounded(block.mlp.down.weight, 32))
    quantised_torch(monkeypatch, lambda weight: None if weight.data_ptr() in addresses else 32)
    assert distance(found, told(other)) < 0.02


@pytest.mark.parametrize(
    ("types", "architecture", "tied"),
    [
        ({"": Q.Q4_0}, "llama", True),
        ({"": Q.Q4_1, "token_embd": Q.Q8_0}, "llama", True),
        ({"": Q.Q8_0}, "qwen3", False),
        ({"": Q.Q4_0, **WITHOUT_KERNELS}, "llama", True),
    ],
    ids=["q4_0", "q4_1", "q8_0", "without-kernels"],
)
def test_blocks_are_those_of_torch_that_rounds(
    tmp_path: Path, types: dict[str, Any], architecture: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_blocks(tiny(tmp_path / "model.gguf", types, architecture, tied=tied), types, monkeypatch)


def test_blocks_at_every_level(tmp_path: Path, instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    types = {"": Q.Q4_1, **MIXED}
    check_blocks(tiny(tmp_path / "model.gguf", types, "qwen2", tied=False), types, monkeypatch)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "MXFP4"])
def test_experts_stay_in_the_blocks_of_their_file(tmp_path: Path, kind: str) -> None:
    """Without `--quantization` all other matrices are dequantised."""
    values = of_file(write(tmp_path / "m.gguf", random_model(*MODELS["qwen3-moe"]), Form(kind=getattr(Q, kind))))
    found = of_rust(tmp_path, values)
    computed = COMPUTED_AS[kind]
    assert f"{kind};" in (stderr := (tmp_path / "stderr").read_text()) or f"{kind} as {computed};" in stderr
    other = of_torch(values)
    other.decoder.ops = RoundedOps(32)
    assert distance(found, told(other)) < 0.02


def test_gates_and_ups_of_different_types_have_one_that_holds_both(tmp_path: Path) -> None:
    form = Form(kind=Q.Q4_0, others={"blk.0.ffn_up_exps.weight": Q.Q5_0})
    values = of_file(write(tmp_path / "m.gguf", random_model(*MODELS["qwen3-moe"]), form))
    found = of_rust(tmp_path, values)
    other = of_torch(values)
    other.decoder.ops = RoundedOps(32)
    assert distance(found, told(other)) < 0.02


def test_a_file_is_computed_in_its_blocks_unless_asked_otherwise(tmp_path: Path) -> None:
    path = tiny(tmp_path / "model.gguf", {"": Q.Q4_1, **MIXED})
    found, facts = [], []
    for wanted in ("gguf", "auto", None):
        with rust(tmp_path, of_file(path, quantization=wanted)) as runner:
            found.append(told(runner))
            facts.append(runner.facts)
    assert np.array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])
    assert "Q4_1" in facts[0]["blocks"]
    assert [one["blocks"] for one in facts] == [facts[0]["blocks"]] * 2 + [""]
    assert facts[0]["weight_bytes"] < 0.6 * facts[2]["weight_bytes"]


def test_a_file_without_fitting_blocks_is_computed_in_the_models_type(tmp_path: Path) -> None:
    path = tiny(tmp_path / "model.gguf", {"": Q.F16})
    found, plain = (of_rust(tmp_path, of_file(path, quantization=wanted)) for wanted in ("auto", None))
    assert np.array_equal(found, plain)
    with pytest.raises(AssertionError, match=r"knows Q8_0, Q4_0, .*, TQ2_0, and no matrix"):
        of_rust(tmp_path, of_file(path, quantization="gguf"))


def test_blocks_are_multiplied_out_where_that_is_quicker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest instruction level has no products of bytes."""
    monkeypatch.setenv("FOREBAY_KERNELS", "baseline")
    of_rust(tmp_path, of_file(tiny(tmp_path / "model.gguf", {"": Q.Q4_1, **MIXED}), quantization="auto"))
    assert "computing with blocks" not in (tmp_path / "stderr").read_text()


def test_the_default_model_is_as_far_from_exact_as_rounding_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = described(smollm2(), tmp_path / "cache")
    # "The capital of France is". In a text without meaning, 30 layers would amplify a code that differs by one.
    prompt = [504, 3575, 282, 4649, 314]

    def best(runner: Any) -> tuple[list[int], dict[int, float]]:
        request = Request(prompt, 1, Sampling(logprobs=20))
        MiniBrain(runner).serve([request])
        ids, values = request.logprobs[0][:2]
        return request.tokens, dict(zip(ids[1:].tolist(), values[1:].tolist(), strict=True))

    def error(values: dict[int, float]) -> float:
        """Compares the tokens that both lists contain, because the last of the twenty may differ."""
        both = values.keys() & exact[1].keys()
        assert len(both) > 15
        return max(abs(values[token] - exact[1][token]) for token in both)

    values = settings(model, quantization="gguf")
    with rust(tmp_path, values) as runner:
        found = best(runner)
    other = of_torch(values)
    exact = best(other)
    quantised_torch(monkeypatch, lambda weight: 32)
    wanted = best(other)
    assert found[0] == exact[0] == wanted[0]
    assert 0 < error(found[1]) < max(0.2, 2 * error(wanted[1]))


@pytest.mark.parametrize("level", ["amx", "warp"])
def test_a_level_that_is_not_there_is_told(tmp_path: Path, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_KERNELS", level)
    values = checkpoint(tmp_path, "llama")
    if level in built():
        # If the processor lacks this level, the hand uses the best level that it has.
        assert np.isfinite(of_rust(tmp_path, values)).all()
        return
    with pytest.raises(AssertionError, match="use --hand torch"):
        of_rust(tmp_path, values)


REFUSED: Sequence[tuple[dict[str, Any], str]] = [
    ({"quantization": "fp4"}, "use w8a8_int8 or gguf"),
    ({"quantization": "gguf"}, "computed by the Rust hand on a CPU"),
    ({"quantization": "w8a8_int8"}, "computed by the Rust hand on a CPU"),
    ({"kv_cache_dtype": "int8"}, "is for the Rust hand on a CPU"),
    ({"kv_cache_dtype": "fp8"}, "kv cache dtype 'fp8' is not supported: use null or fp8_e4m3"),
    ({"kv_cache_dtype": "fp8_e4m3"}, "is for a GPU's kernels, and the device is cpu"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_pytorchs_hand_names_the_one_that_has_it(changes: dict[str, Any], message: str) -> None:
    config = hf_config(FAMILIES["llama"][1], "LlamaForCausalLM")
    with pytest.raises(ValueError, match=message):
        RunnerConfig.from_dict(wire_config(config, **changes))
