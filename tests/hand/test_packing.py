"""The memory that weights take is known before they are loaded, and the pool gets the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from forebay.compute import native
from forebay.compute.prompts import slice_bytes
from forebay.device.cpu import CpuDevice
from forebay.kernels.packing import Packing, head_packing, pack, plain_parts
from forebay.layers.params import ignore
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from forebay.state.pages import page_bytes
from forebay.weights.config import ModelConfig
from forebay.weights.pooling import Pooling
from tests.hand.support import FAMILIES, hf_config, reference_model, runner_of, wire_config
from tests.hand.test_kept import LIMIT, in_gguf, safetensors
from tests.hand.test_quantised import MIXED, WITHOUT_KERNELS

Q = gguf.GGMLQuantizationType
WAYS = [("float32", None), ("bfloat16", None), ("float32", "w8a8_int8"), ("bfloat16", "w8a8_int8")]


def packed_bytes(runner: ModelRunner) -> int:
    """What the tensors of a runner take that has computed a step."""
    params = runner.model.params
    assert params.packed
    return sum(tensor.nbytes for tensor in [*params.others.values(), *params.packed.values()])


def of(model: dict[str, Any], **changes: Any) -> ModelRunner:
    """A runner of a checkpoint, with nothing loaded yet."""
    config = wire_config({}, load_format="auto", page_size=16, **changes)
    return ModelRunner(RunnerConfig.from_dict({**config, "model": model}))


@pytest.mark.parametrize("family", ["llama", "llama-untied-biases", "llama-head-dim", "qwen2-tied", "qwen3"])
@pytest.mark.parametrize(("dtype", "quantization"), WAYS)
def test_a_checkpoint_takes_what_was_said(family: str, dtype: str, quantization: str | None) -> None:
    runner = runner_of(reference_model(family), dtype=dtype, quantization=quantization)
    said = runner.weight_bytes
    runner.warm_up()
    assert packed_bytes(runner) == said == runner.weight_bytes == runner.facts()["weight_bytes"]


@pytest.mark.parametrize(
    ("types", "architecture", "tied"),
    [
        ({"": Q.Q4_1, "token_embd": Q.Q8_0}, "llama", True),
        ({"": Q.Q4_0, "token_embd": Q.F16}, "qwen2", True),
        ({"": Q.Q8_0}, "qwen3", False),
        ({"": Q.Q4_1, **MIXED}, "qwen2", False),
        ({"": Q.Q4_0, **WITHOUT_KERNELS}, "llama", True),
    ],
)
@pytest.mark.parametrize("quantization", [None, "w8a8_int8", "gguf"])
def test_a_file_in_blocks_takes_what_was_said(
    types: dict[str, Any], architecture: str, tied: bool, quantization: str | None, tmp_path: Path
) -> None:
    runner = of(in_gguf(tmp_path, types, architecture, tied), dtype="bfloat16", quantization=quantization)
    said = runner.weight_bytes
    runner.load(ignore)
    runner.warm_up()
    assert packed_bytes(runner) == said


@pytest.mark.parametrize("quantization", [None, "w8a8_int8"])
def test_weights_of_an_earlier_start_take_what_was_said(quantization: str | None, tmp_path: Path) -> None:
    model = safetensors(tmp_path)
    said = []
    for _ in range(2):
        runner = of(model, weight_cache_bytes=LIMIT, quantization=quantization)
        said.append(runner.weight_bytes)
        runner.load(ignore)
        runner.warm_up()
        assert packed_bytes(runner) == said[-1]
        if thread := runner.keep_weights():
            thread.join(60)
    assert said[0] == said[1]
    assert thread is None


def test_what_torch_computes_with_is_what_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    config = hf_config(FAMILIES["llama-untied-biases"][1], "LlamaForCausalLM")
    pooling = Pooling("embed", "last", 64, normalize=True, function="identity", max_length=None)
    wire = wire_config(config)
    packed = ModelRunner(RunnerConfig.from_dict(wire))
    wire["model"]["pooling"] = pooling.to_dict()
    pooled = ModelRunner(RunnerConfig.from_dict(wire))
    # Both are packed, and one of them has no head.
    assert packed.weight_bytes - pooled.weight_bytes == head_packing(packed.decoder).nbytes
    monkeypatch.setenv("FOREBAY_KERNELS", "torch")
    for values in (wire, wire_config(config)):
        plain = ModelRunner(RunnerConfig.from_dict(values))
        assert plain.weight_bytes == plain.model.params.nbytes


@pytest.mark.parametrize(("dtype", "quantization"), WAYS)
def test_the_pool_gets_what_packed_weights_leave(
    dtype: str, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    available = 16 << 20
    monkeypatch.setattr(CpuDevice, "available_bytes", lambda _: available)
    settings: dict[str, Any] = {"dtype": dtype, "quantization": quantization, "slots": 1000, "max_total_tokens": None}
    runner = runner_of(reference_model("llama"), **settings)
    runner.warm_up()
    model, config = runner.model_config, runner.config
    assert isinstance(model, ModelConfig)
    step = slice_bytes(model.vocab_size, config.chunked_prefill_size)
    left = int(config.mem_fraction_static * available) - packed_bytes(runner) - step
    assert runner.kv.page_count == left // page_bytes(model, config.page_size, config.dtype)


def test_matrices_go_one_by_one_as_they_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(reference_model("llama-untied-biases"))
    down = plain_parts(runner.decoder.blocks[0])[1].down
    held: list[int] = []

    def count(weight: torch.Tensor, packing: Packing, packed: torch.Tensor) -> None:
        held.append(runner.model.params.count + (packing.name != down.name and down.weight.numel() > 0))
        pack(weight, packing, packed)

    monkeypatch.setattr(native, "pack", count)
    runner.warm_up()
    # A layer is packed from its queries to its `down`: until then that is there, and nothing else holds any.
    assert held == [1, 1, 1, *[0] * (len(held) - 3)]
    assert len(held) == 4 * 3 + 1
