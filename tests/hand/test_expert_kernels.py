"""Experts in the compiled kernels: in every form that they are stored in, against PyTorch, and in any company."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from forebay.kernels.packing import compiled_parts
from forebay.layers.moe import MixtureOfExperts, Stack
from forebay.layers.ops import Biases, HostOps
from forebay.runner.runner import ModelRunner
from tests.hand.gguf_models import Form, write
from tests.hand.support import random_model, runner_of
from tests.hand.test_gguf_experts import QWEN3
from tests.hand.test_quantised import check, check_company, fill, loaded, native, reference, rounded, rows

Q = gguf.GGMLQuantizationType
KINDS = {"Q8_0": Q.Q8_0, "Q4_0": Q.Q4_0, "Q4_1": Q.Q4_1, "MXFP4": Q.MXFP4}
COMPUTED = {**{name: name for name in KINDS}, "Q5_0": "Q8_0"}
INNER = 32


class RoundedOps(HostOps):
    """Has the rows of experts rounded to 8 bits with a scale for every `shared` elements; None: for every row."""

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


@cache
def model(dense: bool = False) -> Any:
    """Whose every layer has experts, or half of them."""
    changes: dict[str, Any] = {"decoder_sparse_step": 2} if dense else {}
    return random_model(Qwen3MoeForCausalLM, Qwen3MoeConfig(**QWEN3, **changes))


def of_file(tmp_path: Path, kind: str, dtype: str = "float32", quantization: str | None = None) -> ModelRunner:
    path = tmp_path / f"{kind}.gguf"
    if not path.exists():
        write(path, model(), Form(kind=getattr(Q, kind)))
    return loaded(path, dtype, quantization)


def mixtures(runner: ModelRunner) -> list[MixtureOfExperts]:
    """Of all layers, each of which has one."""
    found = [block.mlp for block in runner.decoder.blocks]
    return [mixture for mixture in found if isinstance(mixture, MixtureOfExperts)]


def stacks(runner: ModelRunner) -> list[Stack]:
    """Of all layers."""
    return [stack for mixture in mixtures(runner) for stack in mixture.stacks or ()]


def formats(runner: ModelRunner) -> set[str | None]:
    """Of what is no expert's."""
    attentions = [compiled_parts(block)[0] for block in runner.decoder.blocks]
    return {of.format for attention in attentions for of in (attention.qkv, attention.output)}


@pytest.mark.parametrize("kind", COMPUTED)
@pytest.mark.parametrize("quantization", [None, "w8a8_int8", "gguf"])
def test_experts_stay_in_the_blocks_of_their_file(
    tmp_path: Path, kind: str, quantization: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    runner = of_file(tmp_path, kind, quantization=quantization)
    assert {stack.format for stack in stacks(runner)} == {COMPUTED[kind]}
    assert formats(runner) == {{None: None, "w8a8_int8": "INT8", "gguf": COMPUTED[kind]}[quantization]}
    count = len(stacks(runner)) // 2 * 8 * 3
    told = f"{kind}" if kind == COMPUTED[kind] else f"{kind} as {COMPUTED[kind]}"
    if quantization != "gguf":
        assert f"computing with blocks of the file: {count} {told};" in capfd.readouterr().err
    logits = native(runner).logits(rows([(0, 0, 20), (1, 0, 1)]))
    assert bool(logits.isfinite().all())


@pytest.mark.parametrize("kind", COMPUTED)
def test_logits_of_blocks_are_those_of_torch_that_rounds(
    tmp_path: Path, kind: str, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = native(of_file(tmp_path, kind))
    monkeypatch.setenv("FOREBAY_KERNELS", "torch")
    other = of_file(tmp_path, kind)
    assert {stack.format for stack in stacks(other)} == {None}
    other.decoder.ops = RoundedOps(32)
    check(compute, reference(other))


def int8(dtype: str = "float32", quantization: str | None = "w8a8_int8", dense: bool = False) -> ModelRunner:
    return fill(runner_of(model(dense), dtype=dtype, page_size=16, quantization=quantization))


def test_int8_logits_are_those_of_torch_that_rounds(instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = native(int8())
    other = int8(quantization=None)
    decoder = other.decoder
    for block in decoder.blocks:
        attention, _, _ = compiled_parts(block)
        for of in (attention.qkv, attention.output):
            of.weight.copy_(rounded(of.weight, of.weight.shape[1]))
    for stack in stacks(other):
        stack.weight.copy_(rounded(stack.weight, stack.inputs))
    decoder.head = rounded(decoder.head, decoder.head.shape[1])
    decoder.ops = RoundedOps(None)
    exact, routers = torch.nn.functional.linear, {id(mixture.router.weight) for mixture in mixtures(other)}

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return exact(x if id(weight) in routers else rounded(x, x.shape[-1]).to(x.dtype), weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    check(compute, reference(other))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["plain", "some-dense", "int8", *KINDS])
def test_a_row_gets_the_same_bits_in_any_company(tmp_path: Path, dtype: str, kind: str, instructions: str) -> None:
    def runner() -> ModelRunner:
        if kind in KINDS:
            return of_file(tmp_path, kind, dtype)
        return int8(dtype, "w8a8_int8" if kind == "int8" else None, kind == "some-dense")

    check_company(runner)


def test_experts_take_the_memory_of_their_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = of_file(tmp_path, "Q4_0")
    of_blocks = int(runner.facts()["weight_bytes"])
    native(runner)
    held = sum(
        tensor.nbytes for tensor in (*runner.decoder.params.packed.values(), *runner.decoder.params.others.values())
    )
    assert held == of_blocks
    monkeypatch.setenv("FOREBAY_KERNELS", "torch")
    plain = int(of_file(tmp_path, "Q4_0").facts()["weight_bytes"])
    values = len(stacks(runner)) // 2 * 8 * 3 * INNER * 64
    assert plain - of_blocks > values * (4 - 18 / 32) * 0.9


def test_gates_and_ups_of_different_types_have_one_that_holds_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "m.gguf", model(), Form(kind=Q.Q4_0, others={"blk.0.ffn_up_exps.weight": Q.Q5_0}))
    runner = loaded(path, quantization=None)
    assert [stack.format for stack in stacks(runner)] == ["Q8_0", "Q4_0"] + ["Q4_0"] * (len(stacks(runner)) - 2)
    compute = native(runner)
    monkeypatch.setenv("FOREBAY_KERNELS", "torch")
    other = loaded(path, quantization=None)
    other.decoder.ops = RoundedOps(32)
    check(compute, reference(other))
