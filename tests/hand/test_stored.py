"""Quantised checkpoints: dequantised on a CPU, and kept as they are where a GPU's operators compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from forebay.compute.paged import PagedSteps
from forebay.gpu import reference
from forebay.gpu.choose import VARIABLE
from forebay.gpu.interface import Kernels
from forebay.gpu.products import FUSED, MANY_ROWS, GpuProducts, fuses
from forebay.layers.attention import Attention
from forebay.layers.mlp import DenseFeed
from forebay.layers.moe import MixtureOfExperts
from forebay.runner.runner import ModelRunner
from forebay.state.config import ConfigError, RunnerConfig
from forebay.weights.errors import ModelError
from tests.gpu.checks.codes import Codes, Shape
from tests.hand.named_models import NAMED
from tests.hand.stored_models import (
    Format,
    Weights,
    awq,
    fp8_blocks,
    fp8_channels,
    fp8_tensors,
    gptq,
    pack_quantized,
    quantised,
)
from tests.hand.support import (
    QWEN3_MOE,
    MiniBrain,
    Request,
    greedy_reference,
    hf_config,
    products_of_floats,
    random_model,
    reference_model,
    runner_of,
    wire_config,
)
from tests.hand.test_checkpoints import COUNT, PROMPT, loaded, saved, tokens

FORMATS = {
    "blocks": fp8_blocks(16),
    "blocks of 6": fp8_blocks(6),
    "channels": fp8_channels(),
    "tensors": fp8_tensors(),
    "awq": awq(32),
    "gptq": gptq(32),
    "gptq v2": gptq(32, version=2),
    "gptq desc_act": gptq(32, desc_act=True),
    "packed": pack_quantized(32),
    "packed channels": pack_quantized(None),
    "packed zero points": pack_quantized(32, symmetric=False, actorder=True),
}
DEVICES = pytest.mark.parametrize("device", ["cpu", "deferred"])
GPU: dict[str, Any] = {"device": "deferred", "attention_backend": "triton", "chunked_prefill_size": 64}


OTHER_NAMES = ["blocks of 6", "channels", "awq", "gptq desc_act", "packed"]
"""Formats for families that fuse matrices, in another order or under other names."""


@pytest.fixture(autouse=True)
def _twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "reference")


def hand(model: dict[str, Any], device: str, **changes: Any) -> ModelRunner:
    runner = loaded(model, **(GPU if device == "deferred" else {}), **changes)
    runner.warm_up()
    return runner


@DEVICES
@pytest.mark.parametrize("form", OTHER_NAMES)
@pytest.mark.parametrize("family", ["phi3", "ernie4_5", "minimax-m2"])
def test_matrices_under_other_names_are_read(tmp_path: Path, family: str, form: str, device: str) -> None:
    model = random_model(*NAMED[family])
    described = quantised(tmp_path, model, FORMATS[form])
    assert tokens(hand(described, device)) == greedy_reference(model, PROMPT, COUNT)[0]


def dense_parts(runner: ModelRunner) -> tuple[Attention, DenseFeed]:
    block = runner.decoder.blocks[0]
    assert isinstance(block.attention, Attention)
    assert isinstance(block.mlp, DenseFeed)
    return block.attention, block.mlp


@DEVICES
@pytest.mark.parametrize("name", FORMATS)
def test_tokens_are_those_of_the_weights_that_are_meant(name: str, device: str, tmp_path: Path) -> None:
    model = reference_model("qwen2")
    runner = hand(quantised(tmp_path, model, FORMATS[name]), device, graph_rows=2)
    assert tokens(runner) == greedy_reference(model, PROMPT, COUNT)[0]
    if device == "deferred":
        assert isinstance(runner._steps, PagedSteps)
        assert runner._steps.graphs.count
        attention, mlp = dense_parts(runner)
        # Blocks of 6 columns have no kernel.
        kept = [linear.kept is not None for linear in (attention.qkv, attention.output, mlp.gate_up, mlp.down)]
        assert kept == [name != "blocks of 6"] * 4


def experts(inner: int) -> Any:
    config = {**QWEN3_MOE, "moe_intermediate_size": inner}
    return random_model(Qwen3MoeForCausalLM, Qwen3MoeConfig(**config, norm_topk_prob=True))


@DEVICES
@pytest.mark.parametrize(
    ("name", "inner"), [("blocks", 32), ("blocks", 24), ("awq", 32), ("packed", 32), ("gptq desc_act", 32)]
)
def test_experts(name: str, inner: int, device: str, tmp_path: Path) -> None:
    model = experts(inner)
    runner = hand(quantised(tmp_path, model, FORMATS[name]), device)
    assert tokens(runner) == greedy_reference(model, PROMPT, COUNT)[0]
    mixture = runner.decoder.blocks[1].mlp
    assert isinstance(mixture, MixtureOfExperts)
    # With `desc_act` each expert has its own order of inputs, so its codes are not kept.
    assert (mixture._kept is not None) == (device == "deferred" and name != "gptq desc_act")


@DEVICES
@pytest.mark.parametrize("family", ["deepseek-v3", "deepseek-v32"])
def test_latent_attention(family: str, device: str, tmp_path: Path) -> None:
    model = reference_model(family)
    runner = hand(quantised(tmp_path, model, FORMATS["blocks"]), device)
    assert tokens(runner) == greedy_reference(model, PROMPT, COUNT)[0]


@DEVICES
def test_layers_that_are_left_out(device: str, tmp_path: Path) -> None:
    """If one part of a fused matrix is left out, the whole fused matrix is dequantised."""
    model = reference_model("llama")
    checkpoint = quantised(tmp_path, model, awq(32), lambda name: "layers.0.mlp" in name or "0.self_attn.k_" in name)
    runner = hand(checkpoint, device)
    assert tokens(runner) == greedy_reference(model, PROMPT, COUNT)[0]
    if device == "deferred":
        attention, mlp = dense_parts(runner)
        assert [linear.kept is None for linear in (attention.qkv, attention.output, mlp.down)] == [True, False, True]


def test_weights_take_the_bits_of_the_checkpoint(tmp_path: Path) -> None:
    sizes = {}
    for name in (None, "channels", "packed"):
        model = reference_model("llama")
        folder = tmp_path / str(name)
        checkpoint = saved(folder, model) if name is None else quantised(folder, model, FORMATS[name])
        sizes[name] = hand(checkpoint, "deferred", dtype="bfloat16").weight_bytes
    matrices = 3 * (64 * (64 + 2 * 32 + 64) + 3 * 64 * 96)
    outputs = 3 * (64 + 2 * 32 + 64 + 2 * 96 + 64)
    groups = 3 * (64 * 2 + 64 * 2 + 64 * 2 + 2 * 96 * 2 + 64 * 3)
    assert sizes[None] - sizes["channels"] == matrices - 4 * outputs
    assert sizes[None] - sizes["packed"] == 3 * matrices // 2 - 5 * groups


# Products of 8-bit floats.


def logits_of(runner: ModelRunner) -> torch.Tensor:
    request = Request(PROMPT, COUNT, prompt_logprobs=0)
    MiniBrain(runner).serve([request])
    return torch.tensor([values[0] for _, _, values in request.of_prompt])


@pytest.mark.parametrize("flag", [None, "fp8"])
def test_activations_become_8_bit_floats(flag: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is quantised or not. The result is close to that in float32."""
    model = reference_model("qwen2")
    checkpoint = quantised(tmp_path, model, fp8_channels()) if flag is None else saved(tmp_path, model)
    called = products_of_floats(monkeypatch)
    runner = hand(checkpoint, "deferred", dtype="bfloat16", quantization=flag)
    found = logits_of(runner)
    assert called
    expected = logits_of(runner_of(model))
    # Rounding both inputs to 4 significant bits changes a product of a random matrix by a few hundredths.
    assert 0 < (found - expected).abs().mean() < 0.15 * expected.abs().mean()
    assert called[0][0].dtype == called[0][1].dtype == torch.float8_e4m3fn


def test_8_bit_floats_of_other_weights_are_for_gpus(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, reference_model("llama"))
    with pytest.raises(ModelError, match="fp8 makes 8-bit floats for a GPU's kernels"):
        loaded(checkpoint, quantization="fp8")
    with pytest.raises(ModelError, match="awq is not what the model has: the checkpoint has no quantization_config"):
        loaded(checkpoint, quantization="awq")


@DEVICES
def test_a_flag_that_names_the_checkpoint_changes_nothing(device: str, tmp_path: Path) -> None:
    model = reference_model("llama")
    checkpoint = quantised(tmp_path, model, gptq(32))
    assert tokens(hand(checkpoint, device, quantization="gptq")) == greedy_reference(model, PROMPT, COUNT)[0]
    with pytest.raises(ModelError, match="awq is not what the model has: the checkpoint is quantised by gptq"):
        hand(checkpoint, device, quantization="awq")


@DEVICES
def test_integers_are_made_by_the_rust_hand(device: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="w8a8_int8 is computed by the Rust hand on a CPU"):
        hand(quantised(tmp_path, reference_model("llama"), awq(32)), device, quantization="w8a8_int8")


@pytest.mark.parametrize("name", ["blocks", "channels", "gptq desc_act", "packed"])
def test_dummy_weights(name: str) -> None:
    """The checkpoint has no files, and its config states which matrices are quantised."""
    model = reference_model("llama")
    stored = FORMATS[name].config | ({"ignore": ["re:.*down_proj"]} if name == "packed" else {})
    config = hf_config(model.config, "LlamaForCausalLM") | {"quantization_config": stored}
    runner = ModelRunner(RunnerConfig.from_dict(wire_config(config, **GPU)))
    runner.load(lambda done, total: None)
    runner.warm_up()
    assert len(tokens(runner)) == COUNT
    attention, mlp = dense_parts(runner)
    assert attention.qkv.kept is not None
    assert (mlp.down.kept is None) == (name == "packed")


# Checkpoints with errors.

Q = "model.layers.1.self_attn.q_proj"


def drop(end: str) -> Callable[[Weights], Any]:
    return lambda weights: weights.pop(f"{Q}.{end}")


def of(end: str, tensor: torch.Tensor) -> Callable[[Weights], Any]:
    return lambda weights: weights.update({f"{Q}.{end}": tensor})


@DEVICES
@pytest.mark.parametrize(
    ("format_", "change", "message"),
    [
        (awq(32), drop("qzeros"), rf"{Q}.qweight is quantised, and the checkpoint has no {Q}.qzeros"),
        (gptq(32), drop("scales"), rf"no {Q}.scales for it"),
        (pack_quantized(32), drop("weight_shape"), rf"no {Q}.weight_shape for it"),
        (gptq(32), of("scales", torch.ones(3, 64)), r"scales is \[3, 64\].* wants \[2, 64\]"),
        (awq(32), of("qweight", torch.ones(64, 8)), "of the type F32, and 4-bit codes are read of words"),
        (awq(32), of("qweight", torch.ones(32, 8).int()), r"a matrix of \[64, 32\]"),
        (gptq(32), of("g_idx", torch.zeros(64).int()), "groups that are not of 32 inputs each"),
        (gptq(32), of("g_idx", torch.arange(64).flip(0).int() // 32), "the config does not say so"),
        (fp8_channels(), of("weight_scale", torch.ones(3, 1)), r"weight_scale is \[3, 1\]"),
        (fp8_channels(), drop("weight_scale"), f"no {Q}.weight_scale for it"),
    ],
)
def test_broken_checkpoints(
    format_: Format, change: Callable[[Weights], Any], message: str, device: str, tmp_path: Path
) -> None:
    model = reference_model("llama")
    with pytest.raises(ModelError, match=message):
        hand(quantised(tmp_path, model, format_, change=change), device)


def test_orders_that_differ_among_fused_matrices(tmp_path: Path) -> None:
    def change(weights: Weights) -> None:
        weights[f"{Q}.g_idx"] = weights[f"{Q}.g_idx"].flip(0)

    model = reference_model("llama")
    checkpoint = quantised(tmp_path, model, gptq(32, desc_act=True), change=change)
    with pytest.raises(
        ModelError, match=r"q_proj.weight has its inputs in another order than model\.layers\.1\.self_attn\.[kv]_proj"
    ):
        hand(checkpoint, "deferred")


@DEVICES
def test_biases_that_only_tools_have_written(device: str, tmp_path: Path) -> None:
    model = reference_model("llama")
    names = [f"{Q}.bias", "model.layers.0.mlp.up_proj.bias"]

    def zero(weights: Weights) -> None:
        weights.update({name: torch.zeros(64) for name in names})

    runner = hand(quantised(tmp_path / "zero", model, gptq(32), change=zero), device)
    assert tokens(runner) == greedy_reference(model, PROMPT, COUNT)[0]

    def others(weights: Weights) -> None:
        weights[names[0]] = torch.ones(64)

    with pytest.raises(ModelError, match=f"the checkpoint has {names[0]}, which the model does not have"):
        hand(quantised(tmp_path / "others", model, gptq(32), change=others), device)


@pytest.mark.parametrize("shape", [(128, 128, 1, 0), (128, 128, 128, 0), (128, 128, 1, 128)])
def test_only_a_scale_a_row_goes_to_pytorchs_product(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a block as wide as its matrix spans many rows, so it is not a scale for each row."""
    codes, called = Codes.random(256, shape, 0), list[Shape]()
    monkeypatch.setattr(torch, "_scaled_mm", lambda *_, **__: called.append(shape))
    # As in layers without an order of columns.
    matrix: Any = SimpleNamespace(**vars(codes), order=None)
    x = torch.randn(5, 128).bfloat16()
    given = GpuProducts(reference, floats=True).product(x, matrix, None)
    assert bool(called) == (shape == (128, 128, 1, 0))
    if not called:
        torch.testing.assert_close(given, reference.product(x, codes, None), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("rows", "dtype", "operator"),
    [
        (MANY_ROWS + 1, torch.bfloat16, "expand"),
        (MANY_ROWS, torch.bfloat16, "product"),
        (MANY_ROWS + 1, torch.float32, "product"),
    ],
)
def test_codes_of_many_rows_are_multiplied_out(rows: int, dtype: torch.dtype, operator: str) -> None:
    kernels, codes = Noting(), Codes.random(40, (128, 128, 1, 128), 0)
    matrix: Any = SimpleNamespace(**vars(codes), order=None)
    x = torch.randn(rows, 128).to(dtype)
    given = GpuProducts(cast(Kernels, kernels), floats=False).product(x, matrix, None)
    assert kernels.called == [operator]
    expected = x.double() @ codes.values().T
    torch.testing.assert_close(given.double(), expected, atol=0.02 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("rows", "dtype", "own"), [(1, torch.bfloat16, True), (2, torch.bfloat16, False), (1, torch.float32, False)]
)
def test_one_row_has_an_operator_of_its_own_unless_its_bits_would_depend_on_that(
    rows: int, dtype: torch.dtype, own: bool
) -> None:
    kernels, x, weight = Noting(), torch.randn(rows, 64).to(dtype), torch.randn(9, 64).to(dtype)
    given = GpuProducts(cast(Kernels, kernels), floats=False).dense(x, weight, None)
    assert kernels.called == (["one_row"] if own else [])
    torch.testing.assert_close(given, torch.nn.functional.linear(x, weight), atol=0.1, rtol=0)


@pytest.mark.parametrize(("asked", "own"), [("1", True), ("0", False)])
def test_a_gate_is_part_of_a_product_of_one_row_where_the_environment_asks_for_it(
    asked: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FUSED, asked)
    kernels, weight = Noting(), torch.randn(12, 64).bfloat16()
    products = GpuProducts(cast(Kernels, kernels), floats=False, fused=fuses())
    for x in (torch.randn(2, 64).bfloat16(), torch.randn(1, 64)):
        assert products.gated(x, weight.to(x.dtype), None, "silu") is None
    x = torch.randn(1, 64).bfloat16()
    given = products.gated(x, weight, None, "silu")
    assert kernels.called == (["one_row_gated"] if own else [])
    assert (given is not None) == own
    if given is not None:
        gates, ups = torch.nn.functional.linear(x, weight).chunk(2, dim=-1)
        torch.testing.assert_close(given, torch.nn.functional.silu(gates) * ups, atol=0.3, rtol=0.02)


class Noting:
    """Calls the reference operators, and records their names."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.called.append(name)
        return getattr(reference, name)
